//! Reloads the configuration after a change of the file, or SIGHUP: all of it or nothing.

use std::{path::PathBuf, sync::Arc};

use arc_swap::ArcSwap;
use rouse::fleet::event::Event;
use rouse_config::{Config, ConfigDiff, LocalSaturation};
use rouse_platform::Platform;
use tokio::sync::watch;

use super::{ConfigSource, PlatformRuntime};
use crate::{
    driver::DriverHandle,
    metrics::{Metrics, OutcomeLabel},
};

/// Number of replaced engine entries to keep. Engines of older entries are gone.
const MAX_FORMER_ENGINES: usize = 64;

pub(super) struct ConfigReloader {
    pub(super) source: ConfigSource,
    /// The source's last accepted content, without what the cluster's objects add.
    pub(super) base: Config,
    pub(super) config: Arc<ArcSwap<Config>>,
    pub(super) handle: DriverHandle,
    /// What scales models on one machine follows this.
    pub(super) saturation: watch::Sender<LocalSaturation>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) platform: Arc<dyn Platform>,
    /// How often [`Self::check_certificates`] ran.
    pub(super) certificate_checks: u32,
    /// Whether the last reload was refused.
    pub(super) last_reload_refused: bool,
}

/// Number of hourly checks per warning about certificates that expire: one warning a day.
const CHECKS_PER_EXPIRY_WARNING: u32 = 24;

impl ConfigReloader {
    /// Reads the source again.
    ///
    /// An invalid source is refused as a whole, and the log lists all its errors; the old configuration stays.
    pub(super) fn reload(&mut self, runtime: &mut PlatformRuntime) {
        let new = match self.source.reload(&self.base) {
            Ok(new) => new,
            Err(errors) => {
                self.metrics.reloaded(OutcomeLabel::Failed);
                self.last_reload_refused = true;
                tracing::error!("configuration reload failed, keeping the old configuration\n{errors}");
                return;
            }
        };
        let mended = std::mem::take(&mut self.last_reload_refused);
        let old = self.config.load_full();
        let (base, _) = merged(&self.base, new.clone());
        let new = runtime.compose(&base).unwrap_or(new);
        self.base = base;
        let (new, diff) = merged(&old, new);
        if diff.is_empty() {
            let mended = if mended { "; the file is valid again" } else { "" };
            tracing::info!("configuration reloaded: nothing changed{mended}");
            return;
        }
        self.replace(new, &diff);
        self.metrics.reloaded(OutcomeLabel::Done);
        // This line comes last, so that its readers can rely on the new configuration.
        tracing::info!("configuration reloaded: {diff}");
    }

    /// Applies a changed meaning of the cluster's objects.
    pub(super) fn apply_objects(&mut self, runtime: &mut PlatformRuntime) {
        let Some(new) = runtime.compose(&self.base) else { return };
        let old = self.config.load_full();
        let pools = new.core.accelerators != old.core.accelerators;
        // Pools come and go at run time, so their accelerators are no change that needs a restart.
        let mut with_pools = Config::clone(&old);
        with_pools.core.accelerators.clone_from(&new.core.accelerators);
        let (new, diff) = merged(&with_pools, new);
        if diff.is_empty() && !pools {
            return;
        }
        self.replace(new, &diff);
        if diff.is_empty() {
            // Every node that joins or leaves changes the total of its pool.
            tracing::debug!("cluster pools changed");
        } else {
            tracing::info!(pools, "cluster objects changed: {diff}");
        }
    }

    fn replace(&mut self, new: Config, diff: &ConfigDiff) {
        if diff.settings.contains(&"tls") {
            for warning in
                rouse_config::check(&new).warnings.iter().filter(|problem| problem.text.starts_with("tls."))
            {
                tracing::warn!("{}", warning.display(&new.origin));
            }
        }
        if let Some(text) = super::restart_needed(diff) {
            tracing::warn!("{text}");
        }
        let new = Arc::new(new);
        self.config.store(Arc::clone(&new));
        self.metrics.set_certificate_expiry(new.tls.as_ref().and_then(rouse_config::TlsConfig::expires));
        self.platform.reconfigure(Arc::clone(&new));
        self.handle.send_event(Event::Configured { configuration: Box::new(new.core.clone()) });
        // Behind the event: targets are for models that the fleet knows. A changed number of replicas counts at once, too.
        self.saturation.send_replace(new.saturation.clone());
    }

    /// Returns the certificates' files to watch: those in use, and those that the source names now.
    ///
    /// A file that the source names may appear after the configuration, which is refused until then.
    pub(super) fn certificates(&self) -> Vec<PathBuf> {
        let config = self.config.load();
        let named = config.tls.as_ref().and_then(|_| self.source.certificates());
        let mut files: Vec<_> =
            config.tls.iter().chain(&named).flat_map(rouse_config::TlsConfig::files).cloned().collect();
        files.sort_unstable();
        files.dedup();
        files
    }

    /// Checks hourly what no event reports: certificates that changed behind a link, or that expire soon.
    pub(super) fn check_certificates(&mut self, runtime: &mut PlatformRuntime) {
        let config = self.config.load_full();
        let Some(tls) = &config.tls else { return };
        if !tls.is_unchanged_on_disk() {
            self.reload(runtime);
        }
        self.certificate_checks += 1;
        let tls = self.config.load_full();
        if self.certificate_checks.is_multiple_of(CHECKS_PER_EXPIRY_WARNING)
            && let Some(doubt) = tls.tls.as_ref().and_then(rouse_config::TlsConfig::validity_warning)
        {
            tracing::warn!("{}", doubt.display(&tls.origin));
        }
    }
}

/// Merges a new configuration into the old one, which keeps all settings that need a restart.
///
/// The diff includes those settings, since the operator must learn that they wait for the next start.
fn merged(old: &Config, mut new: Config) -> (Config, ConfigDiff) {
    // The reservations follow from the accelerators, which stay, as the old ones did.
    new.reserve_memory_utilization(&old.core.accelerators, old.headroom);
    let diff = rouse_config::diff(old, &new);
    new.core.accelerators.clone_from(&old.core.accelerators);
    new.accelerators_auto = old.accelerators_auto;
    new.meters.clone_from(&old.meters);
    new.visible.clone_from(&old.visible);
    // A port cannot switch between HTTP and HTTPS under its clients.
    if new.tls.is_some() != old.tls.is_some() {
        new.tls.clone_from(&old.tls);
    }
    (new.api, new.admin.address) = (old.api, old.admin.address);
    new.admin.tls = old.admin.tls;
    new.state.clone_from(&old.state);
    let replaced = diff.outdated.iter().filter_map(|name| old.engines.get(name));
    new.former_engines = old.former_engines.iter().chain(replaced).cloned().collect();
    let excess = new.former_engines.len().saturating_sub(MAX_FORMER_ENGINES);
    new.former_engines.drain(..excess);
    (new.headroom, new.log_cap) = (old.headroom, old.log_cap);
    new.access_log.clone_from(&old.access_log);
    new.telemetry.clone_from(&old.telemetry);
    new.kubernetes.clone_from(&old.kubernetes);
    (new, diff)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_waits_for_the_next_start_is_said_and_stays_as_it_was() {
        let read = |text: &str| rouse_config::parse(text, "test").unwrap();
        let old = read("accelerators: [{id: a, memory: 8Gi}]\nqueue: {maxWaiting: 1}");
        let changed = "accelerators: [{id: b, memory: 9Gi}]\nheadroom: 2Gi\nstate: /elsewhere\n\
            listen: {api: 127.0.0.1:1}\nlogs: {perEngine: 1Mi}\ntelemetry: {sample: 0.5}\nqueue: {maxWaiting: 2}";
        let (new, diff) = merged(&old, read(changed));
        assert_eq!(diff.settings, ["queue"]);
        assert_eq!(diff.needs_restart, ["listen", "accelerators", "headroom", "state", "logs", "telemetry"]);
        assert_eq!(rouse_config::diff(&old, &new).needs_restart, [""; 0]);
        assert_eq!(new.core.settings.queue.max_waiting, 2);
        assert!(merged(&old, old.clone()).1.is_empty());
    }

    #[test]
    fn changes_of_the_cluster_wait_for_the_next_start_and_every_reload_says_so() {
        let read = |image: &str| {
            let text = format!("platform: kubernetes\nkubernetes: {{stubImage: {image}}}");
            rouse_config::parse(&text, "test").unwrap()
        };
        let (mut now, new) = (read("stub:1"), read("stub:2"));
        for _ in 0..2 {
            let (merged, diff) = merged(&now, new.clone());
            assert_eq!(diff.needs_restart, ["kubernetes"]);
            assert_eq!(merged.kubernetes, now.kubernetes);
            now = merged;
        }
    }

    #[test]
    fn an_engine_is_spoken_to_by_the_entry_that_it_was_started_with() {
        let read = |served: &str, key: &str| {
            let text = format!(
                "accelerators: [{{id: a, memory: 8Gi}}]\nmodels:\n  - name: m\n    memory: {{awake: 1Gi}}\n    engine: \
                 {{kind: custom, command: [e, '${{PORT}}'], servedName: {served}, apiKey: {key}}}"
            );
            rouse_config::parse(&text, "test").unwrap()
        };
        let model = "m".into();
        let first = read("one", "k1");
        let started = first.engines[&model].fingerprint;
        let mut now = merged(&first, read("two", "k2")).0;
        let spoken = |now: &Config, started| {
            let spec = now.engine_started_with(&model, started).unwrap();
            (spec.served_name.clone(), spec.api_key.clone().unwrap())
        };
        assert_eq!(spoken(&now, started), ("one".into(), "k1".into()));
        assert_eq!(spoken(&now, now.engines[&model].fingerprint), ("two".into(), "k2".into()));
        now = merged(&now, read("two", "k3")).0;
        assert_eq!(spoken(&now, started), ("one".into(), "k1".into()));
        assert_eq!(spoken(&now, now.engines[&model].fingerprint), ("two".into(), "k3".into()));
        assert_eq!(spoken(&now, 7), ("two".into(), "k3".into()));
    }
}
