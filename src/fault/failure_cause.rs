//! Why an engine failed: the class, its text for people, and the stored form.
//!
//! Apart from the faults, because engines, journals and statuses carry a cause without any request.

use serde::{
    Deserialize, Serialize,
    de::{IntoDeserializer as _, value},
};

/// Why an engine did not become or stay usable: a class that clients see. Details are in the engine's log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureCause {
    OutOfMemory,
    PortTaken,
    /// The command does not exist, or it is no program.
    CommandNotFound,
    /// The gateway could not create the process: the machine has no process, descriptor or memory left for it.
    NotLaunched,
    /// The command exists, and the gateway's user may not run it.
    PermissionDenied,
    /// The exit code; -1 if it is unknown.
    Exited(i32),
    /// The signal that ended the process.
    Killed(i32),
    Timeout,
    /// The request's wait ended; nothing failed. Clients see the class of [`Self::Timeout`].
    Deadline,
    /// The engine answers, but not as one that can serve.
    Unhealthy,
    /// The engine makes no progress, and its health check fails.
    Hung,
    /// The engine serves another model than the configured one.
    WrongModel {
        serves: Box<str>,
        /// The name in the configuration. Journals of earlier versions lack it.
        #[serde(default)]
        configured: Box<str>,
    },
    /// The engine listens on every interface, and the configuration does not allow that.
    PublicListener,
    /// The engine refused the call (sleep or wake).
    Refused,
    /// The engine accepted the order to sleep, and reported for [`crate::engine::SLEEP_DENIAL_TIMEOUT`] that it is
    /// awake.
    #[serde(rename = "stays_awake")]
    SleepDenied,
    /// The engine was stopped on purpose; nothing failed.
    Stopped,
    Unreachable,
    /// The connection ended before the answer was complete, or the data was no longer HTTP.
    #[serde(rename = "broke_off")]
    ConnectionBroken,
    AcceleratorLost,
    /// No node accepts the engine's Pod.
    Unschedulable,
    /// The engine's Pod got accelerators that have no room for it.
    #[serde(rename = "misplaced")]
    InsufficientRoom,
    /// The Pod cannot run: the API server refuses the template, or an image is not available.
    #[serde(rename = "unrunnable")]
    PodNotRunnable,
}

impl FailureCause {
    /// Whether the same start would fail again, so that only a person can fix it.
    #[must_use]
    pub const fn is_permanent(&self) -> bool {
        matches!(
            self,
            Self::CommandNotFound
                | Self::PermissionDenied
                | Self::PodNotRunnable
                | Self::WrongModel { .. }
                | Self::PublicListener
        )
    }

    /// The class for programs to compare; the name that an engine serves is no part of it.
    #[must_use]
    pub fn class(&self) -> String {
        match self {
            Self::WrongModel { .. } => "wrong_model".to_owned(),
            cause => cause.to_string(),
        }
    }

    /// Text for people, with the class, under which the operators' page explains it.
    #[must_use]
    pub fn describe(&self) -> String {
        let description = match self {
            Self::OutOfMemory => "not enough accelerator memory",
            Self::PortTaken => "the engine's port was already in use",
            Self::CommandNotFound => "the engine's command does not exist",
            Self::PermissionDenied => "no permission to run the engine's command",
            Self::NotLaunched => "the machine has no process, file descriptor or memory left for the engine",
            // A process reports its exit to its parent, which was an earlier gateway.
            Self::Exited(-1) => "the engine ended with an unknown status",
            Self::Exited(code) => return format!("exit status {code} ({self})"),
            Self::Killed(signal) => return format!("killed by signal {signal} ({self})"),
            Self::Timeout => "the engine exceeded its deadline",
            Self::Deadline => "the request's wait expired",
            Self::Unhealthy => "the engine answers, but not like an engine that can serve",
            Self::Hung => "the engine makes no progress, and its health check fails",
            Self::WrongModel { serves, configured } if configured.is_empty() => {
                return format!("the engine serves '{serves}', not the configured name ({})", self.class());
            }
            Self::WrongModel { serves, configured } => {
                let class = self.class();
                return format!(
                    "the engine serves '{serves}', the configuration says '{configured}' ({class})"
                );
            }
            Self::PublicListener => "the engine listens on every interface",
            Self::Refused => "the engine refused the call",
            Self::SleepDenied => "the engine accepted the sleep call, but reports that it is awake",
            Self::Stopped => "the engine was stopped on purpose",
            Self::Unreachable => "the engine cannot be reached",
            Self::ConnectionBroken => "the connection broke in the middle of the answer",
            Self::AcceleratorLost => "the engine's accelerator was lost",
            Self::Unschedulable => "no node accepts the engine's Pod",
            Self::InsufficientRoom => "the engine's Pod was placed on accelerators without room",
            Self::PodNotRunnable => "the engine's Pod cannot run",
        };
        format!("{description} ({self})")
    }
}

impl std::fmt::Display for FailureCause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::OutOfMemory => f.write_str("out_of_memory"),
            Self::PortTaken => f.write_str("port_taken"),
            Self::CommandNotFound => f.write_str("command_not_found"),
            Self::NotLaunched => f.write_str("not_launched"),
            Self::PermissionDenied => f.write_str("permission_denied"),
            Self::Exited(code) => write!(f, "exited:{code}"),
            Self::Killed(signal) => write!(f, "killed:{signal}"),
            Self::Timeout | Self::Deadline => f.write_str("timeout"),
            Self::Unhealthy => f.write_str("unhealthy"),
            Self::Hung => f.write_str("hung"),
            Self::WrongModel { serves, configured } if configured.is_empty() => {
                write!(f, "wrong_model: the engine serves '{serves}'")
            }
            Self::WrongModel { serves, configured } => {
                write!(f, "wrong_model: the engine serves '{serves}', the configuration says '{configured}'")
            }
            Self::PublicListener => f.write_str("public_listener"),
            Self::Refused => f.write_str("refused"),
            Self::SleepDenied => f.write_str("stays_awake"),
            Self::Stopped => f.write_str("stopped"),
            Self::Unreachable => f.write_str("unreachable"),
            Self::ConnectionBroken => f.write_str("broke_off"),
            Self::AcceleratorLost => f.write_str("accelerator_lost"),
            Self::Unschedulable => f.write_str("unschedulable"),
            Self::InsufficientRoom => f.write_str("misplaced"),
            Self::PodNotRunnable => f.write_str("unrunnable"),
        }
    }
}

impl std::str::FromStr for FailureCause {
    type Err = value::Error;

    /// Parses what `Display` writes.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let number = |class: &str| text.strip_prefix(class).and_then(|number| number.parse().ok());
        if let Some(code) = number("exited:") {
            return Ok(Self::Exited(code));
        }
        if let Some(signal) = number("killed:") {
            return Ok(Self::Killed(signal));
        }
        let names =
            text.strip_prefix("wrong_model: the engine serves '").and_then(|rest| rest.strip_suffix('\''));
        match names.map(|names| names.split_once("', the configuration says '").unwrap_or((names, ""))) {
            Some((serves, configured)) => {
                Ok(Self::WrongModel { serves: serves.into(), configured: configured.into() })
            }
            None => Self::deserialize(text.into_deserializer()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_read_as_it_is_written() {
        let wrong = |configured: &str| FailureCause::WrongModel {
            serves: "it's".into(),
            configured: configured.into(),
        };
        let plain = [
            FailureCause::OutOfMemory,
            FailureCause::CommandNotFound,
            FailureCause::PermissionDenied,
            FailureCause::NotLaunched,
            FailureCause::ConnectionBroken,
            FailureCause::Timeout,
            FailureCause::SleepDenied,
            FailureCause::PodNotRunnable,
        ];
        for cause in plain.into_iter().chain([
            FailureCause::Exited(-3),
            FailureCause::Killed(9),
            wrong(""),
            wrong("its name"),
        ]) {
            assert_eq!(cause.to_string().parse(), Ok(cause));
        }
        assert!("exited:often".parse::<FailureCause>().is_err() && "".parse::<FailureCause>().is_err());
    }
}
