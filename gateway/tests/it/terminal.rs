//! The command line on a terminal.

use std::{
    io::Read as _,
    process::{Command, Stdio},
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
        let on_a_terminal = |no_color: &str| {
            shown(Command::new("script").args(["-qec", &line, "/dev/null"]).env("NO_COLOR", no_color))
        };
        let coloured = on_a_terminal("");
        assert!(coloured.contains("\x1b[32mawake\x1b[0m"), "{coloured:?}");
        let piped = shown(Command::new("sh").args(["-c", &line]).env_remove("NO_COLOR"));
        for plain in [on_a_terminal("1"), piped] {
            assert!(plain.contains("awake") && !plain.contains('\x1b'), "{plain:?}");
        }
    }
}

#[test]
fn a_watched_fleet_is_shown_anew_until_its_gateway_is_gone() {
    let mut gateway = GatewayFixture::new(&["2Gi"]).model(&SimModel::new("m")).start();
    let mut watching = Command::new(PROGRAM)
        .args(["ps", "--watch", "--admin", &format!("http://{}", gateway.admin)])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut shown = watching.stdout.take().unwrap();
    #[expect(clippy::disallowed_methods, reason = "a test's channel")]
    let (tell, pieces) = mpsc::channel();
    std::thread::spawn(move || {
        let mut piece = [0; 16 << 10];
        while let Ok(read @ 1..) = shown.read(&mut piece) {
            tell.send(String::from_utf8_lossy(&piece[..read]).into_owned()).unwrap_or_default();
        }
    });
    // The present screen is the output since the last clear.
    let mut all = String::new();
    let mut until = |state: &str| loop {
        all +=
            &pieces.recv_timeout(Duration::from_secs(30)).unwrap_or_else(|_| panic!("no {state} in {all:?}"));
        let screens = all.matches("\x1b[H\x1b[2J").count();
        let screen = all.rsplit("\x1b[H\x1b[2J").next().unwrap();
        if screen.contains("MODEL") && screen.contains(&format!("m      {state}")) {
            return screens;
        }
    };
    let order = |order: &str| gateway.admin().post(&format!("/admin/v1/models/m/{order}"), "").status;
    let cold = until("cold");
    assert_eq!(order("wake"), 202);
    let awake = until("awake");
    assert!(awake > cold);
    assert_eq!(order("stop"), 202);
    assert!(until("cold") > awake);
    gateway.signal(Signal::SIGKILL);
    gateway.wait();
    let ended = watching.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(69), "{said}");
    assert!(said.contains("cannot connect to a gateway at"), "{said}");
}
