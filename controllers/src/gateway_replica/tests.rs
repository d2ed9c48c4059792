use super::*;

#[test]
fn what_is_a_minute_older_than_the_latest_counts_no_more() {
    let at = |second: i64| Timestamp::from_second(1_795_000_000 + second).unwrap();
    assert_eq!(time_left(at(0), at(0)), PEER_TIMEOUT);
    assert_eq!(time_left(at(0), at(20)), Duration::from_secs(40));
    assert_eq!(time_left(at(0), at(60)), Duration::ZERO);
    assert_eq!(time_left(Timestamp::MIN, Timestamp::MAX), Duration::ZERO);
    assert_eq!(time_left(at(30), at(0)), PEER_TIMEOUT, "another API server's clock is ahead");
}

#[test]
fn an_object_is_as_old_as_the_last_write_of_any_of_its_parts() {
    let metadata = json!({
        "creationTimestamp": "2026-11-22T08:00:00Z",
        "managedFields": [{"time": "2026-11-22T08:05:00Z"}, {"time": "2026-11-22T08:03:00Z"}, {}],
    });
    let metadata: ObjectMeta = serde_json::from_value(metadata).unwrap();
    assert_eq!(written_at(&metadata).to_string(), "2026-11-22T08:05:00Z");
    assert_eq!(written_at(&ObjectMeta::default()), Timestamp::MIN);
}
