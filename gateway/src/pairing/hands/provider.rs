//! Orders about launchers.

use rouse::pairing::command::OfProvider;

use super::{Failed, Hands, Outcome};

impl Hands {
    /// No requester asks for one in a mode that has none.
    pub(super) fn launcher(&self, step: &OfProvider) -> std::future::Ready<Outcome> {
        std::future::ready(Err(Failed::refused(format!("{step:?}: there are no launchers in this mode"))))
    }
}
