//! Two gateways, of which one leads: it is replaced in order, or paused and forgotten, in the midst of its work.

use futures_util::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use nix::sys::signal::Signal;

use super::{
    DualPodsFixture,
    all_modes::{TestedProviderKind, engines_of},
};
use crate::pairs::{address, chat_with_requester};

impl DualPodsFixture {
    /// Replaces the leader as a Deployment does: it ends in order, the other gateway leads, and a new one starts.
    async fn roll(&mut self, name: &str) {
        self.gateway.signal(Signal::SIGTERM);
        let next = self.second.take().unwrap();
        std::mem::replace(&mut self.gateway, next).wait_owned().await;
        self.second = Some(self.world.gateway_with(name, &self.more));
    }

    /// Waits until the requester has ended, and its engine has ended in mode plain or sleeps otherwise.
    async fn parted(&self, provider: &Pod) {
        if self.provider_kind == TestedProviderKind::Plain {
            let nobody =
                |requesters: &[Pod], providers: &[Pod]| requesters.is_empty() && providers.is_empty();
            self.watch_for("one", "no Pod", nobody).await;
        } else {
            assert_eq!(engines_of(&self.alone("one").await), engines_of(provider));
        }
    }

    /// A fixture with two gateways.
    async fn doubled(name: &str, home: TestedProviderKind) -> Self {
        Box::pin(Box::pin(Self::dying(&home.named(name), u32::MAX, None, home)).await.at(home)).await
    }
}

async fn rolled(home: TestedProviderKind) {
    let mut duo = DualPodsFixture::doubled("dual-rolled", home).await;
    duo.demand("one", "").await;
    duo.roll("gateway-2").await;
    let (requester, provider) = duo.pair("one").await;
    assert!(chat_with_requester(address(&requester), "one").await.is_whole_stream());
    duo.scale("one", 0).await;
    duo.roll("gateway-3").await;
    duo.parted(&provider).await;
    duo.scale("one", 1).await;
    duo.roll("gateway-4").await;
    let (requester, next) = duo.pair("one").await;
    assert_eq!(engines_of(&next) == engines_of(&provider), home != TestedProviderKind::Plain);
    assert!(chat_with_requester(address(&requester), "one").await.is_whole_stream());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rolling_update_in_the_midst_of_a_start_a_sleep_and_a_wake_loses_and_doubles_nothing() {
    let all = [TestedProviderKind::Pod, TestedProviderKind::Plain, TestedProviderKind::Launcher]
        .map(|home| Box::pin(rolled(home)));
    join_all(all).await;
}

/// Pauses each of two leaders in turn in the midst of its orders, and resumes it once the other leader has carried them
/// out.
async fn paused(home: TestedProviderKind) {
    let mut duo = DualPodsFixture::doubled("dual-paused", home).await;
    duo.demand("one", "").await;
    let (_, provider) = duo.pair("one").await;
    let mut other = duo.second.take().unwrap();
    duo.scale("one", 0).await;
    duo.gateway.signal(Signal::SIGSTOP);
    duo.parted(&provider).await;
    duo.gateway.signal(Signal::SIGCONT);
    duo.scale("one", 1).await;
    other.signal(Signal::SIGSTOP);
    duo.pair("one").await;
    // The leader writes the finalizer last, and the engine may serve before that.
    let written = |requesters: &[Pod], _: &[Pod]| requesters.iter().all(|own| !own.finalizers().is_empty());
    duo.watch_for("one", "a requester with its finalizer", written).await;
    let (requester, next) = duo.pair("one").await;
    assert_eq!(engines_of(&next) == engines_of(&provider), home != TestedProviderKind::Plain);
    other.signal(Signal::SIGCONT);
    assert!(chat_with_requester(address(&requester), "one").await.is_whole_stream());
    let (still, same) = duo.pair("one").await;
    assert_eq!((still, engines_of(&same)), (requester, engines_of(&next)));
    assert!(!duo.gateway.has_ended() && !other.has_ended());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ex_leader_that_wakes_from_a_pause_does_nothing() {
    let all = [TestedProviderKind::Pod, TestedProviderKind::Plain, TestedProviderKind::Launcher]
        .map(|home| Box::pin(paused(home)));
    join_all(all).await;
}
