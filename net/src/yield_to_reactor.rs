//! Lets the runtime poll its sockets during long work.
//!
//! A task that wakes itself is queued behind the ready tasks. The runtime polls the kernel only when no task is ready,
//! or after a number of tasks (61 in tokio), and a task that is always ready uses up all of them. With a body that
//! arrives as fast as it is read, that was 7 MiB and four milliseconds at a time, in which no stream of its core got an
//! event. Work that runs in turns calls a function of this module after each turn.

use std::{pin::pin, task::Context};

use tokio::task::yield_now;

/// Wakes the task once the runtime has polled its sockets, behind the newly woken tasks. The caller then returns
/// [`Pending`](std::task::Poll::Pending). Other events may wake the task earlier.
pub fn defer_wake(cx: &mut Context<'_>) {
    // The first poll leaves the waker with the runtime. The future is not needed after that.
    if pin!(yield_now()).poll(cx).is_ready() {
        cx.waker().wake_by_ref();
    }
}

/// Returns once the runtime has polled its sockets, even if the caller's task is woken meanwhile: hyper wakes its own
/// task as long as there are bytes to read.
pub async fn yield_once() {
    // In the caller's task, the first of these wake-ups would complete the yield. The spawned task cannot fail.
    drop(tokio::spawn(yield_now()).await);
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, future::poll_fn, io::Write as _, os::unix::net::UnixStream, rc::Rc, task::Poll};

    use tokio::{runtime, task::spawn_local};

    use super::*;

    /// Runs two hundred turns of work beside a task that waits for a socket. Returns how many turns end between the
    /// socket's event and that task's run. `turn` is polled as the work, and reports whether a turn has ended.
    fn turns_until_socket_seen(mut turn: impl FnMut(&mut Context<'_>) -> bool + 'static) -> u32 {
        let options = runtime::LocalOptions::default();
        let runtime = runtime::Builder::new_current_thread().enable_all().build_local(options).unwrap();
        runtime.block_on(async move {
            let (mut near, far) = UnixStream::pair().unwrap();
            far.set_nonblocking(true).unwrap();
            let far = tokio::net::UnixStream::from_std(far).unwrap();
            let turns = Rc::new(Cell::new(0));
            let turns_seen = Rc::clone(&turns);
            let stream = spawn_local(async move {
                far.readable().await.unwrap();
                turns_seen.get()
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
        let mut yielding = Box::pin(yield_once());
        let steps = move |cx: &mut Context<'_>| {
            let ended = yielding.as_mut().poll(cx).is_ready();
            if ended {
                yielding = Box::pin(yield_once());
            }
            cx.waker().wake_by_ref();
            ended
        };
        assert_eq!(turns_until_socket_seen(steps), 0);
    }
}
