//! Waits for an object's state through a watch.

use std::{fmt::Debug, time::Duration};

use anyhow::{Context as _, Result, bail};
use futures_util::{Stream, StreamExt as _};
use kube::{
    Api, Resource,
    runtime::{WatchStreamExt as _, watcher},
};
use serde::{Serialize, de::DeserializeOwned};
use tokio::time;

/// Longer than any test waits, even on a busy machine.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(120);

/// Waits until `fits` accepts this object or its absence, and returns that state.
///
/// # Errors
/// [`WAIT_TIMEOUT`] passed; the error holds `condition` and the object's last state.
pub async fn until<K>(
    api: &Api<K>,
    name: &str,
    condition: &str,
    mut fits: impl FnMut(&Option<K>) -> bool,
) -> Result<Option<K>>
where
    K: Resource + Clone + DeserializeOwned + Serialize + Debug + Send + 'static,
{
    let mut last = None;
    let found = async {
        // Boxed, because a watcher is large and every caller's future would contain it.
        let mut stream = watcher::watch_object(api.clone(), name).default_backoff().boxed();
        while let Some(object) = stream.next().await {
            // Errors are connection errors, from which the watcher recovers.
            let Ok(object) = object else { continue };
            if fits(&object) {
                return Ok(object);
            }
            last = object;
        }
        bail!("the watch of {name} ended")
    };
    match time::timeout(WAIT_TIMEOUT, found).await {
        Ok(found) => found,
        Err(_) => {
            let last = serde_json::to_string_pretty(&last).context("cannot serialize the last state")?;
            bail!("waited {} s for {condition} of {name}; its last state was {last}", WAIT_TIMEOUT.as_secs())
        }
    }
}

/// Streams each change of any object, starting with the existing objects. For callers that list again after each
/// change.
pub fn changes<K>(api: &Api<K>) -> impl Stream<Item = ()> + Unpin + Send + use<K>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    watcher(api.clone(), watcher::Config::default()).default_backoff().map(drop).boxed()
}
