//! Where and how a model's engines run.

use std::sync::Arc;

use crate::{
    config,
    controllers::{
        convert::{EnginePodTemplate, ModelHosting, ModelVariant},
        crd::ledger::ObjectName,
        engine_pod::EnginePod,
        index::{Resolved, ServedModel},
        label,
        ledger::{ReservationRequest, SleepingMemory},
        workload::{self, ModelRef, Sidecar, Workload},
    },
};
use rouse::{
    model::SleepLevel,
    units::{Bytes, Millis},
};
use rouse_net::stub_api::Epoch;

/// All that is needed to run an engine of one model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelPlacement {
    pub owner: ModelRef,
    pub engine: Arc<config::EngineConfig>,
    pub pod_template: EnginePodTemplate,
    pub variant: ModelVariant,
    /// Whose memory it takes.
    pub pool: Option<String>,
    /// What its namespace may have reserved there.
    pub quota: Option<Bytes>,
    /// The key of the pool's taint.
    pub taint: Option<String>,
    /// For so long a meter's word is not believed after something changed.
    pub meter_lag: Millis,
    /// Others may be given the same accelerators.
    pub shared_accelerators: bool,
    /// Its Pods ask for engines, which others start, wake and put to sleep.
    pub dual_pods: bool,
    /// Of the Deployment that new engines are Pods of.
    pub template_hash: String,
}

impl ModelPlacement {
    /// `None` for a model that is external: it runs nowhere that Rouse knows.
    #[must_use]
    pub fn of(
        object: &ObjectName,
        served: &ServedModel,
        settled: &Resolved,
        sidecar: &Sidecar,
    ) -> Option<Self> {
        let terms = settled.terms(served);
        let mut place = Self {
            owner: ModelRef { object: object.clone(), uid: served.uid.clone().unwrap_or_default() },
            engine: Arc::clone(&served.engine),
            pod_template: served.pods()?.clone(),
            variant: served.variant()?.clone(),
            pool: served.pool.clone(),
            quota: served.quota,
            taint: terms.and_then(|terms| terms.taint.clone()),
            meter_lag: terms.map_or(Millis::ZERO, |terms| terms.meter_lag),
            shared_accelerators: terms.is_some_and(|terms| terms.slots > 1),
            dual_pods: matches!(served.model.hosting, ModelHosting::DualPods(_)),
            template_hash: String::new(),
        };
        place.template_hash = place.workload(sidecar, 0, 0).template_hash();
        Some(place)
    }

    /// So many Pods, under the leader of this epoch.
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

    /// The Deployment that new engines are Pods of.
    #[must_use]
    pub fn deployment(&self) -> ObjectName {
        self.deployment_of(&self.template_hash)
    }

    /// The Deployment whose Pods have this template.
    #[must_use]
    pub fn deployment_of(&self, template: &str) -> ObjectName {
        let object = &self.owner.object;
        ObjectName::new(object.namespace.clone(), workload::name(object, template))
    }

    /// The same, with its memory in another pool, in which it has its booking already.
    #[must_use]
    pub fn in_pool(&self, pool: &str) -> Arc<Self> {
        Arc::new(Self { pool: Some(pool.to_owned()), quota: None, ..self.clone() })
    }

    /// It is a Pod of this model, by whatever template.
    #[must_use]
    pub fn owns(&self, pod: &EnginePod) -> bool {
        pod.name.namespace == self.owner.object.namespace
            && pod.model == label::value(self.engine.name.as_str())
    }

    /// What one of its engines takes of the pool; `None`: nothing.
    #[must_use]
    pub fn reservation_request(&self, replica: u32) -> Option<ReservationRequest> {
        self.pool.as_ref()?;
        let count = self.variant.spec.accelerators.count();
        let memory = self.variant.spec.memory;
        let model = self.owner.object.clone();
        let quota = self.quota;
        Some(ReservationRequest {
            model,
            replica,
            count,
            bytes: memory.awake,
            host_bytes: Bytes::ZERO,
            quota,
        })
    }

    /// What one of them keeps that sleeps at this level, as far as that is known beforehand.
    pub(super) fn sleeping_memory(&self, level: SleepLevel) -> SleepingMemory {
        let memory = self.variant.spec.memory;
        let host = memory.host.0.saturating_mul(u64::from(self.variant.spec.accelerators.count()));
        let host_bytes = if level == SleepLevel::One { Bytes(host) } else { Bytes::ZERO };
        SleepingMemory { bytes: memory.asleep, host_bytes }
    }
}
