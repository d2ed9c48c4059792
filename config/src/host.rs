//! Reads how much RAM this process and its engines may use, and other files of the system.

use std::{
    fs,
    path::{Path, PathBuf},
};

use rouse::units::Bytes;

/// The system's files; a test has them below a folder of its own.
#[derive(Clone, Debug)]
pub struct SystemFiles(PathBuf);

impl SystemFiles {
    #[must_use]
    pub fn below(root: &Path) -> Self {
        Self(root.to_owned())
    }

    /// Returns where the file with this absolute path is.
    #[must_use]
    pub fn path(&self, absolute: &str) -> PathBuf {
        self.0.join(absolute.trim_start_matches('/'))
    }

    /// Returns the file's text; `None` if it cannot be read.
    #[must_use]
    pub fn read(&self, absolute: &str) -> Option<String> {
        fs::read_to_string(self.path(absolute)).ok()
    }
}

impl Default for SystemFiles {
    fn default() -> Self {
        Self(PathBuf::from("/"))
    }
}

/// RAM of this machine, and the part of it that is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostMemory {
    pub total: Bytes,
    /// The lowest limit of the control groups that this process is in.
    pub limit: Option<Bytes>,
}

impl HostMemory {
    /// Reads RAM and limits; `None` if the kernel does not report the RAM.
    #[must_use]
    pub fn read(files: &SystemFiles) -> Option<Self> {
        let text = files.read("/proc/meminfo")?;
        let line = text.lines().find(|line| line.starts_with("MemTotal:"))?;
        let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
        let total = Bytes(kib.saturating_mul(1 << 10));
        Some(Self { total, limit: control_group_limit(files).filter(|limit| *limit < total) })
    }

    /// Returns what may be used: all of the RAM, or less in a control group with a limit.
    #[must_use]
    pub fn usable(&self) -> Bytes {
        self.limit.map_or(self.total, |limit| limit.min(self.total))
    }
}

/// Returns the lowest memory limit of this process's control groups and of the groups above them.
fn control_group_limit(files: &SystemFiles) -> Option<Bytes> {
    let groups = files.read("/proc/self/cgroup")?;
    let limits = groups.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, group) = (fields.next()?, fields.next()?);
        // Version 2 has one hierarchy, whose line names no controllers.
        let (mount, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => return None,
        };
        Path::new(group).ancestors().filter_map(|group| limit_of(files, mount, group, file)).min()
    });
    limits.min()
}

fn limit_of(files: &SystemFiles, mount: &str, group: &Path, file: &str) -> Option<Bytes> {
    let group = group.to_str()?.trim_matches('/');
    let path = if group.is_empty() { format!("{mount}/{file}") } else { format!("{mount}/{group}/{file}") };
    // `max` is no limit.
    files.read(&path)?.trim().parse().ok().map(Bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn system(files: &[(&str, &str)]) -> (tempfile::TempDir, SystemFiles) {
        let root = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = root.path().join(path.trim_start_matches('/'));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        let files = SystemFiles::below(root.path());
        (root, files)
    }

    const MEMINFO: (&str, &str) = ("/proc/meminfo", "MemTotal:       16777216 kB\nMemFree: 1 kB\n");

    #[test]
    fn the_lowest_limit_of_a_group_and_those_above_counts() {
        let (_root, files) = system(&[
            MEMINFO,
            ("/proc/self/cgroup", "0::/system.slice/rouse.service\n"),
            ("/sys/fs/cgroup/system.slice/memory.max", "4294967296\n"),
            ("/sys/fs/cgroup/system.slice/rouse.service/memory.max", "max\n"),
        ]);
        let memory = HostMemory::read(&files).unwrap();
        assert_eq!(memory, HostMemory { total: Bytes::gib(16), limit: Some(Bytes::gib(4)) });
        assert_eq!(memory.usable(), Bytes::gib(4));
    }

    #[test]
    fn the_first_version_of_control_groups_is_read_and_its_number_for_none_is_no_limit() {
        let group = ("/proc/self/cgroup", "3:cpu,cpuacct:/a\n2:memory:/docker/x\n");
        let limit = "/sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes";
        let (_root, files) = system(&[MEMINFO, group, (limit, "1073741824\n")]);
        assert_eq!(HostMemory::read(&files).unwrap().limit, Some(Bytes::gib(1)));
        let (_root, files) = system(&[MEMINFO, group, (limit, "9223372036854771712\n")]);
        assert_eq!(HostMemory::read(&files).unwrap().limit, None);
    }

    #[test]
    fn without_control_groups_all_of_the_ram_is_usable() {
        let (_root, files) = system(&[MEMINFO]);
        assert_eq!(HostMemory::read(&files).unwrap().usable(), Bytes::gib(16));
        let (_root, files) = system(&[]);
        assert_eq!(HostMemory::read(&files), None);
    }
}
