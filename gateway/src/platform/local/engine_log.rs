//! Engine logs: files that the engines append to themselves. A pipe would break when the gateway exits, and an engine
//! that then writes would die of it.

use std::{
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom, Write},
    os::unix::{fs::OpenOptionsExt, process::ExitStatusExt},
    path::{Path, PathBuf},
    process::ExitStatus,
};

use rouse::{
    fault::FailureCause,
    model::EngineId,
    units::{Bytes, Generation},
};

const LAUNCH_HEADER: &str = "=== rouse:";
/// Bytes read from the end of a log to find out why its engine died.
const TAIL_BYTES: u64 = 64 << 10;

/// Returns the path of an engine's log: `<state>/logs/<model>-<replica>.log`.
///
/// Bytes that a file name cannot hold become `%XX`, so two models never share a file.
pub(super) fn path(state: &Path, engine: &EngineId) -> PathBuf {
    let mut name = String::new();
    for (at, byte) in engine.model.as_str().bytes().enumerate() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_') || (byte == b'.' && at > 0) {
            name.push(char::from(byte));
        } else {
            name.push_str(&format!("%{byte:02X}"));
        }
    }
    name.push_str(&format!("-{}.log", engine.replica));
    state.join("logs").join(name)
}

/// Returns the launch's name in its header line.
pub(super) fn launch_label(engine: &EngineId, generation: Generation) -> String {
    format!("{engine}, generation {generation},")
}

/// Opens the log for appending and writes the launch's header line.
pub(super) fn open_for_launch(path: &Path, launch: &str) -> io::Result<File> {
    // Engines may log what clients sent, so only the gateway's user may read the file.
    let mut file = File::options().create(true).append(true).mode(0o600).open(path)?;
    writeln!(file, "{LAUNCH_HEADER} {launch} ===")?;
    Ok(file)
}

/// Returns the last lines of this launch; empty if its log could not be opened.
pub(super) fn read_tail(path: &Path, launch: &str) -> String {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
        let mut text = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut text)?;
        Ok(text)
    };
    let text = read().unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    match text.rsplit_once(LAUNCH_HEADER) {
        // The rest of that line belongs to the header.
        Some((_, last)) if last.trim_start().starts_with(launch) => {
            last.split_once('\n').map_or_else(String::new, |(_, said)| said.to_owned())
        }
        Some(_) => String::new(),
        None => text.into_owned(),
    }
}

/// Returns the last line that is not blank.
pub(super) fn last_line(tail: &str) -> Option<String> {
    tail.lines().rev().map(str::trim).find(|line| !line.is_empty()).map(str::to_owned)
}

/// Returns why an engine ended. `status` is `None` for processes that are not our children.
///
/// Log lines take precedence over the exit code: runtimes exit with 1 for everything.
pub(super) fn exit_cause(status: Option<ExitStatus>, tail: &str) -> FailureCause {
    const MEMORY: [&str; 3] =
        ["out of memory", "outofmemoryerror", "no available memory for the cache blocks"];
    const PORT: [&str; 3] = ["address already in use", "address in use", "errno 98"];
    let orderly = status.is_some_and(|status| status.success());
    let tail = tail.to_lowercase();
    if !orderly && MEMORY.iter().any(|pattern| tail.contains(pattern)) {
        return FailureCause::OutOfMemory;
    }
    if !orderly && PORT.iter().any(|pattern| tail.contains(pattern)) {
        return FailureCause::PortTaken;
    }
    match status {
        Some(status) => match (status.code(), status.signal()) {
            (Some(code), _) => FailureCause::Exited(code),
            (None, Some(signal)) => FailureCause::Killed(signal),
            (None, None) => FailureCause::Exited(-1),
        },
        None => FailureCause::Exited(-1),
    }
}

/// Trims a log that has outgrown `cap` to its last `cap / 2` bytes.
///
/// Copies the end to another file, truncates the log and appends the end again. The engine keeps writing at the new
/// end, because it appends. Lines that it writes during the copy may be lost or misplaced; the alternative is an engine
/// that must reopen its output on demand.
pub(super) fn trim(path: &Path, cap: Bytes) -> io::Result<bool> {
    let length = match fs::metadata(path) {
        Ok(metadata) => metadata.len(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    if length <= cap.0 {
        return Ok(false);
    }
    let aside = path.with_extension("log.keep");
    let mut log = File::options().read(true).append(true).open(path)?;
    log.seek(SeekFrom::Start(length - cap.0 / 2))?;
    let mut kept_tail =
        File::options().create(true).truncate(true).read(true).write(true).mode(0o600).open(&aside)?;
    io::copy(&mut (&log).take(cap.0 / 2), &mut kept_tail)?;
    log.set_len(0)?;
    kept_tail.rewind()?;
    io::copy(&mut kept_tail, &mut log)?;
    fs::remove_file(&aside)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_no_file_can_have_become_different_files() {
        let path = |model: &str| path(Path::new("/s"), &EngineId::new(model.into(), 0));
        assert_eq!(path("Qwen/Qwen3-8B"), Path::new("/s/logs/Qwen%2FQwen3-8B-0.log"));
        assert_eq!(path("../x"), Path::new("/s/logs/%2E.%2Fx-0.log"));
        assert_ne!(path("a/b"), path("a%2Fb"));
    }

    #[test]
    fn what_an_engine_said_last_tells_why_it_died() {
        let failed = Some(ExitStatus::from_raw(1 << 8));
        let memory = "torch.OutOfMemoryError: CUDA out of memory.";
        assert_eq!(exit_cause(failed, memory), FailureCause::OutOfMemory);
        assert_eq!(exit_cause(Some(ExitStatus::from_raw(9)), memory), FailureCause::OutOfMemory);
        assert_eq!(exit_cause(failed, "OSError: [Errno 98] Address already in use"), FailureCause::PortTaken);
        assert_eq!(exit_cause(failed, "ValueError"), FailureCause::Exited(1));
        assert_eq!(exit_cause(Some(ExitStatus::from_raw(9)), ""), FailureCause::Killed(9));
        assert_eq!(
            exit_cause(Some(ExitStatus::from_raw(0)), "out of memory, went on"),
            FailureCause::Exited(0)
        );
    }

    #[test]
    fn only_the_present_launch_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m-0.log");
        let launch = |generation| launch_label(&EngineId::new("m".into(), 0), Generation(generation));
        for (generation, text) in [(1, "out of memory\n"), (2, "fine\n")] {
            let mut file = open_for_launch(&path, &format!("{} at noon", launch(generation))).unwrap();
            file.write_all(text.as_bytes()).unwrap();
        }
        let last = read_tail(&path, &launch(2));
        assert!(last.contains("fine") && !last.contains("memory"), "{last}");
        assert_eq!(read_tail(&path, &launch(3)), "", "it could not be begun");
        assert_eq!(last_line("Traceback:\n  x\nNo module named 'x'\n \n").unwrap(), "No module named 'x'");
        drop(open_for_launch(&path, &launch(3)).unwrap());
        assert_eq!(last_line(&read_tail(&path, &launch(3))), None, "a launch that said nothing yet");
    }

    #[test]
    fn a_log_that_outgrew_its_cap_keeps_its_end_and_its_writer() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m-0.log");
        let mut writer = File::options().create(true).append(true).open(&path).unwrap();
        for n in 0..1000 {
            writeln!(writer, "line {n:04}").unwrap();
        }
        assert!(trim(&path, Bytes(2000)).unwrap());
        writeln!(writer, "after").unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.ends_with("line 0999\nafter\n") && text.len() <= 1006, "{text}");
        assert!(!trim(&path, Bytes(2000)).unwrap());
    }
}
