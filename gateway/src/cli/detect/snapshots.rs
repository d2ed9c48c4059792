//! Finds whole models in Hugging Face's cache, and reads what their configuration says about memory.
//!
//! The cache has a folder for each repository: `refs/main` names the snapshot that is current, and a snapshot's files
//! are links to blobs. A blob that ends with `.incomplete` is a download that runs or was broken off.

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    fs::File,
    io::Read as _,
    path::{Path, PathBuf},
};

use serde_json::Value;

use super::LeftOut;

/// Bytes of a JSON file that are read. The index of the largest models has a few MiB.
const MAX_JSON_BYTES: u64 = 32 << 20;
/// The most repositories that are looked at.
const MAX_REPOSITORIES: usize = 10_000;
/// A cache of more bytes for one token is a sign of wrong numbers.
const MAX_KV_BYTES: u64 = 64 << 20;

/// A model in the format of Hugging Face's libraries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cli) struct SnapshotModel {
    /// The repository's name, or the folder of a model outside the cache.
    pub(in crate::cli) id: String,
    /// The class that implements it, such as `Qwen3ForCausalLM`.
    pub(in crate::cli) architecture: String,
    /// Size of the weights in bytes.
    pub(in crate::cli) weights: u64,
    /// Bytes of the KV cache for each token, with 16 bits for each number.
    pub(in crate::cli) kv_bytes: Option<u64>,
    /// The longest context, in tokens.
    pub(in crate::cli) context: Option<u64>,
    /// The cache that has it. A service may have another environment than the user who ran `init`.
    pub(in crate::cli) cache: Option<PathBuf>,
}

/// Hugging Face's cache of this user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cli) struct HubCache {
    pub(in crate::cli) folder: PathBuf,
}

impl HubCache {
    /// Returns the cache that the environment names, or the default one.
    pub(in crate::cli) fn of_environment(home: Option<&Path>) -> Option<Self> {
        Self::new(|name| env::var_os(name).map(PathBuf::from), home)
    }

    fn new(variable: impl Fn(&str) -> Option<PathBuf>, home: Option<&Path>) -> Option<Self> {
        let set = |name: &str| variable(name).filter(|value| value.is_absolute());
        let folder = set("HF_HUB_CACHE")
            .or_else(|| Some(set("HF_HOME")?.join("hub")))
            .or_else(|| Some(set("XDG_CACHE_HOME")?.join("huggingface/hub")))
            .or_else(|| Some(home?.join(".cache/huggingface/hub")))?;
        Some(Self { folder })
    }

    /// Returns the snapshots of all repositories with models, and the repositories that have none that is whole.
    pub(in crate::cli) fn snapshots(&self) -> (Vec<PathBuf>, Vec<LeftOut>) {
        let (mut snapshots, mut left_out) = (Vec::new(), Vec::new());
        for repository in self.repositories() {
            match current_snapshot(&repository) {
                Ok(snapshot) => snapshots.push(snapshot),
                Err(why) => left_out.push(LeftOut::new(repository.display(), why)),
            }
        }
        (snapshots, left_out)
    }

    fn repositories(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten().take(MAX_REPOSITORIES);
        let paths = entries.map(|entry| entry.path());
        let is_model = |path: &PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str());
            // A name is part of the file that is written.
            name.is_some_and(|name| name.starts_with("models--") && !name.contains(char::is_control))
        };
        let mut found: Vec<PathBuf> = paths.filter(is_model).collect();
        found.sort();
        found
    }

    /// Reads the model of a snapshot in this cache.
    pub(in crate::cli) fn read_model(&self, snapshot: &Path) -> Result<SnapshotModel, String> {
        let folder = snapshot.ancestors().nth(2).and_then(Path::file_name).and_then(|name| name.to_str());
        let name = folder.and_then(|name| name.strip_prefix("models--")).ok_or("it is in no repository")?;
        let model = read_folder(snapshot)?;
        Ok(SnapshotModel { id: name.replace("--", "/"), cache: Some(self.folder.clone()), ..model })
    }
}

/// Returns the folder of the repository's current snapshot.
fn current_snapshot(repository: &Path) -> Result<PathBuf, String> {
    let mut commit = String::new();
    let named =
        File::open(repository.join("refs/main")).and_then(|file| file.take(256).read_to_string(&mut commit));
    named.map_err(|_| "it has no refs/main: nothing of its main branch was downloaded".to_owned())?;
    let commit = commit.trim();
    // The name is a part of a path.
    if commit.is_empty() || !commit.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return Err("its refs/main names no commit".to_owned());
    }
    let mut blobs = fs::read_dir(repository.join("blobs")).into_iter().flatten().flatten();
    if blobs.any(|entry| entry.file_name().to_string_lossy().ends_with(".incomplete")) {
        return Err(
            "its download is not complete: run `hf download` again, or wait for the one that runs".to_owned()
        );
    }
    let snapshot = repository.join("snapshots").join(commit);
    if snapshot.is_dir() { Ok(snapshot) } else { Err("its current snapshot does not exist".to_owned()) }
}

/// Reads the model in a folder with `config.json` and weights.
pub(in crate::cli) fn read_folder(folder: &Path) -> Result<SnapshotModel, String> {
    let config = read_json(&folder.join("config.json")).ok_or("it has no config.json that can be read")?;
    let architecture = config.pointer("/architectures/0").and_then(Value::as_str).unwrap_or_default();
    if architecture.is_empty()
        || !architecture.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    {
        return Err("its config.json names no architecture".to_owned());
    }
    // Models of text and images have the numbers of the language model in a section.
    let text = config.get("text_config").or_else(|| config.get("llm_config")).unwrap_or(&config);
    let context =
        number(text, "max_position_embeddings").or_else(|| number(&config, "max_position_embeddings"));
    Ok(SnapshotModel {
        id: folder.display().to_string(),
        architecture: architecture.to_owned(),
        weights: weights(folder)?,
        kv_bytes: kv_bytes(text),
        context,
        cache: None,
    })
}

/// Returns the size of all weights. Each file that the index names must be there.
fn weights(folder: &Path) -> Result<u64, String> {
    let sizes = fs::read_dir(folder).into_iter().flatten().flatten().filter_map(|entry| {
        let name = entry.file_name().to_str()?.to_owned();
        // Metadata of a link is that of the blob; a blob that is gone has none.
        let size = fs::metadata(entry.path()).ok()?.len();
        name.ends_with(".safetensors").then_some((name, size))
    });
    let index = folder.join("model.safetensors.index.json");
    let Some(index) = index.exists().then(|| read_json(&index)) else {
        let sum = sizes.fold(0, |sum: u64, (_, size)| sum.saturating_add(size));
        return if sum > 0 { Ok(sum) } else { Err("it has no weights in the safetensors format".to_owned()) };
    };
    let files = index.as_ref().and_then(|index| index.get("weight_map")?.as_object());
    let files = files.ok_or("its index of weights is damaged")?;
    let found: BTreeMap<String, u64> = sizes.collect();
    let names: BTreeSet<&str> = files.values().filter_map(Value::as_str).collect();
    let sum = names.iter().try_fold(0_u64, |sum, name| Some(sum.saturating_add(*found.get(*name)?)));
    sum.ok_or_else(|| "some of its weights are missing: run `hf download` again".to_owned())
}

/// Returns the bytes of keys and values of one token, over all layers.
fn kv_bytes(config: &Value) -> Option<u64> {
    let layers = number(config, "num_hidden_layers")?;
    let of_layer = match number(config, "kv_lora_rank") {
        // Multi-head latent attention keeps one compressed vector instead of all heads.
        Some(rank) => rank.saturating_add(number(config, "qk_rope_head_dim").unwrap_or_default()),
        None => {
            let heads = number(config, "num_attention_heads")?;
            let kv_heads = number(config, "num_key_value_heads").unwrap_or(heads);
            let width = || number(config, "hidden_size")?.checked_div(heads);
            kv_heads.saturating_mul(number(config, "head_dim").or_else(width)?).saturating_mul(2)
        }
    };
    let bytes = layers.saturating_mul(of_layer).saturating_mul(2);
    (1..=MAX_KV_BYTES).contains(&bytes).then_some(bytes)
}

fn number(config: &Value, key: &str) -> Option<u64> {
    config.get(key)?.as_u64().filter(|number| *number > 0)
}

fn read_json(path: &Path) -> Option<Value> {
    let mut text = Vec::new();
    File::open(path).ok()?.take(MAX_JSON_BYTES).read_to_end(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}

#[cfg(test)]
mod tests;
