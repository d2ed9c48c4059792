//! The orders of the command line: `wake`, `sleep`, `stop`, `pin` and `unpin`.

use std::process::Output;

use serde_json::Value;

use crate::{
    operators::cli,
    support::{GatewayFixture, GatewayProcess, SimModel},
};

fn run(gateway: &GatewayProcess, args: &[&str]) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = cli(gateway, args).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (status.code(), text(stdout), text(stderr))
}

#[test]
fn an_order_returns_when_it_is_done_and_says_what_became_of_it() {
    let gateway = GatewayFixture::new(&["2Gi"]).model(&SimModel::new("org/m")).start();
    let state = || gateway.engine("org/m#0")["state"].as_str().unwrap().to_owned();
    for (args, result, engine) in [
        (&["wake", "org/m"][..], "org/m is awake, after ", "Awake"),
        (&["sleep", "org/m", "--level", "2"], "org/m is asleep, after ", "Asleep(2)"),
        (&["stop", "org/m"], "org/m is stopped, after ", "Cold"),
        (&["wake", "org/m"], "org/m is awake, after ", "Awake"),
        (&["pin", "org/m"], "org/m is pinned, after ", "Awake"),
        (&["unpin", "org/m"], "org/m is no longer pinned, after ", "Awake"),
    ] {
        let (code, out, err) = run(&gateway, args);
        assert_eq!((code, err.as_str()), (Some(0), ""), "{args:?}: {out}");
        assert!(out.starts_with(result) && out.lines().count() == 1, "{args:?}: {out}");
        assert_eq!(state(), engine, "{args:?}");
    }
    let (code, out, _) = run(&gateway, &["sleep", "org/m", "--json"]);
    let done: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &done["state"], &done["model"]), (Some(0), &"done".into(), &"org/m".into()));
    let (code, out, _) = run(&gateway, &["wake", "org/m", "--no-wait"]);
    assert_eq!(code, Some(0));
    assert!(out.ends_with(" to wake org/m is accepted\n"), "{out}");
}

#[test]
fn an_order_that_is_refused_or_fails_is_exit_code_1_with_the_reason() {
    let gateway = GatewayFixture::new(&["4Gi"])
        .model(&SimModel { flags: "--fault exit-at-start=3", ..SimModel::new("broken") })
        .model(&SimModel::new("m"))
        .start();
    for (args, code, reason) in [
        (&["sleep", "m"][..], 1, "only an awake engine can be put to sleep"),
        (&["wake", "nobody"], 1, "Model 'nobody' not found"),
        (&["wake", "broken"], 1, "cannot wake broken: "),
        (&["sleep", "m", "--level", "3"], 64, "3 is not in 1..=2"),
    ] {
        let (found, out, err) = run(&gateway, args);
        assert_eq!((found, out.as_str()), (Some(code), ""), "{args:?}: {err}");
        assert!(err.contains(reason), "{args:?}: {err}");
    }
    let (code, out, _) = run(&gateway, &["wake", "broken", "--json"]);
    let failed: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &failed["state"]), (Some(1), &"failed".into()));
    assert!(failed["reason"].as_str().unwrap().contains("exit status 3"), "{failed}");
}
