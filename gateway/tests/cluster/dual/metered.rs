//! Decisions by Prometheus's readings of accelerators: their faults and their memory in use.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;

use super::DualPodsFixture;
use crate::{
    events,
    pairs::annotation,
    prometheus::{DcgmExporterStub, PrometheusServer},
};

async fn metered(name: &str, gpus: u32) -> (DualPodsFixture, DcgmExporterStub, PrometheusServer) {
    let exporter = DcgmExporterStub::start();
    let prometheus = PrometheusServer::start(&[("dcgm", exporter.address)]).await;
    let more = format!("}}, prometheus: {{url: 'http://{}', interval: 1s", prometheus.address);
    (DualPodsFixture::new(name, gpus, "8Gi", &more).await, exporter, prometheus)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_accelerator_with_a_fault_is_left_and_its_engine_replaced_on_another() {
    let (duo, exporter, _prometheus) = metered("dual-fault", 2).await;
    duo.ask("one", 1, 1, "").await;
    let (requester, provider) = duo.until_served("one").await;
    let faulty = annotation(&provider, "accelerators").unwrap().to_owned();
    exporter.set(&[(&faulty, "Hostname=\"n\"", 0)]);
    // A program's error is not a fault of its accelerator.
    exporter.add("DCGM_FI_DEV_XID_ERRORS", &faulty, 31);
    exporter.add("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", &faulty, 1);
    let deleted = events::until_event(&duo.world, &requester, "Deleted").await;
    let why = "the requester was deleted, so that its owner creates another: the accelerator is faulty";
    assert_eq!(deleted.message.as_deref(), Some(why));
    let moved = |requesters: &[Pod], providers: &[Pod]| {
        let on = |pod: &Pod| annotation(pod, "accelerators").map(str::to_owned);
        matches!((requesters, providers), ([asks], [serves])
            if on(asks).is_some_and(|other| other != faulty) && on(asks) == on(serves))
    };
    duo.until("one", "on the other accelerator", moved).await;
    assert_ne!(duo.until_served("one").await.1.uid(), provider.uid());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sleeper_that_keeps_more_than_it_was_to_keep_goes_before_the_next_engine_starts() {
    let (duo, exporter, _prometheus) = metered("dual-metered", 1).await;
    duo.ask("one", 1, 1, "").await;
    duo.until_served("one").await;
    duo.scale("one", 0).await;
    let sleeper = duo.until_asleep("one").await;
    let accelerator = annotation(&sleeper, "accelerators").unwrap().to_owned();
    // The sleeper declared one GiB, and sleepers may keep eight.
    exporter.set(&[(&accelerator, "Hostname=\"n\"", 20 << 10)]);
    let used = "rouse_accelerator_readings_total{outcome=\"done\",source=\"prometheus\"}";
    let read = |metrics: &str| {
        let line = metrics.lines().find(|line| line.starts_with(used));
        line.map_or(0, |line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap())
    };
    let (before, mut looks) =
        (read(&duo.gateway.metrics()), tokio::time::interval(std::time::Duration::from_millis(100)));
    while read(&duo.gateway.metrics()) < before + 4 {
        looks.tick().await;
    }
    duo.ask("two", 1, 1, "").await;
    let ended = events::until_event(&duo.world, &sleeper, "Ended").await;
    assert!(
        ended.message.as_ref().unwrap().ends_with("was stopped: the engine's memory is needed"),
        "{ended:?}"
    );
    duo.until("one", "no sleeper", |_, providers| providers.is_empty()).await;
    let (_, providers) = duo.pairs("two").await;
    assert!(providers.is_empty(), "what is in use by now is not known yet: {providers:#?}");
    // Of four more readings at least one is late enough to count, and it shows memory that no sleeper holds. The
    // requester keeps waiting.
    let before = read(&duo.gateway.metrics());
    while read(&duo.gateway.metrics()) < before + 4 {
        looks.tick().await;
    }
    let (_, providers) = duo.pairs("two").await;
    assert!(providers.is_empty(), "somebody uses more than sleepers may keep: {providers:#?}");
    exporter.set(&[(&accelerator, "Hostname=\"n\"", 0)]);
    duo.until_served("two").await;
}
