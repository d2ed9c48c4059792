//! The packed form: two tables of texts.
//!
//! * `nodes`: a row for each node with something on it: its name, then its accelerators. `GPU-` and a UUID is 22
//!   characters, any other name is itself behind a `=`.
//! * `groups`: a row for all reservations of a model that have the same state and sizes: the model, the state, the
//!   number of accelerators, bytes, host bytes, and the engines. An engine is the difference of its id to that of the
//!   one before, its replica, when it came into its state (seconds, as a difference, too), its node's row from 1 or 0,
//!   how many accelerators are known, and which of that row.

use std::collections::{BTreeMap, BTreeSet};

use rouse::{
    model::AcceleratorId,
    units::{Bytes, Tick},
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    Ledger, ObjectName, Reservation, ReservationState,
    digits::{self, Reader},
};

/// Why a packed ledger cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the ledger was written by something else than Rouse: a row has {0} parts")]
    Row(usize),
    #[error("the ledger was written by something else than Rouse: digits that are no number")]
    Digits,
    #[error(
        "the ledger was written by something else than Rouse: '{0}' is no namespace/name, state or number"
    )]
    Part(String),
    #[error(
        "the ledger was written by something else than Rouse: it names a node or accelerator that it does not list"
    )]
    Unknown,
    #[error(
        "the ledger was written by something else than Rouse: the id {0} is there twice, or is still to be given"
    )]
    Id(u64),
}

/// Every reservation, packed; AcceleratorNodes have them in a readable form.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct Packed {
    /// The id of the next reservation.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    next: u64,
    /// A row for each node that something is reserved on: its name and its accelerators.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    nodes: Vec<Vec<String>>,
    /// A row for each model and what its reservations have in common, and in its last part the reservations.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    groups: Vec<Vec<String>>,
}

/// What the reservations of a row have in common.
type Common<'a> = (&'a ObjectName, ReservationState, u32, Bytes, Bytes);

const STATES: [(ReservationState, &str); 4] = [
    (ReservationState::Reserved, "Reserved"),
    (ReservationState::Placed, "Placed"),
    (ReservationState::Asleep, "Asleep"),
    (ReservationState::Releasing, "Releasing"),
];

impl From<Ledger> for Packed {
    fn from(mut ledger: Ledger) -> Self {
        ledger.reservations.sort_by_key(|reservation| reservation.id);
        let table = Table::new(&ledger.reservations);
        let mut groups: BTreeMap<Common<'_>, Vec<&Reservation>> = BTreeMap::new();
        for one in &ledger.reservations {
            let common = (&one.model, one.state, one.count, one.bytes, one.host_bytes);
            groups.entry(common).or_default().push(one);
        }
        let groups = groups.iter().map(|(common, engines)| group(*common, engines, &table)).collect();
        Self { next: ledger.next, nodes: table.rows(), groups }
    }
}

fn group(
    (model, state, count, bytes, host): Common<'_>,
    engines: &[&Reservation],
    table: &Table<'_>,
) -> Vec<String> {
    let state = STATES.iter().find(|(known, _)| *known == state).map_or("", |(_, name)| *name);
    let mut text = String::new();
    let mut before = (0, 0);
    for one in engines {
        let seconds = one.since.0 / 1000;
        digits::put(&mut text, one.id - before.0);
        digits::put(&mut text, u64::from(one.replica));
        digits::put_signed(&mut text, seconds.cast_signed().wrapping_sub(before.1));
        before = (one.id, seconds.cast_signed());
        table.put(&mut text, one);
    }
    vec![
        model.to_string(),
        state.to_owned(),
        count.to_string(),
        bytes.0.to_string(),
        host.0.to_string(),
        text,
    ]
}

/// Nodes and their accelerators, each with its place.
struct Table<'a>(BTreeMap<&'a str, (u64, BTreeMap<&'a AcceleratorId, u64>)>);

impl<'a> Table<'a> {
    /// Accelerators of a reservation without a node stand in a row without a name.
    fn new(reservations: &'a [Reservation]) -> Self {
        let mut nodes: BTreeMap<&str, BTreeSet<&AcceleratorId>> = BTreeMap::new();
        for one in reservations.iter().filter(|one| one.node.is_some() || !one.accelerators.is_empty()) {
            nodes.entry(one.node.as_deref().unwrap_or_default()).or_default().extend(&one.accelerators);
        }
        let numbered = |ids: BTreeSet<&'a AcceleratorId>| ids.into_iter().zip(0..).collect();
        Self(nodes.into_iter().zip(1..).map(|((node, ids), row)| (node, (row, numbered(ids)))).collect())
    }

    fn put(&self, text: &mut String, one: &Reservation) {
        let known = one.node.is_some() || !one.accelerators.is_empty();
        let row = self.0.get(one.node.as_deref().unwrap_or_default()).filter(|_| known);
        digits::put(text, row.map_or(0, |(row, _)| *row));
        if let Some((_, places)) = row {
            digits::put(text, one.accelerators.len() as u64);
            for id in &one.accelerators {
                digits::put(text, places.get(id).copied().unwrap_or_default());
            }
        }
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let row = |(node, (_, ids)): (&&str, &(u64, BTreeMap<&AcceleratorId, u64>))| {
            let ids = ids.keys().map(|id| short(id.as_str()));
            std::iter::once((*node).to_owned()).chain(ids).collect()
        };
        self.0.iter().map(row).collect()
    }
}

fn short(id: &str) -> String {
    id.strip_prefix("GPU-").and_then(digits::uuid).unwrap_or_else(|| format!("={id}"))
}

fn long(short: &str) -> Result<AcceleratorId, Error> {
    match short.strip_prefix('=') {
        Some(name) => Ok(name.into()),
        None => Ok(format!("GPU-{}", digits::from_uuid(short)?).into()),
    }
}

impl TryFrom<Packed> for Ledger {
    type Error = Error;

    fn try_from(packed: Packed) -> Result<Self, Error> {
        let nodes = packed.nodes.iter().map(|row| node(row)).collect::<Result<Vec<_>, _>>()?;
        let mut reservations = Vec::new();
        for row in &packed.groups {
            ungroup(row, &nodes, &mut reservations)?;
        }
        reservations.sort_by_key(|one: &Reservation| one.id);
        let mut free = 0;
        for one in &reservations {
            if one.id < free || one.id >= packed.next {
                return Err(Error::Id(one.id));
            }
            free = one.id + 1;
        }
        Ok(Self { next: packed.next, reservations })
    }
}

type Node<'a> = (&'a str, Vec<AcceleratorId>);

fn node(row: &[String]) -> Result<Node<'_>, Error> {
    let (name, ids) = row.split_first().ok_or(Error::Row(0))?;
    Ok((name, ids.iter().map(|id| long(id)).collect::<Result<_, _>>()?))
}

fn ungroup(row: &[String], nodes: &[Node<'_>], into: &mut Vec<Reservation>) -> Result<(), Error> {
    let [model, state, count, bytes, host, text] = row else {
        return Err(Error::Row(row.len()));
    };
    let part = |text: &String| Error::Part(text.clone());
    let (namespace, name) = model.split_once('/').ok_or_else(|| part(model))?;
    let state =
        STATES.iter().find(|(_, name)| name == state).map(|(state, _)| *state).ok_or_else(|| part(state))?;
    let count = count.parse().map_err(|_| part(count))?;
    let bytes = Bytes(bytes.parse().map_err(|_| part(bytes))?);
    let host_bytes = Bytes(host.parse().map_err(|_| part(host))?);
    let mut reader = Reader::new(text);
    let mut before = (0_u64, 0_i64);
    while !reader.is_done() {
        let id = before.0.checked_add(reader.take()?).ok_or(Error::Digits)?;
        let replica = u32::try_from(reader.take()?).map_err(|_| Error::Digits)?;
        let seconds = before.1.checked_add(reader.take_signed()?).ok_or(Error::Digits)?;
        before = (id, seconds);
        let since = u64::try_from(seconds).ok().and_then(|seconds| seconds.checked_mul(1000)).map(Tick);
        let (node, accelerators) = place(&mut reader, nodes)?;
        let model = ObjectName::new(namespace, name);
        let since = since.ok_or(Error::Digits)?;
        into.push(Reservation {
            id,
            model,
            replica,
            count,
            bytes,
            host_bytes,
            node,
            accelerators,
            state,
            since,
        });
    }
    Ok(())
}

fn place(reader: &mut Reader<'_>, nodes: &[Node<'_>]) -> Result<(Option<String>, Vec<AcceleratorId>), Error> {
    let row = usize::try_from(reader.take()?).map_err(|_| Error::Unknown)?;
    let Some(row) = row.checked_sub(1) else {
        return Ok((None, Vec::new()));
    };
    let (name, ids) = nodes.get(row).ok_or(Error::Unknown)?;
    let known = reader.take()?;
    let mut accelerators = Vec::new();
    for _ in 0..known {
        let index = usize::try_from(reader.take()?).map_err(|_| Error::Unknown)?;
        accelerators.push(ids.get(index).cloned().ok_or(Error::Unknown)?);
    }
    Ok((Some((*name).to_owned()).filter(|name| !name.is_empty()), accelerators))
}
