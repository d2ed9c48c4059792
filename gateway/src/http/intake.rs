//! Reading a request's body: whole, before it is routed, within every limit.
//!
//! The body is read before routing because the model's name is in it, and because a body left unread hides that the
//! client left. What it costs is bounded three ways: `limits.body` for one, `limits.bodyTotal` for all that are held
//! (charged as bytes arrive, given back at the response's head), `limits.bodyRate` for how long one may take.
//!
//! Memory of one parked request beside its body, at most and with the default limits: its head (64 KiB, usually below
//! 2 KiB), hyper's two buffers (16 KiB, grown to 80 KiB by a large body), what its client pipelined (16 KiB), its state
//! and its connection's (about 4 KiB): 164 KiB, usually 22 KiB. So 1000 waiting requests hold 164 MiB at most beside
//! `limits.bodyTotal`.

use std::{
    future::poll_fn,
    io,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::Poll,
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use http_body::Body;
use http_body_util::BodyExt;
use rouse::{
    fault::{Fault, Phase},
    units,
};
use tokio::time::Instant;

use crate::config::Limits;

/// The time over which a body must keep up with `limits.bodyRate`.
const PATIENCE: Duration = Duration::from_secs(5);

/// The bytes of all bodies that are held now.
#[derive(Debug, Default)]
pub(crate) struct InFlight(AtomicU64);

/// One body's share of [`InFlight`], given back on drop.
#[derive(Debug)]
pub(crate) struct Charge {
    of: Arc<InFlight>,
    bytes: u64,
}

/// Reads the body. The charge is to be kept as long as the body is.
pub(crate) async fn read<B>(
    body: B,
    limits: &Limits,
    in_flight: &Arc<InFlight>,
) -> Result<(Bytes, Charge), Fault>
where
    B: Body<Data = Bytes>,
    B::Error: std::error::Error + 'static,
{
    let mut charge = Charge { of: Arc::clone(in_flight), bytes: 0 };
    let too_large = || Fault::BodyTooLarge { setting: "limits.body".into(), limit: limits.body };
    let declared = body.size_hint().exact();
    if declared.is_some_and(|length| length > limits.body.0) {
        return Err(too_large());
    }
    let mut body = pin!(body);
    let mut whole = Gathered::Nothing;
    let mut pace = Pace::new(limits.body_rate);
    while let Some(frame) = pace.next(body.frame(), charge.bytes).await? {
        let Ok(data) = frame.map_err(|error| broken(&error))?.into_data() else {
            continue;
        };
        if charge.bytes + data.len() as u64 > limits.body.0 {
            return Err(too_large());
        }
        charge.add(data.len() as u64, limits.body_total)?;
        whole.add(data, declared);
    }
    Ok((whole.finish(), charge))
}

/// One frame is passed on as it came; only a body of several is copied together.
enum Gathered {
    Nothing,
    One(Bytes),
    Many(BytesMut),
}

impl Gathered {
    fn add(&mut self, data: Bytes, declared: Option<u64>) {
        *self = match std::mem::replace(self, Self::Nothing) {
            Self::Nothing => Self::One(data),
            Self::One(first) => {
                // What a client declares is believed up to 1 MiB; beyond, memory follows what it sends.
                let expected = usize::try_from(declared.unwrap_or(0)).unwrap_or(0).min(1 << 20);
                let mut many = BytesMut::with_capacity(expected.max(first.len() + data.len()));
                many.extend_from_slice(&first);
                many.extend_from_slice(&data);
                Self::Many(many)
            }
            Self::Many(mut many) => {
                many.extend_from_slice(&data);
                Self::Many(many)
            }
        };
    }

    fn finish(self) -> Bytes {
        match self {
            Self::Nothing => Bytes::new(),
            Self::One(data) => data,
            Self::Many(many) => many.freeze(),
        }
    }
}

/// Ends a body that comes in dribs: what came fast before is no credit, or one burst would buy hours. The timer exists
/// only once a body has made us wait.
struct Pace {
    least: u64,
    window: Duration,
    /// When the present window began, and how many bytes had come by then.
    since: Instant,
    before: u64,
    timer: Option<Pin<Box<tokio::time::Sleep>>>,
}

impl Pace {
    fn new(least: units::Bytes) -> Self {
        Self { least: least.0, window: PATIENCE, since: Instant::now(), before: 0, timer: None }
    }

    async fn next<F: Future>(&mut self, frame: F, so_far: u64) -> Result<F::Output, Fault> {
        let mut frame = pin!(frame);
        if let Poll::Ready(ready) = poll_fn(|cx| Poll::Ready(frame.as_mut().poll(cx))).await {
            return Ok(ready);
        }
        loop {
            let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep(self.window)));
            tokio::select! {
                biased;
                ready = &mut frame => return Ok(ready),
                () = timer.as_mut() => {
                    let wanted = self.since.elapsed().as_millis() * u128::from(self.least) / 1000;
                    if u128::from(so_far - self.before) < wanted {
                        return Err(Fault::RequestTimeout {
                            what: format!("its body came slower than limits.bodyRate ({}/s)", units::Bytes(self.least)),
                        });
                    }
                    (self.since, self.before) = (Instant::now(), so_far);
                    timer.as_mut().reset(self.since + self.window);
                }
            }
        }
    }
}

impl Charge {
    fn add(&mut self, bytes: u64, limit: units::Bytes) -> Result<(), Fault> {
        let before = self.of.0.fetch_add(bytes, Ordering::Relaxed);
        self.bytes += bytes;
        if before + bytes > limit.0 {
            return Err(Fault::Busy { limit });
        }
        Ok(())
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.of.0.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A body that ends too early, or that HTTP/2 resets, is a client that left; one that cannot be decoded is a bad
/// request.
fn broken(error: &(dyn std::error::Error + 'static)) -> Fault {
    let garbled = std::iter::successors(Some(error), |e| e.source()).any(|e| {
        e.downcast_ref::<io::Error>()
            .is_some_and(|io| matches!(io.kind(), io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput))
    });
    if garbled {
        Fault::InvalidRequest { message: "the body could not be read: broken framing".into(), param: None }
    } else {
        Fault::ClientLeft { phase: Phase::Connecting }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_burst_is_no_credit_for_dribs_after_it() {
        let mut pace = Pace { window: Duration::from_millis(100), ..Pace::new(units::Bytes(1000)) };
        let drib = || tokio::time::sleep(Duration::from_millis(20));
        let mut so_far = 1_000_000;
        // Fast enough, and so for as long as it likes.
        for _ in 0..20 {
            assert!(pace.next(drib(), so_far).await.is_ok());
            so_far += 1000;
        }
        let slow = async {
            while pace.next(drib(), so_far).await.is_ok() {
                so_far += 1;
            }
        };
        tokio::time::timeout(Duration::from_secs(2), slow).await.expect("still read");
    }
}
