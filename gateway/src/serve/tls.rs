//! TLS: the gateway's certificate, its trusted client authorities, and handshakes.
//!
//! Certificates are a part of the configuration: they are read with it, a mismatch rejects it, and connections accepted
//! later use them. A session cannot be resumed across a change, since each configuration keeps its own sessions: a
//! client admitted by an authority that is no longer trusted must authenticate again.
//!
//! A handshake with a long RSA key computes for milliseconds, in which no stream of the core would progress. So
//! handshakes run on their own threads, and the connection returns to its core afterwards.

use std::{io, sync::Arc};

use rouse_config::{ALPN_HTTP2, TlsConfig};
use rouse_net::server::StallTrackingTcp;
use rustls::ServerConfig;
use tokio::task::JoinHandle;
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use super::stream::ClientStream;

/// The type of a TLS record that begins a handshake. No HTTP request begins with this byte.
const HANDSHAKE_RECORD_TYPE: u8 = 0x16;

/// Whether a failed start of a connection counts as its client's offence. A client that ended the handshake with an
/// alert does not offend: it most likely rejects the gateway's certificate, and all clients of its address would pay
/// for that.
pub(super) fn is_client_offence(error: &io::Error) -> bool {
    let cause = error.get_ref().and_then(|cause| cause.downcast_ref::<rustls::Error>());
    error.kind() == io::ErrorKind::InvalidData && !matches!(cause, Some(rustls::Error::AlertReceived(_)))
}

/// The handshake threads.
pub(super) struct HandshakePool {
    runtime: Option<tokio::runtime::Runtime>,
}

/// The outcome of a handshake on a port that expects TLS.
pub(super) enum HandshakeOutcome {
    Secure {
        stream: ClientStream,
        http2: bool,
    },
    /// The client speaks another protocol, most likely HTTP.
    NotTls(ClientStream),
}

impl HandshakePool {
    /// Starts one thread per four `cores` of the API.
    fn start(cores: usize) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads((cores / 4).max(1))
            .thread_name("tls")
            .enable_all()
            .build()?;
        Ok(Self { runtime: Some(runtime) })
    }

    /// The handshake threads of a listener, if TLS is configured. Errors: TLS is configured but no certificate was
    /// read.
    pub(super) fn for_listener(tls: Option<&TlsConfig>, cores: usize) -> Result<Option<Self>, super::Error> {
        match tls {
            None => Ok(None),
            Some(tls) if tls.identity.is_none() => Err(super::Error::NoIdentity),
            Some(_) => Self::start(cores).map(Some).map_err(super::Error::Thread),
        }
    }

    /// Runs a handshake. Dropping the future abandons the connection. Errors: the client disconnected, or the
    /// negotiation failed.
    pub(super) async fn accept(
        &self,
        wire: StallTrackingTcp,
        server: Arc<ServerConfig>,
    ) -> io::Result<HandshakeOutcome> {
        let Some(runtime) = &self.runtime else { return Err(io::ErrorKind::NotConnected.into()) };
        let mut task = AbortOnDrop(runtime.spawn(handshake(wire, server)));
        (&mut task.0).await.map_err(io::Error::other)?
    }
}

/// A connection in a running handshake has no core to return to, so abandon it.
impl Drop for HandshakePool {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

struct AbortOnDrop(JoinHandle<io::Result<HandshakeOutcome>>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn handshake(wire: StallTrackingTcp, server: Arc<ServerConfig>) -> io::Result<HandshakeOutcome> {
    match wire.first_byte().await? {
        None => return Err(io::ErrorKind::UnexpectedEof.into()),
        Some(HANDSHAKE_RECORD_TYPE) => {}
        Some(_) => return Ok(HandshakeOutcome::NotTls(ClientStream::Plain(wire))),
    }
    let stream: TlsStream<StallTrackingTcp> = TlsAcceptor::from(server).accept(wire).await?;
    let http2 = stream.get_ref().1.alpn_protocol() == Some(ALPN_HTTP2);
    Ok(HandshakeOutcome::Secure { stream: ClientStream::Tls(Box::new(stream)), http2 })
}

#[cfg(test)]
mod tests;
