//! Accelerators listed by a driver or a file, and a driver that does not answer.

use std::{io::Write as _, thread};

use rouse_net::nvml::QUERY_TIMEOUT;
use serde_json::json;
use tokio::time::Instant;

use crate::{
    nvml::FakeNvmlLibrary,
    support::{LauncherProcess, start, start_with_env},
};

/// Returns the environment that an engine with these accelerators sees. The instance is named after the first.
fn seen(launcher: &LauncherProcess, uuids: &[&str]) -> String {
    let id = uuids[0];
    let script = "'echo \"sees $CUDA_VISIBLE_DEVICES\"; exec sleep 100'";
    let answer = launcher.put(id, &json!({"options": script, "gpu_uuids": uuids}));
    assert_eq!(answer.status, 201, "{}", answer.text());
    let said = launcher.until_logged(id, "\n");
    let sees = said.trim_end().strip_prefix("sees ").unwrap().to_owned();
    assert_eq!(answer.json()["env_vars"]["CUDA_VISIBLE_DEVICES"], *sees);
    sees
}

/// A whole accelerator's index is the driver's own, in which a partitioned accelerator has an index too.
#[test]
fn a_part_goes_by_its_uuid_and_a_whole_one_by_the_drivers_number() {
    let lines = ["GPU-a - 0", "GPU-b - 0", "MIG-b0 GPU-b 0", "MIG-b1 GPU-b 0", "GPU-c - 0"];
    let fake = FakeNvmlLibrary::new(&lines);
    let launcher = start_with_env(&fake.environment(), &["--command", "sh -c"]);
    assert_eq!(seen(&launcher, &["MIG-b1"]), "MIG-b1");
    assert_eq!(seen(&launcher, &["GPU-c", "GPU-a"]), "2,0");
    // The partitioned accelerator cannot be used as a whole.
    let cut = launcher.put("x", &json!({"options": "", "gpu_uuids": ["GPU-b"]}));
    assert_eq!(cut.status, 422);
    let why = "accelerator GPU-b is not on this node: the node has GPU-a, GPU-c, MIG-b0, MIG-b1";
    assert_eq!(cut.json()["detail"], why);
}

#[test]
fn a_file_may_name_parts() {
    for (text, whole) in [
        (r#"{"GPU-a": 0, "GPU-b": 1, "MIG-b0": 1, "GPU-c": 2}"#, "2"),
        ("GPU-a\nGPU-b\nMIG-b0\nMIG-b1\nGPU-c\n", "2"),
        (r#"["GPU-a", "MIG-b0", "GPU-c"]"#, "1"),
    ] {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        let launcher = start(&["--command", "sh -c", "--accelerators-file", file.path().to_str().unwrap()]);
        assert_eq!(seen(&launcher, &["MIG-b0"]), "MIG-b0", "{text}");
        assert_eq!(seen(&launcher, &["GPU-c"]), whole, "{text}");
    }
}

#[test]
fn a_driver_that_hangs_costs_all_who_wait_one_deadline_and_others_nothing() {
    let fake = FakeNvmlLibrary::new(&["GPU-a - hang"]);
    let launcher = start_with_env(&fake.environment(), &["--command", "sh -c"]);
    let body = json!({"options": "'exec sleep 100'", "gpu_uuids": ["GPU-a"]});
    let asked = Instant::now();
    let mut served = 0;
    thread::scope(|scope| {
        let waiting: Vec<_> = (0..6)
            .map(|n| {
                scope.spawn({
                    let (launcher, body) = (&launcher, &body);
                    move || launcher.put(&format!("w{n}"), body)
                })
            })
            .collect();
        while !waiting.iter().any(|call| call.is_finished()) {
            let id = format!("other-{served}");
            launcher.run(&id, "exec sleep 100");
            assert_eq!(launcher.get("/v2/vllm/instances?detail=false").json()["count"], 1);
            assert_eq!(launcher.delete(&format!("/v2/vllm/instances/{id}")).status, 200);
            served += 1;
        }
        for call in waiting {
            let answer = call.join().unwrap();
            assert_eq!(answer.status, 500);
            let why = "cannot list the accelerators: NVML did not answer within 5s";
            assert_eq!(answer.json()["detail"], why);
        }
    });
    let took = asked.elapsed();
    println!("six callers were answered after {took:?}; {served} engines started and stopped meanwhile");
    assert!(served > 3, "{served}");
    // In sequence they would have waited six times as long.
    assert!(took < QUERY_TIMEOUT * 2, "{took:?}");
    let late = Instant::now();
    assert_eq!(launcher.put("late", &body).status, 500);
    assert!(late.elapsed() < QUERY_TIMEOUT / 2, "it waited for a driver that is known to hang");
    fake.set_accelerators(&["GPU-a - 0"]);
    crate::support::until("the driver's answer counts", || launcher.put("a", &body).status == 201);
    assert_eq!(launcher.instance("a")["env_vars"]["CUDA_VISIBLE_DEVICES"], "0");
}
