//! Memory of a Pod whose object vanished: deleted by force, or collected with its node, before its containers were seen
//! to end.
//!
//! A vanished object says nothing about the process behind it. So the reservations of its engines stay, separate from
//! the engines (a new Pod may have the name meanwhile), until one of these events:
//!
//! * The containers are seen ended after all.
//! * The meter finds less in use than is reserved, in a reading at least [`PairingSettings::meter_lag`] after the
//!   object vanished. The reservation shrinks to the reading, since a Pod that is being stopped takes no new memory.
//! * The kubelet, which stops every Pod that the API server does not know, has had
//!   [`PairingSettings::vanished_retention`] to do so. That time does not run while the kubelet is silent: a node that
//!   is cut off stops nothing. It does run if the Node object is gone: nothing is started there, and a kubelet that
//!   registers anew starts by cleaning up.
//!
//! A new leader knows nothing of vanished objects. A bound provider has a finalizer, which keeps its object. If a
//! sleeping provider was deleted by force just before the change of leader, only the meter shows its memory.

use std::collections::BTreeMap;

use super::{
    ids::{PairingEngineId, ProviderId, Uid},
    node::PairingNode,
    settings::PairingSettings,
};
use crate::{
    model::AcceleratorId,
    units::{Bytes, Tick},
};

/// The memory of one engine of a vanished Pod.
#[derive(Clone, Debug)]
pub struct VanishedEngine {
    pub engine: PairingEngineId,
    pub pod: Uid,
    pub reserved: BTreeMap<AcceleratorId, Bytes>,
    pub reserved_host: Bytes,
    pub since: Tick,
}

impl VanishedEngine {
    /// When the kubelet has certainly stopped the Pod; `None` while the kubelet is silent.
    #[must_use]
    pub fn until(&self, node: &PairingNode, settings: &PairingSettings) -> Option<Tick> {
        let runs = !node.kubelet_silent || !node.exists;
        runs.then(|| self.since.max(node.reporting_since) + settings.vanished_retention)
    }

    fn holds_nothing(&self) -> bool {
        self.reserved_host == Bytes::ZERO && self.reserved.values().all(|bytes| *bytes == Bytes::ZERO)
    }
}

impl PairingNode {
    /// Keeps the reservations of a provider whose object vanished before its containers were seen to end.
    pub(super) fn provider_vanished(&mut self, id: &ProviderId, now: Tick) {
        let pod = self.providers.get(id).and_then(|provider| provider.uid.clone());
        let vanished = self.engines_in(id).map(|engine| VanishedEngine {
            engine: engine.id.clone(),
            pod: pod.clone().unwrap_or_else(|| "".into()),
            reserved: engine.id.accelerators.iter().map(|a| (a.clone(), engine.reserved)).collect(),
            reserved_host: engine.reserved_host,
            since: now,
        });
        let vanished: Vec<_> = vanished.filter(|vanished_engine| !vanished_engine.holds_nothing()).collect();
        self.provider_gone(id, now);
        self.vanished.extend(vanished);
    }

    /// Releases the memory of a vanished Pod that was seen ended.
    pub(super) fn vanished_pod_ended(&mut self, pod: &Uid, now: Tick) {
        self.release_vanished(now, |vanished_engine| vanished_engine.pod == *pod);
    }

    /// Releases the memory of vanished Pods whose retention has expired.
    pub(super) fn release_expired(&mut self, settings: &PairingSettings, now: Tick) {
        let expired: Vec<bool> = self
            .vanished
            .iter()
            .map(|vanished_engine| vanished_engine.until(self, settings).is_some_and(|until| until <= now))
            .collect();
        let mut expired = expired.into_iter();
        self.release_vanished(now, |_| expired.next().unwrap_or_default());
    }

    /// Caps vanished memory at a reading of the meter.
    pub(super) fn cap_vanished_at_reading(
        &mut self,
        a: &AcceleratorId,
        used: Bytes,
        at: Tick,
        settings: &PairingSettings,
    ) {
        for vanished_engine in self
            .vanished
            .iter_mut()
            .filter(|vanished_engine| vanished_engine.since + settings.meter_lag <= at)
        {
            if let Some(bytes) = vanished_engine.reserved.get_mut(a) {
                *bytes = used.min(*bytes);
            }
            if vanished_engine.reserved.values().all(|bytes| *bytes == Bytes::ZERO) {
                vanished_engine.reserved_host = Bytes::ZERO;
            }
        }
        self.vanished.retain(|vanished_engine| !vanished_engine.holds_nothing());
    }

    fn release_vanished(&mut self, now: Tick, mut is_released: impl FnMut(&VanishedEngine) -> bool) {
        let (released, remaining) = std::mem::take(&mut self.vanished)
            .into_iter()
            .partition(|vanished_engine| is_released(vanished_engine));
        self.vanished = remaining;
        let released: Vec<VanishedEngine> = released;
        for accelerator in released.iter().flat_map(|vanished_engine| vanished_engine.reserved.keys()) {
            if let Some(accelerator_record) = self.accelerators.get_mut(accelerator) {
                accelerator_record.last_engine_gone = Some(now);
            }
        }
    }
}
