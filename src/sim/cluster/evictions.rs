//! Judges which sleepers were deleted: none too early, and no other one should have gone instead.

use super::Cluster;
use crate::{
    model::AcceleratorId,
    pairing::{
        Plan,
        command::{Order, Step, Why},
        event::Standing,
        ids::EngineId,
        node::{Engine, Node},
    },
    units::Bytes,
};

impl Cluster {
    /// To be called once the plan has been recorded: what it deletes holds still what it held.
    pub(super) fn check_evictions(&mut self, plan: &Plan) {
        let gone = plan.commands.iter().filter_map(|command| match &command.order {
            Order::Engine { engine, step: Step::End { why }, .. } => Some((&command.node, engine, *why)),
            _ => None,
        });
        for (node, id, why) in gone.filter(|(.., why)| matches!(why, Why::Evicted | Why::Displaced)) {
            let Some(known) = self.pairing.node(node) else { continue };
            // One that does not obey is ordered to end again.
            let Some(engine) = known.engines.get(id).filter(|engine| engine.since == self.now) else {
                continue;
            };
            let early = why == Why::Evicted && self.is_too_early(known, engine);
            let instead = self.outdated_instead(known, engine, why).map(|other| other.id.to_string());
            if early {
                self.violation(format!("{id} is deleted on {node} for the budget, soon after a sleep there"));
            }
            if self.is_outdated(id) {
                self.count("outdated engines evicted");
            }
            if let Some(other) = instead {
                self.violation(format!("{id} is deleted on {node}, and {other}, which is outdated, stays"));
            }
        }
    }

    /// For the sake of the budget, which is not judged before the last sleep has settled.
    fn is_too_early(&self, node: &Node, engine: &Engine) -> bool {
        let settle = self.plot.settings.settle;
        let recent = |a: &AcceleratorId| {
            let slept = node.accelerators.get(a).and_then(|known| known.last_sleep);
            slept.is_some_and(|slept| slept + settle > self.now)
        };
        engine.id.accelerators.iter().all(recent) && !Self::is_needed_for_memory(node, engine)
    }

    /// Somebody is there who needs what it keeps of an accelerator.
    fn is_needed_for_memory(node: &Node, engine: &Engine) -> bool {
        node.requesters.values().filter(|r| r.stays()).any(|requester| {
            let ask = &requester.seen.ask;
            let wanted = node.wanted_by(requester);
            let awake = node.engines.get(&wanted).map_or(ask.sizes.awake, |e| e.sizes.awake);
            let full = |a: &&AcceleratorId| {
                let capacity = node.accelerators.get(*a).map_or(Bytes::ZERO, |known| known.facts.capacity);
                engine.uses(a) && node.reserved(a) + awake > capacity
            };
            requester.accelerators.iter().any(|a| full(&a))
        })
    }

    fn is_outdated(&self, id: &EngineId) -> bool {
        self.pairing.standing(id.fingerprint) != Standing::Current
    }

    /// A sleeper of an outdated template that nobody waits for, that would have freed the same as this one, and stays.
    fn outdated_instead<'a>(&self, node: &'a Node, gone: &Engine, why: Why) -> Option<&'a Engine> {
        if self.is_outdated(&gone.id) {
            return None;
        }
        let wanted = |e: &Engine| node.requesters.values().any(|r| r.stays() && node.wanted_by(r) == e.id);
        let same = |e: &Engine| match why {
            Why::Displaced => e.provider == gone.provider,
            _ => {
                let keeps = |e: &Engine| (e.id.accelerators.clone(), e.held, e.held_host);
                keeps(e) == keeps(gone)
            }
        };
        node.engines.values().find(|e| e.is_free() && self.is_outdated(&e.id) && !wanted(e) && same(e))
    }
}
