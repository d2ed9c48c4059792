//! Names that an API server accepts.

const MAX_SUBDOMAIN_CHARS: usize = 253;
const MAX_LABEL_CHARS: usize = 63;

/// Whether it can be the name of an object, such as a node or a Secret.
pub(super) fn is_dns_subdomain(name: &str) -> bool {
    let is_alphanumeric = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit();
    let is_part = |part: &str| {
        part.starts_with(is_alphanumeric)
            && part.ends_with(is_alphanumeric)
            && part.chars().all(|letter| letter == '-' || is_alphanumeric(letter))
    };
    name.len() <= MAX_SUBDOMAIN_CHARS && name.split('.').all(is_part)
}

/// Whether it can be the value of a label, which may be empty.
pub(super) fn is_label_value(value: &str) -> bool {
    value.is_empty() || is_label_name(value)
}

/// Whether it can be the key of a label: `name`, or `domain/name`.
pub(super) fn is_label_key(key: &str) -> bool {
    match key.split_once('/') {
        Some((domain, name)) => is_dns_subdomain(domain) && is_label_name(name),
        None => is_label_name(key),
    }
}

fn is_label_name(name: &str) -> bool {
    let is_alphanumeric = |letter: char| letter.is_ascii_alphanumeric();
    name.len() <= MAX_LABEL_CHARS
        && name.starts_with(is_alphanumeric)
        && name.ends_with(is_alphanumeric)
        && name.chars().all(|letter| matches!(letter, '-' | '_' | '.') || is_alphanumeric(letter))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_an_api_server_accepts() {
        for name in ["a", "gpu-node-1.example.com", "10.0.0.1", &"x".repeat(253)] {
            assert!(is_dns_subdomain(name), "{name}");
        }
        for name in ["", "-a", "a-", "a..b", ".a", "a.", "A", "a_b", "a/b", "größe", &"x".repeat(254)] {
            assert!(!is_dns_subdomain(name), "{name}");
        }
        for value in ["", "a", "NVIDIA-H200", "a_b.c", &"x".repeat(63)] {
            assert!(is_label_value(value), "{value}");
        }
        for value in ["-a", "a.", "a/b", "two words", &"x".repeat(64)] {
            assert!(!is_label_value(value), "{value}");
        }
        for key in ["a", "nvidia.com/gpu.product", "A_b", &format!("{}/a", "x".repeat(253))] {
            assert!(is_label_key(key), "{key}");
        }
        for key in ["", "/a", "a/", "a/b/c", "A.com/b", &format!("{}/a", "x".repeat(254))] {
            assert!(!is_label_key(key), "{key}");
        }
    }
}
