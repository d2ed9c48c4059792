use std::sync::atomic::Ordering;

use super::*;
use crate::driver::fake::{Fake, Missing};

fn strings(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

fn over(driver: &Arc<Fake>, within: Duration) -> Arc<Accelerators> {
    Arc::new(Accelerators { within, ..Accelerators::of(Arc::clone(driver) as _) })
}

#[tokio::test]
async fn instance_uuid_to_index_translation() {
    let known = Accelerators::mock(4);
    assert_eq!(known.visible(&strings(&["GPU-3", "GPU-0"])).await.unwrap(), "3,0");
}

#[tokio::test]
async fn what_is_not_here_is_named_with_what_is() {
    let error = Accelerators::mock(2).visible(&strings(&["GPU-1", "GPU-7"])).await.unwrap_err();
    assert_eq!(error.to_string(), "accelerator GPU-7 is not on this node: it has GPU-0, GPU-1");
    let none = "accelerator GPU-7 is not on this node: it has none";
    for empty in [Accelerators::mock(0), Accelerators::of(Arc::new(Missing))] {
        assert_eq!(empty.visible(&strings(&["GPU-7"])).await.unwrap_err().to_string(), none);
    }
}

#[tokio::test]
async fn a_part_is_shown_by_its_uuid() {
    let listed = |id: &str, index| Listed { id: id.into(), index };
    let known = Accelerators::known(vec![listed("MIG-a0", None), listed("GPU-b", Some(1))]);
    assert_eq!(known.visible(&strings(&["GPU-b", "MIG-a0"])).await.unwrap(), "1,MIG-a0");
}

/// As many as they may be, they wait for the one question and no longer than it may take; and it is the only one.
#[tokio::test]
async fn a_driver_that_hangs_costs_all_who_ask_one_deadline_and_one_thread() {
    let driver = Arc::new(Fake::new(&[("GPU-a", None), ("GPU-b", None)]));
    driver.hang_at(Some("all"));
    let within = Duration::from_millis(200);
    let accelerators = over(&driver, within);
    let ask = || {
        let accelerators = Arc::clone(&accelerators);
        tokio::spawn(
            async move { accelerators.visible(&strings(&["GPU-b"])).await.map_err(|e| e.to_string()) },
        )
    };
    let hung = Err("the accelerators cannot be listed: NVML has not answered within 200ms".to_owned());
    let began = Instant::now();
    let asking: Vec<_> = (0..100).map(|_| ask()).collect();
    for answer in asking {
        assert_eq!(answer.await.unwrap(), hung);
    }
    let by = accelerators.question().by;
    assert!(began + within <= by && by <= Instant::now(), "nobody was told before its time");
    // Who comes later is told at once; one after the other, they all would have waited a hundred times as long.
    for _ in 0..100 {
        assert_eq!(ask().await.unwrap(), hung);
    }
    assert_eq!(accelerators.question().by, by, "it is still the same question");
    assert!(began.elapsed() < within * 50, "{:?}", began.elapsed());
    assert_eq!(driver.most_inside.load(Ordering::SeqCst), 1);

    // The answer to that same question, when it comes after all.
    let mut answer = accelerators.question().answer;
    driver.hang_at(None);
    answer.wait_for(Option::is_some).await.unwrap();
    assert_eq!(ask().await.unwrap().unwrap(), "1");
}

#[tokio::test]
async fn what_the_driver_told_is_not_asked_again_and_what_failed_is() {
    let told = Arc::new(Fake::new(&[("GPU-a", None)]));
    let accelerators = over(&told, nvml::DEADLINE);
    assert_eq!(accelerators.visible(&strings(&["GPU-a"])).await.unwrap(), "0");
    told.devices.lock().unwrap().clear();
    assert_eq!(accelerators.visible(&strings(&["GPU-a"])).await.unwrap(), "0");

    // A driver may be there the next time.
    let missing = Accelerators::of(Arc::new(Missing));
    let first = missing.question();
    first.answer.clone().wait_for(Option::is_some).await.unwrap();
    assert!(missing.question().by > first.by);
}
