//! Reads the header of the PROXY protocol, version 2.
//!
//! The header is binary and precedes everything else on a connection, a TLS handshake included. Its first 16 bytes have
//! its length, so the gateway reads the header to its last byte and not one byte further. The additional fields (TLVs)
//! behind the addresses are skipped.

use std::{
    io,
    net::{IpAddr, SocketAddr},
};

use tokio::io::{AsyncRead, AsyncReadExt as _};

const SIGNATURE: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";
/// The signature, version and command, address family, and the length of what follows.
const FIXED_BYTES: usize = 16;
/// The longest header, as in nginx. Fields with a client's certificate take 2 or 3 KiB.
const MAX_HEADER_BYTES: usize = 4096;
/// Source and destination addresses, then their ports: IPv4 and IPv6.
const IPV4_BYTES: usize = 12;
const IPV6_BYTES: usize = 36;

/// Why a connection has no valid header.
#[derive(Debug, thiserror::Error)]
pub(super) enum ProxyHeaderError {
    #[error(
        "it does not begin with a PROXY protocol v2 header, which listen.proxies.proxyProtocol requires from this \
         network: let the proxy send the header, or remove the key"
    )]
    Missing,
    #[error(
        "it begins with a PROXY protocol v1 header: let the proxy send version 2, as HAProxy does with send-proxy-v2"
    )]
    Version1,
    #[error("its PROXY protocol header has an unknown version, command or address family ({0:#04x})")]
    Unknown(u8),
    #[error(
        "its PROXY protocol header has {0} bytes, and {max} are allowed: let the proxy send fewer fields",
        max = MAX_HEADER_BYTES
    )]
    TooLong(usize),
    #[error("its PROXY protocol header has only {0} bytes for its addresses")]
    TooShort(usize),
    #[error("its PROXY protocol header took longer than limits.headerRead")]
    Slow,
    #[error("it ended within its PROXY protocol header")]
    Truncated,
    #[error("it ended before its first byte")]
    Closed,
    #[error("it broke: {0}")]
    Io(io::Error),
}

impl ProxyHeaderError {
    /// The status that the refusal is counted under. `None`: the proxy left by itself, as health checks do.
    pub(super) const fn status(&self) -> Option<u16> {
        match self {
            Self::Closed | Self::Io(_) => None,
            Self::Slow => Some(408),
            _ => Some(400),
        }
    }
}

impl From<io::Error> for ProxyHeaderError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::Truncated,
            _ => Self::Io(error),
        }
    }
}

/// The fixed part of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FixedPart {
    addresses: AddressFormat,
    /// Bytes that follow: the addresses and the fields behind them.
    length: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AddressFormat {
    Ipv4,
    Ipv6,
    /// The proxy speaks for itself (LOCAL), or its client has no TCP address.
    None,
}

impl AddressFormat {
    const fn bytes(self) -> usize {
        match self {
            Self::Ipv4 => IPV4_BYTES,
            Self::Ipv6 => IPV6_BYTES,
            Self::None => 0,
        }
    }
}

/// Reads a header and no byte beyond it. Returns the client's address, or `None` where the socket's own one holds.
///
/// # Errors
/// The header is missing, invalid or too long, or the connection ended.
pub(super) async fn read_header(
    wire: &mut (impl AsyncRead + Unpin),
) -> Result<Option<SocketAddr>, ProxyHeaderError> {
    let mut fixed = [0; FIXED_BYTES];
    let mut filled = 0;
    while let Some(room) = fixed.get_mut(filled..).filter(|room| !room.is_empty()) {
        let read = wire.read(room).await?;
        if read == 0 {
            return Err(if filled == 0 { ProxyHeaderError::Closed } else { ProxyHeaderError::Truncated });
        }
        filled += read;
        // At once: a client that waits for an answer sends no further byte.
        check_signature(fixed.get(..filled).unwrap_or_default())?;
    }
    let FixedPart { addresses: format, length } = parse_fixed_part(&fixed)?;
    let mut addresses = [0; IPV6_BYTES];
    let addresses = addresses.get_mut(..format.bytes()).unwrap_or_default();
    wire.read_exact(addresses).await?;
    skip(wire, length - addresses.len()).await?;
    Ok(parse_source(format, addresses))
}

fn check_signature(begun: &[u8]) -> Result<(), ProxyHeaderError> {
    if begun.iter().zip(&SIGNATURE).all(|(byte, expected)| byte == expected) {
        return Ok(());
    }
    Err(if begun.starts_with(b"PROXY") { ProxyHeaderError::Version1 } else { ProxyHeaderError::Missing })
}

fn parse_fixed_part(bytes: &[u8; FIXED_BYTES]) -> Result<FixedPart, ProxyHeaderError> {
    check_signature(bytes)?;
    let [.., command, family, high, low] = *bytes;
    let length = usize::from(u16::from_be_bytes([high, low]));
    if FIXED_BYTES + length > MAX_HEADER_BYTES {
        return Err(ProxyHeaderError::TooLong(FIXED_BYTES + length));
    }
    let addresses = match (command, family) {
        // LOCAL: a connection of the proxy itself, such as a health check.
        (0x20, _) => AddressFormat::None,
        (0x21, 0x11) => AddressFormat::Ipv4,
        (0x21, 0x21) => AddressFormat::Ipv6,
        // Unspecified, datagrams, Unix sockets: no client of this port.
        (0x21, family) if family >> 4 <= 3 && family & 0xf <= 2 => AddressFormat::None,
        (0x21, family) => return Err(ProxyHeaderError::Unknown(family)),
        (command, _) => return Err(ProxyHeaderError::Unknown(command)),
    };
    if length < addresses.bytes() {
        return Err(ProxyHeaderError::TooShort(length));
    }
    Ok(FixedPart { addresses, length })
}

fn parse_source(format: AddressFormat, bytes: &[u8]) -> Option<SocketAddr> {
    let (address, ports): (IpAddr, _) = match format {
        AddressFormat::Ipv4 => {
            let (address, rest) = bytes.split_first_chunk::<4>()?;
            (IpAddr::from(*address), rest.get(4..)?)
        }
        AddressFormat::Ipv6 => {
            let (address, rest) = bytes.split_first_chunk::<16>()?;
            (IpAddr::from(*address), rest.get(16..)?)
        }
        AddressFormat::None => return None,
    };
    let (port, _) = ports.split_first_chunk::<2>()?;
    Some(SocketAddr::new(address.to_canonical(), u16::from_be_bytes(*port)))
}

async fn skip(wire: &mut (impl AsyncRead + Unpin), mut bytes: usize) -> io::Result<()> {
    let mut skipped = [0; 256];
    while bytes > 0 {
        let room = skipped.get_mut(..bytes.min(256)).unwrap_or_default();
        bytes -= wire.read_exact(room).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
