//! Waiting for what an object says, by a watch of it.

use std::{fmt::Debug, time::Duration};

use anyhow::{Context as _, Result, bail};
use futures_util::{Stream, StreamExt as _};
use kube::{
    Api, Resource,
    runtime::{WatchStreamExt as _, watcher},
};
use serde::{Serialize, de::DeserializeOwned};
use tokio::time;

/// Nothing that a test waits for takes longer, even on a machine that does much else.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(120);

/// Waits until `fits` says so of this object, or of its absence; gives what it was then.
///
/// # Errors
/// After [`WAIT_TIMEOUT`], with what was waited for and what the object was last.
pub async fn until<K>(
    api: &Api<K>,
    name: &str,
    what: &str,
    mut fits: impl FnMut(&Option<K>) -> bool,
) -> Result<Option<K>>
where
    K: Resource + Clone + DeserializeOwned + Serialize + Debug + Send + 'static,
{
    let mut last = None;
    let found = async {
        // A watcher is large, and every test would carry it along.
        let mut stream = watcher::watch_object(api.clone(), name).default_backoff().boxed();
        while let Some(seen) = stream.next().await {
            // Errors are those of a connection: the watcher comes back from them.
            let Ok(seen) = seen else { continue };
            if fits(&seen) {
                return Ok(seen);
            }
            last = seen;
        }
        bail!("the watch of {name} ended")
    };
    match time::timeout(WAIT_TIMEOUT, found).await {
        Ok(found) => found,
        Err(_) => {
            let last = serde_json::to_string_pretty(&last).context("what it was")?;
            bail!("waited {} s for {what} of {name}; it was last {last}", WAIT_TIMEOUT.as_secs())
        }
    }
}

/// Each change of any object there, beginning with those that are there: for who looks anew each time.
pub fn changes<K>(api: &Api<K>) -> impl Stream<Item = ()> + Unpin + Send + use<K>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    watcher(api.clone(), watcher::Config::default()).default_backoff().map(drop).boxed()
}
