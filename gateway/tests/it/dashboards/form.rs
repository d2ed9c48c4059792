//! The dashboards have the form that Grafana imports: no field is unknown, and what they refer to is declared.
//!
//! Grafana drops a field that it does not know, and shows a panel without data where a variable or a unit is misspelt.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::{SUBJECTS, grouped_by, metrics, page, text};

/// The version of the form, as Grafana 11 writes it. Later versions of Grafana convert it when they import it.
const SCHEMA_VERSION: u64 = 39;

/// The fields of a dashboard in Grafana's published schema.
const DASHBOARD_FIELDS: &[&str] = &[
    "annotations",
    "description",
    "editable",
    "fiscalYearStartMonth",
    "graphTooltip",
    "links",
    "liveNow",
    "panels",
    "refresh",
    "schemaVersion",
    "tags",
    "templating",
    "time",
    "timepicker",
    "timezone",
    "title",
    "uid",
    "version",
    "weekStart",
];
/// The fields of a panel in that schema.
const PANEL_FIELDS: &[&str] = &[
    "datasource",
    "description",
    "fieldConfig",
    "gridPos",
    "id",
    "interval",
    "links",
    "maxDataPoints",
    "options",
    "pluginVersion",
    "targets",
    "title",
    "transformations",
    "transparent",
    "type",
];
/// The fields of `fieldConfig.defaults` in that schema.
const DEFAULTS_FIELDS: &[&str] = &[
    "color",
    "custom",
    "decimals",
    "displayName",
    "links",
    "mappings",
    "max",
    "min",
    "noValue",
    "thresholds",
    "unit",
];
/// Units that Grafana knows.
const UNITS: [&str; 9] = ["short", "none", "percent", "percentunit", "bytes", "s", "ms", "reqps", "ops"];
/// Width of a dashboard, in cells.
const GRID_WIDTH: u64 = 24;

/// The only data source: the one that the reader chooses.
fn source() -> Value {
    json!({"type": "prometheus", "uid": "${datasource}"})
}

fn assert_known(object: &Value, fields: &[&str], at: &str) {
    let keys = object.as_object().unwrap().keys().map(String::as_str);
    let unknown: Vec<&str> = keys.filter(|key| !fields.contains(key)).collect();
    assert_eq!(unknown, [""; 0], "{at}");
}

/// The variables that a text uses, but for Grafana's own.
fn variables(text: &str) -> BTreeSet<&str> {
    let names = text.split('$').skip(1).map(|rest| {
        let rest = rest.trim_start_matches('{');
        rest.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap_or_default()
    });
    names.filter(|name| !name.starts_with("__")).collect()
}

/// The labels in a legend.
fn labels_in(legend: &str) -> impl Iterator<Item = &str> {
    legend.split("{{").skip(1).filter_map(|rest| rest.split("}}").next())
}

/// The unit in a metric's name, if it has one.
fn unit_of(metric: &str) -> Option<&'static str> {
    let name = metric.strip_suffix("_bucket").unwrap_or(metric);
    let units = [("_seconds", "s"), ("_bytes", "bytes"), ("_ratio", "percentunit")];
    units.into_iter().find(|(end, _)| name.ends_with(*end)).map(|(_, unit)| unit)
}

/// Returns the names of a dashboard's variables. Each may use only those before it.
fn declared_variables(dashboard: &Value) -> BTreeSet<&str> {
    let mut declared = BTreeSet::new();
    for variable in dashboard["templating"]["list"].as_array().unwrap() {
        let name = text(variable, "/name");
        match text(variable, "/type") {
            "datasource" => assert_eq!(text(variable, "/query"), "prometheus", "{name}"),
            "query" => {
                assert_eq!(variable["datasource"], source(), "{name}");
                assert!(declared.contains("datasource"), "{name} comes before the data source");
                let query = text(variable, "/query/query");
                assert!(variables(query).is_subset(&declared), "{name}: {query}");
            }
            other => panic!("{name} is a variable of the type {other}"),
        }
        assert!(declared.insert(name), "{name} is declared twice");
    }
    declared
}

fn check_panel(panel: &Value, declared: &BTreeSet<&str>) {
    let title = text(panel, "/title");
    assert_known(panel, PANEL_FIELDS, title);
    assert!(["timeseries", "stat"].contains(&text(panel, "/type")), "{title}: {}", panel["type"]);
    assert_eq!(panel["datasource"], source(), "{title}");
    let defaults = &panel["fieldConfig"]["defaults"];
    assert_known(defaults, DEFAULTS_FIELDS, title);
    let unit = text(defaults, "/unit");
    assert!(UNITS.contains(&unit), "{title}: Grafana has no unit {unit}");
    let mut ids = BTreeSet::new();
    for target in panel["targets"].as_array().unwrap() {
        let (id, expression) = (text(target, "/refId"), text(target, "/expr"));
        assert!(ids.insert(id), "{title}: two queries have the id {id}");
        assert_eq!(target["datasource"], source(), "{title}");
        assert!(variables(expression).is_subset(declared), "{title}: {expression}");
        for label in labels_in(text(target, "/legendFormat")) {
            assert!(grouped_by(expression).contains(label), "{title}: no series of {expression} has {label}");
        }
        for metric in metrics(expression) {
            let expected = unit_of(metric);
            assert!(expected.is_none_or(|expected| expected == unit), "{title}: {metric} in {unit}");
        }
    }
}

/// The cells that a panel covers, each by its column and row.
fn cells(panel: &Value) -> impl Iterator<Item = (u64, u64)> {
    let [x, y, width, height] = ["x", "y", "w", "h"].map(|field| panel["gridPos"][field].as_u64().unwrap());
    assert!(width > 0 && height > 0 && x + width <= GRID_WIDTH, "{}", panel["gridPos"]);
    (x..x + width).flat_map(move |column| (y..y + height).map(move |row| (column, row)))
}

#[test]
fn each_dashboard_has_the_form_that_grafana_imports() {
    let mut titles = BTreeSet::new();
    for (subject, _, _) in SUBJECTS {
        let dashboard: Value =
            serde_json::from_str(&page(&format!("charts/rouse/dashboards/{subject}.json"))).unwrap();
        assert_known(&dashboard, DASHBOARD_FIELDS, subject);
        assert_eq!(dashboard["schemaVersion"], SCHEMA_VERSION, "{subject}");
        assert!(titles.insert(text(&dashboard, "/title").to_owned()), "{subject}: another has its title");
        let declared = declared_variables(&dashboard);
        let mut covered = BTreeSet::new();
        for panel in dashboard["panels"].as_array().unwrap() {
            check_panel(panel, &declared);
            for cell in cells(panel) {
                assert!(covered.insert(cell), "{} covers another panel", text(panel, "/title"));
            }
        }
    }
}

#[test]
fn a_query_with_a_misspelt_variable_is_found() {
    assert_eq!(
        variables("a{m=~\"$model\", n=~\"${names}\"}[$__rate_interval]"),
        BTreeSet::from(["model", "names"])
    );
    assert!(variables("sum(a)").is_empty());
    assert_eq!(labels_in("{{model}} of {{pool}}").collect::<Vec<_>>(), ["model", "pool"]);
    assert_eq!(unit_of("rouse_wait_seconds_bucket"), Some("s"));
    assert_eq!(unit_of("rouse_parked"), None);
}
