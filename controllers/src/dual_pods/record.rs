//! Records an engine on its provider's Pod, so that the next leader finds it.
//!
//! Also reads a requester's memory and sleep settings.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use rouse::{
    model::{IdlePolicy, SleepLevel, SleepLevelPolicy},
    pairing::{
        event::{EngineRecord, MemorySizes},
        ids::{EngineFingerprint, NodeName, PairingEngineId, ProviderMode, RequesterId},
    },
    units::{Bytes, Generation, Millis, Tick},
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::keys;

/// The memory settings of a requester.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRequest {
    /// Bytes on each accelerator; `None` means everything except what asleep engines may keep.
    pub awake: Option<Bytes>,
    pub asleep: Bytes,
    /// RAM of the node for weights while asleep; `None` means as much as awake, less a known KV cache.
    pub host: Option<Bytes>,
}

/// The sleep settings of a requester.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SleepPolicy {
    pub level: SleepLevelPolicy,
    /// `None` means that the engine sleeps until another engine needs its memory.
    pub stop_after: Option<Millis>,
}

/// Takes the sleep settings of a model.
impl From<IdlePolicy> for SleepPolicy {
    fn from(IdlePolicy { level, stop_after, .. }: IdlePolicy) -> Self {
        Self { level, stop_after }
    }
}

/// Default residue of an asleep engine: vLLM keeps 1 to 2 GiB.
const DEFAULT_RESIDUE: Bytes = Bytes(2 << 30);

/// Why annotations are invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the annotation {key} is '{text}', which is not an amount of memory: use a value such as 40Gi")]
    Memory { key: &'static str, text: String },
    #[error("the annotation {key} is '{0}': use 1, 2, auto or never", key = keys::SLEEP_LEVEL)]
    Level(String),
    #[error("the annotation {key} is '{0}', which is not a duration: use a value such as 1h, 30m or never", key = keys::STOP_AFTER)]
    Span(String),
    #[error("the annotation {} cannot be parsed: {why}", keys::ENGINE)]
    Engine { why: String },
    #[error("the annotation {key} is missing or invalid")]
    Missing { key: &'static str },
}

/// An engine that was found on a provider's Pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProviderRecord {
    pub node: NodeName,
    pub record: EngineRecord,
    /// Level at which the engine sleeps, if recorded.
    pub sleep_level: Option<SleepLevel>,
    /// Port that the engine listens on.
    pub port: u16,
}

/// Engine state that no annotation of the public project holds.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ProviderEngineAnnotation {
    node: NodeName,
    mode: ProviderMode,
    /// Hexadecimal: some JSON readers have no 64-bit integers.
    fingerprint: String,
    generation: Generation,
    sizes: MemorySizes,
    level: SleepLevelPolicy,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    stop_after: Option<Millis>,
    last_used: Tick,
    #[serde(rename = "slept", default, skip_serializing_if = "Option::is_none")]
    sleep_level: Option<SleepLevel>,
}

/// Reads the memory settings of a requester.
///
/// # Errors
/// An annotation is not an amount of memory.
pub fn memory_request(pod: &Pod) -> Result<MemoryRequest, Error> {
    let amount = |key: &'static str| {
        let text = pod.metadata.annotations.as_ref().and_then(|all| all.get(key));
        text.map(|text| text.parse().map_err(|_| Error::Memory { key, text: text.clone() })).transpose()
    };
    Ok(MemoryRequest {
        awake: amount(keys::MEMORY)?.filter(|awake| *awake > Bytes::ZERO),
        asleep: amount(keys::MEMORY_ASLEEP)?.unwrap_or(DEFAULT_RESIDUE),
        host: amount(keys::HOST_MEMORY)?,
    })
}

/// Reads the sleep settings of a requester.
///
/// # Errors
/// An annotation is neither a level nor a time.
pub fn sleep_policy(pod: &Pod) -> Result<SleepPolicy, Error> {
    let annotation =
        |key: &str| pod.metadata.annotations.as_ref().and_then(|all| all.get(key)).map(String::as_str);
    let level = match annotation(keys::SLEEP_LEVEL) {
        None => SleepLevelPolicy::Auto,
        Some(text) => level_of(text).ok_or_else(|| Error::Level(text.to_owned()))?,
    };
    let stop_after = match annotation(keys::STOP_AFTER) {
        None | Some("never") => None,
        Some(text) => Some(text.parse().map_err(|_| Error::Span(text.to_owned()))?),
    };
    Ok(SleepPolicy { level, stop_after })
}

/// Renders sleep settings as annotations.
#[must_use]
pub fn sleep_policy_annotations(SleepPolicy { level, stop_after }: SleepPolicy) -> Value {
    // The annotation has no word for `OneOrStop`; the reader derives it again from the engine's command.
    let level = if level == SleepLevelPolicy::OneOrStop { SleepLevelPolicy::One } else { level };
    let level = LEVELS.iter().find(|(_, known)| *known == level).map(|(text, _)| *text);
    json!({
        keys::SLEEP_LEVEL: level,
        keys::STOP_AFTER: stop_after.map_or_else(|| "never".to_owned(), |after| after.to_string()),
    })
}

const LEVELS: [(&str, SleepLevelPolicy); 4] = [
    ("1", SleepLevelPolicy::One),
    ("2", SleepLevelPolicy::Two),
    ("auto", SleepLevelPolicy::Auto),
    ("never", SleepLevelPolicy::Never),
];

fn level_of(text: &str) -> Option<SleepLevelPolicy> {
    LEVELS.iter().find(|(known, _)| *known == text).map(|(_, level)| *level)
}

/// Renders the annotations that identify an engine and its requester.
///
/// `name`: the requester's name, if there is one. `slept`: the engine's sleep level, which no engine reports.
#[must_use]
pub fn annotations(
    node: &NodeName,
    record: &EngineRecord,
    name: Option<&str>,
    slept: Option<SleepLevel>,
) -> Value {
    let annotation = ProviderEngineAnnotation {
        node: node.clone(),
        mode: record.engine.mode,
        fingerprint: record.engine.fingerprint.to_string(),
        generation: record.generation,
        sizes: record.sizes,
        level: record.level,
        stop_after: record.stop_after,
        last_used: record.last_used,
        sleep_level: slept,
    };
    let requester = record.requester.as_ref().map(|id| format!("{id} {}", name.unwrap_or_default()));
    json!({
        keys::REQUESTER: requester,
        keys::ACCELERATORS: keys::join_ids(&record.engine.accelerators),
        // Serializing numbers and strings cannot fail.
        keys::ENGINE: serde_json::to_string(&annotation).unwrap_or_default(),
    })
}

/// Writes the annotations of a new provider.
pub fn write(pod: &mut Pod, node: &NodeName, name: &str, record: &EngineRecord, port: u16) {
    let all = pod.metadata.annotations.get_or_insert_default();
    let Value::Object(written) = annotations(node, record, Some(name), None) else { return };
    all.extend(written.into_iter().filter_map(|(key, value)| Some((key, value.as_str()?.to_owned()))));
    all.insert(keys::SERVER_PORT.to_owned(), port.to_string());
}

/// Reads the engine of a provider's Pod; `None` if the Pod is not Rouse's.
#[must_use]
pub fn read(pod: &Pod) -> Option<Result<ProviderRecord, Error>> {
    let all = pod.metadata.annotations.as_ref()?;
    let text = all.get(keys::ENGINE)?;
    Some(parse_record(pod, all, text))
}

fn parse_record(pod: &Pod, all: &BTreeMap<String, String>, text: &str) -> Result<ProviderRecord, Error> {
    let annotation: ProviderEngineAnnotation =
        serde_json::from_str(text).map_err(|error| Error::Engine { why: error.to_string() })?;
    let fingerprint = u64::from_str_radix(&annotation.fingerprint, 16);
    let fingerprint = fingerprint.map_err(|error| Error::Engine { why: error.to_string() })?;
    let missing = |key: &'static str| Error::Missing { key };
    let port = all.get(keys::SERVER_PORT).and_then(|port| port.parse().ok());
    let mut accelerators = keys::accelerators(pod);
    accelerators.sort();
    if accelerators.is_empty() {
        return Err(missing(keys::ACCELERATORS));
    }
    let requester = all.get(keys::REQUESTER).and_then(|text| text.split(' ').next());
    Ok(ProviderRecord {
        port: port.ok_or_else(|| missing(keys::SERVER_PORT))?,
        sleep_level: annotation.sleep_level,
        record: EngineRecord {
            engine: PairingEngineId {
                mode: annotation.mode,
                accelerators: accelerators.into(),
                fingerprint: EngineFingerprint(fingerprint),
            },
            generation: annotation.generation,
            sizes: annotation.sizes,
            level: annotation.level,
            stop_after: annotation.stop_after,
            requester: requester.filter(|uid| !uid.is_empty()).map(RequesterId::from),
            last_used: annotation.last_used,
        },
        node: annotation.node,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(requester: Option<&str>) -> EngineRecord {
        EngineRecord {
            engine: PairingEngineId {
                mode: ProviderMode::Sleep,
                accelerators: ["GPU-b".into(), "GPU-a".into()].into(),
                fingerprint: EngineFingerprint(u64::MAX - 1),
            },
            generation: Generation(u64::MAX),
            sizes: MemorySizes { awake: Bytes::gib(40), asleep: Bytes::gib(1), host: Bytes::ZERO },
            level: SleepLevelPolicy::Auto,
            stop_after: None,
            requester: requester.map(RequesterId::from),
            last_used: Tick(1_700_000_000_123),
        }
    }

    #[test]
    fn what_is_written_is_read() {
        for requester in [None, Some("uid-1")] {
            let (mut pod, node) = (Pod::default(), NodeName::from("somenode"));
            let mut record = record(requester);
            write(&mut pod, &node, "chat-x", &record, 8000);
            let mut sorted = record.engine.accelerators.to_vec();
            sorted.sort();
            record.engine.accelerators = sorted.into();
            record.stop_after = requester.map(|_| Millis::secs(60));
            write(&mut pod, &node, "chat-x", &record, 8000);
            assert_eq!(
                read(&pod).unwrap().unwrap(),
                ProviderRecord { node, record, sleep_level: None, port: 8000 }
            );
            let bound = pod.metadata.annotations.as_ref().unwrap().get(keys::REQUESTER);
            assert_eq!(bound.map(String::as_str), requester.map(|_| "uid-1 chat-x"));
        }
    }

    /// Gateways of an earlier build wrote this, and read it during a rollout.
    #[test]
    fn the_words_of_the_annotation_stay() {
        let mut pod = Pod::default();
        write(&mut pod, &NodeName::from("n"), "x", &record(None), 8000);
        let all = pod.metadata.annotations.as_mut().unwrap();
        let mut written: serde_json::Value = serde_json::from_str(&all[keys::ENGINE]).unwrap();
        written["slept"] = "two".into();
        written["level"] = "onlyOne".into();
        all.insert(keys::ENGINE.to_owned(), written.to_string());
        let read = read(&pod).unwrap().unwrap();
        assert_eq!(
            (read.sleep_level, read.record.level),
            (Some(SleepLevel::Two), SleepLevelPolicy::OneOrStop)
        );
    }

    #[test]
    fn what_cannot_be_read_says_why_and_a_stranger_is_none() {
        let with = |all: &[(&str, &str)]| {
            let mut pod = Pod::default();
            let all = all.iter().map(|(key, text)| ((*key).to_owned(), (*text).to_owned()));
            pod.metadata.annotations = Some(all.collect());
            pod
        };
        assert_eq!(read(&with(&[(keys::REQUESTER, "uid name")])), None, "the public project's");
        let broken = read(&with(&[(keys::ENGINE, "{")])).unwrap().unwrap_err();
        assert!(broken.to_string().contains("rouse.dev/engine cannot be parsed"), "{broken}");
        let mut pod = Pod::default();
        write(&mut pod, &NodeName::from("n"), "x", &record(None), 8000);
        pod.metadata.annotations.as_mut().unwrap().remove(keys::ACCELERATORS);
        assert_eq!(read(&pod).unwrap(), Err(Error::Missing { key: keys::ACCELERATORS }));
        let odd = memory_request(&with(&[(keys::MEMORY, "much")])).unwrap_err();
        assert_eq!(
            odd.to_string(),
            "the annotation rouse.dev/gpu-memory is 'much', which is not an amount of memory: use a value such as 40Gi"
        );
        let rests =
            |key: &str, text: &str| sleep_policy(&with(&[(key, text)])).map_err(|error| error.to_string());
        let odd = rests(keys::SLEEP_LEVEL, "3").unwrap_err();
        assert!(odd.contains("rouse.dev/sleep-level is '3': use 1, 2, auto or never"), "{odd}");
        let odd = rests(keys::STOP_AFTER, "soon").unwrap_err();
        assert!(odd.contains("rouse.dev/stop-after is 'soon'"), "{odd}");
        let never = SleepPolicy { level: SleepLevelPolicy::Auto, stop_after: None };
        assert_eq!(rests(keys::STOP_AFTER, "never"), Ok(never));
        for (_, level) in LEVELS {
            let (mut pod, said) = (Pod::default(), SleepPolicy { level, stop_after: Some(Millis(90_500)) });
            pod.metadata.annotations = serde_json::from_value(sleep_policy_annotations(said)).unwrap();
            assert_eq!(sleep_policy(&pod), Ok(said));
        }
        let only = SleepPolicy { level: SleepLevelPolicy::OneOrStop, stop_after: None };
        assert_eq!(sleep_policy_annotations(only)[keys::SLEEP_LEVEL], "1");
        let said = memory_request(&with(&[(keys::MEMORY, "40Gi"), (keys::HOST_MEMORY, "8Gi")])).unwrap();
        assert_eq!(
            said,
            MemoryRequest { awake: Some(Bytes::gib(40)), asleep: Bytes::gib(2), host: Some(Bytes::gib(8)) }
        );
    }
}
