//! Checks that what the documents show is true. The tag of each fenced block names its check:
//!
//! * `yaml`: a configuration; it must be valid.
//! * `yaml object`: an object of one of our kinds. `crds.rs` checks its schema, and the cluster's tests apply it.
//! * `sh kubectl`: the cluster's tests run it, as kubectl would, against a real API server. The node's tests run what
//!   installs (the first of `kubernetes.md`) with kubectl itself.
//! * `yaml keda`: an object of KEDA, which `keda.rs` checks.
//! * `yaml values`: values of the chart; the cluster's tests have helm render it with them.
//! * `json`: must be JSON.
//! * `sh run`: this test runs it, block by block and page by page, against a gateway whose models have the names that
//!   the documents use; the gateway's own addresses and paths replace the shown ones. `sh follow` runs for as long as
//!   it takes. The output of both must contain what `SHOWN` expects.
//! * `sh quickstart`: `quickstarts.rs` runs it against a gateway with the page's configuration.
//! * `sh launcher`: the stub's tests run it against a launcher.
//! * `sh node`: the node's tests run it on a node with containerd.
//! * `sh images`: they run it there, too, with images that are built already.
//! * `sh helm`: they run those of `install.md`, of `upgrading.md` and of the quickstarts for clusters, with helm and
//!   kubectl.
//! * `mermaid states`: must be the states of the code.
//! * `sh`, `mermaid` and `text`: only people read them.

use std::{
    collections::BTreeSet,
    io::Read as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use rouse::{
    engine::state::LifecycleState,
    fault::FailureCause,
    fleet::command::{AfterDrain, CloseReason},
    model::SleepLevel,
    units::Tick,
};
use rouse_testing::page::{self, PageBlock};

use crate::{
    keda,
    support::{GatewayFixture, GatewayProcess, SimModel, read},
};

/// This page has a test of its own beside the code, because its configurations need variables.
const CONFIGURATION: &str = "docs/configuration.md";

struct Block {
    /// Where the block begins: `README.md:17`.
    at: String,
    tag: String,
    text: String,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Returns the pages by their path in the repository, sorted by name.
fn pages() -> Vec<(String, String)> {
    let mut paths: Vec<PathBuf> =
        ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"].map(|name| root().join(name)).into();
    for folder in ["docs", "docs/adr"] {
        let files = std::fs::read_dir(root().join(folder)).unwrap().map(|entry| entry.unwrap().path());
        paths.extend(files.filter(|path| path.extension().is_some_and(|end| end == "md")));
    }
    paths.sort();
    let name = |path: &Path| path.strip_prefix(root()).unwrap().display().to_string();
    paths.iter().map(|path| (name(path), read(path))).collect()
}

fn blocks() -> Vec<Block> {
    let of_page = |(page, text): (String, String)| {
        let block = move |PageBlock { line, tag, text }| Block { at: format!("{page}:{line}"), tag, text };
        page::blocks(&text).into_iter().map(block)
    };
    pages().into_iter().flat_map(of_page).collect()
}

fn tagged(tag: &str) -> impl Iterator<Item = Block> {
    blocks().into_iter().filter(move |block| block.tag == tag)
}

#[test]
fn every_block_has_a_known_tag_and_configurations_and_json_are_valid() {
    for Block { at, tag, text } in blocks() {
        match tag.as_str() {
            "yaml" if at.starts_with(CONFIGURATION) => {}
            "yaml" => {
                let config = rouse_config::parse(&text, &at).unwrap_or_else(|errors| panic!("{errors}"));
                let findings = rouse_config::check(&config);
                assert_eq!(
                    findings,
                    rouse_config::CheckFindings::default(),
                    "{at}: no example should be warned of"
                );
            }
            "sh" => assert!(!text.contains("kubectl"), "{at}: what kubectl is told has the tag `sh kubectl`"),
            "json" => drop(serde_json::from_str::<serde_json::Value>(&text).expect(&at)),
            "yaml keda" => keda::check(&text).unwrap_or_else(|error| panic!("{at}: {error}")),
            "yaml object" | "yaml values" | "sh run" | "sh follow" | "sh quickstart" | "sh launcher"
            | "sh kubectl" | "sh helm" | "sh node" | "sh images" | "mermaid states" | "mermaid" | "text" => {}
            _ => panic!("{at}: '{tag}' is no known tag"),
        }
    }
}

#[test]
fn commands_do_what_they_are_shown_for() {
    let fixture = GatewayFixture::new(&["1200Mi"])
        .settings("turns: {residency: 100ms, maxTurn: 1s}")
        .model(&SimModel::new("qwen3-8b"))
        .model(&SimModel::new("llama-3.1-8b"));
    let journal = fixture.dir().join("journal").display().to_string();
    let gateway = fixture.flag("--journal").flag(&journal).start();
    let mut shown = BTreeSet::new();
    for block in blocks() {
        match block.tag.as_str() {
            "sh run" => run(&gateway, &block),
            "sh follow" => follow(&gateway, &block),
            _ => continue,
        }
        shown.extend(commands(&block).map(|(command, _)| command));
    }
    let all: BTreeSet<&str> = SHOWN.iter().map(|(command, _)| *command).collect();
    assert_eq!(shown, all, "a command of which something is expected is on no page");
    let shown = tagged("json").find(|block| block.text.contains("accelerators")).unwrap();
    // The page shows a serving model, whose earlier failures the gateway has forgotten, and which has slept.
    assert!(gateway.client().chat("llama-3.1-8b", true, 1).is_whole_stream());
    assert_eq!(gateway.admin().post("/admin/v1/models/llama-3.1-8b/sleep?level=1", "").status, 202);
    gateway.until_state("llama-3.1-8b", "asleep");
    assert!(gateway.client().chat("llama-3.1-8b", true, 1).is_whole_stream());
    assert_eq!(keys(&serde_json::from_str(&shown.text).unwrap()), keys(&gateway.fleet()), "{}", shown.at);
    assert_eq!(gateway.terminate(), Some(0));
}

#[test]
fn the_unit_for_systemd_starts_this_program_can_be_enabled_and_lets_engines_live() {
    let unit = read(&root().join("packaging/debian/rouse.service"));
    let (service, install) = unit.split_once("\n[Install]\n").expect("without it no unit can be enabled");
    assert_eq!(install, "WantedBy=multi-user.target\n");
    assert!(service.lines().any(|line| line == "KillMode=process"), "{service}");
    let start = service.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
    let mut words = start.split_whitespace();
    assert_eq!(words.next(), Some("/usr/bin/rouse-gateway"));
    let config = tempfile::NamedTempFile::with_suffix(".yaml").unwrap();
    std::fs::write(&config, "unknown: 1\n").unwrap();
    let words = words.map(|word| word.replace("/etc/rouse/rouse.yaml", config.path().to_str().unwrap()));
    let started = Command::new(env!("CARGO_BIN_EXE_rouse-gateway")).args(words).output().unwrap();
    let said = String::from_utf8_lossy(&started.stderr);
    assert!(said.contains("unknown key 'unknown'"), "it takes the command line: {said}");
}

/// What a reader of the pages looks for in the output of each shown command. The first entry whose text is in the
/// command counts.
const SHOWN: [(&str, &[&str]); 18] = [
    ("rouse-gateway check ", &["rouse.yaml: valid", "2 models"]),
    ("rouse-gateway ps", &["MODEL", "ENGINE", "ACCELERATOR", "qwen3-8b#0", "llama-3.1-8b"]),
    ("rouse-gateway explain qwen3-8b", &["qwen3-8b: ", " leases"]),
    ("rouse-gateway events", &["qwen3-8b"]),
    ("rouse-gateway logs qwen3-8b", &["listening on"]),
    ("rouse-gateway replay ", &["\n  > launch qwen3-8b#0", "\n  = qwen3-8b: awake"]),
    ("/admin/v1/openapi.json", &["\"openapi\":", "\"/admin/v1/models/{model}/explain\""]),
    ("/admin/v1/fleet", &["\"accelerators\":", "\"engines\":", "\"name\":\"qwen3-8b\""]),
    ("/admin/v1/models/qwen3-8b/explain", &["\"model\":\"qwen3-8b\"", "\"reason\":", "\"at\":"]),
    ("-X POST ", &["\"operation\":"]),
    ("/admin/v1/events", &["data: {\"at\":"]),
    ("/admin/v1/live", &["event: snapshot", "\"requestsTotal\":"]),
    ("/admin/v1/chat", &["\"choices\":", "\"role\":\"assistant\""]),
    ("/admin/v1/models/qwen3-8b/logs", &["listening on"]),
    ("/metrics | grep", &["\nrouse_swaps_total", "\nrouse_parked", "\nrouse_leases"]),
    ("/engines/qwen3-8b/tokenize", &["\"tokens\":"]),
    ("/v1/chat/completions", &["\"choices\":", "\"role\":\"assistant\""]),
    ("/v1/models", &["\"id\":\"qwen3-8b\"", "\"state\":"]),
];

/// Returns the expectations for each command of the block.
fn commands(block: &Block) -> impl Iterator<Item = (&'static str, &'static [&'static str])> {
    let text = block.text.replace("\\\n", " ");
    let expected = |line: &str| {
        let found = SHOWN.iter().find(|(command, _)| line.contains(command));
        *found.unwrap_or_else(|| panic!("{}: nothing is expected of {line}", block.at))
    };
    text.lines().map(expected).collect::<Vec<_>>().into_iter()
}

/// Returns the expected texts that the output lacks.
fn missing(block: &Block, said: &str) -> Vec<&'static str> {
    let said = format!("\n{said}");
    commands(block).flat_map(|(_, words)| words).copied().filter(|word| !said.contains(word)).collect()
}

/// Returns the paths of all keys. For a list these are the paths of its first element.
fn keys(value: &serde_json::Value) -> BTreeSet<String> {
    match value {
        serde_json::Value::Object(fields) => fields
            .iter()
            .flat_map(|(key, value)| {
                let below = keys(value).into_iter().map(move |rest| format!("{key}.{rest}"));
                below.chain([key.clone()])
            })
            .collect(),
        serde_json::Value::Array(list) => list.first().map(keys).unwrap_or_default(),
        _ => BTreeSet::new(),
    }
}

/// Runs the block in a shell that stops at the first failure. `curl` fails for refusals, which a person would see.
fn shell(gateway: &GatewayProcess, text: &str) -> Command {
    let dir = gateway.dir.display().to_string();
    let text = [
        ("localhost:8080", gateway.api.to_string()),
        ("localhost:8180", gateway.admin.to_string()),
        ("/etc/rouse/rouse.yaml", format!("{dir}/rouse.yaml")),
        ("/var/lib/rouse/journal", format!("{dir}/journal")),
    ]
    .iter()
    .fold(text.to_owned(), |text, (shown, real)| text.replace(shown, real));
    let binary = Path::new(env!("CARGO_BIN_EXE_rouse-gateway"));
    let path = format!("{}:{}", binary.parent().unwrap().display(), std::env::var("PATH").unwrap());
    let mut command = Command::new("bash");
    command
        .arg("-c")
        .arg(format!("set -euo pipefail\ncurl() {{ command curl --fail-with-body \"$@\"; }}\n{text}"))
        .env("PATH", path)
        .env("ROUSE_ADMIN", gateway.admin.to_string())
        .env_remove("ROUSE_ADMIN_TOKEN")
        .env_remove("ROUSE_CONFIG");
    command
}

fn run(gateway: &GatewayProcess, block: &Block) {
    if block.text.contains("rouse-gateway replay ") {
        gateway.until_journaled(&gateway.dir.join("journal"), &["\"ready\"", "qwen3-8b#0"]);
    }
    let output = shell(gateway, &block.text).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {}\n{said}{errors}", block.at, block.text);
    assert_eq!(missing(block, &said), [""; 0], "{}: {}\n{said}{errors}", block.at, block.text);
}

/// Runs a block that follows events, and makes events for it to follow.
fn follow(gateway: &GatewayProcess, block: &Block) {
    let text = format!("exec {}", block.text.trim());
    let mut child =
        shell(gateway, &text).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect(&block.at);
    let mut said = child.stdout.take().unwrap();
    #[expect(clippy::disallowed_methods, reason = "a test's channel")]
    let (heard, hears) = std::sync::mpsc::channel();
    let reader = std::thread::spawn(move || {
        let mut some = [0; 4096];
        while let Ok(count @ 1..) = said.read(&mut some) {
            heard.send(String::from_utf8_lossy(&some[..count]).into_owned()).unwrap_or_default();
        }
    });
    let mut got = String::new();
    for model in ["qwen3-8b", "llama-3.1-8b"].into_iter().cycle().take(20) {
        assert!(gateway.client().chat(model, false, 1).status == 200);
        if let Ok(more) = hears.recv_timeout(std::time::Duration::from_millis(200)) {
            got.push_str(&more);
        }
        if missing(block, &got).is_empty() {
            break;
        }
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(missing(block, &got), [""; 0], "{}: {}\n{got}", block.at, block.text);
    reader.join().unwrap();
}

#[test]
fn links_lead_somewhere_and_files_and_tests_that_are_named_exist() {
    for (page, text) in pages() {
        let folder = root().join(&page).parent().unwrap().to_owned();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let path = link.split('#').next().unwrap_or_default();
            if !path.is_empty() && !path.contains("://") {
                assert!(folder.join(path).exists(), "{page}: {link}");
            }
        }
        for name in text.split('`').skip(1).step_by(2) {
            let (file, test) = name.split_once("::").unwrap_or((name, ""));
            // `foo` is a placeholder.
            if file.contains('/') && file.ends_with(".rs") && !file.starts_with("foo/") {
                let source = root().join(file);
                assert!(source.exists(), "{page}: {file}");
                assert!(
                    test.is_empty() || read(&source).contains(&format!("fn {test}(")),
                    "{page}: there is no {test} in {file}"
                );
            }
        }
    }
}

/// The node's tests import such archives by the pages' commands, but build them into another folder.
#[test]
fn archives_that_pages_name_are_those_that_make_images_builds() {
    let (build, makefile) = (read(&root().join("images/build")), read(&root().join("Makefile")));
    let programs = build.lines().find_map(|line| line.split_once(" || set -- ")).unwrap().1;
    let built: BTreeSet<String> =
        programs.split_whitespace().map(|program| format!("{program}.tar")).collect();
    assert!(build.contains(" target=$out/$1.tar "), "images/build gives its archives other names");
    assert!(makefile.contains("images/build \"$(TARGET)/release\" \"$(TARGET)/images\"\n"));
    let mut named = BTreeSet::new();
    for (page, text) in pages() {
        for rest in text.split("target/images/").skip(1) {
            let archive = rest.split(|c: char| c.is_whitespace() || "`)\"'".contains(c)).next().unwrap();
            assert!(built.contains(archive), "{page}: `make images` builds no {archive}");
            named.insert(archive.to_owned());
        }
    }
    assert!(named.contains("rouse-stub.tar"), "{named:?}");
}

#[test]
fn each_walk_names_as_many_files_as_it_says() {
    let page = read(&root().join("docs/architecture.md"));
    let walks = page.split_once("## Four walks through the code").unwrap().1.split("\n## ").next().unwrap();
    let mut named = BTreeSet::new();
    for walk in walks.split("\n### ").skip(1) {
        let (title, text) = walk.split_once('\n').unwrap();
        let said: usize = text.split_whitespace().next().unwrap().parse().unwrap();
        let before = named.len();
        let files =
            text.split('`').skip(1).step_by(2).filter(|name| name.ends_with(".rs") && name.contains('/'));
        named.extend(files.map(str::to_owned));
        println!("{title}: {} files", named.len() - before);
        assert_eq!(said, named.len() - before, "{title}");
    }
    assert!(named.len() > 50, "{named:?}");
}

#[test]
fn every_page_is_in_the_list_of_pages_and_none_promises_what_is_not_there() {
    let list = read(&root().join("docs/README.md"));
    for (page, text) in pages() {
        if let Some(name) = page.strip_prefix("docs/").filter(|name| *name != "README.md") {
            assert!(list.contains(&format!("]({name})")), "{page} is not in docs/README.md");
        }
        // The changelog describes a change in the words of its time.
        if page == "CHANGELOG.md" {
            continue;
        }
        for gone in ["`kubernetes` is not supported", "No gateway reads them", "28 KiB a stream"] {
            assert!(!text.contains(gone), "{page} says '{gone}'");
        }
        // Only what is there may be named.
        let other = |line: &&str| line.contains("dashboard") && !line.contains("charts/rouse/dashboards");
        assert_eq!(text.lines().find(other), None, "{page}");
    }
}

#[test]
fn operations_speak_of_metrics_keys_and_codes_that_exist() {
    let page = |name: &str| read(&root().join("docs").join(name));
    let (operations, metrics, configuration, kubernetes) =
        (page("operations.md"), page("metrics.md"), page("configuration.md"), page("kubernetes.md"));
    let codes = read(&root().join("net/src/openai/error.rs"));
    let word = |c: char| c.is_ascii_lowercase() || c == '_';
    for name in operations.split(|c| !word(c)) {
        let name = name.trim_end_matches("_bucket");
        if ["rouse_", "inference_"].iter().any(|prefix| name.starts_with(prefix) && name.len() > prefix.len())
        {
            assert!(metrics.contains(&format!("`{name}`")), "there is no metric {name}");
        }
    }
    for name in operations.split('`').skip(1).step_by(2) {
        let parts: Vec<&str> = name.split('.').collect();
        let section = format!("`{}.", parts.first().unwrap());
        let keys = if parts.first() == Some(&"spec") { &kubernetes } else { &configuration };
        if parts.len() > 1
            && parts.iter().all(|p| p.chars().all(char::is_alphabetic))
            && keys.contains(&section)
        {
            assert!(keys.contains(&format!("`{name}`")), "there is no key {name}");
        }
    }
    for line in operations.lines().filter(|line| line.starts_with("| 4") || line.starts_with("| 5")) {
        let cell = line.split('|').nth(1).unwrap();
        for code in cell.split('`').skip(1).step_by(2) {
            assert!(codes.contains(&format!("\"{code}\"")), "there is no code {code}");
        }
    }
}

/// A reader searches the page for the text of a message.
#[test]
fn messages_on_the_page_about_trouble_are_those_of_the_code() {
    let mut sources = String::new();
    let mut folders: Vec<PathBuf> =
        ["src", "config/src", "net/src", "platform/src", "controllers/src", "gateway/src"]
            .map(|folder| root().join(folder))
            .into();
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else {
                // A long message goes on in the next line.
                sources.extend(read(&path).split("\\\n").map(str::trim_start));
            }
        }
    }
    let page = read(&root().join("docs/troubleshooting.md"));
    let cells =
        page.lines().filter(|line| line.starts_with("| ")).map(|line| line.split('|').nth(1).unwrap());
    let messages = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).flat_map(|text| text.split('…'));
    let messages: Vec<&str> = messages.map(str::trim).filter(|part| !part.is_empty()).collect();
    assert!(messages.len() > 30, "{messages:?}");
    for message in messages {
        assert!(sources.contains(message), "nothing says '{message}'");
    }
}

/// The page for operators states the memory per stream of the last measurement.
#[test]
fn the_memory_of_a_stream_is_what_the_load_tests_measured() {
    let number = |page: &str, row: &str, cell: usize| -> f64 {
        let text = read(&root().join(page));
        let row = text.lines().find(|line| line.starts_with(row)).unwrap_or_else(|| panic!("{page}: {row}"));
        let cell = row.split('|').nth(cell).unwrap();
        let (before, _) = cell.split_once(" KiB").unwrap();
        before.split_whitespace().last().unwrap().parse().unwrap()
    };
    let measured = number("loadtests/results/table.md", "| Memory of an open stream", 2);
    let told = number("docs/operations.md", "| a running stream", 2);
    assert!((measured..=measured * 1.25).contains(&told), "{told} KiB, where {measured} were measured");
}

#[test]
fn the_states_in_the_picture_are_those_of_the_code() {
    let drawn: BTreeSet<(String, String)> = tagged("mermaid states")
        .flat_map(|block| block.text.lines().map(str::to_owned).collect::<Vec<_>>())
        .filter_map(|line| {
            let (from, to) = line.trim().split_once(" --> ")?;
            let to = to.split(" : ").next()?;
            Some((from.to_owned(), to.to_owned()))
        })
        .collect();
    let mut expected = BTreeSet::new();
    for (from, a) in states() {
        for (to, b) in states() {
            // The text below the picture lists the failures, because arrows for them would crowd the picture.
            let by_failure = a.has_process() && matches!(to, "Failing" | "Stopping" | "Backoff");
            if a.can_transition_to(&b) && !by_failure && from != to {
                expected.insert((from.to_owned(), to.to_owned()));
            }
        }
    }
    assert_eq!(drawn, expected);
}

fn states() -> [(&'static str, LifecycleState); 11] {
    let level = SleepLevel::One;
    let cause = || FailureCause::Stopped;
    let draining = LifecycleState::Draining {
        reason: CloseReason::Idle,
        after_drain: AfterDrain::Stop,
        revoked: false,
        drained: false,
    };
    [
        ("Cold", LifecycleState::Cold),
        ("Launching", LifecycleState::Launching),
        ("Loading", LifecycleState::Loading),
        ("Awake", LifecycleState::Awake),
        ("Draining", draining),
        ("FallingAsleep", LifecycleState::FallingAsleep { level }),
        ("Asleep", LifecycleState::Asleep { level }),
        ("Waking", LifecycleState::Waking { level }),
        ("Failing", LifecycleState::Failing { cause: cause(), drained: false }),
        ("Stopping", LifecycleState::Stopping { cause: cause() }),
        ("Backoff", LifecycleState::Backoff { until: Tick(0), cause: cause() }),
    ]
}
