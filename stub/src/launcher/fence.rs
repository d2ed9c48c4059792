//! Who may order: whoever has the token, and no leader that was replaced.

use std::{
    fs, io,
    path::PathBuf,
    sync::atomic::{AtomicU64, Ordering},
};

use axum::{
    extract::{Request, State},
    http::{HeaderMap, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use rouse::wire::{EPOCH, Epoch};
use std::sync::Arc;

use super::answer::{Problem, Refusal};

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

/// The token that callers must bring, as a file holds it: read for each call, so that a new one counts at once.
#[derive(Clone, Debug)]
pub(crate) struct Token(Arc<PathBuf>);

impl Token {
    /// # Errors
    /// The file cannot be read, or is empty.
    pub(crate) fn in_file(path: PathBuf) -> io::Result<Self> {
        let token = Self(Arc::new(path));
        token.read().map(|_| token)
    }

    fn read(&self) -> io::Result<String> {
        let text = fs::read_to_string(&*self.0)?;
        let token = text.trim();
        if token.is_empty() {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it holds no token"));
        }
        Ok(token.to_owned())
    }
}

/// Lets pass what brings the token.
pub(crate) async fn demand(State(token): State<Token>, request: Request, next: Next) -> Response {
    let brought = request.headers().get(header::AUTHORIZATION).map(header::HeaderValue::as_bytes);
    let brought = brought.and_then(bearer);
    // A few bytes from a file system in memory: quicker than to ask another thread for them.
    match token.read() {
        Ok(token) if brought.is_some_and(|brought| same(brought, token.as_bytes())) => {
            next.run(request).await
        }
        Ok(_) => Refusal::NoToken.into_response(),
        Err(error) => {
            tracing::error!(%error, "the token cannot be read");
            Refusal::Failed("the launcher cannot read its token".to_owned()).into_response()
        }
    }
}

fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| token.trim_ascii())
}

/// Takes as long whichever byte is wrong.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |seen, (a, b)| seen | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_epoch_is_refused_and_none_is_not_asked() {
        let fence = Fence::default();
        let pass = |epoch: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(EPOCH, header::HeaderValue::from_static(epoch));
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

    #[test]
    fn a_token_is_what_follows_bearer() {
        assert_eq!(bearer(b"Bearer  abc "), Some(&b"abc"[..]));
        assert_eq!(bearer(b"bearer abc"), Some(&b"abc"[..]));
        assert_eq!(bearer(b"Basic abc"), None);
        assert_eq!(bearer(b"Bearer"), None);
        assert!(same(b"abc", b"abc") && !same(b"abc", b"abd") && !same(b"ab", b"abc"));
    }
}
