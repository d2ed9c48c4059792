//! Maintains an AcceleratorNode for each node of a used pool, in line with the pools' ledgers.

use std::{cmp::Ordering, collections::BTreeMap};

use kube::{Api, ResourceExt as _};
use serde_json::json;

use super::{StatusTarget, StatusWriteTasks, StatusWriter, WriteCompletion};
use crate::{
    crd::{
        AcceleratorNode, AcceleratorNodeStatus,
        ledger::{Ledger, Reservation},
    },
    index::{ClusterIndex, Resolved, ResolvedNode},
    status,
    writer::{Error, ObjectWriter},
};

/// The last seen state of an AcceleratorNode.
#[derive(Clone, Debug)]
pub(super) struct StoredNode {
    version: Option<String>,
    generation: Option<i64>,
    pool: Option<String>,
    status: AcceleratorNodeStatus,
}

/// Reservations on each node, from all pools.
pub(super) type ReservationsByNode<'a> = BTreeMap<&'a str, Vec<&'a Reservation>>;

pub(super) fn reservations_by_node<'a>(
    index: &'a ClusterIndex,
    resolved: &'a Resolved,
) -> ReservationsByNode<'a> {
    let ledgers = resolved.pools.keys().filter_map(|pool| Some(&index.pool_status(pool)?.ledger));
    let mut rows = ReservationsByNode::new();
    for reservation in ledgers.flat_map(|ledger| &ledger.reservations) {
        if let Some(node) = &reservation.node {
            rows.entry(node).or_default().push(reservation);
        }
    }
    rows
}

impl StatusWriter {
    /// Records a new version of an AcceleratorNode.
    pub(crate) fn node_applied(&mut self, node: &AcceleratorNode) {
        let status = node.status.clone().unwrap_or_default();
        let (version, generation) = (node.resource_version(), node.metadata.generation);
        let stored = StoredNode { version, generation, pool: node.spec.pool.clone(), status };
        self.nodes.insert(node.name_any(), stored);
        self.due.insert(StatusTarget::Node(node.name_any()));
    }

    /// Forgets a deleted AcceleratorNode and marks its node as due, which recreates the object.
    pub(crate) fn node_deleted(&mut self, name: &str) {
        self.nodes.remove(name);
        self.due.insert(StatusTarget::Node(name.to_owned()));
    }

    /// Returns the names of the existing AcceleratorNodes.
    pub(crate) fn known_nodes(&self) -> impl Iterator<Item = &String> {
        self.nodes.keys()
    }

    /// Marks a changed pool as due, and the nodes whose reservations differ between `before` and `after`.
    ///
    /// This also reverts manual edits of fields that Rouse manages.
    pub(crate) fn pool_applied(&mut self, name: &str, before: Option<&Ledger>, after: Option<&Ledger>) {
        self.due.insert(StatusTarget::Pool(name.to_owned()));
        let [before, after] =
            [before, after].map(|ledger| ledger.map_or(&[][..], |ledger| &ledger.reservations));
        self.due
            .extend(changed_nodes(before, after).into_iter().map(|node| StatusTarget::Node(node.to_owned())));
    }

    pub(super) fn node(
        &mut self,
        resolved: &Resolved,
        rows: &ReservationsByNode<'_>,
        name: &str,
        tasks: &mut StatusWriteTasks,
    ) {
        let nowhere = ResolvedNode::default();
        let resolved_node = resolved.nodes.get(name).unwrap_or(&nowhere);
        let reservations = rows.get(name).map(Vec::as_slice).unwrap_or_default();
        let stored = self.nodes.get(name);
        let used = resolved_node.pool.as_ref().is_some_and(|pool| self.used_pools.contains(pool));
        // A node agent lists accelerators in an object that exists, and may not create it.
        let has = resolved_node.accelerators > 0 || resolved_node.slots.is_some() || !reservations.is_empty();
        if stored.is_none() && !(used && has) {
            return;
        }
        let now = self.clock.now();
        let write = match stored {
            None => NodeWrite::Make { owner: resolved_node.uid.clone(), pool: resolved_node.pool.clone() },
            Some(stored) if stored.pool != resolved_node.pool => {
                NodeWrite::Move { version: stored.version.clone(), pool: resolved_node.pool.clone() }
            }
            Some(stored) => {
                let (before, generation) = (&stored.status, stored.generation);
                let desired = status::node_status(resolved_node, reservations, generation, before, now);
                if !status::node_differs(before, &desired) {
                    return;
                }
                NodeWrite::Status { version: stored.version.clone(), status: Box::new(desired) }
            }
        };
        let api: Api<AcceleratorNode> = Api::all(self.client.clone());
        let (writer, what) = (self.writer.clone(), StatusTarget::Node(name.to_owned()));
        self.writing.insert(what.clone());
        let name = name.to_owned();
        tasks.spawn(async move {
            let outcome = write.execute(&writer, &api, &name).await;
            WriteCompletion::Write(what, outcome, None)
        });
    }
}

/// One write to an AcceleratorNode. The watch delivers its result, and then the next write is chosen.
enum NodeWrite {
    /// `owner`: uid of the Node, with which Kubernetes deletes the object.
    Make {
        owner: Option<String>,
        pool: Option<String>,
    },
    Move {
        version: Option<String>,
        pool: Option<String>,
    },
    Status {
        version: Option<String>,
        status: Box<AcceleratorNodeStatus>,
    },
}

impl NodeWrite {
    async fn execute(
        self,
        writer: &ObjectWriter,
        api: &Api<AcceleratorNode>,
        name: &str,
    ) -> Result<(), Error> {
        let written = match self {
            Self::Make { owner, pool } => {
                let owner =
                    owner.map(|uid| json!([{"apiVersion": "v1", "kind": "Node", "name": name, "uid": uid}]));
                let object = json!({
                    "apiVersion": "rouse.dev/v1alpha1",
                    "kind": "AcceleratorNode",
                    "metadata": {"name": name, "ownerReferences": owner},
                    "spec": {"pool": pool},
                });
                writer.create(api, &object).await
            }
            Self::Move { version, pool } => {
                let patch = json!({"metadata": {"resourceVersion": version}, "spec": {"pool": pool}});
                writer.patch_merge(api, name, &patch).await
            }
            Self::Status { version, status } => {
                let object = json!({
                    "apiVersion": "rouse.dev/v1alpha1",
                    "kind": "AcceleratorNode",
                    "metadata": {"name": name, "resourceVersion": version},
                    "status": status,
                });
                writer.apply_status(api, name, &object).await
            }
        };
        written.map(drop)
    }
}

/// Returns the nodes of all reservations that were added, removed or changed. Both lists are sorted by id.
fn changed_nodes<'a>(before: &'a [Reservation], after: &'a [Reservation]) -> Vec<&'a str> {
    let (mut before, mut after) = (before.iter().peekable(), after.iter().peekable());
    let mut nodes = Vec::new();
    let mut note = |reservation: Option<&'a Reservation>| {
        nodes.extend(reservation.and_then(|reservation| reservation.node.as_deref()));
    };
    loop {
        let order = match (before.peek(), after.peek()) {
            (None, None) => return nodes,
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some(old), Some(new)) if old == new => {
                before.next();
                after.next();
                continue;
            }
            (Some(old), Some(new)) => old.id.cmp(&new.id),
        };
        if order != Ordering::Greater {
            note(before.next());
        }
        if order != Ordering::Less {
            note(after.next());
        }
    }
}
