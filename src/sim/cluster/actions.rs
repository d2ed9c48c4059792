//! Scripted actions, and descriptions of events for transcripts.

use super::{ClusterFault, SimulatedCluster};
use crate::{
    pairing::event::{CommandReply, PairingEvent, WantedState},
    units::Millis,
};

/// An action at a time after the start.
#[derive(Clone, Debug)]
pub struct TimedClusterAction {
    pub after: Millis,
    pub action: ClusterAction,
}

#[derive(Clone, Debug)]
pub enum ClusterAction {
    /// The owner with this number wants a requester, or wants none.
    SetWanted(usize, bool),
    /// The requester of this owner is killed without a grace period.
    KillRequester(usize),
    InjectFault(ClusterFault),
}

impl SimulatedCluster {
    pub(super) fn apply_action(&mut self, action: TimedClusterAction) {
        match action.action {
            ClusterAction::SetWanted(number, wants) => {
                if self.scenario.owners.get(number).is_some_and(|owner| owner.wants_requester != wants) {
                    self.toggle_owner(number);
                }
            }
            ClusterAction::KillRequester(number) => {
                let ids: Vec<_> = self
                    .requesters
                    .iter()
                    .filter(|(_, r)| r.owner == number)
                    .map(|(id, _)| id.clone())
                    .collect();
                self.record_line(|| format!("! the requester of owner {number} is killed"));
                for id in ids {
                    self.delete_requester(&id);
                    self.stub_ends(&id);
                }
            }
            ClusterAction::InjectFault(fault) => self.inject_fault(fault),
        }
    }
}

/// Describes an event for the transcript.
pub(super) fn describe_event(event: &PairingEvent) -> String {
    match event {
        PairingEvent::LeadershipGained { epoch } => format!("leader {} starts leading", epoch.0),
        PairingEvent::Superseded { epoch } => format!("leader {} is superseded", epoch.0),
        PairingEvent::Listed => "all objects are listed".to_owned(),
        PairingEvent::Node { node, facts } => {
            format!("{node}{}", if facts.cordoned { " is cordoned" } else { "" })
        }
        PairingEvent::NodeGone { node } => format!("{node} is gone"),
        PairingEvent::Accelerator { node, accelerator, facts } => {
            format!("{node} has {accelerator}{}", if facts.healthy { "" } else { ", faulty" })
        }
        PairingEvent::MeterRead { accelerator, used, .. } => format!("{used} in use on {accelerator}"),
        PairingEvent::Template { fingerprint, status: standing } => {
            format!("template {fingerprint} is {standing:?}")
        }
        PairingEvent::LauncherBuild { build, policy } => {
            let most = policy.max_engines.map(|most| format!(" hold {most} engines")).unwrap_or_default();
            format!("launchers of {build}{most}{}", if policy.obsolete { ", obsolete" } else { "" })
        }
        PairingEvent::RequesterObserved { requester, observed, .. } => {
            let stub = if observed.stub_container.is_some() { ", its stub runs" } else { "" };
            let deleting = if observed.deleting_since.is_some() { ", being deleted" } else { "" };
            let held = if observed.finalizer { ", held" } else { "" };
            format!("{requester}{stub}{deleting}{}{held}", if observed.terminated { ", ended" } else { "" })
        }
        PairingEvent::RequesterGone { requester, .. } => format!("{requester} is gone"),
        PairingEvent::ProviderObserved { provider, observed, .. } => {
            let bound =
                observed.records.iter().filter_map(|r| r.requester.as_ref()).map(|r| format!(", for {r}"));
            let deleting = if observed.deleting { ", being deleted" } else { "" };
            format!("{provider} is {:?}{}{deleting}", observed.phase, bound.collect::<String>())
        }
        PairingEvent::ProviderGone { provider, .. } => format!("{provider} is gone"),
        PairingEvent::ProviderVanished { provider, .. } => format!("{provider} has vanished"),
        PairingEvent::KubeletReporting { node, reports } => {
            format!("{node} {}", if *reports { "reports" } else { "is silent" })
        }
        PairingEvent::Want { requester, wanted, .. } => match wanted {
            WantedState::Awake => format!("the engine of {requester} is wanted awake"),
            WantedState::Asleep { level } => {
                format!("the engine of {requester} is wanted asleep at level {}", level.number())
            }
        },
        PairingEvent::WantWithdrawn { requester, .. } => {
            format!("the engine of {requester} is not wanted awake any more")
        }
        PairingEvent::EngineReady { engine, .. } => format!("{engine} answers"),
        PairingEvent::EngineDied { engine, gone, .. } => {
            format!("{engine} {}", if *gone { "died" } else { "hangs" })
        }
        PairingEvent::Outcome { target, result, .. } => {
            let subject = match target {
                crate::pairing::event::CommandTarget::Engine(engine, _) => engine.to_string(),
                crate::pairing::event::CommandTarget::Requester(requester) => requester.to_string(),
                crate::pairing::event::CommandTarget::Provider(provider) => provider.to_string(),
            };
            match result {
                Ok(CommandReply::Done) => format!("{subject}: done"),
                Ok(answer) => format!("{subject}: {answer:?}"),
                Err(cause) => format!("{subject}: failed, {cause:?}"),
            }
        }
    }
}
