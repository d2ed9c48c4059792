//! Checks that the generated code is what the `.proto` files give, and writes it anew on request.

use std::path::Path;

/// Set to write the generated code instead of comparing it.
const WRITE: &str = "ROUSE_GENERATE";

#[test]
fn the_generated_code_is_that_of_the_proto_files() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().unwrap();
    for name in ["device_plugin", "pod_resources", "container_runtime"] {
        let files = protox::compile([format!("{name}.proto")], [root.join("proto")]).unwrap();
        tonic_prost_build::configure()
            .build_server(name != "container_runtime" || cfg!(test))
            .out_dir(folder.path())
            .compile_fds(files)
            .unwrap();
    }
    for package in ["v1beta1", "v1", "runtime.v1"] {
        let file = format!("{package}.rs");
        let made = std::fs::read_to_string(folder.path().join(&file)).unwrap();
        let kept = root.join("src/generated").join(&file);
        if std::env::var_os(WRITE).is_some() {
            std::fs::write(&kept, made).unwrap();
        } else {
            let kept = std::fs::read_to_string(&kept).unwrap_or_default();
            assert!(
                made == kept,
                "{file} is not up to date: run `{WRITE}=1 cargo test -p rouse-kubelet --test generated`"
            );
        }
    }
}
