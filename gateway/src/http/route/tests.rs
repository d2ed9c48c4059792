use super::*;

fn status_of(method: &str, path: &str) -> Result<ApiRoute, (Fault, Option<&'static str>)> {
    match_route(&method.parse().unwrap(), path, false)
}

#[test]
fn routes_are_told_from_methods_that_do_not_fit_and_paths_that_do_not_exist() {
    assert_eq!(status_of("POST", "/v1/chat/completions"), Ok(ApiRoute::Inference(InferenceRoute::Chat)));
    assert_eq!(status_of("HEAD", "/healthz"), Ok(ApiRoute::Healthz));
    assert_eq!(status_of("GET", "/health"), Ok(ApiRoute::Healthz));
    assert_eq!(status_of("GET", "/v1/models/org%2Fqwen"), Ok(ApiRoute::Model("org%2Fqwen".into())));
    assert_eq!(status_of("GET", "/engines/a/b?c"), Ok(ApiRoute::Passthrough("a/b?c".into())));
    for (method, path, allow) in [
        ("GET", "/v1/completions", "POST"),
        ("DELETE", "/v1/models", "GET, HEAD"),
        ("TRACE", "/v1/embeddings", "POST"),
        ("CONNECT", "/anything", "GET, HEAD"),
        ("DELETE", "/engines/m/v1/models", "GET, HEAD, POST"),
        ("GET", "/v1/messages", "POST"),
    ] {
        let (fault, allowed) = status_of(method, path).unwrap_err();
        assert!(matches!(fault, Fault::MethodNotAllowed { .. }), "{method} {path}");
        assert_eq!(allowed, Some(allow), "{method} {path}");
    }
    for path in [
        "/",
        "/v1/chat/completions/",
        "/v1/models/",
        "//v1/models",
        "/v1/chat%2Fcompletions",
        "/V1/chat/completions",
        "/engines",
        "/v1/responses/resp_1",
        "/v1/messages/batches",
    ] {
        assert!(matches!(status_of("GET", path), Err((Fault::RouteNotFound { .. }, None))), "{path}");
    }
}

#[test]
fn an_upgrade_is_not_implemented() {
    let (fault, _) = match_route(&Method::GET, "/v1/models", true).unwrap_err();
    assert!(matches!(fault, Fault::NotImplemented { .. }));
}

#[test]
fn of_all_upgrades_only_a_websocket_is_one_that_a_client_insists_on() {
    let is_websocket = |text: &'static str| is_websocket(&HeaderValue::from_static(text));
    assert!(is_websocket("websocket") && is_websocket("h2c, WebSocket"));
    assert!(!is_websocket("h2c") && !is_websocket("TLS/1.0, HTTP/2.0") && !is_websocket(""));
}

#[test]
fn a_path_is_refused_in_the_words_of_its_api() {
    for (path, expected) in [
        ("/v1/messages", ApiSchema::Anthropic),
        ("/v1/messages/count_tokens", ApiSchema::Anthropic),
        ("/v1/messages/batches", ApiSchema::Anthropic),
        ("/engines/org/m/v1/messages", ApiSchema::Anthropic),
        ("/engines/org/v1/m/v1/messages", ApiSchema::Anthropic),
        ("/v1/responses", ApiSchema::Responses),
        ("/v1/responses/resp_1/cancel", ApiSchema::Responses),
        ("/v1/messagesx", ApiSchema::OpenAi),
        ("/engines/m/messages", ApiSchema::OpenAi),
        ("/v1/chat/completions", ApiSchema::OpenAi),
        ("/", ApiSchema::OpenAi),
    ] {
        assert_eq!(api_schema(path), expected, "{path}");
    }
}

#[test]
fn escapes_are_decoded_and_broken_ones_name_nothing() {
    assert_eq!(percent_decode("org%2fqwen-3%20b").as_deref(), Some("org/qwen-3 b"));
    for broken in ["%", "%2", "%zz", "%ff"] {
        assert_eq!(percent_decode(broken), None, "{broken}");
    }
}
