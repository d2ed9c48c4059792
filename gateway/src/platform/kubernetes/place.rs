//! Where and how a model's engines run.

use std::sync::Arc;

use crate::{
    config,
    controllers::{
        booking::{Keeps, Wanted},
        convert::{Pods, Run, Variant},
        crd::ledger::ObjectName,
        index::{Served, Settled},
        label,
        pods::Seen,
        workload::{self, Owner, Sidecar, Workload},
    },
};
use rouse::{
    model::Level,
    units::{Bytes, Millis},
    wire::Epoch,
};

/// All that is needed to run an engine of one model.
#[derive(Clone, Debug, PartialEq)]
pub struct Place {
    pub owner: Owner,
    pub engine: Arc<config::Model>,
    pub pods: Pods,
    pub variant: Variant,
    /// Whose memory it takes.
    pub pool: Option<String>,
    /// What its namespace may have reserved there.
    pub quota: Option<Bytes>,
    /// The key of the pool's taint.
    pub taint: Option<String>,
    /// For so long a meter's word is not believed after something changed.
    pub settle: Millis,
    /// Others may be given the same accelerators.
    pub shared: bool,
    /// Its Pods ask for engines, which others start, wake and put to sleep.
    pub dual: bool,
    /// Of the Deployment that new engines are Pods of.
    pub template: String,
}

impl Place {
    /// `None` for a model that is external: it runs nowhere that Rouse knows.
    #[must_use]
    pub fn of(object: &ObjectName, served: &Served, settled: &Settled, sidecar: &Sidecar) -> Option<Self> {
        let terms = settled.terms(served);
        let mut place = Self {
            owner: Owner { object: object.clone(), uid: served.uid.clone().unwrap_or_default() },
            engine: Arc::clone(&served.engine),
            pods: served.pods()?.clone(),
            variant: served.variant()?.clone(),
            pool: served.pool.clone(),
            quota: served.quota,
            taint: terms.and_then(|terms| terms.taint.clone()),
            settle: terms.map_or(Millis::ZERO, |terms| terms.settle),
            shared: terms.is_some_and(|terms| terms.slots > 1),
            dual: matches!(served.model.run, Run::DualPods(_)),
            template: String::new(),
        };
        place.template = place.workload(sidecar, 0, 0).template();
        Some(place)
    }

    /// So many Pods, under the leader of this epoch.
    pub(super) fn workload<'a>(&'a self, sidecar: &'a Sidecar, replicas: u32, epoch: Epoch) -> Workload<'a> {
        Workload {
            owner: &self.owner,
            engine: &self.engine,
            pods: &self.pods,
            variant: &self.variant,
            taint: self.taint.as_deref(),
            sidecar,
            dual: self.dual,
            replicas,
            epoch,
        }
    }

    /// The Deployment that new engines are Pods of.
    #[must_use]
    pub fn deployment(&self) -> ObjectName {
        self.deployment_of(&self.template)
    }

    /// The Deployment whose Pods have this template.
    #[must_use]
    pub fn deployment_of(&self, template: &str) -> ObjectName {
        let object = &self.owner.object;
        ObjectName::new(object.namespace.clone(), workload::name(object, template))
    }

    /// The same, with its memory in another pool, in which it has its booking already.
    #[must_use]
    pub fn within(&self, pool: &str) -> Arc<Self> {
        Arc::new(Self { pool: Some(pool.to_owned()), quota: None, ..self.clone() })
    }

    /// It is a Pod of this model, by whatever template.
    #[must_use]
    pub fn owns(&self, pod: &Seen) -> bool {
        pod.name.namespace == self.owner.object.namespace
            && pod.model == label::value(self.engine.name.as_str())
    }

    /// What one of its engines takes of the pool; `None`: nothing.
    #[must_use]
    pub fn wanted(&self, replica: u32) -> Option<Wanted> {
        self.pool.as_ref()?;
        let count = self.variant.spec.accelerators.count();
        let memory = self.variant.spec.memory;
        let model = self.owner.object.clone();
        let quota = self.quota;
        Some(Wanted { model, replica, count, bytes: memory.awake, host_bytes: Bytes::ZERO, quota })
    }

    /// What one of them keeps that sleeps at this level, as far as that is known beforehand.
    pub(super) fn keeps(&self, level: Level) -> Keeps {
        let memory = self.variant.spec.memory;
        let host = memory.host.0.saturating_mul(u64::from(self.variant.spec.accelerators.count()));
        let host_bytes = if level == Level::One { Bytes(host) } else { Bytes::ZERO };
        Keeps { bytes: memory.asleep, host_bytes }
    }
}
