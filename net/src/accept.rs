//! Accepts connections at the end of a listener, and classifies errors of an accept.

use std::io;

/// Accept errors in a row tolerated at shutdown, once no connection is open that could free a descriptor.
const MAX_FINAL_ACCEPT_ERRORS: u32 = 8;

/// Accepts all queued connections. An error may concern one connection only, or pass in a moment. `pause` waits after
/// an error, and returns whether other connections are open: each may free the descriptor that is missing.
pub async fn accept_queued<T>(
    mut accept: impl FnMut() -> io::Result<T>,
    mut serve: impl FnMut(T),
    mut pause: impl AsyncFnMut(io::Error) -> bool,
) {
    let mut tries = 0;
    while tries < MAX_FINAL_ACCEPT_ERRORS {
        match accept() {
            Ok(stream) => {
                tries = 0;
                serve(stream);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) if is_transient(&error) => {}
            Err(error) => tries = if pause(error).await { 0 } else { tries + 1 },
        }
    }
    tracing::warn!("cannot accept the last connections, closing the listener with them");
}

/// Whether the peer disconnected before its connection was accepted.
#[must_use]
pub fn is_transient(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[tokio::test]
    async fn an_accept_that_fails_keeps_nobody_in_the_queue() {
        use io::ErrorKind::{ConnectionAborted, HostUnreachable, WouldBlock};
        let failed = |kind: io::ErrorKind| Err(io::Error::from(kind));
        let descriptors = Err(io::Error::from_raw_os_error(nix::errno::Errno::EMFILE as i32));
        let mut queue = [
            failed(ConnectionAborted),
            Ok(1),
            failed(HostUnreachable),
            Ok(2),
            descriptors,
            Ok(3),
            failed(WouldBlock),
            Ok(4),
        ]
        .into_iter();
        let (mut served, mut pauses) = (Vec::new(), 0);
        let pause = async |_: io::Error| {
            pauses += 1;
            false
        };
        accept_queued(|| queue.next().unwrap(), |stream| served.push(stream), pause).await;
        assert_eq!((served, pauses), (vec![1, 2, 3], 2), "and the queue is empty then");
        // A permanent error ends the loop.
        let pause = async |_: io::Error| {
            pauses += 1;
            false
        };
        accept_queued(|| failed(HostUnreachable), |_: i32| (), pause).await;
        assert_eq!(pauses, 2 + MAX_FINAL_ACCEPT_ERRORS);
    }

    #[tokio::test]
    async fn the_last_connections_are_accepted_when_others_have_freed_their_descriptors() {
        // Many more errors than are tolerated in a row without an open connection.
        let open = Cell::new(10 * MAX_FINAL_ACCEPT_ERRORS);
        let mut queue = vec![1, 2, 3].into_iter();
        let accept = || match open.get() {
            0 => queue.next().ok_or_else(|| io::ErrorKind::WouldBlock.into()),
            _ => Err(io::Error::from_raw_os_error(nix::errno::Errno::EMFILE as i32)),
        };
        let mut served = Vec::new();
        let pause = async |_: io::Error| {
            open.set(open.get() - 1);
            open.get() > 0
        };
        accept_queued(accept, |stream| served.push(stream), pause).await;
        assert_eq!(served, [1, 2, 3]);
    }
}
