//! `spec.engine`: what the engine is, and how it is spoken to.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use super::super::scalar::Scalar;

/// What the engine is, and how Rouse talks to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct EngineSpec {
    /// How Rouse probes the engine, puts it to sleep, wakes it and reads its metrics.
    pub kind: EngineKindSpec,
    /// What the readiness probe asks of the engine.
    pub task: ProbeTaskSpec,
    /// Port on which the engine listens in its Pod.
    #[schemars(extend("minimum" = 1, "maximum" = 65535))]
    pub port: u16,
    /// Name of the engine's container in the template. Default: the first container.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minLength" = 1, "maxLength" = 63))]
    pub container: Option<String>,
    /// The engine's name for the model. Default: modelName.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minLength" = 1, "maxLength" = 1024))]
    pub served_name: Option<String>,
    /// Which calls put the engine to sleep and wake it. `auto`: in mode dualPods, `vllm` if a vLLM command has
    /// --enable-sleep-mode, `sglang` if an SGLang command has --enable-memory-saver, else `none`. In mode deployment
    /// `auto` is `none`, because the Pod of an asleep engine keeps its accelerators from all other Pods: set `vllm` or
    /// `sglang` there to let the engine sleep.
    pub sleep_mode: SleepMode,
    /// How deep the engine sleeps. `1` keeps the weights in RAM, `2` drops them and reads them again at the wake,
    /// `auto` is 1 while there is RAM and the model is expected back soon, `never` stops the engine instead.
    pub level: SleepLevelSpec,
    /// When a new engine sleeps at level 1 and wakes once without need, so that its first sleep for another model is as
    /// fast as the later ones. `start`: before its first request, which waits for that. `idle`: once it is idle. Not in
    /// mode dualPods.
    pub rehearse: RehearsalSpec,
    /// When a client leaves: end its request on the engine (`abort`), or let the request finish unread (`drain`).
    pub on_disconnect: OnDisconnectSpec,
    /// Paths of a custom engine that `/engines/{model}/…` opens: `/path` for POST, `GET /path`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "passthrough_paths")]
    pub passthrough: Vec<String>,
}

/// Which program the engine is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum EngineKindSpec {
    Vllm,
    Sglang,
    LlamaCpp,
    #[default]
    Custom,
}

/// What the readiness probe asks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum ProbeTaskSpec {
    #[default]
    Generate,
    Embed,
    Score,
    Transcribe,
    None,
}

/// Which calls put the engine to sleep and wake it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum SleepMode {
    #[default]
    Auto,
    Vllm,
    Sglang,
    None,
}

/// How deep the engine sleeps. An unquoted 1 is a number in YAML, and means the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", try_from = "Scalar")]
pub enum SleepLevelSpec {
    #[serde(rename = "1")]
    One,
    #[serde(rename = "2")]
    Two,
    #[default]
    Auto,
    Never,
}

impl TryFrom<Scalar> for SleepLevelSpec {
    type Error = String;

    fn try_from(Scalar(text): Scalar) -> Result<Self, String> {
        match text.as_str() {
            "1" => Ok(Self::One),
            "2" => Ok(Self::Two),
            "auto" => Ok(Self::Auto),
            "never" => Ok(Self::Never),
            _ => Err(format!("'{text}' is not a level: use 1, 2, auto or never")),
        }
    }
}

impl JsonSchema for SleepLevelSpec {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> Cow<'static, str> {
        "Level".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"x-kubernetes-int-or-string": true, "pattern": "^(1|2|auto|never)$", "minimum": 1, "maximum": 2})
    }
}

/// When a new engine rehearses its sleep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum RehearsalSpec {
    Start,
    Idle,
    #[default]
    Never,
}

/// What happens to a request on the engine when its client leaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum OnDisconnectSpec {
    #[default]
    Abort,
    Drain,
}

impl Default for EngineSpec {
    fn default() -> Self {
        Self {
            kind: EngineKindSpec::default(),
            task: ProbeTaskSpec::default(),
            port: 8000,
            container: None,
            served_name: None,
            sleep_mode: SleepMode::default(),
            level: SleepLevelSpec::default(),
            rehearse: RehearsalSpec::default(),
            on_disconnect: OnDisconnectSpec::default(),
            passthrough: Vec::new(),
        }
    }
}

fn passthrough_paths(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": 64,
        "items": {"type": "string", "maxLength": 1024, "pattern": "^((GET|POST) )?/[-_.~A-Za-z0-9/]+$"},
    })
}
