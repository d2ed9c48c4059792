//! Starts engine tasks.

use std::{
    net::SocketAddr,
    sync::{Arc, OnceLock, atomic::AtomicBool},
};

use rouse::{fault::FailureCause, fleet::event::Event, model::EngineId, units::Generation};
use tokio::sync::{mpsc, watch};

use super::{EngineManager, EngineTask, PodRelease};
use crate::{
    engine_pod::EnginePod,
    platform::{
        ModelPlacement,
        engine_task::{self, EngineContext, EngineTaskCommand, EngineTaskStart},
        external::{ExternalBackend, ExternalEngineTask},
        work_queue::{MAX_PER_ENGINE, WorkQueue},
    },
};

impl EngineManager {
    pub(super) async fn launch(&mut self, engine: EngineId, generation: Generation) {
        if let Some(external) =
            self.shared.external(&engine.model).filter(|_| !self.engines.contains(&engine))
        {
            return self.start_external(engine, generation, external, None);
        }
        // The engine runs by what was reserved, even if the objects have changed since.
        let placement = self.reserved.remove(&engine).or_else(|| self.shared.placement(&engine));
        let runs = self.engines.contains(&engine);
        let Some(placement) = placement.filter(|placement| !runs && placement.is_placed()) else {
            tracing::error!(%engine, %generation, runs, "cannot launch the engine: the engine already runs or has no placement");
            let cause = FailureCause::Refused;
            return self.shared.common.send_event(Event::Gone { engine, generation, cause }).await;
        };
        self.start_task(engine, generation, placement, None, EngineTaskStart::Launch);
    }

    /// Starts the task of an engine generation.
    pub(in crate::platform) fn start_task(
        &mut self,
        id: EngineId,
        generation: Generation,
        placement: Arc<ModelPlacement>,
        pod: Option<Arc<EnginePod>>,
        start: EngineTaskStart,
    ) {
        self.spawn_task(id, generation, placement, pod, start, None);
    }

    /// `release`: the release that is already under way, so that the scaler counts no Pod for this engine.
    pub(super) fn spawn_task(
        &mut self,
        id: EngineId,
        generation: Generation,
        placement: Arc<ModelPlacement>,
        pod: Option<Arc<EnginePod>>,
        start: EngineTaskStart,
        release: PodRelease,
    ) {
        let deployment = match &pod {
            Some(pod) => placement.deployment_of(&pod.template_hash),
            None => placement.deployment(),
        };
        let (commands, commands_rx) = self.command_queue();
        let (pod_sender, pod_receiver) = watch::channel(pod.clone());
        let context = EngineContext {
            shared: Arc::clone(&self.shared),
            id: id.clone(),
            generation,
            placement: Arc::clone(&placement),
            epoch: self.epoch(),
            located: AtomicBool::new(false),
            ordered: OnceLock::new(),
        };
        self.tasks.spawn(engine_task::run(Arc::new(context), commands_rx, pod_receiver, start));
        let task = EngineTask {
            generation,
            placement: Some(Arc::clone(&placement)),
            deployment: Some(deployment.clone()),
            commands,
            bound: pod.is_some(),
            pod: pod.map(|pod| pod.name.clone()),
            pod_sender,
            release,
        };
        self.engines.insert(id, task);
        self.update_replicas(&deployment, Some(placement));
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
        let (commands, commands_rx) = self.command_queue();
        let common = Arc::clone(&self.shared.common);
        let requests = self.shared.requests.clone();
        let status_inputs = Arc::clone(&self.shared.status_inputs);
        let external_task =
            ExternalEngineTask { common, status_inputs, id: id.clone(), generation, external, requests };
        self.tasks.spawn(external_task.run(commands_rx, known));
        let (pod_sender, _) = watch::channel(None);
        let (placement, deployment, pod, release) = (None, None, None, None);
        let task =
            EngineTask { generation, placement, deployment, commands, pod, pod_sender, bound: true, release };
        self.engines.insert(id, task);
    }

    /// Creates the queue of an engine task's commands. If it is full, the task hangs, and this gateway ends.
    fn command_queue(&self) -> (WorkQueue<EngineTaskCommand>, mpsc::Receiver<EngineTaskCommand>) {
        WorkQueue::new("commands of an engine task", MAX_PER_ENGINE, &self.shared.failure)
    }

    /// Stops an engine that was not adopted, and releases its Pod and reservation.
    pub(in crate::platform) async fn stop_unadopted(
        &mut self,
        placement: &Arc<ModelPlacement>,
        replica: u32,
        generation: Generation,
        pod: Option<Arc<EnginePod>>,
    ) {
        let engine = placement.engine_id(replica);
        if self.engines.contains(&engine) {
            return;
        }
        let start = if pod.is_some() { EngineTaskStart::Starting } else { EngineTaskStart::Launch };
        let release = Some((u64::MAX, None));
        self.spawn_task(engine.clone(), generation, Arc::clone(placement), pod, start, release);
        self.send_command(engine, generation, EngineTaskCommand::Stop).await;
    }
}
