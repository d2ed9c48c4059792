//! `/engines/{model}/…`: an engine's own routes, for what has no route here.
//!
//! The model is the longest configured name or alias that the path begins with; its slashes may be escaped. What
//! follows is not decoded: it is one of the paths that the engine's kind opens, byte for byte, or it does not exist. So
//! no spelling of a management path can arrive at an engine, whatever its router would make of it.

use std::sync::Arc;

use http::{Method, uri::PathAndQuery};
use rouse::{
    adapter::{Kind, paths},
    fault::Fault,
    model::{ModelName, Registry},
};

use super::{
    near,
    route::{self, unescape},
    text,
};
use crate::{
    config::{self, Config},
    keys::Key,
};

/// A name has at most 256 bytes, and each may be escaped.
const LONGEST_NAME: usize = 3 * 256;

/// A path of an engine that may be asked.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) model: ModelName,
    /// The model's name as the path has it, without escapes.
    pub(super) spelled: String,
    pub(super) spec: Arc<config::Model>,
    /// The engine's path, with the query as it came.
    pub(super) path: PathAndQuery,
}

/// Looks up what follows `/engines/` in `uri`. With a 405 goes what would be allowed. What a model is called besides,
/// and what its engine opens, is told to those only whose `key` may use it.
pub(super) fn find(
    method: &Method,
    uri: &http::Uri,
    registry: &Registry,
    config: &Config,
    key: Option<&Key>,
) -> Result<Found, (Fault, Option<&'static str>)> {
    let unknown = || (route::unknown(method, uri.path()), None);
    let rest = uri.path().strip_prefix("/engines/").ok_or_else(unknown)?;
    let Some((spelled, model, path)) = split(registry, rest) else {
        let name = rest.split('/').next().unwrap_or_default();
        let name = unescape(name).unwrap_or_else(|| name.to_owned());
        return Err((near::not_found(registry, key, &name), None));
    };
    if key.is_some_and(|key| !key.lets_use(model)) {
        return Err((Fault::ModelForbidden { model: text::cut(&spelled) }, None));
    }
    let spec = config.models.get(model).ok_or_else(unknown)?;
    let methods = methods(spec, path).ok_or_else(unknown)?;
    if !methods.contains(method) {
        let fault =
            Fault::MethodNotAllowed { method: text::cut(method.as_str()), path: text::cut(uri.path()) };
        return Err((fault, Some(route::allow(methods))));
    }
    let path = match uri.query() {
        None => PathAndQuery::try_from(path),
        Some(query) => PathAndQuery::try_from(format!("{path}?{query}")),
    };
    let path = path.map_err(|_| unknown())?;
    Ok(Found { model: model.clone(), spelled, spec: Arc::clone(spec), path })
}

/// The methods with which this path of the model's engine may be asked; `None` when it may not be at all.
fn methods(model: &config::Model, path: &str) -> Option<&'static [Method]> {
    if model.kind != Kind::Custom {
        return paths::methods(model.kind, path);
    }
    let passage = model.passage.iter().find(|passage| passage.path == path)?;
    Some(if passage.reads { paths::READ } else { paths::ASK })
}

/// The longest configured name at the beginning of `rest`, whose it is, and the path behind it, from its slash on.
fn split<'a, 'r>(registry: &'r Registry, rest: &'a str) -> Option<(String, &'r ModelName, &'a str)> {
    let ends = rest.bytes().enumerate().take(LONGEST_NAME + 1).filter(|(_, byte)| *byte == b'/');
    let ends: Vec<usize> = ends.map(|(at, _)| at).collect();
    ends.into_iter().rev().find_map(|at| {
        let (name, path) = rest.split_at_checked(at)?;
        let name = unescape(name)?;
        let model = registry.find(&name)?;
        Some((name, model, path))
    })
}

#[cfg(test)]
mod tests {
    use rouse::model::{Accelerators, Idle, LevelPolicy, Memory, ModelSpec, OwnQueue};
    use rouse::units::{Bytes, Millis};

    use super::*;

    fn spec(name: &str, aliases: &[&str]) -> ModelSpec {
        ModelSpec {
            name: name.into(),
            aliases: aliases.iter().map(|alias| (*alias).to_owned()).collect(),
            accelerators: Accelerators::Count(1),
            memory: Memory { awake: Bytes::gib(1), asleep: Bytes::ZERO, host: Bytes::ZERO },
            idle: Idle { sleep_after: None, stop_after: None, level: LevelPolicy::Auto },
            replicas: 1,
            pinned: false,
            min_replicas: 0,
            dependencies: Vec::new(),
            priority: 0,
            max_concurrency: None,
            start_timeout: Millis::secs(60),
            explicit_memory: false,
            can_sleep: true,
            fingerprint: 0,
            eviction: None,
            queue: OwnQueue::default(),
        }
    }

    #[test]
    fn the_longest_name_is_meant_and_what_follows_it_is_left_as_it_came() {
        let specs = [spec("org", &["org/v1"]), spec("org/m", &["ä b"])];
        let registry = Registry::new(&specs);
        let found = |rest| split(&registry, rest).map(|(_, model, path)| (model.as_str(), path));
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
