//! The command line on a terminal.

use std::{
    process::{Child, Command, Output, Stdio},
    sync::mpsc,
    time::Duration,
};

use nix::sys::signal::Signal;

use crate::support::{GatewayFixture, SimModel};

const PROGRAM: &str = env!("CARGO_BIN_EXE_rouse-gateway");

#[test]
fn states_are_coloured_on_a_terminal_that_has_not_asked_for_none_and_nowhere_else() {
    let gateway = GatewayFixture::new(&["2Gi"]).model(&SimModel::new("m")).start();
    gateway.wake("m");
    let shown = |command: &mut Command| {
        let output = command.stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    for words in ["ps", "explain m"] {
        let line = format!("{PROGRAM} {words} --admin http://{}", gateway.admin);
        let on_a_terminal = |no_color: &str| shown(on_a_terminal(&line).env("NO_COLOR", no_color));
        let coloured = on_a_terminal("");
        assert!(coloured.contains("\x1b[32mawake\x1b[0m"), "{coloured:?}");
        let piped = shown(Command::new("sh").args(["-c", &line]).env_remove("NO_COLOR"));
        for plain in [on_a_terminal("1"), piped] {
            assert!(plain.contains("awake") && !plain.contains('\x1b'), "{plain:?}");
        }
    }
}

#[test]
fn an_order_shows_its_progress_after_a_second_on_a_terminal_and_plain_lines_elsewhere() {
    let gateway = GatewayFixture::new(&["2Gi"])
        .model(&SimModel { flags: "--start-time 2500ms", ..SimModel::new("m") })
        .start();
    let line = |order: &str| format!("{PROGRAM} {order} m --admin http://{}", gateway.admin);
    let both = |command: &mut Command| {
        let Output { status, stdout, stderr } = command.stdin(Stdio::null()).output().unwrap();
        let [stdout, stderr] = [stdout, stderr].map(|bytes| String::from_utf8(bytes).unwrap());
        assert!(status.success(), "{stdout} {stderr}");
        (stdout, stderr)
    };
    let (shown, _) = both(&mut on_a_terminal(&line("wake")));
    // The model's state and the time so far, then nothing of it, and then the outcome.
    let (progress, outcome) = shown.rsplit_once("\r\x1b[K").unwrap_or_else(|| panic!("{shown:?}"));
    let steps: Vec<&str> = progress.split('\r').skip(1).collect();
    assert!(steps.len() > 1 && steps[0].starts_with("wake m: launching, "), "{shown:?}");
    for step in steps {
        let is_step = step.starts_with("wake m: ") && step.ends_with("\x1b[K");
        assert!(is_step && !step.contains('\n'), "{step:?}");
    }
    assert!(!progress.contains("launching, 0."), "not before the first second: {progress:?}");
    assert!(outcome.starts_with("m is awake, after ") && outcome.lines().count() == 1, "{outcome:?}");
    // An order that is done at once shows its outcome alone.
    let (shown, _) = both(&mut on_a_terminal(&line("pin")));
    assert!(shown.starts_with("m is pinned, after ") && !shown.contains('\x1b'), "{shown:?}");

    for (order, outcome) in
        [("unpin", "m is no longer pinned"), ("stop", "m is stopped"), ("wake", "m is awake")]
    {
        let (out, err) = both(Command::new("sh").args(["-c", &line(order)]));
        assert!(out.starts_with(outcome) && out.ends_with("s\n"), "{out:?}");
        assert_eq!((out.lines().count(), err.as_str()), (1, ""), "{out:?}");
        assert!(!out.contains(['\r', '\x1b']), "{out:?}");
    }
}

#[test]
fn a_watched_fleet_is_shown_anew_as_it_changes_and_outlives_its_gateway() {
    let mut gateway = GatewayFixture::new(&["2Gi"]).model(&SimModel::new("m")).start();
    let mut watching = Command::new(PROGRAM)
        .args(["ps", "--watch", "--admin", &format!("http://{}", gateway.admin)])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let shown = pieces_of(watching.stdout.take().unwrap());
    let noticed = pieces_of(watching.stderr.take().unwrap());
    let order = |order: &str| gateway.admin().post(&format!("/admin/v1/models/m/{order}"), "").status;
    // Elsewhere than on a terminal, each change is printed below the last one.
    let mut all = String::new();
    until(&shown, &mut all, "m      cold");
    assert_eq!(order("wake"), 202);
    until(&shown, &mut all, "m      awake");
    assert_eq!(order("stop"), 202);
    let mut after = String::new();
    until(&shown, &mut after, "m      cold");
    assert!(!all.contains('\x1b'), "{all:?}");
    gateway.signal(Signal::SIGKILL);
    gateway.wait();
    let mut said = String::new();
    until(&noticed, &mut said, "retrying\n");
    assert!(said.contains("cannot connect to a gateway at"), "{said}");
    assert!(watching.try_wait().unwrap().is_none(), "it waits for the next gateway");
    end(&watching, Signal::SIGINT);
    assert_eq!(watching.wait().unwrap().code(), Some(0));
}

#[test]
fn a_watch_redraws_in_place_on_a_terminal_and_restores_it_at_the_end() {
    let gateway = GatewayFixture::new(&["2Gi"]).model(&SimModel::new("m")).start();
    let dir = tempfile::tempdir().unwrap();
    let pid_file = dir.path().join("pid");
    let line = format!(
        "echo $$ > {}; exec {PROGRAM} ps --watch --admin http://{}",
        pid_file.display(),
        gateway.admin
    );
    let mut terminal = on_a_terminal(&line).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let shown = pieces_of(terminal.stdout.take().unwrap());
    let mut all = String::new();
    until(&shown, &mut all, "cold");
    let (_, frame) = all.split_once("\x1b[?1049h\x1b[?25l").expect("it opens the other screen");
    assert!(frame.starts_with("\x1b[H") && !frame.contains("\x1b[2J"), "{frame:?}");
    let watching: i32 = std::fs::read_to_string(&pid_file).unwrap().trim().parse().unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(watching), Signal::SIGINT).unwrap();
    until(&shown, &mut all, "\x1b[?25h\x1b[?1049l");
    assert_eq!(terminal.wait().unwrap().code(), Some(0));
}

/// Runs this shell command on a terminal of its own, to which both of its outputs go.
pub(crate) fn on_a_terminal(line: &str) -> Command {
    let mut command = Command::new("script");
    command.args(["-qec", line, "/dev/null"]).env("TERM", "xterm").env_remove("ROUSE_ADMIN");
    command
}

/// Longest wait for another process.
const PATIENCE: Duration = Duration::from_secs(30);

/// Reads a pipe in a thread of its own.
pub(crate) fn pieces_of(mut pipe: impl std::io::Read + Send + 'static) -> mpsc::Receiver<String> {
    #[expect(clippy::disallowed_methods, reason = "a test's channel")]
    let (tell, pieces) = mpsc::channel();
    std::thread::spawn(move || {
        let mut piece = [0; 16 << 10];
        while let Ok(read @ 1..) = pipe.read(&mut piece) {
            tell.send(String::from_utf8_lossy(&piece[..read]).into_owned()).unwrap_or_default();
        }
    });
    pieces
}

/// Reads until all that was read contains this text.
pub(crate) fn until(pieces: &mpsc::Receiver<String>, all: &mut String, text: &str) {
    while !all.contains(text) {
        *all += &pieces.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("no {text:?} in {all:?}"));
    }
}

fn end(process: &Child, signal: Signal) {
    let pid = nix::unistd::Pid::from_raw(i32::try_from(process.id()).unwrap());
    nix::sys::signal::kill(pid, signal).unwrap();
}
