//! Reads the cause of a failed pull from what the kubelet shows of it.
//!
//! The kubelet passes the text of the container runtime on, and the runtime that of the registry. None of them has a
//! code for the cause, so texts of containerd, CRI-O and registries are recognised. What is not recognised is tried
//! again.

use super::WarmupCause;

/// Parts of lowercase messages, and the cause that each shows. The first that matches counts.
///
/// The order matters: containerd ends the message for a missing platform with "not found", registries answer "denied"
/// and "not found" together for a repository that an account may not see, and a token that cannot be fetched because
/// the network is down is reported as a failed authorization.
static PATTERNS: [(&str, WarmupCause); 48] = [
    ("no match for platform", WarmupCause::WrongPlatform),
    ("no image found in manifest list", WarmupCause::WrongPlatform),
    ("no image found in image index", WarmupCause::WrongPlatform),
    ("exec format error", WarmupCause::WrongPlatform),
    ("no space left on device", WarmupCause::NoSpace),
    ("disk quota exceeded", WarmupCause::NoSpace),
    ("toomanyrequests", WarmupCause::RateLimited),
    ("too many requests", WarmupCause::RateLimited),
    ("pull qps exceeded", WarmupCause::RateLimited),
    ("rate limit", WarmupCause::RateLimited),
    ("dial tcp", WarmupCause::Network),
    ("i/o timeout", WarmupCause::Network),
    ("no such host", WarmupCause::Network),
    ("server misbehaving", WarmupCause::Network),
    ("connection refused", WarmupCause::Network),
    ("connection reset", WarmupCause::Network),
    ("broken pipe", WarmupCause::Network),
    ("no route to host", WarmupCause::Network),
    ("network is unreachable", WarmupCause::Network),
    ("tls handshake timeout", WarmupCause::Network),
    ("tls: ", WarmupCause::Network),
    ("x509:", WarmupCause::Network),
    ("http response to https client", WarmupCause::Network),
    ("unexpected eof", WarmupCause::Network),
    ("context deadline exceeded", WarmupCause::Network),
    ("context canceled", WarmupCause::Network),
    ("500 internal server error", WarmupCause::Network),
    ("502 bad gateway", WarmupCause::Network),
    ("503 service unavailable", WarmupCause::Network),
    ("504 gateway timeout", WarmupCause::Network),
    ("pull access denied", WarmupCause::Auth),
    ("requested access to the resource is denied", WarmupCause::Auth),
    ("access to the requested resource is not authorized", WarmupCause::Auth),
    ("insufficient_scope", WarmupCause::Auth),
    ("unauthorized", WarmupCause::Auth),
    ("authentication required", WarmupCause::Auth),
    ("authorization failed", WarmupCause::Auth),
    ("no basic auth credentials", WarmupCause::Auth),
    ("invalid username/password", WarmupCause::Auth),
    ("403 forbidden", WarmupCause::Auth),
    ("invalid reference format", WarmupCause::InvalidImage),
    ("couldn't parse image", WarmupCause::InvalidImage),
    ("did not resolve to an alias", WarmupCause::InvalidImage),
    ("manifest unknown", WarmupCause::NotFound),
    ("name unknown", WarmupCause::NotFound),
    ("repository does not exist", WarmupCause::NotFound),
    ("code = notfound", WarmupCause::NotFound),
    (": not found", WarmupCause::NotFound),
];

/// Returns why a container waits for its image, from the reason and the message of its state.
///
/// `None` if the container waits for something else.
#[must_use]
pub fn classify_pull(reason: &str, message: &str) -> Option<WarmupCause> {
    match reason {
        "InvalidImageName" => Some(WarmupCause::InvalidImage),
        // The Pod forbids pulls, and the node does not have the image.
        "ErrImageNeverPull" => Some(WarmupCause::NotFound),
        "RegistryUnavailable" => Some(WarmupCause::Network),
        "ErrImagePull" | "ImagePullBackOff" | "ImageInspectError" | "SignatureValidationFailed" => {
            Some(of_message(reason, message))
        }
        _ => None,
    }
}

fn of_message(reason: &str, message: &str) -> WarmupCause {
    let lowercase = message.to_lowercase();
    let known = PATTERNS.iter().find(|(part, _)| lowercase.contains(part));
    match known {
        Some((_, cause)) => cause.clone(),
        None if message.trim().is_empty() => WarmupCause::unknown(reason),
        None => WarmupCause::unknown(message),
    }
}
