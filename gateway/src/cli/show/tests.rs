use super::*;

fn view() -> View {
    serde_json::from_str(
        r#"{
        "accelerators": [{"id": "sim-0", "capacity": 24696061952, "reserved": 22548578304, "observed": 1073741824, "healthy": true},
            {"id": "sim-1", "capacity": 24696061952, "reserved": 0, "observed": null, "healthy": false}],
        "host": {"capacity": 68719476736, "reserved": 0},
        "models": [{"name": "tiny-llama", "state": "awake", "waiting": 0, "leases": 2, "pinned": true, "reason": "in use", "declared": 21474836480, "learned": {}},
            {"name": "tiny-mistral", "state": "asleep", "waiting": 3, "leases": 0, "pinned": false, "reason": "waiting for sim-0: held by tiny-llama", "declared": 17179869184, "learned": {}}],
        "engines": [{"engine": "tiny-llama#0", "generation": 1, "state": "Awake", "since": 3723004, "leases": 2, "accelerators": ["sim-0"], "reserved": 21474836480, "host": 0},
            {"engine": "tiny-mistral#0", "generation": 2, "state": "Asleep(1)", "since": 3723004, "leases": 0, "accelerators": ["sim-0", "sim-1"], "reserved": 1073741824, "host": 4294967296}]
        }"#,
    )
    .unwrap()
}

#[test]
fn the_fleet_is_three_tables() {
    insta::assert_snapshot!(fleet(&view()), @"");
}

#[test]
fn an_explanation_says_why_and_who_holds_the_memory() {
    let explanation = serde_json::from_str(
        r#"{"model": "tiny-mistral", "state": "asleep", "waiting": 3, "leases": 0, "at": 3723004,
            "reason": "waiting for sim-0: held by tiny-llama, 2 leases",
            "wait": {"waited_for": "", "waited": 0, "position": 1, "retry_after": 1500,
                "holders": [{"model": "tiny-llama", "memory": 21474836480, "idle_for": 0, "leases": 2, "pinned": true}]}}"#,
    )
    .unwrap();
    insta::assert_snapshot!(explained(&explanation), @"");
}

#[test]
fn an_event_is_one_line_and_what_is_no_event_is_passed_on() {
    let line = r#"{"at":3723004,"event":"arrived","waiter":{"id":7,"model":"a\u001b[31m","stream":true,"key":null}}"#;
    insta::assert_snapshot!(event(line), @"");
    assert_eq!(event("not json"), "not json");
}
