use std::os::unix::{ffi::OsStrExt as _, fs::symlink};

use super::*;
use crate::cli::detect::gguf::tests::GgufBuilder;

fn write(root: &Path, file: &str, content: &[u8]) -> PathBuf {
    let path = root.join(file);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, content).unwrap();
    path
}

fn llama() -> Vec<u8> {
    GgufBuilder::model("llama").file()
}

fn models_below(root: &Path) -> (Vec<GgufModel>, Vec<LeftOut>) {
    read_models(&find(&[root.to_owned()]).gguf)
}

#[test]
fn files_are_found_once_at_any_depth_and_through_links() {
    let root = tempfile::tempdir().unwrap();
    let file = write(root.path(), "publisher/model/a.gguf", &llama());
    write(root.path(), "b.GGUF", &llama());
    write(root.path(), ".hidden/c.gguf", &llama());
    write(root.path(), "notes.txt", b"");
    write(root.path(), "1/2/3/4/5/6/7/deep.gguf", &llama());
    symlink(&file, root.path().join("z-link.gguf")).unwrap();
    symlink(root.path(), root.path().join("publisher/circle")).unwrap();
    let found = find(&[root.path().to_owned(), root.path().join("publisher"), root.path().join("absent")]);
    assert_eq!(found.gguf, BTreeSet::from([root.path().join("b.GGUF"), file]));
    assert_eq!((found.folders, found.left_out), (BTreeSet::new(), Vec::new()));
}

#[test]
fn a_folder_with_a_configuration_and_weights_is_a_model() {
    let root = tempfile::tempdir().unwrap();
    write(root.path(), "qwen/config.json", b"{}");
    write(root.path(), "qwen/model.safetensors", b"");
    write(root.path(), "only-config/config.json", b"{}");
    assert_eq!(find(&[root.path().to_owned()]).folders, BTreeSet::from([root.path().join("qwen")]));
}

#[test]
fn names_that_no_configuration_can_have_and_links_into_nowhere_are_left_out() {
    let root = tempfile::tempdir().unwrap();
    write(root.path(), "a\nb.gguf", &llama());
    fs::write(root.path().join(std::ffi::OsStr::from_bytes(b"\xff.gguf")), llama()).unwrap();
    symlink("/no/such/file", root.path().join("gone.gguf")).unwrap();
    let found = find(&[root.path().to_owned()]);
    assert_eq!(found.gguf, BTreeSet::new());
    assert_eq!(found.left_out.len(), 3, "{:?}", found.left_out);
    assert!(found.left_out.iter().all(|one| !one.what.contains('\n')), "{:?}", found.left_out);
}

#[test]
fn parts_are_one_model_with_the_size_of_all_and_a_missing_one_is_named() {
    let root = tempfile::tempdir().unwrap();
    let part =
        |number: u32| GgufBuilder::model("llama").number("split.no", number).number("split.count", 2).file();
    let first = write(root.path(), "big-00001-of-00002.gguf", &part(0));
    let second = write(root.path(), "big-00002-of-00002.gguf", &part(1));
    let (models, left_out) = models_below(root.path());
    let [model]: [GgufModel; 1] = models.try_into().unwrap();
    assert_eq!((model.name.as_str(), &model.path, model.parts), ("big", &first, 2));
    assert_eq!(model.weights, (part(0).len() + part(1).len()) as u64);
    assert_eq!(left_out, []);
    fs::remove_file(second).unwrap();
    let (models, left_out) = models_below(root.path());
    assert_eq!(
        (models, left_out),
        (Vec::new(), vec![LeftOut::new(first.display(), "part 2 of 2 is missing")])
    );
    fs::rename(&first, root.path().join("renamed.gguf")).unwrap();
    assert!(models_below(root.path()).1[0].why.contains("its name has lost the number"));
}

#[test]
fn a_projector_goes_to_the_only_model_beside_it() {
    let root = tempfile::tempdir().unwrap();
    let projector = GgufBuilder::model("clip").text("general.type", "mmproj").file();
    let beside = write(root.path(), "sees/mmproj.gguf", &projector);
    write(root.path(), "sees/a.gguf", &llama());
    write(root.path(), "many/mmproj.gguf", &projector);
    write(root.path(), "many/b.gguf", &llama());
    write(root.path(), "many/c.gguf", &llama());
    let (models, left_out) = models_below(root.path());
    let of = |name: &str| models.iter().find(|model| model.name == name).unwrap();
    assert_eq!(of("a").projector, Some(beside));
    assert_eq!(of("a").weights, (llama().len() + projector.len()) as u64);
    assert_eq!((&of("b").projector, &of("c").projector), (&None, &None));
    assert!(left_out[0].why.contains("not clear for which"), "{left_out:?}");
}

#[test]
fn what_is_no_model_is_left_out_with_the_reason() {
    let root = tempfile::tempdir().unwrap();
    write(root.path(), "broken.gguf", b"GGUF");
    write(root.path(), "page.gguf", b"<!doctype html> and some more");
    write(root.path(), "lora.gguf", &GgufBuilder::model("llama").text("general.type", "adapter").file());
    let (models, left_out) = models_below(root.path());
    let why: Vec<_> = left_out.iter().map(|one| one.why.as_str()).collect();
    assert_eq!(models, []);
    assert_eq!(
        why,
        [
            "it is cut off, or its metadata exceeds 64 MiB",
            "its content is 'adapter', and not a model",
            "it does not begin like a GGUF file"
        ]
    );
}

#[test]
fn only_the_numbers_of_the_splitting_program_are_parts() {
    assert_eq!(part_name("a-b-00002-of-00010"), Some(("a-b", 2, 10)));
    for stem in
        ["a", "a-2-of-3", "a-00004-of-00003", "a-00000-of-00003", "-00001-of-00001", "a-00001-of-99999"]
    {
        assert_eq!(part_name(stem), None, "{stem}");
    }
}

#[test]
fn ollamas_files_are_found_where_it_keeps_them() {
    let home = tempfile::tempdir().unwrap();
    fs::create_dir_all(home.path().join(".ollama/models/blobs")).unwrap();
    assert_eq!(ollama_folder(Some(home.path())), Some(home.path().join(".ollama/models/blobs")));
}
