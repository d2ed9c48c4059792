//! The bearer token of those who may give orders.

use std::{fs, io, path::PathBuf, sync::Mutex, time::SystemTime};

use http::{HeaderMap, header};

/// Longer than any token, in bytes.
const MOST: u64 = 64 << 10;

/// What the file says, as it says it now.
#[derive(Debug)]
pub(crate) struct Token {
    file: PathBuf,
    held: Mutex<Held>,
}

#[derive(Debug)]
struct Held {
    token: String,
    written: Option<SystemTime>,
}

impl Token {
    /// # Errors
    /// The file cannot be read, or holds no token.
    pub(super) fn read(file: PathBuf) -> io::Result<Self> {
        let held = Mutex::new(read(&file)?);
        Ok(Self { file, held })
    }

    /// The request shows it. A file that changed is read again; while it is not there or empty, what it said last holds.
    pub(super) fn is_shown(&self, headers: &HeaderMap) -> bool {
        let shown = headers.get(header::AUTHORIZATION).map(http::HeaderValue::as_bytes).unwrap_or_default();
        let Some((scheme, shown)) = shown.split_at_checked(7) else { return false };
        let mut held = self.held.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let written = fs::metadata(&self.file).and_then(|file| file.modified()).ok();
        if written.is_some() && written != held.written {
            match read(&self.file) {
                Ok(now) => *held = now,
                Err(error) => tracing::warn!(%error, "the token's file is not read; the last token holds"),
            }
        }
        scheme.eq_ignore_ascii_case(b"bearer ") && same(shown.trim_ascii(), held.token.as_bytes())
    }
}

fn read(file: &PathBuf) -> io::Result<Held> {
    let about = fs::metadata(file)?;
    if about.len() > MOST {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "too long for a token"));
    }
    let token = fs::read_to_string(file)?.trim().to_owned();
    if token.is_empty() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "no token in it"));
    }
    Ok(Held { token, written: about.modified().ok() })
}

/// Takes as long for a good beginning as for a bad one. Its length may be learned, and is no secret.
fn same(one: &[u8], other: &[u8]) -> bool {
    let differ = one.iter().zip(other).fold(0, |differ, (a, b)| std::hint::black_box(differ | (a ^ b)));
    one.len() == other.len() && differ == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_token_is_the_token() {
        for other in ["", "t", "toke", "tokem", "token ", "Token", "tokentoken"] {
            assert!(!same(b"token", other.as_bytes()), "{other}");
        }
        assert!(same(b"token", b"token"));
    }
}
