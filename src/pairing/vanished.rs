//! What may still run of a Pod whose object vanished: deleted by force, or collected with its node, before anybody saw its
//! containers end.
//!
//! An object that is gone says nothing of the process behind it. So what was reserved for its engines stays reserved, apart from
//! the engines (a new Pod may have the name meanwhile), until one of these is known:
//!
//! * its containers are seen ended after all,
//! * the meter, read after the last sleeps and ends have settled, finds less in use than is reserved: whatever is left holds no more
//!   than that, since what is being ended takes nothing new,
//! * the kubelet, which ends whatever the API server does not know, has had [`PairingSettings::vanished_retention`] for it. That time does not run
//!   while the kubelet is silent: a node that is cut off ends nothing. It does run where there is no Node object any more: nothing
//!   is started there, and a kubelet that registers anew begins by clearing up.
//!
//! Who begins to lead knows nothing of objects that are gone. A provider that is bound has a finalizer, which keeps its object; of one
//! that slept and was deleted by force just before the leader changed, the meter alone knows.

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

/// Of one engine.
#[derive(Clone, Debug)]
pub struct VanishedEngine {
    pub engine: PairingEngineId,
    pub pod: Uid,
    pub reserved: BTreeMap<AcceleratorId, Bytes>,
    pub reserved_host: Bytes,
    pub since: Tick,
}

impl VanishedEngine {
    /// When the kubelet has certainly ended it; `None` while the kubelet is silent.
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
    /// The object is gone, and nobody saw its containers end.
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

    /// Of this Pod nothing is left.
    pub(super) fn vanished_pod_ended(&mut self, pod: &Uid, now: Tick) {
        self.release_vanished(now, |remains| remains.pod == *pod);
    }

    /// What must have ended by now.
    pub(super) fn release_expired(&mut self, settings: &PairingSettings, now: Tick) {
        let over: Vec<bool> = self
            .vanished
            .iter()
            .map(|remains| remains.until(self, settings).is_some_and(|until| until <= now))
            .collect();
        let mut over = over.into_iter();
        self.release_vanished(now, |_| over.next().unwrap_or_default());
    }

    /// A reading of the meter: what is left holds no more than that.
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
