//! Builds the requester Pod of a model in mode dualPods.
//!
//! It holds the accelerators and requests the engine that uses them.

use rouse::{model::EngineMemory, pairing::event::MemorySizes, units::Bytes};
use serde_json::{Map, Value, json};

use super::{
    MANAGED, SPI_PORT, Workload, affinity,
    merge::{self, is_named},
};
use crate::{
    crd::Quantity,
    dual_pods::{keys, record},
    label,
};

/// Fields of the engine's Pod that its requester takes over: scheduling, since the requester is placed first, and image
/// pull secrets.
const SCHEDULING_FIELDS: [&str; 7] = [
    "nodeSelector",
    "affinity",
    "tolerations",
    "topologySpreadConstraints",
    "schedulerName",
    "priorityClassName",
    "imagePullSecrets",
];

impl Workload<'_> {
    /// Builds the requester of this engine.
    pub(super) fn requester(&self, engine: Value) -> Value {
        let spec = engine.get("spec");
        let accelerators = self.accelerators(spec);
        let mut spec_fields: Map<String, Value> = SCHEDULING_FIELDS
            .iter()
            .filter_map(|key| {
                Some(((*key).to_owned(), spec?.get(key).filter(|value| !value.is_null())?.clone()))
            })
            .collect();
        self.prefer_sleeping_engines(&mut spec_fields);
        let EngineMemory { awake, asleep, host } = self.variant.spec.memory;
        let host = Bytes(host.0.saturating_mul(u64::from(self.variant.spec.accelerators.count())));
        let sizes = MemorySizes { awake, asleep, host };
        let timing = &self.sidecar.timing;
        let hold = (timing.drain_timeout + timing.sleep_timeout_for(&sizes)).0.div_ceil(1000);
        let grace = timing.max_hold(&sizes).0.div_ceil(1000);
        let token = format!("--token-sha256={}", self.sidecar.key.hash(self.owner));
        let mut stub = self.stub([format!("--hold={hold}s"), token]);
        merge::into(
            &mut stub,
            &json!({"name": keys::CONTAINER, "resources": {"limits": accelerators, "requests": accelerators}}),
        );
        spec_fields.insert("containers".to_owned(), json!([stub]));
        spec_fields.insert("terminationGracePeriodSeconds".to_owned(), json!(grace));
        let mut annotations = self.annotations();
        merge::into(
            &mut annotations,
            &json!({
                keys::ADMIN_PORT: SPI_PORT.to_string(),
                keys::TOKEN_OF: self.owner.uid,
                keys::MEMORY: Quantity::from(awake).to_string(),
                keys::MEMORY_ASLEEP: Quantity::from(asleep).to_string(),
                keys::HOST_MEMORY: Quantity::from(host).to_string(),
            }),
        );
        if self.slots.is_some() {
            merge::into(&mut annotations, &json!({keys::ACTUATION: keys::GATEWAY_ACTUATION}));
        }
        merge::into(&mut annotations, &record::sleep_policy_annotations(self.variant.spec.idle.into()));
        merge::into(&mut annotations, &self.server(engine));
        json!({"metadata": {"annotations": annotations}, "spec": spec_fields})
    }

    /// Returns the annotations that define the engine: a server patch from the template, or the InferenceServerConfig
    /// it names.
    fn server(&self, engine: Value) -> Value {
        let annotation = |key: &str| {
            engine.pointer("/metadata/annotations")?.get(key).filter(|value| value.is_string()).cloned()
        };
        if let Some(config) = annotation(keys::SERVER_CONFIG) {
            return json!({keys::SERVER_CONFIG: config, keys::SERVED_NAME: self.engine.served_name});
        }
        let mode = annotation(keys::MODE).map(|mode| (keys::MODE.to_owned(), mode));
        let patch = (keys::SERVER_PATCH.to_owned(), json!(self.patch(engine)));
        Value::Object(mode.into_iter().chain([patch]).collect())
    }

    fn label(&self) -> String {
        label::value(self.engine.name.as_str())
    }

    /// Prefers nodes where an engine of this model sleeps, since a requester is served fastest there.
    fn prefer_sleeping_engines(&self, spec: &mut Map<String, Value>) {
        let labels = json!({keys::ENGINE_OF: self.label(), keys::SLEEPING: "true"});
        let term = json!({"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": labels}});
        affinity::add_preference(spec, "podAffinity", json!({"weight": 100, "podAffinityTerm": term}));
    }

    /// Returns the extended resources of the engine's container, and those of its accelerators.
    ///
    /// Without slots, the former include the latter, unless the template requests none at all.
    fn accelerators(&self, spec: Option<&Value>) -> Value {
        let mut all = spec.and_then(|spec| spec.get("containers")?.as_array()).into_iter().flatten();
        let container = all.find(|it| is_named(it, &self.pod_template.container));
        let limits = container.and_then(|it| it.pointer("/resources/limits")?.as_object());
        let mut extended: Map<String, Value> = limits
            .into_iter()
            .flatten()
            .filter(|(name, _)| name.contains('/'))
            .map(|(name, amount)| (name.clone(), amount.clone()))
            .collect();
        if self.slots.is_some() || extended.is_empty() {
            extended.extend(self.accelerator_resources());
        }
        Value::Object(extended)
    }

    /// Renders a server patch that replaces the requester's spec with the engine's.
    fn patch(&self, mut engine: Value) -> String {
        let mut spec = engine.get_mut("spec").map(Value::take).unwrap_or_default();
        merge::into(&mut spec, &json!({"$patch": "replace"}));
        let mut all = spec.get_mut("containers").and_then(Value::as_array_mut).into_iter().flatten();
        if let Some(annotations) =
            all.find(|it| is_named(it, &self.pod_template.container)).and_then(Value::as_object_mut)
        {
            self.engine_container(annotations);
        }
        let mut given = |at: &str| match engine.pointer_mut(at).map(Value::take) {
            Some(Value::Object(given)) => given,
            _ => Map::new(),
        };
        let (mut labels, annotations) = (given("/metadata/labels"), given("/metadata/annotations"));
        labels.insert(MANAGED.to_owned(), Value::Null);
        labels.insert(keys::ENGINE_OF.to_owned(), json!(self.label()));
        let patch = json!({"metadata": {"labels": labels, "annotations": annotations}, "spec": spec});
        // Server patches are templates, while an engine's command is literal text. In JSON, two adjacent opening braces
        // occur only in strings, so escaping them is safe.
        patch.to_string().replace("{{", "\\u007b\\u007b")
    }

    /// Sets the container's name and probe port, by which the controller of dual pods finds the engine.
    fn engine_container(&self, spec_fields: &mut Map<String, Value>) {
        spec_fields.insert("name".to_owned(), json!(keys::CONTAINER));
        let port = self.pod_template.port;
        let probed = spec_fields.get("readinessProbe").and_then(|probe| probe.pointer("/httpGet/port"));
        if probed != Some(&json!(port)) {
            let probe = json!({"httpGet": {"path": "/health", "port": port}, "periodSeconds": 1});
            spec_fields.insert("readinessProbe".to_owned(), probe);
        }
        enable_sleep_endpoints(spec_fields);
    }
}

/// vLLM offers its sleep and wake endpoints only with this variable.
const DEVELOPERS: &str = "VLLM_SERVER_DEV_MODE";

/// Enables the sleep and wake endpoints of the engine in this container.
pub(super) fn enable_sleep_endpoints(container: &mut Map<String, Value>) {
    let env = container.entry("env").or_insert(Value::Null);
    if !env.is_array() {
        *env = json!([]);
    }
    if let Some(env) = env.as_array_mut()
        && !env.iter().any(|it| is_named(it, DEVELOPERS))
    {
        env.push(json!({"name": DEVELOPERS, "value": "1"}));
    }
}
