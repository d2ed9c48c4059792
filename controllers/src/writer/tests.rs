use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use prometheus::Opts;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

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

#[tokio::test]
async fn few_writes_are_in_flight_at_once_and_the_others_follow() {
    const WRITES: usize = MAX_IN_FLIGHT + 8;
    let claims = watch::Sender::new(Some(Leadership::aged(7, Duration::ZERO)));
    let counts = IntCounterVec::new(Opts::new("writes", "of a test"), &["kind", "outcome"]).unwrap();
    let writer = ObjectWriter::new(claims.subscribe(), counts);
    let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", server.local_addr().unwrap()).parse().unwrap();
    let pods: Api<Pod> = Api::namespaced(Client::try_from(kube::Config::new(url)).unwrap(), "default");
    let writes: Vec<_> = (0..WRITES)
        .map(|n| {
            let (writer, pods) = (writer.clone(), pods.clone());
            tokio::spawn(
                async move { writer.create(&pods, &json!({"metadata": {"name": n.to_string()}})).await },
            )
        })
        .collect();

    let mut held = Vec::new();
    while held.len() < MAX_IN_FLIGHT {
        held.push(request(server.accept().await.unwrap().0).await);
    }
    assert!(time::timeout(Duration::from_millis(50), server.accept()).await.is_err(), "one write too many");
    assert_eq!(*writer.in_flight.borrow() as usize, MAX_IN_FLIGHT);
    let mut answered = 0;
    while answered < WRITES {
        let connection = match held.pop() {
            Some(connection) => connection,
            None => request(server.accept().await.unwrap().0).await,
        };
        refuse(connection).await;
        answered += 1;
    }
    for write in writes {
        assert!(matches!(write.await.unwrap(), Err(Error::Invalid(_))));
    }
    writer.wait_idle().await;
}

#[tokio::test]
async fn a_write_that_waited_for_a_permit_is_not_sent_in_the_next_term() {
    let claims = watch::Sender::new(Some(Leadership::aged(7, Duration::ZERO)));
    let counts = IntCounterVec::new(Opts::new("writes", "of a test"), &["kind", "outcome"]).unwrap();
    let writer = ObjectWriter::new(claims.subscribe(), counts).with_own_limit(1);
    // No server has this address, and the write must not ask for one.
    let url = "http://127.0.0.1:1".parse().unwrap();
    let pods: Api<Pod> = Api::namespaced(Client::try_from(kube::Config::new(url)).unwrap(), "default");
    let held = writer.begin().await;
    let waiting = tokio::spawn({
        let (writer, pods) = (writer.clone(), pods.clone());
        async move { writer.create(&pods, &json!({"metadata": {"name": "p"}})).await }
    });
    tokio::task::yield_now().await;
    claims.send_replace(Some(Leadership::aged(8, Duration::ZERO)));
    drop(held);
    assert!(matches!(waiting.await.unwrap(), Err(Error::NotLeading)));
}

/// Returns the connection once it has carried the head of a request.
async fn request(mut connection: TcpStream) -> TcpStream {
    let mut head = Vec::new();
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        assert_ne!(connection.read_buf(&mut head).await.unwrap(), 0);
    }
    connection
}

/// Refuses the request, and closes the connection.
async fn refuse(mut connection: TcpStream) {
    let status =
        json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "no", "code": 422});
    let body = status.to_string();
    let head = format!(
        "HTTP/1.1 422 Unprocessable Entity\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    connection.write_all((head + &body).as_bytes()).await.unwrap();
}

#[test]
fn a_creation_conflicts_only_with_an_object_of_the_same_name() {
    let refusal = |reason: &str| kube::core::Status::failure("why", reason).with_code(409).boxed();
    let created = |reason: &str| creation_error(kube::Error::Api(refusal(reason)));
    assert!(matches!(created("AlreadyExists"), Error::Conflict));
    assert!(matches!(created("Conflict"), Error::Api(_)), "a quota has changed at the same time");
    assert!(matches!(Error::from(kube::Error::Api(refusal("Conflict"))), Error::Conflict), "any other write");
}
