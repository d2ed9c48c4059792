//! The dashboards and the alerts in `charts/rouse`: they can be read, and ask for metrics and labels that exist.
//! `promtool` checks the alerts themselves and the dashboards' queries, in the cluster's tests.

mod form;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use serde_json::Value;

use crate::support::read;

/// The subjects: the name of the files and of the page, the section of the page about metrics whose gauges a dashboard
/// must show, the number of alerts.
const SUBJECTS: [(&str, Option<&str>, usize); 3] =
    [("operations", None, 14), ("saturation", Some("Saturation"), 4), ("warmup", Some("Warmup"), 3)];

fn page(path: &str) -> String {
    read(&Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join(path))
}

/// The labels of each metric on the page about metrics.
fn documented() -> BTreeMap<String, BTreeSet<String>> {
    let page = page("docs/metrics.md");
    let row = |line: &str| {
        let mut cells = line.strip_prefix("| `")?.split('|').map(|cell| cell.trim().trim_matches('`'));
        let (name, _, labels) = (cells.next()?, cells.next()?, cells.next()?);
        let labels = labels.split(", ").map(|label| label.trim_matches('`').to_owned());
        Some((name.to_owned(), labels.collect()))
    };
    page.lines().filter_map(row).collect()
}

/// The metrics in an expression: its words with one of our prefixes.
fn metrics(expression: &str) -> BTreeSet<&str> {
    let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != ':');
    let is_ours =
        |word: &&str| ["rouse_", "wva_", "inference_", "fma_"].iter().any(|own| word.starts_with(own));
    words.filter(is_ours).collect()
}

/// The labels by which an expression groups: those in `by (…)` and `on (…)`.
fn grouped_by(expression: &str) -> BTreeSet<&str> {
    let groups = ["by (", "on ("].into_iter().flat_map(|word| expression.split(word).skip(1));
    let lists = groups.filter_map(|rest| rest.split(')').next());
    lists.flat_map(|list| list.split(',').map(str::trim)).collect()
}

/// Asserts that the expression's metrics exist, and that they have the labels by which it groups.
fn check(expression: &str, at: &str) {
    let documented = documented();
    let metrics = metrics(expression);
    assert!(!metrics.is_empty(), "{at} asks for no metric of ours: {expression}");
    let mut labels = BTreeSet::new();
    for metric in metrics {
        let family = metric.strip_suffix("_bucket").unwrap_or(metric);
        let own = documented.get(family).unwrap_or_else(|| panic!("{at}: there is no metric {family}"));
        labels.extend(own.iter().map(String::as_str));
        labels.extend((family != metric).then_some("le"));
    }
    for label in grouped_by(expression) {
        assert!(labels.contains(label), "{at}: no metric in it has the label {label}: {expression}");
    }
}

fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object.pointer(pointer).and_then(Value::as_str).unwrap_or_else(|| panic!("no {pointer} in {object}"))
}

#[test]
fn each_dashboard_asks_for_metrics_that_exist_and_shows_every_gauge_of_its_subject() {
    let metrics_page = page("docs/metrics.md");
    let mut uids = BTreeSet::new();
    for (subject, section, _) in SUBJECTS {
        let dashboard: Value =
            serde_json::from_str(&page(&format!("charts/rouse/dashboards/{subject}.json"))).unwrap();
        assert!(uids.insert(text(&dashboard, "/uid").to_owned()), "{subject}");
        let panels = dashboard["panels"].as_array().unwrap();
        let (mut ids, mut shown) = (BTreeSet::new(), BTreeSet::new());
        for panel in panels {
            let title = text(panel, "/title");
            assert!(ids.insert(panel["id"].as_u64().unwrap()), "{title}: another panel has its id");
            assert!(!text(panel, "/description").is_empty(), "{title}");
            for target in panel["targets"].as_array().unwrap() {
                let expression = text(target, "/expr");
                check(expression, title);
                let families = metrics(expression).into_iter();
                shown.extend(families.map(|name| name.strip_suffix("_bucket").unwrap_or(name).to_owned()));
            }
        }
        for variable in dashboard["templating"]["list"].as_array().unwrap() {
            if variable["type"] == "query" {
                check(text(variable, "/query/query"), text(variable, "/name"));
            }
        }
        let Some(section) = section else { continue };
        let section = metrics_page.split_once(&format!("\n## {section}\n")).unwrap().1;
        let section = section.split("\n## ").next().unwrap();
        let listed = section.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
        // A ratio follows from two others, and the public names repeat ours.
        let expected: BTreeSet<&str> =
            listed.filter(|name| !name.starts_with("wva_") && *name != "rouse_desired_ratio").collect();
        let missing: Vec<&str> = expected.into_iter().filter(|name| !shown.contains(*name)).collect();
        assert_eq!(missing, [""; 0], "{subject}");
    }
}

#[test]
fn each_alert_asks_for_metrics_that_exist_and_says_what_is_wrong() {
    for (subject, _, alerts) in SUBJECTS {
        let rules: Value =
            serde_saphyr::from_str(&page(&format!("charts/rouse/alerts/{subject}.yaml"))).unwrap();
        let groups = rules["groups"].as_array().unwrap().iter();
        let rules: Vec<&Value> = groups.flat_map(|group| group["rules"].as_array().unwrap()).collect();
        assert!(rules.len() >= alerts, "{rules:?}");
        let shown = page(&format!("docs/{subject}.md"));
        for rule in rules {
            let name = text(rule, "/alert");
            check(text(rule, "/expr"), name);
            for field in ["/labels/severity", "/annotations/summary", "/annotations/description"] {
                assert!(!text(rule, field).is_empty(), "{name}: {field}");
            }
            let counts = text(rule, "/expr").contains("increase(");
            assert!(counts || !text(rule, "/for").is_empty(), "{name} fires at once, by one reading");
            assert!(
                shown.contains(&format!("| {name} |")),
                "docs/{subject}.md does not say what to do about {name}"
            );
        }
    }
}

/// The commands for another autoscaler ask for metrics that exist, too.
#[test]
fn the_page_about_saturation_names_metrics_that_exist() {
    let (page, documented) = (page("docs/saturation.md"), documented());
    let named = metrics(&page);
    assert!(named.contains("wva_desired_replicas") && named.contains("rouse_desired_replicas"), "{named:?}");
    for metric in named {
        assert!(documented.contains_key(metric), "there is no metric {metric}");
    }
}
