//! One result of an examination.

use serde::Serialize;

use crate::cli::show::replace_control_chars;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum FindingLevel {
    Ok,
    /// Something will not work as intended, or not always.
    Warning,
    /// The gateway or a model cannot run.
    Error,
}

/// What was found, why it matters, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct DoctorFinding {
    pub(super) level: FindingLevel,
    /// The part of the machine or of the configuration.
    pub(super) area: &'static str,
    pub(super) what: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) why: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) advice: Option<String>,
}

impl DoctorFinding {
    pub(super) fn ok(area: &'static str, what: impl Into<String>) -> Self {
        Self { level: FindingLevel::Ok, area, what: what.into(), why: None, advice: None }
    }

    pub(super) fn warning(
        area: &'static str,
        what: impl Into<String>,
        why: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        let (why, advice) = (Some(why.into()), Some(advice.into()));
        Self { level: FindingLevel::Warning, area, what: what.into(), why, advice }
    }

    pub(super) fn error(
        area: &'static str,
        what: impl Into<String>,
        why: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self { level: FindingLevel::Error, ..Self::warning(area, what, why, advice) }
    }

    /// Renders the finding for people, in up to three lines.
    pub(super) fn render(&self, colours: bool) -> String {
        let (level, colour) = match self.level {
            FindingLevel::Ok => ("ok", "\x1b[32m"),
            FindingLevel::Warning => ("warning", "\x1b[33m"),
            FindingLevel::Error => ("error", "\x1b[31m"),
        };
        let level = format!("{level:<8}");
        let level = if colours { format!("{colour}{level}\x1b[0m") } else { level };
        let mut text = format!("{level} {:<13} {}\n", self.area, replace_control_chars(&self.what));
        for (label, line) in [("why", &self.why), ("do", &self.advice)] {
            if let Some(line) = line {
                text.push_str(&format!("{:22} {label}: {}\n", "", replace_control_chars(line)));
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_has_its_reason_and_advice_below_and_colours_only_where_they_are_wanted() {
        let finding = DoctorFinding::error("ports", "a port\x1b[2J is taken", "no start", "stop it");
        let expected = "error    ports         a port\u{fffd}[2J is taken\n                       why: no start\n                       do: stop it\n";
        assert_eq!(finding.render(false), expected);
        assert!(finding.render(true).starts_with("\x1b[31merror   \x1b[0m ports"));
        assert_eq!(DoctorFinding::ok("driver", "fine").render(false), "ok       driver        fine\n");
        let json = serde_json::to_string(&DoctorFinding::ok("driver", "fine")).unwrap();
        assert_eq!(json, r#"{"level":"ok","area":"driver","what":"fine"}"#);
    }
}
