//! An open-loop arrival trace: clients send at their own times, however long other requests take.
//!
//! Closed-loop clients wait for an answer before they send again and so hide every stall; open-loop clients do not. The
//! trace in `gateway/tests/data/trace-200.csv` is `open_loop(1, 200, 6, 60)`. It is kept on file so that the end-to-end
//! test, the simulator and first-come-first-served all serve the same requests.

use super::random::SplitMix64;
use crate::units::Millis;

/// One request of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TraceArrival {
    pub at: Millis,
    pub client: u32,
    /// Index of the model, from 0.
    pub model: u32,
    /// How long its answer streams once it has begun; at most a second.
    pub stream: Millis,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line} of the trace is not 'at_ms,client,model,stream_ms'")]
pub struct Error {
    pub line: usize,
}

/// Mean time between two requests of a client.
const MEAN_GAP_MS: u64 = 4_000;
/// Time after which popularity moves on by one model.
const POPULARITY_SHIFT_MS: u64 = 15_000;
/// Percentage of requests, from the most popular model down; the rest goes to the last.
const POPULARITY_PERCENT: [u64; 5] = [32, 22, 16, 12, 10];
const CSV_HEADER: &str = "at_ms,client,model,stream_ms";

/// `clients` that send for `seconds`, each independently, to `models` of shifting popularity.
#[must_use]
pub fn open_loop(seed: u64, clients: u32, models: u32, seconds: u64) -> Vec<TraceArrival> {
    let mut random = SplitMix64::new(seed);
    let mut arrivals = Vec::new();
    for client in 0..clients {
        let mut at = random.exponential(MEAN_GAP_MS);
        while at < seconds * 1000 {
            let popular = (at / POPULARITY_SHIFT_MS) as u32;
            let model = (random_rank(&mut random, models) + popular) % models.max(1);
            let stream = Millis(random.between(50, 1000));
            arrivals.push(TraceArrival { at: Millis(at), client, model, stream });
            at += random.exponential(MEAN_GAP_MS).max(1);
        }
    }
    arrivals.sort_by_key(|arrival| (arrival.at, arrival.client));
    arrivals
}

fn random_rank(random: &mut SplitMix64, models: u32) -> u32 {
    let mut left = random.between(0, 99);
    for (rank, share) in POPULARITY_PERCENT.iter().enumerate() {
        match left.checked_sub(*share) {
            Some(rest) => left = rest,
            None => return (rank as u32).min(models.saturating_sub(1)),
        }
    }
    models.saturating_sub(1)
}

/// Writes the trace as comma-separated values with a header line.
#[must_use]
pub fn write(arrivals: &[TraceArrival]) -> String {
    let line = |a: &TraceArrival| format!("{},{},{},{}\n", a.at.0, a.client, a.model, a.stream.0);
    std::iter::once(format!("{CSV_HEADER}\n")).chain(arrivals.iter().map(line)).collect()
}

/// Reads what [`write()`] wrote.
///
/// # Errors
/// The first line that is not an arrival.
pub fn read(text: &str) -> Result<Vec<TraceArrival>, Error> {
    let rows = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty() && *line != CSV_HEADER);
    rows.map(|(index, line)| parse_row(line).ok_or(Error { line: index + 1 })).collect()
}

fn parse_row(line: &str) -> Option<TraceArrival> {
    let numbers: Option<Vec<u64>> = line.split(',').map(|field| field.trim().parse().ok()).collect();
    let [at, client, model, stream] = numbers?.try_into().ok()?;
    Some(TraceArrival {
        at: Millis(at),
        client: client.try_into().ok()?,
        model: model.try_into().ok()?,
        stream: Millis(stream),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_read_as_it_was_written() {
        let trace = open_loop(7, 20, 6, 10);
        assert!(!trace.is_empty());
        assert_eq!(read(&write(&trace)).unwrap(), trace);
        assert_eq!(read("at_ms,client,model,stream_ms\n1,2,3\n"), Err(Error { line: 2 }));
    }

    #[test]
    fn popularity_shifts_and_every_model_is_asked_for() {
        let trace = open_loop(1, 200, 6, 60);
        let favourite = |from: u64| {
            let of = |model| {
                trace.iter().filter(|a| a.at.0 / POPULARITY_SHIFT_MS == from && a.model == model).count()
            };
            (0..6).max_by_key(|model| of(*model)).unwrap()
        };
        assert_eq!((favourite(0), favourite(1), favourite(2)), (0, 1, 2));
        assert!((0..6).all(|model| trace.iter().any(|a| a.model == model)));
        assert!(trace.iter().all(|a| a.stream <= Millis(1000)));
    }
}
