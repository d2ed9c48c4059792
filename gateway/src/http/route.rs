//! Which of the inference API's routes a request means. By hand, because there are few, and because a model's name in
//! a path may hold slashes, raw or escaped, which general routers read as structure.

use http::{HeaderMap, Method, header};
use rouse::{
    fault::Fault,
    model::{ModelName, Registry},
};

use super::text;

/// What a request asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    Inference(Inference),
    Models,
    /// One model, by what follows `/v1/models/`, still escaped.
    Model(String),
    Healthz,
    Readyz,
}

/// The routes whose body names a model and is passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Inference {
    Chat,
    Completions,
    Embeddings,
}

impl Inference {
    /// `stream: true` means server-sent events here.
    pub(crate) const fn streams(self) -> bool {
        matches!(self, Self::Chat | Self::Completions)
    }
}

impl Route {
    /// The metric label.
    pub(crate) const fn label(&self) -> &'static str {
        match self {
            Self::Inference(Inference::Chat) => "chat",
            Self::Inference(Inference::Completions) => "completions",
            Self::Inference(Inference::Embeddings) => "embeddings",
            Self::Models | Self::Model(_) => "models",
            Self::Healthz => "healthz",
            Self::Readyz => "readyz",
        }
    }

    const fn method(&self) -> Method {
        match self {
            Self::Inference(_) => Method::POST,
            Self::Models | Self::Model(_) | Self::Healthz | Self::Readyz => Method::GET,
        }
    }
}

/// The route, or 404, 405, 501. With a 405 goes what would be allowed.
pub(crate) fn find(
    method: &Method,
    path: &str,
    headers: &HeaderMap,
) -> Result<Route, (Fault, Option<&'static str>)> {
    let not_allowed = |allow| {
        let fault = Fault::MethodNotAllowed { method: text::cut(method.as_str()), path: text::cut(path) };
        Err((fault, Some(allow)))
    };
    let known = known(path);
    let allow = match known.as_ref().map(Route::method) {
        Some(Method::POST) => "POST",
        _ => "GET, HEAD",
    };
    if matches!(*method, Method::CONNECT | Method::TRACE) {
        return not_allowed(allow);
    }
    if headers.contains_key(header::UPGRADE) {
        let fault = Fault::NotImplemented { what: "a protocol upgrade".into() };
        return Err((fault, None));
    }
    let Some(route) = known else {
        let fault = Fault::RouteNotFound { method: text::cut(method.as_str()), path: text::cut(path) };
        return Err((fault, None));
    };
    let wanted = route.method();
    if *method == wanted || (wanted == Method::GET && *method == Method::HEAD) {
        Ok(route)
    } else {
        not_allowed(allow)
    }
}

fn known(path: &str) -> Option<Route> {
    Some(match path {
        "/v1/chat/completions" => Route::Inference(Inference::Chat),
        "/v1/completions" => Route::Inference(Inference::Completions),
        "/v1/embeddings" => Route::Inference(Inference::Embeddings),
        "/v1/models" => Route::Models,
        "/healthz" => Route::Healthz,
        "/readyz" => Route::Readyz,
        _ => match path.strip_prefix("/v1/models/") {
            Some(rest) if !rest.is_empty() => Route::Model(rest.to_owned()),
            _ => return None,
        },
    })
}

/// The configured name or alias that an escaped path segment spells, with its model. The whole rest of the path is the
/// name, so the longest one that could match is the only one.
pub(crate) fn named<'a>(registry: &'a Registry, escaped: &str) -> Option<(String, &'a ModelName)> {
    let name = unescape(escaped)?;
    let model = registry.find(&name)?;
    Some((name, model))
}

/// Decodes `%` escapes; `None` when one is broken or the result is not UTF-8.
pub(crate) fn unescape(escaped: &str) -> Option<String> {
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
mod tests {
    use super::*;

    fn status_of(method: &str, path: &str) -> Result<Route, (Fault, Option<&'static str>)> {
        find(&method.parse().unwrap(), path, &HeaderMap::new())
    }

    #[test]
    fn routes_are_told_from_methods_that_do_not_fit_and_paths_that_do_not_exist() {
        assert_eq!(status_of("POST", "/v1/chat/completions"), Ok(Route::Inference(Inference::Chat)));
        assert_eq!(status_of("HEAD", "/healthz"), Ok(Route::Healthz));
        assert_eq!(status_of("GET", "/v1/models/org%2Fqwen"), Ok(Route::Model("org%2Fqwen".into())));
        for (method, path, allow) in [
            ("GET", "/v1/completions", "POST"),
            ("DELETE", "/v1/models", "GET, HEAD"),
            ("TRACE", "/v1/embeddings", "POST"),
            ("CONNECT", "/anything", "GET, HEAD"),
        ] {
            let (fault, allowed) = status_of(method, path).unwrap_err();
            assert!(matches!(fault, Fault::MethodNotAllowed { .. }), "{method} {path}");
            assert_eq!(allowed, Some(allow), "{method} {path}");
        }
        for path in ["/", "/v1/chat/completions/", "/v1/models/", "//v1/models", "/v1/chat%2Fcompletions"] {
            assert!(matches!(status_of("GET", path), Err((Fault::RouteNotFound { .. }, None))), "{path}");
        }
    }

    #[test]
    fn an_upgrade_is_not_implemented() {
        let mut headers = HeaderMap::new();
        headers.insert(header::UPGRADE, "websocket".parse().unwrap());
        let (fault, _) = find(&Method::GET, "/v1/models", &headers).unwrap_err();
        assert!(matches!(fault, Fault::NotImplemented { .. }));
    }

    #[test]
    fn escapes_are_decoded_and_broken_ones_name_nothing() {
        assert_eq!(unescape("org%2fqwen-3%20b").as_deref(), Some("org/qwen-3 b"));
        for broken in ["%", "%2", "%zz", "%ff"] {
            assert_eq!(unescape(broken), None, "{broken}");
        }
    }
}
