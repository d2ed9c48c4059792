use std::collections::{BTreeMap, VecDeque};

use rouse::{engine::saturation_limit::MAX_LIMIT_AGE, units::Generation};
use rouse_net::engine_load::EngineLoad;

use super::{
    super::testing::{endpoints, limited, route},
    *,
};

mod caches;
mod cost;
mod simulation;

fn wanted(lots: &Rng) -> EndpointCriteria<'_> {
    let (owner, session, prefix, exclude) = (None, None, None, None);
    EndpointCriteria { owner, session, prefix, exclude, may_park: true, rng: lots, now: &|| Tick(1) }
}

/// The key of a conversation's first request.
fn first_turn(hash: u64) -> Option<ConversationKey> {
    Some(ConversationKey { hash, is_new: true })
}

/// Records a report of an engine with this use of its KV cache, and this many requests in its queue.
fn report(route: &ModelRoute, replica: usize, kv_use: f64, waiting: f64) {
    let load = EngineLoad { kv_use: Some(kv_use), waiting: Some(waiting), running: Some(0.0) };
    route.endpoints[replica].activity.record_load(&load, Tick(1));
}

fn taken(route: &ModelRoute, wanted: &EndpointCriteria<'_>) -> (u32, Lease) {
    let (endpoint, lease) = route.take_lease(wanted).unwrap();
    (endpoint.engine.replica, lease)
}

fn leases(route: &ModelRoute) -> Vec<u32> {
    route.endpoints.iter().map(|endpoint| endpoint.gate.leases()).collect()
}

#[test]
fn a_model_with_one_engine_costs_no_lot_and_no_ring() {
    let (rng, same) = (Rng::seeded(3), Rng::seeded(3));
    let one = route(endpoints(0..1));
    assert!(one.ring.is_none());
    for key in 0..100 {
        assert_eq!(taken(&one, &EndpointCriteria { session: Some(key), ..wanted(&rng) }).0, 0);
    }
    assert_eq!(rng.next_u64(), same.next_u64());
    let own = EngineId::new("m".into(), 0);
    assert!(one.take_lease(&EndpointCriteria { exclude: Some(&own), ..wanted(&rng) }).is_none());
    assert!(route(Vec::new()).take_lease(&wanted(&rng)).is_none());
}

#[test]
fn without_a_key_the_engines_fill_evenly() {
    let rng = Rng::seeded(5);
    for n in [2, 3, 8] {
        let route = route(endpoints(0..n));
        let held_leases: Vec<_> = (0..n * 100).map(|_| taken(&route, &wanted(&rng))).collect();
        let counts = leases(&route);
        assert!(counts.iter().all(|&c| (97..=103).contains(&c)), "{counts:?}");
        drop(held_leases);
    }
}

#[test]
fn a_queue_inside_an_engine_weighs_as_leases_do_and_a_larger_engine_takes_more() {
    let rng = Rng::seeded(6);
    let two = route(endpoints(0..2));
    let queued = EngineLoad { waiting: Some(30.0), ..EngineLoad::default() };
    two.endpoints[0].activity.load().record(&queued, Tick(1));
    let held_leases: Vec<_> = (0..30).map(|_| taken(&two, &wanted(&rng))).collect();
    assert_eq!(leases(&two), [0, 30]);
    two.endpoints[0].activity.load().clear();
    drop(held_leases);
    let uneven = route(vec![limited(0, Some(30)), limited(1, Some(90))]);
    let held_leases: Vec<_> = (0..60).map(|_| taken(&uneven, &wanted(&rng))).collect();
    assert_eq!(leases(&uneven), [15, 45]);
    drop(held_leases);
}

#[test]
fn what_is_full_or_closed_is_passed_over_until_nothing_is_left() {
    let rng = Rng::seeded(7);
    let limits = [Some(2), Some(5), Some(3)];
    let engines: Vec<_> = (0..).zip(limits).map(|(replica, limit)| limited(replica, limit)).collect();
    let route = route(engines);
    route.endpoints[2].gate.close();
    for key in [None, Some(1), Some(2), Some(3)] {
        let wanted = EndpointCriteria { prefix: key.and_then(first_turn), ..wanted(&rng) };
        let held_leases: Vec<_> = (0..7).map(|_| taken(&route, &wanted)).collect();
        assert!(route.take_lease(&wanted).is_none());
        assert_eq!(leases(&route), [2, 5, 0]);
        drop(held_leases);
    }
}

#[test]
fn a_key_keeps_its_engine_and_a_session_goes_before_a_beginning() {
    let rng = Rng::seeded(8);
    let route = route(endpoints(0..8));
    for key in 0..200 {
        let by = |session, prefix: Option<u64>| {
            let prefix = prefix.and_then(first_turn);
            taken(&route, &EndpointCriteria { session, prefix, ..wanted(&rng) }).0
        };
        let own = by(Some(key), None);
        assert!((0..20).all(|other| by(Some(key), Some(other)) == own));
        assert_eq!(by(None, Some(key)), own);
    }
}

#[test]
fn who_made_a_response_goes_on_from_it_while_that_life_lasts() {
    let rng = Rng::seeded(9);
    let route = route((0..4).map(|replica| limited(replica, Some(9))).collect());
    for replica in 0..4 {
        let mut owner: EngineGeneration = (EngineId::new("m".into(), replica), Generation(1));
        let by = |author: &EngineGeneration, key| {
            taken(&route, &EndpointCriteria { owner: Some(author), session: Some(key), ..wanted(&rng) })
        };
        // Whatever its load.
        let held_leases: Vec<_> = (0..9).map(|key| by(&owner, key)).collect();
        assert!(held_leases.iter().all(|(engine, _)| *engine == replica));
        let full = EndpointCriteria { owner: Some(&owner), session: Some(0), ..wanted(&rng) };
        assert!(
            route.take_lease(&full).is_none(),
            "it waits for a place there: the others do not know the response"
        );
        drop(held_leases);
        owner.1 = Generation(2);
        let others: Vec<u32> = (0..50).map(|key| by(&owner, key).0).collect();
        assert!(others.iter().any(|engine| *engine != replica), "of a life that is over");
    }
}

#[test]
fn one_that_was_just_found_absent_is_avoided_by_every_rule() {
    let rng = Rng::seeded(10);
    let route = route(endpoints(0..3));
    for replica in 0..3 {
        let owner = (EngineId::new("m".into(), replica), Generation(1));
        for key in 0..50 {
            for owner in [None, Some(&owner)] {
                for session in [None, Some(key)] {
                    let avoid = EngineId::new("m".into(), replica);
                    let wanted = EndpointCriteria { owner, session, exclude: Some(&avoid), ..wanted(&rng) };
                    assert_ne!(taken(&route, &wanted).0, replica);
                }
            }
        }
    }
}

#[test]
fn a_lease_that_loses_the_trial_to_another_is_no_use_of_the_engine() {
    let rng = Rng::seeded(12);
    let route = route(endpoints(0..2));
    let standing = &route.endpoints[0].circuit_breaker;
    assert_eq!((0..5).filter_map(|_| standing.record_failure(Tick(1), Tick(1))).count(), 1);
    let now = || Tick(1_000_000);
    let wanted = EndpointCriteria { now: &now, ..wanted(&rng) };
    let choice = EndpointChoice { route: &route, criteria: &wanted, now: OnceCell::new() };
    let due = || choice.candidate(0).unwrap();
    let (first, second) = (due(), due());
    let tried = choice.take(first);
    assert!(tried.is_some() && choice.take(second).is_none());
    assert_eq!((route.endpoints[0].gate.leases(), route.endpoints[0].gate.last_end()), (1, Tick(0)));
}

/// For any keys, no engine's load exceeds its bound above the mean.
#[test]
fn the_load_of_preferred_engines_is_bounded() {
    for (seed, is_new) in (0..60u64).flat_map(|seed| [(seed, true), (seed, false)]) {
        let (share, more) = if is_new { (1.25, 1.0) } else { (2.0, 6.0) };
        let rng = Rng::seeded(seed);
        let n = 2 + u32::try_from(seed % 9).unwrap();
        let route = route(endpoints(0..n));
        // From one shared key to a separate key per request.
        let keys = 1 + rng.next_u64() % (1 << (seed % 12));
        let mut held_leases = Vec::new();
        for _ in 0..1500 {
            if !held_leases.is_empty() && rng.next_u64().is_multiple_of(3) {
                held_leases.swap_remove((rng.next_u64() % held_leases.len() as u64) as usize);
            }
            let key = (rng.next_u64() % keys).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            let prefix = Some(ConversationKey { hash: key, is_new });
            let (engine, lease) = taken(&route, &EndpointCriteria { prefix, ..wanted(&rng) });
            held_leases.push(lease);
            let mean = held_leases.len() as f64 / f64::from(n);
            let load = f64::from(*leases(&route).get(engine as usize).unwrap());
            // The bound holds without the request itself.
            assert!(load <= share * mean + more + 1.0, "{load} on {engine}, mean {mean}, {n} engines");
        }
    }
}

#[test]
fn with_room_every_key_stays_where_it_belongs_and_one_engine_less_moves_only_its_own() {
    let rng = Rng::seeded(11);
    let owners = |route: &ModelRoute| -> BTreeMap<u64, u32> {
        let by = |key| EndpointCriteria { prefix: first_turn(key), ..wanted(&rng) };
        (0..3000u64).map(|key| (key, taken(route, &by(key.wrapping_mul(0x9E37_79B9_7F4A_7C15))).0)).collect()
    };
    for n in 2..9 {
        let whole = owners(&route(endpoints(0..n)));
        let rest = owners(&route(endpoints(1..n)));
        let moved = whole.iter().filter(|(key, owner)| rest.get(key) != Some(owner)).count();
        assert!(whole.iter().all(|(key, owner)| *owner == 0 || rest.get(key) == Some(owner)));
        assert!(moved < 3000 * 5 / 4 / n as usize, "{moved} with {n}");
    }
}

#[test]
fn the_same_engines_keep_their_ring_and_others_get_a_new_one() {
    let first = route(endpoints(0..3));
    let again = |engines| ModelRoute::new(0, first.state, None, 3, None, engines, Some(&first));
    let kept = |route: &ModelRoute| {
        let (old, new) = (first.ring.as_ref().unwrap(), route.ring.as_ref());
        new.is_some_and(|new| std::sync::Arc::ptr_eq(old, new))
    };
    assert!(kept(&again(endpoints(0..3))), "a new life of an engine is not another engine");
    assert!(!kept(&again(endpoints(0..4))) && !kept(&again(endpoints([0, 2, 1]))));
    assert!(again(endpoints(0..1)).ring.is_none());
}

#[test]
fn a_popular_key_gets_several_engines_and_the_others_keep_theirs() {
    let rng = Rng::seeded(13);
    let route = route(endpoints(0..4));
    let by = |key| taken(&route, &EndpointCriteria { session: Some(key), ..wanted(&rng) });
    let other = by(0x9E37_79B9_7F4A_7C15).0;
    let (mut got, mut held_leases) = ([0; 4], VecDeque::new());
    for request in 0..4000u64 {
        // A fifth of all requests has one key, and all others have keys of their own.
        if !request.is_multiple_of(5) {
            drop(by(request.wrapping_mul(0x9E37_79B9_7F4A_7C15)));
            continue;
        }
        let (replica, lease) = by(7);
        got[replica as usize] += u32::from(request > 2000);
        held_leases.push_back(lease);
        if held_leases.len() > 8 {
            held_leases.pop_front();
        }
    }
    got.sort_unstable();
    assert!(got[0] == 0 && got[1] == 0 && got[2] > 150 && got[2] + got[3] == 399, "{got:?}");
    assert_eq!(by(0x9E37_79B9_7F4A_7C15).0, other);
}

#[test]
fn saturated_engines_come_last_whatever_the_key() {
    let rng = Rng::seeded(14);
    let route = route((0..3).map(|replica| limited(replica, Some(10))).collect());
    (0..2).for_each(|replica| report(&route, replica, 0.8, 1.0));
    for session in [None, Some(1), Some(2), Some(3)] {
        let wanted = EndpointCriteria { session, ..wanted(&rng) };
        let held_leases: Vec<_> = (0..12).map(|_| taken(&route, &wanted)).collect();
        // A saturated engine that has no request may have one.
        assert_eq!(leases(&route), [1, 1, 10]);
        assert!(route.take_lease(&wanted).is_none(), "it waits at the gateway");
        drop(held_leases);
    }
}

#[test]
fn full_caches_without_queues_hold_no_request_back_and_leave_each_key_its_engine() {
    let rng = Rng::seeded(17);
    let route = route(endpoints(0..4));
    let by = |session| EndpointCriteria { session: Some(session), ..wanted(&rng) };
    let keys: Vec<u64> = (0..20u64).map(|key| key.wrapping_mul(0x9E37_79B9_7F4A_7C15)).collect();
    let owners: Vec<u32> = keys.iter().map(|key| taken(&route, &by(*key)).0).collect();
    (0..4).for_each(|replica| report(&route, replica, 0.95, 0.0));
    assert!(keys.iter().map(|key| taken(&route, &by(*key)).0).eq(owners));
    let held_leases: Vec<_> = (0..400).map(|_| taken(&route, &wanted(&rng))).collect();
    assert_eq!(held_leases.len(), 400);
}

#[test]
fn at_its_limit_a_saturated_engine_takes_only_what_cannot_wait_and_an_old_report_limits_nothing() {
    let rng = Rng::seeded(15);
    for engines in [1, 2] {
        let route = route(endpoints(0..engines));
        let owner: EngineGeneration = (EngineId::new("m".into(), 0), Generation(1));
        let all = EndpointCriteria { owner: Some(&owner), ..wanted(&rng) };
        let held_leases: Vec<_> = (0..3).map(|_| taken(&route, &all)).collect();
        (0..route.endpoints.len()).for_each(|replica| report(&route, replica, 0.95, 1.0));
        assert!(route.take_lease(&all).is_none(), "it has three, and may keep as many");
        drop(route.take_lease(&EndpointCriteria { may_park: false, ..all }).unwrap());
        let later = || Tick(1) + MAX_LIMIT_AGE;
        drop(route.take_lease(&EndpointCriteria { now: &later, ..all }).unwrap());
        let mut held_leases = held_leases;
        held_leases.pop();
        assert_eq!(taken(&route, &all).0, 0, "one has ended");
    }
}

#[test]
fn the_use_of_the_kv_cache_weighs_the_requests_and_an_old_reading_weighs_nothing() {
    let rng = Rng::seeded(16);
    let (two, later) = (route(endpoints(0..2)), || Tick(6_000));
    report(&two, 0, 0.75, 0.0);
    let held_leases: Vec<_> = (0..110).map(|_| taken(&two, &wanted(&rng))).collect();
    assert_eq!(leases(&two), [40, 70]);
    drop(held_leases);
    let held_leases: Vec<_> =
        (0..110).map(|_| taken(&two, &EndpointCriteria { now: &later, ..wanted(&rng) })).collect();
    assert_eq!(leases(&two), [55, 55]);
    drop(held_leases);
}
