//! `key`: creates a key for a client, and its line for the configuration.

use std::{
    io::{Read as _, Write as _},
    process::ExitCode,
};

use anyhow::{Context as _, ensure};
use aws_lc_rs::rand;

use crate::keys;

/// Random bytes of a key. They match the hash's size, so guessing is hopeless even without a slow hash.
const KEY_BYTES: usize = 32;
/// Prefix by which people and secret scanners recognise a key.
const KEY_PREFIX: &str = "rouse-";

/// Prints key and line. With `existing`, the key comes from standard input.
pub(super) fn run(name: &str, existing: bool, json: bool) -> anyhow::Result<ExitCode> {
    let key = if existing { read_key()? } else { generate_key()? };
    let mut out = std::io::stdout().lock();
    if json {
        let shown = (!existing).then_some(&key);
        let hash = hex(&keys::sha256(key.as_bytes()));
        writeln!(out, "{}", serde_json::json!({"name": name, "key": shown, "sha256": hash}))?;
        return Ok(ExitCode::SUCCESS);
    }
    if !existing {
        writeln!(out, "key            {key}")?;
    }
    writeln!(out, "configuration  {}", config_line(name, &key))?;
    if !existing {
        eprintln!(
            "The key is not shown again: give it to the client, and add the configuration line under 'keys:'."
        );
    }
    Ok(ExitCode::SUCCESS)
}

fn generate_key() -> anyhow::Result<String> {
    let mut bytes = [0; KEY_BYTES];
    rand::fill(&mut bytes)
        .map_err(|_| anyhow::anyhow!("cannot generate a key: the system returned no random bytes"))?;
    Ok(format!("{KEY_PREFIX}{}", hex(&bytes)))
}

/// Reads a key without its line end, which clients never send.
fn read_key() -> anyhow::Result<String> {
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).context("cannot read the key from standard input")?;
    let key = text.trim();
    ensure!(!key.is_empty(), "standard input is empty: pipe the key into it");
    ensure!(
        key.bytes().all(|byte| byte.is_ascii_graphic()),
        "the key contains a space or a character outside visible ASCII: use visible ASCII without spaces"
    );
    Ok(key.to_owned())
}

fn config_line(name: &str, key: &str) -> String {
    // A JSON string is valid YAML.
    let name = serde_json::Value::from(name);
    format!("- {{name: {name}, sha256: \"{}\"}}", hex(&keys::sha256(key.as_bytes())))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_is_a_configuration_that_knows_the_key() {
        let key = generate_key().unwrap();
        assert_eq!(key.len(), KEY_PREFIX.len() + 2 * KEY_BYTES);
        assert_ne!(key, generate_key().unwrap());
        let text = format!("keys:\n  {}\n", config_line("team \"a\"", &key));
        let config = rouse_config::parse(&text, "test").unwrap();
        assert_eq!(config.keys[0].name.as_ref(), "team \"a\"");
        assert_eq!(config.keys[0].hash, keys::sha256(key.as_bytes()));
        assert!(!text.contains(&key));
    }
}
