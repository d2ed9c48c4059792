//! Locates the servers' programs by running `testing/cluster/build`, the only place that knows their names.

use std::{collections::BTreeMap, path::PathBuf, process::Command};

use anyhow::{Context as _, Result, bail};

/// Returns the path of kubectl, of the version of the cluster.
///
/// # Errors
/// It is not built.
pub fn kubectl() -> Result<PathBuf> {
    find("ring2")?.remove("kubectl").context("testing/cluster/build does not list kubectl")
}

/// Returns the programs of a ring by name.
///
/// # Errors
/// A program is missing; the error is the script's message.
pub(crate) fn find(ring: &str) -> Result<BTreeMap<String, PathBuf>> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/build");
    let asked = Command::new(script).args(["--list", ring]).output().with_context(|| script.to_owned())?;
    if !asked.status.success() {
        bail!("{}", String::from_utf8_lossy(&asked.stderr).trim());
    }
    let listed = String::from_utf8(asked.stdout).context("testing/cluster/build --list")?;
    Ok(listed
        .lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(name, path)| (name.to_owned(), path.into()))
        .collect())
}
