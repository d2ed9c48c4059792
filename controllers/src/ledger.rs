//! Reservations in a pool: the rules of its ledger, and the write that changes it.
//!
//! A reservation updates the pool's status, with the version that was read, before anything touches the memory. If two
//! gateways both believe they lead, both read the same ledger and the API server accepts one write; the other gateway
//! reads again and finds less room. So a change is a function of the ledger, which may run several times and decides
//! again each time.
//!
//! A version refuses only writes based on an older read. So a new leader writes each pool before it decides anything
//! about the pool: it stamps the status with its epoch ([`PoolLedger::take_over`]). From then on, earlier reads of its
//! predecessor have an older version, and new reads show the stamp of a newer leader.

mod location;
mod pool_ledger;

use rouse::units::{Bytes, Tick};

use super::crd::{
    AcceleratorPoolStatus, Quantity,
    ledger::{Ledger, Reservation, ReservationOwner, ReservationState},
};

pub use self::{
    location::{LocationError, ReservationLocation},
    pool_ledger::{Error, PoolLedger},
};

/// The memory that an engine needs before it may start or wake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReservationRequest {
    pub engine: ReservationOwner,
    /// Number of accelerators.
    pub count: u32,
    /// Memory on each accelerator.
    pub bytes: Bytes,
    /// RAM of its node.
    pub host_bytes: Bytes,
    /// Limit on the memory that the namespace's models may reserve in the pool; `None` if unlimited.
    pub quota: Option<Bytes>,
    /// Where the engine is to run, if the leader has chosen its accelerators; `None` if the kubelet chooses them.
    pub location: Option<ReservationLocation>,
}

/// The memory that a sleeping engine keeps, on each accelerator and in its node's RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SleepingMemory {
    pub bytes: Bytes,
    pub host_bytes: Bytes,
}

/// Why nothing was reserved.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReservationRefusal {
    /// The pool has too little unreserved memory.
    #[error("the engine needs {wanted}, and {available} of {total} are available")]
    Full { wanted: Bytes, available: Bytes, total: Bytes },
    /// The pool has room, but the namespace's quota does not.
    #[error(
        "the engine needs {wanted}, and the namespace '{namespace}' has reserved {reserved} of its quota of {quota}"
    )]
    Quota { namespace: String, wanted: Bytes, reserved: Bytes, quota: Bytes },
    /// The engine's former memory is being released and was not observed free yet.
    #[error("the engine's former memory is not confirmed free yet")]
    Releasing,
    #[error("the ledger has no id left for another reservation")]
    IdsExhausted,
    /// The engine already has a reservation of another size, or on other accelerators.
    #[error("the engine already has {has} reserved")]
    AlreadyReserved { has: Bytes },
    /// The accelerators that the leader chose have too little unreserved memory.
    #[error("{0}")]
    Location(#[from] LocationError),
}

/// Returns the pool's grantable memory from its status.
fn total(status: &AcceleratorPoolStatus) -> Bytes {
    status.total.as_ref().and_then(|total| total.bytes().ok()).unwrap_or(Bytes::ZERO)
}

impl Ledger {
    /// Sums all reservations, including memory that is being released.
    #[must_use]
    pub fn allocated(&self) -> Bytes {
        self.reservations.iter().map(Reservation::sum).sum()
    }

    /// Sums the namespace's reservations, including memory that is being released.
    #[must_use]
    pub fn allocated_to(&self, namespace: &str) -> Bytes {
        let of = |known: &&Reservation| known.model.namespace == namespace;
        self.reservations.iter().filter(of).map(Reservation::sum).sum()
    }

    /// Reserves memory if the pool has room and the quota allows it, and returns the reservation's id.
    ///
    /// The call is idempotent: a gateway that crashed after the write, or lost the response, repeats the request and
    /// gets the same id.
    ///
    /// # Errors
    /// The pool has no room, the namespace's quota is used up, or the engine has another reservation.
    pub fn reserve(
        &mut self,
        request: &ReservationRequest,
        total: Bytes,
        now: Tick,
    ) -> Result<u64, ReservationRefusal> {
        let existing = self.reservation(&request.engine);
        // An asleep engine's own memory is available to its wake.
        let keeps = match existing {
            None => Bytes::ZERO,
            Some(existing) => match existing.state {
                ReservationState::Releasing => return Err(ReservationRefusal::Releasing),
                ReservationState::Asleep => existing.sum(),
                _ if existing.matches(request) => return Ok(existing.id),
                _ => return Err(ReservationRefusal::AlreadyReserved { has: existing.sum() }),
            },
        };
        let reservation = Reservation::new(existing.map_or(self.next, |known| known.id), request, now);
        let available = total.saturating_sub(self.allocated().saturating_sub(keeps));
        if reservation.sum() > available {
            return Err(ReservationRefusal::Full { wanted: reservation.sum(), available, total });
        }
        if let Some(quota) = request.quota {
            let namespace = &request.engine.model.namespace;
            let reserved = self.allocated_to(namespace).saturating_sub(keeps);
            if reservation.sum() > quota.saturating_sub(reserved) {
                let (namespace, wanted) = (namespace.clone(), reservation.sum());
                return Err(ReservationRefusal::Quota { namespace, wanted, reserved, quota });
            }
        }
        if let Some(asleep) = self.reservations.iter_mut().find(|known| known.id == reservation.id) {
            *asleep = match asleep.node.take() {
                // A sleeper wakes where it is.
                Some(node) => Reservation {
                    node: Some(node),
                    accelerators: std::mem::take(&mut asleep.accelerators),
                    state: ReservationState::Placed,
                    ..reservation
                },
                None => reservation,
            };
            return Ok(asleep.id);
        }
        // Counting never gets there, but a ledger that was edited by hand may.
        let id = reservation.id;
        self.next = id.checked_add(1).ok_or(ReservationRefusal::IdsExhausted)?;
        self.reservations.push(reservation);
        Ok(id)
    }

    /// Reserves the memory of a running engine, whether or not there is room.
    pub fn adopt(&mut self, request: &ReservationRequest, now: Tick) {
        if self.reservation(&request.engine).is_none()
            && let Some(next) = self.next.checked_add(1)
        {
            self.reservations.push(Reservation::new(self.next, request, now));
            self.next = next;
        }
    }

    /// Marks the reservation of a stopping engine. The memory stays reserved until it is observed free.
    pub fn mark_releasing(&mut self, id: u64, now: Tick) {
        if let Some(known) = self.reservations.iter_mut().find(|known| known.id == id)
            && known.state != ReservationState::Releasing
        {
            (known.state, known.since) = (ReservationState::Releasing, now);
        }
    }

    /// Shrinks the reservation to the memory that the engine keeps while asleep.
    pub fn mark_asleep(&mut self, engine: &ReservationOwner, keeps: SleepingMemory, now: Tick) {
        let Some(reservation) = self.reservations.iter_mut().find(|known| known.is_of(engine)) else {
            return;
        };
        if reservation.state != ReservationState::Releasing {
            (reservation.bytes, reservation.host_bytes) =
                (keeps.bytes.min(reservation.bytes), keeps.host_bytes);
            (reservation.state, reservation.since) = (ReservationState::Asleep, now);
        }
    }

    /// Marks the reservation of an engine that is known to sleep, given what such an engine is declared to keep.
    ///
    /// The engine may have been measured to keep more when it fell asleep. The larger of the two stays reserved.
    pub fn adopt_asleep(&mut self, engine: &ReservationOwner, declared: SleepingMemory, now: Tick) {
        let asleep = self
            .reservations
            .iter_mut()
            .find(|known| known.is_of(engine) && known.state == ReservationState::Asleep);
        if let Some(asleep) = asleep {
            asleep.bytes = asleep.bytes.max(declared.bytes);
            asleep.host_bytes = declared.host_bytes;
        } else {
            self.mark_asleep(engine, declared, now);
        }
    }

    /// Removes a reservation whose memory was observed free, or never used.
    pub fn release(&mut self, id: u64) {
        self.reservations.retain(|known| known.id != id);
    }

    /// Finds the reservation of one engine.
    #[must_use]
    pub fn reservation(&self, engine: &ReservationOwner) -> Option<&Reservation> {
        self.reservations.iter().find(|known| known.is_of(engine))
    }
}

impl Reservation {
    fn new(id: u64, request: &ReservationRequest, now: Tick) -> Self {
        let location = request.location.as_ref();
        let state = if location.is_some() { ReservationState::Placed } else { ReservationState::Reserved };
        Self {
            id,
            model: request.engine.model.clone(),
            variant: request.engine.variant.clone(),
            replica: request.engine.replica,
            count: request.count,
            bytes: request.bytes,
            host_bytes: request.host_bytes,
            node: location.map(|location| location.node.clone()),
            accelerators: location.map(|location| location.accelerators.clone()).unwrap_or_default(),
            state,
            since: now,
        }
    }

    fn matches(&self, request: &ReservationRequest) -> bool {
        let sizes = (request.count, request.bytes, request.host_bytes);
        let is_there = request.location.as_ref().is_none_or(|location| self.is_at(location));
        (self.count, self.bytes, self.host_bytes) == sizes && is_there
    }
}

/// Stamps the ledger with the leader's epoch. Returns the stored epoch if that is newer.
fn stamp(status: &mut AcceleratorPoolStatus, epoch: u64) -> Result<(), u64> {
    if status.epoch > epoch {
        return Err(status.epoch);
    }
    status.epoch = epoch;
    Ok(())
}

/// Updates the sums beside the ledger, which are for people.
pub(super) fn update_sums(status: &mut AcceleratorPoolStatus) {
    let (total, allocated) = (total(status), status.ledger.allocated());
    let quantity = |bytes: Bytes| Some(Quantity::from(bytes));
    status.allocated = quantity(allocated);
    status.available = quantity(total.saturating_sub(allocated));
    status.count = u32::try_from(status.ledger.reservations.len()).unwrap_or(u32::MAX);
}

#[cfg(test)]
mod tests {
    use rouse::model::VariantName;

    use super::*;
    use crate::crd::ledger::ObjectName;

    fn first_engine(namespace: &str, name: &str) -> ReservationOwner {
        let (model, variant) = (ObjectName::new(namespace, name), VariantName::default());
        ReservationOwner { model, variant, replica: 0 }
    }

    fn wanted(name: &str, gib: u64) -> ReservationRequest {
        ReservationRequest {
            engine: first_engine("default", name),
            count: 1,
            bytes: Bytes::gib(gib),
            host_bytes: Bytes::ZERO,
            quota: None,
            location: None,
        }
    }

    const TOTAL: Bytes = Bytes::gib(128);

    #[test]
    fn what_fits_is_reserved_and_what_does_not_is_not() {
        let mut ledger = Ledger::default();
        let first = ledger.reserve(&wanted("large", 80), TOTAL, Tick(1)).unwrap();
        let before = ledger.clone();
        let full =
            ReservationRefusal::Full { wanted: Bytes::gib(60), available: Bytes::gib(48), total: TOTAL };
        assert_eq!(ledger.reserve(&wanted("other", 60), TOTAL, Tick(2)), Err(full));
        assert_eq!(ledger, before, "nothing is left of what was refused");
        ledger.mark_releasing(first, Tick(3));
        assert!(ledger.reserve(&wanted("other", 60), TOTAL, Tick(4)).is_err(), "it was not seen free yet");
        assert_eq!(ledger.reserve(&wanted("large", 80), TOTAL, Tick(5)), Err(ReservationRefusal::Releasing));
        ledger.release(first);
        let second = ledger.reserve(&wanted("other", 60), TOTAL, Tick(6)).unwrap();
        assert!(second > first, "ids are never used twice");
    }

    #[test]
    fn who_asks_again_is_told_what_it_has() {
        let mut ledger = Ledger::default();
        let id = ledger.reserve(&wanted("m", 80), TOTAL, Tick(1)).unwrap();
        assert_eq!(ledger.reserve(&wanted("m", 80), TOTAL, Tick(2)), Ok(id));
        assert_eq!(ledger.allocated(), Bytes::gib(80));
        let other = ledger.reserve(&wanted("m", 90), TOTAL, Tick(3));
        assert_eq!(other, Err(ReservationRefusal::AlreadyReserved { has: Bytes::gib(80) }));
    }

    #[test]
    fn a_sleeper_keeps_its_place_and_takes_the_rest_again_only_where_there_is_room() {
        let mut ledger = Ledger::default();
        let (own, other) = (wanted("m", 80), wanted("n", 60));
        let id = ledger.reserve(&own, TOTAL, Tick(1)).unwrap();
        let location = ReservationLocation { node: "node".to_owned(), accelerators: vec!["gpu-1".into()] };
        ledger.set_location(&own.engine, &location, Tick(1));
        let keeps = SleepingMemory { bytes: Bytes::gib(2), host_bytes: Bytes::gib(40) };
        ledger.mark_asleep(&own.engine, keeps, Tick(2));
        assert_eq!(ledger.allocated(), Bytes::gib(2));
        let beside = ledger.reserve(&other, TOTAL, Tick(3)).unwrap();
        let full =
            ReservationRefusal::Full { wanted: Bytes::gib(80), available: Bytes::gib(68), total: TOTAL };
        let quota = ReservationRequest { quota: Some(Bytes::gib(79)), ..own.clone() };
        assert_eq!(ledger.reserve(&own, TOTAL, Tick(4)), Err(full));
        ledger.release(beside);
        assert!(matches!(ledger.reserve(&quota, TOTAL, Tick(5)), Err(ReservationRefusal::Quota { .. })));
        assert_eq!(ledger.reserve(&own, TOTAL, Tick(6)), Ok(id));
        let awake = ledger.reservation(&own.engine).unwrap();
        assert_eq!((awake.bytes, awake.host_bytes), (Bytes::gib(80), Bytes::ZERO));
        assert_eq!((awake.state, awake.node.as_deref()), (ReservationState::Placed, Some("node")));
        ledger.mark_releasing(id, Tick(7));
        ledger.mark_asleep(&own.engine, keeps, Tick(8));
        assert_eq!(ledger.allocated(), Bytes::gib(80), "it was told to go, and not seen gone");
    }

    #[test]
    fn a_new_leader_lowers_nothing_that_was_measured_of_a_sleeper() {
        let mut ledger = Ledger::default();
        let (sleeper, other) = (wanted("m", 80), wanted("n", 40));
        let keeps = |gib| SleepingMemory { bytes: Bytes::gib(gib), host_bytes: Bytes::gib(40) };
        ledger.reserve(&sleeper, TOTAL, Tick(1)).unwrap();
        ledger.mark_asleep(&sleeper.engine, keeps(5), Tick(2));
        ledger.adopt_asleep(&sleeper.engine, keeps(2), Tick(3));
        let found = ledger.reservation(&sleeper.engine).unwrap();
        assert_eq!((found.bytes, found.since), (Bytes::gib(5), Tick(2)), "as it was measured");
        ledger.adopt_asleep(&sleeper.engine, keeps(6), Tick(4));
        assert_eq!(ledger.reservation(&sleeper.engine).unwrap().bytes, Bytes::gib(6), "as is declared now");
        let id = ledger.reserve(&other, TOTAL, Tick(5)).unwrap();
        ledger.adopt_asleep(&other.engine, keeps(2), Tick(6));
        let found = ledger.reservation(&other.engine).unwrap();
        assert_eq!((found.bytes, found.state), (Bytes::gib(2), ReservationState::Asleep));
        ledger.mark_releasing(id, Tick(7));
        ledger.adopt_asleep(&other.engine, keeps(3), Tick(8));
        let found = ledger.reservation(&other.engine).unwrap();
        assert_eq!((found.bytes, found.state), (Bytes::gib(2), ReservationState::Releasing));
    }

    #[test]
    fn each_variant_of_a_model_has_reservations_of_its_own() {
        let mut ledger = Ledger::default();
        let default = wanted("m", 40);
        let engine = ReservationOwner { variant: "large".into(), ..default.engine.clone() };
        let large = ReservationRequest { engine, bytes: Bytes::gib(80), ..default.clone() };
        let first = ledger.reserve(&default, TOTAL, Tick(1)).unwrap();
        let second = ledger.reserve(&large, TOTAL, Tick(2)).unwrap();
        assert_ne!(first, second);
        let keeps = SleepingMemory { bytes: Bytes::gib(2), host_bytes: Bytes::ZERO };
        ledger.mark_asleep(&large.engine, keeps, Tick(3));
        assert_eq!(ledger.reservation(&large.engine).unwrap().bytes, Bytes::gib(2));
        assert_eq!(ledger.reservation(&default.engine).unwrap().bytes, Bytes::gib(40));
        ledger.release(first);
        assert_eq!(ledger.reservation(&default.engine), None);
        assert_eq!(ledger.reservation(&large.engine).map(Reservation::owner), Some(large.engine));
    }

    #[test]
    fn a_ledger_under_a_newer_leader_is_not_touched() {
        let mut status = AcceleratorPoolStatus::default();
        for (epoch, outcome, after) in
            [(7, Ok(()), 7), (7, Ok(()), 7), (6, Err(7), 7), (8, Ok(()), 8), (7, Err(8), 8)]
        {
            assert_eq!(stamp(&mut status, epoch), outcome);
            assert_eq!(status.epoch, after);
        }
    }

    #[test]
    fn several_accelerators_count_each() {
        let mut ledger = Ledger::default();
        let two = ReservationRequest { count: 2, ..wanted("m", 40) };
        ledger.reserve(&two, TOTAL, Tick(1)).unwrap();
        assert_eq!(ledger.allocated(), Bytes::gib(80));
        let huge = ReservationRequest { count: u32::MAX, bytes: Bytes(u64::MAX), ..wanted("n", 1) };
        assert!(matches!(ledger.reserve(&huge, TOTAL, Tick(1)), Err(ReservationRefusal::Full { .. })));
    }
    #[test]
    fn a_namespace_has_no_more_than_its_quota() {
        let mut ledger = Ledger::default();
        let of = |namespace: &str, name: &str, gib, quota| ReservationRequest {
            engine: first_engine(namespace, name),
            quota,
            ..wanted(name, gib)
        };
        let fifty = Some(Bytes::gib(50));
        let first = ledger.reserve(&of("a", "one", 30, fifty), TOTAL, Tick(1)).unwrap();
        ledger.reserve(&of("b", "one", 60, None), TOTAL, Tick(1)).unwrap();
        assert_eq!(ledger.allocated_to("a"), Bytes::gib(30), "the other namespace's counts for that one");
        let before = ledger.clone();
        let over = ReservationRefusal::Quota {
            namespace: "a".into(),
            wanted: Bytes::gib(30),
            reserved: Bytes::gib(30),
            quota: Bytes::gib(50),
        };
        assert_eq!(ledger.reserve(&of("a", "two", 30, fifty), TOTAL, Tick(2)), Err(over));
        assert_eq!(ledger, before, "nothing is left of what was refused");
        // Twice ten uses up the quota. An existing reservation stays when the quota shrinks.
        let rest = ReservationRequest { count: 2, ..of("a", "two", 10, fifty) };
        ledger.reserve(&rest, TOTAL, Tick(3)).unwrap();
        assert_eq!(ledger.reserve(&of("a", "one", 30, Some(Bytes::ZERO)), TOTAL, Tick(4)), Ok(first));
        let next = ledger.reserve(&of("a", "three", 1, fifty), TOTAL, Tick(5));
        assert!(matches!(next, Err(ReservationRefusal::Quota { .. })), "{next:?}");
        ledger.mark_releasing(first, Tick(6));
        let next = ledger.reserve(&of("a", "three", 1, fifty), TOTAL, Tick(6));
        assert!(matches!(next, Err(ReservationRefusal::Quota { .. })), "it was not seen free yet: {next:?}");
        ledger.release(first);
        ledger.reserve(&of("a", "three", 30, fifty), TOTAL, Tick(7)).unwrap();
        // Without any room the refusal is `Full`, whatever the quota.
        let full = ledger.reserve(&of("a", "four", 100, fifty), TOTAL, Tick(8));
        assert!(matches!(full, Err(ReservationRefusal::Full { .. })), "{full:?}");
    }
}
