//! The routes of the public launcher's REST API, version 2.

use std::{collections::BTreeMap, str::FromStr, sync::Arc};

use axum::{
    Extension, Json, Router,
    body::{Body, Bytes},
    extract::{Path, Query, Request, State, rejection::BytesRejection},
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use rouse_net::stub_api::{EPOCH_PATH, EpochAnnouncement};
use serde_json::{Value, json};
use tokio::task;

use crate::{browser_guard, serve::PeerDisconnect, token::BearerToken};

use super::{
    Launcher, body,
    fence::require_token,
    log, range,
    rejection::{LauncherRejection, ValidationProblem, json_text},
};

/// Offset at which the log begins, sent when the requested range was trimmed.
const LOG_START_HEADER: HeaderName = HeaderName::from_static("x-rouse-log-start");

type LauncherResponse = Result<Response, LauncherRejection>;
type QueryParams = Query<BTreeMap<String, String>>;
type ReadBodyResult = Result<Bytes, BytesRejection>;

/// Builds the router. With tokens, all routes about instances and the epoch require a token. Probes send no token, so
/// `/` and `/health` never require one.
pub(crate) fn router(launcher: Arc<Launcher>, tokens: Arc<[BearerToken]>) -> Router {
    let demands = !tokens.is_empty();
    let mut instances = Router::new()
        .route("/v2/vllm/instances", post(create).get(list).delete(delete_all))
        .route("/v2/vllm/instances/watch", get(watch))
        .route("/v2/vllm/instances/{id}", get(status).put(create_named).delete(delete))
        .route("/v2/vllm/instances/{id}/log", get(read_log))
        .route(EPOCH_PATH, post(announce_epoch))
        .with_state(launcher);
    if demands {
        instances = instances.route_layer(middleware::from_fn_with_state(tokens, require_token));
    }
    Router::new()
        .route("/", get(index))
        .route("/health", get(|| async { Json(json!({"status": "OK"})) }))
        .merge(instances)
        .fallback(|| async { detail_response(StatusCode::NOT_FOUND, "Not Found") })
        .method_not_allowed_fallback(|| async {
            detail_response(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed")
        })
        .layer(middleware::from_fn(move |request: Request, next: Next| async move {
            match browser_guard::refusal_reason(request.headers(), demands) {
                Some(reason) => detail_response(StatusCode::FORBIDDEN, reason),
                None => next.run(request).await,
            }
        }))
}

fn detail_response(status: StatusCode, text: &str) -> Response {
    (status, Json(json!({"detail": text}))).into_response()
}

/// Keeps the public launcher's key order, which a `Value` would lose.
async fn index() -> Response {
    const INDEX: &str = concat!(
        r#"{"name":"Multi-Instance vLLM Management API","version":"2.0","endpoints":{"index":"GET /","#,
        r#""health":"GET /health","create_instance":"POST /v2/vllm/instances","#,
        r#""create_named_instance":"PUT /v2/vllm/instances/{instance_id}","#,
        r#""delete_instance":"DELETE /v2/vllm/instances/{instance_id}","#,
        r#""delete_all_instances":"DELETE /v2/vllm/instances","#,
        r#""get_instance_status":"GET /v2/vllm/instances/{instance_id}","#,
        r#""get_all_instances":"GET /v2/vllm/instances","#,
        r#""get_instance_logs":"GET /v2/vllm/instances/{instance_id}/log","#,
        r#""watch_instances":"GET /v2/vllm/instances/watch"}}"#,
    );
    json_text(StatusCode::OK, INDEX)
}

async fn create(
    State(launcher): State<Arc<Launcher>>,
    headers: HeaderMap,
    body: ReadBodyResult,
) -> LauncherResponse {
    launcher.fence.check_headers(&headers)?;
    let id = super::random_id()
        .map_err(|error| LauncherRejection::Failed(format!("cannot generate an instance id: {error}")))?;
    // For an unknown accelerator the public launcher returns 500 here and 409 in `create_named`.
    let created = launcher.create(id, &read_body(body)?, StatusCode::INTERNAL_SERVER_ERROR).await?;
    Ok(json_text(StatusCode::CREATED, created))
}

async fn create_named(
    State(launcher): State<Arc<Launcher>>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: ReadBodyResult,
) -> LauncherResponse {
    launcher.fence.check_headers(&headers)?;
    let created = launcher.create(id, &read_body(body)?, StatusCode::CONFLICT).await?;
    Ok(json_text(StatusCode::CREATED, created))
}

/// Rejects a body that is too long or cut off.
fn read_body(body: ReadBodyResult) -> Result<Bytes, LauncherRejection> {
    body.map_err(|rejection| LauncherRejection::Status(rejection.status(), rejection.body_text()))
}

async fn status(State(launcher): State<Arc<Launcher>>, Path(id): Path<String>) -> LauncherResponse {
    launcher.registry.status(&id).map(|text| json_text(StatusCode::OK, text))
}

/// Records the epoch that a new leader announces before its first order. Lower epochs are refused from then on.
async fn announce_epoch(State(launcher): State<Arc<Launcher>>, body: ReadBodyResult) -> LauncherResponse {
    let body = read_body(body)?;
    let EpochAnnouncement { epoch } = serde_json::from_slice(&body).map_err(|error| {
        let sent = String::from_utf8_lossy(&body).into_owned();
        ValidationProblem::new("value_error", &["body"], error.to_string(), sent.into())
    })?;
    launcher.fence.accept_epoch(epoch)?;
    Ok(Json(json!({"epoch": epoch})).into_response())
}

async fn list(State(launcher): State<Arc<Launcher>>, Query(words): QueryParams) -> LauncherResponse {
    let registry = &launcher.registry;
    let text = if parse_flag(&words, "detail", true)? { registry.list() } else { registry.ids() };
    Ok(json_text(StatusCode::OK, text))
}

/// Deletes an instance. `?generation=` also refuses start orders of this or an earlier generation that are still in
/// flight.
async fn delete(
    State(launcher): State<Arc<Launcher>>,
    Path(id): Path<String>,
    headers: HeaderMap,
    Query(query): QueryParams,
) -> LauncherResponse {
    launcher.fence.check_headers(&headers)?;
    if let Some(generation) = parse_number(&query, "generation")? {
        launcher.fence.mark_ended(&id, generation);
    }
    let last = launcher.registry.stop_handle(&id)?.stop().await.map_err(LauncherRejection::Failed)?;
    Ok(json_text(StatusCode::OK, last))
}

async fn delete_all(State(launcher): State<Arc<Launcher>>, headers: HeaderMap) -> LauncherResponse {
    launcher.fence.check_headers(&headers)?;
    let stopped = launcher.stop_all().await.map_err(LauncherRejection::Failed)?;
    let text = format!(
        r#"{{"status":"all_stopped","stopped_instances":[{}],"total_stopped":{}}}"#,
        stopped.join(","),
        stopped.len()
    );
    Ok(json_text(StatusCode::OK, text))
}

async fn read_log(
    State(launcher): State<Arc<Launcher>>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> LauncherResponse {
    let header = headers.get(header::RANGE).map(|value| String::from_utf8_lossy(value.as_bytes()));
    let range = header.map(|header| range::parse(&header)).transpose().map_err(LauncherRejection::Range)?;
    let log = launcher.registry.log(&id)?;
    let part = task::spawn_blocking(move || log.part(range)).await;
    let part = match part.map_err(|error| LauncherRejection::Failed(error.to_string()))? {
        Ok(part) => part,
        Err(log::Error::OutOfRange(out)) => return Ok(out_of_range(out)),
        Err(error) => return Err(LauncherRejection::Failed(error.to_string())),
    };
    let status = if range.is_some() { StatusCode::PARTIAL_CONTENT } else { StatusCode::OK };
    let headers = [
        (header::ACCEPT_RANGES, "bytes".to_owned()),
        (header::CONTENT_RANGE, format!("bytes {}-{}/{}", part.start, part.end, part.total)),
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
    ];
    Ok((status, headers, Body::new(body::log_body(part))).into_response())
}

fn out_of_range(out: log::LogOutOfRange) -> Response {
    let headers = [
        (header::CONTENT_RANGE, format!("bytes */{}", out.total)),
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
    ];
    let mut response = (StatusCode::RANGE_NOT_SATISFIABLE, headers).into_response();
    if out.first > 0 {
        response.headers_mut().insert(LOG_START_HEADER, HeaderValue::from(out.first));
    }
    response
}

async fn watch(
    State(launcher): State<Arc<Launcher>>,
    disconnect: Option<Extension<PeerDisconnect>>,
    Query(query): QueryParams,
) -> LauncherResponse {
    let updates = parse_flag(&query, "ready", false)?;
    let registry = &launcher.registry;
    let (first, last_seen) = match parse_number(&query, "since")? {
        None => registry.snapshot(),
        Some(since) => {
            let oldest = registry.last_dropped();
            let last_seen = u64::try_from(since).ok().filter(|&since| since >= oldest);
            (Bytes::new(), last_seen.ok_or(LauncherRejection::RevisionTooOld { since, oldest })?)
        }
    };
    let headers = [
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson")),
    ];
    let disconnect = disconnect.map(|Extension(disconnect)| disconnect);
    let body = body::watch_body(Arc::clone(registry), first, (last_seen, updates), disconnect);
    Ok((headers, Body::new(body)).into_response())
}

fn parse_number<T: FromStr>(
    query: &BTreeMap<String, String>,
    name: &str,
) -> Result<Option<T>, LauncherRejection> {
    let Some(text) = query.get(name) else {
        return Ok(None);
    };
    let msg = "Input should be a valid integer";
    let problem = || ValidationProblem::new("int_parsing", &["query", name], msg, Value::from(text.as_str()));
    Ok(Some(text.parse().map_err(|_| problem())?))
}

/// Parses a boolean like the public launcher.
fn parse_flag(
    query: &BTreeMap<String, String>,
    name: &str,
    default: bool,
) -> Result<bool, LauncherRejection> {
    let Some(text) = query.get(name) else {
        return Ok(default);
    };
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" | "t" | "yes" | "y" | "on" => Ok(true),
        "0" | "false" | "f" | "no" | "n" | "off" => Ok(false),
        _ => {
            let msg = "Input should be a valid boolean";
            Err(ValidationProblem::new("bool_parsing", &["query", name], msg, Value::from(text.as_str()))
                .into())
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::{
        docs_check::StubDocsSection,
        launcher::{ChildProcesses, LauncherArgs},
    };

    #[derive(clap::Parser)]
    struct LauncherCommandLine {
        #[command(flatten)]
        args: LauncherArgs,
    }

    #[test]
    fn the_page_tells_of_every_flag() {
        StubDocsSection::load("launcher", "Launcher").assert_flags_documented();
    }

    #[tokio::test]
    async fn the_page_tells_of_every_path() {
        let logs = tempfile::tempdir().unwrap();
        let words = ["launcher", "--no-token", "--mock-gpus", "--log-dir", logs.path().to_str().unwrap()];
        let settings = LauncherCommandLine::try_parse_from(words).unwrap().args.settings().unwrap();
        let launcher = Arc::new(Launcher::new(settings, Arc::new(ChildProcesses::new())));
        StubDocsSection::load("launcher", "Launcher")
            .assert_paths_documented("Paths", router(launcher, Arc::default()))
            .await;
    }
}
