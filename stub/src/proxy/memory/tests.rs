use std::sync::atomic::Ordering;

use axum::{body::Body, http::Request};
use http_body_util::BodyExt as _;
use tower_service::Service as _;

use super::*;
use crate::{
    accelerator_driver::fake::{FakeDriver, MissingDriver},
    proxy::accelerators::DiscoverySources,
};

const A: &str = "GPU-a";
const B: &str = "GPU-b";
const C: &str = "GPU-c";

/// A reader of the accelerators a, b and c, whichever of them the driver knows.
async fn memory(driver: Arc<dyn AcceleratorDriver>, within: Duration) -> MemoryReader {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("accelerators");
    std::fs::write(&file, "GPU-a\nGPU-b\nGPU-c\n").unwrap();
    let accelerators =
        AcceleratorDiscovery::discover(DiscoverySources::from_file(file), Arc::new(MissingDriver));
    accelerators.get().await.unwrap();
    MemoryReader::with_timeout(accelerators, driver, within)
}

async fn asked(memory: &MemoryReader) -> (u16, String) {
    let mut router = routes(memory.clone());
    let response = router.call(Request::get(PATH).body(Body::empty()).unwrap()).await.unwrap();
    let status = response.status().as_u16();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

#[tokio::test]
async fn usage_is_in_mib_by_uuid() {
    let driver = FakeDriver::new(&[(A, Some(0)), (B, Some(70_000)), (C, Some(512))]);
    let memory = memory(Arc::new(driver), nvml::QUERY_TIMEOUT).await;
    assert_eq!(asked(&memory).await, (200, "{\"GPU-a\":0,\"GPU-b\":70000,\"GPU-c\":512}\n".to_owned()));
}

#[tokio::test]
async fn each_accelerator_that_fails_is_named_with_its_cause() {
    let one =
        memory(Arc::new(FakeDriver::new(&[(A, Some(1)), (B, None), (C, Some(1))])), nvml::QUERY_TIMEOUT)
            .await;
    assert_eq!(asked(&one).await, (500, "GPU-b: accelerator GPU-b is lost\n".to_owned()));

    let missing = memory(Arc::new(MissingDriver), nvml::QUERY_TIMEOUT).await;
    let why = "no NVIDIA driver found (libnvidia-ml.so.1 does not exist)";
    assert_eq!(asked(&missing).await, (500, format!("GPU-a: {why}\nGPU-b: {why}\nGPU-c: {why}\n")));
}

#[tokio::test]
async fn without_accelerators_there_is_nothing_to_read() {
    let none = AcceleratorDiscovery::discover(DiscoverySources::default(), Arc::new(MissingDriver));
    let memory = MemoryReader::new(none, Arc::new(MissingDriver));
    assert_eq!(asked(&memory).await, (500, "no GPUs found\n".to_owned()));
}

#[tokio::test]
async fn a_driver_that_hangs_costs_one_thread_however_many_ask() {
    let driver = Arc::new(FakeDriver::new(&[(A, Some(1)), (B, Some(2)), (C, Some(3))]));
    driver.set_hanging_id(Some(B));
    let within = Duration::from_millis(100);
    let memory = memory(Arc::clone(&driver) as _, within).await;

    let asking: Vec<_> = (0..100)
        .map(|_| {
            let memory = memory.clone();
            tokio::spawn(async move { memory.read().await })
        })
        .collect();
    for answer in asking {
        let Err(Error::Failed(failed)) = answer.await.unwrap() else { panic!("it hangs") };
        let failed: Vec<(&str, &str)> = failed.iter().map(|(id, why)| (id.as_str(), why.as_str())).collect();
        let [(B, why), (C, "not read: NVML hangs")] = failed[..] else { panic!("{failed:?}") };
        assert!(why.starts_with("NVML hangs: no answer for "), "{why}");
    }
    assert_eq!(driver.max_active_calls.load(Ordering::SeqCst), 1);

    // Later reads fail at once instead of waiting for the hanging driver; otherwise these reads would time out a
    // hundred times.
    let before = Instant::now();
    for _ in 0..100 {
        assert!(memory.read().await.is_err());
    }
    assert!(before.elapsed() < within * 50, "{:?}", before.elapsed());

    driver.set_hanging_id(None);
    let idle = || memory.inner.queue.lock().unwrap().running.is_none();
    while !idle() {
        tokio::task::yield_now().await;
    }
    assert_eq!(memory.read().await.unwrap().len(), 3);
}

#[tokio::test]
async fn nobody_is_given_a_reading_that_began_before_they_asked() {
    let driver = Arc::new(FakeDriver::new(&[(A, Some(1)), (B, Some(900)), (C, Some(3))]));
    driver.set_hanging_id(Some(C));
    let memory = memory(Arc::clone(&driver) as _, nvml::QUERY_TIMEOUT).await;
    let ask = || {
        let memory = memory.clone();
        tokio::spawn(async move { memory.read().await.unwrap() })
    };

    let first = ask();
    while driver.readings.load(Ordering::SeqCst) < 2 {
        tokio::task::yield_now().await;
    }
    // B was read. Now its engine falls asleep, and two requests arrive.
    driver.devices.lock().unwrap()[1].1 = Some(7);
    let (second, third) = (ask(), ask());
    while memory.inner.queue.lock().unwrap().next.as_ref().is_none_or(|next| next.receiver_count() < 2) {
        tokio::task::yield_now().await;
    }
    driver.set_hanging_id(None);
    assert_eq!(first.await.unwrap()[B], 900);
    assert_eq!(second.await.unwrap()[B], 7);
    assert_eq!(third.await.unwrap()[B], 7);
    assert_eq!(driver.readings.load(Ordering::SeqCst), 6, "the two shared one reading");
    assert_eq!(driver.max_active_calls.load(Ordering::SeqCst), 1);
}
