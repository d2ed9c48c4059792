//! Why a call has no response.

use std::sync::Arc;

use rouse::fault::FailureCause;

/// Why no response arrived.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HttpClientError {
    /// The text omits the system's reason: it goes into statuses, which must not change from attempt to attempt.
    #[error("connection failed")]
    Unreachable(Arc<str>),
    #[error("TLS failed: {0}")]
    Tls(Arc<str>),
    #[error("timed out")]
    Timeout,
    #[error("the connection broke")]
    Broken,
    #[error("the answer is not HTTP/1.1: check what listens at the address")]
    Malformed,
    /// The limit in bytes.
    #[error("the answer is larger than the limit of {0} bytes: check what listens at the address")]
    BodyTooLarge(usize),
    /// The limit in bytes.
    #[error("a line of the answer is longer than the limit of {0} bytes: check what listens at the address")]
    LineTooLong(usize),
    #[error("the request cannot be sent: {0}")]
    InvalidRequest(&'static str),
}

impl HttpClientError {
    #[must_use]
    pub const fn cause(&self) -> FailureCause {
        match self {
            Self::Timeout => FailureCause::Timeout,
            Self::Unreachable(_)
            | Self::Tls(_)
            | Self::Broken
            | Self::Malformed
            | Self::BodyTooLarge(_)
            | Self::LineTooLong(_)
            | Self::InvalidRequest(_) => FailureCause::Unreachable,
        }
    }
}
