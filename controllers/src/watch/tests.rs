use futures_util::stream;
use k8s_openapi::api::core::v1::ConfigMap;

use super::{testing::names, *};

fn guarded(name: &str) -> Guarded<ConfigMap> {
    serde_json::from_str(&format!(r#"{{"metadata":{{"name":"{name}"}}}}"#)).unwrap()
}

fn listed(name: &str, count: u16) -> Vec<watcher::Result<Event<Guarded<ConfigMap>>>> {
    (0..count).map(|n| Ok(Event::InitApply(guarded(&format!("{name}-{n}"))))).collect()
}

#[tokio::test]
async fn a_list_of_several_pages_is_one_change_without_what_an_earlier_try_got() {
    const COUNT: u16 = 2 * LIST_PAGE_SIZE + 3;
    let events = [
        vec![Ok(Event::Init)],
        listed("lost", LIST_PAGE_SIZE + 1),
        vec![Err(watcher::Error::NoResourceVersion), Ok(Event::Init)],
        listed("kept", COUNT),
        vec![Ok(Event::InitDone), Ok(Event::Apply(guarded("new"))), Ok(Event::Delete(guarded("kept-0")))],
    ];
    let awaited = InitialLists::default();
    let mut seen = Vec::new();
    let emit = |delta: Delta<ConfigMap>| seen.push((awaited.to_string(), names(&delta)));
    let watch_events = WatchEvents {
        what: "configmaps".to_owned(),
        namespace: None,
        slim: |_: &mut ConfigMap| {},
        awaited: awaited.clone(),
        emit,
    };
    watch_events.forward(stream::iter(events.into_iter().flatten())).await;

    let all: Vec<String> = (0..COUNT).map(|n| format!("kept-{n}")).collect();
    let expected = [all, vec!["new".to_owned()], vec!["-kept-0".to_owned()]];
    let not_awaited = expected.map(|names| (String::new(), names));
    assert_eq!(seen, not_awaited, "a change comes once its list is no longer awaited");
}
