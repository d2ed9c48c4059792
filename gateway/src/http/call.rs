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
    model::{ModelName, Registry},
    openai::{
        head::{self, Beginning, Head},
        multipart,
    },
    relay::Payload,
};

use super::{
    near,
    passage::Found,
    route::{Carries, Inference},
    text,
};
use crate::{
    config::{self, Kind},
    keys::Key,
};

/// One request for an engine.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) method: Method,
    /// What the engine is asked.
    pub(super) path: PathAndQuery,
    /// It queues for its model and wakes it. What only looks does neither: a monitor must not keep a GPU busy.
    pub(super) waits: bool,
    /// `stream: true` means server-sent events.
    pub(super) streams: bool,
    /// A model reads it, or makes something of it: not only its tokenizer.
    pub(super) computes: bool,
    /// `background` means here that nobody waits for the answer. Elsewhere it is another thing: an image's, say.
    defers: bool,
    named: Option<Named>,
    body: Shape,
}

/// A body, and where in it the model's name stands.
#[derive(Debug)]
pub(crate) struct Content {
    body: Bytes,
    /// Empty where there is none.
    range: Range<usize>,
    /// Where it is not what stands there.
    name: Option<String>,
    /// It is no JSON.
    is_form: bool,
}

/// Whom the path names.
#[derive(Debug)]
struct Named {
    model: ModelName,
    spelled: String,
    spec: Arc<config::Model>,
}

/// How a body names its model.
#[derive(Clone, Debug)]
enum Shape {
    Json,
    /// By this boundary. `named`: it must name a model.
    Multipart {
        boundary: Bytes,
        named: bool,
    },
    /// An engine's own: it need not name one. `json`: what is no JSON is refused.
    Free {
        json: bool,
    },
    Nothing,
}

impl Call {
    /// On a route whose body names the model.
    pub(super) fn on_route(inference: Inference, parts: &request::Parts) -> Result<Self, Fault> {
        let body = match inference.carries() {
            Carries::Json => Shape::Json,
            Carries::Multipart => Shape::multipart(&parts.headers, true)?,
        };
        Ok(Self {
            method: Method::POST,
            path: parts.uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/")),
            waits: true,
            streams: inference.streams(),
            computes: inference.computes(),
            defers: inference == Inference::Responses,
            named: None,
            body,
        })
    }

    /// On an engine's own path.
    pub(super) fn through(found: Found, parts: &request::Parts) -> Result<Self, Fault> {
        let asks = parts.method == Method::POST;
        let known = Inference::at(found.path.path());
        let body = match known {
            _ if !asks => Shape::Nothing,
            _ if is(&parts.headers, "multipart/form-data") => Shape::multipart(&parts.headers, false)?,
            _ => Shape::Free { json: found.spec.kind != Kind::Custom || is(&parts.headers, "json") },
        };
        Ok(Self {
            method: parts.method.clone(),
            waits: asks,
            // What has no route here is an engine's own invention, and those all say it alike.
            streams: asks && known.is_none_or(Inference::streams),
            computes: known.is_none_or(Inference::computes),
            defers: known == Some(Inference::Responses),
            named: Some(Named { model: found.model, spelled: found.spelled, spec: found.spec }),
            body,
            path: found.path,
        })
    }

    /// Reads what routing needs of the body. A head without a name has an empty range.
    pub(super) async fn read<'a>(&self, body: &'a Bytes) -> Result<Head<'a>, Fault> {
        let mut head = if body.len() <= head::OFF_CORE {
            self.body.read(body)
        } else {
            // Away from this core's streams.
            let (shape, body) = (self.body.clone(), body.clone());
            let read = tokio::task::spawn_blocking(move || shape.read(&body).map(Head::into_owned));
            read.await.map_err(|_| Fault::Internal)?
        }?;
        if head.background && self.defers {
            let message = "background responses are not kept: send the request without 'background'";
            return Err(invalid(message.into(), Some("background")));
        }
        head.stream &= self.streams;
        Ok(head)
    }

    /// The model that is meant. A path and a body that name different ones contradict each other.
    pub(super) fn model(
        &self,
        head: &Head<'_>,
        registry: &Registry,
        key: Option<&Key>,
    ) -> Result<ModelName, Fault> {
        let named = head.model.as_ref();
        let found = registry.find(named);
        let Some(Named { model, spelled, spec }) = &self.named else {
            return found.cloned().ok_or_else(|| near::not_found(registry, key, named));
        };
        let agree = match found {
            Some(found) => found == model,
            None => head.range.is_empty() || named == spec.served_name,
        };
        if agree {
            return Ok(model.clone());
        }
        let (path, body) = (text::cut(spelled), text::cut(named));
        let message = format!("the path names the model '{path}' and the body '{body}'");
        Err(invalid(message, Some("model")))
    }

    /// The model's name in the client's own words: by another one it may not know it.
    pub(super) fn spelled<'a>(&'a self, head: &'a Head<'_>) -> &'a str {
        self.named.as_ref().map_or(&head.model, |named| &named.spelled)
    }

    /// What is sent to whichever engine it turns out to be.
    /// `name`: the model's, unless it stands at `range` as it is.
    pub(super) const fn content(&self, body: Bytes, range: Range<usize>, name: Option<String>) -> Content {
        Content { body, range, name, is_form: matches!(self.body, Shape::Multipart { .. }) }
    }
}

impl Content {
    /// The body, with the engine's own name for the model.
    pub(super) fn payload(&self, served: &str) -> Payload {
        match &self.body {
            body if self.range.is_empty() || self.names(served) => body.clone().into(),
            body if self.is_form => multipart::splice(body, &self.range, served).into(),
            body => head::splice(body, &self.range, served).into(),
        }
    }

    fn names(&self, served: &str) -> bool {
        let stands = self.body.get(self.range.clone()).unwrap_or_default();
        match &self.name {
            Some(name) => name == served,
            None if self.is_form => stands == served.as_bytes(),
            None => {
                let inner = stands.strip_prefix(b"\"").and_then(|rest| rest.strip_suffix(b"\""));
                inner == Some(served.as_bytes())
            }
        }
    }
}

impl Shape {
    fn multipart(headers: &HeaderMap, named: bool) -> Result<Self, Fault> {
        let mut kinds = headers.get_all(header::CONTENT_TYPE).iter();
        let (Some(kind), true) = (kinds.next(), is(headers, "multipart/form-data")) else {
            return Err(Fault::UnsupportedMedia { expected: "multipart/form-data".into() });
        };
        if kinds.next().is_some() {
            return Err(invalid("there are two Content-Types".into(), None));
        }
        Ok(Self::Multipart { boundary: Bytes::copy_from_slice(multipart::boundary(kind)?), named })
    }

    fn read<'a>(&self, body: &'a [u8]) -> Result<Head<'a>, Fault> {
        Ok(match self {
            Self::Json => head::peek(body)?,
            Self::Multipart { boundary, named: true } => multipart::peek(body, boundary)?,
            Self::Multipart { boundary, named: false } => multipart::peek_any(body, boundary)?,
            Self::Free { json } => match head::peek_any(body) {
                Ok(head) => head,
                // A list, say: there is no model in it.
                Err(head::Error::NotAnObject) => nameless(),
                Err(head::Error::Syntax(_)) if !json => nameless(),
                Err(error) => return Err(error.into()),
            },
            Self::Nothing if body.is_empty() => nameless(),
            Self::Nothing => return Err(invalid("this method takes no body".into(), None)),
        })
    }
}

const fn nameless() -> Head<'static> {
    Head {
        model: Cow::Borrowed(""),
        stream: false,
        range: 0..0,
        background: false,
        session: None,
        user: None,
        beginning: Beginning::NONE,
        previous: None,
        max_tokens: None,
    }
}

/// This is in the content's type.
fn is(headers: &HeaderMap, part: &str) -> bool {
    let mut kinds = headers.get_all(header::CONTENT_TYPE).iter().map(HeaderValue::as_bytes);
    kinds.any(|kind| kind.windows(part.len()).any(|window| window.eq_ignore_ascii_case(part.as_bytes())))
}

fn invalid(message: String, param: Option<&str>) -> Fault {
    Fault::InvalidRequest { message, param: param.map(str::to_owned) }
}
