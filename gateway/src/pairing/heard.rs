//! What the controller hears, and what that means to the decisions: changes of Pods, what launchers tell, readings, ends of orders.

use std::{sync::Arc, time::Duration};

use k8s_openapi::api::core::v1::Pod;
use rouse::pairing::{event::Event, ids::RequesterId};
use tokio::{task::JoinError, time};

use super::{
    Controller, Finished, LATER,
    census::Sight,
    directory,
    hands::Done,
    launchers::{self, Heard},
};
use crate::{
    controllers::watch::Change,
    platform::kubernetes::{dcgm::Samples, launcher::Launcher},
};

impl Controller {
    /// Has the meter asked, after so long.
    pub(super) fn measure(&mut self, after: Duration) {
        let Some(meter) = self.meter.clone() else { return };
        self.tasks.spawn(async move {
            time::sleep(after).await;
            // Why it has none is in the log already.
            Finished::Read(meter.samples().await.ok())
        });
    }

    pub(super) fn read(&mut self, samples: Option<&Samples>) {
        if let Some(samples) = samples {
            self.facts.sampled(samples);
            let events = self.facts.readings(samples, &self.core);
            self.tell(events);
        }
        let interval = self.meter.as_ref().map(|meter| meter.interval());
        interval.into_iter().for_each(|interval| self.measure(interval));
    }

    pub(super) fn pods(&mut self, change: Change<Pod>) {
        let mut events = Vec::new();
        // The decisions hear nothing of who asks for what cannot be: its user does.
        let one = match &change {
            Change::Applied(found) => found.metadata().uid.clone().map(RequesterId::from),
            Change::All { .. } | Change::Deleted(_) => None,
        };
        let all = matches!(change, Change::All { .. });
        let name = match &change {
            Change::Applied(found) => Some(found.name()),
            Change::Deleted(name) => Some(name.clone()),
            Change::All { .. } => None,
        };
        self.directory.take(change, &self.facts, &mut |event| events.push(event));
        let sight = Sight { directory: &self.directory, facts: &self.facts, now: self.hands.clock.now() };
        match name {
            Some(name) => self.census.look(&name, sight),
            None => self.census.look_at_all(sight),
        }
        let one = one.as_ref().and_then(|id| self.directory.requester(id));
        let looked = self.directory.requesters().filter(|_| all).chain(one);
        looked.for_each(|own| self.notes.look(own.id.clone()));
        self.tell(events);
    }

    /// What a launcher tells of its engines.
    pub(super) fn heard(&mut self, heard: &Heard) {
        if !self.ears.knows(heard) {
            return;
        }
        let failed = self.core.node(&heard.node).and_then(|node| launchers::failed(heard, node));
        if let Some((requester, error)) = failed {
            self.notes.error(requester, error);
        }
        self.tell(launchers::events(heard));
        let provider = self.directory.provider(&heard.node, &heard.launcher);
        let whole = provider.is_some_and(directory::Provider::is_whole);
        let address = provider.and_then(directory::Provider::orders);
        let (Some(node), Some(address), Some(epoch)) = (self.core.node(&heard.node), address, self.epoch)
        else {
            return;
        };
        let namespace = provider.map_or("", |own| &own.name.namespace);
        let calls = Arc::new(self.hands.metrics.calls(namespace, None));
        let token = provider.map(|own| self.hands.settings.key.launcher_token(&own.name));
        let launcher = Arc::new(Launcher::new(address, token, epoch).observed(calls));
        for engine in launchers::missing(heard, node) {
            let Some(known) = node.engines.get(&engine) else { continue };
            let (launcher, generation) = (Arc::clone(&launcher), known.generation);
            let asked = launchers::verify(launcher, heard.node.clone(), engine, generation);
            self.tasks.spawn(async move { Finished::Asked(asked.await) });
        }
        for id in launchers::strays(heard, node).into_iter().filter(|_| whole) {
            tracing::warn!(node = %heard.node, id, "an engine that nobody knows of is ended");
            let launcher = Arc::clone(&launcher);
            self.tasks.spawn(async move {
                // One that does not end is shown again with the next list.
                drop(launcher.delete(&id).await);
                Finished::Asked(None)
            });
        }
    }

    pub(super) fn finished(&mut self, finished: Result<Finished, JoinError>) {
        match finished {
            Ok(Finished::Order(done)) => {
                let (Done { event, requester, error, mended, served, before }, notices) = *done;
                self.tidings.tell(notices);
                before.into_iter().for_each(|before| self.proofs.keep(before));
                if let Some(id) = requester {
                    let own = self.directory.requester(&id).filter(|_| served);
                    let now = self.hands.clock.now();
                    if let Some((own, (path, took))) =
                        own.and_then(|own| Some((own, self.waits.served(own, now)?)))
                    {
                        self.tidings.served(own, path, took);
                    }
                    match error {
                        Some(error) => {
                            if let Some(own) = self.directory.requester(&id) {
                                self.tidings.failed(own, &error);
                            }
                            self.notes.error(id, error);
                        }
                        None if mended => self.notes.mended(&id),
                        None => {}
                    }
                }
                self.tell(vec![event]);
            }
            Ok(Finished::Listed(epoch, all)) => self.came = Some((epoch, all)),
            Ok(Finished::Asked(event)) => self.tell(event.into_iter().collect()),
            Ok(Finished::Noted(id)) => self.notes.may_write(id),
            Ok(Finished::Read(samples)) => self.read(samples.as_deref()),
            Ok(Finished::Waited(id)) => self.tidings.look(id, &self.directory, &mut self.tasks),
            Ok(Finished::Judged { again: true }) => self.facts.configs.look_again(),
            Ok(Finished::Judged { again: false }) => {}
            Err(error) if error.is_cancelled() => {}
            Err(error) => tracing::error!(%error, "an order's task died"),
        }
    }

    /// The decisions hear of it, if they are this gateway's.
    pub(super) fn tell(&mut self, events: Vec<Event>) {
        let now = self.hands.clock.now();
        for event in events {
            self.facts.meet(&event);
            match &event {
                Event::SeenRequester { requester, seen, .. } => {
                    self.notes.look(requester.clone());
                    let own = self.directory.requester(requester);
                    if let Some(own) = own {
                        self.facts.meet_requester(own, &seen.ask);
                    }
                    if let Some(own) = own.filter(|_| seen.stub.is_some()) {
                        self.waits.runs(own, now);
                    }
                }
                Event::RequesterGone { requester, .. } => {
                    self.notes.gone(requester);
                    self.waits.gone(requester);
                }
                Event::SeenProvider { node, provider, seen } => {
                    let own = self.directory.provider(node, provider);
                    own.into_iter().for_each(|own| self.facts.meet_provider(own, &seen.records));
                    if let Some(source) = own.and_then(|own| own.source.as_ref()) {
                        let used = !seen.records.is_empty();
                        self.facts.meet_launcher(node, provider, source, used);
                    }
                }
                _ => {}
            }
            if self.epoch.is_some() {
                self.core.on(&event, now);
            }
        }
    }

    /// News of nodes may complete what is known of those who are on them.
    pub(super) fn tell_facts(&mut self) {
        let mut events = Vec::new();
        let configured = self.facts.tell(&mut |event| events.push(event));
        for (policy, status) in configured.then(|| self.facts.configs.verdicts()).into_iter().flatten() {
            let hands = Arc::clone(&self.hands);
            self.tasks.spawn(async move {
                let again = !hands.judge(&policy, &status).await;
                if again {
                    time::sleep(LATER).await;
                }
                Finished::Judged { again }
            });
        }
        if configured {
            let now = self.hands.clock.now();
            self.census.look_at_all(Sight { directory: &self.directory, facts: &self.facts, now });
        }
        if configured || !events.is_empty() {
            self.directory.again(&self.facts, &mut |event| events.push(event));
            self.directory.requesters().for_each(|own| self.notes.look(own.id.clone()));
        }
        self.tell(events);
    }
}
