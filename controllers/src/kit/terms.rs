//! The terms of this gateway's leadership, as one reader follows them.

use tokio::sync::watch;

use crate::election::Leadership;

/// Follows the election.
///
/// A renewal is not a change. Once a reader has seen a term end, its epoch never starts again.
#[derive(Clone, Debug)]
pub(crate) struct Terms {
    leadership: watch::Receiver<Option<Leadership>>,
    /// Epoch of the term that the reader has taken last.
    taken: Option<u64>,
}

/// The election has ended, and with it this process's part in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ElectionEnded;

impl Terms {
    #[must_use]
    pub(crate) const fn new(leadership: watch::Receiver<Option<Leadership>>) -> Self {
        Self { leadership, taken: None }
    }

    /// Takes the current term: its epoch, or `None` while this gateway does not lead.
    pub(crate) fn current(&mut self) -> Option<u64> {
        let claim = self.leadership.borrow_and_update().filter(Leadership::is_valid);
        self.taken = claim.map(|claim| claim.epoch);
        self.taken
    }

    /// Takes the current term if it is another than the last taken one.
    pub(crate) fn take_change(&mut self) -> Option<Option<u64>> {
        let before = self.taken;
        let now = self.current();
        (now != before).then_some(now)
    }

    /// Completes when the current term is another than the last taken one. Takes nothing.
    ///
    /// # Errors
    /// The election has ended.
    pub(crate) async fn changed(&mut self) -> Result<(), ElectionEnded> {
        let taken = self.taken;
        let differs =
            |claim: &Option<Leadership>| claim.filter(Leadership::is_valid).map(|claim| claim.epoch) != taken;
        self.leadership.wait_for(differs).await.map(drop).map_err(|_| ElectionEnded)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn claim(epoch: u64, age: u64) -> Option<Leadership> {
        Some(Leadership::aged(epoch, Duration::from_secs(age)))
    }

    #[tokio::test]
    async fn a_renewal_is_no_change_and_a_missed_loss_between_two_terms_is_one() {
        let (tx, rx) = watch::channel(None);
        let mut terms = Terms::new(rx);
        assert_eq!(terms.current(), None);
        tx.send_replace(claim(7, 0));
        assert_eq!(terms.changed().await, Ok(()));
        assert_eq!((terms.take_change(), terms.take_change()), (Some(Some(7)), None));

        tx.send_replace(claim(7, 1));
        assert!(tokio::time::timeout(Duration::from_millis(20), terms.changed()).await.is_err());
        tx.send_replace(None);
        tx.send_replace(claim(8, 0));
        assert_eq!(terms.changed().await, Ok(()));
        assert_eq!(terms.take_change(), Some(Some(8)));

        tx.send_replace(claim(8, 11));
        assert_eq!(terms.take_change(), Some(None), "the claim is too old to act on");
        drop(tx);
        assert_eq!(terms.changed().await, Err(ElectionEnded));
    }
}
