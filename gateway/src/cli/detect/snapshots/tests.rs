use std::os::unix::fs::symlink;

use super::*;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
/// Numbers of a small model: 36 layers, 8 heads of 128 dimensions for keys and values.
const CONFIG: &str = r#"{"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4096, "max_position_embeddings": 40960}"#;

/// A cache with one repository, whose files are links to blobs as the hub's client makes them.
struct CacheFixture {
    root: tempfile::TempDir,
    repository: PathBuf,
}

impl CacheFixture {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let repository = root.path().join("models--Qwen--Qwen3-8B");
        fs::create_dir_all(repository.join("refs")).unwrap();
        fs::create_dir_all(repository.join("blobs")).unwrap();
        fs::create_dir_all(repository.join("snapshots").join(COMMIT)).unwrap();
        fs::write(repository.join("refs/main"), COMMIT).unwrap();
        Self { root, repository }
    }

    fn file(self, name: &str, content: &str) -> Self {
        fs::write(self.repository.join("blobs").join(name), content).unwrap();
        let link = self.repository.join("snapshots").join(COMMIT).join(name);
        symlink(format!("../../blobs/{name}"), link).unwrap();
        self
    }

    fn cache(&self) -> HubCache {
        HubCache { folder: self.root.path().to_owned() }
    }

    /// Reads the only repository.
    fn read(&self) -> Result<SnapshotModel, String> {
        let (snapshots, left_out) = self.cache().snapshots();
        match snapshots.first() {
            Some(snapshot) => self.cache().read_model(snapshot),
            None => Err(left_out[0].why.clone()),
        }
    }
}

#[test]
fn a_whole_snapshot_is_a_model_with_its_sizes() {
    let fixture = CacheFixture::new().file("config.json", CONFIG).file("model.safetensors", "12345");
    let expected = SnapshotModel {
        id: "Qwen/Qwen3-8B".to_owned(),
        architecture: "Qwen3ForCausalLM".to_owned(),
        weights: 5,
        kv_bytes: Some(36 * 8 * 128 * 2 * 2),
        context: Some(40960),
        cache: Some(fixture.root.path().to_owned()),
    };
    assert_eq!(fixture.read(), Ok(expected));
}

#[test]
fn each_file_of_the_index_must_be_there() {
    let index = r#"{"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "m-1.safetensors"}}"#;
    let whole = CacheFixture::new()
        .file("config.json", CONFIG)
        .file("model.safetensors.index.json", index)
        .file("m-1.safetensors", "123")
        .file("m-2.safetensors", "4567");
    assert_eq!(whole.read().unwrap().weights, 7);
    // The link stays, as after a cleanup of blobs.
    fs::remove_file(whole.repository.join("blobs/m-2.safetensors")).unwrap();
    assert!(whole.read().unwrap_err().contains("some of its weights are missing"));
}

#[test]
fn a_download_that_runs_is_left_out() {
    let fixture = CacheFixture::new().file("config.json", CONFIG).file("model.safetensors", "1");
    fs::write(fixture.repository.join("blobs/abc.incomplete"), "").unwrap();
    assert!(fixture.read().unwrap_err().contains("not complete"));
}

#[test]
fn what_is_no_model_is_left_out_with_the_reason() {
    let no_weights = CacheFixture::new().file("config.json", CONFIG);
    assert_eq!(no_weights.read().unwrap_err(), "it has no weights in the safetensors format");
    let no_config = CacheFixture::new().file("model.safetensors", "1");
    assert_eq!(no_config.read().unwrap_err(), "it has no config.json that can be read");
    let odd = CacheFixture::new().file("config.json", r#"{"architectures": ["a\nb"]}"#);
    assert_eq!(odd.read().unwrap_err(), "its config.json names no architecture");
    let no_ref = CacheFixture::new();
    fs::remove_file(no_ref.repository.join("refs/main")).unwrap();
    assert!(no_ref.read().unwrap_err().contains("no refs/main"));
    for (commit, why) in
        [("../../../etc", "names no commit"), ("", "names no commit"), ("abc", "does not exist")]
    {
        let bad = CacheFixture::new();
        fs::write(bad.repository.join("refs/main"), commit).unwrap();
        assert!(bad.read().unwrap_err().contains(why), "{commit}");
    }
}

#[test]
fn a_compressed_cache_and_nested_numbers_are_understood_and_absurd_ones_are_not() {
    let of = |json: &str| kv_bytes(&serde_json::from_str(json).unwrap());
    let latent = r#"{"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}"#;
    assert_eq!(of(latent), Some(61 * 576 * 2));
    assert_eq!(
        of(r#"{"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}"#),
        Some(2 * 4 * 16 * 4)
    );
    assert_eq!(of(r#"{"num_hidden_layers": 1e300, "num_attention_heads": -4}"#), None);
    let huge =
        format!(r#"{{"num_hidden_layers": {0}, "num_attention_heads": {0}, "head_dim": {0}}}"#, u64::MAX);
    assert_eq!(of(&huge), None);
    let nested = format!(r#"{{"architectures": ["XForConditionalGeneration"], "text_config": {CONFIG}}}"#);
    let fixture = CacheFixture::new().file("config.json", &nested).file("model.safetensors", "1");
    assert_eq!(fixture.read().unwrap().context, Some(40960));
}

#[test]
fn the_environment_names_the_cache_in_the_order_of_the_hubs_client() {
    let home = Some(Path::new("/home/u"));
    let cache = |set: &[(&str, &str)]| {
        let variable = |name: &str| {
            let found = set.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| PathBuf::from(value))
        };
        HubCache::new(variable, home).unwrap()
    };
    let at = |folder: &str| HubCache { folder: folder.into() };
    assert_eq!(cache(&[]), at("/home/u/.cache/huggingface/hub"));
    assert_eq!(cache(&[("HF_HOME", "/hf")]), at("/hf/hub"));
    assert_eq!(cache(&[("HF_HOME", "/hf"), ("HF_HUB_CACHE", "/c")]), at("/c"));
    assert_eq!(cache(&[("XDG_CACHE_HOME", "/x")]), at("/x/huggingface/hub"));
    assert_eq!(HubCache::new(|_| None, None), None);
}
