//! Exhaustive tests, sampled in the gate and complete in the soak.
//!
//! `make soak` sets `ROUSE_SOAK`, which runs every case. The gate runs a sample that changes from day to day, so that
//! all cases get their turn. It prints the day, and `ROUSE_DAY` reproduces it.

use std::{env, time::SystemTime};

/// Whether exhaustive tests run completely.
#[must_use]
pub fn is_soak() -> bool {
    env::var_os("ROUSE_SOAK").is_some()
}

/// The seed of every sample: days since 1970, or the value of `ROUSE_DAY`.
///
/// # Panics
/// `ROUSE_DAY` is not a number.
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

/// All of these cases in the soak. In the gate, `max_cases` of them by the day, in their order; the choice is printed.
#[must_use]
pub fn cases<T: Copy + std::fmt::Debug>(all: &[T], max_cases: usize) -> Vec<T> {
    if is_soak() || all.len() <= max_cases {
        return all.to_vec();
    }
    let day = day();
    let chosen = chosen(day, all.len(), max_cases);
    let cases: Vec<T> = chosen.into_iter().filter_map(|at| all.get(at).copied()).collect();
    println!("{max_cases} of {} cases, ROUSE_DAY={day}: {cases:?}", all.len());
    cases
}

/// The first of the day's `sampled` seeds out of `all`; 0 in the soak. A few days cover every seed.
#[must_use]
pub fn first_seed(all: u64, sampled: u64) -> u64 {
    if is_soak() { 0 } else { day() % all.div_ceil(sampled) * sampled }
}

/// The day's cases out of `of`: consecutive days take the next ones in turn.
fn chosen(day: u64, of: usize, max_cases: usize) -> Vec<usize> {
    let first = usize::try_from(day).unwrap_or_default().wrapping_mul(max_cases) % of;
    let mut chosen: Vec<usize> = (0..max_cases).map(|n| (first + n) % of).collect();
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
            let covered: BTreeSet<usize> =
                (1000..1000 + days).flat_map(|day| chosen(day, of, most)).collect();
            assert_eq!(covered, (0..of).collect(), "{most} of {of}");
            assert_eq!(chosen(1000, of, most).into_iter().collect::<BTreeSet<_>>().len(), most);
        }
    }
}
