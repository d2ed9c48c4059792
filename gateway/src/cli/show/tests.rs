use super::*;

fn view() -> FleetView {
    serde_json::from_str(
        r#"{
        "accelerators": [{"id": "sim-0", "capacity": 24696061952, "reserved": 22548578304, "observed": 1073741824, "healthy": true},
            {"id": "sim-1", "capacity": 24696061952, "reserved": 0, "observed": null, "healthy": false}],
        "host": {"capacity": 68719476736, "reserved": 0},
        "models": [{"name": "tiny-llama", "state": "awake", "waiting": 0, "expectedWait": {"low": 0, "likely": 0, "high": 0}, "leases": 2, "pinned": true, "reason": "in use", "declared": 21474836480, "learned": {}},
            {"name": "tiny-mistral", "state": "asleep", "waiting": 3, "expectedWait": {"low": 12900, "likely": 15000, "high": 19001}, "leases": 0, "pinned": false, "reason": "waiting for sim-0: held by tiny-llama", "declared": 17179869184, "learned": {}}],
        "engines": [{"engine": "tiny-llama#0", "generation": 1, "state": "Awake", "since": 3723004, "leases": 2, "accelerators": ["sim-0"], "reserved": 21474836480, "host": 0},
            {"engine": "tiny-mistral#0", "generation": 2, "state": "Asleep(1)", "since": 3723004, "leases": 0, "accelerators": ["sim-0", "sim-1"], "reserved": 1073741824, "host": 4294967296}]
        }"#,
    )
    .unwrap()
}

#[test]
fn the_fleet_is_three_tables() {
    insta::assert_snapshot!(render_fleet(&view(), false), @r###"
    MODEL         STATE          WAITING  EXPECTED WAIT  LEASES  MEMORY  REASON
    tiny-llama    awake, pinned  0        0 s            2       20Gi    in use
    tiny-mistral  asleep         3        12 to 20 s     0       16Gi    waiting for sim-0: held by tiny-llama

    ENGINE          STATE      SINCE     LEASES  ON           RESERVED  HOST
    tiny-llama#0    Awake      01:02:03  2       sim-0        20Gi      0
    tiny-mistral#0  Asleep(1)  01:02:03  0       sim-0,sim-1  1Gi       4Gi

    ACCELERATOR  CAPACITY  RESERVED  OBSERVED
    sim-0        23Gi      21Gi      1Gi
    sim-1        23Gi      0         -         unhealthy: no new reservations
    host RAM     64Gi      0         -
    "###);
    let coloured = render_fleet(&view(), true);
    assert!(coloured.contains("\x1b[32mawake, pinned\x1b[0m  0"), "{coloured}");
    assert!(coloured.contains("tiny-mistral  asleep         3"), "{coloured}");
}

#[test]
fn an_accelerator_with_slots_shows_how_many_are_taken_beside_its_engines() {
    let view = serde_json::from_str(
        r#"{
        "accelerators": [{"id": "GPU-1", "capacity": 24696061952, "reserved": 22548578304, "units": 8, "unitsTaken": 2, "pool": "shared", "node": "node-a", "observed": null, "healthy": true},
            {"id": "large", "capacity": 24696061952, "reserved": 0, "units": 4, "unitsTaken": 1, "observed": null, "healthy": true}],
        "host": {"capacity": 68719476736, "reserved": 0},
        "models": [],
        "engines": [{"engine": "a#0", "generation": 1, "state": "Awake", "since": 3723004, "leases": 2, "accelerators": ["GPU-1"], "reserved": 21474836480, "host": 0},
            {"engine": "b#0", "generation": 2, "state": "Awake", "since": 3723004, "leases": 0, "accelerators": ["large"], "reserved": 1073741824, "host": 0}]
        }"#,
    )
    .unwrap();
    insta::assert_snapshot!(render_fleet(&view, false), @r###"
    ENGINE  STATE  SINCE     LEASES  ON     SLOTS  RESERVED  HOST
    a#0     Awake  01:02:03  2       GPU-1  2/8    20Gi      0
    b#0     Awake  01:02:03  0       large  -      1Gi       0

    ACCELERATOR  CAPACITY  RESERVED  OBSERVED  SLOTS  NODE
    GPU-1        23Gi      21Gi      -         2/8    node-a
    large        23Gi      0         -         -      -
    host RAM     64Gi      0         -         -      -
    "###);
}

#[test]
fn times_are_told_to_the_second_and_nothing_else_is_touched() {
    let text = "held by m, evictable at 12:34:56.789; 1.5Gi at 10:00:00.123: 12:34 v1.2.3";
    assert_eq!(
        truncate_to_seconds(text),
        "held by m, evictable at 12:34:56; 1.5Gi at 10:00:00: 12:34 v1.2.3"
    );
}

#[test]
fn an_explanation_says_why_and_who_holds_the_memory() {
    let explanation = serde_json::from_str(
        r#"{"model": "tiny-mistral", "state": "asleep", "waiting": 3, "leases": 0, "at": 3723004,
            "reason": "waiting for sim-0: held by tiny-llama, 2 leases",
            "wait": {"waited_for": "", "waited": 0, "position": 1, "retry_after": 1500,
                "expected_wait": {"low": 1500, "likely": 2000, "high": 4200},
                "holders": [{"model": "tiny-llama", "memory": 21474836480, "idle_for": 0, "leases": 1, "pinned": true}]}}"#,
    )
    .unwrap();
    insta::assert_snapshot!(render_explanation(&explanation, false), @r###"
    tiny-mistral: asleep, 3 waiting, 0 leases
      waiting for sim-0: held by tiny-llama, 2 leases
      tiny-llama holds 20Gi: 1 lease, idle for 0ms, pinned
      expected wait: 1 to 5 s
      earliest possible change in 1.500s
      as of 01:02:03 UTC
    "###);
}

#[test]
fn an_explanation_says_how_many_engines_a_variant_should_have_and_why() {
    let explanation = serde_json::from_str(
        r#"{"model": "m", "state": "awake", "waiting": 0, "leases": 1, "at": 3723004, "reason": "awake; in use",
            "variants": {
                "default": {"current": 1, "asleep": 1, "target": 2, "targetReason": "the queues are too long"},
                "l4": {"current": 3, "asleep": 0}}}"#,
    )
    .unwrap();
    let text = render_explanation(&explanation, false);
    let expected = "  awake; in use\n  engines: 1 running or starting, 2 desired (the queues are too long), \
                    1 asleep\n  engines of l4: 3 running or starting\n";
    assert!(text.contains(expected), "{text}");
}

#[test]
fn an_explanation_counts_the_holders_that_it_does_not_list() {
    let explanation = serde_json::from_str(
        r#"{"model": "m", "state": "asleep", "waiting": 3, "leases": 0, "at": 3723004, "reason": "",
            "wait": {"waited_for": "", "waited": 0, "position": 1, "retry_after": null, "unlisted_holders": 12,
                "holders": [{"model": "a", "memory": 21474836480, "idle_for": 0, "leases": 1, "pinned": true}]}}"#,
    )
    .unwrap();
    let text = render_explanation(&explanation, false);
    assert!(text.contains("pinned\n  and 12 other engines with less\n"), "{text}");
}

#[test]
fn events_are_told_in_words_and_what_is_none_is_passed_on_without_control_characters() {
    let gone =
        r#"{"event":"gone","engine":"a#0","generation":1,"cause":{"wrong_model":{"serves":"\u001b[31m"}}}"#;
    let line = format!(r#"{{"at":3723004,"events":[{{"event":"left","waiter":7}},{gone}]}}"#);
    assert_eq!(
        render_event(&line),
        "01:02:03.004 waiter 7 leaves\n01:02:03.004 a#0 is gone: wrong_model: the engine serves '\u{fffd}[31m'\n"
    );
    assert_eq!(render_event(r#"{"at":3723004,"events":[]}"#), "");
    assert_eq!(render_event("not\tjson"), "not\u{fffd}json\n");
}
