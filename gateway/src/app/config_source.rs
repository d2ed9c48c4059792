//! The source of a configuration, which a reload reads again.

use std::{net::SocketAddr, path::PathBuf};

use rouse_config::{
    Config, ConfigErrors, ConfigProblem, MachineDefaults, PlatformKind, SourceLocation, TlsConfig,
    default_state_dir, load_with, parse_with, port_conflict,
};

use crate::demo;

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
            Some(path) => load_with(&self.machine(), path)?,
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
        if let Some(text) = port_conflict(config.api, config.admin.address) {
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
    /// keys, is refused unless it states that this is intended. A file for the other platform is refused, too: it has no
    /// models for this one.
    pub fn reload(&self, now: &Config) -> Result<Config, ConfigErrors> {
        let new = self.load()?;
        let lost = if new.blank && !now.blank {
            "the file is empty, which would remove every model and key: restore the file; to remove all models, write models: []"
        } else if new.keys.is_empty() && !new.keys_none && !now.keys.is_empty() {
            "the file no longer has keys, which would let anyone use the API: restore keys, or set keys: none if that is intended"
        } else if new.kubernetes.is_some() != now.kubernetes.is_some() {
            "the file has another platform, which a running gateway cannot change: restart the gateway, or restore platform"
        } else {
            return Ok(new);
        };
        Err(ConfigErrors::new(&new.origin, vec![ConfigProblem::new(SourceLocation::default(), lost)]))
    }

    /// Returns the certificates that the file names, present or not; `None` if the file cannot be parsed.
    pub fn certificates(&self) -> Option<TlsConfig> {
        let text = std::fs::read_to_string(self.file.as_ref()?).ok()?;
        parse_with(&self.machine(), &text, "").ok()?.tls
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
    demo::config(&state, &exe)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: &str = "00000000000000000000000000000000000000000000000000000000000000aF";

    fn parse(text: &str) -> Result<Config, ConfigErrors> {
        rouse_config::parse(text, "rouse.yaml")
    }

    #[test]
    fn a_reload_of_half_a_file_is_refused_and_says_what_to_write_if_it_is_meant() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rouse.yaml");
        let source = ConfigSource { file: Some(path.clone()), ..ConfigSource::default() };
        let keys = format!("keys: [{{name: a, sha256: \"{HASH}\"}}]\n");
        let now = parse(&format!("queue: {{maxWait: 1m}}\n{keys}")).unwrap();
        let reload = |now, text: &str| {
            std::fs::write(&path, text).unwrap();
            source.reload(now).map_err(|errors| errors.problems[0].text.clone())
        };
        let gone = "the file no longer has keys, which would let anyone use the API: restore keys, or set keys: none if that is intended";
        assert_eq!(reload(&now, "queue: {maxWait: 1m}\n").unwrap_err(), gone);
        for empty in ["", "# nothing\n", "{}\n"] {
            assert!(reload(&now, empty).unwrap_err().starts_with("the file is empty"), "{empty}");
        }
        for meant in ["keys: none\n", keys.as_str()] {
            assert!(reload(&now, meant).is_ok(), "{meant}");
        }
        let open = parse("queue: {maxWait: 1m}\n").unwrap();
        assert!(reload(&open, "models: []\n").is_ok());
        let empty = parse("").unwrap();
        assert!(reload(&empty, "").is_ok(), "it was empty before");
        let cluster = "platform: kubernetes\nkubernetes: {stubImage: s}\n";
        assert!(reload(&open, cluster).unwrap_err().starts_with("the file has another platform"));
        let of_cluster = parse(cluster).unwrap();
        assert!(reload(&of_cluster, cluster).is_ok());
    }

    #[test]
    fn the_command_line_overrides_the_file_also_at_a_reload_and_cannot_open_the_admin_api() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rouse.yaml");
        std::fs::write(&path, "listen: {api: 127.0.0.1:1}\n").unwrap();
        let mut source = ConfigSource {
            file: Some(path),
            api: Some(([0, 0, 0, 0], 2).into()),
            admin: Some(([127, 0, 0, 1], 3).into()),
            platform: None,
        };
        let config = source.load().unwrap();
        assert_eq!((config.api.port(), config.admin.address.port()), (2, 3));
        source.admin = Some(([127, 0, 0, 1], 2).into());
        insta::assert_snapshot!(source.load().unwrap_err(), @"--api, --admin: listen.api (0.0.0.0:2) and listen.admin (127.0.0.1:2) use the same port: change one of them, like 127.0.0.1:8080 and 127.0.0.1:8180");
        source.admin = Some(([0, 0, 0, 0], 3).into());
        insta::assert_snapshot!(source.load().unwrap_err(), @r###"--admin: 0.0.0.0:3 is not loopback: set admin.token, or listen on loopback"###);
    }
}
