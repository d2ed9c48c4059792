//! Calls over Unix sockets: connect, call, and a deadline for both.
//!
//! Each call has its own connection. Calls are seconds apart, and a kept connection would end with the server that it
//! was made to, so the first call after a restart of the kubelet would fail.

use std::{path::Path, time::Duration};

use tonic::{
    Response, Status,
    transport::{Channel, Endpoint},
};

use crate::Error;

/// Makes one call on this socket.
pub(crate) async fn call<T, F>(
    socket: &Path,
    method: &'static str,
    limit: Duration,
    rpc: impl FnOnce(Channel) -> F,
) -> Result<T, Error>
where
    F: Future<Output = Result<Response<T>, Status>>,
{
    let exchange = async {
        let channel = connect(socket).await?;
        let failed = |status| Error::Call { method, socket: socket.to_owned(), status: Box::new(status) };
        rpc(channel).await.map(Response::into_inner).map_err(failed)
    };
    let expired = |_| Error::Deadline { method, socket: socket.to_owned(), limit };
    tokio::time::timeout(limit, exchange).await.map_err(expired)?
}

async fn connect(socket: &Path) -> Result<Channel, Error> {
    // A failed look at the path is no proof that it is missing, and the connection's own error says more.
    // Not on the pool of blocking threads: look-ups of names that hang may fill it.
    if !socket.try_exists().unwrap_or(true) {
        return Err(Error::NoSocket(socket.to_owned()));
    }
    let path = socket.to_str().ok_or_else(|| Error::NotUtf8(socket.to_owned()))?;
    let failed = |source| Error::Connect { socket: socket.to_owned(), source };
    Endpoint::from_shared(format!("unix://{path}")).map_err(failed)?.connect().await.map_err(failed)
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixListener;

    use super::*;
    use crate::generated::pod_resources::{
        ListPodResourcesRequest, pod_resources_lister_client::PodResourcesListerClient,
    };

    async fn list(socket: &Path, limit: Duration) -> Error {
        let list = |channel: Channel| async move {
            PodResourcesListerClient::new(channel).list(ListPodResourcesRequest {}).await
        };
        call(socket, "List", limit, list).await.expect_err("no server answers")
    }

    #[tokio::test]
    async fn a_server_that_does_not_answer_ends_the_call_at_its_deadline() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("kubelet.sock");
        let _silent = UnixListener::bind(&socket).unwrap();
        let error = list(&socket, Duration::from_millis(20)).await;
        assert!(matches!(error, Error::Deadline { method: "List", .. }), "{error}");
    }

    #[tokio::test]
    async fn a_missing_socket_and_one_without_a_server_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("kubelet.sock");
        let limit = Duration::from_secs(60);
        assert!(matches!(list(&socket, limit).await, Error::NoSocket(path) if path == socket));
        drop(UnixListener::bind(&socket).unwrap());
        let error = list(&socket, limit).await;
        assert!(matches!(error, Error::Connect { .. }), "{error}");
    }
}
