use std::{fs, os::unix::fs::PermissionsExt as _};

use super::*;

/// Writes an executable script.
fn script(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

fn package(root: &Path, file: &str, content: &str) {
    let path = root.join("lib/python3.12/site-packages").join(file);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}

const LLAMA_SERVER: &str = r#"#!/bin/sh
case "$1" in
--version) echo "version: 4589 (eb7cf15a)" >&2 ;;
--help) printf '%s\n' "-m,    --model FNAME   the model" "--port PORT   port to listen (default: 8080)" \
  "-ngl,  --gpu-layers, --n-gpu-layers N" "--list-devices  print list" ;;
--list-devices) printf '%s\n' "load_backend: loaded" "Available devices:" "  CUDA0: NVIDIA L4 (22491 MiB, 22180 MiB free)" ;;
esac
"#;

#[tokio::test]
async fn a_llama_server_is_asked_for_its_version_flags_and_accelerators() {
    let root = tempfile::tempdir().unwrap();
    script(&root.path().join("llama-server"), LLAMA_SERVER);
    let found = look(ServerProgram::LlamaServer, root.path()).await.unwrap();
    assert_eq!(found.title(), "llama-server 4589 (eb7cf15a)");
    assert!(found.takes("-m") && found.takes("--n-gpu-layers") && found.takes("--port"));
    assert!(!found.takes("--mmproj"), "its help does not name that");
    assert_eq!(found.devices, ["CUDA0: NVIDIA L4 (22491 MiB, 22180 MiB free)"]);
    assert_eq!(found.uses_accelerators, Some(true));
}

#[tokio::test]
async fn a_program_that_says_nothing_useful_is_found_with_nothing_known() {
    let root = tempfile::tempdir().unwrap();
    script(&root.path().join("llama-server"), "#!/bin/sh\nexit 1\n");
    let found = look(ServerProgram::LlamaServer, root.path()).await.unwrap();
    assert_eq!((found.version.as_deref(), &found.flags), (None, &KnownFlags::Unknown));
    assert!(found.takes("--anything"), "what is unknown is not held against it");
    fs::set_permissions(root.path().join("llama-server"), fs::Permissions::from_mode(0o644)).unwrap();
    assert!(look(ServerProgram::LlamaServer, root.path()).await.is_none(), "it cannot be executed");
}

#[tokio::test]
async fn engines_in_python_are_found_in_their_environment_without_starting_it() {
    let root = tempfile::tempdir().unwrap();
    let bin = root.path().join("bin");
    // Whoever starts one of these makes the test fail.
    for name in ["python3", "vllm"] {
        script(&bin.join(name), "#!/bin/sh\ntouch \"$0.started\"\n");
    }
    package(root.path(), "vllm/engine/arg_utils.py", "'--enable-sleep-mode'");
    package(root.path(), "vllm-0.11.0.dist-info/METADATA", "");
    package(root.path(), "sglang/srt/server_args.py", "enable_memory_saver: bool = False");
    package(root.path(), "sglang-0.5.3.dist-info/METADATA", "");
    package(root.path(), "llama_cpp/server/settings.py", "interrupt_requests: bool");
    let found = ProgramFolders(vec![root.path().join("absent"), bin.clone()]).programs().await;
    let titles: Vec<_> = found.iter().map(FoundProgram::title).collect();
    assert_eq!(titles, ["vLLM 0.11.0", "SGLang 0.5.3", "llama-cpp-python"]);
    assert!(found[0].takes(VLLM_SLEEP_FLAG));
    assert!(found[1].takes(SGLANG_SLEEP_FLAG) && !found[1].takes(SGLANG_BACKUP_FLAG));
    assert_eq!(found[2].uses_accelerators, Some(false), "no library for one is beside it");
    assert_eq!(found[2].command[1..], ["-m", "llama_cpp.server"]);
    assert!(!bin.join("vllm.started").exists() && !bin.join("python3.started").exists());
}

#[test]
fn a_script_names_the_interpreter_of_packages_without_one() {
    let root = tempfile::tempdir().unwrap();
    let (bin, python) = (root.path().join("bin"), root.path().join("elsewhere/python3"));
    script(&python, "#!/bin/sh\n");
    script(&bin.join("sglang"), &format!("#!{}\nimport sglang\n", python.display()));
    assert_eq!(python_of(&bin, "sglang"), Some(python));
    assert_eq!(python_of(&bin, "absent"), None);
}

#[test]
fn folders_are_looked_at_once_in_the_order_of_the_path() {
    let home = Path::new("/home/u");
    let active = [PathBuf::from("/env/bin")].into_iter();
    let folders = ProgramFolders::new(OsStr::new("/b:/usr/bin:relative:/b"), active, Some(home)).0;
    assert_eq!(folders[..3], ["/b", "/usr/bin", "/env/bin"].map(PathBuf::from));
    assert_eq!(folders.iter().filter(|folder| **folder == Path::new("/usr/bin")).count(), 1);
    assert!(folders.contains(&home.join("llama.cpp/build/bin")));
}
