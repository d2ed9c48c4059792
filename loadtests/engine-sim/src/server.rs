//! Serves connections and routes.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use bytes::Bytes;
use serde_json::{Value, json};
use tokio::{net::TcpStream, select};

use crate::{
    api::SimApi,
    clock, content,
    engine::SimEngine,
    faults::SimFault,
    generate,
    http1::{SimConnection, SimConnectionError, SimRequestHead},
    lifecycle::{LifecycleCommand, LifecycleResult},
    metrics,
    reply::{ResponseEncoding, SimReply},
};

/// Serves a connection until it ends.
pub(crate) async fn serve(engine: Arc<SimEngine>, io: TcpStream) {
    // asyncio does both. Otherwise the kernel would determine the timing of small events.
    io.set_nodelay(true).ok();
    let mut conn = SimConnection::new(io, Arc::clone(&engine.counters));
    let mut served = false;
    loop {
        let keep_alive = Some(engine.args.keep_alive).filter(|idle| !idle.is_zero());
        let idle = engine.faults.time(SimFault::StaleKeepalive).or(keep_alive).filter(|_| served);
        let served_one = match conn.head(idle).await {
            Ok(head) => serve_one(&engine, &mut conn, &head).await,
            Err(broken) => Err(broken),
        };
        served = true;
        match served_one {
            Ok(true) => {}
            Ok(false) => break,
            Err(broken) => {
                answer_malformed(&engine, &mut conn, &broken).await;
                break;
            }
        }
    }
}

async fn answer_malformed(engine: &SimEngine, conn: &mut SimConnection, broken: &SimConnectionError) {
    if let SimConnectionError::Malformed(reason) = broken {
        engine.counters.malformed.fetch_add(1, Relaxed);
        let length = reason.len();
        let text = format!(
            "HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{reason}"
        );
        // The connection closes either way.
        conn.send(text.as_bytes()).await.ok();
    }
}

/// Serves one request. Returns whether another may follow.
async fn serve_one(
    engine: &SimEngine,
    conn: &mut SimConnection,
    head: &SimRequestHead,
) -> Result<bool, SimConnectionError> {
    if head.path.starts_with("/sim/") {
        conn.counts_bytes = false;
        let wire = ResponseEncoding::without_faults(head);
        let body = conn.body(head).await?;
        handle_sim_route(engine, head, &body).send(conn, &wire).await?;
        return Ok(wire.keeps_alive());
    }
    conn.counts_bytes = true;
    // A gateway or a stub reads the metrics whenever it wants the load. What clients cause is counted without that.
    let counts = head.path != "/metrics";
    if counts {
        engine.counters.bytes_in.fetch_add(head.bytes as u64, Relaxed);
    }
    let mut wire = ResponseEncoding::with_faults(head, &engine.faults);
    if engine.faults.is_on(SimFault::EarlyResponse)
        && head.has_body()
        && SimApi::from_path(&head.path).is_some()
    {
        wire.close();
        let reply = SimReply::error(400, "BadRequestError", "answered before the body was read", None);
        reply.send(conn, &wire).await?;
        return Ok(false);
    }
    let body = conn.body(head).await?;
    if counts {
        engine.counters.bytes_in.fetch_add(body.len() as u64, Relaxed);
    }
    select! {
        broken = conn.client_left() => return Err(broken),
        () = engine.faults.wait_until_cleared(&[SimFault::Hang]) => {}
    }
    answer(engine, conn, head, &body, &wire).await?;
    Ok(wire.keeps_alive())
}

async fn answer(
    engine: &SimEngine,
    conn: &mut SimConnection,
    head: &SimRequestHead,
    body: &Bytes,
    wire: &ResponseEncoding,
) -> Result<(), SimConnectionError> {
    if !engine.view().ready {
        return SimReply::empty(503).send(conn, wire).await;
    }
    let (method, path) = (head.method.as_str(), head.path.as_str());
    if let ("POST", Some(api)) = (method, SimApi::from_path(path)) {
        return generate::infer(engine, conn, (head, body), wire, api).await;
    }
    if let Some(reply) = handle_dev_route(engine, head, body).await {
        let (reply, fatal) = reply;
        let sent = reply.send(conn, wire).await;
        if fatal {
            engine.fatal.exit(1);
        }
        return sent;
    }
    let reply = match (method, path) {
        ("GET", "/health") if engine.faults.is_on(SimFault::NoHealth) => SimReply::detail(404, "Not Found"),
        ("GET", "/metrics") if engine.faults.is_on(SimFault::NoMetrics) => SimReply::detail(404, "Not Found"),
        ("GET", "/health") => {
            engine.counters.record_first_ready();
            SimReply::empty(200)
        }
        ("GET" | "POST", "/ping") => SimReply::empty(200),
        ("GET", "/version") => SimReply::json(200, &json!({"version": "0.11.2"})),
        ("GET", "/v1/models") => SimReply::json(200, &models(engine)),
        ("GET", "/metrics") => {
            SimReply::text("text/plain; version=0.0.4; charset=utf-8", metrics::text(engine))
        }
        ("POST", "/tokenize" | "/detokenize") => {
            generate::record_arrival(engine, head, body);
            if path == "/tokenize" { tokenize(engine, body) } else { detokenize(body) }
        }
        (_, "/health" | "/version" | "/v1/models" | "/metrics" | "/tokenize" | "/detokenize") => {
            SimReply::detail(405, "Method Not Allowed")
        }
        _ if SimApi::from_path(path).is_some() => SimReply::detail(405, "Method Not Allowed"),
        _ => SimReply::detail(404, "Not Found"),
    };
    reply.send(conn, wire).await
}

/// Serves vLLM's development routes; `None` if they are off or the route is another.
async fn handle_dev_route(
    engine: &SimEngine,
    head: &SimRequestHead,
    body: &Bytes,
) -> Option<(SimReply, bool)> {
    if !engine.args.enable_sleep_mode {
        return None;
    }
    let order = match (head.method.as_str(), head.path.as_str()) {
        ("GET", "/is_sleeping") => {
            return Some((SimReply::json(200, &json!({"is_sleeping": engine.view().sleeping})), false));
        }
        ("POST", "/sleep") => {
            let level = head.query("level").next().unwrap_or("1");
            let Some(level) = level.parse().ok().filter(|level| matches!(level, 1 | 2)) else {
                return Some((SimReply::detail(400, "level must be 1 or 2"), false));
            };
            LifecycleCommand::Sleep { level, wait: head.query("mode").next() == Some("wait") }
        }
        ("POST", "/wake_up") => {
            let tags: Vec<&str> = head.query("tags").collect();
            let named = |tag| tags.is_empty() || tags.contains(&tag);
            LifecycleCommand::Wake { weights: named("weights"), cache: named("kv_cache") }
        }
        ("POST", "/reset_prefix_cache") => LifecycleCommand::ResetPrefixCache,
        ("POST", "/collective_rpc") => {
            let call: Value = serde_json::from_slice(body).unwrap_or_default();
            match call.get("method").and_then(Value::as_str) {
                Some("reload_weights") => {
                    return Some(outcome(
                        engine.execute(LifecycleCommand::ReloadWeights).await,
                        json!({"results": [null]}),
                    ));
                }
                Some(_) => return Some((SimReply::json(200, &json!({"results": [null]})), false)),
                None => return Some((SimReply::detail(400, "Missing 'method' in request body"), false)),
            }
        }
        _ => return None,
    };
    Some(outcome(engine.execute(order).await, Value::Null))
}

fn outcome(outcome: LifecycleResult, done: Value) -> (SimReply, bool) {
    match outcome {
        Ok(()) if done.is_null() => (SimReply::empty(200), false),
        Ok(()) => (SimReply::json(200, &done), false),
        Err(refusal) => {
            crate::log::error(&refusal.message);
            (SimReply::error(500, "InternalServerError", &refusal.message, None), refusal.fatal)
        }
    }
}

/// Serves the routes that vLLM does not have.
fn handle_sim_route(engine: &SimEngine, head: &SimRequestHead, body: &Bytes) -> SimReply {
    match (head.method.as_str(), head.path.as_str()) {
        ("GET", "/sim/counters") => {
            let mut counters = engine.counters.json();
            counters["kv_cache_bytes"] = engine.view().cache_bytes.into();
            counters["now_unix_us"] = clock::wall_us().into();
            SimReply::json(200, &counters)
        }
        ("POST", "/sim/faults") => match serde_json::from_slice::<Value>(body) {
            Ok(Value::Object(changes)) => match engine.faults.apply(&changes) {
                Ok(()) => SimReply::json(200, &json!({})),
                Err(error) => SimReply::detail(400, &error.to_string()),
            },
            _ => SimReply::detail(400, "send {\"name\": value | null}"),
        },
        _ => SimReply::detail(404, "Not Found"),
    }
}

fn models(engine: &SimEngine) -> Value {
    let names = engine.names();
    let created = clock::wall_us() / 1_000_000;
    let model = |name: &String| {
        json!({
            "id": name, "object": "model", "created": created, "owned_by": "vllm", "root": names.first(),
            "parent": null, "max_model_len": 32768, "permission": [],
        })
    };
    json!({"object": "list", "data": names.iter().map(model).collect::<Vec<_>>()})
}

fn tokenize(engine: &SimEngine, body: &Bytes) -> SimReply {
    let ask: Value = serde_json::from_slice(body).unwrap_or_default();
    let message = |m: &Value| m["content"].as_str().unwrap_or_default().to_owned();
    let text = match (ask["prompt"].as_str(), ask["messages"].as_array()) {
        (Some(prompt), _) => prompt.to_owned(),
        (None, Some(messages)) => messages.iter().map(message).collect(),
        (None, None) => return SimReply::error(400, "BadRequestError", "the request has no prompt", None),
    };
    let requested_model = ask["model"].as_str();
    if requested_model.is_some_and(|asked| !engine.names().iter().any(|name| name == asked)) {
        return SimReply::error(404, "NotFoundError", "The model does not exist.", Some("model"));
    }
    let tokens = content::encode(&text);
    SimReply::json(
        200,
        &json!({"count": tokens.len(), "max_model_len": 32768, "tokens": tokens, "token_strs": null}),
    )
}

fn detokenize(body: &Bytes) -> SimReply {
    let ask: Value = serde_json::from_slice(body).unwrap_or_default();
    let Ok(tokens) = serde_json::from_value::<Vec<u32>>(ask["tokens"].clone()) else {
        return SimReply::error(400, "BadRequestError", "the request has no tokens", None);
    };
    SimReply::json(200, &json!({"prompt": content::decode(&tokens)}))
}
