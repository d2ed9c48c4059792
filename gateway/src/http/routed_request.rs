//! A request for an engine, as its route and body define it.
//!
//! The route decides where the body names the model, what the engine receives, and whether the request may wait.
//!
//! The gateway reads a body for the model's name and the `stream` flag, and forwards the body unchanged. Where the
//! engine has another name for the model, the pieces before and after that value are sent around the new name, so no
//! body is ever in memory twice.

use std::{borrow::Cow, ops::Range, sync::Arc};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, header, request, uri::PathAndQuery};
use rouse::{
    fault::Fault,
    model::{ModelName, ModelNameIndex},
};
use rouse_config::EngineKind;
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
use crate::keys::ApiKey;

/// One request for an engine.
#[derive(Debug)]
pub(super) struct RoutedRequest {
    pub(super) method: Method,
    /// The path and query that the engine receives.
    pub(super) path: PathAndQuery,
    /// Whether the request queues for its model and wakes it. Read-only requests do neither: a monitor must not keep a
    /// GPU busy.
    pub(super) may_park: bool,
    /// Whether `stream: true` means server-sent events.
    pub(super) may_stream: bool,
    /// Whether the model itself runs, and not only its tokenizer.
    pub(super) runs_model: bool,
    /// Whether `background` means that the client does not wait for the response. On other routes the field has other
    /// meanings, such as an image's background.
    rejects_background: bool,
    path_model: Option<PathModel>,
    body_format: BodyFormat,
}

/// A body, and where in it the model's name stands.
#[derive(Debug)]
pub(crate) struct RoutedBody {
    body: Bytes,
    /// Empty if the body names no model.
    model_range: Range<usize>,
    /// The decoded name, if it differs from the bytes at `model_range`.
    model_name: Option<String>,
    /// Whether the body is multipart and not JSON.
    is_multipart: bool,
}

/// The model that the path names.
#[derive(Debug)]
struct PathModel {
    model: ModelName,
    requested_name: String,
    spec: Arc<rouse_config::EngineConfig>,
}

/// How a body names its model.
#[derive(Clone, Debug)]
enum BodyFormat {
    Json,
    /// Multipart with this boundary. `model_required`: the body must name a model.
    Multipart {
        boundary: Bytes,
        model_required: bool,
    },
    /// A body for an engine's own path, which need not name a model. `json_required`: refuse a body that is not JSON.
    ModelOptional {
        json_required: bool,
    },
    Empty,
}

impl RoutedRequest {
    /// A request on a route whose body names the model.
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

    /// A request on an engine's own path.
    pub(super) fn for_passthrough(target: PassthroughTarget, parts: &request::Parts) -> Result<Self, Fault> {
        let asks = parts.method == Method::POST;
        let known = InferenceRoute::from_path(target.path.path());
        let body = match known {
            _ if !asks => BodyFormat::Empty,
            _ if content_type_contains(&parts.headers, "multipart/form-data") => {
                BodyFormat::multipart(&parts.headers, false)?
            }
            _ => BodyFormat::ModelOptional {
                json_required: target.spec.kind != EngineKind::Custom
                    || content_type_contains(&parts.headers, "json"),
            },
        };
        Ok(Self {
            method: parts.method.clone(),
            may_park: asks,
            // Paths unknown to the gateway are extensions of an engine, and all engines stream them by the same flag.
            may_stream: asks && known.is_none_or(InferenceRoute::may_stream),
            runs_model: known.is_none_or(InferenceRoute::runs_model),
            rejects_background: known == Some(InferenceRoute::Responses),
            path_model: Some(PathModel {
                model: target.model,
                requested_name: target.requested_name,
                spec: target.spec,
            }),
            body_format: body,
            path: target.path,
        })
    }

    /// Reads the body's routing fields. A body without a model's name yields an empty range.
    pub(super) async fn read_routing_fields<'a>(&self, body: &'a Bytes) -> Result<RoutingFields<'a>, Fault> {
        let mut head = if body.len() <= routing_fields::MAX_ON_CORE_BYTES {
            self.body_format.read_routing_fields(body)
        } else {
            // Parse a large body off this core, which serves streams.
            let (shape, body) = (self.body_format.clone(), body.clone());
            let read = tokio::task::spawn_blocking(move || {
                shape.read_routing_fields(&body).map(RoutingFields::into_owned)
            });
            read.await.map_err(|_| Fault::Internal)?
        }?;
        if head.background && self.rejects_background {
            let message = "background responses are not supported: send the request without 'background'";
            return Err(invalid(message.into(), Some("background")));
        }
        head.stream &= self.may_stream;
        Ok(head)
    }

    /// Resolves the request's model. A path and a body that name different models are an error.
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
        let message = format!("the path names the model '{path}', but the body names '{body}'");
        Err(invalid(message, Some("model")))
    }

    /// The model's name as the client spelled it. The client may not know any other name.
    pub(super) fn requested_name<'a>(&'a self, head: &'a RoutingFields<'_>) -> &'a str {
        self.path_model.as_ref().map_or(&head.model, |named| &named.requested_name)
    }

    /// The body for whichever engine serves the request. `name`: the decoded name, if it differs from the bytes at
    /// `range`.
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
    /// The body with the engine's own name for the model.
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
            return Err(invalid("the request has several Content-Type headers".into(), None));
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
                // A list, for example, names no model.
                Err(routing_fields::Error::NotAnObject) => routing_fields_without_model(),
                Err(routing_fields::Error::Syntax(_)) if !json => routing_fields_without_model(),
                Err(error) => return Err(error.into()),
            },
            Self::Empty if body.is_empty() => routing_fields_without_model(),
            Self::Empty => {
                return Err(invalid("a request with this method must not have a body".into(), None));
            }
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

/// Whether a `Content-Type` contains this text.
fn content_type_contains(headers: &HeaderMap, part: &str) -> bool {
    let mut kinds = headers.get_all(header::CONTENT_TYPE).iter().map(HeaderValue::as_bytes);
    kinds.any(|kind| kind.windows(part.len()).any(|window| window.eq_ignore_ascii_case(part.as_bytes())))
}

fn invalid(message: String, param: Option<&str>) -> Fault {
    Fault::InvalidRequest { message, param: param.map(str::to_owned) }
}
