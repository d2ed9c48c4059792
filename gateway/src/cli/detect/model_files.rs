//! Finds GGUF files and folders with a model, below folders that people keep models in.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use super::{
    LeftOut,
    gguf::{self, GgufHeader},
};

/// Folders below the home directory that programs and people download GGUF files to.
const USUAL_FOLDERS: [&str; 5] =
    [".cache/llama.cpp", "models", ".lmstudio/models", ".cache/lm-studio/models", ".local/share/models"];
/// Ollama's files, in the home directory and as a service. They have digests for names.
const OLLAMA_FOLDERS: [&str; 2] = ["/usr/share/ollama/.ollama/models", "/var/lib/ollama/models"];
/// LM Studio has `PUBLISHER/MODEL/FILE`, and the hub's cache one level more.
const MAX_DEPTH: u32 = 6;
/// The most entries of folders that are looked at: a wrong `--models /` must end.
const MAX_ENTRIES: usize = 200_000;
/// The most parts of one model. The largest known ones have about 30.
const MAX_PARTS: u32 = 1000;

/// What lies below the folders.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::cli) struct ModelFiles {
    /// GGUF files, by path.
    pub(in crate::cli) gguf: BTreeSet<PathBuf>,
    /// Folders with `config.json` and weights, by path.
    pub(in crate::cli) folders: BTreeSet<PathBuf>,
    pub(in crate::cli) left_out: Vec<LeftOut>,
}

/// One model in GGUF files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cli) struct GgufModel {
    /// The file that an engine is given: the first part.
    pub(in crate::cli) path: PathBuf,
    /// The file's name without its ending and number.
    pub(in crate::cli) name: String,
    pub(in crate::cli) header: GgufHeader,
    /// Size of all parts, and of the projector.
    pub(in crate::cli) weights: u64,
    pub(in crate::cli) parts: u32,
    /// Translates images for the model.
    pub(in crate::cli) projector: Option<PathBuf>,
}

/// Returns the usual folders of GGUF files.
pub(in crate::cli) fn usual_folders(home: &Path) -> Vec<PathBuf> {
    USUAL_FOLDERS.iter().map(|folder| home.join(folder)).collect()
}

/// Returns the folder of Ollama's files, if there is one.
pub(in crate::cli) fn ollama_folder(home: Option<&Path>) -> Option<PathBuf> {
    let in_home = home.map(|home| home.join(".ollama/models"));
    let all = in_home.into_iter().chain(OLLAMA_FOLDERS.map(PathBuf::from));
    all.map(|folder| folder.join("blobs")).find(|folder| folder.is_dir())
}

/// Lists the model files below the folders. Each file is listed once, however many links lead to it.
pub(in crate::cli) fn find(roots: &[PathBuf]) -> ModelFiles {
    let mut walk = FolderWalk::default();
    for root in roots {
        walk.enter(root, 0);
    }
    if walk.entries >= MAX_ENTRIES {
        let why = format!("there are more than {MAX_ENTRIES} entries: name a smaller folder with --models");
        walk.found.left_out.push(LeftOut::new("further files", why));
    }
    walk.found
}

#[derive(Default)]
struct FolderWalk {
    found: ModelFiles,
    /// Real paths of folders and files: links may lead in circles, and to one file twice.
    seen: BTreeSet<PathBuf>,
    entries: usize,
}

impl FolderWalk {
    fn enter(&mut self, folder: &Path, depth: u32) {
        let is_new =
            |seen: &mut BTreeSet<PathBuf>| fs::canonicalize(folder).is_ok_and(|real| seen.insert(real));
        if depth > MAX_DEPTH || !is_new(&mut self.seen) {
            return;
        }
        let Ok(entries) = fs::read_dir(folder) else { return };
        let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        paths.sort();
        let mut has_config = false;
        let mut has_weights = false;
        for path in paths {
            self.entries += 1;
            if self.entries >= MAX_ENTRIES {
                return;
            }
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            // Hidden folders have caches and histories.
            if name.starts_with('.') {
                continue;
            }
            if path.is_dir() {
                self.enter(&path, depth + 1);
            } else if path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf")) {
                self.note_gguf(path);
            }
            has_config |= name == "config.json";
            has_weights |= name.ends_with(".safetensors");
        }
        if has_config && has_weights {
            if is_text(folder) {
                self.found.folders.insert(folder.to_owned());
            } else {
                self.leave_out_name(folder);
            }
        }
    }

    fn note_gguf(&mut self, path: PathBuf) {
        match fs::canonicalize(&path) {
            // A link into nowhere, as of a download that was deleted.
            Err(error) => {
                self.found.left_out.push(LeftOut::new(path.display(), format!("cannot open it: {error}")));
            }
            Ok(_) if !is_text(&path) => self.leave_out_name(&path),
            Ok(real) => {
                if self.seen.insert(real) {
                    self.found.gguf.insert(path);
                }
            }
        }
    }

    fn leave_out_name(&mut self, path: &Path) {
        let shown = path.to_string_lossy().replace(char::is_control, "\u{fffd}");
        let why = "its name cannot stand in a configuration: rename it";
        self.found.left_out.push(LeftOut::new(shown, why));
    }
}

/// Whether the path can stand in a configuration: UTF-8 without control characters.
fn is_text(path: &Path) -> bool {
    path.to_str().is_some_and(|text| !text.contains(char::is_control))
}

/// Reads the metadata of the files, and puts parts and projectors to their models.
pub(in crate::cli) fn read_models(files: &BTreeSet<PathBuf>) -> (Vec<GgufModel>, Vec<LeftOut>) {
    let (mut models, mut left_out) = (Vec::new(), Vec::new());
    let mut projectors = Vec::new();
    for path in files {
        match gguf::read_file(path) {
            Err(error) => left_out.push(LeftOut::new(path.display(), error.to_string())),
            Ok(header) if header.content == "mmproj" || header.architecture == "clip" => {
                projectors.push(path.clone());
            }
            Ok(header) if header.content != "model" || header.layers.is_none() => {
                let why = if header.content == "model" {
                    "it has no language model".to_owned()
                } else {
                    format!("its content is '{}', and not a model", header.content)
                };
                left_out.push(LeftOut::new(path.display(), why));
            }
            Ok(header) => match whole_model(path, header) {
                Ok(model) => models.extend(model),
                Err(why) => left_out.push(LeftOut::new(path.display(), why)),
            },
        }
    }
    for path in projectors {
        attach(path, &mut models, &mut left_out);
    }
    (models, left_out)
}

/// Gives a projector to the only model beside it. With several models, its owner is unknown.
fn attach(projector: PathBuf, models: &mut [GgufModel], left_out: &mut Vec<LeftOut>) {
    let folder = projector.parent();
    let mut beside = models.iter_mut().filter(|model| model.path.parent() == folder);
    match (beside.next(), beside.next()) {
        (Some(model), None) if model.projector.is_none() => {
            model.weights = model.weights.saturating_add(size_of(&projector).unwrap_or_default());
            model.projector = Some(projector);
        }
        _ => {
            let why = "it translates images for a model, and it is not clear for which: add --mmproj to that model's \
                       command";
            left_out.push(LeftOut::new(projector.display(), why));
        }
    }
}

/// Returns the model of which this is the first part or the only one; `None` for a further part.
fn whole_model(path: &Path, header: GgufHeader) -> Result<Option<GgufModel>, String> {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let model = |name: &str, weights, parts| GgufModel {
        path: path.to_owned(),
        name: name.to_owned(),
        header: header.clone(),
        weights,
        parts,
        projector: None,
    };
    let Some((base, number, count)) = part_name(&stem) else {
        if header.split.is_some_and(|(_, count)| count > 1) {
            return Err(
                "it is one part of several, and its name has lost the number: give it its first name"
                    .to_owned(),
            );
        }
        let weights = size_of(path).ok_or("its size cannot be read")?;
        return Ok(Some(model(&stem, weights, 1)));
    };
    if number != 1 {
        return Ok(None);
    }
    let mut weights = 0_u64;
    for number in 1..=count {
        let part = path.with_file_name(format!("{base}-{number:05}-of-{count:05}.gguf"));
        let size = size_of(&part).ok_or_else(|| format!("part {number} of {count} is missing"))?;
        weights = weights.saturating_add(size);
    }
    Ok(Some(model(base, weights, count)))
}

/// Parses `NAME-00001-of-00003`.
fn part_name(stem: &str) -> Option<(&str, u32, u32)> {
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (base, number) = rest.rsplit_once('-')?;
    let parse = |text: &str| text.parse::<u32>().ok().filter(|_| text.len() == 5);
    let (number, count) = (parse(number)?, parse(count)?);
    (!base.is_empty() && (1..=count).contains(&number) && count <= MAX_PARTS).then_some((base, number, count))
}

/// Returns the size of the file, following links.
fn size_of(path: &Path) -> Option<u64> {
    fs::metadata(path).ok().filter(fs::Metadata::is_file).map(|data| data.len())
}

#[cfg(test)]
mod tests;
