//! What all tasks of the platform share, and their requests to the engine manager.

use std::sync::Arc;

use arc_swap::{ArcSwap, ArcSwapOption};
use kube::Client;
use rouse::{
    engine::last_outcome::EngineDiagnostics,
    fleet::event::Event,
    model::{AcceleratorId, EngineId, ModelName, VariantName},
    units::Generation,
};
use rouse_platform::engine_client::PlatformContext;
use tokio::sync::{Notify, Semaphore, mpsc, oneshot};

use super::{
    ExternalBackend, ExternalBackends, ModelPlacement, ModelPlacements, ResolvedNodes, dcgm::DcgmClient,
    engine_manager::ManagerRequest, ledger_writer::LedgerChange, occupancy::OccupancyMap,
    work_queue::PlatformFailure,
};
use crate::{
    dual_pods::engine_orders::EngineOrders,
    index::{AcceleratorCapacities, ResolvedNode},
    ledger::{LocationError, PoolLedger, ReservationLocation},
    metrics::{MeterReadMetrics, TakeoverMetrics},
    status_inputs::StatusInputs,
    watch::InitialLists,
    workload::Sidecar,
    writer::ObjectWriter,
};

/// State shared by all tasks of the platform.
pub(super) struct KubernetesContext {
    pub(super) common: Arc<PlatformContext>,
    pub(super) client: Client,
    pub(super) pool_ledger: PoolLedger,
    pub(super) writer: ObjectWriter,
    pub(super) sidecar: Sidecar,
    pub(super) namespaces: Vec<Option<String>>,
    pub(super) initial_lists: InitialLists,
    pub(super) status_inputs: Arc<StatusInputs>,
    /// `None` until the cluster's objects were read for the first time.
    pub(super) placements: ArcSwapOption<ModelPlacements>,
    /// Notifies the engine manager after a change of `placements`.
    pub(super) placements_changed: Notify,
    pub(super) externals: ArcSwap<ExternalBackends>,
    pub(super) nodes: ArcSwap<ResolvedNodes>,
    /// Requests to the engine manager, which itself sends none: it would wait for itself.
    pub(super) requests: mpsc::Sender<ManagerRequest>,
    pub(super) failure: PlatformFailure,
    pub(super) dcgm: Option<Arc<DcgmClient>>,
    pub(super) readings: MeterReadMetrics,
    pub(super) takeovers: TakeoverMetrics,
    /// Orders to the pairing controller; `None` if this gateway has none.
    pub(super) engine_orders: Option<EngineOrders>,
    pub(super) occupancy: Arc<OccupancyMap>,
    /// Permits to confirm adopted engines.
    pub(super) confirmations: Semaphore,
    /// Permits to write Deployments again after a takeover.
    pub(super) reassertions: Semaphore,
}

/// Reports why this generation fails: to its model's conditions and Events, and to the fleet as diagnostics.
pub(super) async fn report_failure(
    common: &PlatformContext,
    status_inputs: &StatusInputs,
    engine: &EngineId,
    generation: Generation,
    reason: &str,
) {
    status_inputs.record_failure(engine, generation, reason);
    let (engine, diagnostics) = (engine.clone(), EngineDiagnostics::from_system(reason));
    common.send_event(Event::Diagnostics { engine, generation, diagnostics }).await;
}

impl KubernetesContext {
    pub(super) fn placements(&self) -> Arc<ModelPlacements> {
        self.placements.load_full().unwrap_or_default()
    }

    pub(super) fn has_placements(&self) -> bool {
        self.placements.load().is_some()
    }

    pub(super) fn placement(&self, engine: &EngineId) -> Option<Arc<ModelPlacement>> {
        self.variant_placement(&engine.model, &engine.variant)
    }

    pub(super) fn variant_placement(
        &self,
        model: &ModelName,
        variant: &VariantName,
    ) -> Option<Arc<ModelPlacement>> {
        self.placements.load().as_ref()?.get(model, variant).cloned()
    }

    pub(super) fn externals(&self) -> Arc<ExternalBackends> {
        self.externals.load_full()
    }

    pub(super) fn external(&self, model: &ModelName) -> Option<Arc<ExternalBackend>> {
        self.externals.load().get(model).cloned()
    }

    /// Returns the memory of this node's accelerators; empty if the node is unknown.
    pub(super) fn node_capacities(&self, node: &str) -> AcceleratorCapacities {
        self.nodes.load().get(node).map(|node| node.capacities.clone()).unwrap_or_default()
    }

    /// Returns the node that has all of these accelerators; `None` if no node is known to.
    pub(super) fn node_of(&self, accelerators: &[AcceleratorId]) -> Option<String> {
        let nodes = self.nodes.load();
        let has_all = |node: &ResolvedNode| {
            accelerators.iter().all(|accelerator| node.capacities.by_uuid.contains_key(accelerator))
        };
        nodes.iter().find(|(_, node)| has_all(node)).map(|(name, _)| name.clone())
    }

    /// Records which accelerators the engine got, and returns once that is written.
    ///
    /// # Errors
    /// The engine does not fit there.
    pub(super) async fn commit_location(
        &self,
        placement: &ModelPlacement,
        replica: u32,
        location: ReservationLocation,
    ) -> Result<(), LocationError> {
        let capacities = self.node_capacities(&location.node);
        let placed = self.submit_location(placement, replica, location, capacities).await;
        // An error means that the ledger writer ended, and with it this gateway's leadership.
        placed.await.unwrap_or(Ok(()))
    }

    /// Records which accelerators the engine has, whether or not there is room on them.
    pub(super) async fn record_location(
        &self,
        placement: &ModelPlacement,
        replica: u32,
        location: ReservationLocation,
    ) {
        drop(self.submit_location(placement, replica, location, AcceleratorCapacities::default()).await);
    }

    async fn submit_location(
        &self,
        placement: &ModelPlacement,
        replica: u32,
        location: ReservationLocation,
        capacities: AcceleratorCapacities,
    ) -> oneshot::Receiver<Result<(), LocationError>> {
        let (done, placed) = oneshot::channel();
        let engine = placement.reservation_owner(replica);
        let change = LedgerChange::SetLocation { engine, location, capacities, done };
        self.change_ledger(placement, change).await;
        placed
    }

    /// Requests a change of the ledger of the placement's pool, if it has one.
    async fn change_ledger(&self, placement: &ModelPlacement, change: LedgerChange) {
        if let Some(pool) = placement.pool.clone() {
            self.request(ManagerRequest::ChangeLedger { pool, change: Box::new(change) }).await;
        }
    }

    /// Sends a request to the engine manager, and waits while its queue is full.
    pub(super) async fn request(&self, request: ManagerRequest) {
        // Without a manager this gateway is ending, and its tasks with it.
        self.requests.send(request).await.unwrap_or_default();
    }

    pub(super) async fn report_failure(&self, engine: &EngineId, generation: Generation, reason: &str) {
        report_failure(&self.common, &self.status_inputs, engine, generation, reason).await;
    }

    /// Marks the engine as releasing; its memory stays reserved until [`Self::release`].
    pub(super) async fn mark_releasing(&self, placement: &ModelPlacement, replica: u32) {
        let engine = placement.reservation_owner(replica);
        self.change_ledger(placement, LedgerChange::MarkReleasing { engine }).await;
    }

    /// Releases the engine's reservation, and returns once that is written.
    pub(super) async fn release(&self, placement: &ModelPlacement, replica: u32) {
        let (done, released) = oneshot::channel();
        let engine = placement.reservation_owner(replica);
        self.change_ledger(placement, LedgerChange::Release { engine, done: Some(done) }).await;
        // An error means that the placement has no pool, or that the ledger writer ended, and with it this gateway's
        // leadership. The next leader checks again.
        drop(released.await);
    }
}
