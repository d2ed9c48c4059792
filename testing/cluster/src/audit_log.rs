//! Reads the API server's audit log: every call of a service account, which is what gateways use.

use std::{fs, path::PathBuf};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::{resources::ClusterResources, user::ClusterUser};

/// An answered call. A watch counts when it begins.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct AuditedCall {
    pub verb: String,
    /// Includes the subresource: `pod_subnet`, `inferencemodels/status`.
    pub resource: String,
    /// Name of the object; empty for a list.
    pub name: String,
    /// Status code of the response.
    pub code: u64,
}

/// Writes the audit policy and returns the API server's flags for it.
pub(crate) fn api_server_flags(resources: &ClusterResources) -> Result<Vec<(&'static str, String)>> {
    let policy = resources.state().join("audit.json");
    let rules = json!({
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [{"level": "Metadata", "userGroups": ["system:serviceaccounts"]}, {"level": "None"}],
    });
    fs::write(&policy, rules.to_string()).with_context(|| policy.display().to_string())?;
    Ok(vec![
        ("audit-policy-file", policy.display().to_string()),
        ("audit-log-path", log_path(resources).display().to_string()),
        // Blocking mode: a call is in the log once its response is sent.
        ("audit-log-mode", "blocking".to_owned()),
        // In MB. A log that is rotated would begin in the middle of a test: `make soak` writes more than the default 100.
        ("audit-log-maxsize", "100000".to_owned()),
    ])
}

/// Returns all calls of this user so far.
pub(crate) fn calls_of(resources: &ClusterResources, user: &ClusterUser) -> Result<Vec<AuditedCall>> {
    let log = log_path(resources);
    let text = fs::read_to_string(&log).with_context(|| log.display().to_string())?;
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    // Parsing all lines of the shared cluster would take seconds: only those of this user are parsed.
    let username = format!(r#""username":{}"#, Value::from(user.name()));
    ensure!(whole.is_empty() || whole.contains(r#""username":""#), "the audit log has another form");
    let mut calls = Vec::new();
    for line in whole.lines().filter(|line| line.contains(&username)) {
        let event: Value = serde_json::from_str(line).context("cannot parse a line of the audit log")?;
        if event["user"]["username"] == user.name() {
            calls.extend(parse_call(&event));
        }
    }
    Ok(calls)
}

/// Parses an event into a call. A watch is logged at its start and its end, and every other call once; only one event
/// of each counts.
fn parse_call(event: &Value) -> Option<AuditedCall> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let (verb, of) = (text(&event["verb"]), &event["objectRef"]);
    let counts = if verb == "watch" { "ResponseStarted" } else { "ResponseComplete" };
    let resource = match (text(&of["resource"]), text(&of["subresource"])) {
        (resource, below) if below.is_empty() => resource,
        (resource, below) => format!("{resource}/{below}"),
    };
    let code = event["responseStatus"]["code"].as_u64().unwrap_or_default();
    (event["stage"] == counts).then(|| AuditedCall { verb, resource, name: text(&of["name"]), code })
}

fn log_path(resources: &ClusterResources) -> PathBuf {
    resources.base_logs().join("audit.log")
}
