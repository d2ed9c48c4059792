//! The cgroup that the kubelet puts its Pods into: one of this machine's, since cgroups have no namespace that goes with a
//! process. Version 1 has one for each controller.

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
    /// That of a cluster. The cluster's watchdog removes it where nobody else does.
    pub(super) fn of_cluster(ground: &ClusterResources) -> Self {
        Self { name: ground.name() }
    }

    /// What the kubelet's `cgroupRoot` is; it must be there before the kubelet is.
    pub(super) fn make(&self) -> Result<()> {
        if let Ok(controllers) = fs::read_to_string(Path::new(CGROUP_ROOT).join("cgroup.controllers")) {
            // A child has only what its parent passes on.
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

    /// The processes of the Pod with this uid, as this machine knows them.
    pub(super) fn processes(&self, uid: &str) -> Result<Vec<i32>> {
        let mut found = Vec::new();
        for hierarchy in hierarchies()? {
            let mut inside = Vec::new();
            walk(&hierarchy.join(&self.name), &mut inside)
                .with_context(|| hierarchy.display().to_string())?;
            let of_it =
                |group: &&PathBuf| group.iter().any(|part| part.to_str() == Some(&format!("pod{uid}")));
            for group in inside.iter().filter(of_it) {
                // A group that has gone meanwhile has no processes.
                let pids = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
                found.extend(pids.lines().filter_map(|pid| pid.parse::<i32>().ok()));
            }
        }
        found.sort_unstable();
        found.dedup();
        Ok(found)
    }

    /// Removes it with all that is in it, in which nobody may live any more.
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

/// Where cgroups can be made: the root of version 2, or that of each controller.
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

/// This group and those in it, the innermost first.
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
