use std::collections::BTreeMap;

use rouse::units::Generation;

use super::{
    super::testing::{endpoints, limited, route},
    *,
};

mod cost;
mod simulation;

fn wanted(lots: &Rng) -> EndpointCriteria<'_> {
    EndpointCriteria { owner: None, session: None, prefix: None, exclude: None, rng: lots, now: &|| Tick(1) }
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
    two.endpoints[0].activity.set_waiting(30);
    let held_leases: Vec<_> = (0..30).map(|_| taken(&two, &wanted(&rng))).collect();
    assert_eq!(leases(&two), [0, 30]);
    two.endpoints[0].activity.clear_waiting();
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
        let wanted = EndpointCriteria { prefix: key, ..wanted(&rng) };
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
        let by = |session, prefix| taken(&route, &EndpointCriteria { session, prefix, ..wanted(&rng) }).0;
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
    let due = || route.candidate(0, &wanted).unwrap();
    let (first, second) = (due(), due());
    let tried = first.take_lease(&now);
    assert!(tried.is_some() && second.take_lease(&now).is_none());
    assert_eq!((route.endpoints[0].gate.leases(), route.endpoints[0].gate.last_end()), (1, Tick(0)));
}

/// For any keys, no engine's load exceeds its bound above the mean.
#[test]
fn the_load_of_preferred_engines_is_bounded() {
    for seed in 0..60u64 {
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
            let (engine, lease) = taken(&route, &EndpointCriteria { prefix: Some(key), ..wanted(&rng) });
            held_leases.push(lease);
            let mean = held_leases.len() as f64 / f64::from(n);
            let load = f64::from(*leases(&route).get(engine as usize).unwrap());
            assert!(load <= 1.25 * mean + 1.0, "{load} on {engine} with a mean of {mean}, {n} engines");
        }
    }
}

#[test]
fn with_room_every_key_stays_where_it_belongs_and_one_engine_less_moves_only_its_own() {
    let rng = Rng::seeded(11);
    let owners = |route: &ModelRoute| -> BTreeMap<u64, u32> {
        let by = |key| EndpointCriteria { prefix: Some(key), ..wanted(&rng) };
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
