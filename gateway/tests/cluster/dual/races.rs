//! An accelerator that the kubelet hands on: its next requester comes while the engine of the one before is awake. Engines know
//! what is on their accelerators, and die where there is too little: one that is launched too soon does not live.

use std::{fs, path::PathBuf};

use k8s_openapi::api::core::v1::Pod;
use kube::{
    ResourceExt as _,
    api::{DeleteParams, PropagationPolicy},
};
use nix::sys::signal::Signal;
use serde_json::Value;

use super::{
    Duo,
    both::{Home, all, both},
};
use crate::{
    launched::engines,
    pairs::{annotation, label},
};

impl Duo {
    /// The stub is killed, and its accelerator handed on at once.
    async fn kill_requester(&self, name: &str, requester: &Pod) {
        let orphan =
            DeleteParams { propagation_policy: Some(PropagationPolicy::Orphan), ..DeleteParams::default() };
        self.sets().delete(name, &orphan).await.unwrap();
        let at_once = DeleteParams::default().grace_period(0);
        self.world.pods().delete(&requester.name_any(), &at_once).await.unwrap();
    }

    /// Its requester is served, and no engine has found too little memory. The engines' own logs say so: a provider that died is
    /// replaced in silence, and nothing of it is left in any object.
    pub(super) async fn lives(&self, name: &str) -> Pod {
        let (requester, provider) = self.pair(name).await;
        assert_eq!(annotation(&requester, "status"), None);
        let logs = self.engine_logs();
        let started = logs.iter().filter(|(_, log)| log.contains(STARTED)).count();
        assert!(started > 0, "none of {} logs is of an engine", logs.len());
        let failed: Vec<_> = logs.iter().filter(|(_, log)| log.contains(OUT_OF_MEMORY)).collect();
        assert!(failed.is_empty(), "{failed:#?}");
        provider
    }

    /// What each engine wrote, whose Pod may be gone: in a container of its own, or in a launcher's folder.
    fn engine_logs(&self) -> Vec<(PathBuf, String)> {
        let mut paths = self.world.runner.logs(self.world.name()).unwrap();
        if self.home == Home::Launcher {
            let folder = fs::read_dir(self.world.dir.path().join("logs")).unwrap();
            paths.extend(folder.map(|log| log.unwrap().path()));
        }
        paths.into_iter().map(|path| (path.clone(), fs::read_to_string(path).unwrap())).collect()
    }
}

/// What an engine writes once it serves, and what it dies with that finds too little memory.
const STARTED: &str = "Application startup complete.";
const OUT_OF_MEMORY: &str = "OutOfMemoryError";

/// In a Pod of its own, or in the launcher of this life: nobody's, and asleep.
fn is_put_away(provider: &Pod, life: Option<&Value>) -> bool {
    match life {
        None => label(provider, "dual").is_none() && label(provider, "sleeping") == Some("true"),
        Some(life) => {
            let all = engines(provider);
            all.iter().any(|own| own["generation"] == *life && own["requester"].is_null())
        }
    }
}

fn life(duo: &Duo, provider: &Pod) -> Option<Value> {
    (duo.home == Home::Launcher).then(|| engines(provider)[0]["generation"].clone())
}

/// Without the stub's hold: nothing but the decision keeps the two apart.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reallocation_race_without_the_stubs_hold() {
    both("dual-race", 1, "", async |duo| {
        duo.demand("first", "--sleep-time 1500ms").await;
        let (requester, provider) = duo.pair("first").await;
        let life = life(&duo, &provider);
        duo.demand("second", "").await;
        duo.kill_requester("first", &requester).await;
        duo.lives("second").await;
        let (_, all) = duo.watch_for("first", "a sleeper", |_, all| all.len() == 1).await;
        assert_eq!(all[0].uid(), provider.uid());
        assert!(is_put_away(&all[0], life.as_ref()), "{all:#?}");
    })
    .await;
}

/// With the hold the accelerator is not even handed on before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reallocation_race_with_the_stubs_hold() {
    both("dual-hold", 1, "", async |duo| {
        duo.demand("first", "--sleep-time 1500ms").await;
        let (_, provider) = duo.pair("first").await;
        let life = life(&duo, &provider);
        duo.demand("second", "").await;
        duo.scale("first", 0).await;
        let placed = |all: &[Pod], _: &[Pod]| {
            all.iter().any(|own| own.spec.as_ref().is_some_and(|spec| spec.node_name.is_some()))
        };
        duo.watch_for("second", "a place", placed).await;
        let now = duo.world.pods().get(&provider.name_any()).await.unwrap();
        assert!(is_put_away(&now, life.as_ref()), "{now:#?}");
        duo.lives("second").await;
    })
    .await;
}

/// The former engine obeys nobody: what it holds is nobody else's until it is seen gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reallocation_race_with_a_provider_that_cannot_be_reached_which_is_fenced() {
    all("dual-fence", 1, ", drain: 1s, sleep: 2s", async |duo| {
        duo.demand("first", "").await;
        let (requester, provider) = duo.pair("first").await;
        duo.world.runner.signal(&provider, Signal::SIGSTOP);
        duo.demand("second", "").await;
        duo.kill_requester("first", &requester).await;
        let unbound = |_: &[Pod], all: &[Pod]| {
            !all.iter()
                .any(|own| own.uid() == provider.uid() && label(own, "dual") == Some(&*requester.name_any()))
        };
        duo.watch_for("first", "an engine that is given up", unbound).await;
        assert_ne!(duo.lives("second").await.uid(), provider.uid());
    })
    .await;
}
