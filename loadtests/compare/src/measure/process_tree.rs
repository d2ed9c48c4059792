//! Processes and their descendants.

use std::{collections::BTreeMap, fs, io};

use super::if_alive;

/// Returns a process and its descendants, itself first; empty if it has ended.
///
/// Errors: the process table cannot be read.
pub(crate) fn tree(root: u32) -> io::Result<Vec<u32>> {
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    let mut there = false;
    for (pid, parent) in all()? {
        there |= pid == root;
        children.entry(parent).or_default().push(pid);
    }
    let mut found = if there { vec![root] } else { Vec::new() };
    let mut at = 0;
    while let Some(pid) = found.get(at) {
        found.extend(children.remove(pid).unwrap_or_default());
        at += 1;
    }
    Ok(found)
}

/// Returns the current children of `parent`, adopted orphans included.
///
/// Errors: the process table cannot be read.
pub(crate) fn children(parent: u32) -> io::Result<Vec<u32>> {
    Ok(all()?.into_iter().filter(|(_, of)| *of == parent).map(|(pid, _)| pid).collect())
}

/// Returns all processes, each with its parent.
fn all() -> io::Result<Vec<(u32, u32)>> {
    let mut all = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let Some(stat) = if_alive(fs::read_to_string(format!("/proc/{pid}/stat")))? else { continue };
        all.extend(parent(&stat).map(|parent| (pid, parent)));
    }
    Ok(all)
}

/// Parses the parent. The preceding name is the program's own choice and may contain blanks and parentheses.
fn parent(stat: &str) -> Option<u32> {
    let (_, rest) = stat.rsplit_once(") ")?;
    rest.split(' ').nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::process::{self, Command, Stdio};

    use super::*;

    #[test]
    fn grandchildren_belong_to_a_tree() {
        let mut shell = Command::new("sh");
        shell.args(["-c", "sleep 30 & echo; wait"]).stdout(Stdio::piped());
        let mut shell = shell.spawn().unwrap();
        // This line shows that the grandchild runs.
        let mut line = String::new();
        io::BufRead::read_line(&mut io::BufReader::new(shell.stdout.take().unwrap()), &mut line).unwrap();
        let found = tree(shell.id()).unwrap();
        assert_eq!((found.len(), found[0]), (2, shell.id()));
        assert!(tree(process::id()).unwrap().contains(&found[1]));
        for pid in found {
            Command::new("kill").arg(pid.to_string()).status().unwrap();
        }
        shell.wait().unwrap();
        assert!(tree(shell.id()).unwrap().is_empty());
    }

    #[test]
    fn a_parent_is_found_behind_any_name() {
        assert_eq!(parent("12 (a) b) ) S 7 12"), Some(7));
        assert_eq!(parent("12"), None);
    }
}
