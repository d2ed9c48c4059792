//! Index entry of one AcceleratorPool.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::ObjectMeta, jiff::Timestamp};
use rouse::{
    slots::{ConfigurationName, RESOURCE_DOMAIN},
    units::{Bytes, Millis},
};

use super::{
    model_entry::{SpecVersion, created},
    resolved::{PoolProblem, PoolSlots},
};
use crate::{
    crd::{AcceleratorPool, AcceleratorPoolSpec, AcceleratorPoolStatus, Quantity, pool::GpuAccess},
    rejection::{Rejection, Rejections},
};

/// Namespace key that stands for all namespaces that are not listed.
const OTHERS: &str = "*";

/// The parsed spec of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolTerms {
    /// Cap on the total memory of the pool's accelerators.
    pub memory: Option<Bytes>,
    /// Memory that asleep engines may keep on each accelerator.
    pub sleeping_memory: Option<Bytes>,
    /// RAM of each node for engines asleep at level 1.
    pub host_sleep_memory: Bytes,
    pub meter_lag: Millis,
    pub slots: u32,
    pub taint: Option<String>,
    pub accelerator_type_label: String,
    /// Extended resource that Pods request.
    pub resource: String,
    pub gpu_access: GpuAccess,
    pub runtime_class_name: Option<String>,
    allowed: Option<Vec<String>>,
    quota: BTreeMap<String, Bytes>,
    pub max_priority: Option<i32>,
    pub pinnable: bool,
}

impl PoolTerms {
    /// Whether models of this namespace may use the pool.
    #[must_use]
    pub fn allows(&self, namespace: &str) -> bool {
        self.allowed.as_ref().is_none_or(|allowed| allowed.iter().any(|name| name == namespace))
    }

    /// Returns the namespace's limit on reserved memory; `None` if unlimited.
    #[must_use]
    pub fn quota(&self, namespace: &str) -> Option<Bytes> {
        self.quota.get(namespace).or_else(|| self.quota.get(OTHERS)).copied()
    }

    /// Returns the DeviceConfiguration whose slots the pool's engines take; `None` if the kubelet picks accelerators.
    #[must_use]
    pub fn slot_configuration(&self) -> Option<ConfigurationName> {
        pool_slots(self.slots, &self.resource).map(|slots| slots.configuration)
    }
}

/// Returns the slots of a pool with this resource and several slots on each accelerator.
///
/// A pool with another resource shares its accelerators by other means: its device plugin offers each several times.
fn pool_slots(each: u32, resource: &str) -> Option<PoolSlots> {
    let name = resource.strip_prefix(RESOURCE_DOMAIN)?.strip_prefix('/')?;
    (each > 1 && !name.is_empty()).then(|| PoolSlots { configuration: name.into(), each })
}

#[derive(Debug)]
pub(super) struct PoolEntry {
    pub(super) version: SpecVersion,
    pub(super) created: Option<Timestamp>,
    pub(super) selector: BTreeMap<String, String>,
    /// Apart from the terms, because a mistake in another field must not move the pool's engines.
    pub(super) slots: Option<PoolSlots>,
    pub(super) terms: Result<Arc<PoolTerms>, PoolProblem>,
    pub(super) status: Option<AcceleratorPoolStatus>,
}

impl PoolEntry {
    pub(super) fn of(pool: AcceleratorPool, version: SpecVersion) -> Self {
        let terms = terms(&pool.spec).map(Arc::new).map_err(PoolProblem::Invalid);
        let created = created(&pool.metadata);
        let slots = pool_slots(pool.spec.slots, &pool.spec.resource);
        Self { version, created, selector: pool.spec.node_selector, slots, terms, status: pool.status }
    }

    /// Builds the entry of an unreadable pool, which keeps its nodes. `before` is its entry from when it was readable.
    pub(super) fn unreadable(metadata: &ObjectMeta, error: &str, before: Option<Self>) -> Self {
        let (selector, slots, status) =
            before.map_or_else(Default::default, |old| (old.selector, old.slots, old.status));
        Self {
            version: SpecVersion::unreadable(metadata),
            created: created(metadata),
            selector,
            slots,
            terms: Err(PoolProblem::Invalid(Rejection::Unreadable(error.to_owned()).into())),
            status,
        }
    }
}

fn terms(spec: &AcceleratorPoolSpec) -> Result<PoolTerms, Rejections> {
    let mut refused = Vec::new();
    let mut bytes = |field: &str, quantity: &Quantity| match quantity.bytes() {
        Ok(bytes) => bytes,
        Err(error) => {
            refused.push(Rejection::Quantity { field: field.to_owned(), error });
            Bytes::ZERO
        }
    };
    let memory = spec.memory.as_ref().map(|quantity| bytes("memory", quantity));
    let sleeping_memory = spec.sleeping_memory.as_ref().map(|quantity| bytes("sleepingMemory", quantity));
    let host = spec.host_sleep_memory.as_ref().map(|quantity| bytes("hostSleepMemory", quantity));
    let quota = spec.namespace_quota.iter().map(|(namespace, quantity)| {
        (namespace.clone(), bytes(&format!("namespaceQuota '{namespace}'"), quantity))
    });
    let quota = quota.collect();
    let settle = spec.meter_lag.millis().unwrap_or_else(|error| {
        refused.push(Rejection::Duration { field: "meterLag".to_owned(), error });
        Millis::ZERO
    });
    if spec.node_selector.is_empty() {
        refused.push(Rejection::Spec(
            "nodeSelector is empty: name a label that only the pool's nodes have".to_owned(),
        ));
    }
    if spec.slots == 0 {
        refused.push(Rejection::Spec("slots must be at least 1".to_owned()));
    }
    if !refused.is_empty() {
        return Err(Rejections(refused));
    }
    Ok(PoolTerms {
        memory,
        sleeping_memory,
        host_sleep_memory: host.unwrap_or_default(),
        meter_lag: settle,
        slots: spec.slots,
        taint: spec.taint.clone(),
        accelerator_type_label: spec.accelerator_type_label.clone(),
        resource: spec.resource.clone(),
        gpu_access: spec.gpu_access,
        runtime_class_name: spec.runtime_class_name.clone(),
        allowed: spec.allowed_namespaces.clone(),
        quota,
        max_priority: spec.max_priority,
        pinnable: spec.pinnable,
    })
}
