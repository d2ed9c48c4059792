use k8s_openapi::api::core::v1::{Pod, PodSpec};
use rouse::{
    model::SleepLevel,
    pairing::{
        command::PairingCommand,
        event::LeaderEpoch,
        ids::{ProviderId, ProviderMode},
        node::HostMemoryShortage,
    },
    units::Bytes,
};

use super::*;
use crate::{
    dual_pods::{facts::ClusterFacts, keys, record, testing::engine_record},
    watch::Delta,
};

#[test]
fn the_event_of_a_sleep_at_level_2_names_the_annotation_that_allows_level_1() {
    let node = NodeName::from("n");
    let record = engine_record(Bytes::gib(72), Bytes::gib(2), Bytes::gib(72));
    let mut pod = Pod::default();
    pod.metadata.name = Some("n-1-dual".to_owned());
    pod.metadata.namespace = Some("ns".to_owned());
    pod.metadata.uid = Some("uid".to_owned());
    record::write(&mut pod, &node, "chat", &record, 8000);
    let mut index = PairingPodIndex::new(ProviderMode::Sleep);
    let change = Delta::Applied(pod.into());
    index.apply(change, &ClusterFacts::default(), &mut drop);
    let provider = index.provider(&node, &ProviderId::direct(&record.engine)).cloned();
    assert!(provider.is_some());

    let note = |shortage: Option<HostMemoryShortage>, level: SleepLevel| {
        let step = EngineStep::Sleep { level, via: None };
        let action =
            PairingAction::Engine { engine: record.engine.clone(), generation: record.generation, step };
        let command = PairingCommand { node: node.clone(), epoch: LeaderEpoch(1), serial: 1, action };
        let mut job = CommandContext::for_test(command);
        (job.record, job.provider) = (Some(record.clone()), provider.clone());
        job.host_memory_shortage = shortage;
        let mut sent = completion_events(&job);
        assert_eq!(sent.len(), 1, "{sent:?}");
        let EventRequest { object, content, .. } = sent.remove(0);
        assert_eq!((object.name.as_str(), content.reason), ("n-1-dual", EventReason::Slept));
        content.note
    };
    let full = HostMemoryShortage::Node { budget: Bytes::gib(64), left: Bytes::gib(64) };
    let deep = note(Some(full), SleepLevel::Two);
    assert!(deep.contains(" sleeps at level 2; no level 1: ") && deep.contains("72Gi"), "{deep}");
    assert!(deep.contains("set the annotation rouse.dev/host-memory"), "{deep}");
    let light = note(None, SleepLevel::One);
    assert!(light.ends_with(" sleeps at level 1"), "{light}");
    // An Event keeps its first note, so each note has its own.
    assert!(EventReason::Slept.is_keyed_by_note());
}

#[tokio::test]
async fn the_timer_of_an_earlier_wait_reports_nothing_of_the_present_one() {
    let (sender, mut sent) = EventSender::for_test();
    let (mut events, mut tasks) = (PodEvents::new(sender), PairingTasks::default());
    let mut pod = Pod::default();
    pod.metadata.name = Some("one".to_owned());
    pod.metadata.namespace = Some("ns".to_owned());
    pod.metadata.uid = Some("uid".to_owned());
    pod.metadata.annotations = Some([(keys::SERVER_PATCH.to_owned(), "{}".to_owned())].into());
    pod.spec = Some(PodSpec::default());
    let mut index = PairingPodIndex::new(ProviderMode::Sleep);
    index.apply(Delta::Applied(pod.into()), &ClusterFacts::default(), &mut drop);
    let (node, id) = (NodeName::from("n"), RequesterId::from("uid"));
    let reasons = BTreeMap::from([((node.clone(), id.clone()), "no room".to_owned())]);
    for now in [&reasons, &BTreeMap::new(), &reasons] {
        events.update_waiting(std::slice::from_ref(&node), now, &mut tasks);
    }
    events.report_waiting(id.clone(), 1, &index, &mut tasks);
    assert!(sent.try_recv().is_err(), "that wait is over");
    events.report_waiting(id.clone(), 2, &index, &mut tasks);
    assert_eq!(sent.try_recv().unwrap().content.note, "no room");
    events.report_waiting(id, 2, &index, &mut tasks);
    assert!(sent.try_recv().is_err(), "it was reported");
}
