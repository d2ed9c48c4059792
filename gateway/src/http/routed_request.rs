//! What a route makes of a request: which part of its body names the model, what exactly the engine is asked, and
//! whether the request may wait for it.
//!
//! A body is read for the model's name and for whether a stream is wanted, and is then sent as it came. Where the
//! engine knows the model by another name, the pieces before and after that one value are sent around the new one: no
//! body is ever held twice.

use std::{borrow::Cow, ops::Range, sync::Arc};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, header, request, uri::PathAndQuery};
use rouse::{
    fault::Fault,
    model::{ModelName, ModelNameIndex},
};
use rouse_net::{
    openai::{
        multipart,
        routing_fields::{self, ConversationPrefix, RoutingFields},
    },
    relay::Payload,
};

use super::{
    client_text,
    passthrough::PassthroughTarget,
    route::{BodyEncoding, InferenceRoute},
    suggestions,
};
use crate::{
    config::{self, EngineKind},
    keys::ApiKey,
};

/// One request for an engine.
#[derive(Debug)]
pub(super) struct RoutedRequest {
    pub(super) method: Method,
    /// What the engine is asked.
    pub(super) path: PathAndQuery,
    /// It queues for its model and wakes it. What only looks does neither: a monitor must not keep a GPU busy.
    pub(super) may_park: bool,
    /// `stream: true` means server-sent events.
    pub(super) may_stream: bool,
    /// A model reads it, or makes something of it: not only its tokenizer.
    pub(super) runs_model: bool,
    /// `background` means here that nobody waits for the answer. Elsewhere it is another thing: an image's, say.
    rejects_background: bool,
    path_model: Option<PathModel>,
    body_format: BodyFormat,
}

/// A body, and where in it the model's name stands.
#[derive(Debug)]
pub(crate) struct RoutedBody {
    body: Bytes,
    /// Empty where there is none.
    model_range: Range<usize>,
    /// Where it is not what stands there.
    model_name: Option<String>,
    /// It is no JSON.
    is_multipart: bool,
}

/// Whom the path names.
#[derive(Debug)]
struct PathModel {
    model: ModelName,
    requested_name: String,
    spec: Arc<config::EngineConfig>,
}

/// How a body names its model.
#[derive(Clone, Debug)]
enum BodyFormat {
    Json,
    /// By this boundary. `named`: it must name a model.
    Multipart {
        boundary: Bytes,
        model_required: bool,
    },
    /// An engine's own: it need not name one. `json`: what is no JSON is refused.
    ModelOptional {
        json_required: bool,
    },
    Empty,
}

impl RoutedRequest {
    /// On a route whose body names the model.
    pub(super) fn for_inference(inference: InferenceRoute, parts: &request::Parts) -> Result<Self, Fault> {
        let body = match inference.body_encoding() {
            BodyEncoding::Json => BodyFormat::Json,
            BodyEncoding::Multipart => BodyFormat::multipart(&parts.headers, true)?,
        };
        Ok(Self {
            method: Method::POST,
            path: parts.uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/")),
            may_park: true,
            may_stream: inference.may_stream(),
            runs_model: inference.runs_model(),
            rejects_background: inference == InferenceRoute::Responses,
            path_model: None,
            body_format: body,
        })
    }

    /// On an engine's own path.
    pub(super) fn for_passthrough(found: PassthroughTarget, parts: &request::Parts) -> Result<Self, Fault> {
        let asks = parts.method == Method::POST;
        let known = InferenceRoute::from_path(found.path.path());
        let body = match known {
            _ if !asks => BodyFormat::Empty,
            _ if content_type_contains(&parts.headers, "multipart/form-data") => {
                BodyFormat::multipart(&parts.headers, false)?
            }
            _ => BodyFormat::ModelOptional {
                json_required: found.spec.kind != EngineKind::Custom
                    || content_type_contains(&parts.headers, "json"),
            },
        };
        Ok(Self {
            method: parts.method.clone(),
            may_park: asks,
            // What has no route here is an engine's own invention, and those all say it alike.
            may_stream: asks && known.is_none_or(InferenceRoute::may_stream),
            runs_model: known.is_none_or(InferenceRoute::runs_model),
            rejects_background: known == Some(InferenceRoute::Responses),
            path_model: Some(PathModel {
                model: found.model,
                requested_name: found.requested_name,
                spec: found.spec,
            }),
            body_format: body,
            path: found.path,
        })
    }

    /// Reads what routing needs of the body. A head without a name has an empty range.
    pub(super) async fn read_routing_fields<'a>(&self, body: &'a Bytes) -> Result<RoutingFields<'a>, Fault> {
        let mut head = if body.len() <= routing_fields::MAX_ON_CORE_BYTES {
            self.body_format.read_routing_fields(body)
        } else {
            // Away from this core's streams.
            let (shape, body) = (self.body_format.clone(), body.clone());
            let read = tokio::task::spawn_blocking(move || {
                shape.read_routing_fields(&body).map(RoutingFields::into_owned)
            });
            read.await.map_err(|_| Fault::Internal)?
        }?;
        if head.background && self.rejects_background {
            let message = "background responses are not kept: send the request without 'background'";
            return Err(invalid(message.into(), Some("background")));
        }
        head.stream &= self.may_stream;
        Ok(head)
    }

    /// The model that is meant. A path and a body that name different ones contradict each other.
    pub(super) fn resolve_model(
        &self,
        head: &RoutingFields<'_>,
        registry: &ModelNameIndex,
        key: Option<&ApiKey>,
    ) -> Result<ModelName, Fault> {
        let named = head.model.as_ref();
        let found = registry.find(named);
        let Some(PathModel { model, requested_name: spelled, spec }) = &self.path_model else {
            return found.cloned().ok_or_else(|| suggestions::model_not_found(registry, key, named));
        };
        let agree = match found {
            Some(found) => found == model,
            None => head.model_range.is_empty() || named == spec.served_name,
        };
        if agree {
            return Ok(model.clone());
        }
        let (path, body) = (client_text::sanitize(spelled), client_text::sanitize(named));
        let message = format!("the path names the model '{path}' and the body '{body}'");
        Err(invalid(message, Some("model")))
    }

    /// The model's name in the client's own words: by another one it may not know it.
    pub(super) fn requested_name<'a>(&'a self, head: &'a RoutingFields<'_>) -> &'a str {
        self.path_model.as_ref().map_or(&head.model, |named| &named.requested_name)
    }

    /// What is sent to whichever engine it turns out to be.
    /// `name`: the model's, unless it stands at `range` as it is.
    pub(super) const fn routed_body(
        &self,
        body: Bytes,
        range: Range<usize>,
        name: Option<String>,
    ) -> RoutedBody {
        RoutedBody {
            body,
            model_range: range,
            model_name: name,
            is_multipart: matches!(self.body_format, BodyFormat::Multipart { .. }),
        }
    }
}

impl RoutedBody {
    /// The body, with the engine's own name for the model.
    pub(super) fn payload(&self, served: &str) -> Payload {
        match &self.body {
            body if self.model_range.is_empty() || self.already_names(served) => body.clone().into(),
            body if self.is_multipart => multipart::splice(body, &self.model_range, served).into(),
            body => routing_fields::splice(body, &self.model_range, served).into(),
        }
    }

    fn already_names(&self, served: &str) -> bool {
        let stands = self.body.get(self.model_range.clone()).unwrap_or_default();
        match &self.model_name {
            Some(name) => name == served,
            None if self.is_multipart => stands == served.as_bytes(),
            None => {
                let inner = stands.strip_prefix(b"\"").and_then(|rest| rest.strip_suffix(b"\""));
                inner == Some(served.as_bytes())
            }
        }
    }
}

impl BodyFormat {
    fn multipart(headers: &HeaderMap, named: bool) -> Result<Self, Fault> {
        let mut kinds = headers.get_all(header::CONTENT_TYPE).iter();
        let (Some(kind), true) = (kinds.next(), content_type_contains(headers, "multipart/form-data")) else {
            return Err(Fault::UnsupportedMedia { expected: "multipart/form-data".into() });
        };
        if kinds.next().is_some() {
            return Err(invalid("there are two Content-Types".into(), None));
        }
        Ok(Self::Multipart {
            boundary: Bytes::copy_from_slice(multipart::boundary(kind)?),
            model_required: named,
        })
    }

    fn read_routing_fields<'a>(&self, body: &'a [u8]) -> Result<RoutingFields<'a>, Fault> {
        Ok(match self {
            Self::Json => routing_fields::peek(body)?,
            Self::Multipart { boundary, model_required: true } => multipart::peek(body, boundary)?,
            Self::Multipart { boundary, model_required: false } => multipart::peek_any(body, boundary)?,
            Self::ModelOptional { json_required: json } => match routing_fields::peek_any(body) {
                Ok(head) => head,
                // A list, say: there is no model in it.
                Err(routing_fields::Error::NotAnObject) => routing_fields_without_model(),
                Err(routing_fields::Error::Syntax(_)) if !json => routing_fields_without_model(),
                Err(error) => return Err(error.into()),
            },
            Self::Empty if body.is_empty() => routing_fields_without_model(),
            Self::Empty => return Err(invalid("this method takes no body".into(), None)),
        })
    }
}

const fn routing_fields_without_model() -> RoutingFields<'static> {
    RoutingFields {
        model: Cow::Borrowed(""),
        stream: false,
        model_range: 0..0,
        background: false,
        session_hash: None,
        user_hash: None,
        prefix: ConversationPrefix::NONE,
        previous_response_hash: None,
        max_tokens: None,
    }
}

/// This is in the content's type.
fn content_type_contains(headers: &HeaderMap, part: &str) -> bool {
    let mut kinds = headers.get_all(header::CONTENT_TYPE).iter().map(HeaderValue::as_bytes);
    kinds.any(|kind| kind.windows(part.len()).any(|window| window.eq_ignore_ascii_case(part.as_bytes())))
}

fn invalid(message: String, param: Option<&str>) -> Fault {
    Fault::InvalidRequest { message, param: param.map(str::to_owned) }
}
