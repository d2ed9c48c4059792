//! Is there a place for another engine in its launcher?
//!
//! A launcher holds so many engines and no more, asleep or awake ([`Terms::most`]). Where it is full, the sleepers that were used
//! longest ago go first; those that somebody waits for are the last of them, and those that are outdated the first. What somebody is
//! bound to stays, so that where all are, the newcomer waits. As with memory it is all or nothing: no sleeper goes unless that lets the
//! newcomer in.
//!
//! [`Terms::most`]: super::event::Terms::most

use super::{
    apply::terms,
    command::Why,
    ids::{EngineId, ProviderId},
    node::{Engine, State},
    room::{Newcomer, Room, Rooms},
};

impl Rooms<'_> {
    /// Room for an engine that is to be started in this provider: memory, and a place if it is a launcher.
    pub(super) fn for_start(&self, new: &Newcomer<'_>, provider: &ProviderId) -> Room {
        let mut going = match self.for_newcomer(new) {
            Room::There => Vec::new(),
            Room::Evict(sleepers) => sleepers,
            wait @ Room::Wait(_) => return wait,
        };
        match self.displaced(provider, &going) {
            Ok(sleepers) => going.extend(sleepers.into_iter().map(|id| (id, Why::Displaced))),
            Err(reason) => return Room::Wait(reason),
        }
        if going.is_empty() { Room::There } else { Room::Evict(going) }
    }

    /// Which sleepers of the launcher go besides these, or whom or what has to be waited for.
    fn displaced(&self, launcher: &ProviderId, going: &[(EngineId, Why)]) -> Result<Vec<EngineId>, String> {
        let known = self.node.providers.get(launcher).filter(|_| launcher.is_launcher());
        let Some(most) = known.and_then(|known| terms(self.builds, known).most) else {
            return Ok(Vec::new());
        };
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        let goes = |e: &Engine| e.state.is_over() || going.iter().any(|(id, _)| *id == e.id);
        // Of one that is gone and was taken away nothing is left in the launcher.
        let inside = self.node.engines_in(launcher).filter(|e| e.state != State::Gone || !e.ended);
        let (leaving, staying): (Vec<&Engine>, Vec<&Engine>) = inside.partition(|e| goes(e));
        let full = |what: &[&Engine]| {
            let each: Vec<String> = what.iter().map(|e| format!("{} is {}", e.id, e.state)).collect();
            format!("its launcher holds no more than {most}: {}", each.join(", "))
        };
        let over = (staying.len() + 1).saturating_sub(most);
        if over == 0 {
            let waits = leaving.len() + staying.len() >= most && going.is_empty();
            return if waits { Err(full(&leaving)) } else { Ok(Vec::new()) };
        }
        let mut free: Vec<&Engine> = staying.iter().filter(|e| e.is_free()).copied().collect();
        if free.len() < over {
            return Err(full(&staying));
        }
        free.sort_by_key(|e| (self.is_wanted(&e.id), !self.is_outdated(&e.id), e.last_used, &e.id));
        Ok(free.into_iter().take(over).map(|e| e.id.clone()).collect())
    }
}
