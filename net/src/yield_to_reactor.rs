//! Long work that lets its core look at its sockets.
//!
//! A task that wakes itself is merely put behind those that are ready. The runtime asks the kernel what else came only when
//! none is, or after so many of them (61 is tokio's number), and a task that is ready each time is all of these: of a body
//! that comes as fast as it is taken, that was 7 MiB and four milliseconds at a time, in which no stream of its core had an
//! event. Who goes about such work in turns steps aside after each, here.

use std::{pin::pin, task::Context};

use tokio::task::yield_now;

/// To be called by who then returns [`Pending`](std::task::Poll::Pending): its task is woken once the runtime has looked at its sockets, and
/// behind whatever that found. Anything else may wake it before.
pub fn defer_wake(cx: &mut Context<'_>) {
    // Asked once, it has left the waker where it belongs, and is of no more use.
    if pin!(yield_now()).poll(cx).is_ready() {
        cx.waker().wake_by_ref();
    }
}

/// Returns once the runtime has looked at its sockets, however often the caller's task is woken meanwhile: hyper wakes its
/// own as long as there is something to read.
pub async fn yield_once() {
    // What is polled with the caller would be taken for done at the first of these times. It cannot fail.
    drop(tokio::spawn(yield_now()).await);
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, future::poll_fn, io::Write as _, os::unix::net::UnixStream, rc::Rc, task::Poll};

    use tokio::{runtime, task::spawn_local};

    use super::*;

    /// Work of two hundred turns beside a task that waits for a socket: how many turns end between the one in which
    /// something came there and that task. `turn`: polled as the work is, tells when one has ended.
    fn turns_until_socket_seen(mut turn: impl FnMut(&mut Context<'_>) -> bool + 'static) -> u32 {
        let options = runtime::LocalOptions::default();
        let runtime = runtime::Builder::new_current_thread().enable_all().build_local(options).unwrap();
        runtime.block_on(async move {
            let (mut near, far) = UnixStream::pair().unwrap();
            far.set_nonblocking(true).unwrap();
            let far = tokio::net::UnixStream::from_std(far).unwrap();
            let turns = Rc::new(Cell::new(0));
            let seen = Rc::clone(&turns);
            let stream = spawn_local(async move {
                far.readable().await.unwrap();
                seen.get()
            });
            let work = spawn_local(poll_fn(move |cx| {
                if turn(cx) {
                    turns.set(turns.get() + 1);
                    if turns.get() == 10 {
                        near.write_all(b"x").unwrap();
                    }
                }
                if turns.get() == 200 { Poll::Ready(()) } else { Poll::Pending }
            }));
            work.await.unwrap();
            stream.await.unwrap() - 10
        })
    }

    #[test]
    fn a_socket_waits_for_no_second_turn_of_work_that_steps_aside() {
        let steps = |cx: &mut Context<'_>| {
            defer_wake(cx);
            true
        };
        assert_eq!(turns_until_socket_seen(steps), 0);
        let wakes_itself = |cx: &mut Context<'_>| {
            cx.waker().wake_by_ref();
            true
        };
        assert!(turns_until_socket_seen(wakes_itself) > 10, "the runtime does it by itself");
    }

    #[test]
    fn a_task_that_wakes_itself_meanwhile_has_not_stepped_aside() {
        let mut aside = Box::pin(yield_once());
        let steps = move |cx: &mut Context<'_>| {
            let ended = aside.as_mut().poll(cx).is_ready();
            if ended {
                aside = Box::pin(yield_once());
            }
            cx.waker().wake_by_ref();
            ended
        };
        assert_eq!(turns_until_socket_seen(steps), 0);
    }
}
