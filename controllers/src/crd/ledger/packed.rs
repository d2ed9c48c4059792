//! The packed form: three tables of texts.
//!
//! * `nodes`: a row for each node with something on it: its name, the UUIDs of its accelerators as one text (22
//!   characters for each `GPU-` and a UUID), and any other accelerators by their names.
//! * `shapes`: a row for each combination of what many reservations have in common: state, number of accelerators,
//!   memory, host memory.
//! * `models`: a row for each variant of a model: the model's namespace and name, its reservations in the order of
//!   their time, and the variant's name unless that is the default. Each reservation is its shape (and one bit: whether
//!   as many accelerators are known as it takes, or else how many), the replica, the seconds since the one before, the
//!   difference of the ids, the node's row from 1 or 0, and the accelerators' places in that row.
//!
//! A version of Rouse that runs no variants side by side refuses a row with a variant's name, and so the whole ledger:
//! it would take those reservations for other engines'.

use std::collections::{BTreeMap, BTreeSet};

use rouse::{
    model::{AcceleratorId, VariantName},
    units::{Bytes, Tick},
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    Ledger, ObjectName, Reservation, ReservationState,
    digits::{self, DigitReader},
};
use crate::crd::scalar::Quantity;

/// Why a packed ledger cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the ledger was not written by Rouse: a row has {0} parts")]
    Row(usize),
    #[error("the ledger was not written by Rouse: its digits are not a number")]
    Digits,
    #[error("the ledger was not written by Rouse: '{0}' is not a namespace/name, state, number or size")]
    Part(String),
    #[error(
        "the ledger was not written by Rouse: it names a node, accelerator or shape that it does not list"
    )]
    Unknown,
    #[error("the ledger was not written by Rouse: the id {0} is used twice, or is not below the next id")]
    Id(u64),
}

/// All reservations, packed. AcceleratorNodes have them in a readable form.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct PackedLedger {
    /// Id of the next reservation.
    #[serde(default)]
    #[schemars(extend("minimum" = 0))]
    next: u64,
    /// One row for each node with reservations: its name and its accelerators.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    nodes: Vec<Vec<String>>,
    /// One row for each set of values that reservations share: state, number of accelerators, memory, host memory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    shapes: Vec<Vec<String>>,
    /// One row for each variant of an InferenceModel: the model's namespace and name, the reservations, and the
    /// variant's name unless it is the default.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    models: Vec<Vec<String>>,
}

type ReservationShape = (ReservationState, u32, Bytes, Bytes);

const STATES: [(ReservationState, &str); 4] = [
    (ReservationState::Reserved, "Reserved"),
    (ReservationState::Placed, "Placed"),
    (ReservationState::Asleep, "Asleep"),
    (ReservationState::Releasing, "Releasing"),
];

const fn shape(one: &Reservation) -> ReservationShape {
    (one.state, one.count, one.bytes, one.host_bytes)
}

impl From<Ledger> for PackedLedger {
    fn from(ledger: Ledger) -> Self {
        let nodes = NodeTable::new(&ledger.reservations);
        let distinct: BTreeSet<ReservationShape> = ledger.reservations.iter().map(shape).collect();
        let shapes: BTreeMap<ReservationShape, u64> = distinct.into_iter().zip(0..).collect();
        let mut models: BTreeMap<(&ObjectName, &VariantName), Vec<&Reservation>> = BTreeMap::new();
        for one in &ledger.reservations {
            models.entry((&one.model, &one.variant)).or_default().push(one);
        }
        let models = models.into_iter().map(|((model, variant), mut all)| {
            all.sort_by_key(|one| (one.since, one.id));
            let named = (!variant.is_default()).then(|| variant.to_string());
            [model.to_string(), engines(&all, &shapes, &nodes)].into_iter().chain(named).collect()
        });
        Self { next: ledger.next, models: models.collect(), nodes: nodes.rows(), shapes: shape_rows(&shapes) }
    }
}

fn shape_rows(shapes: &BTreeMap<ReservationShape, u64>) -> Vec<Vec<String>> {
    let row = |(state, count, bytes, host): &ReservationShape| {
        let state = STATES.iter().find(|(known, _)| known == state).map_or("", |(_, name)| *name);
        let size = |bytes: &Bytes| Quantity::from(*bytes).to_string();
        vec![state.to_owned(), count.to_string(), size(bytes), size(host)]
    };
    shapes.keys().map(row).collect()
}

fn engines(all: &[&Reservation], shapes: &BTreeMap<ReservationShape, u64>, nodes: &NodeTable<'_>) -> String {
    let mut text = String::new();
    let mut before = (0, 0);
    for one in all {
        let seconds = one.since.0 / 1000;
        let (row, places) = nodes.find(one);
        let known = places.len() as u64;
        let whole = row == 0 || known == u64::from(one.count);
        let shape = shapes.get(&shape(one)).copied().unwrap_or_default();
        digits::put(&mut text, shape << 1 | u64::from(!whole));
        digits::put(&mut text, u64::from(one.replica));
        digits::put(&mut text, seconds - before.0);
        digits::put_signed(&mut text, one.id.wrapping_sub(before.1).cast_signed());
        digits::put(&mut text, row);
        if !whole {
            digits::put(&mut text, known);
        }
        places.into_iter().for_each(|place| digits::put(&mut text, place));
        before = (seconds, one.id);
    }
    text
}

/// Whether it is a name that stands behind the UUIDs, and what it is.
type PackedAccelerator<'a> = (bool, &'a AcceleratorId);

/// Nodes and their accelerators, each with its place.
struct NodeTable<'a>(BTreeMap<&'a str, (u64, BTreeMap<PackedAccelerator<'a>, u64>)>);

impl<'a> NodeTable<'a> {
    /// Accelerators of a reservation without a node stand in a row without a name.
    fn new(reservations: &'a [Reservation]) -> Self {
        let mut nodes: BTreeMap<&str, BTreeSet<PackedAccelerator<'_>>> = BTreeMap::new();
        for one in reservations.iter().filter(|one| one.node.is_some() || !one.accelerators.is_empty()) {
            let row = nodes.entry(one.node.as_deref().unwrap_or_default()).or_default();
            row.extend(one.accelerators.iter().map(packed_accelerator));
        }
        let numbered = |ids: BTreeSet<PackedAccelerator<'a>>| ids.into_iter().zip(0..).collect();
        Self(nodes.into_iter().zip(1..).map(|((node, ids), row)| (node, (row, numbered(ids)))).collect())
    }

    /// The row from 1, or 0, and the places in it.
    fn find(&self, one: &Reservation) -> (u64, Vec<u64>) {
        let known = one.node.is_some() || !one.accelerators.is_empty();
        match self.0.get(one.node.as_deref().unwrap_or_default()).filter(|_| known) {
            Some((row, places)) => {
                let places =
                    one.accelerators.iter().filter_map(|id| places.get(&packed_accelerator(id)).copied());
                (*row, places.collect())
            }
            None => (0, Vec::new()),
        }
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let row = |(node, (_, ids)): (&&str, &(u64, BTreeMap<PackedAccelerator<'_>, u64>))| {
            let uuids = ids.keys().filter_map(|(_, id)| uuid(id)).collect();
            let names = ids.keys().filter(|(named, _)| *named).map(|(_, id)| id.to_string());
            [(*node).to_owned(), uuids].into_iter().chain(names).collect()
        };
        self.0.iter().map(row).collect()
    }
}

fn packed_accelerator(id: &AcceleratorId) -> PackedAccelerator<'_> {
    (uuid(id).is_none(), id)
}

fn uuid(id: &AcceleratorId) -> Option<String> {
    id.as_str().strip_prefix("GPU-").and_then(digits::uuid)
}

impl TryFrom<PackedLedger> for Ledger {
    type Error = Error;

    fn try_from(packed: PackedLedger) -> Result<Self, Error> {
        let nodes = packed.nodes.iter().map(|row| node(row)).collect::<Result<Vec<_>, _>>()?;
        let shapes = packed.shapes.iter().map(|row| shape_of(row)).collect::<Result<Vec<_>, _>>()?;
        let mut reservations = Vec::new();
        for row in &packed.models {
            unpack(row, &shapes, &nodes, &mut reservations)?;
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

type PackedNode<'a> = (&'a str, Vec<AcceleratorId>);

fn node(row: &[String]) -> Result<PackedNode<'_>, Error> {
    let [name, uuids, names @ ..] = row else {
        return Err(Error::Row(row.len()));
    };
    let uuids = uuids.as_bytes().chunks(digits::UUID_DIGITS).map(digits::from_uuid);
    let uuids = uuids.map(|uuid| Ok(AcceleratorId::from(format!("GPU-{}", uuid?))));
    let names = names.iter().map(|name| Ok(AcceleratorId::from(name.as_str())));
    Ok((name, uuids.chain(names).collect::<Result<_, Error>>()?))
}

fn shape_of(row: &[String]) -> Result<ReservationShape, Error> {
    let [state, count, bytes, host] = row else {
        return Err(Error::Row(row.len()));
    };
    let part = |text: &String| Error::Part(text.clone());
    let known = STATES.iter().find(|(_, name)| name == state);
    let count = count.parse().map_err(|_| part(count))?;
    let bytes = bytes.parse().map_err(|_| part(bytes))?;
    let host = host.parse().map_err(|_| part(host))?;
    Ok((known.ok_or_else(|| part(state))?.0, count, bytes, host))
}

fn unpack(
    row: &[String],
    shapes: &[ReservationShape],
    nodes: &[PackedNode<'_>],
    into: &mut Vec<Reservation>,
) -> Result<(), Error> {
    let (model, text, variant) = match row {
        [model, text] => (model, text, VariantName::default()),
        [model, text, variant] => (model, text, VariantName::from(variant.as_str())),
        _ => return Err(Error::Row(row.len())),
    };
    let (namespace, name) = model.split_once('/').ok_or_else(|| Error::Part(model.clone()))?;
    let mut reader = DigitReader::new(text);
    let (mut seconds, mut id) = (0_u64, 0_u64);
    while !reader.is_done() {
        let mark = reader.take()?;
        let shape = usize::try_from(mark >> 1).ok().and_then(|index| shapes.get(index));
        let (state, count, bytes, host_bytes) = *shape.ok_or(Error::Unknown)?;
        let replica = u32::try_from(reader.take()?).map_err(|_| Error::Digits)?;
        seconds = seconds.checked_add(reader.take()?).ok_or(Error::Digits)?;
        let since = Tick(seconds.checked_mul(1000).ok_or(Error::Digits)?);
        id = id.wrapping_add(reader.take_signed()?.cast_unsigned());
        let known = (mark & 1 == 0).then_some(u64::from(count));
        let (node, accelerators) = places(&mut reader, known, nodes)?;
        let model = ObjectName::new(namespace, name);
        into.push(Reservation {
            id,
            model,
            variant: variant.clone(),
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

/// `known`: how many accelerators there are, when the text does not say it.
fn places(
    reader: &mut DigitReader<'_>,
    known: Option<u64>,
    nodes: &[PackedNode<'_>],
) -> Result<(Option<String>, Vec<AcceleratorId>), Error> {
    let row = usize::try_from(reader.take()?).map_err(|_| Error::Unknown)?;
    let Some(row) = row.checked_sub(1) else {
        return Ok((None, Vec::new()));
    };
    let (name, ids) = nodes.get(row).ok_or(Error::Unknown)?;
    let known = match known {
        Some(known) => known,
        None => reader.take()?,
    };
    let mut accelerators = Vec::new();
    for _ in 0..known {
        let index = usize::try_from(reader.take()?).map_err(|_| Error::Unknown)?;
        accelerators.push(ids.get(index).cloned().ok_or(Error::Unknown)?);
    }
    Ok((Some((*name).to_owned()).filter(|name| !name.is_empty()), accelerators))
}
