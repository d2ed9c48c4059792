//! Where the relays send requests: told once, by a controller or by a file.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use axum::{
    Json,
    extract::{Query, State},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use nix::sys::inotify::AddWatchFlags;
use rouse::files::{WRITTEN, Watch};
use serde::{Deserialize, Serialize};

use super::{
    admin::{hear, parse, text},
    readiness::may_be_a_pod,
    state::Proxy,
};

/// `GET` and `PUT /v1/proxy/config`.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Config {
    #[serde(default)]
    address: String,
    #[serde(default)]
    port: u16,
}

/// `?retarget=true`
#[derive(Debug, Deserialize)]
pub(super) struct How {
    #[serde(default)]
    retarget: bool,
}

pub(super) async fn get(State(proxy): State<Arc<Proxy>>) -> Response {
    match proxy.keeper.target() {
        Some(target) => {
            Json(Config { address: target.ip().to_string(), port: target.port() }).into_response()
        }
        None => text(StatusCode::NOT_FOUND, "no target was configured yet"),
    }
}

/// Returns when requests go there, and the public proxy port listens.
pub(super) async fn put(
    State(proxy): State<Arc<Proxy>>,
    Query(how): Query<How>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let target = match parse::<Config>(&body).and_then(|config| address(&config)) {
        Ok(target) => target,
        Err(refusal) => return refusal,
    };
    if let Err(refusal) = hear(&proxy, &headers) {
        return refusal;
    }
    match proxy.keeper.target() {
        Some(present) if present == target => {
            return text(StatusCode::OK, format!("requests go to {target}"));
        }
        Some(present) if !(how.retarget && proxy.token.is_some()) => {
            let how = "another one needs ?retarget=true and a stub that demands a token";
            return text(StatusCode::CONFLICT, format!("requests go to {present} already; {how}"));
        }
        _ => {}
    }
    if let Err(error) = proxy.listen().await {
        return text(StatusCode::INTERNAL_SERVER_ERROR, error.to_string());
    }
    // Another leader may have spoken while the port was opened.
    if let Err(refusal) = hear(&proxy, &headers) {
        return refusal;
    }
    // Two that came at once: the first one holds.
    match proxy.keeper.target() {
        Some(present) if present != target && !(how.retarget && proxy.token.is_some()) => {
            text(StatusCode::CONFLICT, format!("requests go to {present} already"))
        }
        _ => {
            proxy.keeper.set_target(target);
            tracing::info!(%target, "requests go there");
            text(StatusCode::OK, format!("requests go to {target}"))
        }
    }
}

/// Has requests go where this file says, as often as it says something else; never returns. It is mounted into the
/// container, so that whoever can write it may retarget. `port`: of an address without one.
pub(super) async fn follow(proxy: Arc<Proxy>, file: PathBuf, port: u16) {
    let watch = Watch::new(vec![file.clone()], WRITTEN | AddWatchFlags::IN_CREATE, Duration::ZERO);
    let mut watch = match watch {
        Ok(watch) => watch,
        Err(error) => return tracing::error!(%error, "--server-ip-file is not followed"),
    };
    loop {
        // What the file says while there is no provider is nothing.
        let said = std::fs::read_to_string(&file).unwrap_or_default();
        match in_file(said.trim(), port) {
            Some(target) => turn_to(&proxy, target).await,
            None if said.trim().is_empty() => {}
            None => tracing::warn!("--server-ip-file holds no address of one machine"),
        }
        watch.changed().await;
    }
}

async fn turn_to(proxy: &Proxy, target: SocketAddr) {
    if proxy.keeper.target() == Some(target) {
        return;
    }
    match proxy.listen().await {
        Ok(_) => {
            proxy.keeper.set_target(target);
            tracing::info!(%target, "requests go there, as --server-ip-file says");
        }
        Err(error) => tracing::error!("{error}"),
    }
}

/// `ADDRESS` or `ADDRESS:PORT`.
fn in_file(said: &str, port: u16) -> Option<SocketAddr> {
    let target = said.parse().ok().or_else(|| Some(SocketAddr::new(said.parse().ok()?, port)))?;
    let target = SocketAddr::new(target.ip().to_canonical(), target.port());
    (may_be_a_pod(target.ip()) && target.port() > 0).then_some(target)
}

/// An address of one machine. Names are refused: what they mean may change, and would be asked of whoever answers then.
fn address(config: &Config) -> Result<SocketAddr, Response> {
    let refused = |why: &str| Err(text(StatusCode::BAD_REQUEST, why));
    if config.address.is_empty() {
        return refused("address is empty");
    }
    if config.port == 0 {
        return refused("port is 0");
    }
    let Ok(ip) = config.address.parse::<IpAddr>() else {
        return refused("address is no IP address: names are not resolved");
    };
    let ip = ip.to_canonical();
    if !may_be_a_pod(ip) {
        return refused("address is not that of one machine that can be a Pod's");
    }
    Ok(SocketAddr::new(ip, config.port))
}
