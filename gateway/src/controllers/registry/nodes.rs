//! AcceleratorNodes: made for each node of a pool that is used, and kept as the pools' ledgers have it.

use std::{cmp::Ordering, collections::BTreeMap};

use kube::{Api, ResourceExt as _};
use serde_json::json;

use super::{Ended, Registry, What};
use crate::controllers::{
    crd::{
        AcceleratorNode, AcceleratorNodeStatus,
        ledger::{Ledger, Reservation},
    },
    index::{Index, NodePlace, Settled},
    status,
    writer::{Error, Writer},
};

/// An AcceleratorNode as it was last seen.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    version: Option<String>,
    generation: Option<i64>,
    pool: Option<String>,
    status: AcceleratorNodeStatus,
}

/// What is reserved on each node, whichever pool's it is.
pub(super) type Rows<'a> = BTreeMap<&'a str, Vec<&'a Reservation>>;

pub(super) fn rows<'a>(index: &'a Index, settled: &'a Settled) -> Rows<'a> {
    let ledgers = settled.pools.keys().filter_map(|pool| Some(&index.pool_status(pool)?.ledger));
    let mut rows = Rows::new();
    for reservation in ledgers.flat_map(|ledger| &ledger.reservations) {
        if let Some(node) = &reservation.node {
            rows.entry(node).or_default().push(reservation);
        }
    }
    rows
}

impl Registry {
    /// This version of an AcceleratorNode was seen.
    pub fn saw_node(&mut self, node: &AcceleratorNode) {
        let status = node.status.clone().unwrap_or_default();
        let (version, generation) = (node.resource_version(), node.metadata.generation);
        let stored = Stored { version, generation, pool: node.spec.pool.clone(), status };
        self.nodes.insert(node.name_any(), stored);
        self.due.insert(What::Node(node.name_any()));
    }

    /// The AcceleratorNode is gone. Its node's next one is made anew.
    pub fn lost_node(&mut self, name: &str) {
        self.nodes.remove(name);
        self.due.insert(What::Node(name.to_owned()));
    }

    /// The AcceleratorNodes that there are.
    pub fn known_nodes(&self) -> impl Iterator<Item = &String> {
        self.nodes.keys()
    }

    /// This version of a pool was seen, whose ledger was this before and is that. Whoever writes by hand what is not for hands
    /// is corrected.
    pub fn saw_pool(&mut self, name: &str, before: Option<&Ledger>, after: Option<&Ledger>) {
        self.due.insert(What::Pool(name.to_owned()));
        let [before, after] =
            [before, after].map(|ledger| ledger.map_or(&[][..], |ledger| &ledger.reservations));
        self.due.extend(moved(before, after).into_iter().map(|node| What::Node(node.to_owned())));
    }

    pub(super) fn node(&mut self, settled: &Settled, rows: &Rows<'_>, name: &str) {
        let nowhere = NodePlace::default();
        let place = settled.nodes.get(name).unwrap_or(&nowhere);
        let reservations = rows.get(name).map(Vec::as_slice).unwrap_or_default();
        let stored = self.nodes.get(name);
        let used = place.pool.as_ref().is_some_and(|pool| self.pools.contains(pool));
        let has = place.accelerators > 0 || !reservations.is_empty();
        if stored.is_none() && !(used && has) {
            return;
        }
        let now = self.clock.now();
        let write = match stored {
            None => Write::Make { owner: place.uid.clone(), pool: place.pool.clone() },
            Some(stored) if stored.pool != place.pool => {
                Write::Move { version: stored.version.clone(), pool: place.pool.clone() }
            }
            Some(stored) => {
                let (before, generation) = (&stored.status, stored.generation);
                let wanted = status::node_status(place, reservations, generation, before, now);
                if !status::node_differs(before, &wanted) {
                    return;
                }
                Write::Status { version: stored.version.clone(), status: Box::new(wanted) }
            }
        };
        let api: Api<AcceleratorNode> = Api::all(self.client.clone());
        let (writer, what) = (self.writer.clone(), What::Node(name.to_owned()));
        self.writing.insert(what.clone());
        let name = name.to_owned();
        self.writes.spawn(async move {
            let outcome = write.carry_out(&writer, &api, &name).await;
            Ended::Write(what, outcome, None)
        });
    }
}

/// One write. What it makes of the object comes back by the watch, and then the next is looked for.
enum Write {
    /// The Node, by its uid: with it the object goes.
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

impl Write {
    async fn carry_out(self, writer: &Writer, api: &Api<AcceleratorNode>, name: &str) -> Result<(), Error> {
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
                writer.merge(api, name, &patch).await
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

/// The nodes of all reservations that are not in both, as they are. Both are in the order of their ids.
fn moved<'a>(before: &'a [Reservation], after: &'a [Reservation]) -> Vec<&'a str> {
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
