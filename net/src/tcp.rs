//! The TCP connection type of both sides of the data path.
//!
//! Under the feature `pipe` a connection may also be an in-memory pipe. That serves one purpose: to count the
//! instructions of a request without the kernel's share and the network's variance. Releases are built without it, and
//! there the type is tokio's.

#[cfg(feature = "pipe")]
pub mod pipe;

#[cfg(feature = "pipe")]
pub use pipe::Tcp;
#[cfg(not(feature = "pipe"))]
pub use tokio::net::TcpStream as Tcp;
