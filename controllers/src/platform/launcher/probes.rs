//! Probes engines of launchers that do not report readiness, such as the public project's.

use std::{collections::BTreeMap, net::IpAddr, time::Duration};

use rouse_net::adapter::{Adapter, EngineKind, EngineProfile, ProbeTask, SleepApi};
use tokio::{
    task::{AbortHandle, JoinSet},
    time,
};

use super::{LauncherInstance, LauncherWatchEvent};

/// Delay between two probes: short at first, because a requester waits, and at most `MAX_PROBE_DELAY`.
const MIN_PROBE_DELAY: Duration = Duration::from_millis(50);
const MAX_PROBE_DELAY: Duration = Duration::from_secs(1);
const GROWTH: f64 = 1.3;
/// Timeout of one probe: an engine that loads its weights may answer slowly.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// Probes the engines of one launcher while its watch runs.
pub(super) struct EngineProbes {
    address: IpAddr,
    /// Each task returns the instance once it answers.
    tasks: JoinSet<LauncherInstance>,
    by_instance: BTreeMap<String, AbortHandle>,
}

impl EngineProbes {
    /// The engines listen on the launcher's address.
    pub(super) fn new(address: IpAddr) -> Self {
        Self { address, tasks: JoinSet::new(), by_instance: BTreeMap::new() }
    }

    /// Starts probing new instances and stops probing vanished ones.
    pub(super) fn on_event(&mut self, event: &LauncherWatchEvent) {
        match event {
            LauncherWatchEvent::Listed(all) => all.iter().for_each(|instance| self.start(instance)),
            LauncherWatchEvent::Created(instance) => self.start(instance),
            LauncherWatchEvent::Stopped { instance, .. } | LauncherWatchEvent::Deleted(instance) => {
                self.stop(&instance.id)
            }
            LauncherWatchEvent::Updated(_) | LauncherWatchEvent::Disconnected => {}
        }
    }

    /// Waits for the next instance that answers.
    pub(super) async fn next(&mut self) -> LauncherWatchEvent {
        loop {
            match self.tasks.join_next().await {
                Some(Ok(instance)) => return LauncherWatchEvent::Updated(instance),
                // Probing this instance was cancelled.
                Some(Err(_)) => {}
                None => std::future::pending().await,
            }
        }
    }

    fn start(&mut self, instance: &LauncherInstance) {
        let Some(port) = instance.port().filter(|_| instance.running && instance.ready.is_none()) else {
            return;
        };
        let manner = EngineProfile {
            kind: EngineKind::Vllm,
            sleep: SleepApi::Vllm,
            served_name: String::new(),
            task: ProbeTask::None,
            api_key: None,
        };
        let engine = Adapter::new(manner, (self.address, port).into());
        let answers = LauncherInstance { ready: Some(true), ..instance.clone() };
        self.stop(&instance.id);
        let task = self.tasks.spawn(async move {
            let mut gap = MIN_PROBE_DELAY;
            while engine.check_awake(PROBE_TIMEOUT).await.is_err() {
                time::sleep(gap).await;
                gap = gap.mul_f64(GROWTH).min(MAX_PROBE_DELAY);
            }
            answers
        });
        self.by_instance.insert(instance.id.clone(), task);
    }

    fn stop(&mut self, id: &str) {
        if let Some(task) = self.by_instance.remove(id) {
            task.abort();
        }
    }
}
