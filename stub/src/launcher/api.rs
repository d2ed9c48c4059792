//! The paths of the REST API, version 2, as the public launcher has them.

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
use rouse::wire::{LEADS, Leads};
use serde_json::{Value, json};
use tokio::task;

use crate::{pages, serve::Gone, token::Token};

use super::{
    Launcher,
    answer::{Problem, Refusal, json_text},
    body,
    fence::demand,
    log, range,
};

/// Where the log begins, when what was asked for is no longer there.
const LOG_START: HeaderName = HeaderName::from_static("x-rouse-log-start");

type Answer = Result<Response, Refusal>;
type Words = Query<BTreeMap<String, String>>;
type Sent = Result<Bytes, BytesRejection>;

/// All paths. Where there are tokens, what says or does something about instances demands one; probes do not have any.
pub(crate) fn router(launcher: Arc<Launcher>, tokens: Arc<[Token]>) -> Router {
    let demands = !tokens.is_empty();
    let mut instances = Router::new()
        .route("/v2/vllm/instances", post(create).get(list).delete(delete_all))
        .route("/v2/vllm/instances/watch", get(watch))
        .route("/v2/vllm/instances/{id}", get(status).put(create_named).delete(delete))
        .route("/v2/vllm/instances/{id}/log", get(read_log))
        .route(LEADS, post(lead))
        .with_state(launcher);
    if demands {
        instances = instances.route_layer(middleware::from_fn_with_state(tokens, demand));
    }
    Router::new()
        .route("/", get(index))
        .route("/health", get(|| async { Json(json!({"status": "OK"})) }))
        .merge(instances)
        .fallback(|| async { detail(StatusCode::NOT_FOUND, "Not Found") })
        .method_not_allowed_fallback(|| async {
            detail(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed")
        })
        .layer(middleware::from_fn(move |request: Request, next: Next| async move {
            match pages::refused(request.headers(), demands) {
                Some(why) => detail(StatusCode::FORBIDDEN, why),
                None => next.run(request).await,
            }
        }))
}

fn detail(status: StatusCode, text: &str) -> Response {
    (status, Json(json!({"detail": text}))).into_response()
}

/// In the order of the public launcher, which a `Value` would not keep.
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

async fn create(State(launcher): State<Arc<Launcher>>, headers: HeaderMap, body: Sent) -> Answer {
    launcher.fence.pass(&headers)?;
    let id = super::random_id().map_err(|error| Refusal::Failed(format!("no id can be had: {error}")))?;
    // The public launcher takes an unknown accelerator for a failure here, and for a conflict below.
    let created = launcher.create(id, &read(body)?, StatusCode::INTERNAL_SERVER_ERROR).await?;
    Ok(json_text(StatusCode::CREATED, created))
}

async fn create_named(
    State(launcher): State<Arc<Launcher>>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Sent,
) -> Answer {
    launcher.fence.pass(&headers)?;
    let created = launcher.create(id, &read(body)?, StatusCode::CONFLICT).await?;
    Ok(json_text(StatusCode::CREATED, created))
}

/// Too long, or cut off.
fn read(body: Sent) -> Result<Bytes, Refusal> {
    body.map_err(|rejection| Refusal::With(rejection.status(), rejection.body_text()))
}

async fn status(State(launcher): State<Arc<Launcher>>, Path(id): Path<String>) -> Answer {
    launcher.registry.status(&id).map(|text| json_text(StatusCode::OK, text))
}

/// A new leader says so before it orders anything: no leader before it is obeyed from here on.
async fn lead(State(launcher): State<Arc<Launcher>>, body: Sent) -> Answer {
    let body = read(body)?;
    let Leads { epoch } = serde_json::from_slice(&body).map_err(|error| {
        let sent = String::from_utf8_lossy(&body).into_owned();
        Problem::new("value_error", &["body"], error.to_string(), sent.into())
    })?;
    launcher.fence.obey(epoch)?;
    Ok(Json(json!({"epoch": epoch})).into_response())
}

async fn list(State(launcher): State<Arc<Launcher>>, Query(words): Words) -> Answer {
    let registry = &launcher.registry;
    let text = if flag(&words, "detail", true)? { registry.list() } else { registry.ids() };
    Ok(json_text(StatusCode::OK, text))
}

/// `?generation=`: an order to start this life of the engine, or one before, that is still under way is not obeyed any more.
async fn delete(
    State(launcher): State<Arc<Launcher>>,
    Path(id): Path<String>,
    headers: HeaderMap,
    Query(words): Words,
) -> Answer {
    launcher.fence.pass(&headers)?;
    if let Some(life) = number(&words, "generation")? {
        launcher.fence.end(&id, life);
    }
    let last = launcher.registry.control(&id)?.stop().await.map_err(Refusal::Failed)?;
    Ok(json_text(StatusCode::OK, last))
}

async fn delete_all(State(launcher): State<Arc<Launcher>>, headers: HeaderMap) -> Answer {
    launcher.fence.pass(&headers)?;
    let stopped = launcher.stop_all().await.map_err(Refusal::Failed)?;
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
) -> Answer {
    let header = headers.get(header::RANGE).map(|value| String::from_utf8_lossy(value.as_bytes()));
    let range = header.map(|header| range::parse(&header)).transpose().map_err(Refusal::Range)?;
    let log = launcher.registry.log(&id)?;
    let part = task::spawn_blocking(move || log.part(range)).await;
    let part = match part.map_err(|error| Refusal::Failed(error.to_string()))? {
        Ok(part) => part,
        Err(log::Error::OutOfRange(out)) => return Ok(out_of_range(out)),
        Err(error) => return Err(Refusal::Failed(error.to_string())),
    };
    let status = if range.is_some() { StatusCode::PARTIAL_CONTENT } else { StatusCode::OK };
    let headers = [
        (header::ACCEPT_RANGES, "bytes".to_owned()),
        (header::CONTENT_RANGE, format!("bytes {}-{}/{}", part.start, part.end, part.total)),
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
    ];
    Ok((status, headers, Body::new(body::log(part))).into_response())
}

fn out_of_range(out: log::OutOfRange) -> Response {
    let headers = [
        (header::CONTENT_RANGE, format!("bytes */{}", out.total)),
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
    ];
    let mut response = (StatusCode::RANGE_NOT_SATISFIABLE, headers).into_response();
    if out.first > 0 {
        response.headers_mut().insert(LOG_START, HeaderValue::from(out.first));
    }
    response
}

async fn watch(
    State(launcher): State<Arc<Launcher>>,
    gone: Option<Extension<Gone>>,
    Query(words): Words,
) -> Answer {
    let updates = flag(&words, "ready", false)?;
    let registry = &launcher.registry;
    let (first, seen) = match number(&words, "since")? {
        None => registry.snapshot(),
        Some(since) => {
            let oldest = registry.oldest();
            let seen = u64::try_from(since).ok().filter(|&since| since >= oldest);
            (Bytes::new(), seen.ok_or(Refusal::TooOld { since, oldest })?)
        }
    };
    let headers = [
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson")),
    ];
    let gone = gone.map(|Extension(gone)| gone);
    let body = body::watch(Arc::clone(registry), first, (seen, updates), gone);
    Ok((headers, Body::new(body)).into_response())
}

fn number<T: FromStr>(words: &BTreeMap<String, String>, name: &str) -> Result<Option<T>, Refusal> {
    let Some(text) = words.get(name) else {
        return Ok(None);
    };
    let msg = "Input should be a valid integer";
    let problem = || Problem::new("int_parsing", &["query", name], msg, Value::from(text.as_str()));
    Ok(Some(text.parse().map_err(|_| problem())?))
}

/// Truth as the public launcher understands it.
fn flag(words: &BTreeMap<String, String>, name: &str, default: bool) -> Result<bool, Refusal> {
    let Some(text) = words.get(name) else {
        return Ok(default);
    };
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" | "t" | "yes" | "y" | "on" => Ok(true),
        "0" | "false" | "f" | "no" | "n" | "off" => Ok(false),
        _ => {
            let msg = "Input should be a valid boolean";
            Err(Problem::new("bool_parsing", &["query", name], msg, Value::from(text.as_str())).into())
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::{
        launcher::{Args, Family},
        page::Section,
    };

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn the_page_tells_of_every_flag() {
        Section::of("launcher", "Launcher").tells_of_every_flag();
    }

    #[tokio::test]
    async fn the_page_tells_of_every_path() {
        let logs = tempfile::tempdir().unwrap();
        let words = ["launcher", "--no-token", "--mock-gpus", "--log-dir", logs.path().to_str().unwrap()];
        let settings = Line::try_parse_from(words).unwrap().args.settings().unwrap();
        let launcher = Arc::new(Launcher::new(settings, Arc::new(Family::new())));
        Section::of("launcher", "Launcher")
            .tells_of_every_path("Paths", router(launcher, Arc::default()))
            .await;
    }
}
