//! The alerts for Prometheus, and the queries of the dashboards.

use std::fs;

use serde_json::{Value, json};

use crate::{prometheus::check_file, support::repo_path};

#[test]
fn prometheus_takes_the_alerts_and_they_fire_when_they_should() {
    for subject in ["operations", "saturation", "warmup"] {
        check_file(&["check", "rules"], &repo_path(&format!("charts/rouse/alerts/{subject}.yaml")));
        check_file(&["test", "rules"], &repo_path(&format!("charts/rouse/alerts/{subject}.test.yaml")));
    }
}

#[test]
fn prometheus_can_read_every_query_of_the_dashboards() {
    let mut rules = Vec::new();
    for subject in ["operations", "saturation", "warmup"] {
        let text = fs::read_to_string(repo_path(&format!("charts/rouse/dashboards/{subject}.json"))).unwrap();
        let dashboard: Value = serde_json::from_str(&text).unwrap();
        let panels = dashboard["panels"].as_array().unwrap();
        for target in panels.iter().flat_map(|panel| panel["targets"].as_array().unwrap()) {
            // Grafana puts an interval there. The other variables are inside strings.
            let query = target["expr"].as_str().unwrap().replace("$__rate_interval", "5m");
            rules.push(json!({"record": format!("{subject}_{}", rules.len()), "expr": query}));
        }
    }
    assert!(rules.len() > 20, "{rules:?}");
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("queries.yaml");
    let groups = json!({"groups": [{"name": "queries", "rules": rules}]});
    fs::write(&file, groups.to_string()).unwrap();
    check_file(&["check", "rules"], &file);
}
