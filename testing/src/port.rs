//! Ports that a test keeps for itself.

use std::net::{SocketAddr, TcpListener};

use socket2::{Domain, Socket, Type};

/// A bound loopback port on which no process listens, so connections are refused. The kernel gives it to no other process while
/// this value lives.
pub struct ReservedPort(Socket);

impl ReservedPort {
    /// # Panics
    /// No port is free.
    #[must_use]
    pub fn bind() -> Self {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        // A program under test that sets the same option may bind this port as well.
        socket.set_reuse_address(true).expect("an option of every socket");
        socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).expect("a free port");
        Self(socket)
    }

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

    /// # Panics
    /// The program under test listens on this port already.
    #[must_use]
    pub fn listen(self) -> TcpListener {
        self.0.listen(128).expect("no process listens on this port");
        self.0.into()
    }
}
