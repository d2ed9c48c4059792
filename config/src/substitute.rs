//! Substitutes `${…}`: `${env:NAME}` at load time, an engine command's placeholders at launch.
//!
//! There are two steps because an engine's port and memory are known only at its launch, while a secret must be known,
//! or its absence reported, before anything is opened. `$${` is a literal `${`, for commands that are shell scripts.
//! The value of an environment variable is never substituted again, so a secret may contain anything.

use std::{collections::BTreeMap, net::IpAddr};

use rouse::units::Bytes;

use super::{EngineConfig, reader::EnvLookup};

const PLACEHOLDERS: [&str; 4] = ["PORT", "HOST", "MEMORY_FRACTION", "KV_CACHE_BYTES"];

/// Values of the placeholders at the launch.
struct LaunchValues {
    port: u16,
    host: IpAddr,
    fraction: f64,
    kv_cache: Bytes,
}

/// The part of the file that contains a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SubstitutionScope {
    /// An engine's `command` or `env`.
    Command,
    Other,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Error {
    #[error("the environment variable {0} is not set")]
    Unset(String),
    #[error("${{{0}}} is available only in an engine's command and env")]
    OnlyInCommands(String),
    #[error(
        "${{{0}}} is unknown: use ${{env:{0}}} for the gateway's environment variable, or $${{{0}}} to pass it on \
         unchanged"
    )]
    Unknown(String),
    #[error("'${{' without a closing '}}'")]
    Unclosed,
}

impl EngineConfig {
    /// Returns program and arguments as executed.
    ///
    /// `fraction` is the share of an accelerator's total memory, `kv_bytes` the KV cache on one accelerator.
    #[must_use]
    pub fn command_line(&self, port: u16, host: IpAddr, fraction: f64, kv_bytes: Bytes) -> Vec<String> {
        let values = LaunchValues { port, host, fraction, kv_cache: kv_bytes };
        self.command.iter().map(|text| fill(text, &values)).collect()
    }

    /// Returns the engine's variables from `env`, besides those that it inherits.
    #[must_use]
    pub fn environment(
        &self,
        port: u16,
        host: IpAddr,
        fraction: f64,
        kv_bytes: Bytes,
    ) -> BTreeMap<String, String> {
        let values = LaunchValues { port, host, fraction, kv_cache: kv_bytes };
        self.env.iter().map(|(name, text)| (name.clone(), fill(text, &values))).collect()
    }

    /// Whether the command or the environment uses `${NAME}`.
    #[must_use]
    pub fn uses(&self, placeholder: &str) -> bool {
        self.command.iter().chain(self.env.values()).any(|text| {
            pieces(text)
                .iter()
                .any(|piece| matches!(piece, TemplatePiece::Name(name) if *name == placeholder))
        })
    }
}

/// Fills in `${env:NAME}`. In a command, the placeholders and `$${` stay for [`fill`].
pub(super) fn substitute_env(
    text: &str,
    scope: SubstitutionScope,
    environment: EnvLookup,
) -> Result<String, Vec<Error>> {
    let mut out = String::with_capacity(text.len());
    let mut errors = Vec::new();
    for piece in pieces(text) {
        match (piece, scope) {
            (TemplatePiece::Text(text), _) => out.push_str(text),
            (TemplatePiece::Escape, SubstitutionScope::Other) => out.push_str("${"),
            (TemplatePiece::Escape, SubstitutionScope::Command) => out.push_str("$${"),
            (TemplatePiece::Unclosed, _) => errors.push(Error::Unclosed),
            (TemplatePiece::Name(name), scope) => {
                let known = PLACEHOLDERS.contains(&name);
                if let Some(variable) = name.strip_prefix("env:") {
                    match (environment(variable), scope) {
                        (Some(value), SubstitutionScope::Other) => out.push_str(&value),
                        (Some(value), SubstitutionScope::Command) => {
                            out.push_str(&value.replace("${", "$${"))
                        }
                        (None, _) => errors.push(Error::Unset(variable.to_owned())),
                    }
                } else if known && scope == SubstitutionScope::Command {
                    out.push_str("${");
                    out.push_str(name);
                    out.push('}');
                } else if known {
                    errors.push(Error::OnlyInCommands(name.to_owned()));
                } else {
                    errors.push(Error::Unknown(name.to_owned()));
                }
            }
        }
    }
    if errors.is_empty() { Ok(out) } else { Err(errors) }
}

fn fill(text: &str, values: &LaunchValues) -> String {
    let mut out = String::with_capacity(text.len());
    for piece in pieces(text) {
        match piece {
            TemplatePiece::Text(text) => out.push_str(text),
            TemplatePiece::Escape | TemplatePiece::Unclosed => out.push_str("${"),
            TemplatePiece::Name("PORT") => out.push_str(&values.port.to_string()),
            TemplatePiece::Name("HOST") => out.push_str(&values.host.to_string()),
            // Rounded down: a share that is slightly too large runs out of memory.
            TemplatePiece::Name("MEMORY_FRACTION") => {
                let fraction = (values.fraction.clamp(0.0, 1.0) * 1e4).floor() / 1e4;
                out.push_str(&fraction.to_string());
            }
            TemplatePiece::Name("KV_CACHE_BYTES") => out.push_str(&values.kv_cache.0.to_string()),
            TemplatePiece::Name(other) => {
                out.push_str("${");
                out.push_str(other);
                out.push('}');
            }
        }
    }
    out
}

#[derive(Debug, PartialEq)]
enum TemplatePiece<'t> {
    Text(&'t str),
    /// The text between `${` and `}`.
    Name(&'t str),
    /// `$${`
    Escape,
    /// A `${` without a closing brace.
    Unclosed,
}

fn pieces(text: &str) -> Vec<TemplatePiece<'_>> {
    let mut pieces = Vec::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("${") {
        if let Some(before) = before.strip_suffix('$') {
            pieces.push(TemplatePiece::Text(before));
            pieces.push(TemplatePiece::Escape);
            rest = after;
            continue;
        }
        pieces.push(TemplatePiece::Text(before));
        match after.split_once('}') {
            Some((name, after)) => {
                pieces.push(TemplatePiece::Name(name));
                rest = after;
            }
            None => {
                pieces.push(TemplatePiece::Unclosed);
                rest = after;
            }
        }
    }
    pieces.push(TemplatePiece::Text(rest));
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lookup(name: &str) -> Option<String> {
        (name == "SECRET").then(|| "a${PORT}b".to_owned())
    }

    #[test]
    fn a_variable_is_filled_in_and_its_value_is_never_looked_at_again() {
        let text = substitute_env("x ${env:SECRET} y", SubstitutionScope::Other, lookup).unwrap();
        assert_eq!(text, "x a${PORT}b y");
        let text = substitute_env("${env:SECRET}", SubstitutionScope::Command, lookup).unwrap();
        assert_eq!(fill(&text, &values()), "a${PORT}b");
    }

    #[test]
    fn every_mistake_of_one_text_is_reported() {
        let errors =
            substitute_env("${env:NO} ${PORT} ${HOME} ${", SubstitutionScope::Other, lookup).unwrap_err();
        let texts: Vec<_> = errors.iter().map(ToString::to_string).collect();
        insta::assert_snapshot!(texts.join("\n"), @r###"
        the environment variable NO is not set
        ${PORT} is available only in an engine's command and env
        ${HOME} is unknown: use ${env:HOME} for the gateway's environment variable, or $${HOME} to pass it on unchanged
        '${' without a closing '}'
        "###);
    }

    #[test]
    fn placeholders_are_filled_in_at_launch_and_an_escaped_one_is_passed_on() {
        let text = substitute_env(
            "--port ${PORT} --host ${HOST} ${MEMORY_FRACTION} ${KV_CACHE_BYTES} $${HOME} $5",
            SubstitutionScope::Command,
            lookup,
        )
        .unwrap();
        assert_eq!(fill(&text, &values()), "--port 4711 --host 127.0.0.1 0.3333 1024 ${HOME} $5");
    }

    fn values() -> LaunchValues {
        LaunchValues {
            port: 4711,
            host: IpAddr::from([127, 0, 0, 1]),
            fraction: 1.0 / 3.0,
            kv_cache: Bytes(1024),
        }
    }
}
