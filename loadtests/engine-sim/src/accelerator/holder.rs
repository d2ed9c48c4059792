//! One process's memory on its accelerators.

use std::{collections::BTreeMap, time::Duration};

use super::{
    AcceleratorFile, Error, SimAcceleratorUsage,
    state::{AcceleratorFileState, DelayedFree, MemoryEntry},
};

/// One process's account in an [`AcceleratorFile`], on its accelerators.
#[derive(Clone, Debug)]
pub struct MemoryAccount {
    pub(super) file: AcceleratorFile,
    pub(super) ids: Vec<String>,
    pub(super) pid: u32,
    pub(super) start: u64,
    pub(super) label: String,
    pub(super) free_delay: Option<Duration>,
}

/// A transaction on the locked file. Changes persist only if its closure returns `Ok`.
pub struct AccountTransaction<'a> {
    state: &'a mut AcceleratorFileState,
    account: &'a MemoryAccount,
    now_ms: u64,
}

impl MemoryAccount {
    /// The accelerators of this account.
    #[must_use]
    pub fn ids(&self) -> &[String] {
        &self.ids
    }

    /// Sets how long freed memory stays counted from now on.
    pub fn set_free_delay(&mut self, free_delay: Option<Duration>) {
        self.free_delay = free_delay;
    }

    /// Runs `change` with the file locked, all or nothing. An error discards the changes.
    pub fn transact<T>(
        &self,
        change: impl FnOnce(&mut AccountTransaction<'_>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.file.transact(|state, now_ms| change(&mut AccountTransaction { state, account: self, now_ms }))
    }

    /// Sets this account's memory on each of its accelerators to `bytes`.
    pub fn resize(&self, bytes: u64) -> Result<(), Error> {
        self.transact(|session| self.ids.iter().try_for_each(|id| session.resize(id, bytes)))
    }

    /// Sets this account's host memory to `bytes`.
    pub fn resize_host(&self, bytes: u64) -> Result<(), Error> {
        self.transact(|session| {
            session.resize_host(bytes);
            Ok(())
        })
    }
}

impl AccountTransaction<'_> {
    /// Memory usage of accelerator `id`.
    #[must_use]
    pub fn usage(&self, id: &str) -> SimAcceleratorUsage {
        self.state.usage(id)
    }

    /// Sets the account's memory on `id` to `bytes`. Growth must fit; shrinking frees memory, late if the account is
    /// set so. The account can reclaim its own late memory, because a driver that frees slowly still knows the owner.
    pub fn resize(&mut self, id: &str, bytes: u64) -> Result<(), Error> {
        let MemoryAccount { pid, free_delay, .. } = *self.account;
        let usage = self.state.usage(id);
        let card = self.state.accelerators.get_mut(id);
        let card = card.ok_or_else(|| Error::UnknownAccelerator(id.to_owned()))?;
        let before = card.used.get(&pid).map_or(0, |entry| entry.bytes);
        let (asked, freed) = (bytes.saturating_sub(before), before.saturating_sub(bytes));
        self.account.set_entry(&mut card.used, bytes);
        let missing = asked - self.reclaim(id, asked);
        if missing > usage.free() {
            let (accelerator, free) = (id.to_owned(), usage.free());
            return Err(Error::OutOfMemory { accelerator, asked, capacity: usage.capacity, free });
        }
        if let Some(free_delay) = free_delay.filter(|_| freed > 0) {
            let until_unix_ms = self.now_ms + free_delay.as_millis() as u64;
            let (accelerator, start) = (id.to_owned(), self.account.start);
            self.state.late.push(DelayedFree { accelerator, bytes: freed, until_unix_ms, pid, start });
        }
        Ok(())
    }

    /// Reclaims up to `bytes` of the account's own late memory on `id`. Returns the amount.
    fn reclaim(&mut self, id: &str, bytes: u64) -> u64 {
        let MemoryAccount { pid, start, .. } = *self.account;
        let is_own = |delayed: &&mut DelayedFree| {
            delayed.accelerator == id && (delayed.pid, delayed.start) == (pid, start)
        };
        let mut remaining = bytes;
        for delayed in self.state.late.iter_mut().filter(is_own) {
            let reclaimed = delayed.bytes.min(remaining);
            delayed.bytes -= reclaimed;
            remaining -= reclaimed;
        }
        bytes - remaining
    }

    /// Sets the account's host memory to `bytes`. Host memory has no capacity here.
    pub fn resize_host(&mut self, bytes: u64) {
        self.account.set_entry(&mut self.state.host.used, bytes);
    }
}

impl MemoryAccount {
    fn set_entry(&self, used: &mut BTreeMap<u32, MemoryEntry>, bytes: u64) {
        if bytes == 0 {
            used.remove(&self.pid);
            return;
        }
        let late_ms = self.free_delay.map_or(0, |delay| delay.as_millis() as u64);
        used.insert(self.pid, MemoryEntry { start: self.start, bytes, label: self.label.clone(), late_ms });
    }
}
