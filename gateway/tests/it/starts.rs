//! Starts that fail: the files on disk may belong to another gateway and stay as they are.

use std::{
    collections::BTreeMap,
    fs,
    io::Write as _,
    net::{SocketAddr, TcpStream},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::Duration,
};

use rouse_testing::scripted_engine::scripted;
use tokio::time::Instant;

use crate::support::{GatewayFixture, GatewayProcess, SimModel, pause, read};

/// The inode of a file, its time of change, and its content.
type FileSnapshot = (u64, (i64, i64), Vec<u8>);

/// Returns a snapshot of the folder and of everything in it.
fn all(dir: &Path) -> BTreeMap<PathBuf, FileSnapshot> {
    let about = fs::symlink_metadata(dir).unwrap();
    let content = if about.is_file() { fs::read(dir).unwrap() } else { Vec::new() };
    let here = (dir.to_owned(), (about.ino(), (about.mtime(), about.mtime_nsec()), content));
    let mut found = BTreeMap::from([here]);
    if about.is_dir() {
        for entry in fs::read_dir(dir).unwrap() {
            found.extend(all(&entry.unwrap().path()));
        }
    }
    found
}

/// Creates the folder of a gateway that has ended: its configuration, a journal, and an unreadable state. With `state`,
/// its configuration names that state directory instead.
fn left(gateway: &GatewayProcess, name: &str, state: Option<&Path>) -> PathBuf {
    let dir = gateway.dir.join(name);
    fs::create_dir_all(dir.join("state")).unwrap();
    fs::write(dir.join("state/engines.json"), "{").unwrap();
    fs::write(dir.join("journal"), "what happened\n").unwrap();
    let theirs = format!("state: {:?}\n", gateway.dir.join("state"));
    let ours = format!(
        "logs: {{access: {:?}}}\nstate: {:?}\n",
        dir.join("access.log"),
        state.map_or_else(|| dir.join("state"), Path::to_owned)
    );
    let yaml = read(&gateway.dir.join("rouse.yaml"));
    assert!(yaml.contains(&theirs), "{yaml}");
    fs::write(dir.join("rouse.yaml"), yaml.replace(&theirs, &ours)).unwrap();
    dir
}

fn started(command: &mut Command, api: &str, admin: &str) -> Output {
    command.args(["--api", api, "--admin", admin]).stdin(Stdio::null()).output().unwrap()
}

#[test]
fn a_start_that_fails_for_a_port_or_the_lock_changes_nothing_on_disk() {
    let gateway = GatewayFixture::new(&["2Gi"]).model(&SimModel::new("m")).start();
    assert!(gateway.client().chat("m", true, 4).is_whole_stream());
    let (api, admin) = (gateway.api.to_string(), gateway.admin.to_string());
    let (free, theirs) = ("127.0.0.1:0", gateway.dir.join("state"));
    for (name, state, api, admin, says) in [
        ("api", None, api.as_str(), free, "with --api ADDR or listen.api"),
        ("admin", None, free, admin.as_str(), "with --admin ADDR or listen.admin"),
        ("lock", Some(theirs.as_path()), free, free, "another gateway uses this state directory"),
    ] {
        let dir = left(&gateway, name, state);
        let before = all(&dir);
        let mut command = Command::new(env!("CARGO_BIN_EXE_rouse-gateway"));
        command.arg("--config").arg(dir.join("rouse.yaml")).arg("--journal").arg(dir.join("journal"));
        let failed = started(&mut command, api, admin);
        let said = String::from_utf8_lossy(&failed.stderr);
        assert!(failed.status.code() == Some(1) && said.contains(says), "{name}: {said}");
        assert_eq!(all(&dir), before, "{name}: {said}");
    }
    assert!(gateway.client().chat("m", true, 4).is_whole_stream());
}

/// Starts an API server that knows the key of the stubs and nothing else. With that key a gateway gets as far as its
/// journal, and then waits for its lists.
fn api_server_with_stub_key() -> SocketAddr {
    scripted(|stream, request| drop(answer(stream, &String::from_utf8_lossy(&request))))
}

/// Answers one request.
fn answer(mut stream: TcpStream, request: &str) -> std::io::Result<()> {
    let line = request.lines().next().unwrap_or_default();
    let (status, body) = if line.contains("/secrets/rouse-stub-key") {
        // 32 bytes.
        let key = format!("{}=", "A".repeat(43));
        let secret = serde_json::json!({"apiVersion": "v1", "kind": "Secret",
            "metadata": {"name": "rouse-stub-key", "namespace": "own"}, "data": {"key": key}});
        ("200 OK", secret)
    } else {
        let status = serde_json::json!({"apiVersion": "v1", "kind": "Status", "metadata": {},
            "status": "Failure", "message": "not found", "reason": "NotFound", "code": 404});
        ("404 Not Found", status)
    };
    let body = body.to_string();
    let length = body.len();
    let head = format!("HTTP/1.1 {status}\r\nContent-Type: application/json\r\nConnection: close\r\n");
    stream.write_all(format!("{head}Content-Length: {length}\r\n\r\n{body}").as_bytes())
}

#[test]
fn a_start_in_a_cluster_that_fails_for_a_port_changes_nothing_on_disk() {
    let gateway = GatewayFixture::new(&["2Gi"]).model(&SimModel::new("m")).start();
    let (api, admin, free) = (gateway.api.to_string(), gateway.admin.to_string(), "127.0.0.1:0");
    let kubeconfig = gateway.dir.join("kubeconfig");
    let server = api_server_with_stub_key();
    let text = format!(
        "{{apiVersion: v1, kind: Config, current-context: c, users: [{{name: u, user: {{}}}}], \
         clusters: [{{name: c, cluster: {{server: \"http://{server}\"}}}}], \
         contexts: [{{name: c, context: {{cluster: c, user: u, namespace: own}}}}]}}\n"
    );
    fs::write(&kubeconfig, text).unwrap();
    for (name, api, admin, says) in [
        ("api", api.as_str(), free, "with --api ADDR or listen.api"),
        ("admin", free, admin.as_str(), "with --admin ADDR or listen.admin"),
    ] {
        let dir = gateway.dir.join(name);
        fs::create_dir(&dir).unwrap();
        let text = format!(
            "platform: kubernetes\nkubernetes: {{namespaces: [own], namespace: own, name: gateway-0, stubImage: stub}}\n\
             state: {:?}\nlogs: {{access: {:?}}}\n",
            dir.join("state"),
            dir.join("access.log")
        );
        fs::write(dir.join("rouse.yaml"), text).unwrap();
        fs::write(dir.join("journal"), "what happened\n").unwrap();
        let before = all(&dir);
        let mut command = Command::new(env!("CARGO_BIN_EXE_rouse-gateway"));
        command.arg("--config").arg(dir.join("rouse.yaml")).arg("--journal").arg(dir.join("journal"));
        command.args(["--api", api, "--admin", admin]).env("KUBECONFIG", &kubeconfig);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        // A gateway that took the port for free would wait for its lists, without end.
        let limit = Instant::now() + Duration::from_secs(20);
        while child.try_wait().unwrap().is_none() && Instant::now() < limit {
            pause(Duration::from_millis(20));
        }
        child.kill().unwrap();
        let failed = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&failed.stderr);
        assert_eq!(all(&dir), before, "{name}: {said}");
        assert!(failed.status.code() == Some(1) && said.contains(says), "{name}: {said}");
    }
    assert!(gateway.client().chat("m", true, 4).is_whole_stream());
}

#[test]
fn a_demonstration_that_cannot_listen_leaves_nothing_behind() {
    let gateway = GatewayFixture::new(&["2Gi"]).model(&SimModel::new("m")).start();
    let home = gateway.dir.join("home");
    fs::create_dir(&home).unwrap();
    let before = all(&home);
    let mut command = Command::new(env!("CARGO_BIN_EXE_rouse-gateway"));
    command.arg("demo").env("XDG_STATE_HOME", &home).env_remove("STATE_DIRECTORY");
    let failed = started(&mut command, &gateway.api.to_string(), "127.0.0.1:0");
    let said = String::from_utf8_lossy(&failed.stderr);
    assert!(failed.status.code() == Some(1) && said.contains("address in use by another process"), "{said}");
    assert_eq!(all(&home), before, "{said}");
}
