//! Examines the configuration, and the engines' programs, flags and models.

use std::path::Path;

use rouse::model::ModelName;
use rouse_config::{Config, EngineConfig};

use super::finding::DoctorFinding;
use crate::cli::{
    detect::programs::{
        FoundProgram, KnownFlags, SGLANG_BACKUP_FLAG, SGLANG_SLEEP_FLAG, ServerProgram, VLLM_SLEEP_FLAG,
    },
    local_machine,
};

const AREA: &str = "configuration";
const ENGINES: &str = "engines";

/// Loads the configuration, and adds what is wrong with it; `None` if it is not valid.
pub(super) fn load(file: &Path, findings: &mut Vec<DoctorFinding>) -> Option<Config> {
    let config = match rouse_config::load(file) {
        Ok(config) => config,
        Err(errors) => {
            findings.extend(errors.problems.iter().map(|problem| {
                DoctorFinding::error(
                    AREA,
                    problem.display(&errors.origin),
                    "the gateway does not start with this file, and a running one does not reload it",
                    "correct the line; docs/configuration.md has all keys",
                )
            }));
            return None;
        }
    };
    findings.extend(check_settings(&config));
    Some(config)
}

/// Reports what [`rouse_config::check`] finds.
fn check_settings(config: &Config) -> Vec<DoctorFinding> {
    let found = rouse_config::check(config);
    if found == rouse_config::CheckFindings::default() {
        return vec![DoctorFinding::ok(
            AREA,
            format!("{} is valid, and no setting is in doubt", config.origin),
        )];
    }
    let errors = found.errors.iter().map(|problem| {
        let why = "the model can never run, so its requests are refused";
        DoctorFinding::error(
            AREA,
            problem.display(&config.origin),
            why,
            "change the entry, or remove the model",
        )
    });
    let warnings = found.warnings.iter().map(|problem| {
        let why = "the setting is legal, and will not work as it seems to be meant";
        DoctorFinding::warning(
            AREA,
            problem.display(&config.origin),
            why,
            "change the line unless you mean it",
        )
    });
    errors.chain(warnings).collect()
}

/// Reports programs and models that are not here.
pub(super) fn check_files(config: &Config) -> Vec<DoctorFinding> {
    let engines = config.engines.iter().flat_map(|(name, engine)| {
        let missing = local_machine::missing_programs(engine);
        let missing = missing.into_iter().chain(local_machine::missing_model_files(engine));
        missing.map(move |text| {
            let (what, advice) = split_advice(&text);
            DoctorFinding::error(
                ENGINES,
                format!("model '{name}': {what}"),
                "its engine cannot start",
                advice,
            )
        })
    });
    engines.collect()
}

/// Splits `what: what to do`, the form of this program's messages.
fn split_advice(text: &str) -> (&str, &str) {
    let parts = text.split_once("; ").or_else(|| text.split_once(": "));
    parts.unwrap_or((text, "correct the configuration"))
}

/// Reports flags of the command that the program does not take.
pub(super) fn check_flags(
    model: &ModelName,
    engine: &EngineConfig,
    program: &FoundProgram,
) -> Vec<DoctorFinding> {
    let used = engine.command.iter().skip(1).filter_map(|word| {
        let flag = word.split('=').next()?;
        // Negative numbers are values.
        flag.trim_start_matches('-').starts_with(|c: char| c.is_ascii_alphabetic()).then_some(flag)
    });
    let used: Vec<&str> = used.filter(|word| word.starts_with('-')).collect();
    let unknown: Vec<&str> = match &program.flags {
        KnownFlags::Unknown => Vec::new(),
        KnownFlags::All(_) => used.into_iter().filter(|flag| !program.takes(flag)).collect(),
        KnownFlags::Some(_) => {
            let looked_for: &[&str] = match program.program {
                ServerProgram::Vllm => &[VLLM_SLEEP_FLAG],
                ServerProgram::Sglang => &[SGLANG_SLEEP_FLAG, SGLANG_BACKUP_FLAG],
                ServerProgram::LlamaServer | ServerProgram::LlamaCppPython => &[],
            };
            used.into_iter().filter(|flag| looked_for.contains(flag) && !program.takes(flag)).collect()
        }
    };
    let finding = |flag: &str| {
        DoctorFinding::error(
            ENGINES,
            format!("model '{model}': {} does not know {flag}", program.title()),
            "most programs end at once if their command has an unknown option",
            "remove the option, or install a version that has it",
        )
    };
    unknown.into_iter().map(finding).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::cli::doctor::finding::FindingLevel;

    fn config(text: &str) -> Config {
        rouse_config::parse(text, "t").unwrap()
    }

    fn program(program: ServerProgram, flags: KnownFlags) -> FoundProgram {
        let version = Some("1.2".to_owned());
        FoundProgram {
            program,
            command: Vec::new(),
            version,
            flags,
            uses_accelerators: None,
            devices: Vec::new(),
        }
    }

    fn flags_of(command: &str, program: &FoundProgram) -> Vec<String> {
        let text = format!(
            "models: [{{name: m, engine: {{kind: custom, command: [{command}]}}, memory: {{awake: 1Gi}}}}]"
        );
        let config = config(&text);
        let (name, engine) = config.engines.iter().next().unwrap();
        check_flags(name, engine, program).into_iter().map(|finding| finding.what).collect()
    }

    #[test]
    fn an_option_that_the_help_does_not_have_is_named_and_values_are_not() {
        let known = ["-m", "--port", "--temp"].map(str::to_owned);
        let server = program(ServerProgram::LlamaServer, KnownFlags::All(BTreeSet::from(known)));
        let command = "llama-server, -m, /m, --port, '${PORT}', --temp, '-1', '--new-thing=5'";
        assert_eq!(flags_of(command, &server), ["model 'm': llama-server 1.2 does not know --new-thing"]);
        let silent = program(ServerProgram::LlamaServer, KnownFlags::Unknown);
        assert_eq!(flags_of(command, &silent), [""; 0]);
    }

    #[test]
    fn of_a_program_in_python_only_the_flags_that_were_looked_for_count() {
        let old = program(ServerProgram::Vllm, KnownFlags::Some(Vec::new()));
        let command = "vllm, serve, m, --port, '${PORT}', --enable-sleep-mode, --other";
        assert_eq!(flags_of(command, &old), ["model 'm': vLLM 1.2 does not know --enable-sleep-mode"]);
    }

    #[test]
    fn the_configurations_own_findings_are_reported_with_their_place() {
        let text = "accelerators: [{id: a, memory: 4Gi}]\nmodels:\n  - {name: big, engine: {kind: vllm, command: [vllm, \
                    '${PORT}', '${HOST}']}, memory: {awake: 8Gi}}";
        let found = check_settings(&config(text));
        let levels: Vec<_> = found.iter().map(|finding| finding.level).collect();
        assert_eq!(levels, [FindingLevel::Error, FindingLevel::Warning, FindingLevel::Warning]);
        assert!(found[0].what.starts_with("t:3:") && found[0].what.contains("needs 8Gi"), "{found:?}");
        assert!(found[1].what.contains("--enable-sleep-mode"), "{found:?}");
        let fine = check_settings(&config(
            "accelerators: [{id: a, memory: 4Gi}]\nplatform: local\nmodels: [{name: m, \
            engine: {kind: custom, command: [x, '${HOST}:${PORT}']}, memory: {awake: 1Gi}}]",
        ));
        assert_eq!(fine[0].level, FindingLevel::Ok, "{fine:?}");
    }

    #[test]
    fn an_invalid_file_is_reported_line_by_line() {
        let file = tempfile::NamedTempFile::with_suffix(".yaml").unwrap();
        std::fs::write(&file, "headroom: lots\nunknown: 1\n").unwrap();
        let mut findings = Vec::new();
        assert!(load(file.path(), &mut findings).is_none());
        assert!(findings.len() == 2 && findings.iter().all(|finding| finding.level == FindingLevel::Error));
        assert!(findings[0].what.contains(":1:"), "{findings:?}");
    }

    #[test]
    fn what_is_missing_here_is_an_error_with_advice() {
        let found = check_files(&config(
            "models: [{name: m, engine: {kind: llama-cpp, command: [no-such-program-of-anybody, -m, /no/such.gguf, \
             '${PORT}']}, memory: {awake: 1Gi}}]",
        ));
        let whats: Vec<_> = found.iter().map(|finding| finding.what.as_str()).collect();
        let expected = [
            "model 'm': program 'no-such-program-of-anybody' is not in PATH",
            "model 'm': there is no model at /no/such.gguf",
        ];
        assert_eq!(whats, expected);
        assert_eq!(found[1].advice.as_deref(), Some("correct the path"));
    }
}
