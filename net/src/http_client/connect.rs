//! Opens the connection of a call.

use std::{fmt, net::SocketAddr, time::Duration};

use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;

use super::HttpClientError;
use crate::backend_origin::{BackendTls, Duplex};

/// TCP keepalive: idle time, interval and retries. A stream may be silent for hours, and a node that lost power stays
/// silent too. The kernel probes the peer and closes the connection when all probes go unanswered.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_RETRIES: u32 = 3;

/// Where connections go.
#[derive(Debug)]
pub(super) enum CallTarget {
    Address(SocketAddr),
    /// `HOST:PORT`, resolved for each call.
    Name(Box<str>),
}

impl CallTarget {
    /// `has_no_deadline`: the connection may live for ever, so the kernel must notice that the peer is gone.
    pub(super) async fn connect(
        &self,
        tls: Option<&dyn BackendTls>,
        has_no_deadline: bool,
    ) -> Result<Box<dyn Duplex>, HttpClientError> {
        let connected = match self {
            Self::Address(address) => TcpStream::connect(address).await,
            Self::Name(host_and_port) => TcpStream::connect(&**host_and_port).await,
        };
        let stream = connected.map_err(|error| HttpClientError::Unreachable(error.to_string().into()))?;
        stream.set_nodelay(true).map_err(|_| HttpClientError::Broken)?;
        if has_no_deadline {
            let keepalive = TcpKeepalive::new()
                .with_time(KEEPALIVE_IDLE)
                .with_interval(KEEPALIVE_INTERVAL)
                .with_retries(KEEPALIVE_RETRIES);
            SockRef::from(&stream).set_tcp_keepalive(&keepalive).map_err(|_| HttpClientError::Broken)?;
        }
        let Some(tls) = tls else { return Ok(Box::new(stream)) };
        let secured = tls.handshake(stream.into()).await;
        secured.map_err(|error| HttpClientError::Tls(error.to_string().into()))
    }
}

impl fmt::Display for CallTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => write!(f, "{address}"),
            Self::Name(host_and_port) => f.write_str(host_and_port),
        }
    }
}
