//! Timers that may be unset.

use std::future::pending;

use tokio::time::{Instant, sleep_until};

/// Completes at this moment. `None`: never.
pub async fn sleep_until_some(moment: Option<Instant>) {
    match moment {
        Some(moment) => sleep_until(moment).await,
        None => pending().await,
    }
}
