//! Written scenarios, and their stories in words.

use super::{Cluster, Trouble};
use crate::{
    pairing::event::{Answer, Event},
    units::Millis,
};

/// Something that a script lets happen.
#[derive(Clone, Debug)]
pub struct Deed {
    pub after: Millis,
    pub script: Script,
}

#[derive(Clone, Debug)]
pub enum Script {
    /// The owner with this number wants a requester, or none.
    Want(usize, bool),
    /// The requester of this owner is killed without grace.
    Kill(usize),
    Trouble(Trouble),
}

impl Cluster {
    pub(super) fn deed(&mut self, deed: Deed) {
        match deed.script {
            Script::Want(number, wants) => {
                if self.plot.owners.get(number).is_some_and(|owner| owner.wants != wants) {
                    self.toggle(number);
                }
            }
            Script::Kill(number) => {
                let ids: Vec<_> = self
                    .requesters
                    .iter()
                    .filter(|(_, r)| r.owner == number)
                    .map(|(id, _)| id.clone())
                    .collect();
                self.narrate(|| format!("! the requester of owner {number} is killed"));
                for id in ids {
                    self.delete_requester(&id);
                    self.stub_ends(&id);
                }
            }
            Script::Trouble(trouble) => self.trouble(trouble),
        }
    }
}

/// An event in words.
pub(super) fn in_words(event: &Event) -> String {
    match event {
        Event::Led { epoch } => format!("leader {} begins", epoch.0),
        Event::Deposed { epoch } => format!("leader {} is deposed", epoch.0),
        Event::Listed => "everything is listed".to_owned(),
        Event::Node { node, facts } => format!("{node}{}", if facts.cordoned { " is cordoned" } else { "" }),
        Event::NodeGone { node } => format!("{node} is gone"),
        Event::Accelerator { node, accelerator, facts } => {
            format!("{node} has {accelerator}{}", if facts.healthy { "" } else { ", which is faulty" })
        }
        Event::Observed { accelerator, used, .. } => format!("{used} in use on {accelerator}"),
        Event::Template { fingerprint, standing } => format!("template {fingerprint} is {standing:?}"),
        Event::Build { build, terms } => {
            let most = terms.most.map(|most| format!(" hold {most} engines")).unwrap_or_default();
            format!("launchers of {build}{most}{}", if terms.obsolete { ", obsolete" } else { "" })
        }
        Event::SeenRequester { requester, seen, .. } => {
            let stub = if seen.stub.is_some() { ", its stub runs" } else { "" };
            let deleting = if seen.deleting.is_some() { ", being deleted" } else { "" };
            let held = if seen.finalizer { ", held" } else { "" };
            format!("{requester}{stub}{deleting}{}{held}", if seen.ended { ", ended" } else { "" })
        }
        Event::RequesterGone { requester, .. } => format!("{requester} is gone"),
        Event::SeenProvider { provider, seen, .. } => {
            let bound =
                seen.records.iter().filter_map(|r| r.requester.as_ref()).map(|r| format!(", for {r}"));
            let deleting = if seen.deleting { ", being deleted" } else { "" };
            format!("{provider} is {:?}{}{deleting}", seen.stage, bound.collect::<String>())
        }
        Event::ProviderGone { provider, .. } => format!("{provider} is gone"),
        Event::ProviderVanished { provider, .. } => format!("{provider} has vanished"),
        Event::Heard { node, reports } => {
            format!("{node} {}", if *reports { "reports" } else { "is silent" })
        }
        Event::Answers { engine, .. } => format!("{engine} answers"),
        Event::Died { engine, gone, .. } => format!("{engine} {}", if *gone { "died" } else { "hangs" }),
        Event::Outcome { target, result, .. } => {
            let what = match target {
                crate::pairing::event::Target::Engine(engine, _) => engine.to_string(),
                crate::pairing::event::Target::Requester(requester) => requester.to_string(),
                crate::pairing::event::Target::Provider(provider) => provider.to_string(),
            };
            match result {
                Ok(Answer::Done) => format!("{what}: done"),
                Ok(answer) => format!("{what}: {answer:?}"),
                Err(cause) => format!("{what}: failed, {cause:?}"),
            }
        }
    }
}
