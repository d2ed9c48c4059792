//! The bearer token for orders, read from a file or known only by its SHA-256.
//!
//! A hash may stand where many can read it, such as in a Pod's spec: it does not reveal the token, as long as the token
//! is random and not a chosen word.
//!
//! The file is read for every call. It is a few bytes in an in-memory file system, and its modification time is not
//! reliable, since two versions can have the same. A new token is valid from the next call on, and the old token no
//! longer is. While the file cannot be read or is empty, the last token stays valid, so that replacing it in two steps
//! locks no caller out.

use std::{
    fs::File,
    io::{self, Read as _},
    path::{Path, PathBuf},
    str::FromStr,
    sync::{Mutex, PoisonError},
};

use aws_lc_rs::digest;
use http::{HeaderMap, HeaderValue, header};

/// Longer than any token, in bytes.
const MAX_TOKEN_FILE_BYTES: u64 = 64 << 10;

#[derive(Debug)]
pub(crate) enum BearerToken {
    /// The token is the file's current content.
    File {
        file: PathBuf,
        last_read: Mutex<LastReadToken>,
    },
    Hashed(TokenHash),
}

/// A SHA-256.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TokenHash([u8; 32]);

#[derive(Debug)]
pub(crate) struct LastReadToken {
    token: String,
    /// The last read failed, and the failure was logged.
    failing: bool,
}

impl BearerToken {
    /// Reads the token from a file.
    ///
    /// # Errors
    /// The file cannot be read, or holds no token.
    pub(crate) fn from_file(file: PathBuf) -> io::Result<Self> {
        let last_read = Mutex::new(LastReadToken { token: read(&file)?, failing: false });
        Ok(Self::File { file, last_read })
    }

    /// Whether the request presents this token.
    pub(crate) fn is_presented(&self, headers: &HeaderMap) -> bool {
        let presented = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes).and_then(bearer_token);
        let Some(presented) = presented else { return false };
        match self {
            Self::File { file, last_read } => {
                let mut last_read = last_read.lock().unwrap_or_else(PoisonError::into_inner);
                last_read.refresh(file);
                constant_time_eq(presented, last_read.token.as_bytes())
            }
            Self::Hashed(hash) => TokenHash::of(presented) == *hash,
        }
    }
}

impl LastReadToken {
    fn refresh(&mut self, file: &Path) {
        match read(file) {
            Ok(token) => *self = Self { token, failing: false },
            Err(error) => {
                if !std::mem::replace(&mut self.failing, true) {
                    tracing::warn!(%error, "cannot read the token file, keeping the last token");
                }
            }
        }
    }
}

impl TokenHash {
    fn of(token: &[u8]) -> Self {
        let mut hash = [0; 32];
        hash.copy_from_slice(digest::digest(&digest::SHA256, token).as_ref());
        Self(hash)
    }
}

impl FromStr for TokenHash {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const FORM: &str = "must be a SHA-256 as 64 hexadecimal digits";
        if text.len() != 64 || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(FORM);
        }
        let mut hash = [0; 32];
        for (byte, digits) in hash.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            let digits = str::from_utf8(digits).map_err(|_| FORM)?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| FORM)?;
        }
        Ok(Self(hash))
    }
}

fn read(file: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(file)?.take(MAX_TOKEN_FILE_BYTES + 1).read_to_string(&mut text)?;
    let refused = |message| Err(io::Error::new(io::ErrorKind::InvalidData, message));
    match text.trim() {
        _ if text.len() as u64 > MAX_TOKEN_FILE_BYTES => refused("the file is too long for a token"),
        "" => refused("the file holds no token"),
        token => Ok(token.to_owned()),
    }
}

fn bearer_token(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| token.trim_ascii())
}

/// Compares in constant time for equal lengths. The length may leak and is not secret.
fn constant_time_eq(one: &[u8], other: &[u8]) -> bool {
    let differ = one.iter().zip(other).fold(0, |differ, (a, b)| std::hint::black_box(differ | (a ^ b)));
    one.len() == other.len() && differ == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn presents(token: &BearerToken, value: &'static str) -> bool {
        token.is_presented(&HeaderMap::from_iter([(header::AUTHORIZATION, HeaderValue::from_static(value))]))
    }

    #[test]
    fn only_the_whole_token_is_the_token() {
        for other in ["", "t", "toke", "tokem", "token ", "Token", "tokentoken"] {
            assert!(!constant_time_eq(b"token", other.as_bytes()), "{other}");
        }
        assert!(constant_time_eq(b"token", b"token"));
    }

    #[test]
    fn by_its_hash_a_token_is_known_and_the_hash_is_none() {
        const HASH: &str = "3c469e9d6c5875d37a43f353d4f88e61fcf812c66eee3457465a40b0da4153e0";
        let token = BearerToken::Hashed(HASH.parse().unwrap());
        assert!(presents(&token, "Bearer token"));
        for other in ["Bearer Token", "Bearer ", "Bearer token2", "Basic token", &format!("Bearer {HASH}")] {
            let value = HeaderValue::from_str(other).unwrap();
            assert!(!token.is_presented(&HeaderMap::from_iter([(header::AUTHORIZATION, value)])), "{other}");
        }
        assert!(!token.is_presented(&HeaderMap::new()));
        for junk in
            ["", "3c", &"c".repeat(63), &format!("{HASH}00"), &HASH.replace('c', "g"), &"+1".repeat(32)]
        {
            assert!(junk.parse::<TokenHash>().is_err(), "{junk}");
        }
    }

    #[test]
    fn a_token_is_what_follows_bearer() {
        assert_eq!(bearer_token(b"Bearer  abc "), Some(&b"abc"[..]));
        assert_eq!(bearer_token(b"bearer abc"), Some(&b"abc"[..]));
        assert_eq!(bearer_token(b"Basic abc"), None);
        assert_eq!(bearer_token(b"Bearer"), None);
    }

    #[test]
    fn a_new_token_counts_at_once_also_when_the_file_looks_as_old_as_before() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("token");
        let write = |text: &str| {
            std::fs::write(&file, text).unwrap();
            let written = std::time::SystemTime::UNIX_EPOCH;
            File::options().write(true).open(&file).unwrap().set_modified(written).unwrap();
        };
        write(" first\n");
        let token = BearerToken::from_file(file.clone()).unwrap();
        assert!(presents(&token, "Bearer first") && !token.is_presented(&HeaderMap::new()));
        write("other\n");
        assert!(presents(&token, "Bearer other") && !presents(&token, "Bearer first"));
    }

    #[test]
    fn while_the_file_holds_none_the_last_token_does() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("token");
        assert!(BearerToken::from_file(file.clone()).is_err(), "it is not there");
        for none in ["", " \n", &"x".repeat(70_000)] {
            std::fs::write(&file, none).unwrap();
            assert!(BearerToken::from_file(file.clone()).is_err(), "{}", none.len());
        }
        std::fs::write(&file, "first").unwrap();
        let token = BearerToken::from_file(file.clone()).unwrap();
        for none in ["", &"x".repeat(70_000)] {
            std::fs::write(&file, none).unwrap();
            assert!(presents(&token, "Bearer first") && !presents(&token, "Bearer "));
        }
        std::fs::remove_file(&file).unwrap();
        assert!(presents(&token, "Bearer first"));
        std::fs::write(&file, "second").unwrap();
        assert!(presents(&token, "Bearer second") && !presents(&token, "Bearer first"));
    }
}
