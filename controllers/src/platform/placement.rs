//! Where and how the engines of one variant of a model run.

use std::sync::Arc;

use crate::{
    convert::{EnginePodTemplate, ModelHosting, ModelVariant},
    crd::{
        ledger::{ObjectName, ReservationOwner},
        pool::NVIDIA_GPU,
    },
    index::{PoolTerms, Resolved, ServedModel, ServedVariant},
    label,
    ledger::{ReservationLocation, ReservationRequest, SleepingMemory},
    workload::{self, ModelRef, Sidecar, SlotTerms, Workload},
};
use rouse::{
    model::{AcceleratorId, EngineId, SleepLevel},
    units::{Bytes, Millis},
};
use rouse_net::stub_api::Epoch;

/// Everything needed to run an engine of one variant of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelPlacement {
    pub owner: ModelRef,
    /// Label value of the model's name, which all its Pods have.
    pub label: String,
    pub engine: Arc<rouse_config::EngineConfig>,
    pub pod_template: EnginePodTemplate,
    pub variant: ModelVariant,
    /// Pool whose memory the engines reserve.
    pub pool: Option<String>,
    /// Quota of the model's namespace in that pool.
    pub quota: Option<Bytes>,
    /// Key of the pool's taint.
    pub taint: Option<String>,
    /// Extended resource that Pods request in the pool.
    pub resource: String,
    /// How the engines get their accelerators in a pool of slots.
    pub slots: Option<SlotTerms>,
    /// How long after a change meter readings are not trusted.
    pub meter_lag: Millis,
    /// Other engines can get the same accelerators.
    pub shared_accelerators: bool,
    /// Its Pods are requesters: the pairing controller starts, wakes and puts to sleep their engines.
    pub dual_pods: bool,
    /// Template hash of the Deployment for new engines.
    pub template_hash: String,
}

impl ModelPlacement {
    /// Builds the placement of a served model's variant; `None` for an external model, which runs outside of Rouse.
    #[must_use]
    pub fn of(
        object: &ObjectName,
        served: &ServedModel,
        variant: &ServedVariant,
        resolved: &Resolved,
        sidecar: &Sidecar,
    ) -> Option<Self> {
        let pool = variant.pool.as_ref().and_then(|pool| resolved.pools.get(pool));
        let terms = resolved.terms(variant);
        let mut placement = Self {
            owner: ModelRef { object: object.clone(), uid: served.uid.clone().unwrap_or_default() },
            label: label::value(variant.engine.name.as_str()),
            engine: Arc::clone(&variant.engine),
            pod_template: served.pods()?.clone(),
            variant: served.converted(variant)?.clone(),
            pool: variant.pool.clone(),
            quota: variant.quota,
            taint: terms.and_then(|terms| terms.taint.clone()),
            resource: terms.map_or_else(|| NVIDIA_GPU.to_owned(), |terms| terms.resource.clone()),
            slots: pool.filter(|pool| pool.slots.is_some()).map(|_| SlotTerms {
                configuration: terms.and_then(PoolTerms::slot_configuration),
                location: None,
            }),
            meter_lag: terms.map_or(Millis::ZERO, |terms| terms.meter_lag),
            shared_accelerators: terms.is_some_and(|terms| terms.slots > 1),
            dual_pods: matches!(served.model.hosting, ModelHosting::DualPods(_)),
            template_hash: String::new(),
        };
        placement.template_hash = placement.workload(sidecar, 0, 0).template_hash();
        Some(placement)
    }

    /// Describes this many Pods, under the leader of this epoch.
    pub(super) fn workload<'a>(&'a self, sidecar: &'a Sidecar, replicas: u32, epoch: Epoch) -> Workload<'a> {
        Workload {
            owner: &self.owner,
            engine: &self.engine,
            pod_template: &self.pod_template,
            variant: &self.variant,
            taint: self.taint.as_deref(),
            resource: &self.resource,
            slots: self.slots.as_ref(),
            sidecar,
            dual_pods: self.dual_pods,
            replicas,
            epoch,
        }
    }

    /// Returns the Deployment for new engines.
    #[must_use]
    pub fn deployment(&self) -> ObjectName {
        self.deployment_of(&self.template_hash)
    }

    /// Returns the Deployment whose Pods have this template.
    #[must_use]
    pub fn deployment_of(&self, template: &str) -> ObjectName {
        let object = &self.owner.object;
        ObjectName::new(object.namespace.clone(), workload::name(object, &self.variant.name, template))
    }

    /// Returns the id of the variant's engine with this number.
    #[must_use]
    pub fn engine_id(&self, replica: u32) -> EngineId {
        EngineId::of_variant(self.engine.name.clone(), self.variant.name.clone(), replica)
    }

    /// Returns the same engine as the ledger names it.
    pub(super) fn reservation_owner(&self, replica: u32) -> ReservationOwner {
        let (model, variant) = (self.owner.object.clone(), self.variant.name.clone());
        ReservationOwner { model, variant, replica }
    }

    /// Returns this placement with its memory in another pool, which already has the engine's reservation.
    #[must_use]
    pub fn in_pool(&self, pool: &str) -> Arc<Self> {
        Arc::new(Self { pool: Some(pool.to_owned()), quota: None, ..self.clone() })
    }

    /// Returns the placement of one engine whose accelerators the leader chose; of a pool without slots, this one.
    ///
    /// The engine's Pod requests these accelerators, so it has a Deployment for them.
    #[must_use]
    pub(super) fn on(self: &Arc<Self>, location: ReservationLocation, sidecar: &Sidecar) -> Arc<Self> {
        let Some(slots) = &self.slots else { return Arc::clone(self) };
        let location = Some(location).filter(|location| !location.accelerators.is_empty());
        let mut placement = Self { slots: Some(SlotTerms { location, ..slots.clone() }), ..(**self).clone() };
        placement.template_hash = placement.workload(sidecar, 0, 0).template_hash();
        Arc::new(placement)
    }

    /// Returns where the leader placed the engine; `None` if the kubelet chooses the accelerators.
    pub(super) fn location(&self) -> Option<&ReservationLocation> {
        self.slots.as_ref()?.location.as_ref()
    }

    /// Whether it is known on which accelerators the engine is to run, where the leader chooses them.
    pub(super) fn is_placed(&self) -> bool {
        let needs = self.slots.is_some() && self.variant.spec.accelerators.count() > 0;
        !needs || self.location().is_some()
    }

    /// Returns the accelerators that stand for the engine's in the decisions: the whole pool, or in a pool of slots
    /// those that the leader chose.
    pub(super) fn accounts(&self) -> Vec<AcceleratorId> {
        match &self.slots {
            Some(slots) => {
                slots.location.as_ref().map(|location| location.accelerators.clone()).unwrap_or_default()
            }
            None => self.pool.iter().map(|pool| pool.as_str().into()).collect(),
        }
    }

    /// Whether the pairing controller puts the engine to sleep and wakes it by this leader's orders.
    ///
    /// Without slots, an engine of mode dualPods sleeps only while it has no requester.
    pub(super) const fn is_actuated_by_pairing(&self) -> bool {
        self.dual_pods && self.slots.is_some()
    }

    /// Whether this leader closes and opens the gate of the engine's stub, rather than the pairing controller alone.
    pub(super) const fn has_gate(&self) -> bool {
        !self.dual_pods || self.slots.is_some()
    }

    /// Returns what one engine reserves in the pool; `None` without a pool.
    #[must_use]
    pub fn reservation_request(&self, replica: u32) -> Option<ReservationRequest> {
        self.pool.as_ref()?;
        let count = self.variant.spec.accelerators.count();
        Some(ReservationRequest {
            engine: self.reservation_owner(replica),
            count,
            bytes: self.variant.spec.memory.awake,
            host_bytes: Bytes::ZERO,
            quota: self.quota,
            location: self.location().cloned(),
        })
    }

    /// Returns what an engine asleep at this level keeps, as far as that is known beforehand.
    pub(super) fn sleeping_memory(&self, level: SleepLevel) -> SleepingMemory {
        let memory = self.variant.spec.memory;
        let host = memory.host.0.saturating_mul(u64::from(self.variant.spec.accelerators.count()));
        let host_bytes = if level == SleepLevel::One { Bytes(host) } else { Bytes::ZERO };
        SleepingMemory { bytes: memory.asleep, host_bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::testing::{self, sidecar};

    fn on_node(accelerators: &[&str]) -> ReservationLocation {
        let accelerators = accelerators.iter().map(|id| (*id).into()).collect();
        ReservationLocation { node: "n1".to_owned(), accelerators }
    }

    #[test]
    fn each_choice_of_accelerators_has_a_deployment_and_a_reservation_of_its_own() {
        let mut base = testing::placement("m", "chat");
        base.pool = Some("h100".to_owned());
        base.resource = "rouse.dev/h100".to_owned();
        base.slots = Some(SlotTerms { configuration: Some("h100".into()), location: None });
        let base = Arc::new(base);
        assert!(base.accounts().is_empty(), "the pool is no account of the decisions");
        let placed = base.on(on_node(&["GPU-1"]), &sidecar());
        assert_eq!(placed.accounts(), ["GPU-1".into()]);
        assert_eq!(placed.reservation_request(0).unwrap().location, Some(on_node(&["GPU-1"])));
        assert_ne!(placed.deployment(), base.on(on_node(&["GPU-2"]), &sidecar()).deployment());
        assert_eq!(placed.deployment(), base.on(on_node(&["GPU-1"]), &sidecar()).deployment());
        assert_eq!(placed.deployment(), placed.on(on_node(&["GPU-1"]), &sidecar()).deployment());
        assert_eq!(placed.template_hash.len(), 16, "one of many");
    }

    #[test]
    fn without_slots_the_kubelet_chooses_and_the_pool_stands_for_the_accelerators() {
        let mut base = testing::placement("m", "chat");
        base.pool = Some("h100".to_owned());
        let base = Arc::new(base);
        assert_eq!(base.on(on_node(&["GPU-1"]), &sidecar()), base);
        assert_eq!((base.location(), base.accounts()), (None, vec!["h100".into()]));
        assert_eq!(base.reservation_request(0).unwrap().location, None);
    }

    #[test]
    fn only_engines_of_slots_in_mode_dual_pods_sleep_by_orders_to_the_pairing_controller() {
        let slots = Some(SlotTerms { configuration: Some("h100".into()), location: None });
        for (dual_pods, slots, actuated, gate) in [
            (false, None, false, true),
            (false, slots.clone(), false, true),
            (true, None, false, false),
            (true, slots, true, true),
        ] {
            let placement = ModelPlacement { dual_pods, slots, ..testing::placement("m", "chat") };
            assert_eq!((placement.is_actuated_by_pairing(), placement.has_gate()), (actuated, gate));
        }
    }
}
