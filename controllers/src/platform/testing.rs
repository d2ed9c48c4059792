//! Builders for the platform's tests.

use std::sync::Arc;

use kube::api::ObjectMeta;
use rouse::{
    model::VariantName,
    pairing::settings::PairingSettings,
    units::{Millis, Tick},
};
use rouse_config::EngineConfig;
use serde_json::json;

use super::ModelPlacement;
use crate::{
    convert::{ConversionPolicy, ConvertedModel, ModelHosting, convert},
    crd::{InferenceModel, ledger::ObjectName, pool::NVIDIA_GPU},
    engine_pod::EnginePod,
    label,
    stub_key::StubKey,
    workload::{ModelRef, Sidecar},
    writer::fence::SeenObject,
};

/// Builds the placement of a model whose InferenceModel has the model's name.
pub(super) fn placement(model: &str, namespace: &str) -> ModelPlacement {
    let object: InferenceModel = serde_json::from_value(json!({
        "apiVersion": "rouse.dev/v1alpha1", "kind": "InferenceModel",
        "metadata": {"name": model, "namespace": namespace},
        "spec": {"modelName": model, "memory": "40Gi", "containerImage": "vllm:1"},
    }))
    .unwrap();
    let converted = convert(&object, ConversionPolicy::default()).unwrap();
    let ConvertedModel { object, engine, hosting, variants, .. } = converted;
    let ModelHosting::Deployment(pod_template) = hosting else { panic!("{hosting:?}") };
    ModelPlacement {
        owner: ModelRef { object, uid: "uid".to_owned() },
        label: label::value(model),
        engine,
        pod_template,
        variant: variants.into_iter().next().unwrap(),
        pool: None,
        quota: None,
        taint: None,
        resource: NVIDIA_GPU.to_owned(),
        slots: None,
        meter_lag: Millis::ZERO,
        shared_accelerators: false,
        dual_pods: false,
        template_hash: "0".repeat(8),
    }
}

/// Builds the settings of the injected stub.
pub(super) fn sidecar() -> Sidecar {
    let timing = PairingSettings::default();
    Sidecar { image: "stub:1".to_owned(), pull_policy: None, key: StubKey::example(), timing }
}

/// Returns this placement for another model, without the cost of another conversion.
pub(super) fn renamed(base: &ModelPlacement, model: &str, namespace: &str) -> ModelPlacement {
    ModelPlacement {
        owner: ModelRef { object: ObjectName::new(namespace, model), uid: base.owner.uid.clone() },
        label: label::value(model),
        engine: Arc::new(EngineConfig { name: model.into(), ..(*base.engine).clone() }),
        ..base.clone()
    }
}

/// Builds an unbound Pod.
pub(super) fn pod(namespace: &str, name: &str, model: &str, template: &str) -> EnginePod {
    EnginePod {
        name: ObjectName::new(namespace, name),
        uid: "uid".to_owned(),
        seen: SeenObject::of(&ObjectMeta::default()),
        model: model.to_owned(),
        template_hash: template.to_owned(),
        variant: VariantName::default(),
        fingerprint: 0,
        engine: None,
        asleep: None,
        address: None,
        object: None,
        deployment: None,
        node: None,
        created: Tick(0),
        ready: false,
        terminating: false,
        finished: false,
        failure: None,
    }
}
