//! Compares configurations to find what a reload changes. Models that are not listed stay untouched.

use std::{collections::BTreeMap, fmt, sync::Arc};

use rouse::model::{ModelName, ModelSpec};

use super::Config;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConfigDiff {
    pub added: Vec<ModelName>,
    pub removed: Vec<ModelName>,
    /// Same engine with another policy, which takes effect at once.
    pub changed: Vec<ModelName>,
    /// Another command, environment or kind, or another size that the command has a placeholder for. Running engines
    /// are outdated, and replaced.
    pub outdated: Vec<ModelName>,
    /// Top-level keys that take effect at once.
    pub settings: Vec<&'static str>,
    /// Top-level keys that keep their old value until the gateway starts again.
    pub needs_restart: Vec<&'static str>,
}

/// Compares two configurations.
#[must_use]
pub fn diff(old: &Config, new: &Config) -> ConfigDiff {
    let mut diff = ConfigDiff::default();
    models(old, new, &mut diff);
    let (was, is) = (&old.core.settings, &new.core.settings);
    let settings = [
        ("host", was.host_memory != is.host_memory),
        ("queue", was.queue != is.queue),
        ("turns", was.turns != is.turns),
        ("eviction", was.eviction != is.eviction),
        ("stream", old.stream != new.stream),
        ("timeouts", was.timeouts != is.timeouts || old.timeouts != new.timeouts),
        ("limits", old.limits != new.limits),
        ("routing", old.affinity != new.affinity),
        ("saturation", old.saturation.settings != new.saturation.settings),
        ("shutdown", old.shutdown != new.shutdown),
        ("keys", old.keys != new.keys || old.keys_none != new.keys_none),
        ("tls", old.tls.is_some() && new.tls.is_some() && old.tls != new.tls),
        ("api", old.cors != new.cors),
        ("listen.proxies", old.proxies != new.proxies),
        ("admin", old.admin.token != new.admin.token || old.admin.metrics_open != new.admin.metrics_open),
    ];
    let restart = [
        ("listen", old.api != new.api || old.admin.address != new.admin.address),
        ("api.threads", old.threads != new.threads),
        ("tls", old.tls.is_some() != new.tls.is_some()),
        ("admin.tls", old.admin.tls != new.admin.tls),
        ("accelerators", accelerators_differ(old, new)),
        ("headroom", old.headroom != new.headroom),
        ("state", old.state != new.state),
        ("logs", old.log_cap != new.log_cap || old.access_log != new.access_log),
        ("telemetry", old.telemetry != new.telemetry),
        ("kubernetes", old.kubernetes != new.kubernetes),
    ];
    diff.settings = changed_keys(&settings);
    diff.needs_restart = changed_keys(&restart);
    diff
}

impl ConfigDiff {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// One line for the log: `added a, b; changed c; settings queue, turns`.
impl fmt::Display for ConfigDiff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names =
            |names: &[ModelName]| names.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let parts = [
            ("added", names(&self.added)),
            ("removed", names(&self.removed)),
            ("changed", names(&self.changed)),
            ("engine changed", names(&self.outdated)),
            ("settings", self.settings.join(", ")),
            ("restart needed for", self.needs_restart.join(", ")),
        ];
        let mut written = parts.iter().filter(|(_, list)| !list.is_empty());
        let Some((what, list)) = written.next() else {
            return f.write_str("nothing changed");
        };
        write!(f, "{what} {list}")?;
        written.try_for_each(|(what, list)| write!(f, "; {what} {list}"))
    }
}

fn models(old: &Config, new: &Config, diff: &mut ConfigDiff) {
    let (before, after) = (by_name(old), by_name(new));
    diff.removed = before.keys().filter(|name| !after.contains_key(*name)).copied().cloned().collect();
    for (name, spec) in &after {
        match before.get(name) {
            None => diff.added.push((*name).clone()),
            Some(was) if was.fingerprint != spec.fingerprint => diff.outdated.push((*name).clone()),
            Some(was)
                if was != spec
                    || engine_config_differs(name, old, new)
                    || old.saturation.models.get(*name) != new.saturation.models.get(*name) =>
            {
                diff.changed.push((*name).clone());
            }
            Some(_) => {}
        }
    }
}

fn by_name(config: &Config) -> BTreeMap<&ModelName, &ModelSpec> {
    config.core.models.iter().map(|spec| (&spec.name, spec)).collect()
}

fn engine_config_differs(name: &ModelName, old: &Config, new: &Config) -> bool {
    match (old.engines.get(name), new.engines.get(name)) {
        (Some(old), Some(new)) => !Arc::ptr_eq(old, new) && old != new,
        (old, new) => old != new,
    }
}

/// With `auto` on both sides, the machine filled in the list, not the file.
fn accelerators_differ(old: &Config, new: &Config) -> bool {
    if old.accelerators_auto && new.accelerators_auto {
        return false;
    }
    old.accelerators_auto != new.accelerators_auto
        || old.meters != new.meters
        || old.visible != new.visible
        || old.core.accelerators != new.core.accelerators
}

fn changed_keys(keys: &[(&'static str, bool)]) -> Vec<&'static str> {
    keys.iter().filter(|(_, changed)| *changed).map(|(key, _)| *key).collect()
}
