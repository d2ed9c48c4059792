//! Which of the inference API's routes a request means. By hand, because there are few, and because a model's name in
//! a path may hold slashes, raw or escaped, which general routers read as structure.
//!
//! A path is compared as it came, byte for byte: nothing is decoded, collapsed or trimmed before, so there is one
//! spelling for each route, and none that an engine behind reads differently.

use http::{HeaderValue, Method};
use rouse::{
    fault::Fault,
    model::{ModelName, ModelNameIndex},
};
use rouse_net::openai::ApiSchema;

use super::client_text;

mod inference;

pub(crate) use inference::{BodyEncoding, InferenceRoute};

/// What a request asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ApiRoute {
    Inference(InferenceRoute),
    /// What follows `/engines/`: a model, and a path of its engine.
    Passthrough(String),
    Models,
    /// One model, by what follows `/v1/models/`, still escaped.
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

    /// The methods that it takes, as `Allow` has them. Those of a passthrough path are its engine's affair.
    const fn methods(&self) -> &'static [Method] {
        match self {
            Self::Inference(_) => &[Method::POST],
            Self::Passthrough(_) => &[Method::GET, Method::HEAD, Method::POST],
            Self::Models | Self::Model(_) | Self::Healthz | Self::Readyz => &[Method::GET, Method::HEAD],
        }
    }
}

/// The route, or 404, 405, 501. `upgrades`: the client asks for a protocol without which its request means nothing to it. With a
/// 405 goes what would be allowed.
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

/// Whether an `Upgrade` field asks for a WebSocket. Any other upgrade is ignored, as HTTP allows: Java's `HttpClient` offers `h2c`
/// with every request in the clear, and goes on with HTTP/1.1 where nobody takes it up.
pub(crate) fn is_websocket(upgrade: &HeaderValue) -> bool {
    upgrade
        .as_bytes()
        .split(|byte| *byte == b',')
        .any(|name| name.trim_ascii().eq_ignore_ascii_case(b"websocket"))
}

/// In whose words a request for this path is refused, whether the path exists or not.
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

/// There is no such route.
pub(crate) fn route_not_found(method: &Method, path: &str) -> Fault {
    let meant = suggest_path(path).map(|path| client_text::sanitize(&path));
    Fault::RouteNotFound {
        method: client_text::sanitize(method.as_str()),
        path: client_text::sanitize(path),
        suggested_path: meant,
    }
}

/// The path of a route, where only `/v1` is missing or doubled, or a slash stands at the end. Base URLs are often one of these off.
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
        // vLLM and most of its clients call it by the second name.
        "/healthz" | "/health" => ApiRoute::Healthz,
        "/readyz" => ApiRoute::Readyz,
        _ => match (path.strip_prefix("/v1/models/"), path.strip_prefix("/engines/")) {
            (Some(rest), _) if !rest.is_empty() => ApiRoute::Model(rest.to_owned()),
            (_, Some(rest)) => ApiRoute::Passthrough(rest.to_owned()),
            _ => return None,
        },
    })
}

/// `Allow`, for one of the sets that there are.
pub(crate) fn allow_header(methods: &[Method]) -> &'static str {
    match (methods.contains(&Method::GET), methods.contains(&Method::POST)) {
        (true, true) => "GET, HEAD, POST",
        (false, true) => "POST",
        _ => "GET, HEAD",
    }
}

/// The configured name or alias that an escaped path segment spells, with its model. The whole rest of the path is the
/// name, so the longest one that could match is the only one.
pub(crate) fn find_model<'a>(registry: &'a ModelNameIndex, escaped: &str) -> Option<(String, &'a ModelName)> {
    let name = percent_decode(escaped)?;
    let model = registry.find(&name)?;
    Some((name, model))
}

/// Decodes `%` escapes; `None` when one is broken or the result is not UTF-8.
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
