//! Finds the headers that the gateway evaluates, in one pass over a request's head.
//!
//! Most of these headers are usually absent. Looking each of them up by name costs a hash, and two for names that the
//! `http` crate does not know: a tenth of the gateway's own work for a request.

use http::{HeaderMap, HeaderValue};

/// A header that the gateway evaluates before it reads the body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KnownHeader {
    Host,
    TransferEncoding,
    Upgrade,
    Authorization,
    XApiKey,
    ApiKey,
    ContentEncoding,
    RequestTimeout,
    Heartbeat,
    RequestId,
    Connection,
}

const KNOWN_HEADER_COUNT: usize = KnownHeader::Connection as usize + 1;

/// The first value of each known header, and whether the header is repeated.
pub(super) struct KnownHeaders<'a> {
    headers: &'a HeaderMap,
    first: [Option<&'a HeaderValue>; KNOWN_HEADER_COUNT],
    repeated: [bool; KNOWN_HEADER_COUNT],
}

impl KnownHeader {
    fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "host" => Self::Host,
            "transfer-encoding" => Self::TransferEncoding,
            "upgrade" => Self::Upgrade,
            "authorization" => Self::Authorization,
            "x-api-key" => Self::XApiKey,
            "api-key" => Self::ApiKey,
            "content-encoding" => Self::ContentEncoding,
            "x-request-timeout" => Self::RequestTimeout,
            "x-rouse-heartbeat" => Self::Heartbeat,
            "x-request-id" => Self::RequestId,
            "connection" => Self::Connection,
            _ => return None,
        })
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::TransferEncoding => "transfer-encoding",
            Self::Upgrade => "upgrade",
            Self::Authorization => "authorization",
            Self::XApiKey => "x-api-key",
            Self::ApiKey => "api-key",
            Self::ContentEncoding => "content-encoding",
            Self::RequestTimeout => "x-request-timeout",
            Self::Heartbeat => "x-rouse-heartbeat",
            Self::RequestId => "x-request-id",
            Self::Connection => "connection",
        }
    }
}

impl<'a> KnownHeaders<'a> {
    pub(super) fn scan(headers: &'a HeaderMap) -> Self {
        let mut fields =
            Self { headers, first: [None; KNOWN_HEADER_COUNT], repeated: [false; KNOWN_HEADER_COUNT] };
        for (name, value) in headers {
            if let Some(field) = KnownHeader::from_name(name.as_str()) {
                let first = fields.first.get_mut(field as usize);
                let Some((first, repeated)) = first.zip(fields.repeated.get_mut(field as usize)) else {
                    continue;
                };
                *repeated |= first.is_some();
                first.get_or_insert(value);
            }
        }
        fields
    }

    pub(super) fn first(&self, field: KnownHeader) -> Option<&'a HeaderValue> {
        self.first.get(field as usize).copied().flatten()
    }

    pub(super) fn is_repeated(&self, field: KnownHeader) -> bool {
        self.repeated.get(field as usize) == Some(&true)
    }

    /// All values of a header, in the order in which they were sent.
    pub(super) fn all(&self, field: KnownHeader) -> impl Iterator<Item = &'a HeaderValue> + use<'a> {
        let others = self.is_repeated(field).then(|| self.headers.get_all(field.name()).iter().skip(1));
        self.first(field).into_iter().chain(others.into_iter().flatten())
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderName;

    use super::*;

    #[test]
    fn every_value_of_a_field_is_found_in_the_order_of_the_head() {
        let pairs = [("api-key", "a"), ("host", "x"), ("accept", "*/*"), ("api-key", "b"), ("api-key", "c")];
        let headers: HeaderMap = pairs
            .into_iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
            .collect();
        let fields = KnownHeaders::scan(&headers);
        assert!(fields.all(KnownHeader::ApiKey).eq(["a", "b", "c"]));
        assert!(fields.all(KnownHeader::Host).eq(["x"]) && !fields.is_repeated(KnownHeader::Host));
        assert_eq!(fields.all(KnownHeader::Upgrade).count(), 0);
    }

    #[test]
    fn a_field_is_found_by_its_own_name() {
        for at in 0..KNOWN_HEADER_COUNT {
            let of = |name: &str| KnownHeader::from_name(name).filter(|field| field.name() == name);
            let names = ["host", "transfer-encoding", "upgrade", "authorization", "x-api-key", "api-key"];
            let more =
                ["content-encoding", "x-request-timeout", "x-rouse-heartbeat", "x-request-id", "connection"];
            let name = names.iter().chain(&more).nth(at).unwrap();
            assert_eq!(of(name).map(|field| field as usize), Some(at));
        }
    }
}
