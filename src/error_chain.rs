//! Renders an error with its causes, for people.

use std::error::Error;

/// Renders the error and its causes in one line, each of them once.
///
/// Many errors already include their cause in their own text, so a plain join would repeat it: "cannot listen on
/// 192.0.2.1:80: Permission denied: Permission denied".
#[must_use]
pub fn one_line(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let message = cause.to_string();
        if !text.contains(&message) {
            text = format!("{text}: {message}");
        }
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum ChainTestError {
        #[error("cannot listen on {address}: {source}")]
        Inline { address: &'static str, source: io::Error },
        #[error("cannot start")]
        SourceOnly(#[source] Box<Self>),
    }

    #[test]
    fn each_cause_is_told_once_whoever_names_it() {
        let denied = || io::Error::from(io::ErrorKind::PermissionDenied);
        let says = ChainTestError::Inline { address: "a:1", source: denied() };
        assert_eq!(one_line(&says), format!("cannot listen on a:1: {}", denied()));
        let keeps = ChainTestError::SourceOnly(Box::new(says));
        assert_eq!(one_line(&keeps), format!("cannot start: cannot listen on a:1: {}", denied()));
        assert_eq!(one_line(&denied()), denied().to_string());
    }
}
