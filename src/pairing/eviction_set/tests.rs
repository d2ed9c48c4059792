use super::*;

fn sleeper(on: &[&str], gib: u64, last_used: u64) -> Sleeper {
    Sleeper {
        accelerators: on.iter().map(|a| AcceleratorId::from(*a)).collect(),
        residue: Bytes::gib(gib),
        wanted: false,
        outdated: false,
        last_used: Tick(last_used),
        restart_time: Millis::secs(60),
    }
}

fn short(of: &[(&str, u64)]) -> AcceleratorShortage {
    let accelerators = of.iter().map(|(a, gib)| (AcceleratorId::from(*a), Bytes::gib(*gib))).collect();
    AcceleratorShortage { accelerators }
}

/// The choice accelerator by accelerator: the oldest first, until enough is free there.
fn one_by_one(sleepers: &[Sleeper], short: &AcceleratorShortage) -> Vec<usize> {
    let mut set = BTreeSet::new();
    for (accelerator, bytes) in &short.accelerators {
        let mut on: Vec<usize> =
            (0..sleepers.len()).filter(|i| sleepers[*i].accelerators.contains(accelerator)).collect();
        on.sort_by_key(|i| sleepers[*i].last_used);
        for i in on {
            let freed: Bytes = set
                .iter()
                .map(|i: &usize| &sleepers[*i])
                .filter(|s| s.accelerators.contains(accelerator))
                .map(|s| s.residue)
                .sum();
            if freed < *bytes {
                set.insert(i);
            }
        }
    }
    set.into_iter().collect()
}

#[test]
fn nothing_is_deleted_when_nothing_is_short_and_nothing_in_vain() {
    let all = [sleeper(&["a"], 2, 1)];
    assert_eq!(choose_eviction_set(&all, &short(&[])), Some(vec![]));
    assert_eq!(choose_eviction_set(&all, &short(&[("a", 0)])), Some(vec![]));
    assert_eq!(choose_eviction_set(&all, &short(&[("a", 3)])), None, "all of them are not enough");
    assert_eq!(choose_eviction_set(&all, &short(&[("b", 1)])), None);
}

#[test]
fn one_accelerator_each_the_oldest_that_is_enough_goes_alone() {
    // Oldest first would delete the small sleeper, and then still the large one.
    let all = [sleeper(&["a"], 1, 1), sleeper(&["a"], 4, 2), sleeper(&["a"], 4, 3)];
    let short = short(&[("a", 4)]);
    assert_eq!(one_by_one(&all, &short), [0, 1]);
    assert_eq!(choose_eviction_set(&all, &short), Some(vec![1]));
}

#[test]
fn one_accelerator_each_several_old_ones_go_before_a_young_one() {
    let all = [sleeper(&["a"], 2, 1), sleeper(&["a"], 2, 2), sleeper(&["a"], 4, 9)];
    assert_eq!(choose_eviction_set(&all, &short(&[("a", 4)])), Some(vec![0, 1]));
}

#[test]
fn two_accelerators_each_one_on_both_goes_instead_of_one_on_each() {
    // The oldest sleeper of a is also on c, and the oldest of b on d. Both c and d are within budget.
    let all = [sleeper(&["a", "c"], 2, 1), sleeper(&["b", "d"], 2, 2), sleeper(&["a", "b"], 2, 5)];
    let short = short(&[("a", 2), ("b", 2)]);
    assert_eq!(one_by_one(&all, &short), [0, 1]);
    assert_eq!(choose_eviction_set(&all, &short), Some(vec![2]));
}

#[test]
fn four_accelerators_each_two_halves_go_and_the_eight_wide_stays() {
    let wide = sleeper(&["a", "b", "c", "d", "e", "f", "g", "h"], 2, 1);
    let left = sleeper(&["a", "b", "e", "f"], 2, 2);
    let exact = sleeper(&["a", "b", "c", "d"], 2, 8);
    let right = sleeper(&["c", "d", "g", "h"], 2, 3);
    let short = short(&[("a", 2), ("b", 2), ("c", 2), ("d", 2)]);
    let all = [wide.clone(), left.clone(), right.clone(), exact];
    assert_eq!(one_by_one(&all, &short), [0]);
    assert_eq!(choose_eviction_set(&all, &short), Some(vec![3]), "e to h are within their budgets");
    // Without the exact fit, the wide sleeper frees as much surplus as both halves, and was used longest ago.
    assert_eq!(choose_eviction_set(&[wide, left, right], &short), Some(vec![0]));
}

#[test]
fn what_is_outdated_goes_first_and_what_somebody_waits_for_last() {
    let mut all = [sleeper(&["a"], 2, 1), sleeper(&["a"], 2, 2), sleeper(&["a"], 2, 3)];
    all[2].outdated = true;
    assert_eq!(choose_eviction_set(&all, &short(&[("a", 2)])), Some(vec![2]));
    all[2].wanted = true;
    assert_eq!(choose_eviction_set(&all, &short(&[("a", 2)])), Some(vec![0]));
}

#[test]
fn what_frees_least_beyond_need_goes_before_what_was_used_longer_ago() {
    let all = [sleeper(&["a"], 6, 1), sleeper(&["a"], 2, 9), sleeper(&["a"], 3, 5)];
    assert_eq!(choose_eviction_set(&all, &short(&[("a", 2)])), Some(vec![1]));
    // The surplus counts over all accelerators together, and never outweighs sparing one that is within its budget.
    let all = [sleeper(&["a", "b"], 5, 1), sleeper(&["a", "b"], 3, 9), sleeper(&["a", "b", "c"], 2, 2)];
    assert_eq!(choose_eviction_set(&all, &short(&[("a", 2), ("b", 2)])), Some(vec![1]));
}

#[test]
fn what_is_outdated_goes_though_it_frees_more() {
    let mut all = [sleeper(&["a"], 6, 9), sleeper(&["a"], 2, 1)];
    all[0].outdated = true;
    assert_eq!(choose_eviction_set(&all, &short(&[("a", 2)])), Some(vec![0]));
}

#[test]
fn less_than_a_gib_beyond_need_is_no_reason() {
    let mut all = [sleeper(&["a"], 2, 1), sleeper(&["a"], 2, 9)];
    all[0].residue += Bytes::mib(300);
    assert_eq!(choose_eviction_set(&all, &short(&[("a", 2)])), Some(vec![0]));
}

#[test]
fn of_equals_that_one_goes_which_is_back_soonest() {
    let mut all = [sleeper(&["a"], 2, 1), sleeper(&["a"], 2, 1)];
    all[1].restart_time = Millis::secs(5);
    assert_eq!(choose_eviction_set(&all, &short(&[("a", 2)])), Some(vec![1]));
}

#[test]
fn with_more_sleepers_than_can_be_tried_the_oldest_that_are_needed_go() {
    let all: Vec<_> = (0..40).map(|i| sleeper(&["a"], 1, i)).collect();
    assert_eq!(choose_eviction_set(&all, &short(&[("a", 30)])), Some((0..30).collect()));
    assert_eq!(choose_eviction_set(&all, &short(&[("a", 3)])), Some(vec![0, 1, 2]));
    assert_eq!(choose_eviction_set(&all, &short(&[("a", 41)])), None);
}

/// A brute-force search over every set gives the same score. No chosen set has a superfluous member.
#[test]
fn no_other_set_is_better() {
    let mut random = crate::sim::SplitMix64::new(7);
    let names = ["a", "b", "c", "d"];
    for _ in 0..2000 {
        let all: Vec<_> = (0..random.between(1, 7))
            .map(|_| {
                let on: Vec<&str> = names.into_iter().filter(|_| random.chance(0.5)).collect();
                let mut one = sleeper(&on, random.between(1, 3), random.between(1, 5));
                one.outdated = random.chance(0.2);
                one
            })
            .collect();
        let need = names.map(|a| (a, if random.chance(0.5) { random.between(0, 4) } else { 0 }));
        let short = short(&need);
        let indices: Vec<usize> = (0..all.len()).collect();
        let sets = (0_u32..1 << all.len())
            .map(|mask| indices.iter().copied().filter(|i| mask & (1 << i) != 0).collect::<Vec<_>>())
            .filter(|set| short.is_covered_by(pick(&all, set)));
        let best = sets.map(|set| score(&all, &set, &short)).min();
        let chosen = choose_eviction_set(&all, &short);
        assert_eq!(chosen.as_ref().map(|set| score(&all, set, &short)), best);
        for at in chosen.iter().flatten() {
            let without: Vec<_> = chosen.iter().flatten().copied().filter(|i| i != at).collect();
            assert!(!short.is_covered_by(pick(&all, &without)), "one too many");
        }
    }
}

/// Covers also numbers of sleepers too large to try every set.
#[test]
fn no_other_goes_where_an_outdated_one_frees_the_same() {
    let mut random = crate::sim::SplitMix64::new(11);
    let mut outdated_gone = 0;
    for _ in 0..2000 {
        let all: Vec<_> = (0..random.between(2, 24))
            .map(|_| {
                let on: &[&str] = random.pick(&[&["a"][..], &["b"], &["a", "b"]]).expect("one of three");
                let mut one = sleeper(on, random.between(1, 2), random.between(1, 90));
                one.outdated = random.chance(0.4);
                one
            })
            .collect();
        let need = ["a", "b"].map(|a| (a, random.between(0, 9)));
        let Some(gone) = choose_eviction_set(&all, &short(&need)) else { continue };
        let stays = |i: &usize| !gone.contains(i);
        for one in gone.iter().map(|i| &all[*i]) {
            outdated_gone += u32::from(one.outdated);
            let same =
                |other: &Sleeper| (&other.accelerators, other.residue) == (&one.accelerators, one.residue);
            let instead = (0..all.len()).filter(stays).find(|i| all[*i].outdated && same(&all[*i]));
            assert!(one.outdated || instead.is_none(), "{gone:?} of {all:?} for {need:?}");
        }
    }
    assert!(outdated_gone > 500, "{outdated_gone}");
}
