use super::*;

/// Numbers without an obvious pattern, the same in every run.
fn scrambled(seed: u64) -> impl Iterator<Item = u64> {
    std::iter::successors(Some(seed), |n| {
        Some(n.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407))
    })
    .map(|n| n >> 33)
}

fn assert_is_sound(map: &SharedMap<u64, u64>, expected: &BTreeMap<u64, u64>) {
    assert!(map.iter().eq(expected.iter()));
    assert_eq!(map.len(), expected.len());
    assert!(map.chunks.iter().all(|chunk| !chunk.is_empty() && chunk.len() <= MAX_CHUNK_LEN));
    let mut pairs = map.chunks.iter().zip(map.chunks.iter().skip(1));
    assert!(pairs.all(|(a, b)| a.len().max(b.len()) >= MIN_CHUNK_LEN), "two small chunks are neighbours");
}

#[test]
fn a_shared_map_agrees_with_a_tree_after_any_changes() {
    for seed in 0..8 {
        let (mut map, mut tree) = (SharedMap::default(), BTreeMap::new());
        for (step, n) in scrambled(seed).take(4000).enumerate() {
            let key = n % 700;
            // The first half grows the map, the second shrinks it.
            let inserts_of_three = if step < 2000 { 2 } else { 1 };
            if n / 700 % 3 < inserts_of_three {
                assert_eq!(map.insert(key, n), tree.insert(key, n));
            } else {
                assert_eq!(map.remove(&key), tree.remove(&key));
            }
            assert_eq!(map.get(&key), tree.get(&key));
            if step % 100 == 0 {
                assert_is_sound(&map, &tree);
                assert!(map.iter_from(&key).eq(tree.range(key..)));
            }
        }
        tree.keys().rev().for_each(|key| assert!(map.remove(key).is_some()));
        assert!(map.is_empty() && map.chunks.is_empty());
    }
}

#[test]
fn a_map_built_at_once_has_every_entry() {
    for len in [0, 1, 47, 48, 49, 500] {
        let tree: BTreeMap<u64, u64> = (0..len).map(|n| (n * 2, n)).collect();
        let map = SharedMap::from(tree.clone());
        assert_is_sound(&map, &tree);
        assert_eq!(map, tree.into_iter().collect::<SharedMap<_, _>>());
        assert_eq!(map.iter_from(&1).next(), (len > 1).then_some((&2, &1)));
    }
}

#[test]
fn a_write_to_a_copy_copies_one_chunk_and_leaves_the_original_alone() {
    let original: SharedMap<u64, u64> = (0..5000).map(|n| (n, n)).collect();
    let mut copy = original.clone();
    *copy.get_mut(&2500).unwrap() = 0;
    let shared = original.chunks.iter().zip(copy.chunks.iter()).filter(|(a, b)| Arc::ptr_eq(a, b)).count();
    assert_eq!(shared, original.chunks.len() - 1);
    assert_eq!((original.get(&2500), copy.get(&2500)), (Some(&2500), Some(&0)));
    assert!(original != copy && copy.get_mut(&9999).is_none());
}

#[test]
fn keys_that_only_move_on_leave_no_long_list_of_small_chunks() {
    let mut set: SharedSet<(u64, u64)> = (0..1000).map(|id| (id, id)).collect();
    let mut at: BTreeMap<u64, u64> = (0..1000).map(|id| (id, id)).collect();
    for (now, n) in (1000..60_000).zip(scrambled(1)) {
        let id = n % 1000;
        let before = at.insert(id, now).unwrap();
        assert!(set.remove(&(before, id)) && set.insert((now, id)));
    }
    assert_eq!(set.iter().count(), 1000);
    assert!(set.0.chunks.len() <= 1 + 2 * 1000 / MIN_CHUNK_LEN, "{}", set.0.chunks.len());
}
