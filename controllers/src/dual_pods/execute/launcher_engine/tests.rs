use rouse::pairing::ids::{EngineFingerprint, ProviderMode};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};

use super::*;

/// The public launcher's answers to paths that it does not have, and to a PUT with an accelerator that it does not see.
const NOT_FOUND: (&str, &str) = ("404 Not Found", r#"{"detail":"Not Found"}"#);
const REFUSED: &str = "GPU UUID GPU-1 not found. Available UUIDs: []";

/// A launcher that answers one connection with each of these, in this order.
async fn launcher(answers: Vec<(&'static str, &'static str)>) -> LauncherClient {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        for (status, body) in answers {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut head = vec![0; 4096];
            assert!(stream.read(&mut head).await.unwrap() > 0);
            let answer = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
    });
    LauncherClient::new(address, None, 7)
}

/// Resolves a conflict about an instance that the launcher does not have, with this answer to the leader's epoch.
async fn conflict(epoch: (&'static str, &'static str)) -> ExecutionError {
    let id = PairingEngineId {
        mode: ProviderMode::Launcher,
        accelerators: ["GPU-1".into()].into(),
        fingerprint: EngineFingerprint(1),
    };
    let launcher = launcher(vec![NOT_FOUND, epoch]).await;
    resolve_conflict(&launcher, &id, Generation(1), REFUSED.to_owned()).await.unwrap_err()
}

#[tokio::test]
async fn a_public_launcher_that_lacks_an_accelerator_is_no_sign_of_a_newer_leader() {
    let refused = conflict(NOT_FOUND).await;
    assert!(refused.user_facing && !refused.superseded, "{refused:?}");
    assert!(refused.text.contains(REFUSED) && refused.text.contains("set gpuAccess"), "{refused:?}");
}

#[tokio::test]
async fn a_launcher_of_ours_refuses_what_a_newer_leader_has_ended() {
    for epoch in [("200 OK", "{}"), ("409 Conflict", r#"{"detail":"epoch 7 is stale"}"#)] {
        let refused = conflict(epoch).await;
        assert!(refused.superseded && !refused.user_facing, "{epoch:?}: {refused:?}");
    }
}
