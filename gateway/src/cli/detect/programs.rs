//! Finds the programs of engines, with their versions and the flags that they take.

use std::{
    collections::BTreeSet,
    env,
    ffi::OsStr,
    fs::File,
    io::{BufRead as _, BufReader, Read as _},
    path::{Path, PathBuf},
};

use nix::unistd::{AccessFlags, access};
use serde::Serialize;

use super::{probe, python_packages::PackageFolder};

/// vLLM's switch for the sleep mode.
pub(in crate::cli) const VLLM_SLEEP_FLAG: &str = "--enable-sleep-mode";
/// SGLang's switch for the sleep mode.
pub(in crate::cli) const SGLANG_SLEEP_FLAG: &str = "--enable-memory-saver";
/// SGLang's switch for a copy of the weights in RAM while the engine sleeps.
pub(in crate::cli) const SGLANG_BACKUP_FLAG: &str = "--enable-weights-cpu-backup";
/// llama-cpp-python's option that makes a second request wait instead of ending the first one.
pub(in crate::cli) const PYTHON_INTERRUPT_FLAG: &str = "--interrupt_requests";

/// Folders below the home directory in which people keep engines: environments of Python, and builds of llama.cpp.
const USUAL_FOLDERS: [&str; 10] = [
    ".local/bin",
    "vllm/bin",
    "sglang/bin",
    "venv/bin",
    ".venv/bin",
    "miniconda3/bin",
    "miniforge3/bin",
    "llama.cpp/build/bin",
    "llama.cpp",
    "src/llama.cpp/build/bin",
];
const SYSTEM_FOLDERS: [&str; 6] = [
    "/usr/local/bin",
    "/usr/bin",
    "/opt/llama.cpp/bin",
    "/opt/llama.cpp/build/bin",
    "/opt/vllm/bin",
    "/opt/sglang/bin",
];
/// Bytes of a script's first line that are read.
const MAX_SHEBANG_BYTES: u64 = 512;

/// One kind of server program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(in crate::cli) enum ServerProgram {
    Vllm,
    Sglang,
    LlamaServer,
    /// The server of llama-cpp-python.
    LlamaCppPython,
}

impl ServerProgram {
    /// All programs, the preferred ones first.
    pub(in crate::cli) const ALL: [Self; 4] =
        [Self::Vllm, Self::Sglang, Self::LlamaServer, Self::LlamaCppPython];

    /// The program's name for people.
    pub(in crate::cli) const fn label(self) -> &'static str {
        match self {
            Self::Vllm => "vLLM",
            Self::Sglang => "SGLang",
            Self::LlamaServer => "llama-server",
            Self::LlamaCppPython => "llama-cpp-python",
        }
    }
}

/// The flags that a program takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cli) enum KnownFlags {
    /// All of them, from the program's help.
    All(BTreeSet<String>),
    /// Those of the few that matter here, from the program's source.
    Some(Vec<String>),
    Unknown,
}

/// A server program of this machine.
#[derive(Clone, Debug)]
pub(in crate::cli) struct FoundProgram {
    pub(in crate::cli) program: ServerProgram,
    /// The words that start it, before its own arguments.
    pub(in crate::cli) command: Vec<String>,
    pub(in crate::cli) version: Option<String>,
    pub(in crate::cli) flags: KnownFlags,
    /// Whether it computes on accelerators; `None` if it does not report that.
    pub(in crate::cli) uses_accelerators: Option<bool>,
    /// The accelerators that it lists itself, one line for each.
    pub(in crate::cli) devices: Vec<String>,
}

impl FoundProgram {
    /// Whether the program takes this flag, as far as is known.
    pub(in crate::cli) fn takes(&self, flag: &str) -> bool {
        match &self.flags {
            KnownFlags::All(flags) => flags.contains(flag),
            KnownFlags::Some(flags) => flags.iter().any(|known| known == flag),
            KnownFlags::Unknown => true,
        }
    }

    /// Returns the name and the version, as far as it is known.
    pub(in crate::cli) fn title(&self) -> String {
        let label = self.program.label();
        self.version.as_ref().map_or_else(|| label.to_owned(), |version| format!("{label} {version}"))
    }
}

/// Where programs are looked for.
#[derive(Clone, Debug)]
pub(in crate::cli) struct ProgramFolders(pub(in crate::cli) Vec<PathBuf>);

impl ProgramFolders {
    /// Returns the folders of PATH, of active environments, and the usual ones.
    pub(in crate::cli) fn of_environment(home: Option<&Path>) -> Self {
        let path = env::var_os("PATH").unwrap_or_default();
        let active = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(env::var_os);
        Self::new(&path, active.map(|prefix| Path::new(&prefix).join("bin")), home)
    }

    fn new(path: &OsStr, active: impl Iterator<Item = PathBuf>, home: Option<&Path>) -> Self {
        let in_home = home.into_iter().flat_map(|home| USUAL_FOLDERS.map(|folder| home.join(folder)));
        let mut folders: Vec<PathBuf> = Vec::new();
        let all =
            env::split_paths(path).chain(active).chain(in_home).chain(SYSTEM_FOLDERS.map(PathBuf::from));
        for folder in all.filter(|folder| folder.is_absolute()) {
            if !folders.contains(&folder) {
                folders.push(folder);
            }
        }
        Self(folders)
    }

    /// Finds the first program of each kind, and asks it what it can do.
    pub(in crate::cli) async fn programs(&self) -> Vec<FoundProgram> {
        let mut found = Vec::new();
        for program in ServerProgram::ALL {
            for folder in &self.0 {
                let what = format!("looking at {} in {}", program.label(), folder.display());
                if let Some(one) = probe::with_progress(&what, look(program, folder)).await {
                    found.push(one);
                    break;
                }
            }
        }
        found
    }
}

/// Looks at the program that a command starts; `None` if it is none of the known ones, or is not here.
pub(in crate::cli) async fn of_command(command: &[String]) -> Option<FoundProgram> {
    let (first, rest) = command.split_first()?;
    let name = Path::new(first).file_name()?.to_str()?;
    let program = match (name, rest) {
        ("llama-server", _) => ServerProgram::LlamaServer,
        ("vllm", _) => ServerProgram::Vllm,
        (name, [flag, module, ..]) if name.starts_with("python") && flag == "-m" => match module.as_str() {
            "sglang.launch_server" => ServerProgram::Sglang,
            "llama_cpp.server" => ServerProgram::LlamaCppPython,
            _ => return None,
        },
        _ => return None,
    };
    let path = env::var_os("PATH").unwrap_or_default();
    let in_path = || env::split_paths(&path).map(|folder| folder.join(first)).find(|path| path.is_file());
    let file = if first.contains('/') { Some(PathBuf::from(first)) } else { in_path() };
    look(program, file?.parent()?).await
}

/// Returns the program if this folder has it.
async fn look(program: ServerProgram, bin: &Path) -> Option<FoundProgram> {
    match program {
        ServerProgram::LlamaServer => look_at_llama_server(&bin.join("llama-server")).await,
        ServerProgram::Vllm => {
            let script = executable(bin.join("vllm"))?;
            let packages = PackageFolder::beside(bin).into_iter().find(|folder| folder.has("vllm"));
            let source = "vllm/engine/arg_utils.py";
            Some(FoundProgram {
                program,
                command: vec![text(&script)?],
                version: packages.as_ref().and_then(|folder| folder.version_of("vllm")),
                flags: flags_in(packages.as_ref(), source, &[VLLM_SLEEP_FLAG]),
                uses_accelerators: Some(true),
                devices: Vec::new(),
            })
        }
        ServerProgram::Sglang => {
            let packages = PackageFolder::beside(bin).into_iter().find(|folder| folder.has("sglang"))?;
            let python = python_of(bin, "sglang")?;
            let source = "sglang/srt/server_args.py";
            Some(FoundProgram {
                program,
                command: vec![text(&python)?, "-m".to_owned(), "sglang.launch_server".to_owned()],
                version: packages.version_of("sglang"),
                flags: flags_in(Some(&packages), source, &[SGLANG_SLEEP_FLAG, SGLANG_BACKUP_FLAG]),
                uses_accelerators: Some(true),
                devices: Vec::new(),
            })
        }
        ServerProgram::LlamaCppPython => {
            let packages =
                PackageFolder::beside(bin).into_iter().find(|folder| folder.has("llama_cpp/server"))?;
            let python = python_of(bin, "llama_cpp")?;
            let backends = ["cuda", "hip", "vulkan", "sycl"];
            let uses = backends.iter().any(|name| packages.has(&format!("llama_cpp/lib/libggml-{name}.so")));
            let source = "llama_cpp/server/settings.py";
            Some(FoundProgram {
                program,
                command: vec![text(&python)?, "-m".to_owned(), "llama_cpp.server".to_owned()],
                version: packages.version_of("llama-cpp-python"),
                flags: flags_in(Some(&packages), source, &[PYTHON_INTERRUPT_FLAG]),
                uses_accelerators: Some(uses),
                devices: Vec::new(),
            })
        }
    }
}

fn flags_in(packages: Option<&PackageFolder>, source: &str, flags: &[&str]) -> KnownFlags {
    let named = packages.and_then(|folder| folder.flags_named_in(source, flags));
    named.map_or(KnownFlags::Unknown, KnownFlags::Some)
}

/// Asks a llama-server for its version, flags and accelerators; `None` if there is none.
async fn look_at_llama_server(path: &Path) -> Option<FoundProgram> {
    let path = executable(path.to_owned())?;
    let (version, help) =
        tokio::join!(probe::output_of(&path, &["--version"]), probe::output_of(&path, &["--help"]));
    let flags = help.as_deref().map(flags_of_help).filter(|flags| flags.contains("--port"));
    let flags = flags.map_or(KnownFlags::Unknown, KnownFlags::All);
    let mut found = FoundProgram {
        program: ServerProgram::LlamaServer,
        command: vec![text(&path)?],
        version: version.as_deref().and_then(version_of),
        flags,
        uses_accelerators: None,
        devices: Vec::new(),
    };
    if matches!(&found.flags, KnownFlags::All(flags) if flags.contains("--list-devices"))
        && let Some(listed) = probe::output_of(&path, &["--list-devices"]).await
    {
        found.devices = listed_devices(&listed);
        found.uses_accelerators = Some(!found.devices.is_empty());
    }
    Some(found)
}

/// Returns the words of a help text that begin like flags.
fn flags_of_help(help: &str) -> BTreeSet<String> {
    let words = help.split(|c: char| c.is_whitespace() || ",|[](){}'\"`=".contains(c));
    let flags = words.filter(|word| word.starts_with('-') && word.len() > 1);
    flags.map(|word| word.trim_end_matches(['.', ':', ';']).to_owned()).collect()
}

/// Parses `version: 4589 (eb7cf15a)`.
fn version_of(output: &str) -> Option<String> {
    let line = output.lines().find_map(|line| line.trim().strip_prefix("version:"))?;
    let version = line.trim();
    (!version.is_empty() && version.len() < 100).then(|| version.replace(char::is_control, " "))
}

/// Parses the lines below `Available devices:`, such as `  CUDA0: NVIDIA L4 (22491 MiB, 22180 MiB free)`.
fn listed_devices(output: &str) -> Vec<String> {
    let lines = output.lines().skip_while(|line| !line.starts_with("Available devices")).skip(1);
    let lines = lines.map(str::trim).take_while(|line| line.contains(": "));
    // A machine's own processor may be listed as well.
    lines.filter(|line| !line.starts_with("CPU")).map(|line| line.replace(char::is_control, " ")).collect()
}

/// Returns the interpreter that runs the packages beside `bin`.
///
/// It is the folder's own, or that of a script there. The system's interpreter also reads the packages of
/// `/usr/local` and of `~/.local`, which have none.
fn python_of(bin: &Path, script: &str) -> Option<PathBuf> {
    if let Some(python) = ["python3", "python"].into_iter().find_map(|name| executable(bin.join(name))) {
        return Some(python);
    }
    let of_system = bin.ends_with("usr/local/bin") || bin.ends_with(".local/bin");
    shebang_of(&bin.join(script))
        .or_else(|| of_system.then(|| executable(PathBuf::from("/usr/bin/python3"))).flatten())
}

fn shebang_of(script: &Path) -> Option<PathBuf> {
    let file = File::open(script).ok()?;
    let mut line = String::new();
    BufReader::new(file.take(MAX_SHEBANG_BYTES)).read_line(&mut line).ok()?;
    executable(PathBuf::from(line.strip_prefix("#!")?.split_whitespace().next()?))
}

/// Returns the path if this user may execute the file.
fn executable(path: PathBuf) -> Option<PathBuf> {
    (path.is_file() && access(&path, AccessFlags::X_OK).is_ok()).then_some(path)
}

/// Returns the path as a word for a command; `None` if it cannot stand in a configuration.
fn text(path: &Path) -> Option<String> {
    path.to_str().filter(|text| !text.contains(char::is_control)).map(str::to_owned)
}

#[cfg(test)]
mod tests;
