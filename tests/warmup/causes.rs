//! Texts of container runtimes and registries, as kubelets show them.

use rouse::warmup::{WarmupCause, classify_pull};

const PULL: &str = "ErrImagePull";

#[test]
fn texts_of_runtimes_and_registries_are_recognised() {
    let texts = [
        // containerd
        (
            r#"failed to pull and unpack image "docker.io/library/nope:1": failed to resolve reference "docker.io/library/nope:1": docker.io/library/nope:1: not found"#,
            WarmupCause::NotFound,
        ),
        (
            r#"rpc error: code = NotFound desc = failed to pull and unpack image "127.0.0.1:5000/app:9""#,
            WarmupCause::NotFound,
        ),
        (
            r#"failed to resolve reference "docker.io/nope/nope:latest": pull access denied, repository does not exist or may require authorization: server message: insufficient_scope: authorization failed"#,
            WarmupCause::Auth,
        ),
        (
            r#"failed to authorize: failed to fetch anonymous token: unexpected status from GET request to https://ghcr.io/token: 401 Unauthorized"#,
            WarmupCause::Auth,
        ),
        (
            r#"failed to authorize: failed to fetch oauth token: Post "https://auth.example/token": dial tcp 10.0.0.9:443: i/o timeout"#,
            WarmupCause::Network,
        ),
        (
            r#"failed to copy: httpReadSeeker: failed open: unexpected status code https://registry-1.docker.io/v2/library/nginx/blobs/sha256:1: 429 Too Many Requests - Server message: toomanyrequests: You have reached your pull rate limit."#,
            WarmupCause::RateLimited,
        ),
        (
            r#"failed to do request: Head "https://127.0.0.1:5000/v2/app/manifests/1": dial tcp 127.0.0.1:5000: connect: connection refused"#,
            WarmupCause::Network,
        ),
        (
            r#"failed to do request: Head "https://registry.bad/v2/": dial tcp: lookup registry.bad on 10.96.0.10:53: no such host"#,
            WarmupCause::Network,
        ),
        (r#"Head "https://r/v2/": lookup r on 127.0.0.53:53: server misbehaving"#, WarmupCause::Network),
        (
            r#"Head "https://r/v2/": tls: failed to verify certificate: x509: certificate signed by unknown authority"#,
            WarmupCause::Network,
        ),
        ("http: server gave HTTP response to HTTPS client", WarmupCause::Network),
        (
            "failed to copy: read tcp 10.1.1.1:1->10.1.1.2:443: read: connection reset by peer",
            WarmupCause::Network,
        ),
        ("failed to copy: httpReadSeeker: failed open: unexpected EOF", WarmupCause::Network),
        (
            "unexpected status from HEAD request to https://r/v2/a: 503 Service Unavailable",
            WarmupCause::Network,
        ),
        (
            "failed to extract layer sha256:1: write /var/lib/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots/7/fs/a: no space left on device",
            WarmupCause::NoSpace,
        ),
        (
            r#"failed to pull and unpack image "r/a:1": no match for platform in manifest: not found"#,
            WarmupCause::WrongPlatform,
        ),
        // CRI-O
        ("reading manifest v9 in quay.io/x/y: manifest unknown", WarmupCause::NotFound),
        (
            "reading manifest 1 in r.example/a: name unknown: repository name not known to registry",
            WarmupCause::NotFound,
        ),
        (
            "reading manifest latest in docker.io/library/nope: errors: denied: requested access to the resource is denied unauthorized: authentication required",
            WarmupCause::Auth,
        ),
        ("unable to retrieve auth token: invalid username/password: unauthorized", WarmupCause::Auth),
        (
            r#"initializing source docker://localhost:5000/a:1: pinging container registry localhost:5000: Get "http://localhost:5000/v2/": dial tcp [::1]:5000: connect: connection refused"#,
            WarmupCause::Network,
        ),
        (
            r#"choosing image instance: no image found in manifest list for architecture "arm64", variant "v8", OS "linux""#,
            WarmupCause::WrongPlatform,
        ),
        (
            r#"short-name "nginx" did not resolve to an alias and no unqualified-search registries are defined"#,
            WarmupCause::InvalidImage,
        ),
        // The kubelet
        ("pull QPS exceeded", WarmupCause::RateLimited),
    ];
    for (text, cause) in texts {
        assert_eq!(classify_pull(PULL, text), Some(cause.clone()), "{text}");
        let backing_off = format!(r#"Back-off pulling image "a:1": ErrImagePull: {text}"#);
        assert_eq!(classify_pull("ImagePullBackOff", &backing_off), Some(cause), "{text}");
    }
}

#[test]
fn the_reason_alone_shows_what_no_registry_was_asked() {
    let parse = r#"Failed to apply default image tag "A:1": couldn't parse image name "A:1": invalid reference format"#;
    assert_eq!(classify_pull("InvalidImageName", parse), Some(WarmupCause::InvalidImage));
    let never = r#"Container image "a:1" is not present with pull policy of Never"#;
    assert_eq!(classify_pull("ErrImageNeverPull", never), Some(WarmupCause::NotFound));
    for reason in
        ["ContainerCreating", "PodInitializing", "CrashLoopBackOff", "CreateContainerConfigError", ""]
    {
        assert_eq!(classify_pull(reason, ": not found"), None, "{reason}");
    }
}

#[test]
fn an_unknown_text_is_passed_on_and_shortened() {
    let unknown = "the registry is on fire";
    assert_eq!(classify_pull(PULL, unknown), Some(WarmupCause::Unknown(unknown.to_owned())));
    assert_eq!(
        classify_pull("ImagePullBackOff", ""),
        Some(WarmupCause::Unknown("ImagePullBackOff".to_owned()))
    );
    let long = "ä".repeat(10_000);
    let Some(WarmupCause::Unknown(kept)) = classify_pull(PULL, &long) else { panic!("recognised") };
    assert_eq!(kept.chars().count(), 160);
}

#[test]
fn only_what_cannot_change_by_itself_is_final_and_what_waits_is_no_failure() {
    for cause in [WarmupCause::NotFound, WarmupCause::Auth, WarmupCause::InvalidImage, WarmupCause::NodeGone]
    {
        assert!(cause.is_final() && cause.is_failure(), "{cause}");
    }
    for cause in [
        WarmupCause::RateLimited,
        WarmupCause::Network,
        WarmupCause::NoSpace,
        WarmupCause::WrongPlatform,
        WarmupCause::ActionFailed { exit_code: 1 },
        WarmupCause::Unknown(String::new()),
    ] {
        assert!(!cause.is_final() && cause.is_failure(), "{cause}");
    }
    for cause in [
        WarmupCause::NodeNotReady,
        WarmupCause::Cordoned,
        WarmupCause::Taint("a".to_owned()),
        WarmupCause::NodeFull,
        WarmupCause::DiskPressure,
        WarmupCause::EnginePulling,
        WarmupCause::Refused(String::new()),
    ] {
        assert!(!cause.is_final() && !cause.is_failure(), "{cause}");
    }
}
