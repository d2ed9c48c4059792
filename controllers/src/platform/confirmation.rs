//! Confirms engines that a new leader has adopted without an answer of theirs.
//!
//! The leader adopts an engine at once if all records show that it serves (`takeover`). Then the engine's task announces
//! the leader to the stub, which refuses the orders of former leaders from then on. The health watch begins with a
//! check, and the fleet gets its outcome like that of any other check: a closed gate is opened before the engine gets
//! requests again, and an engine that does not answer counts as unhealthy.
//!
//! Until then, no step rests on the records alone. The ledger keeps the engine's whole reservation: only an outcome
//! shrinks it. An order goes to the stub with this leader's epoch, and has an outcome only once the stub has answered.

use std::{sync::Arc, time::Duration};

use rouse_net::http_client::HttpClientError;
use tokio::{
    sync::{Semaphore, SemaphorePermit},
    time,
};

use super::{
    engine_steps::{self, StepOutcome},
    engine_task::{EngineContext, PodReceiver},
};
use crate::stub_client::StubClientError;

/// Maximum number of engines that are confirmed at once. Decisions share the thread with them and go on meanwhile.
pub(super) const MAX_CONCURRENT_CONFIRMATIONS: usize = 16;
/// Timeout of the announcement to one stub.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(1500);
/// Delay before the next announcement to a stub that did not answer.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// Holds all confirmations back until the permit is dropped.
///
/// During a takeover the tasks of thousands of engines would otherwise contact their stubs before decisions begin.
pub(super) async fn hold_back(confirmations: &Semaphore) -> Option<SemaphorePermit<'_>> {
    let all = u32::try_from(MAX_CONCURRENT_CONFIRMATIONS).ok()?;
    // Nothing closes the semaphore.
    confirmations.acquire_many(all).await.ok()
}

/// Announces this leader to the engine's stub.
///
/// Outcome: `Confirmed`, `Unauthorized`, or `Unanswered` if the stub must be queried again.
pub(super) async fn confirm(context: Arc<EngineContext>, pod: PodReceiver) -> StepOutcome {
    let answer = contact(&context.shared.confirmations, announce(&context, &pod)).await;
    let answer = answer.unwrap_or_else(|| Err(HttpClientError::Timeout.into()));
    let Some(outcome) = classify(&answer, context.placement.dual_pods) else {
        engine_steps::superseded(&context).await;
        return StepOutcome::Failed;
    };
    if let (StepOutcome::Unanswered, Err(error)) = (outcome, &answer) {
        tracing::debug!(engine = %context.id, %error, "the stub did not accept the new leader yet, retrying");
    }
    outcome
}

/// Does the same after a delay.
pub(super) async fn confirm_later(context: Arc<EngineContext>, pod: PodReceiver) -> StepOutcome {
    time::sleep(RETRY_DELAY).await;
    confirm(context, pod).await
}

/// Awaits a stub's answer once few enough others are awaited. `None` if the answer takes too long.
async fn contact<T>(confirmations: &Semaphore, answer: impl Future<Output = T>) -> Option<T> {
    // Nothing closes the semaphore.
    let _permit = confirmations.acquire().await;
    time::timeout(ANSWER_TIMEOUT, answer).await.ok()
}

async fn announce(context: &EngineContext, pod: &PodReceiver) -> Result<(), StubClientError> {
    // Without a fresh claim to lead, nothing is announced.
    let Some(stub) = context.proxy(pod).and_then(|proxy| context.stub(proxy)) else {
        return Err(HttpClientError::Unreachable("the stub has no address yet".into()).into());
    };
    if context.placement.dual_pods {
        // The pairing controller announces this leader to a requester's stub. This call shows whether the stub accepts
        // the token.
        return stub.accelerators().await.map(drop);
    }
    stub.announce_leader().await.map(drop)
}

/// Returns what the stub's answer means; `None`: the stub obeys a newer leader.
const fn classify(answer: &Result<(), StubClientError>, dual_pods: bool) -> Option<StepOutcome> {
    match answer {
        Ok(()) => Some(StepOutcome::Confirmed),
        Err(StubClientError::Unauthorized(_)) => Some(StepOutcome::Unauthorized),
        Err(_) if dual_pods => Some(StepOutcome::Confirmed),
        Err(StubClientError::Conflict { newer_epoch: true, .. }) => None,
        Err(_) => Some(StepOutcome::Unanswered),
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::FutureExt as _;

    use super::*;

    fn conflict(newer_epoch: bool) -> StubClientError {
        StubClientError::Conflict { newer_epoch, text: String::new() }
    }

    fn outcomes(error: StubClientError) -> [Option<StepOutcome>; 2] {
        let answer = Err(error);
        [classify(&answer, false), classify(&answer, true)]
    }

    #[tokio::test]
    async fn no_confirmation_begins_while_they_are_held_back() {
        let confirmations = Semaphore::new(MAX_CONCURRENT_CONFIRMATIONS);
        let held = hold_back(&confirmations).await;
        let mut contacted = pin!(contact(&confirmations, async { 7 }));
        assert_eq!(contacted.as_mut().now_or_never(), None, "the stub is contacted too early");
        drop(held);
        assert_eq!(contacted.await, Some(7));
    }

    #[test]
    fn a_stub_is_confirmed_by_its_answer_alone() {
        const UNANSWERED: Option<StepOutcome> = Some(StepOutcome::Unanswered);
        const CONFIRMED: Option<StepOutcome> = Some(StepOutcome::Confirmed);
        const UNAUTHORIZED: Option<StepOutcome> = Some(StepOutcome::Unauthorized);
        assert_eq!([classify(&Ok(()), false), classify(&Ok(()), true)], [CONFIRMED; 2]);
        let unavailable = StubClientError::Refused { status: 503, text: String::new() };
        let silent = StubClientError::from(HttpClientError::Timeout);
        // Of a requester's stub, only the token is in question.
        for error in [unavailable, silent, conflict(false)] {
            assert_eq!(outcomes(error), [UNANSWERED, CONFIRMED]);
        }
        assert_eq!(outcomes(StubClientError::Unauthorized(String::new())), [UNAUTHORIZED; 2]);
        assert_eq!(outcomes(conflict(true)), [None, CONFIRMED]);
    }
}
