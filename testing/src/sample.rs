//! Exhaustive tests, sampled in the gate and whole in the soak.
//!
//! `make soak` sets `ROUSE_SOAK`, and every case runs. The gate runs a sample that another day's run chooses otherwise, so that all
//! cases have their turn; the day is printed, and `ROUSE_DAY` takes it back.

use std::{env, time::SystemTime};

/// Whether exhaustive tests run whole.
#[must_use]
pub fn is_soak() -> bool {
    env::var_os("ROUSE_SOAK").is_some()
}

/// Days since 1970, or what `ROUSE_DAY` says: the seed of every sample.
///
/// # Panics
/// When `ROUSE_DAY` is no number.
#[must_use]
pub fn day() -> u64 {
    match env::var("ROUSE_DAY") {
        Ok(day) => day.parse().expect("ROUSE_DAY is a number of days"),
        Err(_) => SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs() / 86_400),
    }
}

/// `whole` in the soak, `sampled` in the gate.
#[must_use]
pub fn size<T>(whole: T, sampled: T) -> T {
    if is_soak() { whole } else { sampled }
}

/// All of these cases in the soak; in the gate, `most` of them by the day, in their order. What was left out is printed.
#[must_use]
pub fn cases<T: Copy + std::fmt::Debug>(all: &[T], most: usize) -> Vec<T> {
    if is_soak() || all.len() <= most {
        return all.to_vec();
    }
    let day = day();
    let chosen = chosen(day, all.len(), most);
    let cases: Vec<T> = chosen.into_iter().filter_map(|at| all.get(at).copied()).collect();
    println!("{most} of {} cases, ROUSE_DAY={day}: {cases:?}", all.len());
    cases
}

/// Where the day's `sampled` seeds of all these begin; 0 in the soak. A few days have every seed.
#[must_use]
pub fn first_seed(all: u64, sampled: u64) -> u64 {
    if is_soak() { 0 } else { day() % all.div_ceil(sampled) * sampled }
}

/// Which of `of` cases a day has: consecutive days take the next ones in turn.
fn chosen(day: u64, of: usize, most: usize) -> Vec<usize> {
    let first = usize::try_from(day).unwrap_or_default().wrapping_mul(most) % of;
    let mut chosen: Vec<usize> = (0..most).map(|n| (first + n) % of).collect();
    chosen.sort_unstable();
    chosen
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_few_days_have_every_case() {
        for (of, most) in [(8, 2), (7, 3), (30, 4), (5, 5)] {
            let days = u64::try_from(of).unwrap();
            let seen: BTreeSet<usize> = (1000..1000 + days).flat_map(|day| chosen(day, of, most)).collect();
            assert_eq!(seen, (0..of).collect(), "{most} of {of}");
            assert_eq!(chosen(1000, of, most).into_iter().collect::<BTreeSet<_>>().len(), most);
        }
    }
}
