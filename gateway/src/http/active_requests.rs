//! The requests that one core is serving, for pages that watch.
//!
//! Each core keeps its own list, which no other thread touches: a request enters and leaves it without a lock and
//! without an atomic step. A page's snapshot asks each core for its list ([`crate::serve::ApiWorkers`]), and only then
//! does a request cost more than its place.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    rc::{Rc, Weak},
    sync::Arc,
};

use rouse::{fault::DisconnectPhase, model::ModelName, units::Tick};
use serde::Serialize;

use super::request_context::RequestContext;

/// The requests of one core that have named their model and are not completely answered.
#[derive(Default)]
pub(crate) struct ActiveRequests(RefCell<RequestSlots>);

#[derive(Default)]
struct RequestSlots {
    slots: Vec<Weak<RequestContext>>,
    free: Vec<usize>,
}

/// A request's place in the list, left when dropped.
pub(crate) struct ActiveRequestGuard {
    requests: Rc<ActiveRequests>,
    slot: usize,
}

/// One request, as a page shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ActiveRequest {
    pub id: String,
    pub model: ModelName,
    pub phase: RequestPhase,
    /// When the request entered the phase.
    pub since: Tick,
    /// When the request's head arrived.
    pub started: Tick,
    /// The name of the client's key, if keys are configured.
    pub key: Option<Arc<str>>,
    pub route: &'static str,
    /// Tokens of the answer so far: as the engine counts them, or else one for each event.
    pub tokens: u64,
}

/// Where a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum RequestPhase {
    /// The request waits for its model.
    Parked,
    /// The request goes to an engine.
    Connecting,
    /// The engine has the request and has not begun its answer.
    Waiting,
    Streaming,
}

/// The requests of one core, or of several.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ActiveRequestList {
    /// How many requests there are.
    pub total: usize,
    /// The oldest of them, oldest first.
    pub oldest: Vec<ActiveRequest>,
    /// Tokens of the answers so far, of all requests.
    pub tokens: BTreeMap<ModelName, u64>,
}

impl ActiveRequests {
    /// Adds a request.
    pub(super) fn add(self: &Rc<Self>, request: &Rc<RequestContext>) -> ActiveRequestGuard {
        let mut slots = self.0.borrow_mut();
        let request = Rc::downgrade(request);
        let slot = match slots.free.pop() {
            Some(slot) => {
                if let Some(free) = slots.slots.get_mut(slot) {
                    *free = request;
                }
                slot
            }
            None => {
                slots.slots.push(request);
                slots.slots.len() - 1
            }
        };
        ActiveRequestGuard { requests: Rc::clone(self), slot }
    }

    /// Lists the requests, at most `max` of them.
    pub(crate) fn list(&self, max: usize) -> ActiveRequestList {
        let slots = self.0.borrow();
        let mut requests: Vec<_> = slots.slots.iter().filter_map(Weak::upgrade).collect();
        drop(slots);
        let total = requests.len();
        let mut tokens = BTreeMap::<ModelName, u64>::new();
        for request in &requests {
            let served = request.tokens();
            if let Some(model) = request.model_name().filter(|_| served > 0) {
                *tokens.entry(model.clone()).or_default() += served;
            }
        }
        requests.sort_unstable_by_key(|request| request.arrived);
        requests.truncate(max);
        let oldest = requests.iter().filter_map(|request| request.describe()).collect();
        ActiveRequestList { total, oldest, tokens }
    }
}

impl Drop for ActiveRequestGuard {
    fn drop(&mut self) {
        let mut slots = self.requests.0.borrow_mut();
        if let Some(slot) = slots.slots.get_mut(self.slot) {
            *slot = Weak::new();
        }
        slots.free.push(self.slot);
    }
}

impl ActiveRequestList {
    /// Joins the lists of several cores, with at most `max` requests.
    pub(crate) fn join(lists: impl IntoIterator<Item = Self>, max: usize) -> Self {
        let mut all = Self::default();
        for list in lists {
            all.total += list.total;
            all.oldest.extend(list.oldest);
            for (model, tokens) in list.tokens {
                *all.tokens.entry(model).or_default() += tokens;
            }
        }
        // By id, too: requests of one millisecond must not change places from one snapshot to the next.
        all.oldest.sort_by(|a, b| (a.started, &a.id).cmp(&(b.started, &b.id)));
        all.oldest.truncate(max);
        all
    }
}

impl From<DisconnectPhase> for RequestPhase {
    fn from(phase: DisconnectPhase) -> Self {
        match phase {
            DisconnectPhase::Parked => Self::Parked,
            DisconnectPhase::Connecting => Self::Connecting,
            DisconnectPhase::Headers => Self::Waiting,
            DisconnectPhase::Streaming => Self::Streaming,
        }
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use tokio::time::Instant;

    use super::*;
    use crate::http::request_context::RequestEnvironment;

    fn request(requests: &Rc<ActiveRequests>, id: &'static str) -> Rc<RequestContext> {
        let environment = RequestEnvironment::uncounted(Tick(1000));
        let id = HeaderValue::from_static(id);
        let context = RequestContext::new(&environment, Instant::now(), id, "chat");
        context.set_model(&"m".into());
        context.set_active(requests.add(&context));
        context
    }

    fn ids(list: &ActiveRequestList) -> Vec<&str> {
        list.oldest.iter().map(|request| request.id.as_str()).collect()
    }

    #[test]
    fn a_request_is_listed_from_its_model_to_its_end_and_its_place_is_used_again() {
        let requests = Rc::<ActiveRequests>::default();
        let (first, second) = (request(&requests, "first"), request(&requests, "second"));
        second.set_tokens(7);
        let listed = requests.list(10);
        assert_eq!((listed.total, listed.tokens), (2, BTreeMap::from([("m".into(), 7)])));
        drop(first);
        assert_eq!(ids(&requests.list(10)), ["second"]);
        let third = request(&requests, "third");
        assert_eq!(requests.0.borrow().slots.len(), 2, "the first one's place");
        assert_eq!((requests.list(10).total, requests.list(1).oldest.len()), (2, 1));
        drop((second, third));
        assert_eq!(requests.list(10), ActiveRequestList::default());
    }

    #[test]
    fn a_request_shows_its_phase_and_since_when() {
        let requests = Rc::<ActiveRequests>::default();
        let context = request(&requests, "one");
        let phase = || requests.list(1).oldest.pop().map(|request| (request.phase, request.since)).unwrap();
        assert_eq!(phase().0, RequestPhase::Connecting);
        let parked = context.park();
        assert_eq!(phase().0, RequestPhase::Parked);
        drop(parked);
        context.set_phase(DisconnectPhase::Headers);
        assert_eq!(phase().0, RequestPhase::Waiting);
        context.set_phase(DisconnectPhase::Streaming);
        context.head_sent(200, Tick(5000));
        assert_eq!(phase(), (RequestPhase::Streaming, Tick(5000)));
    }

    #[test]
    fn the_oldest_of_all_cores_are_kept() {
        let of = |started, id: &str| ActiveRequest {
            id: id.to_owned(),
            model: "m".into(),
            phase: RequestPhase::Parked,
            since: Tick(started),
            started: Tick(started),
            key: None,
            route: "chat",
            tokens: 0,
        };
        let core = |oldest: Vec<ActiveRequest>| ActiveRequestList {
            total: oldest.len(),
            oldest,
            tokens: BTreeMap::from([("m".into(), 2)]),
        };
        let cores = [core(vec![of(3, "c"), of(5, "e")]), core(vec![of(1, "a"), of(3, "b")])];
        let joined = ActiveRequestList::join(cores, 3);
        assert_eq!(ids(&joined), ["a", "b", "c"]);
        assert_eq!((joined.total, joined.tokens["m"]), (4, 4));
    }
}
