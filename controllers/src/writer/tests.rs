use prometheus::Opts;
use serde_json::json;

use super::*;
use crate::workload::EPOCH;

#[tokio::test]
async fn a_renewal_that_is_late_is_waited_for_and_a_claim_that_is_lost_is_not() {
    let aged = |seconds| Some(Leadership::aged(7, Duration::from_secs(seconds)));
    let claims = watch::Sender::new(aged(0));
    let writes = IntCounterVec::new(Opts::new("writes", "of a test"), &["kind", "outcome"]).unwrap();
    let writer = ObjectWriter::new(claims.subscribe(), writes);
    assert_eq!(writer.wait_leadership().await.unwrap().epoch, 7);

    for (told, led) in [(aged(0), true), (None, false)] {
        claims.send_replace(aged(6));
        assert!(matches!(writer.leadership(), Err(Error::NotLeading)));
        let waiting = tokio::spawn({
            let writer = writer.clone();
            async move { writer.wait_leadership().await.is_ok() }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        claims.send_replace(told);
        assert_eq!(waiting.await.unwrap(), led);
    }

    claims.send_replace(aged(10));
    assert!(matches!(writer.wait_leadership().await, Err(Error::NotLeading)), "another may decide by now");
}

#[tokio::test]
async fn a_decision_of_one_term_is_not_written_in_the_next() {
    let claim = |epoch| Some(Leadership::aged(epoch, Duration::ZERO));
    let claims = watch::Sender::new(claim(7));
    let writes = IntCounterVec::new(Opts::new("writes", "of a test"), &["kind", "outcome"]).unwrap();
    let writer = ObjectWriter::new(claims.subscribe(), writes);
    assert_eq!(writer.leadership_in(7).unwrap().epoch, 7);
    claims.send_replace(None);
    assert!(matches!(writer.leadership_in(7), Err(Error::NotLeading)));
    claims.send_replace(claim(8));
    assert!(matches!(writer.leadership_in(7), Err(Error::NotLeading)), "it leads in another term");
}

#[tokio::test]
async fn a_newer_epoch_on_an_object_counts_unless_the_claim_is_renewed_after_it_was_read() {
    let aged = |epoch, seconds| Some(Leadership::aged(epoch, Duration::from_secs(seconds)));
    let claims = watch::Sender::new(aged(7, 1));
    let writes = IntCounterVec::new(Opts::new("writes", "of a test"), &["kind", "outcome"]).unwrap();
    let writer = ObjectWriter::new(claims.subscribe(), writes);
    let seen = |epoch: u64| {
        let metadata = json!({"uid": "u", "annotations": {EPOCH: epoch.to_string()}});
        SeenObject::of(&serde_json::from_value(metadata).unwrap())
    };
    let soon = || Instant::now() + CALL_TIMEOUT;
    for known in [0, 6, 7] {
        writer.confirm(&seen(known), 7, soon()).await.unwrap();
    }
    for (now, leads) in [(Some(7), true), (Some(9), false), (None, false)] {
        claims.send_replace(aged(7, 1));
        let (writer, newer) = (writer.clone(), seen(8));
        let confirmed = tokio::spawn(async move { writer.confirm(&newer, 7, soon()).await });
        tokio::task::yield_now().await;
        assert!(!confirmed.is_finished(), "the last renewal says nothing");
        claims.send_replace(now.and_then(|epoch| aged(epoch, 0)));
        assert_eq!(confirmed.await.unwrap().is_ok(), leads, "{now:?}");
    }
    claims.send_replace(aged(7, 1));
    let at_once = writer.confirm(&seen(8), 7, Instant::now()).await;
    assert!(matches!(at_once, Err(Error::NotLeading)), "no renewal in time");
}
