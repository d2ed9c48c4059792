//! `crds`: prints the definitions that a cluster needs before it can hold our objects.

use std::{io::Write as _, path::Path, process::ExitCode};

use anyhow::Context as _;

use rouse_controllers::crd;
use serde_json::{Value, json};

/// Prints the definitions, or writes a file for each. `fma` adds those of Fast Model Actuation.
pub(super) fn run(dir: Option<&Path>, fma: bool, json: bool) -> anyhow::Result<ExitCode> {
    if json {
        let list = to_list(fma).context("cannot write the definitions as JSON")?;
        writeln!(std::io::stdout().lock(), "{list}")?;
        return Ok(ExitCode::SUCCESS);
    }
    let cannot = "cannot write the definitions as YAML";
    let mut documents = crd::documents().context(cannot)?;
    if fma {
        documents.extend(crd::fma::documents().context(cannot)?);
    }
    let Some(dir) = dir else {
        let mut out = std::io::stdout().lock();
        for document in &documents {
            write!(out, "---\n{}", document.text)?;
        }
        return Ok(ExitCode::SUCCESS);
    };
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    for document in &documents {
        let file = dir.join(&document.file);
        std::fs::write(&file, &document.text).with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the definitions as one object of kind `List`, which `kubectl apply` takes like the YAML.
fn to_list(fma: bool) -> serde_json::Result<Value> {
    let (own, foreign) = (crd::all(), fma.then(crd::fma::all));
    let items = own.iter().chain(foreign.iter().flatten()).map(serde_json::to_value);
    let items: Vec<Value> = items.collect::<Result<_, _>>()?;
    Ok(json!({"apiVersion": "v1", "kind": "List", "items": items}))
}
