//! The OpenAPI document of the admin API.
//!
//! The document is one file, kept by hand beside the code. Types cannot provide its words, examples and refusals per
//! operation, and a generator would put its attributes on the types of the core. Tests compare the document with the
//! code: the routes match in both directions, and responses are checked against the schemas, here and by `make
//! test-admin`.

use axum::response::{IntoResponse, Response};
use http::header;

pub(super) const PATH: &str = "/admin/v1/openapi.json";

const DOCUMENT: &str = include_str!("openapi.json");

pub(super) async fn document() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], DOCUMENT).into_response()
}

#[cfg(test)]
pub(super) mod tests;
