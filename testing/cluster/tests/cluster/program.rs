//! A program for Pods: this test binary, filtered to run only [`program`].
//!
//! It serves HTTP at `POD_IP:8080`. `/ready` and `/alive` answer 200 until a request such as `/ready/503` sets another
//! status.

use std::{
    collections::BTreeMap,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
};

use rouse_cluster::podrunner::PodImage;
use rouse_testing::raw_client::TestClient;
use serde_json::{Value, json};

const RUNS: &str = "ROUSE_CLUSTER_PROGRAM";
const PORT: u16 = 8080;

/// The program behind the image `rouse/server`.
pub(crate) fn image() -> PodImage {
    PodImage::new(std::env::current_exe().unwrap()).known_as("/server")
}

/// A container named `main` with that image.
pub(crate) fn container() -> Value {
    json!({
        "name": "main",
        "image": "rouse/server",
        "command": ["/server"],
        "args": ["program::program", "--exact", "--nocapture"],
        "env": [{ "name": RUNS, "value": "yes" }],
        "ports": [{ "name": "http", "containerPort": PORT }],
    })
}

#[test]
fn program() {
    if std::env::var_os(RUNS).is_none() {
        return;
    }
    let ip: std::net::IpAddr = std::env::var("POD_IP").unwrap().parse().unwrap();
    let listener = TcpListener::bind((ip, PORT)).unwrap();
    let mut statuses = BTreeMap::new();
    for stream in listener.incoming() {
        answer(stream.unwrap(), &mut statuses);
    }
}

fn answer(mut stream: TcpStream, statuses: &mut BTreeMap<String, String>) {
    let mut room = [0; 4096];
    let n = stream.read(&mut room).unwrap_or(0);
    let head = String::from_utf8_lossy(&room[..n]).into_owned();
    let mut path = head.split(' ').nth(1).unwrap_or_default().trim_start_matches('/').split('/');
    let name = path.next().unwrap_or_default().to_owned();
    let status = match path.next() {
        Some(told) => {
            statuses.insert(name, told.to_owned());
            "200"
        }
        None => statuses.get(&name).map_or("200", String::as_str),
    };
    // The client may have disconnected.
    write!(stream, "HTTP/1.1 {status} x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").ok();
}

/// Sets the status that the program at this address answers for a path from now on.
pub(crate) fn tell(ip: &str, path: &str) {
    let answer = TestClient::new(SocketAddr::new(ip.parse().unwrap(), PORT)).get(path);
    assert_eq!(answer.status, 200, "{}", answer.text());
}
