//! What is true of a node once a command has been given. The one place where a command changes state: planning uses it on a
//! copy, and recording on the node itself.

use std::collections::BTreeMap;

use super::{
    command::{Command, Dismissal, Farewell, OfProvider, OfRequester, Order, Step, Why},
    event::{Record, Stage, Standing, Terms},
    ids::{Build, EngineId, Fingerprint, ProviderId},
    node::{Binding, Call, Engine, Kind, Node, Provider, Retry, State},
    room::Rooms,
    settings::Settings,
};
use crate::{
    model::Level,
    units::{Bytes, Millis, Tick},
};

pub(super) struct Rules<'a> {
    pub(super) settings: &'a Settings,
    pub(super) standings: &'a BTreeMap<Fingerprint, Standing>,
    pub(super) builds: &'a BTreeMap<Build, Terms>,
    pub(super) now: Tick,
}

impl Rules<'_> {
    pub(super) const fn rooms<'b>(&'b self, node: &'b Node) -> Rooms<'b> {
        let Self { settings, standings, builds, now } = self;
        Rooms { node, settings, standings, builds, now: *now }
    }

    /// What holds for this launcher.
    pub(super) fn terms(&self, launcher: &Provider) -> Terms {
        terms(self.builds, launcher)
    }

    pub(super) fn apply(&self, node: &mut Node, command: &Command) {
        let call = |kind, within: Millis| Call {
            serial: command.serial,
            kind,
            until: self.now + within,
            stub: None,
        };
        match &command.order {
            Order::Engine { engine, step, .. } => self.step(node, engine, step, call),
            Order::Requester { requester, step } => {
                let Some(known) = node.requesters.get_mut(requester) else { return };
                let stub = known.seen.stub.clone();
                let (kind, stub) = match step {
                    OfRequester::Accelerators { gate } => (Kind::Accelerators, stub.filter(|_| *gate)),
                    OfRequester::Gate => (Kind::Gate, stub),
                    OfRequester::Delete { why } => {
                        known.deleted = Some(*why);
                        (Kind::Delete, None)
                    }
                    OfRequester::Finalize { wanted } => (Kind::Finalize(*wanted), None),
                    OfRequester::Release => (Kind::Release, None),
                };
                known.call = Some(Call { stub, ..call(kind, self.settings.call) });
            }
            Order::Provider { provider, step } => match step {
                OfProvider::Create { .. } => {
                    let fresh = || Provider::ordered(self.now);
                    let known = node.providers.entry(provider.clone()).or_insert_with(fresh);
                    known.call = Some(call(Kind::Create, self.settings.call));
                }
                OfProvider::Delete { why, .. } => {
                    if *why == Dismissal::Useless {
                        self.crashed(node, provider);
                    }
                    leave(node, provider, self.now);
                    if let Some(known) = node.providers.get_mut(provider) {
                        known.deleting = true;
                        known.call = Some(call(Kind::Delete, self.settings.call));
                    }
                }
            },
        }
    }

    fn step(&self, node: &mut Node, id: &EngineId, step: &Step, call: impl Fn(Kind, Millis) -> Call) {
        match step {
            Step::Create { record } if !node.engines.contains_key(id) => {
                let provider = ProviderId::direct(id);
                node.providers.insert(provider.clone(), Provider::ordered(self.now));
                self.launching(node, record, provider);
            }
            Step::Bind { record } if !node.engines.contains_key(id) => {
                let provider = node.provider_for(id);
                self.launching(node, record, provider);
            }
            Step::End { why: Why::Evicted } => self.doubt(node, id),
            Step::End { why } => self.blame(node, id, *why),
            _ => {}
        }
        let opened =
            if let Step::Open { requester } = step { node.requesters.get_mut(requester) } else { None };
        let spoken_to = opened.and_then(|requester| {
            requester.gated = None;
            requester.seen.stub.clone()
        });
        let Some(engine) = node.engines.get_mut(id) else { return };
        let settings = self.settings;
        if matches!(step, Step::Create { .. } | Step::Launch) {
            engine.relaunched = engine.may_start_until > Tick(0);
            engine.may_start_until = self.now + settings.call + settings.call;
        }
        let made = match step {
            Step::Create { .. } => call(Kind::Create, settings.call),
            Step::Bind { record } => {
                if let Some(requester) = record.requester.clone() {
                    engine.binding = Some(Binding { requester, written: false });
                }
                (engine.level, engine.stop_after) = (record.level, record.stop_after);
                engine.held = engine.sizes.awake;
                call(Kind::Bind, settings.call)
            }
            Step::Launch => call(Kind::Launch, settings.call),
            Step::Prove => call(Kind::Prove, settings.wake),
            Step::Open { .. } => Call { stub: spoken_to, ..call(Kind::Open, settings.call) },
            Step::Gate { deadline, .. } => {
                if engine.state == State::Awake {
                    engine.last_used = self.now;
                    engine.enter(State::Draining { until: *deadline, drained: false }, self.now);
                }
                call(Kind::Gate, deadline.since(self.now))
            }
            Step::Sleep { level, .. } => {
                if engine.state == State::Awake {
                    engine.last_used = self.now;
                }
                engine.held_host = if *level == Level::One { engine.sizes.host } else { Bytes::ZERO };
                engine.enter(State::FallingAsleep { level: *level }, self.now);
                call(Kind::Sleep, settings.sleep_within(&engine.sizes))
            }
            Step::Wake { .. } => {
                engine.enter(State::Waking, self.now);
                engine.answers = false;
                engine.opened = None;
                engine.last_used = self.now;
                call(Kind::Wake, settings.wake_within(&engine.sizes))
            }
            Step::Unbind { forget, .. } => {
                call(if *forget { Kind::Forget } else { Kind::Unbind }, settings.call)
            }
            Step::End { why } => {
                engine.end(*why, self.now);
                call(Kind::End, settings.call)
            }
            Step::Query => call(Kind::Query, settings.call),
        };
        engine.call = Some(made);
    }

    /// A launcher is deleted that is not ready, or has engines that do not end, though its node and accelerator are all right.
    fn crashed(&self, node: &mut Node, id: &ProviderId) {
        let Some(known) = node.providers.get(id).filter(|known| !known.deleting) else { return };
        let unready = known.stage != Stage::Ready;
        let useless = unready || node.engines_in(id).next().is_some();
        let (build, proved, exists) = (known.build, known.proved, node.exists);
        for accelerator in id.accelerators.iter().filter(|_| useless && exists) {
            let known = node.accelerators.get_mut(accelerator).filter(|known| known.facts.healthy);
            if let Some(known) = known {
                known.unready = unready;
                known.launcher_crashed(build, proved, self.settings, self.now);
            }
        }
    }

    fn launching(&self, node: &mut Node, record: &Record, provider: ProviderId) {
        let mut engine = Engine::of(record, provider, State::Creating, self.now);
        if let Some(binding) = &mut engine.binding {
            binding.written = false;
        }
        node.engines.insert(record.engine.clone(), engine);
    }

    /// What is deleted because the meter found more than is known of leaves a doubt until the meter was read again.
    fn doubt(&self, node: &mut Node, id: &EngineId) {
        let rooms = self.rooms(node);
        let more: Vec<_> =
            id.accelerators.iter().filter(|a| rooms.is_more_than_known(a, None)).cloned().collect();
        for accelerator in more {
            if let Some(known) = node.accelerators.get_mut(&accelerator) {
                known.doubted = true;
            }
        }
    }

    /// A start that failed is tried again, later each time.
    fn blame(&self, node: &mut Node, id: &EngineId, why: Why) {
        let Some(engine) = node.engines.get(id) else { return };
        let first = !engine.state.is_over();
        // Its gate is open, or may be since before a restart: no other engine can be given to it behind that.
        let open = matches!(engine.state, State::Unknown | State::Awake | State::Draining { .. });
        let failed = matches!(why, Why::StartFailed | Why::WakeFailed | Why::CanaryFailed);
        let requester = engine.requester().cloned().and_then(|r| node.requesters.get_mut(&r));
        let Some(requester) = requester else { return };
        if open {
            requester.doomed.get_or_insert(Farewell::EngineGone);
        }
        if failed && first {
            requester.start_failed(why, self.now);
        }
    }
}

/// What holds for this launcher; of one whose build is not known nothing does.
pub(super) fn terms(builds: &BTreeMap<Build, Terms>, launcher: &Provider) -> Terms {
    launcher.build.and_then(|build| builds.get(&build)).copied().unwrap_or_default()
}

/// The Pod goes, and every engine in it.
pub(super) fn leave(node: &mut Node, provider: &ProviderId, now: Tick) {
    for engine in node.engines.values_mut().filter(|engine| engine.provider == *provider) {
        if !engine.state.is_over() {
            engine.end(Why::Leaving, now);
            engine.call = None;
        }
        engine.ended = true;
    }
}

impl Provider {
    pub(super) fn ordered(now: Tick) -> Self {
        Self {
            uid: None,
            stage: Stage::Pending,
            deleting: false,
            restarts: 0,
            build: None,
            host: None,
            since: now,
            proved: None,
            made: false,
            taken: false,
            elder: None,
            call: None,
            retry: Retry::default(),
        }
    }
}

impl Engine {
    /// It is to end; what it was told before no longer matters.
    pub(super) fn end(&mut self, why: Why, now: Tick) {
        if !self.state.is_over() {
            let asleep = !self.is_big();
            self.enter(State::Ending { asleep, why }, now);
            self.failed = None;
            self.ended = false;
        }
    }
}
