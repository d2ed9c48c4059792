//! Ordered maps and sets whose copies share all entries, and whose writes copy only a small part of them.
//!
//! Planning works on copies of the state, and a plan with one command changes one engine of thousands. A shared
//! `BTreeMap` would be copied whole for that command. A [`SharedMap`] is a sorted list of sorted chunks: a write to a
//! shared map copies the list, which has one pointer for dozens of entries, and one chunk.

use std::{collections::BTreeMap, fmt, sync::Arc};

/// Most entries of a chunk. A full one is split in half, or begins another if the new key is beyond all others.
const MAX_CHUNK_LEN: usize = 64;
/// A chunk that comes to have fewer entries is joined with a neighbour, if both together have at most
/// [`NEW_CHUNK_LEN`]. So of two neighbours, one at least has this many.
const MIN_CHUNK_LEN: usize = 16;
/// Entries of a chunk of a newly built map.
const NEW_CHUNK_LEN: usize = 48;

/// An ordered map. A clone costs one reference count.
#[derive(Clone)]
pub struct SharedMap<K, V> {
    /// Sorted, as are the entries of each chunk. No chunk is empty.
    chunks: Arc<Vec<Chunk<K, V>>>,
    len: usize,
}

type Chunk<K, V> = Arc<Vec<(K, V)>>;

/// An ordered set. A clone costs one reference count.
#[derive(Clone)]
pub struct SharedSet<K>(SharedMap<K, ()>);

impl<K: Ord, V> SharedMap<K, V> {
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    #[must_use]
    pub fn get(&self, key: &K) -> Option<&V> {
        let chunk = self.chunks.get(self.chunk_of(key))?;
        let at = position(chunk, key).ok()?;
        chunk.get(at).map(|(_, value)| value)
    }

    #[must_use]
    pub fn contains_key(&self, key: &K) -> bool {
        self.get(key).is_some()
    }

    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.chunks.iter().flat_map(|chunk| chunk.iter()).map(|(key, value)| (key, value))
    }

    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.iter().map(|(key, _)| key)
    }

    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.iter().map(|(_, value)| value)
    }

    /// Returns the entries from this key on.
    pub fn iter_from(&self, first: &K) -> impl Iterator<Item = (&K, &V)> + use<'_, K, V> {
        let chunks = self.chunks.get(self.chunk_of(first)..).unwrap_or_default();
        let (entries, later) = match chunks {
            [chunk, later @ ..] => {
                let before = chunk.partition_point(|(key, _)| key < first);
                (chunk.get(before..).unwrap_or_default(), later)
            }
            [] => (&[][..], &[][..]),
        };
        // Nearly always the first chunk has all the entries that are read.
        let later = later.iter().flat_map(|chunk| chunk.iter());
        entries.iter().chain(later).map(|(key, value)| (key, value))
    }

    /// The position of the only chunk that may have this key: the last one if the key is beyond all entries.
    fn chunk_of(&self, key: &K) -> usize {
        let ends_before = |chunk: &Chunk<K, V>| chunk.last().is_some_and(|(last, _)| last < key);
        self.chunks.split_last().map_or(0, |(_, before_last)| before_last.partition_point(ends_before))
    }
}

impl<K: Ord + Clone, V: Clone> SharedMap<K, V> {
    /// Returns the value for a change. An unknown key copies nothing.
    pub fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        let at = self.chunk_of(key);
        let within = position(self.chunks.get(at)?, key).ok()?;
        let chunk = Arc::make_mut(&mut self.chunks).get_mut(at)?;
        Arc::make_mut(chunk).get_mut(within).map(|(_, value)| value)
    }

    /// Returns the value that the key had before.
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        let at = self.chunk_of(&key);
        let chunks = Arc::make_mut(&mut self.chunks);
        if chunks.is_empty() {
            chunks.push(Arc::default());
        }
        let chunk = Arc::make_mut(chunks.get_mut(at)?);
        match position(chunk, &key) {
            Ok(within) => chunk.get_mut(within).map(|(_, known)| std::mem::replace(known, value)),
            Err(within) => {
                self.len += 1;
                if chunk.len() < MAX_CHUNK_LEN {
                    chunk.insert(within, (key, value));
                } else if within == MAX_CHUNK_LEN {
                    // Keys that come in order leave full chunks behind.
                    chunks.insert(at + 1, Arc::new(vec![(key, value)]));
                } else {
                    let mut upper = chunk.split_off(MAX_CHUNK_LEN / 2);
                    chunk.shrink_to_fit();
                    match within.checked_sub(chunk.len()) {
                        Some(within_upper) => upper.insert(within_upper, (key, value)),
                        None => chunk.insert(within, (key, value)),
                    }
                    chunks.insert(at + 1, Arc::new(upper));
                }
                None
            }
        }
    }

    /// Returns the value that the key had. An unknown key copies nothing.
    pub fn remove(&mut self, key: &K) -> Option<V> {
        let at = self.chunk_of(key);
        let within = position(self.chunks.get(at)?, key).ok()?;
        let chunks = Arc::make_mut(&mut self.chunks);
        let chunk = Arc::make_mut(chunks.get_mut(at)?);
        let (_, value) = chunk.remove(within);
        if chunk.is_empty() {
            chunks.remove(at);
        } else if chunk.len() < MIN_CHUNK_LEN {
            join_with_neighbours(chunks, at);
        }
        self.len -= 1;
        Some(value)
    }
}

/// Joins a small chunk with those beside it, unless the result would be large.
///
/// Without this, a map whose keys come and go could end as a long list of chunks with one entry each.
fn join_with_neighbours<K: Clone, V: Clone>(chunks: &mut Vec<Chunk<K, V>>, at: usize) {
    join_with_next(chunks, at);
    if let Some(before) = at.checked_sub(1) {
        join_with_next(chunks, before);
    }
}

fn join_with_next<K: Clone, V: Clone>(chunks: &mut Vec<Chunk<K, V>>, at: usize) {
    let len_of = |at: usize| chunks.get(at).map_or(0, |chunk| chunk.len());
    if at + 1 >= chunks.len() || len_of(at) + len_of(at + 1) > NEW_CHUNK_LEN {
        return;
    }
    let upper = chunks.remove(at + 1);
    if let Some(lower) = chunks.get_mut(at) {
        Arc::make_mut(lower).extend(upper.iter().cloned());
    }
}

fn position<K: Ord, V>(chunk: &[(K, V)], key: &K) -> Result<usize, usize> {
    chunk.binary_search_by(|(known, _)| known.cmp(key))
}

impl<K, V> Default for SharedMap<K, V> {
    fn default() -> Self {
        Self { chunks: Arc::default(), len: 0 }
    }
}

impl<K: Ord, V> From<BTreeMap<K, V>> for SharedMap<K, V> {
    fn from(map: BTreeMap<K, V>) -> Self {
        let len = map.len();
        let mut entries = map.into_iter();
        let mut chunks: Vec<Chunk<K, V>> = Vec::with_capacity(len.div_ceil(NEW_CHUNK_LEN));
        loop {
            let chunk: Vec<(K, V)> = entries.by_ref().take(NEW_CHUNK_LEN).collect();
            if chunk.is_empty() {
                return Self { chunks: Arc::new(chunks), len };
            }
            chunks.push(Arc::new(chunk));
        }
    }
}

impl<K: Ord, V> FromIterator<(K, V)> for SharedMap<K, V> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(entries: I) -> Self {
        Self::from(entries.into_iter().collect::<BTreeMap<K, V>>())
    }
}

impl<K: Ord, V: PartialEq> PartialEq for SharedMap<K, V> {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.chunks, &other.chunks) || (self.len == other.len && self.iter().eq(other.iter()))
    }
}

impl<K: Ord, V: Eq> Eq for SharedMap<K, V> {}

impl<K: Ord + fmt::Debug, V: fmt::Debug> fmt::Debug for SharedMap<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

impl<K: Ord> SharedSet<K> {
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    #[must_use]
    pub fn contains(&self, key: &K) -> bool {
        self.0.contains_key(key)
    }

    pub fn iter(&self) -> impl Iterator<Item = &K> {
        self.0.keys()
    }
}

impl<K: Ord + Clone> SharedSet<K> {
    /// Returns whether the key is new. A known key copies nothing.
    pub fn insert(&mut self, key: K) -> bool {
        !self.0.contains_key(&key) && self.0.insert(key, ()).is_none()
    }

    /// Returns whether the set had the key. An unknown key copies nothing.
    pub fn remove(&mut self, key: &K) -> bool {
        self.0.remove(key).is_some()
    }
}

impl<K> Default for SharedSet<K> {
    fn default() -> Self {
        Self(SharedMap::default())
    }
}

impl<K: Ord> FromIterator<K> for SharedSet<K> {
    fn from_iter<I: IntoIterator<Item = K>>(keys: I) -> Self {
        Self(keys.into_iter().map(|key| (key, ())).collect())
    }
}

impl<K: Ord> PartialEq for SharedSet<K> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl<K: Ord> Eq for SharedSet<K> {}

impl<K: Ord + fmt::Debug> fmt::Debug for SharedSet<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests;
