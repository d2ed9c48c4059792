//! Reads the whole file: every top-level key, its type and its default.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
};

use rouse::{model::FleetConfig, units::Bytes};

use super::{
    AdminConfig, Config, ConfigErrors, ConfigProblem, SourceLocation,
    accelerators::read_accelerators,
    api, keys, kubernetes,
    machine::{MachineDefaults, default_state_dir},
    model, policy, proxies,
    reader::{ConfigReader, ConfigSection},
    saturation::{self, LocalSaturation},
    telemetry::{access_log, telemetry},
    tls,
    yaml::YamlNode,
};

const DEFAULT_API_ADDRESS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8080);
/// Prometheus itself uses 9090, and engines use 8000 and 8080.
pub const DEFAULT_ADMIN_ADDRESS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8180);

/// Reads and checks a file. The error lists all its problems.
pub fn load(path: &Path) -> Result<Config, ConfigErrors> {
    load_with(&MachineDefaults::detect(), path)
}

pub fn load_with(machine: &MachineDefaults, path: &Path) -> Result<Config, ConfigErrors> {
    let origin = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|error| {
        ConfigErrors::new(&origin, vec![ConfigProblem::new(SourceLocation::default(), error.to_string())])
    })?;
    let mut config = parse_with(machine, &text, &origin)?;
    tls::read(&mut config).map_err(|problem| ConfigErrors::new(&origin, vec![problem]))?;
    Ok(config)
}

/// Checks a configuration's text, which errors call `origin`.
///
/// `${env:NAME}` comes from this process's environment. Files that the text names are not read.
pub fn parse(text: &str, origin: &str) -> Result<Config, ConfigErrors> {
    parse_with(&MachineDefaults::detect(), text, origin)
}

pub fn parse_with(machine: &MachineDefaults, text: &str, origin: &str) -> Result<Config, ConfigErrors> {
    let (document, problems) =
        YamlNode::parse(text).map_err(|problems| ConfigErrors::new(origin, problems))?;
    let mut reader = ConfigReader::new(machine.environment);
    reader.problems = problems;
    let mut root = reader.section(&document);
    let config = read_config(&mut reader, &mut root, machine);
    root.close(&mut reader);
    if reader.problems.is_empty() {
        Ok(Config { origin: origin.to_owned(), blank: document.is_blank(), ..config })
    } else {
        Err(ConfigErrors::new(origin, reader.problems))
    }
}

fn read_config(reader: &mut ConfigReader, root: &mut ConfigSection, machine: &MachineDefaults) -> Config {
    let kubernetes = kubernetes::kubernetes(reader, root, machine.platform);
    let (api, admin_listen, proxies) = root.sub(reader, "listen", |reader, listen| {
        let (api, admin) = (listen.read(reader, "api", address), listen.read(reader, "admin", address));
        (api, admin, proxies::proxies(reader, listen))
    });
    if let Some((_, at)) = api.or(admin_listen) {
        let (api, admin) = (
            api.map_or(DEFAULT_API_ADDRESS, address_only),
            admin_listen.map_or(DEFAULT_ADMIN_ADDRESS, address_only),
        );
        if let Some(text) = port_conflict(api, admin) {
            reader.problems.push(ConfigProblem::new(at, text));
        }
    }
    let api = api.map_or(DEFAULT_API_ADDRESS, address_only);
    let tls = tls::tls(reader, root);
    let (threads, cors) = api::read_api(reader, root);
    let admin =
        root.sub(reader, "admin", |reader, section| admin(reader, section, admin_listen, tls.is_some()));
    let headroom = root.read(reader, "headroom", ConfigReader::memory).unwrap_or(Bytes::gib(1));
    let devices = root
        .read(reader, "accelerators", |reader, node| read_accelerators(reader, node, headroom))
        .unwrap_or_default();
    let settings = policy::settings(reader, root, Bytes(machine.memory.0 / 2));
    let stream = policy::stream(reader, root);
    let (timeouts, transitions) = policy::timeouts(reader, root);
    let settings = rouse::model::FleetSettings { timeouts: transitions, ..settings };
    let limits = policy::limits(reader, root, machine.memory);
    let affinity = policy::affinity(reader, root);
    let shutdown = policy::shutdown(reader, root, kubernetes.is_some());
    let state = root
        .read(reader, "state", ConfigReader::text)
        .map_or_else(|| default_state_dir(machine.environment), PathBuf::from);
    let (log_cap, access_log) = root.sub(reader, "logs", |reader, logs| {
        let cap = logs.read(reader, "perEngine", ConfigReader::size);
        (cap.unwrap_or(Bytes::mib(64)), logs.read(reader, "access", access_log).unwrap_or_default())
    });
    let telemetry = telemetry(reader, root);
    let scaling = saturation::of_machine(reader, root, kubernetes.is_some());
    let found = model::models(reader, root, devices.declared(), &scaling);
    let keys = keys::keys(reader, root, &found.specs);
    let accelerators = devices.list.clone();

    let mut config = Config {
        api,
        threads,
        admin,
        proxies,
        tls,
        cors,
        core: FleetConfig { settings, accelerators: devices.list, models: found.specs },
        engines: found.engines,
        former_engines: Vec::new(),
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
        saturation: LocalSaturation { settings: scaling, models: found.scaled },
        keys: keys.keys,
        keys_none: keys.explicitly_none,
        key_warnings: keys.warnings,
        blank: false,
        origin: String::new(),
        model_locations: found.locations,
    };
    config.reserve_memory_utilization(&accelerators, headroom);
    config
}

fn admin(
    reader: &mut ConfigReader,
    section: &mut ConfigSection,
    listen: Option<(SocketAddr, SourceLocation)>,
    certificates: bool,
) -> AdminConfig {
    let token = section.read(reader, "token", ConfigReader::credential);
    let token = token.filter(|token| !token.is_empty());
    let metrics_open = section
        .read(reader, "metrics", |reader, node| reader.choice(node, &[("open", true), ("token", false)]))
        .unwrap_or(true);
    let tls = section.read(reader, "tls", |reader, node| {
        let tls = reader.flag(node)?;
        if tls && !certificates {
            reader.note(node.at, "there is no certificate to use: configure tls.cert and tls.key");
        }
        Some(tls)
    });
    if let Some((address, at)) = listen
        && token.is_none()
        && !address.ip().is_loopback()
    {
        let text = format!("listen.admin: {address} is not loopback: set admin.token, or listen on loopback");
        reader.problems.push(ConfigProblem::new(at, text));
    }
    AdminConfig {
        address: listen.map_or(DEFAULT_ADMIN_ADDRESS, address_only),
        token,
        metrics_open,
        tls: tls.unwrap_or(false),
    }
}

fn address_only((address, _): (SocketAddr, SourceLocation)) -> SocketAddr {
    address
}

/// Explains why the two listeners cannot have these addresses at once.
pub fn port_conflict(api: SocketAddr, admin: SocketAddr) -> Option<String> {
    let meets =
        |a: SocketAddr, b: SocketAddr| a.ip() == b.ip() || a.ip().is_unspecified() || b.ip().is_unspecified();
    (api.port() == admin.port() && api.port() != 0 && meets(api, admin)).then(|| {
        format!(
            "listen.api ({api}) and listen.admin ({admin}) use the same port: change one of them, like {DEFAULT_API_ADDRESS} and {DEFAULT_ADMIN_ADDRESS}"
        )
    })
}

fn address(reader: &mut ConfigReader, node: &YamlNode) -> Option<(SocketAddr, SourceLocation)> {
    let text = reader.text(node)?;
    match parse_address(&text) {
        Ok(address) => Some((address, node.at)),
        Err(error) => {
            reader.note(node.at, error);
            None
        }
    }
}

/// Parses `IP:PORT`, or `localhost:PORT` for the IPv4 loopback address.
pub fn parse_address(text: &str) -> Result<SocketAddr, String> {
    let named = text.strip_prefix("localhost:").map(|port| format!("127.0.0.1:{port}"));
    named
        .as_deref()
        .unwrap_or(text)
        .parse()
        .map_err(|_| format!("'{text}' is not an address: write IP:PORT, like 127.0.0.1:8080 or [::1]:8080"))
}
