use std::{
    os::unix::fs::PermissionsExt as _,
    sync::{
        Mutex,
        mpsc::{self, Receiver},
    },
    thread,
};

use super::*;

mod slow_disks;

/// A disk with limited room that keeps what was written. With a `hold`, writes block until it is dropped.
struct FakeDisk {
    room: Arc<AtomicUsize>,
    hold: Option<Receiver<()>>,
    written: Arc<Mutex<Vec<u8>>>,
}

struct JournalHarness {
    file: JournalFile,
    fleet: Fleet,
    lost: TelemetryDropCounters,
    room: Arc<AtomicUsize>,
    written: Arc<Mutex<Vec<u8>>>,
    turns: u64,
}

impl Write for FakeDisk {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(hold) = &self.hold {
            // The sender is dropped when writing may proceed.
            hold.recv().unwrap_or_default();
        }
        let taken = bytes.len().min(self.room.load(Ordering::Acquire));
        if taken == 0 {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.room.fetch_sub(taken, Ordering::AcqRel);
        self.written.lock().unwrap().extend_from_slice(&bytes[..taken]);
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl JournalHarness {
    fn new(hold: Option<Receiver<()>>) -> Self {
        let (room, written) = (Arc::new(AtomicUsize::new(usize::MAX)), Arc::<Mutex<Vec<u8>>>::default());
        let disk = FakeDisk { room: Arc::clone(&room), hold, written: Arc::clone(&written) };
        let lost = TelemetryDropCounters::new();
        let file = JournalFile::with_output(Path::new("journal"), Box::new(disk), &lost).unwrap();
        Self { file, fleet: Fleet::new(), lost, room, written, turns: 0 }
    }

    /// Writes the next turn, without events.
    fn turn(&mut self, at: u64) {
        self.turns += 1;
        let line = journal::write_turn(Tick(at), &[]).unwrap();
        self.file.append(&line, Tick(at), &self.fleet);
    }

    fn dropped(&self) -> u64 {
        self.lost.journal_full.get() + self.lost.journal_failed.get()
    }

    fn until(&self, so: impl Fn(&Self) -> bool) {
        while !so(self) {
            thread::yield_now();
        }
    }

    /// Closes the journal; returns the lines, and the number of dropped turns in the last header.
    fn read(self) -> (Vec<JournalLine>, u64) {
        assert!(self.file.lines.close(Duration::from_secs(20)));
        let text = String::from_utf8(self.written.lock().unwrap().clone()).unwrap();
        let lines = journal::read(&text).unwrap();
        let dropped = lines.iter().rev().find_map(|line| match line {
            JournalLine::Header { dropped, .. } => Some(*dropped),
            JournalLine::Turn { .. } => None,
        });
        (lines, dropped.unwrap())
    }
}

fn turns(lines: &[JournalLine]) -> u64 {
    lines.iter().filter(|line| matches!(line, JournalLine::Turn { .. })).count() as u64
}

#[test]
fn a_disk_that_stands_still_holds_up_no_turn_and_what_that_costs_is_counted_and_told() {
    #[expect(clippy::disallowed_methods, reason = "a test's channel")]
    let (go_on, hold) = mpsc::channel();
    let mut harness = JournalHarness::new(Some(hold));
    for at in 0..10_000 {
        harness.turn(at);
    }
    let dropped = harness.dropped();
    assert!(dropped > 0 && harness.lost.journal_failed.get() == 0, "{dropped}");
    drop(go_on);
    harness.until(|world| world.file.queued_bytes.load(Ordering::Relaxed) == 0);
    harness.turn(20_000);
    harness.turn(20_001);
    assert_eq!(harness.dropped(), dropped, "it is written again");
    let told = harness.turns;
    let (lines, missing) = harness.read();
    // The state takes the place of a turn.
    assert_eq!((missing, turns(&lines)), (dropped, told - dropped));
    // There is one gap, or two if the thread started late.
    let story = transcript::render_transcript(&lines);
    let gaps =
        story.lines().filter_map(|line| line.strip_suffix(" turns are missing: they could not be written"));
    assert_eq!(gaps.map(|gap| gap.trim().parse::<u64>().unwrap()).sum::<u64>(), dropped, "{story}");
}

#[test]
fn a_full_disk_is_tried_again_and_the_journal_goes_on_behind_a_header() {
    let mut harness = JournalHarness::new(None);
    harness.turn(0);
    harness.until(|world| !world.written.lock().unwrap().is_empty());
    // The disk fills up in the middle of a line.
    harness.room.store(10, Ordering::Release);
    harness.turn(1);
    harness.until(|world| world.lost.journal_failed.get() == 1);
    // The state is tried at once, and then not at every turn.
    harness.turn(2);
    harness.until(|world| world.lost.journal_failed.get() == 2);
    for at in 3..100 {
        harness.turn(at);
    }
    assert_eq!(harness.lost.journal_failed.get(), 99);
    harness.room.store(usize::MAX, Ordering::Release);
    let dropped = harness.dropped();
    harness.turn(2000);
    harness.turn(2001);
    let (lines, missing) = harness.read();
    assert_eq!(missing, dropped);
    let header = |line: &JournalLine| matches!(line, JournalLine::Header { .. });
    assert_eq!(lines.iter().map(header).collect::<Vec<_>>(), [true, false, true, false, false]);
}

#[test]
fn only_a_regular_file_is_renamed_and_a_new_one_is_for_its_user_alone() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("file"), "before").unwrap();
    std::os::unix::fs::symlink(at("file"), at("link")).unwrap();
    nix::unistd::mkfifo(&at("pipe"), nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
    fs::create_dir(at("folder")).unwrap();
    for name in ["link", "pipe", "folder"] {
        let error = JournalFile::open(&at(name), &TelemetryDropCounters::new()).err().unwrap().to_string();
        assert!(error.contains("name a regular file or a file that does not exist yet"), "{error}");
        assert!(!at(&format!("{name}.1")).exists() && fs::symlink_metadata(at(name)).is_ok(), "{name}");
    }
    JournalFile::open(&at("file"), &TelemetryDropCounters::new()).unwrap();
    assert_eq!(fs::read_to_string(at("file.1")).unwrap(), "before");
    assert_eq!(fs::metadata(at("file")).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn a_file_that_is_full_is_turned_over_and_the_next_one_can_be_read_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let mut file = JournalFile::open(&path, &TelemetryDropCounters::new()).unwrap();
    let fleet = Fleet::new();
    let line = |at| journal::write_turn(Tick(at), &[]).unwrap();
    file.append(&line(1), Tick(1), &fleet);
    file.file_bytes = MAX_FILE_BYTES;
    file.append(&line(2), Tick(2), &fleet);
    file.append(&line(3), Tick(3), &fleet);
    assert!(file.lines.close(Duration::from_secs(20)));
    let ats = |path: &Path| -> Vec<u64> {
        let lines = journal::read(&fs::read_to_string(path).unwrap()).unwrap();
        lines.iter().map(|line| line.at().0).collect()
    };
    assert_eq!(ats(&path), [2, 2, 3]);
    // The thread of the old file may still be writing its last line.
    while fs::read_to_string(rotated_path(&path)).unwrap().lines().count() < 2 {
        thread::yield_now();
    }
    assert_eq!(ats(&rotated_path(&path)), [1, 1]);
}
