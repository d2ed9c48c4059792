//! `GET /v1/dual-pods/accelerators` and `/v1/dual-pods/accelerator-memory-usage`.

use crate::support::StubBuilder;

const LIST: &str = "/v1/dual-pods/accelerators";
const MEMORY: &str = "/v1/dual-pods/accelerator-memory-usage";

fn missing() -> StubBuilder {
    // This invalid file hides any real library of this machine.
    let setting = StubBuilder::new();
    let empty = setting.dir().join("libnvidia-ml.so.1");
    std::fs::write(&empty, "no library").unwrap();
    let dir = setting.dir().to_owned();
    setting.env("LD_LIBRARY_PATH", dir)
}

#[test]
fn without_any_both_are_500_and_the_log_says_who_was_asked() {
    let stub = missing().start();
    for path in [LIST, MEMORY] {
        let answer = stub.get("spi", path);
        assert_eq!((answer.status, &*answer.text()), (500, "no GPUs found\n"));
    }
    let line = stub.until_logged(&["no GPUs found"]);
    for expected in [
        "ROUSE_ACCELERATORS is not set; NVIDIA_VISIBLE_DEVICES is not set; NVML no NVIDIA driver found (",
        "; --accelerators-file is not given",
    ] {
        assert!(line.contains(expected), "{line}");
    }
}

#[test]
fn each_source_is_asked_in_its_turn() {
    let file = |setting: StubBuilder, text: &str| {
        let file = setting.dir().join("list");
        std::fs::write(&file, text).unwrap();
        setting.flag(format!("--accelerators-file={}", file.display()))
    };
    let list = |setting: StubBuilder| {
        let stub = setting.start();
        let [admin, spi] = ["admin", "spi"].map(|port| {
            let answer = stub.get(port, LIST);
            assert_eq!(answer.header("content-type"), "application/json");
            (answer.status, answer.text())
        });
        assert_eq!(admin, spi);
        admin
    };
    let plugin =
        file(missing(), "f").env("ROUSE_ACCELERATORS", "a, b").env("NVIDIA_VISIBLE_DEVICES", "GPU-n");
    assert_eq!(list(plugin), (200, "[\"a\",\"b\"]\n".to_owned()));
    let runtime = file(missing(), "f").env("NVIDIA_VISIBLE_DEVICES", "GPU-n,MIG-m");
    assert_eq!(list(runtime), (200, "[\"GPU-n\",\"MIG-m\"]\n".to_owned()));
    for silent in ["all", "none", "void", "0"] {
        let lines = file(missing(), "f\ng\n").env("NVIDIA_VISIBLE_DEVICES", silent);
        assert_eq!(list(lines), (200, "[\"f\",\"g\"]\n".to_owned()), "{silent}");
    }
    assert_eq!(list(file(missing(), "[\"f\", \"g\"]")), (200, "[\"f\",\"g\"]\n".to_owned()));
}

#[test]
fn the_driver_tells_its_accelerators_and_the_parts_of_those_that_are_cut() {
    let lines = ["GPU-a - 100", "GPU-b - 0", "MIG-b0 GPU-b 20", "MIG-b1 GPU-b 30", "GPU-c - 7"];
    let (setting, _fake) = StubBuilder::new().nvml(&lines);
    let stub = setting.start();
    assert_eq!(stub.get("spi", LIST).text(), "[\"GPU-a\",\"MIG-b0\",\"MIG-b1\",\"GPU-c\"]\n");
    let usage = stub.get("spi", MEMORY);
    assert_eq!(
        (usage.status, &*usage.text()),
        (200, "{\"GPU-a\":100,\"GPU-c\":7,\"MIG-b0\":20,\"MIG-b1\":30}\n")
    );
    assert_eq!(usage.header("content-type"), "application/json");

    let (setting, _fake) = StubBuilder::new().nvml(&lines);
    let stub = setting.env("NVIDIA_VISIBLE_DEVICES", "2,1:1").start();
    assert_eq!(stub.get("spi", LIST).text(), "[\"GPU-c\",\"MIG-b1\"]\n");
}

#[test]
fn memory_is_as_it_is_now_and_an_accelerator_that_fails_is_named() {
    let (setting, fake) = StubBuilder::new().nvml(&["GPU-a - 100", "GPU-b - 200"]);
    let stub = setting.start();
    assert_eq!(stub.get("spi", MEMORY).text(), "{\"GPU-a\":100,\"GPU-b\":200}\n");
    fake.set_accelerators(&["GPU-a - 101", "GPU-b - lost"]);
    let answer = stub.get("spi", MEMORY);
    assert_eq!((answer.status, &*answer.text()), (500, "GPU-b: accelerator GPU-b is lost\n"));
    // The accelerators were read once, at the start.
    fake.set_accelerators(&["GPU-a - 102"]);
    assert_eq!(stub.get("spi", LIST).text(), "[\"GPU-a\",\"GPU-b\"]\n");
    fake.set_accelerators(&["GPU-a - 102", "GPU-b - 3"]);
    assert_eq!(stub.get("spi", MEMORY).text(), "{\"GPU-a\":102,\"GPU-b\":3}\n");
}

#[test]
fn memory_without_a_driver_is_500_with_the_cause() {
    let stub = missing().env("ROUSE_ACCELERATORS", "GPU-a,GPU-b").start();
    let answer = stub.get("spi", MEMORY);
    assert_eq!(answer.status, 500);
    let text = answer.text();
    let lines: Vec<&str> = text.lines().collect();
    let [a, b] = lines[..] else { panic!("{lines:?}") };
    assert!(
        a.starts_with("GPU-a: no NVIDIA driver found (") && b.starts_with("GPU-b: no NVIDIA driver found (")
    );
}

#[test]
fn other_methods_are_405_and_told_what_is_allowed() {
    let stub = missing().start();
    for path in [LIST, MEMORY] {
        let answer = stub.post(path, "");
        assert_eq!((answer.status, answer.header("allow")), (405, "GET,HEAD"), "{path}");
    }
}
