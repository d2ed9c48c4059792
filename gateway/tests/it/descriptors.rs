//! A gateway with few file descriptors: operators' subscriptions take none that requests need.

use std::{
    fs::OpenOptions,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use crate::{
    live::UNLIMITED_CONNECTIONS,
    support::{GatewayFixture, SimModel},
};

const DESCRIPTORS: u32 = 400;

#[test]
fn hundreds_who_follow_events_keep_no_request_from_being_served_where_descriptors_are_few() {
    let fixture = GatewayFixture::new(&["2Gi"]).settings(UNLIMITED_CONNECTIONS).model(&SimModel::new("m"));
    let log = fixture.dir().join("gateway.log");
    let gateway = fixture.start_as(|command| limit(command, &log));
    let follow = "GET /admin/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n";
    // The subscriptions stay open, whether the gateway accepts or refuses them.
    let followers: Vec<_> = (0..600).map(|_| gateway.admin().open(follow)).collect();
    // A cold start, and many streams at once: each stream takes two descriptors.
    assert!(gateway.client().chat("m", true, 4).is_whole_stream());
    let streams: Vec<_> = (0..80).map(|_| gateway.client().open_stream("m", 1000)).collect();
    assert_eq!(gateway.client().get("/healthz").status, 200);
    for stream in streams {
        assert!(stream.rest().is_whole_stream());
    }
    for path in ["/healthz", "/readyz"] {
        gateway.until(path, Duration::from_secs(10), || gateway.admin().get(path).status == 200);
    }
    let refused = gateway.admin().get("/admin/v1/fleet");
    assert_eq!(
        (refused.status, refused.json()["error"]["code"].as_str()),
        (503, Some("too_many_connections"))
    );
    drop(followers);
    gateway.until("operators are served again", Duration::from_secs(10), || {
        gateway.admin().get("/admin/v1/fleet").status == 200
    });
}

/// Runs the same program with at most this many descriptors.
fn limit(command: &mut Command, log: &Path) {
    let mut limited = Command::new("sh");
    limited.args(["-c", &format!("ulimit -n {DESCRIPTORS}; exec \"$0\" \"$@\"")]);
    limited.arg(command.get_program()).args(command.get_args());
    let log = OpenOptions::new().append(true).open(log).unwrap();
    limited.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
    *command = limited;
}
