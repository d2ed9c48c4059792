//! The alerts for Prometheus.

use crate::{prometheus::check_file, support::repo_path};

#[test]
fn prometheus_takes_the_alerts_and_they_fire_when_they_should() {
    for subject in ["operations", "saturation", "warmup"] {
        check_file(&["check", "rules"], &repo_path(&format!("charts/rouse/alerts/{subject}.yaml")));
        check_file(&["test", "rules"], &repo_path(&format!("charts/rouse/alerts/{subject}.test.yaml")));
    }
}
