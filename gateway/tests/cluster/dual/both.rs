//! What is promised of engines in Pods of their own, and of those in launchers alike.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use serde_json::Value;

use super::Duo;
use crate::launched::{engines, lives};

/// Where engines are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Home {
    Pod,
    Launcher,
}

/// The same of both.
pub(super) async fn both<F: Future<Output = ()>>(
    name: &str,
    gpus: u32,
    dual: &str,
    story: impl Fn(Duo) -> F,
) {
    let tell = async |home: Home| {
        let duo = Box::pin(Duo::new(&home.named(name), gpus, "8Gi", dual)).await;
        Box::pin(story(Box::pin(duo.at(home)).await)).await;
    };
    tokio::join!(Box::pin(tell(Home::Pod)), Box::pin(tell(Home::Launcher)));
}

impl Home {
    pub(super) fn named(self, name: &str) -> String {
        match self {
            Self::Pod => name.to_owned(),
            Self::Launcher => format!("{name}-inside"),
        }
    }
}

/// Which engines there are, of which lives: the same Pod may have others by now.
pub(super) fn engines_of(provider: &Pod) -> (Option<String>, Vec<Value>) {
    (provider.uid(), lives(provider))
}

/// No engine is left, in whatever.
pub(super) fn is_empty(_: &[Pod], providers: &[Pod]) -> bool {
    let launcher =
        |own: &Pod| own.labels().get("app.kubernetes.io/component").is_some_and(|c| c == "launcher");
    providers.iter().all(|own| launcher(own) && engines(own).is_empty())
}

impl Duo {
    pub(super) async fn at(self, home: Home) -> Self {
        match home {
            Home::Pod => self,
            Home::Launcher => self.in_launchers("").await,
        }
    }

    /// A requester of this name, for an engine with these flags.
    pub(super) async fn demand(&self, name: &str, flags: &str) {
        match self.home {
            Home::Pod => self.ask(name, 1, 1, flags).await,
            Home::Launcher => {
                self.config(name, flags).await;
                self.request(name, 1, 1).await;
            }
        }
    }

    /// Waits until these Pods are so: the requesters of this name, and its providers or all launchers.
    pub(super) async fn watch_for(
        &self,
        name: &str,
        what: &str,
        fits: impl Fn(&[Pod], &[Pod]) -> bool,
    ) -> (Vec<Pod>, Vec<Pod>) {
        match self.home {
            Home::Pod => self.paired(name, what, fits).await,
            Home::Launcher => self.see(name, what, fits).await,
        }
    }

    /// The one requester, which is ready, and the one provider.
    pub(super) async fn pair(&self, name: &str) -> (Pod, Pod) {
        match self.home {
            Home::Pod => self.served(name).await,
            Home::Launcher => self.launched(name).await,
        }
    }

    /// No requester, and the one engine asleep.
    pub(super) async fn alone(&self, name: &str) -> Pod {
        match self.home {
            Home::Pod => self.asleep(name).await,
            Home::Launcher => self.put_away(name, 1).await,
        }
    }
}
