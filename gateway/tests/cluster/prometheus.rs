//! A real Prometheus, from Debian, for one test, and a stub of DCGM's exporter for it.

use std::{
    fs,
    io::Write as _,
    net::SocketAddr,
    path::Path,
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
};

use rouse_cluster::wait::WAIT_TIMEOUT;
use rouse_testing::scripted_engine::scripted;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::{Duration, sleep, timeout};

use crate::{client::TestClient, installation::blocking};

/// Name of the file with discovered addresses.
const DISCOVERED: &str = "discovered.json";

/// A free port of this machine. Prometheus does not report the port of its listener.
fn free() -> SocketAddr {
    ([127, 0, 0, 1], rouse_net::port::claim_for_process().unwrap()).into()
}

fn missing(program: &str, error: &std::io::Error) -> ! {
    panic!("{program}: {error}. It is in Debian's package: apt-get install prometheus")
}

/// A Prometheus process. The drop kills it by its own pid.
pub(crate) struct PrometheusServer {
    child: Child,
    pub(crate) address: SocketAddr,
    dir: TempDir,
}

impl PrometheusServer {
    /// Starts a Prometheus that scrapes these addresses four times a second, each as a job of its own.
    pub(crate) async fn start(jobs: &[(&str, SocketAddr)]) -> Self {
        let job = |(name, address): &(&str, SocketAddr)| {
            format!("  - job_name: {name}\n    static_configs: [{{targets: ['{address}']}}]\n")
        };
        let mut started =
            Self::with_scrapes(tempfile::tempdir().unwrap(), &jobs.iter().map(job).collect::<String>());
        started.is_up(jobs.len()).await;
        started
    }

    /// Starts a Prometheus that scrapes the addresses of [`Self::discover`] four times a second.
    pub(crate) async fn start_discovering() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(DISCOVERED), "[]").unwrap();
        let files = dir.path().join(DISCOVERED);
        let files = format!("file_sd_configs: [{{files: ['{}'], refresh_interval: 1s}}]", files.display());
        let mut started = Self::with_scrapes(dir, &format!("  - job_name: discovered\n    {files}\n"));
        started.is_up(0).await;
        started
    }

    /// Sets the addresses to scrape, with the labels of their series.
    pub(crate) fn discover(&self, targets: &[(SocketAddr, Value)]) {
        let target =
            |(address, labels): &(SocketAddr, Value)| json!({"targets": [address], "labels": labels});
        let all: Vec<Value> = targets.iter().map(target).collect();
        let new = self.dir.path().join("discovered.new");
        fs::write(&new, Value::from(all).to_string()).unwrap();
        fs::rename(new, self.dir.path().join(DISCOVERED)).unwrap();
    }

    fn with_scrapes(dir: TempDir, scrapes: &str) -> Self {
        let text =
            format!("global: {{scrape_interval: 250ms, scrape_timeout: 250ms}}\nscrape_configs:\n{scrapes}");
        let file = dir.path().join("prometheus.yml");
        fs::write(&file, text).unwrap();
        let address = free();
        let child = Command::new("prometheus")
            .arg(format!("--config.file={}", file.display()))
            .arg(format!("--storage.tsdb.path={}", dir.path().join("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .arg("--log.level=warn")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| missing("prometheus", &error));
        Self { child, address, dir }
    }

    /// Returns once Prometheus has scraped every job.
    async fn is_up(&mut self, jobs: usize) {
        let up = async {
            loop {
                assert!(self.child.try_wait().unwrap().is_none(), "prometheus has ended");
                if std::net::TcpStream::connect(self.address).is_ok()
                    && self.query("up == 1").await.len() == jobs
                {
                    return;
                }
                sleep(Duration::from_millis(50)).await;
            }
        };
        timeout(WAIT_TIMEOUT, up).await.expect("not everything is scraped");
    }

    async fn get(&self, path: String) -> Value {
        let client = TestClient::new(self.address);
        let answer = blocking(move || client.get(&path)).await;
        match answer.status {
            200 => answer.json()["data"].clone(),
            // Prometheus listens before it serves.
            503 => Value::Null,
            _ => panic!("{}", answer.text()),
        }
    }

    /// Labels and value of each series that the query selects now.
    pub(crate) async fn query(&self, query: &str) -> Vec<(Value, f64)> {
        let encoded: String = query.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let data = self.get(format!("/api/v1/query?query={encoded}")).await;
        let series = data["result"].as_array().cloned().unwrap_or_default();
        let read = |one: Value| (one["metric"].clone(), one["value"][1].as_str().unwrap().parse().unwrap());
        series.into_iter().map(read).collect()
    }

    /// The only value of this query.
    pub(crate) async fn value(&self, query: &str) -> Option<f64> {
        let found = self.query(query).await;
        assert!(found.len() <= 1, "{query}: {found:?}");
        found.first().map(|(_, value)| *value)
    }

    /// Waits until the query has this value.
    pub(crate) async fn until(&self, query: &str, expected: f64) {
        let there = async {
            while self.value(query).await != Some(expected) {
                sleep(Duration::from_millis(50)).await;
            }
        };
        if timeout(WAIT_TIMEOUT, there).await.is_err() {
            panic!("{query} is {:?} and not {expected}", self.query(query).await);
        }
    }

    /// The names of all series that Prometheus scraped from this job.
    pub(crate) async fn names(&self, job: &str) -> Vec<String> {
        let data = self.get(format!("/api/v1/label/__name__/values?match[]=%7Bjob=%22{job}%22%7D")).await;
        data.as_array().unwrap().iter().map(|name| name.as_str().unwrap().to_owned()).collect()
    }
}

impl Drop for PrometheusServer {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// The complaints of `promtool check metrics`; empty for valid metrics.
pub(crate) fn lint(metrics: &str) -> String {
    let mut tool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| missing("promtool", &error));
    let mut stdin = tool.stdin.take().unwrap();
    stdin.write_all(metrics.as_bytes()).unwrap();
    drop(stdin);
    let said = tool.wait_with_output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let all = text(&said.stdout) + &text(&said.stderr);
    assert_eq!(said.status.success(), all.is_empty(), "{all}");
    all
}

/// Runs this command of promtool on a file, and asserts that it finds nothing wrong.
pub(crate) fn check_file(command: &[&str], file: &Path) {
    let output = Command::new("promtool").args(command).arg(file).output();
    let output = output.unwrap_or_else(|error| missing("promtool", &error));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{command:?}: {}{}", text(&output.stdout), text(&output.stderr));
}

/// Serves DCGM's exporter's format. An accelerator has its UUID, labels as in `a="b",c="d"`, and the MiB in use.
pub(crate) struct DcgmExporterStub {
    pub(crate) address: SocketAddr,
    text: Arc<Mutex<String>>,
}

impl DcgmExporterStub {
    pub(crate) fn start() -> Self {
        let text: Arc<Mutex<String>> = Arc::default();
        let served = Arc::clone(&text);
        let address = scripted(move |mut stream, _| {
            let body = served.lock().unwrap().clone();
            let head = "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nConnection: close";
            // A client that has disconnected gets no answer.
            drop(write!(stream, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len()));
        });
        Self { address, text }
    }

    pub(crate) fn set(&self, accelerators: &[(&str, &str, u64)]) {
        let series = |(uuid, labels, mib): &(&str, &str, u64)| {
            format!(
                "DCGM_FI_DEV_FB_USED{{gpu=\"0\",UUID=\"{uuid}\",device=\"nvidia0\",modelName=\"NVIDIA H200\",{labels}}} {mib}\n"
            )
        };
        let text = format!(
            "# HELP DCGM_FI_DEV_FB_USED Framebuffer memory used (in MiB).\n# TYPE DCGM_FI_DEV_FB_USED gauge\n{}",
            accelerators.iter().map(series).collect::<String>()
        );
        *self.text.lock().unwrap() = text;
    }

    /// Adds a series of an accelerator.
    pub(crate) fn add(&self, metric: &str, uuid: &str, value: u64) {
        let line = format!("# TYPE {metric} gauge\n{metric}{{UUID=\"{uuid}\"}} {value}\n");
        self.text.lock().unwrap().push_str(&line);
    }

    /// Removes all series from now on.
    pub(crate) fn clear(&self) {
        self.text.lock().unwrap().clear();
    }
}
