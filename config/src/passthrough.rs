//! Reads `engine.passthrough`: the paths of a custom engine that `/engines/{model}/…` opens.
//!
//! A path is compared byte for byte with the request's, so only a spelling that all routers read alike is accepted.
//! Management paths cannot be opened by mistake.

use rouse_net::adapter::paths::MANAGEMENT_SEGMENTS;

/// A path of an engine that clients may call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassthroughPath {
    /// Called by GET, which waits for nothing; otherwise by POST.
    pub is_get: bool,
    pub path: String,
}

/// Why a configured path cannot be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error(
        "a path must start with /, must not end with one, and may have only letters, digits and - _ . ~ between"
    )]
    InvalidPath,
    #[error("the gateway never forwards a management path of the engine")]
    ManagementPath,
}

impl PassthroughPath {
    /// Parses `/path`, `GET /path` or `POST /path`.
    ///
    /// # Errors
    /// The path cannot be compared byte for byte, or is a management path.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let (reads, path) = match text.split_once(' ') {
            None => (false, text),
            Some(("GET", path)) => (true, path),
            Some(("POST", path)) => (false, path),
            Some(_) => return Err(Error::InvalidPath),
        };
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'~');
        let segments = path.strip_prefix('/').ok_or(Error::InvalidPath)?;
        let fine = |segment: &str| {
            !segment.is_empty() && !matches!(segment, "." | "..") && segment.bytes().all(plain)
        };
        if !segments.split('/').all(fine) {
            return Err(Error::InvalidPath);
        }
        let steers =
            |segment: &str| MANAGEMENT_SEGMENTS.iter().any(|name| name.eq_ignore_ascii_case(segment));
        if segments.split('/').any(steers) {
            return Err(Error::ManagementPath);
        }
        Ok(Self { is_get: reads, path: path.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configured_path_is_plain_and_steers_nothing() {
        assert_eq!(
            PassthroughPath::parse("GET /info"),
            Ok(PassthroughPath { is_get: true, path: "/info".into() })
        );
        assert_eq!(
            PassthroughPath::parse("POST /a/b-c_d.e~f"),
            Ok(PassthroughPath { is_get: false, path: "/a/b-c_d.e~f".into() })
        );
        for bad in [
            "", "a", "/", "/a/", "//a", "/a//b", "/.", "/a/../b", "/a%2fb", "/a;b", "/a?b", "/ä", "PUT /a",
            "GET  /a",
        ] {
            assert_eq!(PassthroughPath::parse(bad), Err(Error::InvalidPath), "{bad}");
        }
        for bad in ["/sleep", "/Sleep", "GET /metrics", "/v1/load_lora_adapter", "/slots/0", "/a/sleep"] {
            assert_eq!(PassthroughPath::parse(bad), Err(Error::ManagementPath), "{bad}");
        }
    }
}
