//! Where a configuration comes from, so that it can be had again.

use std::{net::SocketAddr, path::PathBuf};

use super::{
    At, Config, Errors, PlatformKind, Problem, Tls, file,
    machine::{Machine, default_state_dir},
};

/// A file, or the embedded demonstration, and what the command line says instead of it. Loading it again is a reload:
/// the overrides hold there too.
#[derive(Clone, Debug, Default)]
pub struct Source {
    /// `None`: the demonstration.
    pub file: Option<PathBuf>,
    pub api: Option<SocketAddr>,
    pub admin: Option<SocketAddr>,
    /// In place of the file's `platform`.
    pub platform: Option<PlatformKind>,
}

impl Source {
    /// Reads and checks it. The demonstration keeps its state beside that of a configured gateway, in `demonstration`.
    pub fn load(&self) -> Result<Config, Errors> {
        let mut config = match &self.file {
            Some(path) => file::load_on(&self.machine(), path)?,
            None => demonstration()?,
        };
        config.api = self.api.unwrap_or(config.api);
        if let Some(admin) = self.admin {
            if config.admin.token.is_none() && !admin.ip().is_loopback() {
                let text = format!("{admin} is not loopback: that needs an admin.token");
                return Err(Errors::new("--admin", vec![Problem::new(At::default(), text)]));
            }
            config.admin.address = admin;
        }
        if let Some(text) = file::same_port(config.api, config.admin.address) {
            return Err(Errors::new("--api, --admin", vec![Problem::new(At::default(), text)]));
        }
        Ok(config)
    }

    /// Loads it for a gateway that runs with `now`. The file may be half written, and half a file must not open the API: one
    /// that is empty, or has lost its keys, is refused unless it says that this is meant.
    pub fn reload(&self, now: &Config) -> Result<Config, Errors> {
        let new = self.load()?;
        let lost = if new.blank && !now.blank {
            "the file is empty, which would remove every model and key: restore it; to remove all models, write models: []"
        } else if new.keys.is_empty() && !new.keys_none && !now.keys.is_empty() {
            "the keys are gone, which would let anybody use the API: restore keys, or write keys: none if that is meant"
        } else {
            return Ok(new);
        };
        Err(Errors::new(&new.origin, vec![Problem::new(At::default(), lost)]))
    }

    /// The certificates that it names, whether or not they are there; `None` when that cannot be told.
    pub(crate) fn certificates(&self) -> Option<Tls> {
        let text = std::fs::read_to_string(self.file.as_ref()?).ok()?;
        file::parse_on(&self.machine(), &text, "").ok()?.tls
    }

    fn machine(&self) -> Machine {
        Machine { platform: self.platform, ..Machine::this() }
    }
}

fn demonstration() -> Result<Config, Errors> {
    let exe = std::env::current_exe().map_err(|error| {
        let text = format!("cannot tell where this program is: {error}");
        Errors::new("the demonstration", vec![Problem::new(At::default(), text)])
    })?;
    let state = default_state_dir(|name| std::env::var(name).ok()).join("demonstration");
    super::demo(&state, &exe)
}
