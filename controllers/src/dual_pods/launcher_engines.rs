//! Records a launcher's engines on its Pod, so that the next leader finds them.
//!
//! Each engine has an annotation of its own, which keeps concurrent writes for different engines independent.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use rouse::{
    model::{AcceleratorId, SleepLevel, SleepLevelPolicy},
    pairing::{
        event::{EngineRecord, MemorySizes},
        ids::{EngineFingerprint, PairingEngineId, ProviderMode, RequesterId},
    },
    units::{Generation, Millis, Tick},
};
use serde::{Deserialize, Serialize};

use crate::platform::launcher::instance_id;

/// Prefix of these annotations; the launcher's instance id of the engine follows.
const PREFIX: &str = "engines.rouse.dev/";

/// Labels and annotations that route requests to an engine; the Pod has them while the engine serves.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoutingMetadata {
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// One engine in a launcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LauncherEngine {
    pub record: EngineRecord,
    /// Level at which the engine sleeps, if recorded.
    pub sleep_level: Option<SleepLevel>,
    /// Port that the engine listens on in its Pod.
    pub port: u16,
    /// Routing metadata of a serving engine.
    pub routing: RoutingMetadata,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct LauncherEngineAnnotation {
    accelerators: Vec<AcceleratorId>,
    /// Hexadecimal: some JSON readers have no 64-bit integers.
    fingerprint: String,
    generation: Generation,
    sizes: MemorySizes,
    level: SleepLevelPolicy,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    stop_after: Option<Millis>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    requester: Option<RequesterId>,
    last_used: Tick,
    #[serde(rename = "slept", default, skip_serializing_if = "Option::is_none")]
    sleep_level: Option<SleepLevel>,
    port: u16,
    #[serde(default, skip_serializing_if = "RoutingMetadata::is_empty")]
    routing: RoutingMetadata,
}

impl RoutingMetadata {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.annotations.is_empty()
    }
}

/// Returns the labels and annotations to change on the Pod once this engine no longer serves.
///
/// Keys that another engine of the Pod also has keep, or get back, that engine's value.
#[must_use]
pub fn metadata_without(
    routing: &RoutingMetadata,
    others: &[LauncherEngine],
) -> (MetadataChanges, MetadataChanges) {
    let remaining = |entries: &BTreeMap<String, String>,
                     of: fn(&RoutingMetadata) -> &BTreeMap<String, String>| {
        let other = |key: &String| others.iter().find_map(|other| of(&other.routing).get(key).cloned());
        entries.keys().map(|key| (key.clone(), other(key))).collect()
    };
    (remaining(&routing.labels, |all| &all.labels), remaining(&routing.annotations, |all| &all.annotations))
}

/// Changes to a Pod's metadata by key; `None` removes the key.
pub type MetadataChanges = BTreeMap<String, Option<String>>;

/// Returns the annotation key of this engine.
#[must_use]
pub fn key(engine: &PairingEngineId) -> String {
    format!("{PREFIX}{}", instance_id(engine.fingerprint, &engine.accelerators))
}

/// Renders the annotation's value.
#[must_use]
pub fn text(engine: &LauncherEngine) -> String {
    let LauncherEngine { record, sleep_level: slept, port, routing } = engine;
    let annotation = LauncherEngineAnnotation {
        accelerators: record.engine.accelerators.to_vec(),
        fingerprint: record.engine.fingerprint.to_string(),
        generation: record.generation,
        sizes: record.sizes,
        level: record.level,
        stop_after: record.stop_after,
        requester: record.requester.clone(),
        last_used: record.last_used,
        sleep_level: *slept,
        port: *port,
        routing: routing.clone(),
    };
    // Serializing numbers and strings cannot fail.
    serde_json::to_string(&annotation).unwrap_or_default()
}

/// Reads all engines of this Pod. Logs unreadable annotations and leaves them in place.
#[must_use]
pub fn read(pod: &Pod) -> Vec<LauncherEngine> {
    let inside = ours(pod).filter_map(|(key, text)| match parse_engine(text) {
        Ok(inside) => Some(inside),
        Err(error) => {
            tracing::warn!(
                pod = pod.name_any(),
                key,
                error,
                "engine annotation on a launcher Pod ignored: it cannot be parsed"
            );
            None
        }
    });
    inside.collect()
}

/// Whether this annotation records an engine.
#[must_use]
pub fn is_engine_key(key: &str) -> bool {
    key.starts_with(PREFIX)
}

/// Counts the Pod's engine annotations, readable or not.
#[must_use]
pub fn count(pod: &Pod) -> usize {
    ours(pod).count()
}

fn ours(pod: &Pod) -> impl Iterator<Item = (&String, &String)> {
    pod.annotations().iter().filter(|(key, _)| is_engine_key(key))
}

fn parse_engine(text: &str) -> Result<LauncherEngine, String> {
    let annotation: LauncherEngineAnnotation =
        serde_json::from_str(text).map_err(|error| error.to_string())?;
    let fingerprint = u64::from_str_radix(&annotation.fingerprint, 16).map_err(|error| error.to_string())?;
    let mut accelerators = annotation.accelerators;
    accelerators.sort_unstable();
    let record = EngineRecord {
        engine: PairingEngineId {
            mode: ProviderMode::Launcher,
            accelerators: accelerators.into(),
            fingerprint: EngineFingerprint(fingerprint),
        },
        generation: annotation.generation,
        sizes: annotation.sizes,
        level: annotation.level,
        stop_after: annotation.stop_after,
        requester: annotation.requester,
        last_used: annotation.last_used,
    };
    Ok(LauncherEngine {
        record,
        sleep_level: annotation.sleep_level,
        port: annotation.port,
        routing: annotation.routing,
    })
}

#[cfg(test)]
mod tests {
    use rouse::units::Bytes;

    use super::*;

    fn inside(fingerprint: u64, requester: Option<&str>, port: u16) -> LauncherEngine {
        let record = EngineRecord {
            engine: PairingEngineId {
                mode: ProviderMode::Launcher,
                accelerators: ["GPU-a".into(), "GPU-b".into()].into(),
                fingerprint: EngineFingerprint(fingerprint),
            },
            generation: Generation(u64::MAX),
            sizes: MemorySizes { awake: Bytes::gib(40), asleep: Bytes::gib(1), host: Bytes::ZERO },
            level: SleepLevelPolicy::Auto,
            stop_after: None,
            requester: requester.map(RequesterId::from),
            last_used: Tick(1_700_000_000_123),
        };
        let labels = requester.map(|name| ("engine".to_owned(), name.to_owned()));
        let routing = RoutingMetadata { labels: labels.into_iter().collect(), annotations: BTreeMap::new() };
        LauncherEngine { record, sleep_level: requester.is_none().then_some(SleepLevel::Two), port, routing }
    }

    #[test]
    fn what_is_written_of_each_engine_is_read_and_a_broken_one_hides_no_other() {
        let (one, two) = (inside(u64::MAX, None, 8100), inside(7, Some("uid-1"), 8101));
        let mut pod = Pod::default();
        let all = pod.metadata.annotations.get_or_insert_default();
        for inside in [&one, &two] {
            let key = key(&inside.record.engine);
            assert!(key.strip_prefix(PREFIX).unwrap().len() <= 63, "{key} is no key of an annotation");
            all.insert(key, text(inside));
        }
        all.insert(format!("{PREFIX}x"), "{".to_owned());
        all.insert("else".to_owned(), "{".to_owned());
        assert_eq!((read(&pod), count(&pod)), (vec![two, one], 3));
    }

    /// Gateways of an earlier build wrote these, and read them during a rollout.
    #[test]
    fn the_words_of_the_annotation_stay() {
        let mut sleeper = inside(1, None, 8100);
        sleeper.record.level = SleepLevelPolicy::OneOrStop;
        let written: serde_json::Value = serde_json::from_str(&text(&sleeper)).unwrap();
        assert_eq!((&written["slept"], &written["level"]), (&"two".into(), &"onlyOne".into()), "{written}");
    }

    #[test]
    fn what_led_to_one_engine_goes_with_it_and_what_leads_to_another_stays() {
        let (one, two) = (inside(1, Some("one"), 8100), inside(2, Some("two"), 8101));
        let routing_left =
            |engine: &LauncherEngine, others: &[LauncherEngine]| metadata_without(&engine.routing, others).0;
        let key = || "engine".to_owned();
        assert_eq!(routing_left(&one, &[]), [(key(), None)].into());
        assert_eq!(routing_left(&one, std::slice::from_ref(&two)), [(key(), Some("two".to_owned()))].into());
        assert_eq!(routing_left(&inside(3, None, 8102), &[one, two]), BTreeMap::new());
    }
}
