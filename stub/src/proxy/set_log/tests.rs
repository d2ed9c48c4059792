use std::{
    convert::Infallible,
    pin::Pin,
    sync::{
        Mutex as Lock,
        mpsc::{Receiver, channel},
    },
    task::{Context, Poll},
};

use axum::http::Request;
use tokio::sync::mpsc;
use tower_service::Service as _;

use super::*;

/// Captures the output, and limits the bytes of each write.
#[derive(Clone, Default)]
struct CapturedOutput {
    written: Arc<Lock<Vec<u8>>>,
    most: Option<usize>,
}

impl Write for CapturedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = bytes.len().min(self.most.unwrap_or(usize::MAX));
        self.written.lock().unwrap().extend(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl CapturedOutput {
    fn text(&self) -> String {
        String::from_utf8(self.written.lock().unwrap().clone()).unwrap()
    }
}

async fn post(log: &ContainerLog, query: &str, body: impl Into<Body>) -> (u16, String) {
    let request = Request::post(format!("{PATH}{query}")).body(body.into()).unwrap();
    let response = routes(log.clone()).call(request).await.unwrap();
    let status = response.status().as_u16();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    let text = String::from_utf8(body.to_vec()).unwrap();
    assert!(text.ends_with("\r\n") && text.matches('\n').count() == 1, "{text:?}");
    (status, text)
}

#[tokio::test]
async fn pieces_are_appended_and_what_overlaps_is_left_out() {
    let out = CapturedOutput::default();
    let log = ContainerLog::new(out.clone());
    for (start, piece, status, whole) in [
        (0, "", 200, ""),
        (0, "one ", 200, "one "),
        (4, "two ", 200, "one two "),
        (0, "one two ", 200, "one two "),
        (4, "two three ", 200, "one two three "),
        (0, "one two three four", 200, "one two three four"),
        (2, "e", 200, "one two three four"),
        (18, "", 200, "one two three four"),
        (19, "gap", 400, "one two three four"),
        (19, "", 400, "one two three four"),
    ] {
        let (answered, text) = post(&log, &format!("?startPos={start}"), piece).await;
        assert_eq!(answered, status, "{piece} at {start}: {text}");
        assert_eq!(out.text(), whole);
        assert_eq!(log.end(), whole.len() as u64);
    }
}

#[tokio::test]
async fn a_start_that_is_missing_or_none_is_refused_with_the_reason() {
    let out = CapturedOutput::default();
    let log = ContainerLog::new(out.clone());
    for (query, why) in [
        ("", "startPos is missing"),
        ("?", "startPos is missing"),
        ("?startPod=0", "startPos is missing"),
        ("?startpos=0", "startPos is missing"),
        ("?startPos", "startPos is missing"),
        ("?startPos=", "startPos is ''"),
        ("?startPos=x", "startPos is 'x'"),
        ("?startPos=1.5", "startPos is '1.5'"),
        ("?startPos=+0", "startPos is '+0'"),
        ("?startPos=99999999999999999999999", "startPos is '9999"),
        ("?startPos=-1", "startPos is -1, but must not be negative"),
        ("?startPos=1", "startPos is 1, beyond the end of the log at 0"),
    ] {
        let (status, text) = post(&log, query, "piece").await;
        assert_eq!(status, 400, "{query}");
        assert!(text.starts_with(why), "{query}: {text}");
    }
    assert_eq!(post(&log, "?a=b&startPos=0&startPos=7", "piece").await.0, 200);
    assert_eq!(out.text(), "piece");
}

#[tokio::test]
async fn an_output_that_takes_little_at_a_time_gets_all_of_it() {
    let out = CapturedOutput { most: Some(3), ..CapturedOutput::default() };
    let log = ContainerLog::new(out.clone());
    assert_eq!(post(&log, "?startPos=0", "0123456789").await.0, 200);
    assert_eq!(post(&log, "?startPos=8", "89abcde").await.0, 200);
    assert_eq!(out.text(), "0123456789abcde");
}

#[tokio::test]
async fn an_output_that_fails_is_500_and_what_it_took_is_counted() {
    struct FailingOutput(usize);
    impl Write for FailingOutput {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let written = bytes.len().min(self.0);
            self.0 -= written;
            if written == 0 { Err(io::ErrorKind::StorageFull.into()) } else { Ok(written) }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let log = ContainerLog::new(FailingOutput(4));
    let (status, text) = post(&log, "?startPos=0", "0123456789").await;
    assert_eq!(status, 500);
    assert!(text.starts_with("writing the log failed; the log ends at 4: "), "{text}");
    assert_eq!(log.end(), 4);
}

#[tokio::test]
async fn many_who_send_the_same_log_at_once_make_it_once() {
    let out = CapturedOutput { most: Some(7), ..CapturedOutput::default() };
    let log = ContainerLog::new(out.clone());
    let whole: String = (0..20_000).map(|line| format!("line {line}\n")).collect();
    let senders: Vec<_> = (0..8)
        .map(|sender| {
            let (log, whole) = (log.clone(), whole.clone());
            tokio::spawn(async move {
                let (frames, body) = mpsc::channel(1);
                let sending = tokio::spawn(async move {
                    for chunk in whole.as_bytes().chunks(1000 + 137 * sender) {
                        frames.send(Bytes::copy_from_slice(chunk)).await.unwrap();
                    }
                });
                let answer = post(&log, "?startPos=0", Body::new(ChannelFrames(body))).await;
                sending.await.unwrap();
                answer
            })
        })
        .collect();
    for sender in senders {
        assert_eq!(sender.await.unwrap().0, 200);
    }
    assert!(out.text() == whole, "bytes were lost, doubled or mixed");
}

/// A body of the frames that a channel delivers.
struct ChannelFrames(mpsc::Receiver<Bytes>);

impl http_body::Body for ChannelFrames {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(cx).map(|bytes| bytes.map(|bytes| Ok(http_body::Frame::data(bytes))))
    }
}

#[tokio::test]
async fn a_caller_who_leaves_while_the_output_is_stuck_lets_nobody_in_between() {
    /// Blocks each write until a message arrives.
    struct BlockingOutput(Receiver<()>, CapturedOutput);
    impl Write for BlockingOutput {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.recv().map_err(io::Error::other)?;
            self.1.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    #[expect(clippy::disallowed_methods, reason = "a test's channel")]
    let (go, wait) = channel();
    let out = CapturedOutput::default();
    let log = ContainerLog::new(BlockingOutput(wait, out.clone()));
    let leaving = {
        let log = log.clone();
        tokio::spawn(async move { post(&log, "?startPos=0", "first ").await })
    };
    while log.output.try_lock().is_ok() {
        tokio::task::yield_now().await;
    }
    leaving.abort();
    let next = {
        let log = log.clone();
        tokio::spawn(async move { post(&log, "?startPos=0", "first second").await })
    };
    tokio::task::yield_now().await;
    go.send(()).unwrap();
    go.send(()).unwrap();
    assert_eq!(next.await.unwrap().0, 200);
    assert_eq!(out.text(), "first second");
}
