//! Renders a failed API server call for people.

/// Renders the API server's own message if it sent one, else the transport error.
pub(super) fn api_error_message(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => format!("the API server returned an error: {}", status.message),
        other => format!("the call to the API server failed: {other}"),
    }
}
