//! Examines RAM and the limits that engines inherit.

use rouse::{model::AcceleratorId, units::Bytes};
use rouse_config::{Config, EngineKind, host::HostMemory};

use super::finding::DoctorFinding;

const AREA: &str = "memory";
/// Processes of one engine share memory of this size at least.
const MIN_SHARED: Bytes = Bytes::gib(1);
/// Two descriptors for each stream; with fewer than this, a hundred clients are too many.
const MIN_DESCRIPTORS: u64 = 4096;

/// Limits of this process; `None` is no limit.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ProcessLimits {
    /// Memory that a process may lock in RAM.
    pub(super) locked: Option<Bytes>,
    pub(super) descriptors: Option<u64>,
    /// Size of `/dev/shm`.
    pub(super) shared: Option<Bytes>,
}

pub(super) fn check(
    config: Option<&Config>,
    memory: Option<&HostMemory>,
    limits: &ProcessLimits,
) -> Vec<DoctorFinding> {
    let mut findings = Vec::new();
    if let Some(memory) = memory {
        let limit =
            memory.limit.map_or_else(String::new, |limit| format!(", limited to {limit} by a control group"));
        findings.push(DoctorFinding::ok(AREA, format!("{} of RAM{limit}", memory.total)));
        findings.extend(config.into_iter().flat_map(|config| check_budgets(config, memory.usable())));
    }
    findings.extend(config.and_then(|config| check_locked(config, limits)));
    findings.extend(config.and_then(|config| check_shared(config, limits)));
    findings.extend(limits.descriptors.filter(|limit| *limit < MIN_DESCRIPTORS).map(|limit| {
        DoctorFinding::warning(
            AREA,
            format!("a process may open at most {limit} files"),
            "each stream takes two, so clients are refused beyond half of it",
            "raise the hard limit: LimitNOFILE=1048576 in the unit, or ulimit -Hn",
        )
    }));
    findings
}

/// Compares what the configuration lets engines hold in RAM with the RAM.
fn check_budgets(config: &Config, usable: Bytes) -> Vec<DoctorFinding> {
    let mut findings = Vec::new();
    let budget = config.core.settings.host_memory;
    let can_sleep = config.core.models.iter().any(|model| model.can_sleep);
    let over = Bytes(usable.0 / 10 * 8);
    if can_sleep && budget > over {
        let what = format!("host.sleepMemory is {budget}, and {usable} of RAM may be used");
        let why =
            "sleeping engines hold their weights there, and the kernel ends processes that find no memory";
        let advice = format!("set host.sleepMemory to half of it: {}", Bytes(usable.0 / 2));
        findings.push(if budget > usable {
            DoctorFinding::error(AREA, what, why, advice)
        } else {
            DoctorFinding::warning(AREA, what, why, advice)
        });
    }
    // An accelerator without a meter and without a variable that selects it stands for RAM.
    let stands_in = |id: &AcceleratorId| !config.meters.contains_key(id) && !config.visible.contains_key(id);
    let stand_ins = config.core.accelerators.iter().filter(|accelerator| stands_in(&accelerator.id));
    let declared: Bytes = stand_ins.map(|accelerator| accelerator.capacity + config.headroom).sum();
    if !config.accelerators_auto && declared > usable {
        findings.push(DoctorFinding::warning(
            AREA,
            format!("the accelerators that no driver knows have {declared} together, and {usable} of RAM may be used"),
            "if their engines compute on the CPU, they run out of RAM before the gateway makes one stop",
            "declare less memory; for GPUs of other makers, set `visible`",
        ));
    }
    findings
}

fn check_locked(config: &Config, limits: &ProcessLimits) -> Option<DoctorFinding> {
    let limit = limits.locked?;
    let locks = config.engines.values().any(|engine| engine.command.iter().any(|word| word == "--mlock"));
    let pins = config.core.models.iter().any(|model| model.can_sleep);
    let need = config.core.models.iter().map(|model| model.memory.host.max(model.memory.awake)).max()?;
    ((locks || pins) && limit < need).then(|| {
        DoctorFinding::warning(
            AREA,
            format!("a process may lock at most {limit} in RAM"),
            "engines lock their weights there with --mlock, and some pin them while they sleep: that fails, or is slow",
            "raise the limit for the gateway, whose engines inherit it: LimitMEMLOCK=infinity in the unit, \
             --ulimit memlock=-1 for a container",
        )
    })
}

fn check_shared(config: &Config, limits: &ProcessLimits) -> Option<DoctorFinding> {
    let shared = limits.shared.filter(|size| *size < MIN_SHARED)?;
    let has_workers =
        config.engines.values().any(|engine| matches!(engine.kind, EngineKind::Vllm | EngineKind::Sglang));
    has_workers.then(|| {
        DoctorFinding::warning(
            AREA,
            format!("/dev/shm has {shared}"),
            "the processes of one vLLM or SGLang share memory there, and fail where it is full",
            "give the container more: --shm-size 8g, or --ipc host",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::doctor::finding::FindingLevel;

    const SLEEPER: &str = "models: [{name: m, engine: {kind: vllm, command: [vllm, '${PORT}', --enable-sleep-mode]}, \
        memory: {awake: 8Gi}}]";

    fn found(text: &str, usable: u64, limits: &ProcessLimits) -> Vec<(FindingLevel, String)> {
        let config = rouse_config::parse(text, "t").unwrap();
        let memory = HostMemory { total: Bytes::gib(usable), limit: None };
        let findings = check(Some(&config), Some(&memory), limits);
        findings.into_iter().map(|finding| (finding.level, finding.what)).collect()
    }

    #[test]
    fn a_sleep_budget_is_compared_with_the_ram_that_may_be_used() {
        let with = |budget: &str| {
            let text = format!("host: {{sleepMemory: {budget}}}\n{SLEEPER}");
            let found = found(&text, 16, &ProcessLimits::default());
            found.iter().map(|(level, _)| *level).collect::<Vec<_>>()
        };
        assert_eq!(with("8Gi"), [FindingLevel::Ok]);
        assert_eq!(with("15Gi"), [FindingLevel::Ok, FindingLevel::Warning]);
        assert_eq!(with("32Gi"), [FindingLevel::Ok, FindingLevel::Error]);
    }

    #[test]
    fn engines_on_the_cpu_are_declared_no_more_than_there_is() {
        let text = "accelerators: [{id: cpu, memory: 12Gi}, {id: cpu-1, memory: 12Gi}]\nmodels: []";
        assert_eq!(found(text, 32, &ProcessLimits::default()).len(), 1);
        let low = found(text, 16, &ProcessLimits::default());
        assert!(low[1].1.contains("have 24Gi together"), "{low:?}");
    }

    #[test]
    fn limits_of_a_container_are_told_where_engines_need_more() {
        let docker = ProcessLimits {
            locked: Some(Bytes::mib(8)),
            descriptors: Some(1024),
            shared: Some(Bytes::mib(64)),
        };
        let text = format!("host: {{sleepMemory: 8Gi}}\n{SLEEPER}");
        let found = found(&text, 64, &docker);
        let whats: Vec<_> = found.iter().skip(1).map(|(_, what)| what.as_str()).collect();
        let expected = [
            "a process may lock at most 8Mi in RAM",
            "/dev/shm has 64Mi",
            "a process may open at most 1024 files",
        ];
        assert_eq!(whats, expected);
        assert!(check(None, None, &ProcessLimits::default()).is_empty());
    }
}
