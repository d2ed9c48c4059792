//! Reads the objects of a list on another thread, page by page.
//!
//! The client library requests a page once all objects of the page before were taken from it. If they were read first,
//! a new leader with thousands of Pods would wait for the API server and for itself in turn.

use std::mem;

use kube::Resource;
use serde::de::DeserializeOwned;
use tokio::task::{self, JoinHandle};

use super::{LIST_PAGE_SIZE, WatchedObject, guarded::Guarded, watched_object};
use crate::kit;

/// The objects of one list. At most two pages of it are unread at any time.
pub(super) struct ListReader<K> {
    slim: fn(&mut K),
    /// Objects of the page that arrives.
    page: Vec<Guarded<K>>,
    /// The page before, which another thread reads.
    reading: Option<JoinHandle<Vec<WatchedObject<K>>>>,
    objects: Vec<WatchedObject<K>>,
}

impl<K> ListReader<K> {
    pub(super) const fn new(slim: fn(&mut K)) -> Self {
        Self { slim, page: Vec::new(), reading: None, objects: Vec::new() }
    }

    /// Forgets all objects: the list begins, perhaps again.
    pub(super) fn clear(&mut self) {
        self.page.clear();
        self.reading = None;
        self.objects.clear();
    }

    /// Adds the page that another thread reads, if there is one.
    async fn join(&mut self) {
        let Some(reading) = self.reading.take() else { return };
        // Never completes once the runtime ends: in a list without this page, its objects would seem gone.
        self.objects.extend(kit::outcome(reading.await).await);
    }
}

impl<K: Resource + DeserializeOwned + Send + Sync + 'static> ListReader<K> {
    pub(super) async fn push(&mut self, object: Guarded<K>) {
        self.page.push(object);
        if self.page.len() < usize::from(LIST_PAGE_SIZE) {
            return;
        }
        self.join().await;
        let (page, slim) = (mem::take(&mut self.page), self.slim);
        self.reading = Some(task::spawn_blocking(move || read_all(page, slim)));
    }

    /// Returns all objects of the list, in its order.
    pub(super) async fn finish(&mut self) -> Vec<WatchedObject<K>> {
        self.join().await;
        // Most lists have no more than this, which is not worth a thread.
        let rest = read_all(mem::take(&mut self.page), self.slim);
        self.objects.extend(rest);
        mem::take(&mut self.objects)
    }
}

/// Drops the text of each object once it is read.
fn read_all<K: Resource + DeserializeOwned>(
    page: Vec<Guarded<K>>,
    slim: fn(&mut K),
) -> Vec<WatchedObject<K>> {
    page.into_iter().map(|object| watched_object(object, slim)).collect()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;

    use super::*;

    fn guarded(name: &str) -> Guarded<ConfigMap> {
        serde_json::from_str(&format!(r#"{{"metadata":{{"name":"{name}","labels":{{"a":"b"}}}}}}"#)).unwrap()
    }

    fn without_labels(map: &mut ConfigMap) {
        map.metadata.labels = None;
    }

    #[tokio::test]
    async fn a_list_of_several_pages_keeps_its_order_and_each_object_is_slimmed() {
        let page = usize::from(LIST_PAGE_SIZE);
        let mut list = ListReader::new(without_labels);
        for length in [0, 1, page - 1, page, page + 1, 2 * page, 3 * page + 7] {
            for n in 0..length {
                list.push(guarded(&n.to_string())).await;
            }
            let objects = list.finish().await;
            let names: Vec<String> = objects.iter().map(|found| found.name().name).collect();
            assert_eq!(names, (0..length).map(|n| n.to_string()).collect::<Vec<_>>());
            assert!(objects.iter().all(|found| found.metadata().labels.is_none()));
        }
    }

    #[tokio::test]
    async fn a_list_that_begins_again_has_nothing_of_the_one_that_broke_off() {
        let mut list = ListReader::new(without_labels);
        for n in 0..2 * usize::from(LIST_PAGE_SIZE) + 1 {
            list.push(guarded(&format!("old-{n}"))).await;
        }
        list.clear();
        list.push(guarded("new")).await;
        let names: Vec<String> = list.finish().await.iter().map(|found| found.name().name).collect();
        assert_eq!(names, ["new"]);
    }
}
