//! Matches a request to a route of the inference API. The matcher is written by hand, because there are few routes, and
//! because a model's name in a path may hold slashes, raw or escaped, which general routers read as structure.
//!
//! Paths compare byte for byte, without decoding, collapsing or trimming. So each route has one spelling, and no
//! spelling that an engine behind reads differently.

use http::{HeaderValue, Method};
use rouse::{
    fault::Fault,
    model::{ModelName, ModelNameIndex},
};
use rouse_net::openai::ApiSchema;

use super::client_text;

mod inference;

pub(crate) use inference::{BodyEncoding, InferenceRoute};

/// A route of the inference API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ApiRoute {
    Inference(InferenceRoute),
    /// The rest of the path after `/engines/`: a model, and a path of its engine.
    Passthrough(String),
    Models,
    /// One model: the rest of the path after `/v1/models/`, still escaped.
    Model(String),
    Healthz,
    Readyz,
}

impl ApiRoute {
    /// The metric label.
    pub(crate) const fn label(&self) -> &'static str {
        match self {
            Self::Inference(inference) => inference.label(),
            Self::Passthrough(_) => "engines",
            Self::Models | Self::Model(_) => "models",
            Self::Healthz => "healthz",
            Self::Readyz => "readyz",
        }
    }

    /// The route's methods, in the order of `Allow`. The methods of a passthrough path depend on its engine.
    const fn methods(&self) -> &'static [Method] {
        match self {
            Self::Inference(_) => &[Method::POST],
            Self::Passthrough(_) => &[Method::GET, Method::HEAD, Method::POST],
            Self::Models | Self::Model(_) | Self::Healthz | Self::Readyz => &[Method::GET, Method::HEAD],
        }
    }
}

/// Matches the route, or fails with 404, 405 or 501. `upgrades`: the client needs a protocol that the gateway does not
/// speak. A 405 comes with the allowed methods.
pub(crate) fn match_route(
    method: &Method,
    path: &str,
    upgrades: bool,
) -> Result<ApiRoute, (Fault, Option<&'static str>)> {
    let known = parse_path(path);
    let methods = known.as_ref().map_or(&[Method::GET, Method::HEAD][..], ApiRoute::methods);
    let not_allowed = || {
        let fault = Fault::MethodNotAllowed {
            method: client_text::sanitize(method.as_str()),
            path: client_text::sanitize(path),
        };
        Err((fault, Some(allow_header(methods))))
    };
    if matches!(*method, Method::CONNECT | Method::TRACE) {
        return not_allowed();
    }
    if upgrades {
        let fault = Fault::NotImplemented { what: "a WebSocket".into() };
        return Err((fault, None));
    }
    match known {
        None => Err((route_not_found(method, path), None)),
        Some(_) if !methods.contains(method) => not_allowed(),
        Some(route) => Ok(route),
    }
}

/// Whether an `Upgrade` header requests a WebSocket. The gateway ignores any other upgrade, as HTTP allows: Java's
/// `HttpClient` offers `h2c` with every cleartext request, and continues with HTTP/1.1 if the server ignores the offer.
pub(crate) fn is_websocket(upgrade: &HeaderValue) -> bool {
    upgrade
        .as_bytes()
        .split(|byte| *byte == b',')
        .any(|name| name.trim_ascii().eq_ignore_ascii_case(b"websocket"))
}

/// The API schema of errors for this path, whether the path exists or not.
pub(crate) fn api_schema(path: &str) -> ApiSchema {
    let path = if path.starts_with("/engines/") {
        path.rfind("/v1/").and_then(|at| path.get(at..)).unwrap_or_default()
    } else {
        path
    };
    let under =
        |route: &str| path.strip_prefix(route).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    if under("/v1/messages") {
        ApiSchema::Anthropic
    } else if under("/v1/responses") {
        ApiSchema::Responses
    } else {
        ApiSchema::OpenAi
    }
}

/// Makes the fault for an unknown path, with a suggestion.
pub(crate) fn route_not_found(method: &Method, path: &str) -> Fault {
    let meant = suggest_path(path).map(|path| client_text::sanitize(&path));
    Fault::RouteNotFound {
        method: client_text::sanitize(method.as_str()),
        path: client_text::sanitize(path),
        suggested_path: meant,
    }
}

/// Suggests a route for a path with a missing or doubled `/v1` or with trailing slashes. Base URLs often have one of
/// these mistakes.
fn suggest_path(path: &str) -> Option<String> {
    let path = path.trim_end_matches('/');
    let bare = path.trim_start_matches("/v1");
    [path.to_owned(), format!("/v1{path}"), format!("/v1{bare}")].into_iter().find(|path| {
        matches!(parse_path(path), Some(ApiRoute::Inference(_) | ApiRoute::Models | ApiRoute::Model(_)))
    })
}

fn parse_path(path: &str) -> Option<ApiRoute> {
    if let Some(inference) = InferenceRoute::from_path(path) {
        return Some(ApiRoute::Inference(inference));
    }
    Some(match path {
        "/v1/models" => ApiRoute::Models,
        // vLLM and most of its clients use the second name.
        "/healthz" | "/health" => ApiRoute::Healthz,
        "/readyz" => ApiRoute::Readyz,
        _ => match (path.strip_prefix("/v1/models/"), path.strip_prefix("/engines/")) {
            (Some(rest), _) if !rest.is_empty() => ApiRoute::Model(rest.to_owned()),
            (_, Some(rest)) => ApiRoute::Passthrough(rest.to_owned()),
            _ => return None,
        },
    })
}

/// The `Allow` value of one of the method sets in use.
pub(crate) fn allow_header(methods: &[Method]) -> &'static str {
    match (methods.contains(&Method::GET), methods.contains(&Method::POST)) {
        (true, true) => "GET, HEAD, POST",
        (false, true) => "POST",
        _ => "GET, HEAD",
    }
}

/// Finds the configured name or alias that an escaped path segment spells, with its model. The name is the whole rest
/// of the path, so there is only one candidate.
pub(crate) fn find_model<'a>(registry: &'a ModelNameIndex, escaped: &str) -> Option<(String, &'a ModelName)> {
    let name = percent_decode(escaped)?;
    let model = registry.find(&name)?;
    Some((name, model))
}

/// Decodes `%` escapes. `None`: an escape is broken or the result is not UTF-8.
pub(crate) fn percent_decode(escaped: &str) -> Option<String> {
    if !escaped.contains('%') {
        return Some(escaped.to_owned());
    }
    let mut bytes = Vec::with_capacity(escaped.len());
    let mut rest = escaped.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let digit = |b: Option<u8>| (b? as char).to_digit(16);
            let (high, low) = (digit(rest.next())?, digit(rest.next())?);
            bytes.push(u8::try_from(high * 16 + low).ok()?);
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests;
