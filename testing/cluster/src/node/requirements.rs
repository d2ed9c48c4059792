//! Checks a node's requirements and names the packages that provide them. Reports all missing ones at once, and never
//! skips.

use std::{
    env,
    ffi::OsStr,
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};

/// Required programs, each with the Debian package that provides it.
const REQUIRED_PROGRAMS: &[(&str, &str)] = &[
    ("bash", "bash"),
    ("containerd", "containerd"),
    ("ctr", "containerd"),
    ("containerd-shim-runc-v2", "containerd"),
    ("runc", "runc"),
    ("docker-registry", "docker-registry"),
    ("ip", "iproute2"),
    ("mount", "mount"),
    ("mountpoint", "util-linux"),
    ("nsenter", "util-linux"),
    ("unshare", "util-linux"),
];
/// Where distributions and local builds install CNI plugins.
const PLUGIN_FOLDERS: [&str; 2] = ["/usr/lib/cni", "/opt/cni/bin"];
/// The plugins for the node's network.
const REQUIRED_PLUGINS: [&str; 3] = ["bridge", "host-local", "loopback"];

/// Checks all requirements.
///
/// # Errors
/// Lists everything that is missing and how to get it.
pub(super) fn check() -> Result<()> {
    let root = fs::metadata("/proc/self").context("/proc/self")?.uid() == 0;
    let missing_requirements =
        missing(root, Path::new("/sys/fs/cgroup"), &env::var_os("PATH").unwrap_or_default(), plugin_folder());
    if !missing_requirements.is_empty() {
        bail!("a node cannot run here. What is missing:\n  {}", missing_requirements.join("\n  "));
    }
    Ok(())
}

fn missing(root: bool, cgroups: &Path, path: &OsStr, plugins: Option<PathBuf>) -> Vec<String> {
    let mut missing_requirements = Vec::new();
    if !root {
        missing_requirements.push("root: a node creates namespaces, mounts and cgroups".to_owned());
    }
    if !["cgroup.controllers", "memory/cgroup.procs"].iter().any(|file| cgroups.join(file).exists()) {
        let cgroups = cgroups.display();
        missing_requirements
            .push(format!("cgroups: {cgroups} has neither version 2 nor version 1's memory controller"));
    }
    for (program, package) in REQUIRED_PROGRAMS {
        if !env::split_paths(path).any(|folder| folder.join(program).exists()) {
            missing_requirements.push(format!("{program}: apt-get install {package}"));
        }
    }
    if plugins.is_none() {
        missing_requirements.push(format!(
            "CNI's plugins {}: apt-get install containernetworking-plugins",
            REQUIRED_PLUGINS.join(", ")
        ));
    }
    missing_requirements
}

/// The folder with the CNI plugins.
pub(super) fn plugin_folder() -> Option<PathBuf> {
    let has_all =
        |folder: &&&str| REQUIRED_PLUGINS.iter().all(|plugin| Path::new(folder).join(plugin).exists());
    PLUGIN_FOLDERS.iter().find(has_all).map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_is_missing_is_said_at_once() {
        let nowhere = Path::new("/nowhere");
        let missing_requirements = missing(false, nowhere, nowhere.as_os_str(), None);
        let named = |words: &str| missing_requirements.iter().any(|line| line.contains(words));
        for words in
            ["root", "cgroups", "apt-get install runc", "apt-get install containernetworking-plugins"]
        {
            assert!(named(words), "{words} is not in {missing_requirements:?}");
        }
        assert_eq!(missing_requirements.len(), REQUIRED_PROGRAMS.len() + 3);

        let here = tempfile::tempdir().unwrap();
        for program in REQUIRED_PROGRAMS.iter().map(|(program, _)| program).chain(&["cgroup.controllers"]) {
            fs::write(here.path().join(program), "").unwrap();
        }
        let missing_requirements = missing(true, here.path(), here.path().as_os_str(), Some(nowhere.into()));
        assert_eq!(missing_requirements, Vec::<String>::new());
    }
}
