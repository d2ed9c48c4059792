//! Who may order: whoever has the token, and no leader that was replaced.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use axum::{
    extract::{Request, State},
    http::HeaderMap,
    middleware::Next,
    response::{IntoResponse, Response},
};
use rouse::wire::{EPOCH, Epoch};

use super::answer::{Problem, Refusal};
use crate::token::Token;

/// The newest epoch that was heard. Orders of an older one are refused; those without one are not asked.
#[derive(Debug, Default)]
pub(crate) struct Fence {
    newest: AtomicU64,
}

impl Fence {
    pub(crate) fn pass(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        let Some(value) = headers.get(EPOCH) else {
            return Ok(());
        };
        let text = String::from_utf8_lossy(value.as_bytes());
        let told: Epoch = text.parse().map_err(|_| {
            let msg = "Input should be a valid integer";
            Problem::new("int_parsing", &["header", EPOCH], msg, text.clone().into())
        })?;
        let newest = self.newest.fetch_max(told, Ordering::SeqCst);
        if told < newest { Err(Refusal::Fenced { told, newest }) } else { Ok(()) }
    }
}

/// Lets pass what shows the token.
pub(crate) async fn demand(State(token): State<Arc<Token>>, request: Request, next: Next) -> Response {
    if token.is_shown(request.headers()) { next.run(request).await } else { Refusal::NoToken.into_response() }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn an_older_epoch_is_refused_and_none_is_not_asked() {
        let fence = Fence::default();
        let pass = |epoch: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(EPOCH, HeaderValue::from_static(epoch));
            fence.pass(&headers)
        };
        assert_eq!(fence.pass(&HeaderMap::new()), Ok(()));
        assert_eq!(pass("3"), Ok(()));
        assert_eq!(pass("3"), Ok(()));
        assert_eq!(pass("2"), Err(Refusal::Fenced { told: 2, newest: 3 }));
        assert_eq!(pass("4"), Ok(()));
        assert_eq!(pass("3"), Err(Refusal::Fenced { told: 3, newest: 4 }));
        assert!(matches!(pass("four"), Err(Refusal::Invalid(_))));
        assert_eq!(fence.pass(&HeaderMap::new()), Ok(()));
    }
}
