//! The kubelet hands an accelerator on: its next requester arrives while the previous engine is awake. Engines know the
//! load of their accelerators and die where memory lacks, so an engine that is launched too soon does not live.

use engine_sim::accelerator::AcceleratorFile;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    ResourceExt as _,
    api::{DeleteParams, PropagationPolicy},
};
use nix::sys::signal::Signal;
use serde_json::Value;

use super::{
    DualPodsFixture,
    all_modes::{TestedProviderKind, for_all_kinds, for_all_kinds_small, for_sleeping_kinds, is_empty},
};
use crate::{
    launched::engines,
    pairs::{annotation, label},
};

impl DualPodsFixture {
    /// Kills the requester and hands its accelerator on at once.
    async fn kill_requester(&self, name: &str, requester: &Pod) {
        let orphan =
            DeleteParams { propagation_policy: Some(PropagationPolicy::Orphan), ..DeleteParams::default() };
        self.sets().delete(name, &orphan).await.unwrap();
        let at_once = DeleteParams::default().grace_period(0);
        self.world.pods().delete(&requester.name_any(), &at_once).await.unwrap();
    }

    /// Asserts that the requester serves and that no engine has met too little memory. Returns its provider. The
    /// engines' own record proves it: the gateway replaces a provider that died, a launcher removes the log of an
    /// engine that it removes, and no object has to keep the death.
    pub(super) async fn lives(&self, name: &str) -> Pod {
        let (requester, provider) = self.pair(name).await;
        assert_eq!(annotation(&requester, "status"), None);
        let record = self.record();
        assert!(record.usage().unwrap().values().any(|card| card.used_total > 0), "no engine has a record");
        assert_eq!(record.refusals().unwrap(), [""; 0]);
        provider
    }

    /// The memory that engines took of the accelerators, and the requests that were refused.
    fn record(&self) -> AcceleratorFile {
        AcceleratorFile::open(self.world.dir.path().join("cards")).unwrap()
    }
}

/// Without this check the races below could not be lost. A process that no controller knows takes the memory here.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_found_too_little_memory_is_known_of_when_the_next_serves() {
    for_all_kinds("dual-small", 1, "", async |duo| {
        let cards: Vec<String> = duo.record().usage().unwrap().into_keys().collect();
        let stranger = duo.record().holder(&cards, "stranger", None).unwrap();
        stranger.resize(60 << 30).unwrap();
        duo.demand("one", "").await;
        let refused = || duo.record().refusals().unwrap();
        duo.watch_for("one", "an engine that finds no room", |_, _| !refused().is_empty()).await;
        stranger.resize(0).unwrap();
        duo.pair("one").await;
        let refused = refused();
        assert!(refused.iter().any(|what| what.contains("do not fit")), "{refused:?}");
    })
    .await;
}

/// Whether the engine, in a Pod of its own or of this generation in a launcher, is asleep without a requester.
fn is_put_away(provider: &Pod, life: Option<&Value>) -> bool {
    match life {
        None => label(provider, "dual").is_none() && label(provider, "sleeping") == Some("true"),
        Some(life) => {
            let all = engines(provider);
            all.iter().any(|own| own["generation"] == *life && own["requester"].is_null())
        }
    }
}

fn life(duo: &DualPodsFixture, provider: &Pod) -> Option<Value> {
    (duo.provider_kind == TestedProviderKind::Launcher).then(|| engines(provider)[0]["generation"].clone())
}

/// Without the stub's hold only the gateway's decision keeps the two engines apart.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reallocation_race_without_the_stubs_hold() {
    for_all_kinds("dual-race", 1, "", async |duo| {
        // The first engine releases its memory some time after the order: in mode plain when its kubelet kills it.
        let plain = duo.provider_kind == TestedProviderKind::Plain;
        duo.demand("first", if plain { "--fault ignore-sigterm" } else { "--sleep-time 1500ms" }).await;
        let (requester, provider) = duo.pair("first").await;
        let life = life(&duo, &provider);
        duo.demand("second", "").await;
        duo.kill_requester("first", &requester).await;
        duo.lives("second").await;
        if plain {
            duo.watch_for("first", "no engine", is_empty).await;
            return;
        }
        let (_, all) = duo.watch_for("first", "a sleeper", |_, all| all.len() == 1).await;
        assert_eq!(all[0].uid(), provider.uid());
        assert!(is_put_away(&all[0], life.as_ref()), "{all:#?}");
    })
    .await;
}

/// With the hold the kubelet does not even hand the accelerator on before the engine has released it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reallocation_race_with_the_stubs_hold() {
    for_sleeping_kinds("dual-hold", 1, "", async |duo| {
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

/// The former engine obeys no order, so no other engine may use its memory until the gateway has seen it end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reallocation_race_with_a_provider_that_cannot_be_reached_which_is_fenced() {
    for_all_kinds_small("dual-fence", ", drain: 1s, sleep: 2s", async |duo| {
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
