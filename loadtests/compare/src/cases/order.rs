//! The order of measurements.
//!
//! A machine's speed drifts by more than the compared differences: within a minute for reasons of its own, and because
//! of earlier work. So every target is measured next to nginx in time, each round begins with another target, and every
//! second round runs backwards. The result is the median over rounds of the ratio within a group. The stub is measured
//! next to the gateway, its reference, instead.

use crate::{cases::BenchCase, peers::ComparedProxy};

/// One measurement to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Measurement {
    pub(crate) target: ComparedProxy,
    pub(crate) workers: usize,
}

/// Returns groups of neighbours, each with nginx in it once. `workers` has nginx with one worker and with two.
pub(crate) fn groups(case: BenchCase, targets: &[ComparedProxy], round: u32) -> Vec<Vec<Measurement>> {
    let one = |target| Measurement { target, workers: 1 };
    let mut targets_in_turn: Vec<_> =
        targets.iter().copied().filter(|&target| case.applies_to(target)).collect();
    let with_stub = targets_in_turn.contains(&ComparedProxy::Stub);
    targets_in_turn.retain(|target| !matches!(target, ComparedProxy::Nginx | ComparedProxy::Stub));
    if !targets_in_turn.is_empty() {
        let places = targets_in_turn.len();
        targets_in_turn.rotate_left(round as usize % places);
    }
    let mut groups: Vec<Vec<Measurement>> = if case == BenchCase::Workers {
        let both = |target| [1, 2].map(|workers| Measurement { target, workers });
        vec![targets_in_turn.into_iter().chain([ComparedProxy::Nginx]).flat_map(both).collect()]
    } else {
        let mut groups = Vec::new();
        for pair in targets_in_turn.chunks(2) {
            // In the middle it is a neighbour of both.
            let mut group = vec![one(ComparedProxy::Nginx)];
            group.splice(0..0, pair.first().map(|&target| one(target)));
            group.extend(pair.get(1).map(|&target| one(target)));
            groups.push(group);
        }
        groups
    };
    if round % 2 == 1 {
        groups.reverse();
        groups.iter_mut().for_each(|group| group.reverse());
    }
    if with_stub {
        groups.iter_mut().for_each(|group| put_stub_beside_rouse(group, round));
    }
    groups
}

/// Inserts the stub into the gateway's group, on the side away from nginx. So nginx stays the gateway's neighbour too.
/// The stub is alternately the last and the first of the group.
fn put_stub_beside_rouse(group: &mut Vec<Measurement>, round: u32) {
    let Some(rouse) = group.iter().position(|spot| spot.target == ComparedProxy::Rouse) else { return };
    if rouse == 0 {
        group.reverse();
    }
    group.push(Measurement { target: ComparedProxy::Stub, workers: 1 });
    if round % 2 == 1 {
        group.reverse();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TARGETS: [ComparedProxy; 5] = [
        ComparedProxy::Direct,
        ComparedProxy::Rouse,
        ComparedProxy::Nginx,
        ComparedProxy::Haproxy,
        ComparedProxy::Smg,
    ];

    #[test]
    fn every_target_is_beside_nginx_in_every_round_once() {
        for round in 0..6 {
            let groups = groups(BenchCase::Saturated, &TARGETS, round);
            let mut seen: Vec<_> = groups.iter().flatten().map(|spot| spot.target).collect();
            for group in &groups {
                let nginx = group.iter().position(|spot| spot.target == ComparedProxy::Nginx).expect("nginx");
                assert!(group.iter().enumerate().all(|(at, _)| at.abs_diff(nginx) <= 1));
            }
            seen.retain(|&target| target != ComparedProxy::Nginx);
            seen.sort();
            assert_eq!(
                seen,
                [ComparedProxy::Direct, ComparedProxy::Rouse, ComparedProxy::Haproxy, ComparedProxy::Smg]
            );
        }
    }

    #[test]
    fn the_stub_is_beside_the_gateway_now_after_it_and_now_before() {
        let mut with_stub = TARGETS.to_vec();
        with_stub.insert(2, ComparedProxy::Stub);
        for round in 0..6 {
            for case in [BenchCase::Streams400, BenchCase::Start] {
                let all = groups(case, &with_stub, round);
                let group =
                    all.iter().find(|group| group.iter().any(|spot| spot.target == ComparedProxy::Stub));
                let mut order: Vec<_> = group.unwrap().iter().map(|spot| spot.target).collect();
                if round % 2 == 1 {
                    order.reverse();
                }
                assert!(
                    order.ends_with(&[ComparedProxy::Nginx, ComparedProxy::Rouse, ComparedProxy::Stub]),
                    "{order:?}"
                );
                let mut seen: Vec<_> = all.iter().flatten().map(|spot| spot.target).collect();
                seen.retain(|&target| target != ComparedProxy::Nginx);
                seen.sort();
                let all_but_nginx =
                    with_stub.iter().copied().filter(|&target| target != ComparedProxy::Nginx);
                assert!(seen.into_iter().eq(all_but_nginx.filter(|&target| case.applies_to(target))));
            }
            for case in BenchCase::ALL.into_iter().filter(|case| !case.applies_to(ComparedProxy::Stub)) {
                assert_eq!(groups(case, &with_stub, round), groups(case, &TARGETS, round), "{case}");
            }
        }
    }

    #[test]
    fn rounds_begin_differently_and_each_second_one_runs_backwards() {
        let first = |round| groups(BenchCase::Saturated, &TARGETS, round)[0][0].target;
        let order: Vec<_> = (0..4).map(first).collect();
        assert_eq!(
            order,
            [ComparedProxy::Direct, ComparedProxy::Direct, ComparedProxy::Haproxy, ComparedProxy::Haproxy]
        );
    }

    #[test]
    fn one_worker_and_two_are_neighbours() {
        let groups = groups(BenchCase::Workers, &TARGETS, 0);
        let spots: Vec<_> = groups.iter().flatten().map(|spot| (spot.target, spot.workers)).collect();
        assert_eq!(
            spots,
            [
                (ComparedProxy::Rouse, 1),
                (ComparedProxy::Rouse, 2),
                (ComparedProxy::Nginx, 1),
                (ComparedProxy::Nginx, 2)
            ]
        );
    }
}
