//! Failpoints for tests: one ends this process before its Nth write, or order to a stub or engine, and one scales a
//! model without protection. Release builds have none.

/// Aborts the process, like `kill -9`, before write number `ROUSE_TEST_ABORT_BEFORE_WRITE`.
///
/// The count starts once the file `ROUSE_TEST_ABORT_FROM` exists, or at process start without that variable. Release
/// builds do nothing.
pub(crate) fn hit() {
    #[cfg(debug_assertions)]
    {
        use std::{
            path::PathBuf,
            sync::{
                OnceLock,
                atomic::{AtomicU64, Ordering},
            },
        };
        static WRITES: AtomicU64 = AtomicU64::new(0);
        static END: OnceLock<Option<u64>> = OnceLock::new();
        let end = END.get_or_init(|| std::env::var("ROUSE_TEST_ABORT_BEFORE_WRITE").ok()?.parse().ok());
        static FROM: OnceLock<Option<PathBuf>> = OnceLock::new();
        let from = FROM.get_or_init(|| std::env::var_os("ROUSE_TEST_ABORT_FROM").map(Into::into));
        if from.as_ref().is_some_and(|from| !from.exists()) {
            return;
        }
        let write = WRITES.fetch_add(1, Ordering::Relaxed) + 1;
        if *end == Some(write) {
            std::process::abort();
        }
    }
}

/// Whether replicas of this model that still start are taken for replicas that serve, and orders are forgotten.
///
/// `ROUSE_TEST_UNPROTECTED_MODEL` names the model. The design document has a timeline without protection, and no
/// setting turns protection off.
pub(crate) fn is_unprotected(model: &str) -> bool {
    cfg!(debug_assertions)
        && std::env::var_os("ROUSE_TEST_UNPROTECTED_MODEL").is_some_and(|unprotected| unprotected == model)
}
