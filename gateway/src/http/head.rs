//! Evaluates a request's head before a byte of its body is read.

use http::HeaderValue;
use rouse::{fault::Fault, units::Millis};

use super::{
    client_text,
    known_headers::{KnownHeader, KnownHeaders},
};
use crate::keys::PresentedKey;

const X_REQUEST_TIMEOUT: &str = "x-request-timeout";
const X_ROUSE_HEARTBEAT: &str = "x-rouse-heartbeat";

/// Refuses an encoded body, which the gateway cannot read.
pub(super) fn check_content_encoding(fields: &KnownHeaders<'_>) -> Result<(), Fault> {
    for encoding in fields.all(KnownHeader::ContentEncoding) {
        let spelled = encoding.to_str().unwrap_or("?").trim();
        if !spelled.is_empty() && !spelled.eq_ignore_ascii_case("identity") {
            return Err(Fault::UnsupportedEncoding { encoding: client_text::sanitize(spelled) });
        }
    }
    Ok(())
}

/// The wait that the client allows with `x-request-timeout`, in seconds.
pub(super) fn request_timeout(fields: &KnownHeaders<'_>) -> Result<Option<Millis>, Fault> {
    let Some(value) = fields.first(KnownHeader::RequestTimeout) else {
        return Ok(None);
    };
    value
        .to_str()
        .ok()
        .and_then(|text| text.trim().parse::<f64>().ok())
        .filter(|seconds| seconds.is_finite() && *seconds > 0.0)
        .map(|seconds| Some(Millis((seconds * 1000.0).min(1e15) as u64)))
        .ok_or_else(|| Fault::InvalidRequest {
            message: format!("{X_REQUEST_TIMEOUT} must be a number of seconds above 0"),
            param: Some(X_REQUEST_TIMEOUT.into()),
        })
}

/// Whether the client wants heartbeats while its stream waits. `None`: it sends no `x-rouse-heartbeat`.
pub(super) fn wants_heartbeat(fields: &KnownHeaders<'_>) -> Result<Option<bool>, Fault> {
    let Some(value) = fields.first(KnownHeader::Heartbeat) else { return Ok(None) };
    match value.as_bytes().trim_ascii() {
        text if text.eq_ignore_ascii_case(b"off") => Ok(Some(false)),
        text if text.eq_ignore_ascii_case(b"on") => Ok(Some(true)),
        _ => Err(Fault::InvalidRequest {
            message: format!("{X_ROUSE_HEARTBEAT} must be 'on' or 'off'"),
            param: Some(X_ROUSE_HEARTBEAT.into()),
        }),
    }
}

/// The key that the client sent. Two different keys are an error.
pub(super) fn presented_key<'a>(fields: &KnownHeaders<'a>) -> Result<Option<PresentedKey<'a>>, Fault> {
    let mut seen: Option<PresentedKey<'a>> = None;
    let plain = |field, header| {
        let sent =
            move |value: &'a HeaderValue| PresentedKey { secret: value.as_bytes().trim_ascii(), header };
        fields.all(field).map(sent)
    };
    let authorization = fields.all(KnownHeader::Authorization);
    let authorization =
        authorization.map(|value| PresentedKey { secret: bearer(value), header: "Authorization" });
    let others = plain(KnownHeader::XApiKey, "x-api-key").chain(plain(KnownHeader::ApiKey, "api-key"));
    for key in authorization.chain(others) {
        if seen.is_some_and(|earlier| earlier.secret != key.secret) {
            return Err(Fault::InvalidRequest {
                message: "conflicting keys: send one of Authorization, x-api-key and api-key".into(),
                param: None,
            });
        }
        seen.get_or_insert(key);
    }
    Ok(seen)
}

fn bearer(value: &HeaderValue) -> &[u8] {
    let bytes = value.as_bytes().trim_ascii();
    match bytes.split_at_checked(7) {
        Some((scheme, key)) if scheme.eq_ignore_ascii_case(b"bearer ") => key.trim_ascii(),
        _ => bytes,
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, HeaderName};

    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap())).collect()
    }

    #[test]
    fn only_unencoded_bodies_are_taken() {
        for fine in ["identity", "Identity", ""] {
            assert!(
                check_content_encoding(&KnownHeaders::scan(&headers(&[("content-encoding", fine)]))).is_ok(),
                "{fine}"
            );
        }
        for bad in ["gzip", "identity, gzip", "br"] {
            let fault = check_content_encoding(&KnownHeaders::scan(&headers(&[("content-encoding", bad)])))
                .unwrap_err();
            assert!(matches!(fault, Fault::UnsupportedEncoding { .. }), "{bad}");
        }
    }

    #[test]
    fn two_different_keys_conflict_and_the_same_one_twice_does_not() {
        let same = headers(&[("authorization", "Bearer a"), ("x-api-key", "a"), ("api-key", " a")]);
        let first = PresentedKey { secret: b"a", header: "Authorization" };
        assert_eq!(presented_key(&KnownHeaders::scan(&same)).unwrap(), Some(first));
        for header in ["x-api-key", "api-key"] {
            let sent = PresentedKey { secret: b"Bearer a", header };
            assert_eq!(
                presented_key(&KnownHeaders::scan(&headers(&[(header, "Bearer a")]))).unwrap(),
                Some(sent)
            );
        }
        let conflict = headers(&[("authorization", "bearer a"), ("api-key", "b")]);
        assert!(matches!(presented_key(&KnownHeaders::scan(&conflict)), Err(Fault::InvalidRequest { .. })));
    }

    #[test]
    fn a_timeout_is_seconds_and_anything_else_is_refused() {
        let asked = |value| request_timeout(&KnownHeaders::scan(&headers(&[("x-request-timeout", value)])));
        assert_eq!(asked("1.5").unwrap(), Some(Millis(1500)));
        assert_eq!(request_timeout(&KnownHeaders::scan(&HeaderMap::new())).unwrap(), None);
        for bad in ["", "soon", "-1", "0", "NaN", "inf"] {
            assert!(asked(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn heartbeats_are_on_or_off_or_not_spoken_of() {
        let asked = |value| wants_heartbeat(&KnownHeaders::scan(&headers(&[("x-rouse-heartbeat", value)])));
        assert_eq!((asked("off").unwrap(), asked(" OFF ").unwrap()), (Some(false), Some(false)));
        assert_eq!(asked("on").unwrap(), Some(true));
        assert_eq!(wants_heartbeat(&KnownHeaders::scan(&HeaderMap::new())).unwrap(), None);
        assert!(asked("").is_err() && asked("0").is_err());
    }
}
