//! Builds the status of a DeviceConfiguration.

use kube::ResourceExt as _;
use rouse::{slots::ConfigurationName, units::Tick};
use serde_json::{Value, json};

use crate::{
    condition::{ACCEPTED, condition},
    crd::{DeviceConfiguration, DeviceConfigurationSpec, DeviceConfigurationStatus, GROUP},
    metrics::DeviceSlotGauges,
    rejection::Rejections,
};

/// Time within which the kubelet lists the slot of a container that it starts. An agent that has restarted meanwhile
/// takes the slot for an unused one.
const LISTED_WITHIN_SECONDS: u32 = 60;

/// Returns the status of a configuration. It equals the stored one if there is nothing to write.
///
/// `preferred`: the configuration that offers the same accelerators instead.
pub(super) fn status(
    object: &DeviceConfiguration,
    refused: Option<&Rejections>,
    preferred: Option<&ConfigurationName>,
    gauges: DeviceSlotGauges,
    now: Tick,
) -> DeviceConfigurationStatus {
    let before = object.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let generation = object.metadata.generation;
    let build = |is_accepted, reason: &str, message: &str| {
        condition(ACCEPTED, is_accepted, reason, message, generation, before, now)
    };
    let accepted = match refused {
        None => build(true, "Accepted", &accepted_message(&object.spec, preferred)),
        Some(refused) => build(false, refused.reason(), &refused.to_string()),
    };
    DeviceConfigurationStatus {
        observed_generation: generation,
        devices: gauges.devices,
        slots: gauges.slots(),
        used_slots: gauges.claimed(),
        conditions: vec![accepted],
    }
}

/// Returns what nodes do with a valid configuration, and what its author should know.
fn accepted_message(spec: &DeviceConfigurationSpec, preferred: Option<&ConfigurationName>) -> String {
    let mut message = "nodes offer the devices that they find".to_owned();
    message.extend(preferred.map(|preferred| {
        format!(
            "; but '{preferred}', which is older, offers the accelerators of nodes with the labels of both: select \
             other nodes"
        )
    }));
    message.extend((spec.unused_seconds < LISTED_WITHIN_SECONDS).then_some(
        "; with unusedSeconds below 60, a container that starts while the agent restarts may lose its slot",
    ));
    message
}

/// Builds the object that is applied, in exactly the version that the status is for.
pub(super) fn object(
    name: &ConfigurationName,
    before: &DeviceConfiguration,
    status: &DeviceConfigurationStatus,
) -> Value {
    json!({
        "apiVersion": format!("{GROUP}/v1alpha1"),
        "kind": "DeviceConfiguration",
        "metadata": {
            "name": name.as_str(),
            "uid": before.uid(),
            "resourceVersion": before.resource_version(),
        },
        "status": status,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rejection::Rejection;

    fn configuration() -> DeviceConfiguration {
        let object = json!({
            "apiVersion": "rouse.dev/v1alpha1",
            "kind": "DeviceConfiguration",
            "metadata": {"name": "camera", "uid": "u", "resourceVersion": "7", "generation": 3},
            "spec": {"discovery": {"static": {"devices": [{"id": "one"}]}}, "capacity": 5},
        });
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn a_status_has_the_sums_and_stays_the_same_while_nothing_changes() {
        let mut object = configuration();
        let gauges = DeviceSlotGauges { devices: 2, free: 7, used: 2, unused: 1 };
        let first = status(&object, None, None, gauges, Tick(60_000));
        assert_eq!((first.devices, first.slots, first.used_slots), (2, 10, 3));
        assert_eq!(first.observed_generation, Some(3));
        assert_eq!(
            (first.conditions[0].type_.as_str(), first.conditions[0].status.as_str()),
            ("Accepted", "True")
        );
        object.status = Some(first.clone());
        assert_eq!(status(&object, None, None, gauges, Tick(120_000)), first);
    }

    #[test]
    fn the_message_of_a_valid_configuration_names_the_preferred_one_and_warns_of_short_unused_seconds() {
        let mut object = configuration();
        let message = |object: &DeviceConfiguration, preferred: Option<&str>| {
            let preferred = preferred.map(ConfigurationName::from);
            let status = status(object, None, preferred.as_ref(), DeviceSlotGauges::default(), Tick(0));
            let [condition] = status.conditions.as_slice() else { panic!("{status:?}") };
            assert_eq!((condition.type_.as_str(), condition.status.as_str()), ("Accepted", "True"));
            condition.message.clone()
        };
        assert_eq!(message(&object, None), "nodes offer the devices that they find");
        assert!(message(&object, Some("gpus")).contains("but 'gpus', which is older"));
        object.spec.unused_seconds = 60;
        assert!(!message(&object, None).contains("unusedSeconds"));
        object.spec.unused_seconds = 59;
        assert!(message(&object, None).contains("with unusedSeconds below 60"));
    }

    #[test]
    fn a_refused_configuration_says_what_to_correct() {
        let refused = Rejections::from(Rejection::Spec("spec.capacity: write at least 1".to_owned()));
        let status = status(&configuration(), Some(&refused), None, DeviceSlotGauges::default(), Tick(0));
        let condition = &status.conditions[0];
        assert_eq!((condition.status.as_str(), condition.reason.as_str()), ("False", "InvalidSpec"));
        assert_eq!(condition.message, "spec.capacity: write at least 1");
        let object = object(&"camera".into(), &configuration(), &status);
        assert_eq!(object["metadata"], json!({"name": "camera", "uid": "u", "resourceVersion": "7"}));
        assert_eq!(object["status"]["slots"], 0);
    }
}
