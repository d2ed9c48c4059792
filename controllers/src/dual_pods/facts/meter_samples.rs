//! Applies Prometheus's samples to the facts.

use std::collections::BTreeMap;

use rouse::{
    model::AcceleratorId,
    pairing::{Pairing, event::PairingEvent, ids::NodeName},
};

use super::ClusterFacts;
use crate::platform::dcgm::DcgmSamples;

impl ClusterFacts {
    /// Records which nodes have the sampled accelerators, and which accelerators have a fault.
    pub(in crate::dual_pods) fn apply_samples(&mut self, samples: &DcgmSamples) {
        for (accelerator, sample) in &samples.used {
            let node = sample.node.as_deref().map(NodeName::from).filter(|node| self.has_node(node));
            if let Some(node) = node {
                self.record_assigned(&node, std::slice::from_ref(accelerator));
            }
        }
        // A series has only the last Xid, so a later harmless Xid does not prove that an earlier fault is repaired.
        let lasting = self.faults.iter().filter(|(a, _)| samples.with_xid.contains(*a));
        let mut faults: BTreeMap<_, _> = lasting.map(|(a, fault)| (a.clone(), fault.clone())).collect();
        faults.extend(samples.faults.clone());
        if self.faults == faults {
            return;
        }
        for (accelerator, fault) in faults.iter().filter(|(a, _)| !self.faults.contains_key(*a)) {
            tracing::warn!(%accelerator, fault, "accelerator has a fault, no longer used");
        }
        for accelerator in self.faults.keys().filter(|a| !faults.contains_key(*a)) {
            tracing::info!(%accelerator, "accelerator fault cleared");
        }
        let differs = |a: &AcceleratorId| self.faults.contains_key(a) != faults.contains_key(a);
        let changed = self.last_sent.nodes.iter().filter(|(_, sent)| sent.accelerators.keys().any(differs));
        self.dirty.nodes.extend(changed.map(|(node, _)| node.clone()));
        (self.faults, self.changed) = (faults, true);
    }

    /// Returns the new readings that a decision may depend on.
    pub(in crate::dual_pods) fn readings(&self, samples: &DcgmSamples, core: &Pairing) -> Vec<PairingEvent> {
        let nodes = self.last_sent.nodes.iter();
        let all = nodes.flat_map(|(node, sent)| sent.accelerators.keys().map(move |a| (node, a)));
        let new = all.filter_map(|(node, accelerator)| {
            let sample = samples.used.get(accelerator)?;
            let known = core.node(node)?;
            let before = known.accelerators.get(accelerator)?.last_reading;
            let new = before.is_none_or(|(_, at)| at < sample.at);
            let event = PairingEvent::MeterRead {
                node: node.clone(),
                accelerator: accelerator.clone(),
                used: sample.used,
                at: sample.at,
            };
            (known.wants_reading_of(accelerator) && new).then_some(event)
        });
        new.collect()
    }
}
