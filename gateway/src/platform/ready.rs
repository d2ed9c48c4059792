//! From "it is there" to "it can be asked".

use std::time::Duration;

use rouse::{
    adapter::Health,
    engine::past::Symptoms,
    units::{Millis, Tick},
};
use tokio::time;

use super::contact::Contact;

const FIRST: Duration = Duration::from_millis(10);
const LAST: Duration = Duration::from_millis(500);
const GROWTH: f64 = 1.3;
/// What a start or a wake that lasts no longer answers on its way is of interest to nobody.
const SOON: Millis = Millis::secs(1);

/// How often a starting engine is asked. Quick at first (small engines and wakes are up in no time), then less and
/// less, and quick again around the moment that earlier starts took.
struct Pace {
    began: Tick,
    expected: Option<Millis>,
    gap: Duration,
}

impl Pace {
    fn next(&mut self, now: Tick) -> Duration {
        let gap = self.gap;
        self.gap = gap.mul_f64(GROWTH).min(LAST);
        let Some(expected) = self.expected else {
            return gap;
        };
        let away = now.since(self.began).0.abs_diff(expected.0);
        gap.min(Duration::from_millis(away / 4).max(FIRST))
    }
}

/// Waits until the engine answers health requests and does not say that it sleeps. For ever, if need be: the
/// decisions hold the deadline. What it answers meanwhile is told whenever that is something else.
pub(super) async fn up(contact: &Contact, expected: Option<Millis>) {
    let mut wait = Wait::begin(contact, expected);
    while let Err(probe) = wait.goes_on(contact).await {
        contact.shows(Symptoms { probe: Some(probe), ..Symptoms::default() }).await;
    }
}

/// The same wait, for whoever has more to do with what is answered meanwhile.
pub(super) struct Wait {
    pace: Pace,
    told: Option<String>,
    /// Before the engine is asked again.
    pause: Option<Duration>,
}

impl Wait {
    pub(super) fn begin(contact: &Contact, expected: Option<Millis>) -> Self {
        Self {
            pace: Pace { began: contact.common.clock.now(), expected, gap: FIRST },
            told: None,
            pause: None,
        }
    }

    /// Until the engine serves. An error is what it answers instead, which is something else than before.
    pub(super) async fn goes_on(&mut self, contact: &Contact) -> Result<(), String> {
        loop {
            if let Some(pause) = self.pause.take() {
                time::sleep(pause).await;
            }
            let Err(probe) = contact.adapter.up(contact.health_timeout()).await else { return Ok(()) };
            let now = contact.common.clock.now();
            self.pause = Some(self.pace.next(now));
            if self.told.as_ref() != Some(&probe) && now.since(self.pace.began) >= SOON {
                self.told = Some(probe.clone());
                return Err(probe);
            }
        }
    }
}

/// Waits until the engine's stub no longer says that it lets nobody in. Whatever else is heard, or nothing, is no closed
/// gate: requests then go out, and what they meet is judged as ever.
pub(super) async fn ungated(contact: &Contact) {
    let mut pace = Pace { began: contact.common.clock.now(), expected: None, gap: FIRST };
    while contact.adapter.health(contact.health_timeout()).await == Health::Gated {
        time::sleep(pace.next(contact.common.clock.now())).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_grow_rare_and_are_frequent_again_near_the_learned_time() {
        let began = Tick(1_000_000);
        let pace = |expected| Pace { began, expected, gap: FIRST };
        let mut plain = pace(None);
        let gaps: Vec<_> = (0..20).map(|_| plain.next(began)).collect();
        assert_eq!(gaps[0], FIRST);
        assert_eq!(gaps[19], LAST);
        let mut learned = pace(Some(Millis::secs(60)));
        for _ in 0..20 {
            learned.next(began);
        }
        assert_eq!(learned.next(began + Millis::secs(30)), LAST);
        assert_eq!(learned.next(began + Millis(59_900)), Duration::from_millis(25));
        assert_eq!(learned.next(began + Millis(60_010)), FIRST);
        assert_eq!(learned.next(began + Millis::secs(90)), LAST);
    }
}
