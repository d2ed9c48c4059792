//! What came back of a call to the API server, for people.

/// The server's own sentence, where it gave one.
pub(super) fn api_error_message(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => format!("the API server says: {}", status.message),
        other => format!("the API server could not be asked: {other}"),
    }
}
