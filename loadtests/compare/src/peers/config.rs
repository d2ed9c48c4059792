//! The proxies' configurations, kept minimal: keep-alive on both sides, no response buffering, no access log, one
//! worker unless given, and no limit that the load reaches.

use std::{
    ffi::OsString, fmt::Write as _, fs::File, io::Read as _, net::SocketAddr, os::unix::fs::MetadataExt as _,
    path::Path,
};

use super::MODEL;

/// The clients' key and its SHA-256. Not a secret: it only opens a gateway on loopback during a comparison.
pub(crate) const KEY: &str = "rouse-load-0123456789abcdef0123456789abcdef";
const KEY_SHA256: &str = "94d7a237e091491541d1f74ad53fa486a59ae3ecfa8f5f5a26033d35397a0137";
/// Keys of other clients, so that the lookup searches among many.
const OTHER_KEYS: u32 = 1001;

/// Everything in a request's path is enabled: keys, leases, metrics, limits, deadlines. The access log is off, as in
/// its peers.
pub(crate) fn rouse(
    listen: SocketAddr,
    admin: SocketAddr,
    engine: &Path,
    core: usize,
    folder: &Path,
) -> String {
    let state = yaml(&folder.join("state").display().to_string());
    let engine = yaml(&engine.display().to_string());
    let mut text = format!(
        r#"listen: {{api: "{listen}", admin: "{admin}"}}
state: {state}
accelerators: [{{id: load-0, memory: 8Gi}}]
headroom: 0
host: {{sleepMemory: 0}}
logs: {{access: off}}
shutdown: {{grace: 1s, engines: stop}}
limits: {{connectionsPerAddress: 100000, connectionIdle: 1h}}
timeouts: {{stop: 2s}}
models:
  - name: {MODEL}
    pinned: true
    engine:
      kind: custom
      task: none
      command: [taskset, -c, "{core}", {engine}, --fast, --host, "${{HOST}}", --port, "${{PORT}}", --model, {MODEL}]
    memory: {{awake: 1Gi, asleep: 0, host: 0}}
keys:
  - {{name: load, sha256: "{KEY_SHA256}"}}
"#
    );
    for number in 0..OTHER_KEYS {
        writeln!(text, "  - {{name: other-{number}, sha256: \"{number:064x}\"}}").ok();
    }
    text
}

/// One relay port, and a Pod's other stub ports at any free number. `engine` is the file with the engine's address.
pub(crate) fn stub(listen: SocketAddr, engine: &Path, workers: usize) -> Vec<OsString> {
    let (host, port) = (listen.ip().to_string(), listen.port().to_string());
    let workers = workers.to_string();
    let mut args = vec!["proxy", "--host", &host, "--relay-port", &port, "--relay-threads", &workers];
    for other in
        ["--probes-port", "--spi-port", "--proxy-port", "--admin-port", "--metrics-port", "--debug-port"]
    {
        args.extend([other, "0"]);
    }
    args.extend(["--model", MODEL, "--server-ip-file"]);
    args.into_iter().map(OsString::from).chain([engine.into()]).collect()
}

/// Bodies up to a megabyte stay in memory, because a temporary file would be an unfair comparison.
pub(crate) fn nginx(listen: SocketAddr, engine: SocketAddr, workers: usize, folder: &Path) -> String {
    // When started by root, its workers would run as a user that cannot enter the folder.
    let root = folder.metadata().is_ok_and(|folder| folder.uid() == 0);
    let user = if root { "user root root;\n" } else { "" };
    let folder = folder.display();
    format!(
        r#"{user}daemon off;
worker_processes {workers};
worker_rlimit_nofile 19000;
pid "{folder}/nginx.pid";
error_log stderr error;
events {{ worker_connections 19000; }}
http {{
    access_log off;
    client_body_temp_path "{folder}/body";
    proxy_temp_path "{folder}/proxy";
    fastcgi_temp_path "{folder}/fastcgi";
    uwsgi_temp_path "{folder}/uwsgi";
    scgi_temp_path "{folder}/scgi";
    client_max_body_size 1g;
    client_body_buffer_size 1m;
    keepalive_requests 1000000000;
    keepalive_timeout 1h;
    upstream engine {{
        server {engine};
        keepalive 8192;
        keepalive_requests 1000000000;
        keepalive_timeout 1h;
    }}
    server {{
        listen {listen} backlog=16384;
        location / {{
            proxy_pass http://engine;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 1h;
        }}
    }}
}}
"#
    )
}

pub(crate) fn haproxy(listen: SocketAddr, engine: SocketAddr, workers: usize) -> String {
    format!(
        "global
    nbthread {workers}
    maxconn 9000
defaults
    mode http
    timeout connect 5s
    timeout client 1h
    timeout server 1h
    timeout http-request 1h
    timeout http-keep-alive 1h
    option http-no-delay
    option http-buffer-request
    http-reuse always
frontend clients
    bind {listen} backlog 16384
    default_backend engines
backend engines
    server engine {engine}
"
    )
}

/// The makers' settings except for the ports. `quiet` logs only errors.
pub(crate) fn smg<'a>(port: &'a str, engine: &'a str, metrics: &'a str, quiet: bool) -> Vec<&'a str> {
    let mut args = vec!["-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", port];
    args.extend(["--worker-urls", engine, "--policy", "round_robin", "--max-concurrent-requests", "-1"]);
    args.extend(["--prometheus-host", "127.0.0.1", "--prometheus-port", metrics]);
    if quiet {
        args.extend(["--log-level", "error"]);
    }
    args
}

pub(crate) fn envoy(listen: SocketAddr, engine: SocketAddr) -> String {
    let address = |address: SocketAddr| {
        format!("{{socket_address: {{address: {}, port_value: {}}}}}", address.ip(), address.port())
    };
    format!(
        r#"static_resources:
  listeners:
    - address: {listen}
      tcp_backlog_size: 16384
      filter_chains:
        - filters:
            - name: envoy.filters.network.http_connection_manager
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
                stat_prefix: load
                generate_request_id: false
                route_config:
                  virtual_hosts:
                    - name: all
                      domains: ["*"]
                      routes: [{{match: {{prefix: /}}, route: {{cluster: engine, timeout: 0s, idle_timeout: 0s}}}}]
                http_filters:
                  - name: envoy.filters.http.router
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
  clusters:
    - name: engine
      type: STATIC
      connect_timeout: 5s
      circuit_breakers:
        thresholds: [{{max_connections: 100000, max_pending_requests: 100000, max_requests: 100000}}]
      load_assignment:
        cluster_name: engine
        endpoints: [{{lb_endpoints: [{{endpoint: {{address: {engine}}}}}]}}]
"#,
        listen = address(listen),
        engine = address(engine),
    )
}

pub(crate) fn litellm(engine: SocketAddr) -> String {
    format!(
        "model_list:
  - model_name: {MODEL}
    litellm_params: {{model: openai/{MODEL}, api_base: \"http://{engine}/v1\", api_key: none}}
litellm_settings: {{telemetry: false, num_retries: 0}}
"
    )
}

/// LiteLLM refuses to start with a guessable key.
pub(crate) fn random_key() -> anyhow::Result<String> {
    let mut bytes = [0; 32];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    let mut key = "sk-".to_owned();
    for byte in bytes {
        write!(key, "{byte:02x}").ok();
    }
    Ok(key)
}

/// Quotes a text for YAML, which accepts JSON strings.
fn yaml(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
