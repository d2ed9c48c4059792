//! Who asked the API server for what: its own audit log, of service accounts alone, which is what gateways are.

use std::{fs, path::PathBuf};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::{ground::Ground, user::User};

/// One call that was answered. A watch counts when it begins.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Call {
    pub verb: String,
    /// With what is below it: `pods`, `inferencemodels/status`.
    pub resource: String,
    /// Of the object; empty for a list.
    pub name: String,
    /// The status of the answer.
    pub code: u64,
}

/// What the API server is told about it.
pub(crate) fn flags(ground: &Ground) -> Result<Vec<(&'static str, String)>> {
    let policy = ground.state().join("audit.json");
    let rules = json!({
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [{"level": "Metadata", "userGroups": ["system:serviceaccounts"]}, {"level": "None"}],
    });
    fs::write(&policy, rules.to_string()).with_context(|| policy.display().to_string())?;
    Ok(vec![
        ("audit-policy-file", policy.display().to_string()),
        ("audit-log-path", log(ground).display().to_string()),
        // A call is in it when it is answered.
        ("audit-log-mode", "blocking".to_owned()),
    ])
}

/// All calls of this user so far.
pub(crate) fn of(ground: &Ground, user: &User) -> Result<Vec<Call>> {
    let log = log(ground);
    let text = fs::read_to_string(&log).with_context(|| log.display().to_string())?;
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let mut calls = Vec::new();
    for line in whole.lines() {
        let event: Value = serde_json::from_str(line).context("a line of the audit log")?;
        if event["user"]["username"] == user.name() {
            calls.extend(call(&event));
        }
    }
    Ok(calls)
}

/// A watch is in the log twice, when it begins and when it ends; whatever else, once.
fn call(event: &Value) -> Option<Call> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let (verb, of) = (text(&event["verb"]), &event["objectRef"]);
    let counts = if verb == "watch" { "ResponseStarted" } else { "ResponseComplete" };
    let resource = match (text(&of["resource"]), text(&of["subresource"])) {
        (resource, below) if below.is_empty() => resource,
        (resource, below) => format!("{resource}/{below}"),
    };
    let code = event["responseStatus"]["code"].as_u64().unwrap_or_default();
    (event["stage"] == counts).then(|| Call { verb, resource, name: text(&of["name"]), code })
}

fn log(ground: &Ground) -> PathBuf {
    ground.base_logs().join("audit.log")
}
