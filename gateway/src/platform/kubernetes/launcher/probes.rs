//! Engines of launchers that do not say whether an engine answers, as the public project's: they are asked themselves.

use std::{collections::BTreeMap, net::IpAddr, time::Duration};

use rouse::adapter::{Adapter, Kind, Manner, SleepApi, Task};
use tokio::{
    task::{AbortHandle, JoinSet},
    time,
};

use super::{Instance, Seen};

/// Between two questions: short at first, since somebody waits, and never longer than the last.
const FIRST: Duration = Duration::from_millis(50);
const LAST: Duration = Duration::from_secs(1);
const GROWTH: f64 = 1.3;
/// One question; an engine that loads its weights may be slow to answer.
const MOMENT: Duration = Duration::from_secs(5);

/// Of one launcher, for as long as it is listened to.
pub(super) struct Probes {
    address: IpAddr,
    /// Each ends with the instance as it is once it answers.
    tasks: JoinSet<Instance>,
    of: BTreeMap<String, AbortHandle>,
}

impl Probes {
    /// Its engines listen where the launcher does.
    pub(super) fn new(address: IpAddr) -> Self {
        Self { address, tasks: JoinSet::new(), of: BTreeMap::new() }
    }

    /// Asks those that have come, and no more those that have gone.
    pub(super) fn saw(&mut self, seen: &Seen) {
        match seen {
            Seen::Listed(all) => all.iter().for_each(|instance| self.ask(instance)),
            Seen::Created(instance) => self.ask(instance),
            Seen::Stopped { instance, .. } | Seen::Deleted(instance) => self.leave(&instance.id),
            Seen::Updated(_) | Seen::Lost => {}
        }
    }

    /// The next one that answers.
    pub(super) async fn next(&mut self) -> Seen {
        loop {
            match self.tasks.join_next().await {
                Some(Ok(instance)) => return Seen::Updated(instance),
                // It is asked no more.
                Some(Err(_)) => {}
                None => std::future::pending().await,
            }
        }
    }

    fn ask(&mut self, instance: &Instance) {
        let Some(port) = instance.port().filter(|_| instance.running && instance.ready.is_none()) else {
            return;
        };
        let manner = Manner {
            kind: Kind::Vllm,
            sleep: SleepApi::Vllm,
            served_name: String::new(),
            task: Task::None,
            api_key: None,
        };
        let engine = Adapter::new(manner, (self.address, port).into());
        let answers = Instance { ready: Some(true), ..instance.clone() };
        self.leave(&instance.id);
        let task = self.tasks.spawn(async move {
            let mut gap = FIRST;
            while engine.up(MOMENT).await.is_err() {
                time::sleep(gap).await;
                gap = gap.mul_f64(GROWTH).min(LAST);
            }
            answers
        });
        self.of.insert(instance.id.clone(), task);
    }

    fn leave(&mut self, id: &str) {
        if let Some(task) = self.of.remove(id) {
            task.abort();
        }
    }
}
