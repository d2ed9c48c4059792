//! The binary as a person meets it: exit codes and error messages.

use std::{
    io::Write as _,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    process::Output,
};

use rouse_testing::port::ReservedPort;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
    process::Command,
};

async fn rouse(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_rouse-gateway"))
        .args(args)
        .env_remove("ROUSE_ADMIN")
        .env_remove("ROUSE_CONFIG")
        .env_remove("ROUSE_ADMIN_TOKEN")
        .kill_on_drop(true)
        .output()
        .await
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn file(content: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::Builder::new().suffix(".yaml").tempfile().unwrap();
    file.write_all(content.as_bytes()).unwrap();
    file
}

/// Answers one request with these bytes. Returns the listening address and a task whose result is the request.
async fn answering(answer: impl Into<String>) -> (String, tokio::task::JoinHandle<String>) {
    let answer = answer.into();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let served = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") {
            request.push(stream.read_u8().await.unwrap());
        }
        stream.write_all(answer.as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
        text(&request)
    });
    (address, served)
}

#[tokio::test]
async fn an_invalid_file_is_exit_code_64_with_every_mistake_in_check_and_at_the_start() {
    let bad = file("headroom: lots\nqueue: {policy: maybe}\n");
    let path = bad.path().to_str().unwrap();
    for args in [&["check", path][..], &["--config", path]] {
        let output = rouse(args).await;
        assert_eq!(output.status.code(), Some(64), "{args:?}");
        let errors = text(&output.stderr);
        assert!(errors.contains(&format!("{path}:1:11: headroom: ")), "{errors}");
        assert!(errors.contains(&format!("{path}:2:17: queue.policy: ")), "{errors}");
        assert_eq!(errors.lines().count(), 2, "{errors}");
    }
}

#[tokio::test]
async fn check_passes_a_valid_file_and_fails_one_whose_model_fits_nowhere() {
    let state = tempfile::tempdir().unwrap();
    let model = format!(
        "models: [{{name: m, engine: {{kind: custom, command: [sh, '${{HOST}}:${{PORT}}'], startTimeout: 1m}}, memory: {{awake: 8Gi}}}}]\n\
         listen: {{api: '127.0.0.1:0', admin: '127.0.0.1:0'}}\nstate: {:?}\n",
        state.path()
    );
    let good = file(&format!("accelerators: [{{id: a, memory: 16Gi}}]\n{model}"));
    let output = rouse(&["check", good.path().to_str().unwrap()]).await;
    assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(0), ""));
    assert!(text(&output.stdout).ends_with(": valid; 1 model; 1 accelerator\n"));
    // A start gets its file in the same two ways: on the command line and from the environment.
    let same = rouse(&["check", "--config", good.path().to_str().unwrap()]).await;
    assert_eq!((same.status.code(), same.stdout), (Some(0), output.stdout.clone()));
    let program = Command::new(env!("CARGO_BIN_EXE_rouse-gateway"))
        .arg("check")
        .env("ROUSE_CONFIG", good.path())
        .output();
    assert_eq!(program.await.unwrap().stdout, output.stdout);
    assert_eq!(rouse(&["check"]).await.status.code(), Some(64), "there is nothing to check");
    let warned = file(&format!(
        "accelerators: [{{id: a, memory: 16Gi}}]\n{}",
        model.replace("sh,", "no-such-program,")
    ));
    let output = rouse(&["check", warned.path().to_str().unwrap()]).await;
    assert_eq!(output.status.code(), Some(0), "it may be there where the file is used");
    assert!(
        text(&output.stderr).contains("program 'no-such-program' is not in PATH"),
        "{}",
        text(&output.stderr)
    );

    // The platform of the command line overrides the file's.
    let elsewhere = rouse(&["--config", good.path().to_str().unwrap(), "--platform", "kubernetes"]).await;
    let told = text(&elsewhere.stderr);
    assert_eq!(elsewhere.status.code(), Some(64), "{told}");
    assert!(
        told.contains("platform: kubernetes needs a `kubernetes` section with at least stubImage"),
        "{told}"
    );

    let small = file(&format!("accelerators: [{{id: a, memory: 4Gi}}]\n{model}"));
    let output = rouse(&["check", small.path().to_str().unwrap()]).await;
    assert_eq!(output.status.code(), Some(64));
    assert!(text(&output.stderr).contains(":2:10: model 'm': needs 8Gi"), "{}", text(&output.stderr));
}

/// The user of this test may be allowed to write everywhere; the user of a service is not.
#[tokio::test]
async fn check_says_what_to_do_about_a_state_directory_that_its_user_cannot_write() {
    let state = tempfile::tempdir().unwrap();
    std::fs::set_permissions(state.path(), std::fs::Permissions::from_mode(0o555)).unwrap();
    let yaml = file(&format!(
        "models: []\naccelerators: []\nlisten: {{api: '127.0.0.1:0', admin: '127.0.0.1:0'}}\nstate: {:?}\n",
        state.path()
    ));
    let is_root = std::fs::metadata("/proc/self").unwrap().uid() == 0;
    let mut command = if is_root {
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set=-all", "--inh-caps=-all", env!("CARGO_BIN_EXE_rouse-gateway")]);
        command
    } else {
        Command::new(env!("CARGO_BIN_EXE_rouse-gateway"))
    };
    let output = command.arg("check").arg(yaml.path()).output().await.unwrap();
    let (said, shown) = (text(&output.stderr), state.path().display());
    assert_eq!(output.status.code(), Some(0), "another user may write it: {said}");
    let told = format!(
        "state: this user cannot write to {shown} (Permission denied): set a directory that the gateway's user owns, or create \
         this one: install -d -o USER {shown}"
    );
    assert!(said.contains(&told), "{said}");
}

#[tokio::test]
async fn why_a_start_fails_is_said_once() {
    let listens = "listen: {api: '127.0.0.1:0', admin: '127.0.0.1:0'}";
    for (yaml, why) in [
        // No interface has this address.
        ("listen: {api: '192.0.2.1:1', admin: '127.0.0.1:0'}\n", "Cannot assign requested address"),
        (format!("{listens}\nlogs: {{access: /dev/null/log}}\n").as_str(), "Not a directory"),
        (format!("{listens}\nstate: /dev/null/state\n").as_str(), "Not a directory"),
    ] {
        let state = tempfile::tempdir().unwrap();
        let state =
            if yaml.contains("state:") { String::new() } else { format!("state: {:?}\n", state.path()) };
        let yaml = file(&format!("models: []\naccelerators: []\n{state}{yaml}"));
        let output = rouse(&["--config", yaml.path().to_str().unwrap()]).await;
        let said = text(&output.stderr);
        let said = said.lines().find(|line| line.starts_with("rouse-gateway: ")).unwrap_or(&said);
        assert_eq!((output.status.code(), said.matches(why).count()), (Some(1), 1), "{said}");
    }
}

#[tokio::test]
async fn a_wrong_command_line_is_exit_code_64_and_help_is_none() {
    assert_eq!(rouse(&["--no-such-flag"]).await.status.code(), Some(64));
    assert_eq!(rouse(&["ps", "--admin", "https://x"]).await.status.code(), Some(64));
    let help = rouse(&["--help"]).await;
    assert_eq!(help.status.code(), Some(0));
    assert!(!text(&help.stdout).contains("demo-engine"), "it is hidden");
}

/// Returns the subcommands that the help lists, without `help` itself.
async fn subcommands() -> Vec<String> {
    let help = text(&rouse(&["--help"]).await.stdout);
    let (_, listed) = help.split_once("\nCommands:\n").expect("the help lists commands");
    let lines = listed.lines().take_while(|line| !line.is_empty());
    let names = lines.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let names = names.filter_map(|line| line.split_whitespace().next()).map(str::to_owned);
    names.filter(|name| name != "help").collect()
}

/// Commands without `--json`: two serve until they are ended, and two print a text that another program wrote or reads.
const WITHOUT_JSON: [&str; 4] = ["demo", "node", "logs", "completions"];

#[tokio::test]
async fn each_command_that_prints_a_result_can_print_it_as_json() {
    let names = subcommands().await;
    assert!(WITHOUT_JSON.iter().all(|name| names.iter().any(|listed| listed == name)), "{names:?}");
    for name in &names {
        let source = (name == "import").then_some("llama-swap");
        let words: Vec<&str> = std::iter::once(name.as_str()).chain(source).chain(["--help"]).collect();
        let help = text(&rouse(&words).await.stdout);
        assert_eq!(help.contains("--json"), !WITHOUT_JSON.contains(&name.as_str()), "{name}: {help}");
    }
}

#[tokio::test]
async fn each_shells_script_completes_every_subcommand_and_no_hidden_one() {
    let names = subcommands().await;
    assert!(
        ["demo", "ps", "completions"].iter().all(|one| names.iter().any(|name| name == one)),
        "{names:?}"
    );
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = rouse(&["completions", shell]).await;
        assert_eq!(output.status.code(), Some(0), "{shell}: {}", text(&output.stderr));
        let script = text(&output.stdout);
        // A name counts only where it is a whole word: `ps` is in many others.
        let words: Vec<&str> =
            script.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-' || c == '_')).collect();
        for name in &names {
            assert!(words.contains(&name.as_str()), "{shell} does not complete {name}");
        }
        assert!(script.contains("journal"), "{shell} does not complete the flags of a start");
        assert!(!script.contains("demo-engine"), "{shell} completes what is hidden");
    }
    assert_eq!(rouse(&["completions", "tcsh"]).await.status.code(), Some(64));
}

#[tokio::test]
async fn bash_reads_its_script_and_completes_by_it() {
    let script = rouse(&["completions", "bash"]).await.stdout;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), &script).unwrap();
    let path = file.path().display();
    // What bash does for `rouse-gateway comp<Tab>`: it calls the function that the script has registered.
    let tab = format!(
        "set -e; bash -n {path}; source {path}; set -- $(complete -p rouse-gateway); \
         while [ \"$1\" != -F ]; do shift; done; COMP_WORDS=(rouse-gateway comp); COMP_CWORD=1; \
         \"$2\" rouse-gateway comp rouse-gateway; echo \"${{COMPREPLY[*]}}\""
    );
    let shell = Command::new("bash").args(["--norc", "-c", &tab]).kill_on_drop(true).output();
    let output = shell.await.unwrap();
    let said = (text(&output.stdout), text(&output.stderr));
    assert_eq!(said, ("completions\n".to_owned(), String::new()));
}

#[tokio::test]
async fn without_a_configuration_nothing_is_served_and_the_help_says_what_to_do_next() {
    for args in [&[][..], &["--api", "127.0.0.1:0"]] {
        let output = rouse(args).await;
        assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(64), ""), "{args:?}");
        let said = text(&output.stderr);
        for part in [
            "no configuration given: pass --config FILE or set ROUSE_CONFIG",
            "Usage:",
            "  rouse-gateway demo ",
        ] {
            assert!(said.contains(part), "{part} in {said}");
        }
    }
}

#[tokio::test]
async fn without_a_gateway_the_commands_say_so() {
    let nobody = ReservedPort::bind();
    let address = nobody.address().to_string();
    for args in [
        &["ps"][..],
        &["ps", "--watch"],
        &["explain", "m"],
        &["events"],
        &["logs", "m"],
        &["warmups"],
        &["wake", "m"],
        &["sleep", "m"],
        &["stop", "m", "--no-wait"],
        &["pin", "m"],
        &["unpin", "m"],
    ] {
        let args = [args, &["--admin", &address]].concat();
        let output = rouse(&args).await;
        assert_eq!(output.status.code(), Some(69), "{args:?}");
        let said = text(&output.stderr);
        assert!(said.contains(&format!("cannot connect to a gateway at {address}")), "{said}");
        assert_eq!(said.matches("refused").count(), 1, "{said}");
    }
}

#[tokio::test]
async fn refusals_of_the_admin_api_are_told_in_its_own_words() {
    let (address, _) = answering("HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n").await;
    let output = rouse(&["ps", "--admin", &address]).await;
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("set ROUSE_ADMIN_TOKEN"));

    let (address, _) = answering(
        "HTTP/1.1 404 Not Found\r\ncontent-length: 45\r\n\r\n{\"error\":{\"message\":\"Model 'x/y' not found\"}}",
    )
    .await;
    let output = rouse(&["explain", "x/y", "--admin", &address]).await;
    assert!(text(&output.stderr).contains("Model 'x/y' not found"), "{}", text(&output.stderr));

    let (address, _) = answering("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello").await;
    let output = rouse(&["ps", "--admin", &address]).await;
    assert!(text(&output.stderr).contains("does not answer like"), "{}", text(&output.stderr));
}

#[tokio::test]
async fn a_name_goes_as_one_segment_and_the_token_as_a_bearer() {
    let (address, served) = answering(
        "HTTP/1.1 200 OK\r\ncontent-length: 84\r\n\r\n{\"model\":\"a/b\",\"state\":\"cold\",\"waiting\":0,\"leases\":0,\"reason\":\"no demand\",\"at\":1000}",
    )
    .await;
    let output = rouse(&["explain", "a/b", "--admin", &address, "--token", "t0ken"]).await;
    assert_eq!(text(&output.stdout).lines().nth(1), Some("  no demand"), "{}", text(&output.stderr));
    let request = served.await.unwrap();
    assert!(request.starts_with("GET /admin/v1/models/a%2Fb/explain HTTP/1.1\r\n"), "{request}");
    assert!(request.contains("authorization: Bearer t0ken\r\n"), "{request}");
}

#[tokio::test]
async fn events_are_printed_as_they_come_however_they_are_cut() {
    let events = r#"{"at":61000,"events":[{"event":"left","waiter":7}]}"#;
    let (start, end) = events.split_at(20);
    let pieces = [": hello\n\ndata: ", start, end, "\n\nda", "ta: {\"at\":1,\"events\":[]}\n\n"];
    let chunks: String = pieces.iter().map(|piece| format!("{:x}\r\n{piece}\r\n", piece.len())).collect();
    let answer = format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{chunks}0\r\n\r\n");
    let (address, _) = answering(answer.clone()).await;
    let output = rouse(&["events", "--admin", &address]).await;
    assert_eq!(text(&output.stdout), "00:01:01.000 waiter 7 leaves\n", "{}", text(&output.stderr));
    let (address, _) = answering(answer).await;
    let output = rouse(&["events", "--json", "--admin", &address]).await;
    assert_eq!(text(&output.stdout), format!("{events}\n{{\"at\":1,\"events\":[]}}\n"));
}

#[tokio::test]
async fn a_reader_that_was_too_slow_is_told_beside_the_events() {
    let (address, _) = answering(
        "HTTP/1.1 200 OK\r\n\r\nevent: missed\ndata: 12\n\ndata: {\"at\":1,\"events\":[{\"event\":\"left\",\"waiter\":7}]}\n\n",
    )
    .await;
    let output = rouse(&["events", "--admin", &address]).await;
    assert_eq!(text(&output.stdout), "00:00:00.001 waiter 7 leaves\n");
    assert!(text(&output.stderr).ends_with("and missed 12 events\n"), "{}", text(&output.stderr));
}

#[tokio::test]
async fn logs_are_passed_on_as_they_are() {
    let (address, served) = answering("HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\none\ntwo\n").await;
    let output = rouse(&["logs", "m", "--replica", "2", "--follow", "--admin", &address]).await;
    assert_eq!(text(&output.stdout), "one\ntwo\n");
    assert!(served.await.unwrap().starts_with("GET /admin/v1/models/m/logs?replica=2&follow=true "));
}

#[tokio::test]
async fn the_demonstrations_engine_is_in_the_binary() {
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let output = rouse(&["demo-engine", "--port", &port]).await;
    assert!(!output.status.success(), "its port is taken");
    assert!(text(&output.stderr).contains("in use"), "{}", text(&output.stderr));
}

#[tokio::test]
async fn simulate_compares_autoscalers_and_refuses_a_bad_trace_with_its_line() {
    let good = file("0,500,20\n60,500,20\n");
    let output = rouse(&["simulate", good.path().to_str().unwrap()]).await;
    assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(0), ""));
    assert!(text(&output.stdout).contains("\nAUTOSCALER  SATURATED "), "{}", text(&output.stdout));
    let bad = file("0,500,20\n60,500\n");
    let path = bad.path().to_str().unwrap();
    let output = rouse(&["simulate", path]).await;
    assert_eq!(output.status.code(), Some(64));
    let expected = format!("rouse-gateway: {path}: line 2: the column output_tokens is missing\n");
    assert_eq!((text(&output.stdout), text(&output.stderr)), (String::new(), expected));
}

#[tokio::test]
async fn a_watch_finds_the_gateway_again_that_comes_back_at_the_same_address() {
    const FLEET: &str = r#"{"accelerators":[],"host":{"capacity":0,"reserved":0},"models":[{"name":"m","state":"STATE","waiting":0,"leases":0,"pinned":false,"reason":"","declared":0,"learned":{}}],"engines":[]}"#;
    let serve = |listener: TcpListener, state: &'static str| {
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = Vec::new();
                while !request.ends_with(b"\r\n\r\n") {
                    request.push(stream.read_u8().await.unwrap());
                }
                let body = FLEET.replace("STATE", state);
                let found = if text(&request).contains("/fleet") { "200 OK" } else { "404 Not Found" };
                let answer = format!("HTTP/1.1 {found}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
        })
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let first = serve(listener, "cold");
    let mut watching = Command::new(env!("CARGO_BIN_EXE_rouse-gateway"))
        .args(["ps", "--watch", "--admin", &address.to_string()])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let (mut out, mut err) = (watching.stdout.take().unwrap(), watching.stderr.take().unwrap());
    read_until(&mut out, "cold").await;
    // The end of the task closes the listener.
    first.abort();
    read_until(&mut err, "retrying").await;
    let second = serve(TcpListener::bind(address).await.unwrap(), "awake");
    read_until(&mut out, "awake").await;
    second.abort();
}

/// Reads until the output has this text.
async fn read_until(output: &mut (impl tokio::io::AsyncRead + Unpin), text: &str) {
    let mut all = Vec::new();
    while !String::from_utf8_lossy(&all).contains(text) {
        let byte = output.read_u8().await;
        all.push(byte.unwrap_or_else(|_| panic!("no {text} in {}", String::from_utf8_lossy(&all))));
    }
}
