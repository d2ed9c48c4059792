use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use rouse_testing::random::TestRng;

use super::*;

const NOW: Tick = Tick(1_700_000_000_000);

fn need(text: usize, max_tokens: Option<u32>) -> TokenEstimateInput {
    TokenEstimateInput { text_bytes: text, max_tokens, generates: true }
}

fn used(prompt: u64, completion: u64) -> TokenUsage {
    TokenUsage { prompt, completion }
}

fn limits(requests: Option<u64>, tokens: Option<u64>) -> RateLimits {
    RateLimits { requests, tokens }
}

fn model() -> ModelName {
    "m".into()
}

fn refused(result: Result<QuotaReservation, Fault>) -> (RateLimitUnit, u64, Millis) {
    match result {
        Err(Fault::RateLimited { rate, retry_after }) => (rate.unit, rate.used, retry_after),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_refusal_takes_nothing_and_names_the_time_at_which_it_passes() {
    let (account, limits) = (QuotaAccount::new(), limits(Some(2), Some(1000)));
    for _ in 0..2 {
        account.reserve(&limits, &model(), need(400, Some(10)), NOW).unwrap();
    }
    let (unit, count, after) = refused(account.reserve(&limits, &model(), need(400, Some(10)), NOW));
    assert_eq!((unit, count), (RateLimitUnit::Requests, 2));
    assert!((60_000..=60_250).contains(&after.0), "{after}");
    let [_, tokens] = account.status(&limits, NOW);
    assert_eq!(tokens.unwrap().remaining, 780, "the refused one reserved no tokens");
    let before = NOW + Millis(after.0 - 1);
    assert!(account.reserve(&limits, &model(), need(400, Some(10)), before).is_err());
    assert!(account.reserve(&limits, &model(), need(400, Some(10)), NOW + after).is_ok());
}

#[test]
fn tokens_are_refused_by_their_estimate_and_one_too_large_for_any_minute_passes_alone() {
    let (account, limits) = (QuotaAccount::new(), limits(None, Some(1000)));
    account.reserve(&limits, &model(), need(3000, Some(100)), NOW).unwrap();
    let (unit, count, _) = refused(account.reserve(&limits, &model(), need(3000, Some(100)), NOW));
    assert_eq!((unit, count), (RateLimitUnit::Tokens, 850));
    let (_, _, after) = refused(account.reserve(&limits, &model(), need(40_000, None), NOW));
    let later = NOW + after;
    let large = account.reserve(&limits, &model(), need(40_000, None), later).unwrap();
    assert_eq!(large.tokens, 1000);
    // The real usage is charged, over as many minutes as it takes.
    account.settle(&limits, &model(), large, (used(10_000, 100), true), later);
    let (_, count, after) = refused(account.reserve(&limits, &model(), need(4, Some(1)), later));
    assert_eq!(count, 10_100);
    assert!((600_000..=615_000).contains(&after.0), "{after}");
}

#[test]
fn what_answers_usually_are_is_learned_and_max_tokens_only_bounds_it() {
    let (account, limits) = (QuotaAccount::new(), RateLimits::default());
    let expected = |max_tokens| {
        let reservation = account.reserve(&limits, &model(), need(4000, max_tokens), NOW).unwrap();
        account.refund(&limits, reservation, NOW);
        (reservation.prompt, reservation.tokens)
    };
    assert_eq!(expected(None), (1000, 1256));
    assert_eq!(expected(Some(16)), (1000, 1016));
    // The model's tokenizer makes 5 bytes a token, and its answers are short.
    for _ in 0..200 {
        let reservation = account.reserve(&limits, &model(), need(4000, Some(4096)), NOW).unwrap();
        account.settle(&limits, &model(), reservation, (used(800, 50), true), NOW);
    }
    let (_, tokens) = expected(Some(4096));
    assert!((845..=860).contains(&tokens), "{tokens}");
    let embedding = TokenEstimateInput { generates: false, ..need(4000, None) };
    let other = account.reserve(&limits, &"other".into(), embedding, NOW).unwrap();
    assert_eq!(other.tokens, 1000, "of another model nothing is known");
}

#[test]
fn one_unusual_answer_teaches_little_and_what_is_usual_is_learned_soon() {
    let (account, limits) = (QuotaAccount::new(), RateLimits::default());
    let expected = |reported: Option<TokenUsage>| {
        let reservation = account.reserve(&limits, &model(), need(4000, Some(100)), NOW).unwrap();
        account.settle(
            &limits,
            &model(),
            reservation,
            (reported.unwrap_or_default(), reported.is_some()),
            NOW,
        );
        reservation.tokens
    };
    expected(Some(used(900_000, 100)));
    let once = expected(None);
    assert!(once < 11_000, "{once}");
    for _ in 0..20 {
        expected(Some(used(40_000, 100)));
    }
    let usual = expected(None);
    assert!((34_000..=42_000).contains(&usual), "{usual}");
}

#[test]
fn a_request_that_outlives_its_minute_is_charged_for_more_and_keeps_a_credit_of_less() {
    let (account, limits) = (QuotaAccount::new(), limits(None, Some(10_000)));
    let later = NOW + Millis::secs(90);
    let count = || account.status(&limits, later)[1].map(|s| s.limit - s.remaining).unwrap();
    let first = account.reserve(&limits, &model(), need(4000, Some(100)), NOW).unwrap();
    let second = account.reserve(&limits, &model(), need(4000, Some(100)), NOW).unwrap();
    account.settle(&limits, &model(), first, (used(600, 100), false), later);
    assert_eq!(count(), 0);
    account.settle(&limits, &model(), second, (used(1600, 100), false), later);
    assert_eq!(count(), 200, "600 more than reserved, of which 400 were credit");
}

#[test]
fn on_many_cores_at_once_no_more_than_the_limit_is_admitted() {
    let (account, limits) = (Arc::new(QuotaAccount::new()), limits(Some(500), Some(100_000)));
    let admitted = Arc::new(AtomicU64::new(0));
    let threads: Vec<_> = (0..8)
        .map(|_| {
            let (account, admitted) = (Arc::clone(&account), Arc::clone(&admitted));
            std::thread::spawn(move || {
                for turn in 0..2000 {
                    let now = NOW + Millis(turn / 100);
                    match account.reserve(&limits, &model(), need(400, Some(50)), now) {
                        // A third never reaches an engine.
                        Ok(reservation) if turn % 3 == 0 => account.refund(&limits, reservation, now),
                        Ok(reservation) => {
                            admitted.fetch_add(1, Ordering::Relaxed);
                            account.settle(&limits, &model(), reservation, (used(100, 50), false), now);
                        }
                        Err(_) => {}
                    }
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    let admitted = admitted.load(Ordering::Relaxed);
    assert_eq!(admitted, 500);
    let [requests, tokens] = account.status(&limits, NOW + Millis(20));
    assert_eq!(requests.map(|s| s.remaining), Some(0));
    assert_eq!(tokens.map(|s| s.remaining), Some(100_000 - 500 * 150));
}

#[test]
fn what_was_taken_while_it_ran_is_given_back_from_where_it_was_taken() {
    let (account, limits) = (QuotaAccount::new(), limits(None, Some(10_000)));
    let (mut now, mut total) = (NOW, 0);
    for _ in 0..20 {
        let mut reservation = account.reserve(&limits, &model(), need(400, Some(100)), now).unwrap();
        for more in [20, 90] {
            now = now + Millis(300);
            let tokens = reservation.tokens + more;
            account.raise(&limits, &mut reservation, tokens, now);
        }
        account.settle(&limits, &model(), reservation, (used(30, 110), false), now);
        total += 140;
        let [_, tokens] = account.status(&limits, now);
        assert_eq!(tokens.map(|s| s.limit - s.remaining), Some(total));
    }
}

/// In any order of operations, exactly the used and the reserved tokens count within one minute.
#[test]
fn nothing_is_lost_and_nothing_leaks_however_requests_overlap() {
    for seed in 0..200 {
        let mut random = TestRng(seed);
        let limits = limits(Some(10_000), Some(2_000 + random.below(40_000)));
        let (account, mut now) = (QuotaAccount::new(), NOW + Millis(random.below(500)));
        let mut running: Vec<QuotaReservation> = Vec::new();
        let (mut requests, mut settled) = (0, 0);
        while now.since(NOW) < Millis::secs(55) {
            now = now + Millis(random.below(400));
            match random.below(4) {
                0 | 1 => {
                    let need = need(random.below(4000) as usize, Some(random.below(800) as u32));
                    if let Ok(reservation) = account.reserve(&limits, &model(), need, now) {
                        requests += 1;
                        running.push(reservation);
                    }
                }
                2 if !running.is_empty() => {
                    let place = random.below(running.len() as u64) as usize;
                    let more = running[place].tokens + random.below(200);
                    account.raise(&limits, &mut running[place], more, now);
                }
                3 if !running.is_empty() => {
                    let reservation = running.swap_remove(random.below(running.len() as u64) as usize);
                    if random.below(5) == 0 && reservation.raised.1 == 0 {
                        account.refund(&limits, reservation, now);
                        requests -= 1;
                    } else {
                        // All raised tokens were seen to be used.
                        let least = reservation.tokens - reservation.raised.1 - reservation.admitted.1;
                        let total = least + random.below(1500);
                        account.settle(&limits, &model(), reservation, (used(0, total), true), now);
                        settled += total;
                    }
                }
                _ => {}
            }
            let expected = settled + running.iter().map(|reservation| reservation.tokens).sum::<u64>();
            let state = account.lock_at(&limits, now);
            assert_eq!((state.requests.used(), state.tokens.used()), (requests, expected), "seed {seed}");
        }
    }
}
