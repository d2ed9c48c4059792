//! What both sides of the data path hold: a TCP connection.
//!
//! Under the feature `pipe` it may also be a pipe in memory. That is for one purpose: to count the instructions that a
//! request costs, the kernel's share and the network's moods left out. What ships is built without it, and there the
//! type is tokio's.

#[cfg(feature = "pipe")]
pub mod pipe;

#[cfg(feature = "pipe")]
pub use pipe::Tcp;
#[cfg(not(feature = "pipe"))]
pub use tokio::net::TcpStream as Tcp;
