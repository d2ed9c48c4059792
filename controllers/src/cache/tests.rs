use k8s_openapi::api::core::v1::Pod;

use super::*;
use crate::watch::testing::names;

fn pod(name: &str, labels: &[&str]) -> WatchedObject<Pod> {
    let mut pod = Pod::default();
    pod.metadata.name = Some(name.to_owned());
    let labels = labels.iter().map(|label| ((*label).to_owned(), String::new()));
    pod.metadata.labels = Some(labels.collect());
    pod.into()
}

#[tokio::test]
async fn each_reader_sees_what_it_wants_of_one_watch_and_nothing_of_a_former_term() {
    let mut cache = Cache::default();
    let mut all = cache.subscribe();
    let mut some = cache.subscribe_to(|pod: &Pod| pod.metadata.labels.iter().flatten().next().is_some());
    cache.begin_term(7);
    cache.push(Delta::Applied(pod("old", &["x"])));
    cache.begin_term(8);
    let objects = vec![pod("plain", &[]), pod("engine", &["x"])];
    cache.push(Delta::All { namespace: None, objects });
    cache.push(Delta::Applied(pod("plain", &[])));
    cache.push(Delta::Deleted(ObjectName::new("", "engine")));

    let mut seen = Vec::new();
    for _ in 0..3 {
        let TermDelta { epoch, delta } = all.recv().await;
        assert_eq!(epoch, 8);
        seen.push(names(&delta));
    }
    assert_eq!(seen, [vec!["plain", "engine"], vec!["plain"], vec!["-engine"]]);
    assert_eq!(names(&some.recv().await.delta), ["engine"]);
    assert_eq!(names(&some.recv().await.delta), ["-engine"]);
    // A reader that waits is woken by the next change.
    let waiting = tokio::spawn(async move { names(&some.recv().await.delta) });
    tokio::task::yield_now().await;
    cache.push(Delta::Applied(pod("new", &["x"])));
    assert_eq!(waiting.await.unwrap(), ["new"]);
}

#[tokio::test]
async fn an_object_that_no_longer_passes_a_filter_is_deleted_once_for_its_reader() {
    let mut cache = Cache::default();
    let mut labelled = cache.subscribe_to(|pod: &Pod| pod.metadata.labels.iter().flatten().next().is_some());
    cache.push(Delta::All { namespace: None, objects: vec![pod("listed", &["x"]), pod("other", &[])] });
    assert_eq!(names(&labelled.recv().await.delta), ["listed"]);
    cache.push(Delta::Applied(pod("applied", &["x"])));
    assert_eq!(names(&labelled.recv().await.delta), ["applied"]);
    for name in ["listed", "other", "applied", "listed"] {
        cache.push(Delta::Applied(pod(name, &[])));
    }
    assert_eq!(names(&labelled.recv().await.delta), ["-listed"]);
    assert_eq!(names(&labelled.recv().await.delta), ["-applied"]);
    // A list shows by itself what is gone.
    cache.push(Delta::Applied(pod("again", &["x"])));
    cache.push(Delta::All { namespace: None, objects: Vec::new() });
    cache.push(Delta::Applied(pod("again", &[])));
    cache.push(Delta::Applied(pod("last", &["x"])));
    assert_eq!(names(&labelled.recv().await.delta), Vec::<String>::new());
    assert_eq!(names(&labelled.recv().await.delta), ["last"]);
}
