//! Gives Pods that request no accelerator access to their node's accelerators, as configured in the pool.

use k8s_openapi::api::core::v1::{EnvVar, PodSpec, Toleration};

use super::keys;
use crate::{crd::pool::GpuAccess, index::PoolTerms};

/// Exposes all accelerators of the node. CUDA gets an engine's subset by their numbers among all.
const VISIBLE: (&str, &str) = ("NVIDIA_VISIBLE_DEVICES", "all");
/// RuntimeClass name that NVIDIA's operator uses.
const RUNTIME_CLASS: &str = "nvidia";

/// Accelerator access of one pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcceleratorAccess {
    /// Key of the taint that keeps other Pods off the pool's nodes.
    taint: Option<String>,
    gpu: GpuAccess,
    runtime_class: Option<String>,
    /// Extended resource that Pods with accelerators of their own request.
    resource: String,
}

impl AcceleratorAccess {
    #[must_use]
    pub fn of(terms: &PoolTerms) -> Self {
        Self {
            taint: terms.taint.clone(),
            gpu: terms.gpu_access,
            runtime_class: terms.runtime_class_name.clone(),
            resource: terms.resource.clone(),
        }
    }

    /// Returns the extended resource that Pods with accelerators of their own request in the pool.
    #[must_use]
    pub fn resource(&self) -> &str {
        &self.resource
    }

    /// Adds the pool's tolerations and access settings to the Pod and its engine container.
    ///
    /// Values that the user set stay. The exception is `privileged`, which the access mode Privileged forces to true.
    pub fn grant(&self, spec: &mut PodSpec) {
        if let Some(key) = &self.taint {
            tolerate(spec, key);
        }
        if self.gpu == GpuAccess::RuntimeClass {
            let class = self.runtime_class.as_deref().unwrap_or(RUNTIME_CLASS);
            spec.runtime_class_name.get_or_insert_with(|| class.to_owned());
        }
        let Some(container) = spec.containers.iter_mut().find(|container| container.name == keys::CONTAINER)
        else {
            return;
        };
        if self.gpu == GpuAccess::Privileged {
            container.security_context.get_or_insert_default().privileged = Some(true);
        }
        let env = container.env.get_or_insert_default();
        let (name, value) = VISIBLE;
        if env.iter().all(|known| known.name != name) {
            env.push(EnvVar { name: name.to_owned(), value: Some(value.to_owned()), ..EnvVar::default() });
        }
    }
}

fn tolerate(spec: &mut PodSpec, key: &str) {
    let all = spec.tolerations.get_or_insert_default();
    let any = |toleration: &Toleration| {
        toleration.operator.as_deref() == Some("Exists")
            && toleration.effect.is_none()
            && toleration.key.as_deref().is_none_or(|known| known == key)
    };
    if !all.iter().any(any) {
        let operator = Some("Exists".to_owned());
        all.push(Toleration { key: Some(key.to_owned()), operator, ..Toleration::default() });
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn granted(gpu: GpuAccess, class: Option<&str>, spec: Value) -> Value {
        let runtime_class = class.map(str::to_owned);
        let resource = "nvidia.com/gpu".to_owned();
        let access = AcceleratorAccess { taint: Some("inference".to_owned()), gpu, runtime_class, resource };
        let mut spec: PodSpec = serde_json::from_value(spec).unwrap();
        access.grant(&mut spec);
        let once = spec.clone();
        access.grant(&mut spec);
        assert_eq!(spec, once, "it has it already");
        serde_json::to_value(spec).unwrap()
    }

    #[test]
    fn a_pod_gets_what_its_pool_says() {
        let plain = || json!({"containers": [{"name": "other"}, {"name": "inference-server"}]});
        let all = json!([{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]);
        let tolerations = json!([{"key": "inference", "operator": "Exists"}]);
        for (gpu, class, runtime, privileged) in [
            (GpuAccess::Envvar, None, Value::Null, Value::Null),
            (GpuAccess::RuntimeClass, None, json!("nvidia"), Value::Null),
            (GpuAccess::RuntimeClass, Some("gpus"), json!("gpus"), Value::Null),
            (GpuAccess::Privileged, None, Value::Null, json!(true)),
        ] {
            let made = granted(gpu, class, plain());
            assert_eq!(made["containers"][1]["env"], all);
            assert_eq!(made["containers"][0], json!({"name": "other"}));
            assert_eq!((&made["tolerations"], &made["runtimeClassName"]), (&tolerations, &runtime));
            assert_eq!(made["containers"][1]["securityContext"]["privileged"], privileged);
        }
    }

    #[test]
    fn what_its_user_says_stays() {
        let own = json!({
            "runtimeClassName": "own",
            "tolerations": [{"operator": "Exists"}],
            "containers": [{"name": "inference-server", "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "0"}]}],
        });
        assert_eq!(granted(GpuAccess::RuntimeClass, None, own.clone()), own);
        let narrow = json!([{"key": "inference", "operator": "Exists", "effect": "NoExecute"}]);
        let made = granted(GpuAccess::Envvar, None, json!({"containers": [], "tolerations": narrow}));
        assert_eq!(made["tolerations"].as_array().unwrap().len(), 2, "that is not all that its taint does");
    }
}
