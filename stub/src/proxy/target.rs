//! The relays' target, set by a controller or by a file.

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
use rouse_net::file_watch::{FileWatcher, WRITTEN_FLAGS};
use serde::{Deserialize, Serialize};

use super::{
    admin::{accept_epoch_header, parse_body, text_response},
    readiness::is_possible_pod_ip,
    state::Proxy,
};

/// Body of `GET` and `PUT /v1/proxy/config`.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct TargetConfig {
    #[serde(default)]
    address: String,
    #[serde(default)]
    port: u16,
}

/// The query `?retarget=true`.
#[derive(Debug, Deserialize)]
pub(super) struct RetargetQuery {
    #[serde(default)]
    retarget: bool,
}

pub(super) async fn get(State(proxy): State<Arc<Proxy>>) -> Response {
    match proxy.gate.target() {
        Some(target) => {
            Json(TargetConfig { address: target.ip().to_string(), port: target.port() }).into_response()
        }
        None => text_response(StatusCode::NOT_FOUND, "no target was configured yet"),
    }
}

/// Sets the target. Returns once requests go there and the public proxy port listens.
pub(super) async fn put(
    State(proxy): State<Arc<Proxy>>,
    Query(how): Query<RetargetQuery>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let target = match parse_body::<TargetConfig>(&body).and_then(|config| address(&config)) {
        Ok(target) => target,
        Err(refusal) => return refusal,
    };
    if let Err(refusal) = accept_epoch_header(&proxy, &headers) {
        return refusal;
    }
    match proxy.gate.target() {
        Some(present) if present == target => {
            return text_response(StatusCode::OK, format!("requests go to {target}"));
        }
        Some(present) if !(how.retarget && proxy.token.is_some()) => {
            let how = "another target needs ?retarget=true and a stub that requires a token";
            return text_response(StatusCode::CONFLICT, format!("requests already go to {present}; {how}"));
        }
        _ => {}
    }
    if let Err(error) = proxy.listen_proxy_port().await {
        return text_response(StatusCode::INTERNAL_SERVER_ERROR, error.to_string());
    }
    // Another leader may have sent an order while the port was being opened.
    if let Err(refusal) = accept_epoch_header(&proxy, &headers) {
        return refusal;
    }
    // Of two concurrent calls the first wins.
    match proxy.gate.target() {
        Some(present) if present != target && !(how.retarget && proxy.token.is_some()) => {
            text_response(StatusCode::CONFLICT, format!("requests already go to {present}"))
        }
        _ => {
            proxy.gate.set_target(target);
            tracing::info!(%target, "target set");
            text_response(StatusCode::OK, format!("requests go to {target}"))
        }
    }
}

/// Follows the target in this file forever. The file is mounted into the container, so its writers may retarget. `port`
/// applies to an address without a port.
pub(super) async fn follow_file(proxy: Arc<Proxy>, file: PathBuf, port: u16) {
    let watch =
        FileWatcher::new(vec![file.clone()], WRITTEN_FLAGS | AddWatchFlags::IN_CREATE, Duration::ZERO);
    let mut watch = match watch {
        Ok(watch) => watch,
        Err(error) => return tracing::error!(%error, "cannot watch --server-ip-file"),
    };
    loop {
        // The file is empty while there is no provider.
        let content = std::fs::read_to_string(&file).unwrap_or_default();
        match parse_target(content.trim(), port) {
            Some(target) => retarget(&proxy, target).await,
            None if content.trim().is_empty() => {}
            None => tracing::warn!("--server-ip-file holds no unicast address that a Pod can have"),
        }
        watch.changed().await;
    }
}

async fn retarget(proxy: &Proxy, target: SocketAddr) {
    if proxy.gate.target() == Some(target) {
        return;
    }
    match proxy.listen_proxy_port().await {
        Ok(_) => {
            proxy.gate.set_target(target);
            tracing::info!(%target, "target set from --server-ip-file");
        }
        Err(error) => tracing::error!("{error}"),
    }
}

/// Parses `ADDRESS` or `ADDRESS:PORT`.
fn parse_target(text: &str, port: u16) -> Option<SocketAddr> {
    let target = text.parse().ok().or_else(|| Some(SocketAddr::new(text.parse().ok()?, port)))?;
    let target = SocketAddr::new(target.ip().to_canonical(), target.port());
    (is_possible_pod_ip(target.ip()) && target.port() > 0).then_some(target)
}

/// Parses a possible Pod address. Names are refused, because a name may resolve to another machine later.
fn address(config: &TargetConfig) -> Result<SocketAddr, Response> {
    let refused = |reason: &str| Err(text_response(StatusCode::BAD_REQUEST, reason));
    if config.address.is_empty() {
        return refused("address is empty");
    }
    if config.port == 0 {
        return refused("port is 0");
    }
    let Ok(ip) = config.address.parse::<IpAddr>() else {
        return refused("address must be an IP address: names are not resolved");
    };
    let ip = ip.to_canonical();
    if !is_possible_pod_ip(ip) {
        return refused("address must be a unicast address that a Pod can have");
    }
    Ok(SocketAddr::new(ip, config.port))
}
