//! The loop that drives one controller.

use futures_util::{Stream, StreamExt as _, pin_mut};
use rouse::units::Tick;
use rouse_net::lease::TickClock;
use tokio::time;

use super::{Tasks, Terms};

/// Maximum number of inputs between two decisions.
const MAX_BATCH: usize = 512;

/// A controller: what it has observed, what it decides, and what it knows of its own commands.
pub(crate) trait Component {
    /// One change of what it observes.
    type Input;
    /// What one of its tasks returns.
    type Outcome: Send + 'static;

    /// Takes one change.
    fn apply(&mut self, input: Self::Input, tasks: &mut Tasks<Self::Outcome>);

    /// Takes the outcome of a task of the current term.
    fn finished(&mut self, outcome: Self::Outcome, tasks: &mut Tasks<Self::Outcome>);

    /// Begins the term of this epoch, or stops leading. All tasks of the former term have been dropped.
    ///
    /// Must forget all that it decided in the former term. What it observes while leading only is observed anew.
    fn term_changed(&mut self, epoch: Option<u64>, tasks: &mut Tasks<Self::Outcome>);

    /// Returns when a decision is due without any input.
    fn next_deadline(&self) -> Option<Tick>;

    /// Decides, and starts a task for each command. Called after inputs and outcomes, and at deadlines.
    ///
    /// A component that has not seen all that it needs decides nothing.
    fn decide(&mut self, tasks: &mut Tasks<Self::Outcome>);
}

/// Runs a component until the election or its inputs end.
pub(crate) async fn run<C: Component>(
    mut component: C,
    inputs: impl Stream<Item = C::Input>,
    mut terms: Terms,
    clock: TickClock,
) {
    let inputs = inputs.ready_chunks(MAX_BATCH);
    pin_mut!(inputs);
    let mut tasks = Tasks::default();
    loop {
        let (mut batch, mut outcome) = (Vec::new(), None);
        tokio::select! {
            changed = terms.changed() => if changed.is_err() { return },
            finished = tasks.next() => outcome = Some(finished),
            taken = inputs.next() => match taken {
                Some(taken) => batch = taken,
                None => return,
            },
            () = until(component.next_deadline(), clock) => {}
        }
        // A term that began meanwhile comes first: the inputs may be of that term already.
        if let Some(epoch) = terms.take_change() {
            (tasks, outcome) = (Tasks::default(), None);
            component.term_changed(epoch, &mut tasks);
        }
        if let Some(outcome) = outcome {
            component.finished(outcome, &mut tasks);
        }
        batch.into_iter().for_each(|input| component.apply(input, &mut tasks));
        component.decide(&mut tasks);
    }
}

async fn until(deadline: Option<Tick>, clock: TickClock) {
    match deadline {
        Some(deadline) => time::sleep(deadline.since(clock.now()).duration()).await,
        None => std::future::pending().await,
    }
}
