use std::{io::Write as _, os::unix::fs::MetadataExt as _};

use http_body_util::BodyExt as _;

use super::*;
use crate::launcher::body;

struct LogFixture {
    dir: tempfile::TempDir,
    log: Arc<InstanceLog>,
}

fn log_with(text: impl AsRef<[u8]>) -> LogFixture {
    let dir = tempfile::tempdir().unwrap();
    let log = Arc::new(InstanceLog::create(dir.path(), "test-id").unwrap());
    log.writer().unwrap().write_all(text.as_ref()).unwrap();
    LogFixture { dir, log }
}

impl LogFixture {
    fn read(&self, start: u64, end: Option<u64>) -> (Vec<u8>, u64) {
        let part = self.log.part(Some(LogRange { start, end })).unwrap();
        (content(&part), part.total)
    }

    fn refused(&self, start: u64) -> LogOutOfRange {
        match self.log.part(Some(LogRange { start, end: None })) {
            Err(Error::OutOfRange(error)) => error,
            other => panic!("{other:?}"),
        }
    }
}

fn content(part: &LogPart) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(part.len()).unwrap() + 10];
    let read = part.read(part.start, &mut bytes).unwrap();
    bytes.truncate(read);
    bytes
}

#[test]
fn get_log_bytes_empty_file() {
    let fixture = log_with("");
    assert!(matches!(fixture.log.part(None), Err(Error::OutOfRange(LogOutOfRange { total: 0, first: 0 }))));
    assert_eq!(fixture.refused(0).total, 0);
    assert_eq!(fixture.refused(10).total, 0);
}

#[test]
fn get_log_bytes_with_content() {
    let fixture = log_with("Log 1Log 2");
    assert_eq!(content(&fixture.log.part(None).unwrap()), b"Log 1Log 2");
    assert_eq!(fixture.read(0, None), (b"Log 1Log 2".to_vec(), 10));
}

#[test]
fn get_log_bytes_with_end() {
    let fixture = log_with([[b'A'; 60], [b'B'; 60]].concat());
    let (bytes, total) = fixture.read(0, Some(99));
    assert_eq!((bytes.len(), total), (100, 120));
    assert_eq!(bytes.last(), Some(&b'B'));
}

#[test]
fn get_log_bytes_persists_across_calls() {
    let fixture = log_with("Hello World");
    assert_eq!(fixture.read(0, None), (b"Hello World".to_vec(), 11));
    fixture.log.writer().unwrap().write_all(b"!").unwrap();
    assert_eq!(fixture.read(0, None), (b"Hello World!".to_vec(), 12));
}

#[test]
fn end_larger_than_content() {
    assert_eq!(log_with("ShortMessage").read(0, Some(9999)), (b"ShortMessage".to_vec(), 12));
}

#[test]
fn partial_retrieval_with_end() {
    let fixture = log_with([[b'A'; 20], [b'B'; 20], [b'C'; 20]].concat());
    assert_eq!(fixture.read(0, Some(44)).0, [&[b'A'; 20][..], &[b'B'; 20], &[b'C'; 5]].concat());
}

#[test]
fn unicode_bytes() {
    let raw = "Grüße, 世界 🚀".as_bytes();
    let fixture = log_with(raw);
    assert_eq!(fixture.read(0, None), (raw.to_vec(), raw.len() as u64));
    // Ranges count bytes and may split a character.
    assert_eq!(fixture.read(2, Some(2)).0, raw[2..3]);
}

#[test]
fn start_offset() {
    let fixture = log_with([[b'A'; 10], [b'B'; 10], [b'C'; 10]].concat());
    assert_eq!(fixture.read(15, None), ([&[b'B'; 5][..], &[b'C'; 10]].concat(), 30));
}

#[test]
fn start_at_message_boundary() {
    let fixture = log_with([[b'A'; 10], [b'B'; 10]].concat());
    assert_eq!(fixture.read(10, None), ([b'B'; 10].to_vec(), 20));
}

#[test]
fn start_beyond_available_raises_error() {
    assert_eq!(log_with([b'A'; 20]).refused(50).total, 20);
}

#[test]
fn start_equal_to_length_raises_error() {
    assert_eq!(log_with([b'A'; 10]).refused(10).total, 10);
    assert_eq!(log_with([b'A'; 10]).refused(u64::MAX).total, 10);
}

#[test]
fn max_log_response_bytes_constant() {
    assert_eq!(MAX_PART_BYTES, 1024 * 1024);
    let fixture = log_with(vec![b'x'; 3 << 20]);
    let open = fixture.log.part(Some(LogRange { start: 5, end: None })).unwrap();
    assert_eq!((open.start, open.end), (5, 5 + MAX_PART_BYTES - 1));
    let closed = fixture.log.part(Some(LogRange { start: 0, end: Some((2 << 20) - 1) })).unwrap();
    assert_eq!(closed.len(), 2 << 20);
}

#[test]
fn stop_terminated_cleans_up_log_file() {
    let fixture = log_with("x");
    drop(fixture.log);
    assert_eq!(fs::read_dir(fixture.dir.path()).unwrap().count(), 0);
}

#[test]
fn cleanup_missing_file_no_error() {
    let fixture = log_with("x");
    fs::remove_file(&fixture.log.path).unwrap();
    drop(fixture.log);
}

#[test]
fn ids_that_no_file_can_have_become_different_files() {
    assert_ne!(file_name("a/b"), file_name("a%2Fb"));
    assert!(!file_name("../x").contains('/'));
}

/// Numbered lines of eight bytes, so that every offset has a predictable content.
fn lines(from: usize, to: usize) -> Vec<u8> {
    (from..to).flat_map(|n| format!("{n:07}\n").into_bytes()).collect()
}

#[test]
fn a_log_over_its_cap_gives_blocks_back_and_keeps_its_offsets() {
    let cap = 1 << 20;
    let fixture = log_with(lines(0, 200_000));
    let mut writer = fixture.log.writer().unwrap();
    fixture.log.trim(cap).unwrap();
    writer.write_all(&lines(200_000, 200_001)).unwrap();
    let on_disk = fixture.log.file.metadata().unwrap().blocks() * 512;
    assert!(on_disk <= cap, "{on_disk}");
    assert_eq!(fixture.read(8 * 199_999, None), (lines(199_999, 200_001), 8 * 200_001));
    // Reads from the start, and from a trimmed offset, begin at the first kept byte.
    let part = fixture.log.part(None).unwrap();
    let first = usize::try_from(part.start).unwrap() / 8;
    assert!(first > 0 && part.start.is_multiple_of(8));
    assert!(content(&part).starts_with(&lines(first, first + 100)));
    let part = fixture.log.part(Some(LogRange { start: 8, end: None })).unwrap();
    assert_eq!(part.start / 8, first as u64);
    let gone = fixture.log.part(Some(LogRange { start: 0, end: Some(7) }));
    assert!(matches!(gone, Err(Error::OutOfRange(out)) if out.first == part.start));
}

#[test]
fn without_holes_the_file_is_emptied_and_offsets_still_hold() {
    let fixture = log_with(lines(0, 1000));
    let mut writer = fixture.log.writer().unwrap();
    fixture.log.truncate(&mut fixture.log.head(), 8000).unwrap();
    assert_eq!(fixture.refused(0), LogOutOfRange { total: 8000, first: 8000 });
    writer.write_all(&lines(1000, 1010)).unwrap();
    assert_eq!(fixture.read(8 * 1003, Some(8 * 1004 - 1)), (lines(1003, 1004), 8 * 1010));
    assert_eq!(fixture.read(0, None).0, lines(1000, 1010));
}

/// A read at any offset returns the original bytes or fails.
#[test]
fn a_part_that_is_trimmed_while_it_is_read_gives_no_other_bytes() {
    let by_a_hole = |log: &InstanceLog| log.trim(1 << 20).unwrap();
    let by_emptying = |log: &InstanceLog| {
        log.truncate(&mut log.head(), 1_600_000).unwrap();
        log.writer().unwrap().write_all(&lines(200_000, 400_000)).unwrap();
    };
    for trim in [&by_a_hole as &dyn Fn(&InstanceLog), &by_emptying] {
        let fixture = log_with(lines(0, 200_000));
        let part = fixture.log.part(Some(LogRange { start: 0, end: Some(1_599_999) })).unwrap();
        let mut line = [0; 8];
        let mut read = |at| part.read(at, &mut line).map(|_| line.to_vec());
        assert_eq!(read(8).unwrap(), lines(1, 2));
        trim(&fixture.log);
        let first = fixture.log.head().first_kept;
        assert!(first > 16 && first.is_multiple_of(8), "{first}");
        for at in [0, 16, first - 8] {
            let error = read(at).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
            assert!(error.to_string().contains(&format!("trimmed up to byte {first}")), "{error}");
        }
        if first < 1_600_000 {
            let n = usize::try_from(first / 8).unwrap();
            assert_eq!(read(first).unwrap(), lines(n, n + 1));
        }
    }
}

/// The body ends with an error at the trimmed offset. All bytes before it are right, and no client takes the body for
/// complete.
#[tokio::test]
async fn an_answer_that_is_overtaken_by_a_trim_ends_with_an_error() {
    let all = lines(0, 1_000_000);
    let fixture = log_with(&all);
    let part = fixture.log.part(Some(LogRange { start: 0, end: Some(7_999_999) })).unwrap();
    let mut body = body::log_body(part);
    let mut seen = body.frame().await.unwrap().unwrap().into_data().unwrap().to_vec();
    fixture.log.trim(1 << 20).unwrap();
    let end = loop {
        match body.frame().await {
            Some(Ok(frame)) => seen.extend_from_slice(&frame.into_data().unwrap()),
            end => break end,
        }
    };
    assert!(all.starts_with(&seen) && seen.len() < all.len(), "{}", seen.len());
    assert!(end.unwrap().unwrap_err().to_string().contains("was trimmed"));
}
