//! Tests the settings of the gateway itself: platform, addresses, certificates, streams and shutdown.
//!
//! Apart from the models, because none of these concerns an engine.

use rouse::{pairing::ids::ProviderMode, units::Millis};

use super::{
    ForwardedHeader, ImageVolumes, LoadSource, MachineDefaults, PlatformKind, SaturationConfig, SlotsConfig,
    TrustedProxies, WarmupConfig, diff, errors, machine, parse_with, read,
};

/// The gateway needs part of the grace period after its streams end. Kubernetes kills 30 seconds after SIGTERM.
#[test]
fn the_grace_of_a_gateway_in_a_pod_is_below_the_pods() {
    let within =
        |text: &str, pod: Option<u64>| read(text).unwrap().shutdown.effective_grace(pod.map(Millis::secs));
    let pod = "platform: kubernetes\nkubernetes: {stubImage: s}\n";
    let long = format!("{pod}shutdown: {{grace: 5m}}\n");
    // The Pod could not be read.
    assert_eq!((within("keys: none\n", None), within(pod, None)), (Millis::secs(30), Millis::secs(20)));
    assert_eq!(within(&long, None), Millis::secs(300));
    for (killed, most) in [(30, 20_000), (45, 35_000), (12, 6_000), (0, 0)] {
        for text in [pod, &long] {
            assert_eq!(within(text, Some(killed)), Millis(most), "{text}: killed after {killed} s");
        }
    }
    assert_eq!(within(&long, Some(600)), Millis::secs(300), "as the file says");
}

#[test]
fn the_command_line_says_where_engines_run_in_place_of_the_file() {
    let on =
        |platform, text: &str| parse_with(&MachineDefaults { platform, ..machine() }, text, "rouse.yaml");
    let cluster = "kubernetes: {stubImage: s}\n";
    assert!(on(Some(PlatformKind::Kubernetes), cluster).unwrap().kubernetes.is_some());
    assert!(on(Some(PlatformKind::Kubernetes), &format!("platform: local\n{cluster}")).is_ok());
    let alone = on(Some(PlatformKind::Local), "platform: kubernetes\n").unwrap();
    assert!(alone.kubernetes.is_none());
    assert!(on(None, cluster).is_err());
}

#[test]
fn requesters_are_served_in_the_mode_of_the_file() {
    let of = |dual_pods: &str| {
        format!("platform: kubernetes\nkubernetes: {{stubImage: s, dualPods: {dual_pods}}}\n")
    };
    for (dual_pods, mode) in [
        ("{}", ProviderMode::Sleep),
        ("{mode: sleep}", ProviderMode::Sleep),
        ("{mode: plain}", ProviderMode::Plain),
        ("{mode: launcher}", ProviderMode::Launcher),
    ] {
        let config = read(&of(dual_pods)).unwrap();
        assert_eq!(config.kubernetes.unwrap().dual_pods.unwrap().mode, mode, "{dual_pods}");
    }
    let unknown = errors(&of("{mode: direct}"));
    assert!(unknown.contains("launcher"), "{unknown}");
}

#[test]
fn a_prometheus_is_an_address_and_the_rest_has_defaults() {
    let text = |prometheus: &str| {
        format!("platform: kubernetes\nkubernetes: {{stubImage: s, prometheus: {prometheus}}}\n")
    };
    let read = |prometheus: &str| read(&text(prometheus)).unwrap().kubernetes.unwrap().prometheus.unwrap();
    let plain = read("{url: 'http://prometheus.monitoring:9090/base'}");
    assert_eq!(plain.url.to_string(), "http://prometheus.monitoring:9090/base");
    assert_eq!((plain.interval, plain.timeout), (Millis::secs(15), Millis::secs(5)));
    assert_eq!((plain.token_file, plain.ca_file), (None, None));
    let full = read("{url: 'https://p', tokenFile: /t, caFile: /c, interval: 30s, timeout: 2s}");
    assert_eq!((full.interval, full.timeout), (Millis::secs(30), Millis::secs(2)));
    assert_eq!((full.token_file, full.ca_file), (Some("/t".into()), Some("/c".into())));
    insta::assert_snapshot!(errors(&text("{}")), @"rouse.yaml:2:40: kubernetes.prometheus: 'url' is missing");
    insta::assert_snapshot!(errors(&text("{url: 'prometheus:9090'}")), @"rouse.yaml:2:46: kubernetes.prometheus.url: 'prometheus:9090' is not a URL: write http://HOST:9090");
    insta::assert_snapshot!(errors(&text("{url: 'http://me:secret@p'}")), @"rouse.yaml:2:46: kubernetes.prometheus.url: the URL contains credentials: put a bearer token into a file, and set tokenFile");
    insta::assert_snapshot!(errors(&text("{url: 'http://p/api/v1/query?x=y', interval: 0s}")), @r"
    rouse.yaml:2:46: kubernetes.prometheus.url: the URL has a query: write only the part before /api/v1, like http://HOST:9090
    rouse.yaml:2:85: kubernetes.prometheus.interval: must be longer than 0
    ");
}

#[test]
fn saturation_is_read_from_the_engines_unless_there_is_a_prometheus_to_ask() {
    let text = |more: &str| format!("platform: kubernetes\nkubernetes: {{stubImage: s{more}}}\n");
    let read = |more: &str| read(&text(more)).unwrap().kubernetes.unwrap().saturation;
    assert_eq!(read(""), Some(SaturationConfig::default()));
    assert_eq!(read(", saturation: {enabled: false}"), None);
    let all = ", prometheus: {url: 'http://p'}, saturation: {source: prometheus, interval: 200ms, window: 1s, \
               stabilisation: 0s}";
    let expected = SaturationConfig {
        source: LoadSource::Prometheus,
        interval: Millis(200),
        window: Millis::secs(1),
        stabilisation: Millis::ZERO,
    };
    assert_eq!(read(all), Some(expected));
    let unknown = errors(&text(", saturation: {source: prometheus}"));
    assert!(unknown.ends_with("there is no Prometheus to ask: set kubernetes.prometheus.url"), "{unknown}");
}

#[test]
fn warmups_are_carried_out_with_image_volumes_unless_asked_otherwise() {
    let text = |more: &str| format!("platform: kubernetes\nkubernetes: {{stubImage: s{more}}}\n");
    let read = |more: &str| read(&text(more)).unwrap().kubernetes.unwrap().warmup;
    for default in ["", ", warmup: {}", ", warmup: {enabled: true, imageVolumes: auto, retryDelay: 10s}"] {
        let expected = WarmupConfig {
            enabled: true,
            image_volumes: ImageVolumes::Auto,
            auto_parallelism: 2,
            retry_delay: Millis::secs(10),
        };
        assert_eq!(read(default), expected, "{default}");
    }
    let other = WarmupConfig {
        enabled: false,
        image_volumes: ImageVolumes::Never,
        auto_parallelism: 9,
        retry_delay: Millis(500),
    };
    let written = ", warmup: {enabled: false, imageVolumes: never, autoParallelism: 9, retryDelay: 500ms}";
    assert_eq!(read(written), other);
    assert!(errors(&text(", warmup: {autoParallelism: 0}")).contains("write at least 1"));
    assert!(errors(&text(", warmup: {autoParallelism: some}")).contains("kubernetes.warmup.autoParallelism"));
    assert!(errors(&text(", warmup: {retryDelay: 0s}")).contains("must be longer than 0"));
    let unknown = errors(&text(", warmup: {imageVolumes: always}"));
    assert!(unknown.contains("kubernetes.warmup.imageVolumes") && unknown.contains("never"), "{unknown}");
}

#[test]
fn slots_are_kept_only_if_the_file_has_the_section() {
    let text = |more: &str| format!("platform: kubernetes\nkubernetes: {{stubImage: s{more}}}\n");
    let read = |more: &str| read(&text(more)).unwrap().kubernetes.unwrap().slots;
    assert_eq!(read(""), None);
    assert_eq!(read(", slots: {}"), Some(SlotsConfig { node_timeout: Millis::secs(300) }));
    assert_eq!(read(", slots: {nodeTimeout: 3s}"), Some(SlotsConfig { node_timeout: Millis::secs(3) }));
    assert!(errors(&text(", slots: {nodeTimeout: 0s}")).contains("must be longer than 0"));
}

#[test]
fn heartbeats_of_responses_are_comments_unless_asked_otherwise() {
    assert!(!read("stream: {responsesHeartbeat: comment}\n").unwrap().stream.responses_heartbeat_events);
    assert!(read("stream: {responsesHeartbeat: event}\n").unwrap().stream.responses_heartbeat_events);
}

#[test]
fn a_removed_key_is_refused_with_its_place_and_what_to_do() {
    for value in ["true", "false", "null"] {
        let errors = errors(&format!("stream: {{grace: 1s, takeOver: {value}}}\n"));
        assert_eq!(
            errors,
            "rouse.yaml:1:21: stream: 'takeOver' was removed: the gateway now serves every HTTP/1.1 connection as \
             'true' did, so delete the key"
        );
    }
}

#[test]
fn certificates_come_in_pairs_and_origins_are_origins() {
    insta::assert_snapshot!(errors(
        "tls: {cert: a.pem}\napi: {cors: {origins: [https://a.example/path, a.example, \"https://*.a.example\", \"null\"]}}\n"
    ), @r###"
    rouse.yaml:1:6: tls: both cert and key are needed
    rouse.yaml:2:24: api.cors.origins[0]: 'https://a.example/path' is not an origin: write scheme://host or scheme://host:port, without a path, or "*"
    rouse.yaml:2:48: api.cors.origins[1]: 'a.example' is not an origin: write scheme://host or scheme://host:port, without a path, or "*"
    rouse.yaml:2:59: api.cors.origins[2]: 'https://*.a.example' is not an origin: write scheme://host or scheme://host:port, without a path, or "*"
    rouse.yaml:2:82: api.cors.origins[3]: 'null' is not an origin: write scheme://host or scheme://host:port, without a path, or "*"
    "###);
    let config = read("api: {cors: {origins: [\"HTTP://App.example:8080\", \"*\"]}}\n").unwrap();
    assert_eq!(
        (config.cors.origins.as_slice(), config.cors.any),
        (&["http://app.example:8080".to_owned()][..], true)
    );
    for threads in [0, 257] {
        let refused = errors(&format!("api: {{threads: {threads}}}\n"));
        assert_eq!(refused, "rouse.yaml:1:16: api.threads: must be between 1 and 256");
    }
    assert_eq!(read("api: {threads: 3, cors: {origins: []}}\n").unwrap().threads, Some(3));
    insta::assert_snapshot!(errors("admin: {tls: true}\n"), @"rouse.yaml:1:14: admin.tls: there is no certificate to use: configure tls.cert and tls.key");
    let files = |text: &str| diff(&read("").unwrap(), &read(text).unwrap()).to_string();
    assert_eq!(files("tls: {cert: a, key: b}\nadmin: {tls: true}"), "restart needed for tls, admin.tls");
}

#[test]
fn an_admin_api_for_others_needs_a_token() {
    insta::assert_snapshot!(errors("listen: {admin: 0.0.0.0:8180}\n"), @r###"rouse.yaml:1:17: listen.admin: 0.0.0.0:8180 is not loopback: set admin.token, or listen on loopback"###);
    let config =
        read("listen: {admin: 0.0.0.0:8180}\nadmin: {token: \"${env:TOKEN}\", metrics: token}\n").unwrap();
    assert_eq!(config.admin.token.as_deref(), Some("s3cret"));
    assert!(!format!("{config:?}").contains("s3cret"));
}

#[test]
fn proxies_are_networks_and_how_they_name_their_clients() {
    let none = read("").unwrap().proxies;
    assert_eq!(none, TrustedProxies::default());
    assert!(!none.trusts([127, 0, 0, 1].into()));
    let read = |text: &str| read(&format!("listen: {{proxies: {text}}}\n")).unwrap().proxies;
    let some = read("{networks: [10.0.0.0/8, \"2001:db8::/32\", 192.0.2.7]}");
    assert_eq!((some.proxy_protocol, some.header), (false, ForwardedHeader::XForwardedFor));
    assert!(some.trusts([10, 9, 8, 7].into()) && some.trusts([192, 0, 2, 7].into()));
    assert!(!some.trusts([192, 0, 2, 8].into()));
    let all = read("{networks: [10.0.0.0/8], proxyProtocol: true, header: none}");
    assert_eq!((all.proxy_protocol, all.header), (true, ForwardedHeader::None));
    assert_eq!(read("{networks: [10.0.0.0/8], header: forwarded}").header, ForwardedHeader::Forwarded);
    assert_eq!(read("{networks: [], proxyProtocol: false, header: x-forwarded-for}"), none);
}

#[test]
fn proxies_that_would_name_no_client_are_refused() {
    let of = |text: &str| errors(&format!("listen: {{proxies: {text}}}\n"));
    for (text, told) in [
        (
            "{proxyProtocol: true}",
            "rouse.yaml:1:35: listen.proxies: proxyProtocol does nothing without networks: list those of your \
             proxies, like [10.0.0.0/8]",
        ),
        (
            "{networks: [], header: forwarded}",
            "rouse.yaml:1:42: listen.proxies: header does nothing without networks: list those of your proxies, \
             like [10.0.0.0/8]",
        ),
        (
            "{networks: [10.0.0.0/8], header: none}",
            "rouse.yaml:1:52: listen.proxies: with header: none the proxies name no client: set proxyProtocol: \
             true, or name their header",
        ),
        (
            "{networks: [10.0.0.0/33], proxyProtocol: true}",
            "rouse.yaml:1:31: listen.proxies.networks[0]: '10.0.0.0/33' is not a network: write an address and a \
             prefix length, like 10.0.0.0/8 or 2001:db8::/32",
        ),
        (
            "{networks: [10.0.0.0/8], header: x-real-ip}",
            "rouse.yaml:1:52: listen.proxies.header: 'x-real-ip' is not one of: x-forwarded-for, forwarded, none",
        ),
    ] {
        assert_eq!(of(text), told);
    }
}
