//! The cgroup for the kubelet's Pods.
//!
//! It belongs to this machine because, unlike a namespace, a cgroup does not disappear with its processes. Version 1
//! has one for each controller.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

use crate::resources::ClusterResources;

const CGROUP_ROOT: &str = "/sys/fs/cgroup";

pub(super) struct PodsCgroup {
    name: String,
}

impl PodsCgroup {
    /// The cgroup of a cluster. The cluster's watchdog removes it if nothing else does.
    pub(super) fn of_cluster(resources: &ClusterResources) -> Self {
        Self { name: resources.name() }
    }

    /// Creates the kubelet's `cgroupRoot`, which must exist before the kubelet starts.
    pub(super) fn make(&self) -> Result<()> {
        if let Ok(controllers) = fs::read_to_string(Path::new(CGROUP_ROOT).join("cgroup.controllers")) {
            // A child has only the controllers that its parent delegates.
            let all: Vec<_> = controllers.split_whitespace().map(|name| format!("+{name}")).collect();
            let passed_on = Path::new(CGROUP_ROOT).join("cgroup.subtree_control");
            fs::write(&passed_on, all.join(" ")).with_context(|| passed_on.display().to_string())?;
        }
        for hierarchy in hierarchies()? {
            let group = hierarchy.join(&self.name);
            fs::create_dir(&group).with_context(|| group.display().to_string())?;
        }
        Ok(())
    }

    /// Returns the pids on this machine of the Pod with this uid.
    pub(super) fn processes(&self, uid: &str) -> Result<Vec<i32>> {
        let mut found = Vec::new();
        for hierarchy in hierarchies()? {
            let mut inside = Vec::new();
            walk(&hierarchy.join(&self.name), &mut inside)
                .with_context(|| hierarchy.display().to_string())?;
            let of_it =
                |group: &&PathBuf| group.iter().any(|part| part.to_str() == Some(&format!("pod{uid}")));
            for group in inside.iter().filter(of_it) {
                // A cgroup removed meanwhile has no processes.
                let pids = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
                found.extend(pids.lines().filter_map(|pid| pid.parse::<i32>().ok()));
            }
        }
        found.sort_unstable();
        found.dedup();
        Ok(found)
    }

    /// Removes the cgroup and its descendants, which must have no processes.
    pub(super) fn remove(&self) -> Result<()> {
        for hierarchy in hierarchies()? {
            let mut inside = Vec::new();
            walk(&hierarchy.join(&self.name), &mut inside)?;
            for group in inside {
                fs::remove_dir(&group).with_context(|| group.display().to_string())?;
            }
        }
        Ok(())
    }
}

/// Where cgroups can be created: the root of version 2, or each controller's root.
fn hierarchies() -> Result<Vec<PathBuf>> {
    if Path::new(CGROUP_ROOT).join("cgroup.controllers").exists() {
        return Ok(vec![CGROUP_ROOT.into()]);
    }
    let mut found = Vec::new();
    for entry in fs::read_dir(CGROUP_ROOT).context(CGROUP_ROOT)? {
        let entry = entry?;
        // Links are other names of controllers that share a hierarchy.
        if entry.file_type()?.is_dir() && entry.path().join("cgroup.procs").exists() {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// Collects this cgroup and its descendants, innermost first.
fn walk(group: &Path, into: &mut Vec<PathBuf>) -> io::Result<()> {
    let entries = match fs::read_dir(group) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            walk(&entry.path(), into)?;
        }
    }
    into.push(group.to_owned());
    Ok(())
}
