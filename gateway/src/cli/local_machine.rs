//! Finds what a configuration relies on and this machine lacks.
//!
//! All findings are warnings: a file may be checked on another machine than the one that uses it, and by another user.

use std::path::{Path, PathBuf};

use nix::unistd::{AccessFlags, access};
use rouse::model::ModelName;

use rouse_config::{Config, ConfigProblem, EngineConfig, SourceLocation};

use crate::{platform::local, serve};

/// Options and subcommands that a model's path follows.
const MODEL_FLAGS: [&str; 6] = ["-m", "--model", "--model-path", "--mmproj", "--lora", "serve"];

/// Checks programs, model files, the state directory and ports.
#[must_use]
pub(super) fn check_local_machine(config: &Config) -> Vec<ConfigProblem> {
    let mut warnings = Vec::new();
    let mut warn = |at, text| warnings.push(ConfigProblem::new(at, text));
    if config.kubernetes.is_none()
        && let Some(text) = state_directory_problem(&config.state)
    {
        warn(SourceLocation::default(), text);
    }
    // A gateway that runs with this file already holds its ports.
    if config.kubernetes.is_some() || !local::is_in_use(&config.state) {
        for error in serve::bind_errors(config.api, config.admin.address) {
            warn(SourceLocation::default(), error.to_string());
        }
    }
    for (name, model) in &config.engines {
        let location = |name: &ModelName| config.model_locations.get(name).copied().unwrap_or_default();
        let found = missing_programs(model).into_iter().chain(missing_model_files(model));
        found.for_each(|text| warn(location(name), format!("model '{name}': {text}")));
    }
    warnings
}

pub(super) fn state_directory_problem(folder: &Path) -> Option<String> {
    let shown = folder.display();
    // The gateway creates the directory, so its nearest existing ancestor must be writable.
    let existing = folder.ancestors().find(|path| path.exists()).unwrap_or_else(|| Path::new("."));
    if !existing.is_dir() {
        return Some(format!(
            "state: {} is not a directory: set the path of a directory",
            existing.display()
        ));
    }
    let error = access(existing, AccessFlags::W_OK | AccessFlags::X_OK).err()?;
    Some(format!(
        "state: this user cannot write to {shown} ({}): set a directory that the gateway's user owns, or create this one: \
         install -d -o USER {shown}",
        error.desc()
    ))
}

/// Returns the words of a shell's script; `None` if the command is not a shell. Quotes are only stripped.
fn shell_script_words(model: &EngineConfig) -> Option<impl Iterator<Item = &str>> {
    let [program, flag, line, ..] = model.command.as_slice() else { return None };
    let is_shell =
        ["sh", "bash", "dash", "ash", "zsh"].iter().any(|shell| Path::new(program).ends_with(shell));
    (is_shell && flag == "-c").then(|| line.split_whitespace().map(|word| word.trim_matches(['"', '\''])))
}

/// Checks the command's program, and the program that its shell executes with `exec`.
pub(super) fn missing_programs(model: &EngineConfig) -> Vec<String> {
    let executed = shell_script_words(model).and_then(|mut words| {
        words.find(|word| *word == "exec")?;
        words.next()
    });
    model
        .command
        .first()
        .map(String::as_str)
        .into_iter()
        .chain(executed)
        .filter_map(|one| missing_program(model, one))
        .collect()
}

fn missing_program(model: &EngineConfig, program: &str) -> Option<String> {
    // Placeholders and shell variables cannot be checked.
    if program.contains('$') {
        return None;
    }
    let candidates: Vec<PathBuf> = if program.contains('/') {
        vec![program.into()]
    } else {
        let model_path = model.env.get("PATH").filter(|path| !path.contains("${")).map(Into::into);
        let path = model_path.or_else(|| std::env::var_os("PATH")).unwrap_or_default();
        std::env::split_paths(&path).map(|folder| folder.join(program)).collect()
    };
    let files: Vec<_> = candidates.iter().filter(|path| path.is_file()).collect();
    Some(match files.first() {
        None if program.contains('/') => {
            format!("program {program} does not exist: set the full path, as `command -v NAME` prints it")
        }
        None => format!(
            "program '{program}' is not in PATH: install it, or set its full path, as `command -v {program}` prints it where the \
             program is installed"
        ),
        Some(file) if files.iter().all(|file| access(*file, AccessFlags::X_OK).is_err()) => format!(
            "{} is not executable: run chmod +x on it, or put its interpreter in front: [python3, {program}, …]",
            file.display()
        ),
        Some(_) => return None,
    })
}

pub(super) fn missing_model_files(model: &EngineConfig) -> Vec<String> {
    let shell = shell_script_words(model).map(Iterator::collect::<Vec<_>>);
    let is_shell = shell.is_some();
    let words = shell.unwrap_or_else(|| model.command.iter().map(String::as_str).collect());
    let behind = words.iter().zip(words.iter().skip(1)).map(|(flag, path)| (*flag, *path));
    let joined = words.iter().filter_map(|word| word.split_once('='));
    let paths = behind.chain(joined).filter(|(flag, _)| MODEL_FLAGS.contains(flag)).map(|(_, path)| path);
    // A shell expands `~` and variables.
    paths.filter(|path| !(is_shell && path.starts_with('~'))).filter_map(missing_model_file).collect()
}

/// Describes why a path leads to no model. Text that does not look like a path may be a name that the engine fetches.
fn missing_model_file(path: &str) -> Option<String> {
    let is_path = path.starts_with(['/', '.', '~']) || path.ends_with(".gguf");
    if !is_path || path.contains('$') || Path::new(path).exists() {
        return None;
    }
    Some(if path.starts_with('~') {
        format!("{path}: no shell expands ~: set the full path")
    } else if path.starts_with('/') {
        format!("there is no model at {path}: correct the path")
    } else {
        format!("there is no model at {path} in the working directory: set the full path")
    })
}

#[cfg(test)]
mod tests {
    use std::{fs, net::TcpListener, os::unix::fs::PermissionsExt as _};

    use super::*;
    use rouse_config::parse;

    #[test]
    fn what_this_machine_lacks_is_found_and_told_with_what_to_write() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).display().to_string();
        for (name, mode) in [("plain", 0o644), ("runs", 0o755), ("there.gguf", 0o644)] {
            fs::write(at(name), "").unwrap();
            fs::set_permissions(at(name), fs::Permissions::from_mode(mode)).unwrap();
        }
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let found = |top: &str, commands: &[&str]| {
            let mut text = format!("{top}\nmodels:\n");
            for (number, command) in commands.iter().enumerate() {
                let engine = format!("{{kind: custom, command: [{command}, \"${{HOST}}:${{PORT}}\"]}}");
                text += &format!("  - {{name: m{number}, engine: {engine}, memory: {{awake: 1Gi}}}}\n");
            }
            let problems = check_local_machine(&parse(&text, "t").unwrap());
            let lines: Vec<_> = problems.iter().map(|problem| problem.text.clone()).collect();
            lines.join("\n").replace(&at(""), "DIR/").replace(&port.to_string(), "PORT")
        };
        let (runs, plain, model) = (at("runs"), at("plain"), at("there.gguf"));
        let fine =
            format!("listen: {{api: \"127.0.0.1:0\", admin: \"127.0.0.1:0\"}}\nstate: {}", at("state"));
        let in_a_shell = format!("sh, -c, 'exec {runs} -m {model} --lora=~/l --mmproj $${{HOME}}/p.gguf'");
        assert_eq!(
            found(
                &fine,
                &[&format!("{runs}, -m, {model}"), "sh, --model, org/name", "\"${HOST}\", x", &in_a_shell]
            ),
            ""
        );
        let taken_twice =
            format!("listen: {{api: \"127.0.0.1:0\", admin: \"127.0.0.1:{port}\"}}\nstate: {}", at("state"));
        insta::assert_snapshot!(found(&taken_twice, &[]), @"cannot listen on 127.0.0.1:PORT: address in use by another process, maybe another gateway; find it with `ss -ltnp 'sport = :PORT'` and stop it, or set another address with --admin ADDR or listen.admin");
        let top = format!(
            "listen: {{api: \"127.0.0.1:{port}\", admin: \"127.0.0.1:0\"}}\nstate: {}",
            at("plain/state")
        );
        insta::assert_snapshot!(found(&top, &[
            "no-such-program-of-anybody",
            &at("absent"),
            &plain,
            &format!("{runs}, -m, {}", at("absent.gguf")),
            "sh, \"--model=~/m\", --mmproj, absent.gguf",
            &format!("{runs}, serve, {}", at("absent-folder")),
            &format!("sh, -c, 'exec no-such-program-of-anybody -m {}'", at("absent.gguf")),
        ]), @r"
        state: DIR/plain is not a directory: set the path of a directory
        cannot listen on 127.0.0.1:PORT: address in use by another process, maybe another gateway; find it with `ss -ltnp 'sport = :PORT'` and stop it, or set another address with --api ADDR or listen.api
        model 'm0': program 'no-such-program-of-anybody' is not in PATH: install it, or set its full path, as `command -v no-such-program-of-anybody` prints it where the program is installed
        model 'm1': program DIR/absent does not exist: set the full path, as `command -v NAME` prints it
        model 'm2': DIR/plain is not executable: run chmod +x on it, or put its interpreter in front: [python3, DIR/plain, …]
        model 'm3': there is no model at DIR/absent.gguf: correct the path
        model 'm4': there is no model at absent.gguf in the working directory: set the full path
        model 'm4': ~/m: no shell expands ~: set the full path
        model 'm5': there is no model at DIR/absent-folder: correct the path
        model 'm6': program 'no-such-program-of-anybody' is not in PATH: install it, or set its full path, as `command -v no-such-program-of-anybody` prints it where the program is installed
        model 'm6': there is no model at DIR/absent.gguf: correct the path
        ");
    }
}
