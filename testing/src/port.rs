//! Ports that a test reserves.

use std::net::{SocketAddr, TcpListener};

use socket2::{Domain, Socket, Type};

/// A bound loopback port on which no process listens, so connections are refused. The kernel gives it to no other
/// process while this value lives.
pub struct ReservedPort(Socket);

impl ReservedPort {
    /// Reserves a free port.
    ///
    /// # Panics
    /// No port is free.
    #[must_use]
    pub fn bind() -> Self {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        // The program under test can bind this port too if it sets the same option.
        socket.set_reuse_address(true).expect("an option of every socket");
        socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).expect("a free port");
        Self(socket)
    }

    /// Returns the reserved address.
    ///
    /// # Panics
    /// Never: the socket is bound.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        let address = self.0.local_addr().ok().and_then(|address| address.as_socket());
        address.expect("it is bound to an address of IPv4")
    }

    #[must_use]
    pub fn number(&self) -> u16 {
        self.address().port()
    }

    /// Starts listening on the port.
    ///
    /// # Panics
    /// The program under test already listens on this port.
    #[must_use]
    pub fn listen(self) -> TcpListener {
        self.0.listen(128).expect("no process listens on this port");
        self.0.into()
    }
}
