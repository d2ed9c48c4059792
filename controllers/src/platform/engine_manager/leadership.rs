//! Starts and ends leading.

use std::sync::Arc;

use rouse::{
    fleet::{command::Command, event::Event},
    model::EngineId,
    units::Generation,
};
use rouse_platform::metric_builder::seconds;
use tokio::sync::mpsc;

use super::{EngineManager, pod_index::PodIndex};
use crate::{
    dual_pods::engine_orders::EngineOrders,
    generation_floor,
    metrics::TakeoverTimes,
    platform::{
        confirmation,
        takeover::{self, LedgerTakeover, TakeoverOutcome},
    },
    published::PublishedMailbox,
};

impl EngineManager {
    pub(super) fn has_synced(&self) -> bool {
        self.shared.has_placements()
            && self.shared.namespaces.iter().all(|namespace| self.listed_namespaces.contains(namespace))
    }

    /// Drops everything of a term, and reports what other gateways publish instead.
    pub(super) async fn end_term(&mut self) {
        self.leading = false;
        // The next term writes its own epoch.
        self.ledger_takeover = None;
        self.tasks.shutdown().await;
        let own_engines: Vec<(EngineId, Generation)> =
            self.engines.iter().map(|(id, task)| (id.clone(), task.generation)).collect();
        // Their orders end with the tasks.
        self.shared.engine_orders.iter().for_each(EngineOrders::clear);
        self.engines.clear();
        self.scalers.clear();
        self.ledger_writers.clear();
        self.reserved.clear();
        self.pending.clear();
        self.pods = PodIndex::default();
        self.listed_namespaces.clear();
        self.orphans.clear();
        if !std::mem::take(&mut self.term_begun) {
            return;
        }
        // Sent even between two successive terms of this gateway: work of the first term has ended.
        self.shared.common.send_event(Event::LeadershipChanged { leads: false }).await;
        self.forward_all().await;
        // Engines that this gateway had begun and no status mentions do not run.
        for (engine, generation) in own_engines.into_iter().filter(|(engine, _)| !self.is_published(engine)) {
            self.shared.common.send_event(Event::Published { engine, generation, published: None }).await;
        }
    }

    /// Begins what the takeover needs beside the lists, which take the API server seconds.
    pub(super) fn prepare_term(&mut self) {
        let can_begin = self.term.is_some() && !self.term_begun && self.shared.has_placements();
        if can_begin && self.ledger_takeover.is_none() {
            self.ledger_takeover = Some(takeover::start_ledgers(&self.shared));
        }
    }

    /// Takes over what runs, and executes commands from then on.
    pub(super) async fn begin_term(
        &mut self,
        epoch: u64,
        ledgers: LedgerTakeover,
        commands: &mut mpsc::Receiver<Command>,
        published: &PublishedMailbox,
    ) {
        let shared = Arc::clone(&self.shared);
        let listed = shared.common.clock.now();
        // A gateway that leads right after its start may not have processed the former leader's statuses yet. They show
        // which engines serve.
        while let Some(status) = published.try_take() {
            self.apply_status(status).await;
        }
        // With the placements of now. The fleet may not have known a model yet when its status came.
        self.forward_all().await;
        self.shared.common.send_event(Event::LeadershipChanged { leads: true }).await;
        // Generations from before this epoch, unknown to any current gateway, are older.
        let generation = generation_floor::of_epoch(epoch);
        self.shared.common.send_event(Event::GenerationFloor { generation }).await;
        let unconfirmed = confirmation::hold_back(&shared.confirmations).await;
        let found = takeover::take_over(self, ledgers).await;
        // Commands from before the takeover did not know what runs. Only `AwaitStub` still applies.
        let mut holds = Vec::new();
        while let Ok(command) = commands.try_recv() {
            holds.extend(Some(command).filter(|command| matches!(command, Command::AwaitStub { .. })));
        }
        self.shared.common.send_event(Event::AdoptionDone).await;
        self.leading = true;
        let decides = shared.common.clock.now();
        let times = TakeoverTimes::new(self.term_since, listed, found.ledgers_taken, decides);
        shared.takeovers.set(times);
        log_takeover(epoch, found, times);
        for done in holds {
            self.execute(done).await;
        }
        for (deployment, placement) in std::mem::take(&mut self.pending) {
            self.reassert_replicas(&deployment, placement);
            self.assign(&deployment);
        }
        drop(unconfirmed);
    }
}

/// Logs what the takeover found and how long its steps took. See [`TakeoverTimes`].
fn log_takeover(epoch: u64, found: TakeoverOutcome, times: TakeoverTimes) {
    let TakeoverOutcome { pools, engines, asked, .. } = found;
    let TakeoverTimes { lists, ledgers, engines: adoption, total } = times;
    tracing::info!(
        epoch,
        pools,
        engines,
        asked,
        lists_seconds = seconds(lists),
        ledgers_seconds = seconds(ledgers),
        engines_seconds = seconds(adoption),
        total_seconds = seconds(total),
        "takeover complete: this leader decides from now on"
    );
}
