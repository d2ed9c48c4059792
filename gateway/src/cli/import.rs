//! `import`: converts another program's configuration into one of ours.

use std::{
    fs,
    io::{ErrorKind, Write as _},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Context as _;
use clap::{Args, Subcommand};
use rouse::units::{Bytes, pluralize};
use rouse_config::{ImportMachine, LlamaSwapImport, import_llama_swap};
use serde_json::{Value, json};

use super::config_file;

#[derive(Debug, Subcommand)]
pub(super) enum ImportSource {
    /// Convert a configuration of llama-swap.
    ///
    /// What has no counterpart is listed on standard error, and as comments in the result.
    LlamaSwap(LlamaSwapArgs),
}

#[derive(Args, Debug)]
pub(super) struct LlamaSwapArgs {
    /// Configuration file of llama-swap.
    file: PathBuf,
    /// Write the configuration into this file, which must not exist yet. Default: standard output.
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Print JSON: the configuration as text, and what has no counterpart.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(source: &ImportSource) -> anyhow::Result<ExitCode> {
    let ImportSource::LlamaSwap(args) = source;
    let origin = args.file.display().to_string();
    let text = fs::read_to_string(&args.file).with_context(|| format!("cannot read {origin}"))?;
    let machine =
        ImportMachine { environment: |name| std::env::var(name).ok(), file_size: size_of_model_file };
    let imported = import_llama_swap(&text, &origin, &machine)?;
    if !args.json {
        for note in &imported.notes {
            eprintln!("{}", note.display(&origin));
        }
    }
    if let Some(output) = &args.output {
        write_new(output, &imported.yaml)?;
    }
    print(args, &imported)?;
    Ok(ExitCode::SUCCESS)
}

fn print(args: &LlamaSwapArgs, imported: &LlamaSwapImport) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if args.json {
        return Ok(writeln!(out, "{}", to_json(imported))?);
    }
    let Some(output) = &args.output else { return Ok(write!(out, "{}", imported.yaml)?) };
    let (models, notes) = (pluralize(imported.models, "model"), pluralize(imported.notes.len(), "note"));
    let output = output.display();
    Ok(writeln!(out, "{output}: {models}, {notes}; check it with: rouse-gateway check {output}")?)
}

fn to_json(imported: &LlamaSwapImport) -> Value {
    let notes: Vec<_> = imported
        .notes
        .iter()
        .map(|note| json!({"line": note.at.line, "column": note.at.column, "text": note.text}))
        .collect();
    json!({"models": imported.models, "configuration": imported.yaml, "notes": notes})
}

/// A file that exists may be a configuration that someone needs.
fn write_new(path: &Path, content: &str) -> anyhow::Result<()> {
    let shown = path.display();
    config_file::write(path, content, false).map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => {
            anyhow::anyhow!("{shown} exists already: name another file, or remove it first")
        }
        _ => anyhow::Error::new(error).context(format!("cannot write {shown}")),
    })
}

/// Returns the size of a model's file, with all parts of one that is split (`-00001-of-00004`).
fn size_of_model_file(path: &str) -> Option<Bytes> {
    let path = Path::new(path);
    let size =
        |path: &Path| fs::metadata(path).ok().filter(fs::Metadata::is_file).map(|meta| Bytes(meta.len()));
    let own = size(path)?;
    let name = path.file_name()?.to_str()?;
    let Some((start, rest)) = name.split_once("-00001-of-") else { return Some(own) };
    let count: u32 = rest.split('.').next()?.parse().ok()?;
    let parts =
        (2..=count.min(1000)).map(|part| size(&path.with_file_name(format!("{start}-{part:05}-of-{rest}"))));
    Some(own + parts.flatten().sum::<Bytes>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_in_parts_is_as_large_as_all_of_them() {
        let dir = tempfile::tempdir().unwrap();
        for part in 1..=3_usize {
            fs::write(dir.path().join(format!("m-0000{part}-of-00003.gguf")), vec![0; part * 10]).unwrap();
        }
        let first = dir.path().join("m-00001-of-00003.gguf");
        assert_eq!(size_of_model_file(first.to_str().unwrap()), Some(Bytes(60)));
        assert_eq!(
            size_of_model_file(dir.path().join("m-00002-of-00003.gguf").to_str().unwrap()),
            Some(Bytes(20))
        );
        assert_eq!(size_of_model_file(dir.path().to_str().unwrap()), None, "a folder is no file");
        assert_eq!(size_of_model_file("/nowhere"), None);
    }

    #[test]
    fn a_file_that_exists_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rouse.yaml");
        write_new(&path, "one").unwrap();
        let error = write_new(&path, "two").unwrap_err().to_string();
        assert!(error.contains("exists already"), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "one");
    }
}
