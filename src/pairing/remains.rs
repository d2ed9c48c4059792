//! What may still run of a Pod whose object vanished: deleted by force, or collected with its node, before anybody saw its
//! containers end.
//!
//! An object that is gone says nothing of the process behind it. So what was reserved for its engines stays reserved, apart from
//! the engines (a new Pod may have the name meanwhile), until one of these is known:
//!
//! * its containers are seen ended after all,
//! * the meter, read after the last sleeps and ends have settled, finds less in use than is reserved: whatever is left holds no more
//!   than that, since what is being ended takes nothing new,
//! * the kubelet, which ends whatever the API server does not know, has had [`Settings::remains`] for it. That time does not run
//!   while the kubelet is silent: a node that is cut off ends nothing. It does run where there is no Node object any more: nothing
//!   is started there, and a kubelet that registers anew begins by clearing up.
//!
//! Who begins to lead knows nothing of objects that are gone. A provider that is bound has a finalizer, which keeps its object; of one
//! that slept and was deleted by force just before the leader changed, the meter alone knows.

use std::collections::BTreeMap;

use super::{
    ids::{EngineId, ProviderId, Uid},
    node::Node,
    settings::Settings,
};
use crate::{
    model::AcceleratorId,
    units::{Bytes, Tick},
};

/// Of one engine.
#[derive(Clone, Debug)]
pub struct Remains {
    pub engine: EngineId,
    pub pod: Uid,
    pub held: BTreeMap<AcceleratorId, Bytes>,
    pub held_host: Bytes,
    pub since: Tick,
}

impl Remains {
    /// When the kubelet has certainly ended it; `None` while the kubelet is silent.
    #[must_use]
    pub fn until(&self, node: &Node, settings: &Settings) -> Option<Tick> {
        let runs = !node.silent || !node.exists;
        runs.then(|| self.since.max(node.heard) + settings.remains)
    }

    fn is_nothing(&self) -> bool {
        self.held_host == Bytes::ZERO && self.held.values().all(|held| *held == Bytes::ZERO)
    }
}

impl Node {
    /// The object is gone, and nobody saw its containers end.
    pub(super) fn provider_vanished(&mut self, id: &ProviderId, now: Tick) {
        let pod = self.providers.get(id).and_then(|known| known.uid.clone());
        let left = self.engines_in(id).map(|engine| Remains {
            engine: engine.id.clone(),
            pod: pod.clone().unwrap_or_else(|| "".into()),
            held: engine.id.accelerators.iter().map(|a| (a.clone(), engine.held)).collect(),
            held_host: engine.held_host,
            since: now,
        });
        let left: Vec<_> = left.filter(|remains| !remains.is_nothing()).collect();
        self.provider_gone(id, now);
        self.remains.extend(left);
    }

    /// Of this Pod nothing is left.
    pub(super) fn ended_after_all(&mut self, pod: &Uid, now: Tick) {
        self.bury(now, |remains| remains.pod == *pod);
    }

    /// What must have ended by now.
    pub(super) fn bury_ended(&mut self, settings: &Settings, now: Tick) {
        let over: Vec<bool> = self
            .remains
            .iter()
            .map(|remains| remains.until(self, settings).is_some_and(|until| until <= now))
            .collect();
        let mut over = over.into_iter();
        self.bury(now, |_| over.next().unwrap_or_default());
    }

    /// A reading of the meter: what is left holds no more than that.
    pub(super) fn remains_measured(&mut self, a: &AcceleratorId, used: Bytes, at: Tick, settings: &Settings) {
        for remains in self.remains.iter_mut().filter(|remains| remains.since + settings.settle <= at) {
            if let Some(held) = remains.held.get_mut(a) {
                *held = used.min(*held);
            }
            if remains.held.values().all(|held| *held == Bytes::ZERO) {
                remains.held_host = Bytes::ZERO;
            }
        }
        self.remains.retain(|remains| !remains.is_nothing());
    }

    fn bury(&mut self, now: Tick, mut which: impl FnMut(&Remains) -> bool) {
        let (over, left) = std::mem::take(&mut self.remains).into_iter().partition(|remains| which(remains));
        self.remains = left;
        let over: Vec<Remains> = over;
        for accelerator in over.iter().flat_map(|remains| remains.held.keys()) {
            if let Some(known) = self.accelerators.get_mut(accelerator) {
                known.last_gone = Some(now);
            }
        }
    }
}
