use std::path::Path;

use axum::{body::Body, http::Request};
use http_body_util::BodyExt as _;
use tower_service::Service as _;

use super::*;
use crate::accelerator_driver::fake::{FakeDriver, MissingDriver};

const A: &str = "GPU-5a2b8c1e-0000-4000-8000-00000000000a";
const B: &str = "GPU-5a2b8c1e-0000-4000-8000-00000000000b";
const PART: &str = "MIG-9d5c1f70-0000-5000-8000-000000000001";

fn sources(plugin: Option<&str>, runtime: Option<&str>, file: Option<&Path>) -> DiscoverySources {
    DiscoverySources {
        plugin: plugin.map(str::to_owned),
        runtime: runtime.map(str::to_owned),
        file: file.map(Path::to_owned),
    }
}

fn names(found: &DiscoveredAccelerators) -> Vec<&str> {
    found.ids.iter().map(AcceleratorId::as_str).collect()
}

#[test]
fn the_first_source_that_names_any_is_believed() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("accelerators");
    std::fs::write(&file, "gpu-file\n\n").unwrap();
    let driver = FakeDriver::new(&[(A, None), (B, None)]);
    let none = FakeDriver::new(&[]);

    let discover = |plugin, runtime, driver: &dyn AcceleratorDriver| {
        sources(plugin, runtime, Some(&file)).discover(driver)
    };
    let found = discover(Some("x, y,,x"), Some(A), &driver);
    assert_eq!((names(&found), found.source), (vec!["x", "y"], Some(AcceleratorSource::Plugin)));
    let found = discover(Some(" , "), Some(B), &driver);
    assert_eq!((names(&found), found.source), (vec![B], Some(AcceleratorSource::Runtime)));
    let found = discover(None, Some("all"), &driver);
    assert_eq!((names(&found), found.source), (vec![A, B], Some(AcceleratorSource::Driver)));
    let found = discover(None, None, &none);
    assert_eq!((names(&found), found.source), (vec!["gpu-file"], Some(AcceleratorSource::File)));
    let found = discover(None, None, &MissingDriver);
    assert_eq!((names(&found), found.source), (vec!["gpu-file"], Some(AcceleratorSource::File)));
}

#[test]
fn nvidias_variable_is_read_as_nvidias_runtime_reads_it() {
    let driver = FakeDriver::new(&[(A, None), (B, None)]);
    let ids = |text: &str| {
        parse_visible_devices(text, &driver)
            .map(|ids| ids.iter().map(|id| id.as_str().to_owned()).collect::<Vec<_>>())
    };
    assert_eq!(ids(&format!("{B}, {PART},{B}")).unwrap(), [B, PART]);
    assert_eq!(ids("1,0").unwrap(), [B, A]);
    assert_eq!(ids(&format!("0:2,{B}")).unwrap(), [&A.replace("GPU", "MIG-2"), B]);
    for silent in ["", "all", "void", "none", "  none "] {
        assert!(ids(silent).unwrap_err().starts_with("is '"), "{silent}");
    }
    assert_eq!(ids("7").unwrap_err(), "has '7', and there is no accelerator with index 7");
    assert!(ids("/var/run/nvidia-container-devices").unwrap_err().contains("neither a UUID nor a number"));
    assert!(parse_visible_devices("0", &MissingDriver).unwrap_err().contains("no NVIDIA driver found"));
}

#[test]
fn with_void_the_driver_is_asked_and_with_none_it_is_not() {
    let driver = FakeDriver::new(&[(A, None)]);
    assert_eq!(names(&sources(None, Some("void"), None).discover(&driver)), [A]);
    let found = sources(None, Some("none"), None).discover(&driver);
    assert_eq!(names(&found), Vec::<&str>::new());
    let errors: Vec<String> =
        found.failed_sources.iter().map(|(source, why)| format!("{source} {why}")).collect();
    assert_eq!(
        errors,
        [
            "ROUSE_ACCELERATORS is not set",
            "NVIDIA_VISIBLE_DEVICES is 'none'",
            "NVML is not queried: NVIDIA_VISIBLE_DEVICES is 'none'",
            "--accelerators-file is not given",
        ]
    );
}

#[test]
fn a_file_that_cannot_be_used_says_why_among_what_the_others_said() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "[1]").unwrap();
    let found = sources(None, Some("none"), Some(file.path())).discover(&MissingDriver);
    let (source, error) = found.failed_sources.last().unwrap();
    assert_eq!((*source, names(&found)), (AcceleratorSource::File, Vec::<&str>::new()));
    assert!(error.contains("is not an array of names"), "{error}");
}

async fn asked(accelerators: &AcceleratorDiscovery) -> (u16, String) {
    let mut router = routes(accelerators.clone());
    let response = router.call(Request::get(PATH).body(Body::empty()).unwrap()).await.unwrap();
    let status = response.status().as_u16();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

#[tokio::test]
async fn the_answer_is_an_array_and_a_newline_or_that_there_are_none() {
    let discover = |sources| AcceleratorDiscovery::discover(sources, Arc::new(MissingDriver));
    let some = discover(sources(Some("a,b"), None, None));
    assert_eq!(asked(&some).await, (200, "[\"a\",\"b\"]\n".to_owned()));
    let none = discover(sources(None, None, None));
    assert_eq!(asked(&none).await, (500, "no GPUs found\n".to_owned()));
}

#[tokio::test]
async fn a_driver_that_hangs_is_named_and_believed_when_it_comes_back() {
    let driver = Arc::new(FakeDriver::new(&[(A, None)]));
    driver.set_hanging_id(Some("all"));
    let within = Duration::from_millis(50);
    let accelerators = AcceleratorDiscovery::discover_with_timeout(
        sources(None, None, None),
        Arc::clone(&driver) as _,
        within,
    );
    let (status, body) = asked(&accelerators).await;
    assert_eq!(
        (status, body.as_str()),
        (503, "the accelerators are not known yet: NVML did not answer within 50ms\n")
    );
    assert_eq!(accelerators.current(), None);
    driver.set_hanging_id(None);
    accelerators.result_rx.clone().wait_for(Option::is_some).await.unwrap();
    assert_eq!(asked(&accelerators).await.0, 200);
}
