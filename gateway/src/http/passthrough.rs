//! `/engines/{model}/…`: an engine's own paths, for functions without a route in the gateway.
//!
//! The model is the longest configured name or alias that the path begins with; its slashes may be escaped. The rest is
//! not decoded: it must equal a path that the engine's kind allows, byte for byte. So no spelling of a management path
//! can reach an engine, whatever the engine's router would accept.

use std::sync::Arc;

use http::{Method, uri::PathAndQuery};
use rouse::{
    fault::Fault,
    model::{ModelName, ModelNameIndex},
};
use rouse_config::Config;
use rouse_net::adapter::{EngineKind, paths};

use super::{
    client_text,
    route::{self, percent_decode},
    suggestions,
};
use crate::keys::ApiKey;

/// A name has at most 256 bytes, and each byte may be escaped as three.
const MAX_ESCAPED_NAME_BYTES: usize = 3 * 256;

/// An allowed path of an engine.
#[derive(Debug)]
pub(super) struct PassthroughTarget {
    pub(super) model: ModelName,
    /// The model's name in the path, unescaped.
    pub(super) requested_name: String,
    pub(super) spec: Arc<rouse_config::EngineConfig>,
    /// The engine's path, with the query unchanged.
    pub(super) path: PathAndQuery,
}

/// Looks up what follows `/engines/` in `uri`. A 405 comes with the allowed methods. Only a `key` that may use the
/// model learns its other names and the paths of its engine.
pub(super) fn find(
    method: &Method,
    uri: &http::Uri,
    registry: &ModelNameIndex,
    config: &Config,
    key: Option<&ApiKey>,
) -> Result<PassthroughTarget, (Fault, Option<&'static str>)> {
    let unknown = || (route::route_not_found(method, uri.path()), None);
    let rest = uri.path().strip_prefix("/engines/").ok_or_else(unknown)?;
    let Some((spelled, model, path)) = split_model_path(registry, rest) else {
        let name = rest.split('/').next().unwrap_or_default();
        let name = percent_decode(name).unwrap_or_else(|| name.to_owned());
        return Err((suggestions::model_not_found(registry, key, &name), None));
    };
    if key.is_some_and(|key| !key.authorize_model(model)) {
        return Err((Fault::ModelForbidden { model: client_text::sanitize(&spelled) }, None));
    }
    let spec = config.engines.get(model).ok_or_else(unknown)?;
    let methods = allowed_methods(spec, path).ok_or_else(unknown)?;
    if !methods.contains(method) {
        let fault = Fault::MethodNotAllowed {
            method: client_text::sanitize(method.as_str()),
            path: client_text::sanitize(uri.path()),
        };
        return Err((fault, Some(route::allow_header(methods))));
    }
    let path = match uri.query() {
        None => PathAndQuery::try_from(path),
        Some(query) => PathAndQuery::try_from(format!("{path}?{query}")),
    };
    let path = path.map_err(|_| unknown())?;
    Ok(PassthroughTarget { model: model.clone(), requested_name: spelled, spec: Arc::clone(spec), path })
}

/// The methods that this path of the model's engine allows. `None`: the path is not allowed at all.
fn allowed_methods(model: &rouse_config::EngineConfig, path: &str) -> Option<&'static [Method]> {
    if model.kind != EngineKind::Custom {
        return paths::allowed_methods(model.kind, path);
    }
    let passthrough = model.passthrough.iter().find(|passthrough| passthrough.path == path)?;
    Some(if passthrough.is_get { paths::READ_METHODS } else { paths::INFERENCE_METHODS })
}

/// Splits `rest` into the longest configured name, its model, and the remaining path, which starts with a slash.
fn split_model_path<'a, 'r>(
    registry: &'r ModelNameIndex,
    rest: &'a str,
) -> Option<(String, &'r ModelName, &'a str)> {
    let ends = rest.bytes().enumerate().take(MAX_ESCAPED_NAME_BYTES + 1).filter(|(_, byte)| *byte == b'/');
    let ends: Vec<usize> = ends.map(|(at, _)| at).collect();
    ends.into_iter().rev().find_map(|at| {
        let (name, path) = rest.split_at_checked(at)?;
        let name = percent_decode(name)?;
        let model = registry.find(&name)?;
        Some((name, model, path))
    })
}

#[cfg(test)]
mod tests {
    use rouse::model::{EngineMemory, ModelSpec};
    use rouse::{sim::simulated_model, units::Bytes};

    use super::*;

    fn spec(name: &str, aliases: &[&str]) -> ModelSpec {
        ModelSpec {
            aliases: aliases.iter().map(|alias| (*alias).to_owned()).collect(),
            fingerprint: 0,
            ..simulated_model(
                name,
                EngineMemory { awake: Bytes::gib(1), asleep: Bytes::ZERO, host: Bytes::ZERO },
            )
        }
    }

    #[test]
    fn the_longest_name_is_meant_and_what_follows_it_is_left_as_it_came() {
        let specs = [spec("org", &["org/v1"]), spec("org/m", &["ä b"])];
        let registry = ModelNameIndex::new(&specs);
        let found = |rest| split_model_path(&registry, rest).map(|(_, model, path)| (model.as_str(), path));
        for (rest, model, path) in [
            ("org/health", "org", "/health"),
            ("org/m/health", "org/m", "/health"),
            ("org%2Fm/health", "org/m", "/health"),
            ("org%2fm/a%2Fb", "org/m", "/a%2Fb"),
            ("%6frg/health", "org", "/health"),
            ("org/v1/models", "org", "/models"),
            ("org//v1/models", "org", "//v1/models"),
            ("%C3%A4%20b/x", "org/m", "/x"),
            ("org/../sleep", "org", "/../sleep"),
        ] {
            assert_eq!(found(rest), Some((model, path)), "{rest}");
        }
        for rest in ["", "/", "org", "org%2Fm", "orgx/health", "ORG/health", "%zz/health", "%00/health"] {
            assert_eq!(found(rest), None, "{rest}");
        }
        let long = format!("{}/org/health", "x/".repeat(40_000));
        assert_eq!(found(&long), None);
    }
}
