//! Decides which web pages may use an API that requires no key.
//!
//! A gateway on loopback without keys trusts the programs of its machine, and a browser is one of them: any page that a
//! person opens can make the browser send a request here. Most such requests need no preflight, since the page chooses
//! the `Content-Type`. CORS then only forbids the page to read the response, and by that time the model is awake. A
//! page whose name was rebound to this machine can even read the response. But no page can choose the `Origin` that the
//! browser sends with every request other than a GET, so that origin must be local or configured. Programs other than
//! browsers send no `Origin`.
//!
//! A local or configured page may also read its response (`super::cors`).
//!
//! With keys configured, a page has no key to send. On other addresses the gateway trusts the network, pages included.

use http::{HeaderValue, Method, header, request};
use rouse::fault::Fault;
use rouse_config::Config;

use super::{admin::guard::is_loopback_origin, client_text};

/// Checks the origin of a request that needs no key.
pub(super) fn check_origin(config: &Config, parts: &request::Parts) -> Result<(), Fault> {
    let reads = matches!(parts.method, Method::GET | Method::HEAD | Method::OPTIONS);
    if reads || config.cors.any || !is_keyless_loopback(config) {
        return Ok(());
    }
    let mut origins = parts.headers.get_all(header::ORIGIN).iter();
    match origins.find(|origin| !is_allowed(config, origin)) {
        None => Ok(()),
        Some(origin) => {
            let origin = client_text::sanitize(&String::from_utf8_lossy(origin.as_bytes()));
            Err(Fault::OriginForbidden { origin })
        }
    }
}

/// Whether the API listens on loopback only and requires no key.
pub(super) fn is_keyless_loopback(config: &Config) -> bool {
    config.keys.is_empty() && config.api.ip().to_canonical().is_loopback()
}

/// Whether pages of this origin may use the API: a configured origin, or a local one where [`is_keyless_loopback`]
/// holds.
pub(super) fn is_allowed(config: &Config, origin: &HeaderValue) -> bool {
    let Ok(origin) = origin.to_str() else { return false };
    config.cors.origins.iter().any(|allowed| allowed.eq_ignore_ascii_case(origin))
        || (is_keyless_loopback(config) && is_loopback_origin(origin))
}

#[cfg(test)]
mod tests {
    use crate::http::testing::{
        CannedEngine, InProcessGateway, RawHttpResponse, completion_request, json_response,
    };
    use rouse_config::{CorsConfig, parse};

    async fn ask(gateway: &InProcessGateway, headers: &str) -> RawHttpResponse {
        let mut client = gateway.connect().await;
        client.send(completion_request(false).replacen("host: x\r\n", headers, 1)).await;
        client.read_response().await
    }

    #[tokio::test]
    async fn a_page_of_elsewhere_wakes_no_model_of_a_gateway_on_loopback_without_keys() {
        let mut gateway =
            InProcessGateway::start(|config| config.cors.origins = vec!["https://chat.example".into()]);
        for (headers, origin) in [
            // A foreign page: a request that needs no preflight.
            (
                "host: 127.0.0.1:8080\r\ncontent-type: text/plain\r\norigin: https://evil.example\r\n",
                "https://evil.example",
            ),
            // A name that was rebound to this machine: the page and the gateway share an origin.
            ("host: evil.example:8080\r\norigin: http://evil.example:8080\r\n", "http://evil.example:8080"),
            ("host: x\r\norigin: http://localhost.evil.example\r\n", "http://localhost.evil.example"),
            ("host: x\r\norigin: null\r\n", "null"),
            ("host: x\r\norigin: http://localhost\r\norigin: http://evil.example\r\n", "http://evil.example"),
        ] {
            let refused = ask(&gateway, headers).await;
            let error = refused.error();
            assert_eq!(
                (refused.status, error["code"].as_str()),
                (403, Some("origin_forbidden")),
                "{headers}"
            );
            assert_eq!(error["type"], "permission_error");
            let message = error["message"].as_str().unwrap();
            assert!(message.contains(origin) && message.contains("api.cors.origins"), "{message}");
        }
        assert!(gateway.parked.try_recv().is_err(), "it queued");
    }

    #[tokio::test]
    async fn programs_pages_of_this_machine_and_configured_ones_are_served() {
        let gateway =
            InProcessGateway::start(|config| config.cors.origins = vec!["https://chat.example".into()]);
        let engine = CannedEngine::start(json_response("{}")).await;
        let gate = gateway.open_gate();
        gateway.set_endpoints(&[(engine.address, &gate)]);
        for headers in [
            "host: evil.example\r\n",
            "host: x\r\norigin: http://localhost:3000\r\n",
            "host: x\r\norigin: http://127.0.0.1:8080\r\n",
            "host: x\r\norigin: http://[::1]\r\n",
            "host: x\r\norigin: https://chat.example\r\n",
        ] {
            assert_eq!(ask(&gateway, headers).await.status, 200, "{headers}");
        }
        let foreign = "host: x\r\norigin: https://evil.example\r\n";
        assert_eq!(ask(&gateway, foreign).await.status, 403);
        let config = |change: &dyn Fn(&mut rouse_config::Config)| {
            let mut config = gateway.config.load().as_ref().clone();
            change(&mut config);
            gateway.config.store(std::sync::Arc::new(config));
        };
        config(&|config| config.cors = CorsConfig { origins: Vec::new(), any: true });
        assert_eq!(ask(&gateway, foreign).await.status, 200);
        config(&|config| {
            (config.cors, config.api) = (CorsConfig::default(), "0.0.0.0:8080".parse().unwrap())
        });
        assert_eq!(ask(&gateway, foreign).await.status, 200);
        let hash = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";
        let keys =
            parse(&format!("keys: [{{name: k, sha256: {hash}, models: ['*']}}]"), "test").unwrap().keys;
        config(&|config| {
            (config.api, config.keys) = ("127.0.0.1:8080".parse().unwrap(), keys.clone());
        });
        let keyed = format!("{foreign}authorization: Bearer secret\r\n");
        assert_eq!(ask(&gateway, &keyed).await.status, 200);
        assert_eq!(ask(&gateway, foreign).await.status, 401);
    }
}
