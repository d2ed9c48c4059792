//! The description of this API for machines.
//!
//! It is kept by hand, beside the code, as one file: what it must say (words, examples, which refusals an operation has)
//! cannot be derived from types, and a generator would put its attributes on the core's. Tests hold it to the code:
//! every route is in it and the reverse, and answers are checked against its schemas, here and by `make test-admin`.

use axum::response::{IntoResponse, Response};
use http::header;

pub(super) const PATH: &str = "/admin/v1/openapi.json";

const DOCUMENT: &str = include_str!("openapi.json");

pub(super) async fn document() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], DOCUMENT).into_response()
}

#[cfg(test)]
mod tests;
