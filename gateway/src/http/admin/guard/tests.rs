use super::*;

fn admin(token: Option<&str>, metrics_open: bool) -> AdminConfig {
    AdminConfig {
        address: "127.0.0.1:0".parse().unwrap(),
        token: token.map(str::to_owned),
        metrics_open,
        tls: false,
    }
}

fn ask(method: &str, path: &str, headers: &[(&str, &str)]) -> Request<()> {
    let request = Request::builder().method(method).uri(path);
    headers.iter().fold(request, |request, (name, value)| request.header(*name, *value)).body(()).unwrap()
}

const HERE: &str = "127.0.0.1:5000";

#[test]
fn a_token_is_asked_for_everywhere_but_where_probes_and_scrapers_go() {
    let admin = admin(Some("secret"), true);
    let peer = "10.1.2.3:9".parse().unwrap();
    for open in ["/healthz", "/readyz", "/metrics"] {
        assert_eq!(check(&admin, &ask("GET", open, &[]), peer), Ok(()));
    }
    for wrong in ["", "Bearer ", "Bearer secre", "Bearer secret2", "Basic secret", "Bearer secretsecret"] {
        let request = ask("GET", "/admin/v1/fleet", &[("authorization", wrong)]);
        assert_eq!(check(&admin, &request, peer), Err(AdminRejection::NoToken), "{wrong}");
    }
    let right = ask("POST", "/admin/v1/models/m/wake", &[("authorization", "bearer secret")]);
    assert_eq!(check(&admin, &right, peer), Ok(()));
}

#[test]
fn metrics_need_the_token_when_configured_so() {
    let peer = HERE.parse().unwrap();
    let request = ask("GET", "/metrics", &[("host", "localhost")]);
    assert_eq!(check(&admin(Some("t"), false), &request, peer), Err(AdminRejection::NoToken));
    assert_eq!(check(&admin(None, false), &request, peer), Ok(()));
}

#[test]
fn the_page_needs_no_token_and_keeps_the_rules_of_hosts() {
    let far = "10.1.2.3:9".parse().unwrap();
    for path in ["/", "/ui/", "/ui/app.js", "/ui/nothing"] {
        assert_eq!(check(&admin(Some("secret"), true), &ask("GET", path, &[]), far), Ok(()), "{path}");
        let rebound = ask("GET", path, &[("host", "rebound.example")]);
        let without = admin(None, true);
        assert_eq!(check(&without, &rebound, HERE.parse().unwrap()), Err(AdminRejection::ForeignHost));
        let here = ask("GET", path, &[("host", "localhost:8180")]);
        assert_eq!(check(&without, &here, HERE.parse().unwrap()), Ok(()), "{path}");
        assert_eq!(check(&without, &here, far), Err(AdminRejection::NotLocal), "{path}");
    }
    for path in ["/ui", "/uix/", "/admin/v1/live", "/admin/v1/chat", "//ui/", "/ui%2Fapp.js"] {
        let closed = check(&admin(Some("secret"), true), &ask("GET", path, &[]), far);
        assert_eq!(closed, Err(AdminRejection::NoToken), "{path}");
    }
}

#[test]
fn a_page_of_this_gateway_gives_orders_with_its_token_under_any_name() {
    let headers = [
        ("host", "gateway.example:8180"),
        ("origin", "http://gateway.example:8180"),
        ("authorization", "Bearer secret"),
    ];
    let order = ask("POST", "/admin/v1/models/m/wake", &headers);
    assert_eq!(check(&admin(Some("secret"), true), &order, "10.1.2.3:9".parse().unwrap()), Ok(()));
}

#[test]
fn without_a_token_only_this_machine_asks_under_a_loopback_name() {
    let admin = admin(None, true);
    let fleet = |host| ask("GET", "/admin/v1/fleet", &[("host", host)]);
    for host in ["localhost:9090", "127.0.0.1", "[::1]:9090", "LOCALHOST"] {
        assert_eq!(check(&admin, &fleet(host), HERE.parse().unwrap()), Ok(()), "{host}");
    }
    for host in ["evil.example", "127.0.0.1.evil.example", "", "10.0.0.1"] {
        assert_eq!(
            check(&admin, &fleet(host), HERE.parse().unwrap()),
            Err(AdminRejection::ForeignHost),
            "{host}"
        );
    }
    let far = "192.0.2.1:1".parse().unwrap();
    assert_eq!(check(&admin, &fleet("localhost"), far), Err(AdminRejection::NotLocal));
}

/// Hosts as a rebound name would send them, and as a person types them.
#[test]
fn hosts_by_spelling() {
    let admin = admin(None, true);
    let ask = |host| check(&admin, &ask("GET", "/admin/v1/fleet", &[("host", host)]), HERE.parse().unwrap());
    for host in [
        "localhost",
        "LocalHost:9090",
        "localhost:1",
        "127.0.0.1:9090",
        "127.1.2.3",
        "[::1]",
        "[::1]:9090",
        "[::ffff:127.0.0.1]:9090",
        "[0:0:0:0:0:0:0:1]",
    ] {
        assert_eq!(ask(host), Ok(()), "{host}");
    }
    for host in [
        "rebound.example",
        "rebound.example:9090",
        "localhost.rebound.example",
        "localhost.",
        "127.0.0.1.",
        "127.0.0.1.nip.example",
        "127-0-0-1.rebound.example",
        "localhost@rebound.example",
        "rebound.example@localhost",
        "localhost:9090@rebound.example",
        "localhost:9090:9090",
        "localhost:",
        "localhost:port",
        "localhost/rebound.example",
        "localhost#rebound.example",
        "localhost rebound.example",
        "localhost,rebound.example",
        "xlocalhost",
        "localhostx",
        "0.0.0.0:9090",
        "[::]:9090",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "127.1",
        "::1",
        "[::1",
        "::1]",
        "[[::1]]",
        "[127.0.0.1]",
        "[localhost]",
        "[::1%25lo]",
        "[fe80::1]",
        "192.168.0.1",
        "169.254.169.254",
        "",
        " ",
    ] {
        assert_eq!(ask(host), Err(AdminRejection::ForeignHost), "{host}");
    }
}

#[test]
fn two_hosts_are_none() {
    let admin = admin(None, true);
    let request = ask("GET", "/admin/v1/fleet", &[("host", "localhost"), ("host", "rebound.example")]);
    assert_eq!(check(&admin, &request, HERE.parse().unwrap()), Err(AdminRejection::ForeignHost));
}

#[test]
fn origins_by_spelling() {
    let admin = admin(None, true);
    let order = |method, origin| {
        let request =
            ask(method, "/admin/v1/models/m/wake", &[("host", "localhost:9090"), ("origin", origin)]);
        check(&admin, &request, HERE.parse().unwrap())
    };
    for origin in ["http://localhost:9090", "http://LOCALHOST", "http://127.0.0.1:3000", "https://[::1]:9090"]
    {
        assert_eq!(order("POST", origin), Ok(()), "{origin}");
    }
    for origin in [
        "null",
        "",
        "http://",
        "localhost",
        "http://localhost.",
        "http://localhost.rebound.example",
        "http://rebound.example",
        "http://localhost@rebound.example",
        "http://rebound.example@localhost",
        "http://localhost http://rebound.example",
        "http://0.0.0.0:9090",
        "file://",
    ] {
        for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"] {
            assert_eq!(order(method, origin), Err(AdminRejection::ForeignOrigin), "{method} {origin}");
        }
        assert_eq!(order("GET", origin), Ok(()), "{origin}: reading is no order, and no page reads it");
    }
}

#[test]
fn without_a_token_a_foreign_page_gives_no_orders() {
    let admin = admin(None, true);
    let wake = |origin| ask("POST", "/admin/v1/models/m/wake", &[("host", "localhost"), ("origin", origin)]);
    let peer = HERE.parse().unwrap();
    assert_eq!(check(&admin, &wake("http://localhost:9090"), peer), Ok(()));
    for origin in ["https://evil.example", "null", "http://127.0.0.1.evil.example"] {
        assert_eq!(check(&admin, &wake(origin), peer), Err(AdminRejection::ForeignOrigin), "{origin}");
    }
}
