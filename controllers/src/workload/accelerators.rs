//! The extended resources by which the kubelet gives a Pod its accelerators.
//!
//! A template names `nvidia.com/gpu`, or another resource that its author knows. Its engines' Pods request the resource
//! of the pool instead. In a pool of slots the leader has chosen the accelerators before there is a Pod, and the Pod
//! requests one slot of each: so the scheduler finds the one node that has them, and the kubelet confirms the choice.

use rouse::{
    model::AcceleratorId,
    pairing::ids::NodeName,
    slots::{ConfigurationName, RESOURCE_DOMAIN, instance_name, instance_resource},
};
use serde_json::{Map, Value, json};

use super::{Workload, merge};
use crate::{crd::pool::NVIDIA_GPU, ledger::ReservationLocation};

/// How the engines of a pool of slots get their accelerators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotTerms {
    /// The DeviceConfiguration that has a DeviceInstance for each accelerator of the pool; `None` while the pool's
    /// object is invalid, so that nothing starts there.
    pub configuration: Option<ConfigurationName>,
    /// The accelerators that the leader chose for one engine; `None` for all engines of a variant.
    pub location: Option<ReservationLocation>,
}

impl SlotTerms {
    /// Returns the resources of the chosen accelerators, of each of which a Pod requests one.
    fn instance_resources(&self) -> Option<impl Iterator<Item = String>> {
        let (configuration, location) = (self.configuration.as_ref()?, self.location.as_ref()?);
        let node = NodeName::from(location.node.as_str());
        let resource = move |id: &AcceleratorId| {
            instance_resource(&instance_name(configuration, id.as_str(), Some(&node)))
        };
        Some(location.accelerators.iter().map(resource))
    }
}

/// Whether this is a resource of a device plugin of Rouse's.
#[must_use]
pub fn is_slot_resource(resource: &str) -> bool {
    resource.strip_prefix(RESOURCE_DOMAIN).is_some_and(|name| name.starts_with('/'))
}

impl Workload<'_> {
    /// Returns the resources by which a Pod of this model gets its accelerators, with their amounts.
    pub(super) fn accelerator_resources(&self) -> Map<String, Value> {
        if let Some(resources) = self.slots.and_then(SlotTerms::instance_resources) {
            return resources.map(|resource| (resource, json!("1"))).collect();
        }
        let count = self.variant.spec.accelerators.count();
        // A model without accelerators has no slots.
        let any = self.slots.is_none() || count > 0;
        any.then(|| (self.resource.to_owned(), json!(count.to_string()))).into_iter().collect()
    }

    /// Whether a template's request for this resource is one for accelerators, which the pool decides about.
    fn is_replaced(&self, resource: &str) -> bool {
        [NVIDIA_GPU, self.resource].contains(&resource) || is_slot_resource(resource)
    }

    /// Adapts the requests of an engine's container to the pool. `requests`: the Pod itself gets the accelerators.
    pub(super) fn adapt_requests(&self, container: &mut Map<String, Value>, requests: bool) {
        if self.slots.is_none() && self.resource == NVIDIA_GPU {
            return;
        }
        for amounts in ["limits", "requests"] {
            let amounts = container.get_mut("resources").and_then(|resources| resources.get_mut(amounts));
            let Some(amounts) = amounts.and_then(Value::as_object_mut) else { continue };
            if self.slots.is_some() {
                amounts.retain(|resource, _| !self.is_replaced(resource));
            } else if !amounts.contains_key(self.resource)
                && let Some(amount) = amounts.remove(NVIDIA_GPU)
            {
                amounts.insert(self.resource.to_owned(), amount);
            }
        }
        if self.slots.is_some() && requests {
            // An API server sets the requests of extended resources to their limits.
            let limits = json!({"limits": self.accelerator_resources()});
            merge::into(container.entry("resources").or_insert(Value::Null), &limits);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_resources_of_the_domain_are_those_of_slots() {
        assert!(is_slot_resource("rouse.dev/h100") && is_slot_resource("rouse.dev/h100-0123456789"));
        assert!(!is_slot_resource("rouse.dev.example.com/x") && !is_slot_resource("nvidia.com/gpu"));
    }

    #[test]
    fn each_chosen_accelerator_has_a_resource_of_its_own() {
        let location = |accelerators: &[&str]| {
            let accelerators = accelerators.iter().map(|id| (*id).into()).collect();
            Some(ReservationLocation { node: "n".to_owned(), accelerators })
        };
        let terms = |location| SlotTerms { configuration: Some("h100".into()), location };
        assert!(terms(None).instance_resources().is_none());
        let both: Vec<String> = terms(location(&["a", "b"])).instance_resources().unwrap().collect();
        assert!(both.iter().all(|resource| resource.starts_with("rouse.dev/h100-")), "{both:?}");
        assert_ne!(both[0], both[1]);
        let elsewhere = SlotTerms {
            location: Some(ReservationLocation { node: "m".to_owned(), ..location(&["a"]).unwrap() }),
            ..terms(None)
        };
        assert_ne!(elsewhere.instance_resources().unwrap().next(), Some(both[0].clone()), "another node's");
    }
}
