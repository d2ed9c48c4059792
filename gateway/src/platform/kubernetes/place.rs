//! Where and how a model's engines run.

use std::sync::Arc;

use crate::{
    config,
    controllers::{
        booking::Wanted,
        convert::{Pods, Variant},
        crd::ledger::ObjectName,
        index::{Served, Settled},
        label,
        pods::Seen,
        workload::{self, Owner},
    },
};
use rouse::{model::Accelerators, units::Bytes};

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
}

impl Place {
    /// `None` for a model that is external: it runs nowhere that Rouse knows.
    #[must_use]
    pub fn of(object: &ObjectName, served: &Served, settled: &Settled) -> Option<Self> {
        let pool = served.pool.as_ref().and_then(|name| settled.pools.get(name));
        Some(Self {
            owner: Owner { object: object.clone(), uid: served.uid.clone().unwrap_or_default() },
            engine: Arc::clone(&served.engine),
            pods: served.pods()?.clone(),
            variant: served.variant()?.clone(),
            pool: served.pool.clone(),
            quota: served.quota,
            taint: pool.and_then(|pool| pool.terms.as_ref()?.taint.clone()),
        })
    }

    /// The Deployment that new engines are Pods of.
    #[must_use]
    pub fn deployment(&self) -> ObjectName {
        let object = &self.owner.object;
        let name = workload::name(object, self.variant.spec.fingerprint);
        ObjectName::new(object.namespace.clone(), name)
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
        let count = match &self.variant.spec.accelerators {
            Accelerators::Count(count) | Accelerators::Of { count, .. } => *count,
            Accelerators::Ids(ids) => u32::try_from(ids.len()).unwrap_or(u32::MAX),
        };
        let memory = self.variant.spec.memory;
        let model = self.owner.object.clone();
        let quota = self.quota;
        Some(Wanted { model, replica, count, bytes: memory.awake, host_bytes: Bytes::ZERO, quota })
    }
}
