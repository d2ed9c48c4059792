//! Where a test ends this process: before its Nth write.

/// Ends the process, as `kill -9` does, before the write of the number in `ROUSE_TEST_ABORT_BEFORE_WRITE`. Does nothing in
/// what ships.
pub(in crate::controllers) fn point() {
    #[cfg(debug_assertions)]
    {
        use std::sync::{
            OnceLock,
            atomic::{AtomicU64, Ordering},
        };
        static WRITES: AtomicU64 = AtomicU64::new(0);
        static END: OnceLock<Option<u64>> = OnceLock::new();
        let end = END.get_or_init(|| std::env::var("ROUSE_TEST_ABORT_BEFORE_WRITE").ok()?.parse().ok());
        let write = WRITES.fetch_add(1, Ordering::Relaxed) + 1;
        if *end == Some(write) {
            std::process::abort();
        }
    }
}
