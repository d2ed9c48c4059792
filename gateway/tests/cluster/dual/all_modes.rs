//! Promises that hold in every mode.

use futures_util::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use serde_json::Value;

use super::{DualPodsFixture, LARGE, SMALL, TestedMemory};
use crate::launched::{engines, generations};

/// Where a fixture's engines run, and whether they sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TestedProviderKind {
    /// A Pod of the engine's own, in mode sleep.
    Pod,
    /// A Pod of the engine's own, in mode plain.
    Plain,
    Launcher,
}

/// All kinds of providers.
const ALL: [TestedProviderKind; 3] =
    [TestedProviderKind::Pod, TestedProviderKind::Plain, TestedProviderKind::Launcher];

/// Runs the story with engines that sleep, in Pods of their own and in launchers.
pub(super) async fn for_sleeping_kinds<F: Future<Output = ()>>(
    name: &str,
    gpus: u32,
    dual: &str,
    story: impl Fn(DualPodsFixture) -> F,
) {
    each(&[TestedProviderKind::Pod, TestedProviderKind::Launcher], LARGE, name, gpus, dual, story).await;
}

/// Runs the story with each kind of provider.
pub(super) async fn for_all_kinds<F: Future<Output = ()>>(
    name: &str,
    gpus: u32,
    dual: &str,
    story: impl Fn(DualPodsFixture) -> F,
) {
    each(&ALL, LARGE, name, gpus, dual, story).await;
}

/// Runs the story with each kind of provider and small engines, on one accelerator.
pub(super) async fn for_all_kinds_small<F: Future<Output = ()>>(
    name: &str,
    dual: &str,
    story: impl Fn(DualPodsFixture) -> F,
) {
    each(&ALL, SMALL, name, 1, dual, story).await;
}

async fn each<F: Future<Output = ()>>(
    homes: &[TestedProviderKind],
    memory: TestedMemory,
    name: &str,
    gpus: u32,
    dual: &str,
    story: impl Fn(DualPodsFixture) -> F,
) {
    let tell = async |home: TestedProviderKind| {
        let dual = format!("{dual}{}", home.mode());
        let duo = Box::pin(DualPodsFixture::sized(memory, &home.named(name), gpus, &dual)).await;
        Box::pin(story(Box::pin(duo.at(home)).await)).await;
    };
    join_all(homes.iter().map(|home| Box::pin(tell(*home)))).await;
}

impl TestedProviderKind {
    /// The configuration of the gateway for this kind.
    pub(super) const fn mode(self) -> &'static str {
        match self {
            Self::Plain => ", mode: plain",
            Self::Pod | Self::Launcher => "",
        }
    }

    pub(super) fn named(self, name: &str) -> String {
        match self {
            Self::Pod => name.to_owned(),
            Self::Plain => format!("{name}-plain"),
            Self::Launcher => format!("{name}-inside"),
        }
    }
}

/// The engines of a provider with their generations: the same Pod may have other engines later.
pub(super) fn engines_of(provider: &Pod) -> (Option<String>, Vec<Value>) {
    (provider.uid(), generations(provider))
}

/// Whether no provider has an engine left.
pub(super) fn is_empty(_: &[Pod], providers: &[Pod]) -> bool {
    let launcher =
        |own: &Pod| own.labels().get("app.kubernetes.io/component").is_some_and(|c| c == "launcher");
    providers.iter().all(|own| launcher(own) && engines(own).is_empty())
}

impl DualPodsFixture {
    /// Switches the fixture to this kind. Its gateway must already have the mode of `home`.
    pub(super) async fn at(mut self, home: TestedProviderKind) -> Self {
        self.provider_kind = home;
        if home == TestedProviderKind::Launcher { self.in_launchers("").await } else { self }
    }

    /// Creates a requester with this name, for an engine with these flags.
    pub(super) async fn demand(&self, name: &str, flags: &str) {
        match self.provider_kind {
            TestedProviderKind::Pod | TestedProviderKind::Plain => self.ask(name, 1, 1, flags).await,
            TestedProviderKind::Launcher => {
                self.config(name, flags).await;
                self.request(name, 1, 1).await;
            }
        }
    }

    /// Waits until the requesters of this name, and its providers or all launchers, fit.
    pub(super) async fn watch_for(
        &self,
        name: &str,
        what: &str,
        fits: impl Fn(&[Pod], &[Pod]) -> bool,
    ) -> (Vec<Pod>, Vec<Pod>) {
        match self.provider_kind {
            TestedProviderKind::Pod | TestedProviderKind::Plain => self.until_pair(name, what, fits).await,
            TestedProviderKind::Launcher => self.until_launchers(name, what, fits).await,
        }
    }

    /// Waits for the only requester to be ready, and returns it with the only provider.
    pub(super) async fn pair(&self, name: &str) -> (Pod, Pod) {
        match self.provider_kind {
            TestedProviderKind::Pod | TestedProviderKind::Plain => self.until_served(name).await,
            TestedProviderKind::Launcher => self.until_launched(name).await,
        }
    }

    /// Waits for no requester and one sleeping engine, and returns its Pod.
    pub(super) async fn alone(&self, name: &str) -> Pod {
        match self.provider_kind {
            TestedProviderKind::Pod => self.until_asleep(name).await,
            TestedProviderKind::Launcher => self.until_unbound(name, 1).await,
            TestedProviderKind::Plain => panic!("in mode plain no engine sleeps"),
        }
    }
}
