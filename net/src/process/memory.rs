//! Reads the RAM of processes.

use std::{fs, io};

use rouse::units::Bytes;

/// Returns the RAM of these processes, where a page that several processes map counts once in total (PSS).
///
/// A process that has ended counts as nothing.
///
/// # Errors
/// Another user owns a process, or the kernel does not report this.
pub fn proportional_set_size(pids: &[i32]) -> io::Result<Bytes> {
    let mut sum = Bytes::ZERO;
    for pid in pids {
        match fs::read_to_string(format!("/proc/{pid}/smaps_rollup")) {
            Ok(text) => sum += parse_pss(&text).ok_or(io::ErrorKind::InvalidData)?,
            Err(error) if is_end_of_process(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(sum)
}

/// The file of a process that ends is there, but cannot be read.
fn is_end_of_process(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(nix::libc::ESRCH)
}

fn parse_pss(text: &str) -> Option<Bytes> {
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    let kib: u64 = line.split_ascii_whitespace().next()?.parse().ok()?;
    Some(Bytes(kib << 10))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_of_a_process_is_read_and_one_that_is_gone_has_none() {
        let text = "55d0-7ffe ---p 00000000 00:00 0 [rollup]\nRss:  900 kB\nPss:   512 kB\nPss_Anon: 1 kB\n";
        assert_eq!(parse_pss(text), Some(Bytes(512 << 10)));
        assert_eq!(parse_pss("Rss: 1 kB\n"), None);
        let me = i32::try_from(std::process::id()).unwrap();
        let own = proportional_set_size(&[me]).unwrap();
        assert!(own > Bytes::mib(1), "{own}");
        assert_eq!(proportional_set_size(&[i32::MAX]).unwrap(), Bytes::ZERO);
    }
}
