//! What `loadtests/oha/run` and `loadtests/k6/run` pass to their programs. Stand-ins print the arguments here, because
//! either program takes an hour to build.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use crate::support::read;

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("loadtests").join(name).join("run")
}

/// Runs `loadtests/NAME/run` with a stand-in in its cache that prints each argument on a line of its own.
fn run(name: &str, program: &str, gateway: &str, args: &[&str]) -> Output {
    let script = script(name);
    let text = read(&script);
    let version = text.lines().find_map(|line| line.strip_prefix("version=")).unwrap();
    let cache = tempfile::tempdir().unwrap();
    let program = cache.path().join(format!("rouse/{name}-{version}/{program}"));
    fs::create_dir_all(program.parent().unwrap()).unwrap();
    fs::write(&program, "#!/bin/bash\nprintf '%s\\n' \"$@\"\n").unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new(script);
    for name in ["KEY", "MODEL", "MODELS", "ADMIN", "RATE", "CLIENTS", "DURATION", "LASTS", "TOKENS"] {
        command.env_remove(name);
    }
    command.args(args).env("XDG_CACHE_HOME", cache.path()).env("GATEWAY", gateway).output().unwrap()
}

/// Returns the arguments of oha, and asserts that no option occurs twice.
fn oha(gateway: &str, args: &[&str]) -> Vec<String> {
    let output = run("oha", "bin/oha", gateway, args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    let given: Vec<String> = String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect();
    let mut options: Vec<&str> =
        given.iter().filter(|word| word.starts_with('-')).map(|word| word.get(..2).unwrap()).collect();
    options.retain(|option| *option != "--");
    let many = options.len();
    options.sort_unstable();
    options.dedup();
    assert_eq!(options.len(), many, "{given:?}");
    given
}

const HERE: &str = "http://127.0.0.1:8080";

#[test]
fn what_a_person_gives_oha_replaces_what_the_scenario_gives_it() {
    let behind = |given: &[String], option: &str| {
        let at = given.iter().position(|word| word == option);
        at.map(|at| given[at + 1].clone())
    };
    for scenario in ["saturate", "rate", "burst", "streams"] {
        let own = oha(HERE, &[scenario]);
        assert!(behind(&own, "-c").is_some_and(|connections| connections != "7"), "{own:?}");
        let given = oha(HERE, &[scenario, "-c", "7", "-t", "9s"]);
        assert_eq!(
            (behind(&given, "-c").as_deref(), behind(&given, "-t").as_deref()),
            (Some("7"), Some("9s"))
        );
        // For a time, or for a number of requests.
        for span in [["-n", "3"], ["-z", "1s"]] {
            let given = oha(HERE, &[scenario, span[0], span[1]]);
            assert_eq!(behind(&given, span[0]).as_deref(), Some(span[1]));
            assert!(behind(&given, "-n").is_some() != behind(&given, "-z").is_some(), "{given:?}");
        }
        oha(HERE, &[scenario, "-c7"]);
    }
}

#[test]
fn a_slash_behind_the_gateways_address_is_none_of_another_machine() {
    for here in
        [HERE, "http://127.0.0.1:8080/", "https://localhost:8443//", "http://[::1]:80/", "http://localhost"]
    {
        let given = oha(here, &["burst"]);
        let url = format!("{}/v1/chat/completions", here.trim_end_matches('/'));
        assert_eq!(given.last(), Some(&url));
    }
    for elsewhere in
        ["http://example.org", "http://127.0.0.1.example.org/", "http://localhost:80@example.org"]
    {
        let refused = run("oha", "bin/oha", elsewhere, &["burst"]);
        assert_eq!(refused.status.code(), Some(64), "{elsewhere}");
        assert!(String::from_utf8_lossy(&refused.stderr).contains("only this machine is loaded"));
    }
}

#[test]
fn k6_is_given_the_environment_of_its_scenario_and_what_else_a_person_says() {
    let output = run("k6", "k6", HERE, &["aborts", "--vus", "3"]);
    let given = String::from_utf8(output.stdout).unwrap();
    let wanted =
        ["run", "--no-usage-report", "--env", "GATEWAY=http://127.0.0.1:8080", "--vus", "3", "aborts.js"];
    assert_eq!(given.lines().collect::<Vec<_>>(), wanted);
    for unknown in ["common", "nothing"] {
        assert_eq!(run("k6", "k6", HERE, &[unknown]).status.code(), Some(64), "{unknown}");
    }
}
