//! The file as a whole: every top-level key, its type, its default.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
};

use rouse::{model::Configuration, units::Bytes};

use super::{
    Admin, At, Config, Errors, Problem, cors,
    devices::devices,
    keys, kubernetes,
    machine::{Machine, default_state_dir},
    model, policy,
    reader::{Reader, Section},
    telemetry::{access_log, telemetry},
    tls,
    tree::Node,
};

const LOCAL_API: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8080);
/// 9090 is Prometheus' own, 8000 and 8080 are those of engines.
pub(crate) const LOCAL_ADMIN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8180);

/// Reads and checks a file. The error lists everything that is wrong with it.
pub fn load(path: &Path) -> Result<Config, Errors> {
    load_on(&Machine::this(), path)
}

pub(super) fn load_on(machine: &Machine, path: &Path) -> Result<Config, Errors> {
    let origin = path.display().to_string();
    let text = std::fs::read_to_string(path)
        .map_err(|error| Errors::new(&origin, vec![Problem::new(At::default(), error.to_string())]))?;
    let mut config = parse_on(machine, &text, &origin)?;
    tls::read(&mut config).map_err(|problem| Errors::new(&origin, vec![problem]))?;
    Ok(config)
}

/// Checks a configuration's text; `origin` is what the errors call it. `${env:NAME}` is read from this process's
/// environment, and no file that the text names.
pub fn parse(text: &str, origin: &str) -> Result<Config, Errors> {
    parse_on(&Machine::this(), text, origin)
}

pub(super) fn parse_on(machine: &Machine, text: &str, origin: &str) -> Result<Config, Errors> {
    let (document, problems) = Node::parse(text).map_err(|problems| Errors::new(origin, problems))?;
    let mut reader = Reader::new(machine.environment);
    reader.problems = problems;
    let mut root = reader.section(&document);
    let config = whole(&mut reader, &mut root, machine);
    root.close(&mut reader);
    if reader.problems.is_empty() {
        Ok(Config { origin: origin.to_owned(), blank: document.is_blank(), ..config })
    } else {
        Err(Errors::new(origin, reader.problems))
    }
}

fn whole(reader: &mut Reader, root: &mut Section, machine: &Machine) -> Config {
    let kubernetes = kubernetes::kubernetes(reader, root, machine.platform);
    let (api, admin_listen) = root.sub(reader, "listen", |reader, listen| {
        (listen.read(reader, "api", address), listen.read(reader, "admin", address))
    });
    if let Some((_, at)) = api.or(admin_listen) {
        let (api, admin) = (api.map_or(LOCAL_API, first), admin_listen.map_or(LOCAL_ADMIN, first));
        if let Some(text) = same_port(api, admin) {
            reader.problems.push(Problem::new(at, text));
        }
    }
    let api = api.map_or(LOCAL_API, first);
    let tls = tls::tls(reader, root);
    let (threads, cors) = cors::api(reader, root);
    let admin =
        root.sub(reader, "admin", |reader, section| admin(reader, section, admin_listen, tls.is_some()));
    let headroom = root.read(reader, "headroom", Reader::memory).unwrap_or(Bytes::gib(1));
    let devices =
        root.read(reader, "accelerators", |reader, node| devices(reader, node, headroom)).unwrap_or_default();
    let settings = policy::settings(reader, root, Bytes(machine.memory.0 / 2));
    let stream = policy::stream(reader, root);
    let (timeouts, transitions) = policy::timeouts(reader, root);
    let settings = rouse::model::Settings { timeouts: transitions, ..settings };
    let limits = policy::limits(reader, root, machine.memory);
    let affinity = policy::affinity(reader, root);
    let shutdown = policy::shutdown(reader, root, kubernetes.is_some());
    let state = root
        .read(reader, "state", Reader::text)
        .map_or_else(|| default_state_dir(machine.environment), PathBuf::from);
    let (log_cap, access_log) = root.sub(reader, "logs", |reader, logs| {
        let cap = logs.read(reader, "perEngine", Reader::size);
        (cap.unwrap_or(Bytes::mib(64)), logs.read(reader, "access", access_log).unwrap_or_default())
    });
    let telemetry = telemetry(reader, root);
    let found = model::models(reader, root, devices.known());
    let keys = keys::keys(reader, root, &found.specs);
    let accelerators = devices.list.clone();

    let mut config = Config {
        api,
        threads,
        admin,
        tls,
        cors,
        core: Configuration { settings, accelerators: devices.list, models: found.specs },
        models: found.models,
        former: Vec::new(),
        meters: devices.meters,
        visible: devices.visible,
        accelerators_auto: devices.auto && kubernetes.is_none(),
        headroom,
        stream,
        timeouts,
        limits,
        affinity,
        shutdown,
        state,
        log_cap,
        access_log,
        telemetry,
        kubernetes,
        keys: keys.keys,
        keys_none: keys.none,
        key_doubts: keys.doubts,
        blank: false,
        origin: String::new(),
        places: found.places,
    };
    config.book_shares(&accelerators, headroom);
    config
}

fn admin(
    reader: &mut Reader,
    section: &mut Section,
    listen: Option<(SocketAddr, At)>,
    certificates: bool,
) -> Admin {
    let token = section.read(reader, "token", Reader::credential);
    let token = token.filter(|token| !token.is_empty());
    let metrics_open = section
        .read(reader, "metrics", |reader, node| reader.choice(node, &[("open", true), ("token", false)]))
        .unwrap_or(true);
    let tls = section.read(reader, "tls", |reader, node| {
        let tls = reader.flag(node)?;
        if tls && !certificates {
            reader.note(node.at, "there is no tls whose certificate could be shown");
        }
        Some(tls)
    });
    if let Some((address, at)) = listen
        && token.is_none()
        && !address.ip().is_loopback()
    {
        let text = format!("listen.admin: {address} is not loopback: that needs an admin.token");
        reader.problems.push(Problem::new(at, text));
    }
    Admin { address: listen.map_or(LOCAL_ADMIN, first), token, metrics_open, tls: tls.unwrap_or(false) }
}

fn first((address, _): (SocketAddr, At)) -> SocketAddr {
    address
}

/// Why the two listeners cannot have these addresses at once.
pub(super) fn same_port(api: SocketAddr, admin: SocketAddr) -> Option<String> {
    let meets =
        |a: SocketAddr, b: SocketAddr| a.ip() == b.ip() || a.ip().is_unspecified() || b.ip().is_unspecified();
    (api.port() == admin.port() && api.port() != 0 && meets(api, admin)).then(|| {
        format!(
            "listen.api ({api}) and listen.admin ({admin}) have one port: write another for one of them, like {LOCAL_API} and {LOCAL_ADMIN}"
        )
    })
}

fn address(reader: &mut Reader, node: &Node) -> Option<(SocketAddr, At)> {
    let text = reader.text(node)?;
    match parse_address(&text) {
        Ok(address) => Some((address, node.at)),
        Err(error) => {
            reader.note(node.at, error);
            None
        }
    }
}

/// `IP:PORT`, or `localhost:PORT` for IPv4's.
pub(crate) fn parse_address(text: &str) -> Result<SocketAddr, String> {
    let named = text.strip_prefix("localhost:").map(|port| format!("127.0.0.1:{port}"));
    named
        .as_deref()
        .unwrap_or(text)
        .parse()
        .map_err(|_| format!("'{text}' is not an address: write IP:PORT, like 127.0.0.1:8080 or [::1]:8080"))
}
