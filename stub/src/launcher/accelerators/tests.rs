use std::sync::atomic::Ordering;

use super::*;
use crate::accelerator_driver::fake::{FakeDriver, MissingDriver};

fn strings(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

fn over(driver: &Arc<FakeDriver>, within: Duration) -> Arc<NodeAccelerators> {
    Arc::new(NodeAccelerators { timeout: within, ..NodeAccelerators::from_driver(Arc::clone(driver) as _) })
}

#[tokio::test]
async fn instance_uuid_to_index_translation() {
    let known = NodeAccelerators::mock(4);
    assert_eq!(known.visible_devices(&strings(&["GPU-3", "GPU-0"])).await.unwrap(), "3,0");
}

#[tokio::test]
async fn what_is_not_here_is_named_with_what_is() {
    let error = NodeAccelerators::mock(2).visible_devices(&strings(&["GPU-1", "GPU-7"])).await.unwrap_err();
    assert_eq!(error.to_string(), "accelerator GPU-7 is not on this node: the node has GPU-0, GPU-1");
    let none = "accelerator GPU-7 is not on this node: the node has none";
    for empty in [NodeAccelerators::mock(0), NodeAccelerators::from_driver(Arc::new(MissingDriver))] {
        assert_eq!(empty.visible_devices(&strings(&["GPU-7"])).await.unwrap_err().to_string(), none);
    }
}

#[tokio::test]
async fn a_part_is_shown_by_its_uuid() {
    let listed = |id: &str, index| AcceleratorEntry { id: id.into(), index, memory: None };
    let known = NodeAccelerators::from_entries(vec![listed("MIG-a0", None), listed("GPU-b", Some(1))]);
    assert_eq!(known.visible_devices(&strings(&["GPU-b", "MIG-a0"])).await.unwrap(), "1,MIG-a0");
}

/// All callers share one driver query and its deadline.
#[tokio::test]
async fn a_driver_that_hangs_costs_all_who_ask_one_deadline_and_one_thread() {
    let driver = Arc::new(FakeDriver::new(&[("GPU-a", None), ("GPU-b", None)]));
    driver.set_hanging_id(Some("all"));
    let within = Duration::from_millis(200);
    let accelerators = over(&driver, within);
    let ask = || {
        let accelerators = Arc::clone(&accelerators);
        tokio::spawn(async move {
            accelerators.visible_devices(&strings(&["GPU-b"])).await.map_err(|e| e.to_string())
        })
    };
    let hung = Err("cannot list the accelerators: NVML did not answer within 200ms".to_owned());
    let began = Instant::now();
    let asking: Vec<_> = (0..100).map(|_| ask()).collect();
    for answer in asking {
        assert_eq!(answer.await.unwrap(), hung);
    }
    let by = accelerators.listing().deadline;
    assert!(began + within <= by && by <= Instant::now(), "nobody was told before its time");
    // Later callers fail at once; waiting one after the other would take a hundred timeouts.
    for _ in 0..100 {
        assert_eq!(ask().await.unwrap(), hung);
    }
    assert_eq!(accelerators.listing().deadline, by, "it is still the same question");
    assert!(began.elapsed() < within * 50, "{:?}", began.elapsed());
    assert_eq!(driver.max_active_calls.load(Ordering::SeqCst), 1);

    // The late answer to that same query.
    let mut answer = accelerators.listing().result_rx;
    driver.set_hanging_id(None);
    answer.wait_for(Option::is_some).await.unwrap();
    assert_eq!(ask().await.unwrap().unwrap(), "1");
}

#[tokio::test]
async fn what_the_driver_told_is_not_asked_again_and_what_failed_is() {
    let driver = Arc::new(FakeDriver::new(&[("GPU-a", None)]));
    let accelerators = over(&driver, nvml::QUERY_TIMEOUT);
    assert_eq!(accelerators.visible_devices(&strings(&["GPU-a"])).await.unwrap(), "0");
    driver.devices.lock().unwrap().clear();
    assert_eq!(accelerators.visible_devices(&strings(&["GPU-a"])).await.unwrap(), "0");

    // A driver may be present at the next attempt.
    let missing = NodeAccelerators::from_driver(Arc::new(MissingDriver));
    let first = missing.listing();
    first.result_rx.clone().wait_for(Option::is_some).await.unwrap();
    assert!(missing.listing().deadline > first.deadline);
}
