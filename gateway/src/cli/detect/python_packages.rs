//! Looks into installed Python packages without starting Python.
//!
//! `vllm serve --help` imports its whole framework, which takes ten seconds and more. The version is in the package's
//! metadata, and a flag that the package takes is in its source.

use std::{
    fs::{self, File},
    io::Read as _,
    path::{Path, PathBuf},
};

/// Bytes of a source file that are searched. The longest known one has 300 KiB.
const MAX_SOURCE_BYTES: u64 = 4 << 20;

/// One folder of packages (`site-packages`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cli) struct PackageFolder(PathBuf);

impl PackageFolder {
    /// Returns the folders of packages that belong to the programs in `bin`.
    pub(in crate::cli) fn beside(bin: &Path) -> Vec<Self> {
        let Some(prefix) = bin.parent() else { return Vec::new() };
        let libraries = ["lib", "lib64"].into_iter().flat_map(|name| folders_in(&prefix.join(name)));
        let of_python = libraries.filter(|path| file_name(path).starts_with("python3"));
        let packages =
            of_python.flat_map(|path| ["site-packages", "dist-packages"].map(|name| path.join(name)));
        packages.filter(|path| path.is_dir()).map(Self).collect()
    }

    /// Whether the package has this file or folder.
    pub(in crate::cli) fn has(&self, path: &str) -> bool {
        self.0.join(path).exists()
    }

    /// Returns the installed version of a distribution, named as in `pip install`.
    pub(in crate::cli) fn version_of(&self, distribution: &str) -> Option<String> {
        let plain = |name: &str| name.to_lowercase().replace('-', "_");
        folders_in(&self.0).into_iter().find_map(|path| {
            let name = file_name(&path);
            let (found, version) = name.strip_suffix(".dist-info")?.rsplit_once('-')?;
            (plain(found) == plain(distribution)).then(|| version.to_owned())
        })
    }

    /// Returns those of the `flags` that a source file names; `None` if the file cannot be read.
    ///
    /// Some packages write `--some-flag`, others derive it from a field `some_flag`.
    pub(in crate::cli) fn flags_named_in(&self, source: &str, flags: &[&str]) -> Option<Vec<String>> {
        let mut text = Vec::new();
        File::open(self.0.join(source)).ok()?.take(MAX_SOURCE_BYTES).read_to_end(&mut text).ok()?;
        let text = String::from_utf8_lossy(&text);
        let is_named = |flag: &&&str| {
            let field = flag.trim_start_matches('-').replace('-', "_");
            text.contains(**flag) || text.contains(&field)
        };
        Some(flags.iter().filter(is_named).map(|flag| (*flag).to_owned()).collect())
    }
}

/// Returns the folders directly in `path`, sorted by name.
fn folders_in(path: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut folders: Vec<PathBuf> = entries.filter(|path| path.is_dir()).collect();
    folders.sort();
    folders
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_and_flags_come_from_the_files_of_an_environment() {
        let root = tempfile::tempdir().unwrap();
        let packages = root.path().join("lib/python3.12/site-packages");
        for folder in ["llama_cpp/server", "llama_cpp_python-0.3.36.dist-info", "vllm-0.11.0+cu129.dist-info"]
        {
            fs::create_dir_all(packages.join(folder)).unwrap();
        }
        fs::write(packages.join("llama_cpp/server/settings.py"), "interrupt_requests: bool\n\"--some-flag\"")
            .unwrap();
        let bin = root.path().join("bin");
        let [folder]: [PackageFolder; 1] = PackageFolder::beside(&bin).try_into().unwrap();
        assert_eq!(folder.version_of("llama-cpp-python").as_deref(), Some("0.3.36"));
        assert_eq!(folder.version_of("vllm").as_deref(), Some("0.11.0+cu129"));
        assert_eq!(folder.version_of("sglang"), None);
        assert!(folder.has("llama_cpp/server") && !folder.has("vllm"));
        let flags = ["--interrupt-requests", "--some-flag", "--other"];
        let named = folder.flags_named_in("llama_cpp/server/settings.py", &flags).unwrap();
        assert_eq!(named, ["--interrupt-requests", "--some-flag"]);
        assert_eq!(folder.flags_named_in("absent.py", &flags), None);
    }
}
