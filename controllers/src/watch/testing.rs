//! What a watch reports, in few words.

use kube::Resource;

use super::Delta;

/// Returns the names of observed objects; a deleted one has `-` before its name.
pub(crate) fn names<K: Resource>(delta: &Delta<K>) -> Vec<String> {
    match delta {
        Delta::All { objects, .. } => objects.iter().map(|found| found.name().name).collect(),
        Delta::Applied(found) => vec![found.name().name],
        Delta::Deleted(name) => vec![format!("-{}", name.name)],
    }
}
