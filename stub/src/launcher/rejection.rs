//! Error responses in the public launcher's form: `{"detail": …}`.

use axum::{
    Json,
    body::Body,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use serde_json::{Value, json};

/// Why a request is refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum LauncherRejection {
    /// The request is malformed: each problem with its location.
    #[error("the request is invalid: {0:?}")]
    Invalid(Vec<ValidationProblem>),
    #[error("there is no instance {0}")]
    Unknown(String),
    #[error("instance {0} already exists: delete it first, or choose another id")]
    Exists(String),
    /// A missing or unacceptable input, with the status that clients expect.
    #[error("{1}")]
    Status(StatusCode, String),
    #[error("epoch {epoch} is stale: the launcher has accepted epoch {newest} of another leader")]
    Fenced { epoch: u64, newest: u64 },
    #[error("generation {generation} of instance {id} has already ended and cannot start again")]
    Ended { id: String, generation: u64 },
    #[error(
        "revision {since} is no longer kept, the oldest is {oldest}: list the instances, and watch from there"
    )]
    RevisionTooOld { since: i64, oldest: u64 },
    #[error("{0}")]
    Range(super::range::Error),
    #[error("there are already {most} instances, the limit of --max-instances: delete one first")]
    Full { most: usize },
    #[error("the launcher is shutting down and starts no instances")]
    ShuttingDown,
    #[error("the request has no valid bearer token: send 'Authorization: Bearer TOKEN'")]
    NoToken,
    #[error("{0}")]
    Failed(String),
}

/// One validation problem, in the form that clients of the public launcher parse.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct ValidationProblem {
    #[serde(rename = "type")]
    pub(crate) kind: &'static str,
    pub(crate) loc: Vec<Value>,
    pub(crate) msg: String,
    pub(crate) input: Value,
}

impl ValidationProblem {
    pub(crate) fn new(kind: &'static str, loc: &[&str], msg: impl Into<String>, input: Value) -> Self {
        let loc = loc.iter().map(|&place| place.into()).collect();
        Self { kind, loc, msg: msg.into(), input }
    }
}

impl From<ValidationProblem> for LauncherRejection {
    fn from(problem: ValidationProblem) -> Self {
        Self::Invalid(vec![problem])
    }
}

impl LauncherRejection {
    const fn status(&self) -> StatusCode {
        match self {
            Self::Invalid(_) => StatusCode::UNPROCESSABLE_ENTITY,
            Self::Status(status, _) => *status,
            Self::Unknown(_) => StatusCode::NOT_FOUND,
            Self::Exists(_) | Self::Fenced { .. } => StatusCode::CONFLICT,
            Self::RevisionTooOld { .. } | Self::Ended { .. } => StatusCode::GONE,
            Self::Range(_) => StatusCode::BAD_REQUEST,
            Self::ShuttingDown | Self::Full { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Self::NoToken => StatusCode::UNAUTHORIZED,
            Self::Failed(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

impl IntoResponse for LauncherRejection {
    fn into_response(self) -> Response {
        let status = self.status();
        let detail = match self {
            Self::Invalid(problems) => json!(problems),
            other => json!(other.to_string()),
        };
        let mut response = (status, Json(json!({"detail": detail}))).into_response();
        if status == StatusCode::UNAUTHORIZED {
            response
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, header::HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// Builds a response from JSON text.
pub(crate) fn json_text(status: StatusCode, text: impl Into<Body>) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], text.into()).into_response()
}
