//! The debug port, on loopback: `GET /debug/state` dumps the process's state, and `GET /debug/heap` its memory.
//!
//! The allocator is the C library's, and its statistics need unsafe code. So the dump shows the kernel's view: the
//! resident size, and the part that only this process has written (heap and stacks), which distinguishes a leak from a
//! large file in the cache.

use std::{collections::BTreeMap, io, sync::Arc};

use axum::{
    Json, Router,
    extract::Request,
    http::StatusCode,
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::get,
};
use serde::Serialize;
use serde_json::Value;
use tokio::task;

use crate::browser_guard;

/// Dumps the current state.
pub(crate) type StateDumpFn = Arc<dyn Fn() -> Value + Send + Sync>;

/// Memory of this process in bytes, under the kernel's names.
#[derive(Debug, Serialize)]
struct HeapUsage {
    /// Sizes and their peaks from `/proc/self/status`.
    status: BTreeMap<String, u64>,
    threads: u64,
    /// Sums over all mappings from `/proc/self/smaps_rollup`. Empty on a kernel without that file.
    rollup: BTreeMap<String, u64>,
    /// The brk mapping from `/proc/self/smaps`, where small allocations start.
    brk: BTreeMap<String, u64>,
}

/// Serves `/debug/state` and `/debug/heap`.
pub(crate) fn routes(state: StateDumpFn) -> Router {
    let dump = move || std::future::ready(Json(state()));
    Router::new()
        .route("/debug/state", get(dump))
        .route("/debug/heap", get(heap))
        .layer(middleware::from_fn(refuse_browsers))
}

/// Refuses web pages: any page in a user's browser can reach loopback.
async fn refuse_browsers(request: Request, next: Next) -> Response {
    match browser_guard::refusal_reason(request.headers(), false) {
        Some(reason) => (StatusCode::FORBIDDEN, format!("{reason}\n")).into_response(),
        None => next.run(request).await,
    }
}

async fn heap() -> Response {
    // The kernel walks all pages to make `smaps`.
    match task::spawn_blocking(HeapUsage::read).await {
        Ok(Ok(heap)) => Json(heap).into_response(),
        Ok(Err(error)) => proc_read_error(&error),
        Err(error) => proc_read_error(&error),
    }
}

fn proc_read_error(error: &dyn std::error::Error) -> Response {
    (StatusCode::INTERNAL_SERVER_ERROR, format!("/proc/self cannot be read: {error}\n")).into_response()
}

impl HeapUsage {
    fn read() -> io::Result<Self> {
        let status = std::fs::read_to_string("/proc/self/status")?;
        let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
        let brk = maps.split_once("[heap]\n").map_or("", |(_, after)| after);
        let threads = status.lines().find_map(|line| line.strip_prefix("Threads:")?.trim().parse().ok());
        Ok(Self {
            threads: threads.unwrap_or_default(),
            status: parse_sizes(status.lines()),
            rollup: parse_sizes(rollup.lines()),
            // The flags end a mapping's entry.
            brk: parse_sizes(brk.lines().take_while(|line| !line.starts_with("VmFlags"))),
        })
    }
}

/// Parses lines like `VmRSS:      5120 kB`.
fn parse_sizes<'a>(lines: impl Iterator<Item = &'a str>) -> BTreeMap<String, u64> {
    let size = |line: &'a str| {
        let (name, rest) = line.split_once(':')?;
        let kib: u64 = rest.trim().strip_suffix(" kB")?.trim().parse().ok()?;
        Some((name.to_owned(), kib << 10))
    };
    lines.filter_map(size).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_heap_is_shown_in_bytes() {
        let heap = HeapUsage::read().unwrap();
        assert!(heap.threads >= 1);
        let resident = heap.status["VmRSS"];
        assert!((1 << 20..1 << 32).contains(&resident), "{resident}");
        assert!(heap.status["VmHWM"] >= heap.status["RssAnon"]);
        assert!(heap.rollup["Private_Dirty"] > 0);
        assert!(heap.brk["Rss"] > 0 && heap.brk["Rss"] < heap.rollup["Rss"]);
    }
}
