//! Engines of launchers that do not say whether an engine answers, as the public project's: they are asked themselves.

use std::{collections::BTreeMap, net::IpAddr, time::Duration};

use rouse_net::adapter::{Adapter, EngineKind, EngineProfile, ProbeTask, SleepApi};
use tokio::{
    task::{AbortHandle, JoinSet},
    time,
};

use super::{LauncherInstance, LauncherWatchEvent};

/// Between two questions: short at first, since somebody waits, and never longer than the last.
const MIN_PROBE_DELAY: Duration = Duration::from_millis(50);
const MAX_PROBE_DELAY: Duration = Duration::from_secs(1);
const GROWTH: f64 = 1.3;
/// One question; an engine that loads its weights may be slow to answer.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// Of one launcher, for as long as it is listened to.
pub(super) struct EngineProbes {
    address: IpAddr,
    /// Each ends with the instance as it is once it answers.
    tasks: JoinSet<LauncherInstance>,
    by_instance: BTreeMap<String, AbortHandle>,
}

impl EngineProbes {
    /// Its engines listen where the launcher does.
    pub(super) fn new(address: IpAddr) -> Self {
        Self { address, tasks: JoinSet::new(), by_instance: BTreeMap::new() }
    }

    /// Asks those that have come, and no more those that have gone.
    pub(super) fn on_event(&mut self, seen: &LauncherWatchEvent) {
        match seen {
            LauncherWatchEvent::Listed(all) => all.iter().for_each(|instance| self.start(instance)),
            LauncherWatchEvent::Created(instance) => self.start(instance),
            LauncherWatchEvent::Stopped { instance, .. } | LauncherWatchEvent::Deleted(instance) => {
                self.stop(&instance.id)
            }
            LauncherWatchEvent::Updated(_) | LauncherWatchEvent::Disconnected => {}
        }
    }

    /// The next one that answers.
    pub(super) async fn next(&mut self) -> LauncherWatchEvent {
        loop {
            match self.tasks.join_next().await {
                Some(Ok(instance)) => return LauncherWatchEvent::Updated(instance),
                // It is asked no more.
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
