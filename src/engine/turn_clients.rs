//! The clients that have used an engine in its turn.

use serde::{Deserialize, Serialize};

/// How many clients of one turn are told apart: enough to know whether some client does not wait.
pub const MAX_DISTINCT_CLIENTS: usize = 4;

/// The first clients of a turn, as hashes; 0 stands for none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TurnClients(pub [u64; MAX_DISTINCT_CLIENTS]);

impl TurnClients {
    /// Records a client while there is room for one more.
    pub fn record(&mut self, client: u64) {
        if !self.0.contains(&client)
            && let Some(slot) = self.0.iter_mut().find(|slot| **slot == 0)
        {
            *slot = client;
        }
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether one of the clients does not wait. True if there may be more clients than are told apart.
    pub fn has_client_not_waiting(&self, waits: impl Fn(u64) -> bool) -> bool {
        self.0.iter().all(|client| *client != 0)
            || self.0.iter().any(|client| *client != 0 && !waits(*client))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_is_no_other_and_a_full_turn_is_anybodys() {
        let mut clients = TurnClients::default();
        assert!(!clients.has_client_not_waiting(|_| false));
        clients.record(7);
        clients.record(7);
        assert!(!clients.has_client_not_waiting(|client| client == 7));
        assert!(clients.has_client_not_waiting(|client| client == 8));
        (1..9).for_each(|client| clients.record(client));
        assert_eq!(clients.0, [7, 1, 2, 3]);
        assert!(clients.has_client_not_waiting(|_| true));
    }
}
