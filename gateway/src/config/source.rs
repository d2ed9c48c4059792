//! The source of a configuration, which a reload reads again.

use std::{net::SocketAddr, path::PathBuf};

use super::{
    Config, ConfigErrors, ConfigProblem, PlatformKind, SourceLocation, TlsConfig, file,
    machine::{MachineDefaults, default_state_dir},
};

/// A file or the embedded demonstration, with the command line's overrides.
///
/// The overrides hold after a reload too.
#[derive(Clone, Debug, Default)]
pub struct ConfigSource {
    /// `None` means the demonstration.
    pub file: Option<PathBuf>,
    pub api: Option<SocketAddr>,
    pub admin: Option<SocketAddr>,
    /// Overrides the file's `platform`.
    pub platform: Option<PlatformKind>,
}

impl ConfigSource {
    /// Reads and checks the source.
    ///
    /// The demonstration keeps its state beside that of a configured gateway, in `demonstration`.
    pub fn load(&self) -> Result<Config, ConfigErrors> {
        let mut config = match &self.file {
            Some(path) => file::load_with(&self.machine(), path)?,
            None => demonstration()?,
        };
        config.api = self.api.unwrap_or(config.api);
        if let Some(admin) = self.admin {
            if config.admin.token.is_none() && !admin.ip().is_loopback() {
                let text = format!("{admin} is not loopback: set admin.token, or listen on loopback");
                return Err(ConfigErrors::new(
                    "--admin",
                    vec![ConfigProblem::new(SourceLocation::default(), text)],
                ));
            }
            config.admin.address = admin;
        }
        if let Some(text) = file::port_conflict(config.api, config.admin.address) {
            return Err(ConfigErrors::new(
                "--api, --admin",
                vec![ConfigProblem::new(SourceLocation::default(), text)],
            ));
        }
        Ok(config)
    }

    /// Reads the source for a gateway that runs with `now`.
    ///
    /// The file may be half written, and half a file must not open the API. So a file that is empty, or has lost its
    /// keys, is refused unless it states that this is intended.
    pub fn reload(&self, now: &Config) -> Result<Config, ConfigErrors> {
        let new = self.load()?;
        let lost = if new.blank && !now.blank {
            "the file is empty, which would remove every model and key: restore the file; to remove all models, write models: []"
        } else if new.keys.is_empty() && !new.keys_none && !now.keys.is_empty() {
            "the file no longer has keys, which would let anyone use the API: restore keys, or set keys: none if that is intended"
        } else {
            return Ok(new);
        };
        Err(ConfigErrors::new(&new.origin, vec![ConfigProblem::new(SourceLocation::default(), lost)]))
    }

    /// Returns the certificates that the file names, present or not; `None` if the file cannot be parsed.
    pub(crate) fn certificates(&self) -> Option<TlsConfig> {
        let text = std::fs::read_to_string(self.file.as_ref()?).ok()?;
        file::parse_with(&self.machine(), &text, "").ok()?.tls
    }

    fn machine(&self) -> MachineDefaults {
        MachineDefaults { platform: self.platform, ..MachineDefaults::detect() }
    }
}

fn demonstration() -> Result<Config, ConfigErrors> {
    let exe = std::env::current_exe().map_err(|error| {
        let text = format!("cannot find the path of this program: {error}");
        ConfigErrors::new("the demonstration", vec![ConfigProblem::new(SourceLocation::default(), text)])
    })?;
    let state = default_state_dir(|name| std::env::var(name).ok()).join("demonstration");
    super::demo(&state, &exe)
}
