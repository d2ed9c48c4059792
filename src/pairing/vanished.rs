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
        self.reserved_host == Bytes::ZERO && self.reserved.values().all(|held| *held == Bytes::ZERO)
    }
}

impl PairingNode {
    /// Keeps the reservations of a provider whose object vanished before its containers were seen to end.
    pub(super) fn provider_vanished(&mut self, id: &ProviderId, now: Tick) {
        let pod = self.providers.get(id).and_then(|known| known.uid.clone());
        let left = self.engines_in(id).map(|engine| VanishedEngine {
            engine: engine.id.clone(),
            pod: pod.clone().unwrap_or_else(|| "".into()),
            reserved: engine.id.accelerators.iter().map(|a| (a.clone(), engine.reserved)).collect(),
            reserved_host: engine.reserved_host,
            since: now,
        });
        let left: Vec<_> = left.filter(|remains| !remains.holds_nothing()).collect();
        self.provider_gone(id, now);
        self.vanished.extend(left);
    }

    /// Releases the memory of a vanished Pod that was seen ended.
    pub(super) fn vanished_pod_ended(&mut self, pod: &Uid, now: Tick) {
        self.release_vanished(now, |remains| remains.pod == *pod);
    }

    /// Releases the memory of vanished Pods whose retention has expired.
    pub(super) fn release_expired(&mut self, settings: &PairingSettings, now: Tick) {
        let over: Vec<bool> = self
            .vanished
            .iter()
            .map(|remains| remains.until(self, settings).is_some_and(|until| until <= now))
            .collect();
        let mut over = over.into_iter();
        self.release_vanished(now, |_| over.next().unwrap_or_default());
    }

    /// Caps vanished memory at a reading of the meter.
    pub(super) fn cap_vanished_at_reading(
        &mut self,
        a: &AcceleratorId,
        used: Bytes,
        at: Tick,
        settings: &PairingSettings,
    ) {
        for remains in self.vanished.iter_mut().filter(|remains| remains.since + settings.meter_lag <= at) {
            if let Some(held) = remains.reserved.get_mut(a) {
                *held = used.min(*held);
            }
            if remains.reserved.values().all(|held| *held == Bytes::ZERO) {
                remains.reserved_host = Bytes::ZERO;
            }
        }
        self.vanished.retain(|remains| !remains.holds_nothing());
    }

    fn release_vanished(&mut self, now: Tick, mut which: impl FnMut(&VanishedEngine) -> bool) {
        let (over, left) = std::mem::take(&mut self.vanished).into_iter().partition(|remains| which(remains));
        self.vanished = left;
        let over: Vec<VanishedEngine> = over;
        for accelerator in over.iter().flat_map(|remains| remains.reserved.keys()) {
            if let Some(known) = self.accelerators.get_mut(accelerator) {
                known.last_engine_gone = Some(now);
            }
        }
    }
}
