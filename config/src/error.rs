//! All errors of a file at once.

use std::fmt;

use serde_saphyr::Location;

use super::yaml_hints;

/// Line and column, from 1; line 0 means the file as a whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct SourceLocation {
    pub line: u64,
    pub column: u64,
}

/// One error or doubt, with its location.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConfigProblem {
    pub at: SourceLocation,
    pub text: String,
}

/// All errors of one file, in the order of the file.
///
/// `Display` writes a line `FILE:LINE:COLUMN: text` for each.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", join_problems(.origin, .problems))]
pub struct ConfigErrors {
    pub origin: String,
    pub problems: Vec<ConfigProblem>,
}

impl ConfigErrors {
    pub fn new(origin: &str, mut problems: Vec<ConfigProblem>) -> Self {
        problems.sort();
        problems.dedup();
        Self { origin: origin.to_owned(), problems }
    }
}

impl ConfigProblem {
    pub fn new(at: SourceLocation, text: impl Into<String>) -> Self {
        Self { at, text: text.into() }
    }

    /// Converts a parser error. `source` is the parsed text.
    pub(super) fn from_yaml(error: &serde_saphyr::Error, source: &str) -> Self {
        let at = error.location().map(SourceLocation::from).unwrap_or_default();
        let text = match error.without_snippet() {
            serde_saphyr::Error::DuplicateMappingKey { key: Some(key), .. } => {
                format!("the key '{key}' is given twice")
            }
            serde_saphyr::Error::MultipleDocuments { .. } => {
                "the file has a second document (---): keep only one".to_owned()
            }
            other => {
                let text = other.to_string();
                // The message already starts with the location.
                let words = text.rsplit_once(" at line ").map_or(text.as_str(), |(what, _)| what);
                if let Some((at, text)) = yaml_hints::explain(source, at, words) {
                    return Self { at, text };
                }
                words.to_owned()
            }
        };
        Self { at, text }
    }

    /// Formats the problem for a person: `FILE:LINE:COLUMN: text`.
    #[must_use]
    pub fn display(&self, origin: &str) -> String {
        let SourceLocation { line, column } = self.at;
        if line == 0 {
            format!("{origin}: {}", self.text)
        } else {
            format!("{origin}:{line}:{column}: {}", self.text)
        }
    }
}

impl From<Location> for SourceLocation {
    fn from(location: Location) -> Self {
        Self { line: location.line(), column: location.column() }
    }
}

impl fmt::Display for SourceLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.line, self.column)
    }
}

fn join_problems(origin: &str, problems: &[ConfigProblem]) -> String {
    let lines: Vec<_> = problems.iter().map(|problem| problem.display(origin)).collect();
    lines.join("\n")
}
