//! Authorizes orders: requires a token and refuses replaced leaders. Also refuses a start order that arrives after the
//! order to end that generation.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use axum::{
    extract::{Request, State},
    http::{HeaderMap, StatusCode},
    middleware::Next,
    response::{IntoResponse, Response},
};
use rouse_net::stub_api::{EPOCH_HEADER, Epoch};

use super::rejection::{LauncherRejection, ValidationProblem};
use crate::{epoch::check_plausible, token::BearerToken};

/// The newest accepted epoch. Orders with an older epoch are refused; orders without an epoch skip this check.
#[derive(Debug, Default)]
pub(crate) struct LauncherFence {
    newest_epoch: Mutex<Epoch>,
    /// The last generation of each instance that was ordered to end. Only orders that named a generation count.
    last_ended: Mutex<BTreeMap<String, u64>>,
}

impl LauncherFence {
    /// Checks the epoch header of a write.
    pub(crate) fn check_headers(&self, headers: &HeaderMap) -> Result<(), LauncherRejection> {
        let Some(value) = headers.get(EPOCH_HEADER) else {
            return Ok(());
        };
        let text = String::from_utf8_lossy(value.as_bytes());
        let epoch: Epoch = text.parse().map_err(|_| {
            let msg = "Input should be a valid integer";
            ValidationProblem::new("int_parsing", &["header", EPOCH_HEADER], msg, text.clone().into())
        })?;
        self.accept_epoch(epoch)
    }

    /// Accepts an epoch; lower epochs are refused from then on.
    pub(crate) fn accept_epoch(&self, epoch: Epoch) -> Result<(), LauncherRejection> {
        let mut newest = self.newest_epoch.lock().unwrap_or_else(PoisonError::into_inner);
        if epoch < *newest {
            return Err(LauncherRejection::Fenced { epoch, newest: *newest });
        }
        check_plausible(epoch, *newest)
            .map_err(|far| LauncherRejection::Status(StatusCode::BAD_REQUEST, far.to_string()))?;
        *newest = epoch;
        Ok(())
    }

    /// Refuses starts of this and all earlier generations of the instance from then on.
    pub(crate) fn mark_ended(&self, id: &str, generation: u64) {
        let mut last_ended = self.last_ended.lock().unwrap_or_else(PoisonError::into_inner);
        let last = last_ended.entry(id.to_owned()).or_default();
        *last = generation.max(*last);
    }

    /// Checks whether this generation may start. A request without a generation always may.
    pub(crate) fn may_start(&self, id: &str, generation: Option<u64>) -> Result<(), LauncherRejection> {
        let last_ended = self.last_ended.lock().unwrap_or_else(PoisonError::into_inner).get(id).copied();
        match (generation, last_ended) {
            (Some(generation), Some(last_ended)) if generation <= last_ended => {
                Err(LauncherRejection::Ended { id: id.to_owned(), generation })
            }
            _ => Ok(()),
        }
    }
}

/// Passes only requests that present one of the tokens.
pub(crate) async fn require_token(
    State(tokens): State<Arc<[BearerToken]>>,
    request: Request,
    next: Next,
) -> Response {
    if tokens.iter().any(|token| token.is_presented(request.headers())) {
        next.run(request).await
    } else {
        LauncherRejection::NoToken.into_response()
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn what_was_ended_is_not_started_by_an_order_from_before() {
        let fence = LauncherFence::default();
        assert_eq!(fence.may_start("one", Some(7)), Ok(()));
        fence.mark_ended("one", 7);
        fence.mark_ended("one", 5);
        for generation in [5, 7] {
            assert_eq!(
                fence.may_start("one", Some(generation)),
                Err(LauncherRejection::Ended { id: "one".to_owned(), generation })
            );
        }
        assert_eq!(fence.may_start("one", Some(8)), Ok(()), "the next generation");
        assert_eq!(fence.may_start("two", Some(7)), Ok(()));
        assert_eq!(fence.may_start("one", None), Ok(()), "of the public controller");
    }

    #[test]
    fn an_older_epoch_is_refused_and_none_is_not_asked() {
        let fence = LauncherFence::default();
        let pass = |epoch: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(EPOCH_HEADER, HeaderValue::from_static(epoch));
            fence.check_headers(&headers)
        };
        assert_eq!(fence.check_headers(&HeaderMap::new()), Ok(()));
        assert_eq!(pass("3"), Ok(()));
        assert_eq!(pass("3"), Ok(()));
        assert_eq!(pass("2"), Err(LauncherRejection::Fenced { epoch: 2, newest: 3 }));
        assert_eq!(pass("4"), Ok(()));
        assert_eq!(pass("3"), Err(LauncherRejection::Fenced { epoch: 3, newest: 4 }));
        assert!(matches!(pass("four"), Err(LauncherRejection::Invalid(_))));
        assert!(matches!(
            pass("18446744073709551615"),
            Err(LauncherRejection::Status(StatusCode::BAD_REQUEST, _))
        ));
        assert_eq!(pass("4"), Ok(()), "as before");
        assert_eq!(fence.check_headers(&HeaderMap::new()), Ok(()));
    }
}
