//! Starts engine tasks.

use std::{
    net::SocketAddr,
    sync::{Arc, atomic::AtomicBool},
};

use rouse::{fault::FailureCause, fleet::event::Event, model::EngineId, units::Generation};
use tokio::sync::{mpsc, watch};

use super::{EngineManager, EngineTask, PodRelease};
use crate::{
    crd::ledger::ObjectName,
    engine_pod::EnginePod,
    platform::{
        ModelPlacement,
        engine_task::{self, EngineContext, EngineTaskCommand, EngineTaskStart},
        external::{ExternalBackend, ExternalEngineTask},
    },
};

impl EngineManager {
    pub(super) async fn launch(&mut self, engine: EngineId, generation: Generation) {
        if let Some(external) =
            self.shared.external(&engine.model).filter(|_| !self.engines.contains_key(&engine))
        {
            return self.start_external(engine, generation, external, None);
        }
        // The engine runs by what was reserved, even if the objects have changed since.
        let place = self.reserved.remove(&engine).or_else(|| self.shared.placement(&engine.model));
        let runs = self.engines.contains_key(&engine);
        let Some(place) = place.filter(|_| !runs) else {
            tracing::error!(%engine, %generation, runs, "cannot launch the engine: the engine already runs or has no placement");
            let cause = FailureCause::Refused;
            return self.shared.common.send_event(Event::Gone { engine, generation, cause }).await;
        };
        self.start_task(engine, generation, place, None, EngineTaskStart::Launch);
    }

    /// Starts the task of an engine generation.
    pub(in crate::platform) fn start_task(
        &mut self,
        id: EngineId,
        generation: Generation,
        place: Arc<ModelPlacement>,
        pod: Option<Arc<EnginePod>>,
        start: EngineTaskStart,
    ) {
        self.spawn_task(id, generation, place, pod, start, None);
    }

    /// `leaving`: the release that is already under way, so that the scaler counts no Pod for this engine.
    pub(super) fn spawn_task(
        &mut self,
        id: EngineId,
        generation: Generation,
        place: Arc<ModelPlacement>,
        pod: Option<Arc<EnginePod>>,
        start: EngineTaskStart,
        leaving: PodRelease,
    ) {
        let deployment = match &pod {
            Some(pod) => place.deployment_of(&pod.template_hash),
            None => place.deployment(),
        };
        let (orders, received) = mpsc::unbounded_channel();
        let (shown, seen) = watch::channel(pod.clone());
        let berth = EngineContext {
            shared: Arc::clone(&self.shared),
            id: id.clone(),
            generation,
            placement: Arc::clone(&place),
            requests: self.requests.clone(),
            located: AtomicBool::new(false),
        };
        self.tasks.spawn(engine_task::run(Arc::new(berth), received, seen, start));
        let life = EngineTask {
            generation,
            placement: Some(Arc::clone(&place)),
            deployment: deployment.clone(),
            commands: orders,
            bound: pod.is_some(),
            pod: pod.map(|pod| pod.name.clone()),
            pod_sender: shown,
            release: leaving,
        };
        self.engines.insert(id, life);
        self.update_replicas(&deployment, Some(place));
        self.assign(&deployment);
    }

    /// Starts the task of an external backend. `known`: its address, if it already serves.
    pub(in crate::platform) fn start_external(
        &mut self,
        id: EngineId,
        generation: Generation,
        external: Arc<ExternalBackend>,
        known: Option<SocketAddr>,
    ) {
        let (orders, received) = mpsc::unbounded_channel();
        let common = Arc::clone(&self.shared.common);
        let requests = self.requests.clone();
        let told = Arc::clone(&self.shared.status_inputs);
        let visit = ExternalEngineTask {
            common,
            status_inputs: told,
            id: id.clone(),
            generation,
            external,
            requests,
        };
        self.tasks.spawn(visit.run(received, known));
        let (shown, _) = watch::channel(None);
        let deployment = ObjectName::new("", "");
        let (place, pod, leaving) = (None, None, None);
        let life = EngineTask {
            generation,
            placement: place,
            deployment,
            commands: orders,
            pod,
            pod_sender: shown,
            bound: true,
            release: leaving,
        };
        self.engines.insert(id, life);
    }

    /// Stops an engine that was not adopted, and releases its Pod and reservation.
    pub(in crate::platform) async fn stop_unadopted(
        &mut self,
        place: &Arc<ModelPlacement>,
        replica: u32,
        generation: Generation,
        pod: Option<Arc<EnginePod>>,
    ) {
        let engine = EngineId::new(place.engine.name.clone(), replica);
        if self.engines.contains_key(&engine) {
            return;
        }
        let start = if pod.is_some() { EngineTaskStart::Starting } else { EngineTaskStart::Launch };
        let leaving = Some((u64::MAX, None));
        self.spawn_task(engine.clone(), generation, Arc::clone(place), pod, start, leaving);
        self.send_command(engine, generation, EngineTaskCommand::Stop).await;
    }
}
