//! Spawns an engine process from a spec.

use std::{
    fs::File,
    io,
    os::unix::process::CommandExt,
    process::{Command, Stdio},
};

use rouse_net::process::ProcessGroup;

use super::{children::ChildProcesses, log::InstanceLog, spec::InstanceSpec};

/// The variable that marks every process of an engine, wherever it moves.
const ENGINE_MARK_ENV: &str = "ROUSE_ENGINE";

/// How to spawn an engine's process.
#[derive(Debug)]
pub(crate) struct SpawnPlan {
    /// Program and arguments.
    pub(crate) command_line: Vec<String>,
    /// Unique among all engines on this machine.
    pub(crate) mark: String,
}

/// Why the process was not started.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("the log cannot be written: {0}")]
    Log(io::Error),
    #[error("'{program}' cannot be run: {source}")]
    Spawn { program: String, source: io::Error },
}

impl SpawnPlan {
    /// The mark as an environment entry.
    pub(crate) fn mark_entry(&self) -> String {
        format!("{ENGINE_MARK_ENV}={}", self.mark)
    }

    /// Starts the process in its own group with its output in `log`. Blocks while the process is created.
    pub(crate) fn spawn(
        &self,
        spec: &InstanceSpec,
        log: &InstanceLog,
        family: &ChildProcesses,
    ) -> Result<ProcessGroup, Error> {
        let output = log.writer().map_err(Error::Log)?;
        let errors = output.try_clone().map_err(Error::Log)?;
        let (program, _) =
            self.command_line.split_first().map_or(("", &[][..]), |(first, rest)| (first, rest));
        let failed = |source| Error::Spawn { program: program.to_owned(), source };
        let mut command = tokio::process::Command::from(self.command(spec, output, errors));
        let start = || {
            let process = ProcessGroup::from_child(command.spawn()?, self.mark_entry())?;
            let pid = process.pid();
            Ok((process, pid))
        };
        family.register(start).map_err(failed)
    }

    fn command(&self, spec: &InstanceSpec, output: File, errors: File) -> Command {
        let mut args = self.command_line.iter();
        let mut command = Command::new(args.next().map_or("", String::as_str));
        // Keep our own secrets and settings from the engine.
        let own_names = std::env::vars_os().map(|(name, _)| name);
        for name in own_names.filter(|name| name.as_encoded_bytes().starts_with(b"ROUSE_")) {
            command.env_remove(name);
        }
        // The driver's order, which the indices refer to. CUDA's default is fastest first.
        let order = ("CUDA_DEVICE_ORDER", "PCI_BUS_ID");
        command.envs([order]);
        if let Some(variables) = &spec.env_vars {
            command.envs(variables.iter());
        }
        if spec.gpu_uuids.as_ref().is_some_and(|uuids| !uuids.is_empty()) {
            command.envs([order]);
        }
        command
            .args(args)
            .env(ENGINE_MARK_ENV, &self.mark)
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors);
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The variables that a process of this spec has beyond ours.
    fn environment(body: &str) -> Vec<(String, String)> {
        let dir = tempfile::tempdir().unwrap();
        let log = InstanceLog::create(dir.path(), "x").unwrap();
        let spec = InstanceSpec::parse(body.as_bytes()).unwrap();
        let plan = SpawnPlan { command_line: vec!["/bin/true".into()], mark: "m".into() };
        let command = plan.command(&spec, log.writer().unwrap(), log.writer().unwrap());
        let text = |text: &std::ffi::OsStr| text.to_str().unwrap().to_owned();
        command.get_envs().filter_map(|(name, value)| Some((text(name), text(value?)))).collect()
    }

    #[test]
    fn set_env_vars() {
        let set = environment(
            r#"{"options":"","env_vars":{"A":"value1","B":"12345","CUDA_DEVICE_ORDER":"FASTEST_FIRST"}}"#,
        );
        for (name, value) in
            [("A", "value1"), ("B", "12345"), ("CUDA_DEVICE_ORDER", "FASTEST_FIRST"), ("ROUSE_ENGINE", "m")]
        {
            assert!(set.contains(&(name.to_owned(), value.to_owned())), "{name}: {set:?}");
        }
    }

    #[test]
    fn indices_are_always_those_of_the_bus() {
        let order = ("CUDA_DEVICE_ORDER".to_owned(), "PCI_BUS_ID".to_owned());
        assert!(environment(r#"{"options":""}"#).contains(&order));
        let body = r#"{"options":"","gpu_uuids":["GPU-0"],"env_vars":{"CUDA_DEVICE_ORDER":"FASTEST_FIRST"}}"#;
        assert!(environment(body).contains(&order));
    }

    #[test]
    fn instance_no_uuid_translation_when_gpu_uuids_none() {
        let set = environment(r#"{"options":"","env_vars":{"SOME_VAR":"value"}}"#);
        assert!(set.iter().all(|(name, _)| name != "CUDA_VISIBLE_DEVICES"), "{set:?}");
    }
}
