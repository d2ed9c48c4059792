//! Two gateways, of which one leads: it is replaced in order, or stopped and forgotten, in the midst of what it does.

use nix::sys::signal::Signal;

use super::{
    Duo,
    both::{Home, engines_of},
};
use crate::pairs::{address, ask};

impl Duo {
    /// As a Deployment replaces the leader: it ends in order, the other one leads, and a new one comes.
    async fn roll(&mut self, name: &str) {
        self.gateway.signal(Signal::SIGTERM);
        let next = self.second.take().unwrap();
        std::mem::replace(&mut self.gateway, next).ended().await;
        self.second = Some(self.world.gateway_with(name, &self.more));
    }

    /// With two gateways.
    async fn doubled(name: &str, home: Home) -> Self {
        Box::pin(Box::pin(Self::dying(&home.named(name), u32::MAX, home)).await.at(home)).await
    }
}

async fn rolled(home: Home) {
    let mut duo = Duo::doubled("dual-rolled", home).await;
    duo.demand("one", "").await;
    duo.roll("gateway-2").await;
    let (requester, provider) = duo.pair("one").await;
    assert!(ask(address(&requester), "one").await.is_whole_stream());
    duo.scale("one", 0).await;
    duo.roll("gateway-3").await;
    assert_eq!(engines_of(&duo.alone("one").await), engines_of(&provider));
    duo.scale("one", 1).await;
    duo.roll("gateway-4").await;
    let (requester, woken) = duo.pair("one").await;
    assert_eq!(engines_of(&woken), engines_of(&provider));
    assert!(ask(address(&requester), "one").await.is_whole_stream());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rolling_update_in_the_midst_of_a_start_a_sleep_and_a_wake_loses_and_doubles_nothing() {
    tokio::join!(Box::pin(rolled(Home::Pod)), Box::pin(rolled(Home::Launcher)));
}

/// By turns each of two leaders is stopped in the midst of its orders, and goes on once the other one has carried them out.
async fn paused(home: Home) {
    let mut duo = Duo::doubled("dual-paused", home).await;
    duo.demand("one", "").await;
    let (_, provider) = duo.pair("one").await;
    let mut other = duo.second.take().unwrap();
    duo.scale("one", 0).await;
    duo.gateway.signal(Signal::SIGSTOP);
    assert_eq!(engines_of(&duo.alone("one").await), engines_of(&provider));
    duo.gateway.signal(Signal::SIGCONT);
    duo.scale("one", 1).await;
    other.signal(Signal::SIGSTOP);
    let (requester, woken) = duo.pair("one").await;
    assert_eq!(engines_of(&woken), engines_of(&provider));
    other.signal(Signal::SIGCONT);
    assert!(ask(address(&requester), "one").await.is_whole_stream());
    let (still, same) = duo.pair("one").await;
    assert_eq!((still, engines_of(&same)), (requester, engines_of(&provider)));
    assert!(!duo.gateway.has_ended() && !other.has_ended());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ex_leader_that_wakes_from_a_pause_does_nothing() {
    tokio::join!(Box::pin(paused(Home::Pod)), Box::pin(paused(Home::Launcher)));
}
