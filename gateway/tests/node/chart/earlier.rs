//! An earlier version of the chart, made of the present one.

use std::{fs, path::Path, process::Command};

use serde_json::Value;

use crate::support::repo_path;

/// The field of an InferenceModel's `spec` that its earlier definition lacks.
pub(super) const MISSING_FIELD: &str = "maxConcurrency";
/// The version's line in `Chart.yaml`. The images have the present version, as with any change of the chart alone.
const VERSION: &str = "version: 0.0.1";

/// Writes the earlier chart to `charts/rouse` in this folder, which does not exist yet.
pub(super) fn write_chart(folder: &Path) {
    let charts = folder.join("charts");
    fs::create_dir_all(&charts).unwrap();
    let copied = Command::new("cp").arg("-R").arg(repo_path("charts/rouse")).arg(&charts).status().unwrap();
    assert!(copied.success());
    edit(&charts.join("rouse/Chart.yaml"), |text| {
        let lines = text.lines().map(|line| if line.starts_with("version: ") { VERSION } else { line });
        lines.collect::<Vec<_>>().join("\n")
    });
    edit(&charts.join("rouse/definitions/inferencemodels.yaml"), |text| {
        let mut definition: Value = serde_saphyr::from_str(text).unwrap();
        let spec = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties";
        let fields = definition.pointer_mut(spec).unwrap().as_object_mut().unwrap();
        assert!(fields.remove(MISSING_FIELD).is_some(), "the present definition has no {MISSING_FIELD}");
        // JSON is valid YAML.
        definition.to_string()
    });
}

fn edit(file: &Path, change: impl FnOnce(&str) -> String) {
    let text = fs::read_to_string(file).unwrap();
    let changed = change(&text);
    assert_ne!(changed, text, "{} is the present one", file.display());
    fs::write(file, changed).unwrap();
}
