//! Where and how the engines of one variant of a model run.

use std::sync::Arc;

use crate::{
    convert::{EnginePodTemplate, ModelHosting, ModelVariant},
    crd::ledger::{ObjectName, ReservationOwner},
    index::{Resolved, ServedModel, ServedVariant},
    label,
    ledger::{ReservationRequest, SleepingMemory},
    workload::{self, ModelRef, Sidecar, Workload},
};
use rouse::{
    model::{EngineId, SleepLevel},
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
