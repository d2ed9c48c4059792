//! Examines NVIDIA's driver and its accelerators.

use rouse::units::Bytes;
use rouse_config::{Config, host::SystemFiles};
use rouse_net::nvml::NvmlReading;

use super::finding::DoctorFinding;
use crate::{
    cli::detect::accelerators::{DetectedAccelerator, DriverAnswer, Error, foreign_holders},
    platform::local::names_owners,
};

const AREA: &str = "driver";
const ACCELERATORS: &str = "accelerators";

/// Whose process holds memory of an accelerator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ProcessOwner {
    /// A gateway's engine.
    Engine,
    /// Another program, by its name.
    Foreign(String),
}

pub(super) fn check(
    answer: &Result<DriverAnswer, Error>,
    config: Option<&Config>,
    files: &SystemFiles,
    owner_of: impl Fn(u32) -> ProcessOwner,
) -> Vec<DoctorFinding> {
    let is_needed = config.is_some_and(|config| config.accelerators_auto);
    let answer = match answer {
        Ok(answer) => answer,
        Err(error) => return vec![without_driver(error, is_needed, files)],
    };
    let versions = &answer.versions;
    let cuda = versions.cuda.as_ref().map_or_else(String::new, |cuda| format!(", CUDA up to {cuda}"));
    let what = format!("NVIDIA driver {}, NVML {}{cuda}", versions.driver, versions.nvml);
    let mut findings = vec![DoctorFinding::ok(AREA, what)];
    if answer.accelerators.is_empty() && is_needed {
        findings.push(DoctorFinding::error(
            ACCELERATORS,
            "the driver lists no accelerator",
            "with `accelerators: auto` the gateway does not start",
            "run nvidia-smi as the gateway's user, or list the accelerators in the configuration",
        ));
    }
    for accelerator in &answer.accelerators {
        findings.extend(check_accelerator(accelerator, &owner_of));
    }
    findings
}

fn without_driver(error: &Error, is_needed: bool, files: &SystemFiles) -> DoctorFinding {
    let has_device =
        ["/dev/nvidiactl", "/proc/driver/nvidia/version"].iter().any(|path| files.path(path).exists());
    if is_needed {
        return DoctorFinding::error(
            AREA,
            error.to_string(),
            "with `accelerators: auto` the gateway does not start",
            "run nvidia-smi as the gateway's user; in a container, mount the driver; without a GPU of NVIDIA's, list the \
             accelerators in the configuration",
        );
    }
    if has_device {
        return DoctorFinding::warning(
            AREA,
            format!("NVIDIA's kernel driver is loaded, but: {error}"),
            "the gateway cannot measure the memory of the GPUs",
            "install the driver's library libnvidia-ml.so.1 in the kernel driver's version; after an upgrade of the driver, \
             restart the machine",
        );
    }
    DoctorFinding::ok(AREA, "there is no driver of NVIDIA's, and nothing here needs one")
}

fn check_accelerator(
    accelerator: &DetectedAccelerator,
    owner_of: &impl Fn(u32) -> ProcessOwner,
) -> Vec<DoctorFinding> {
    let name = format!("{} ({})", accelerator.id, accelerator.label());
    let mut findings = Vec::new();
    match &accelerator.reading {
        Err(error) => findings.push(DoctorFinding::error(
            ACCELERATORS,
            format!("{name} does not answer: {error}"),
            "no engine can run there, and the gateway's start can fail",
            "look for Xid errors with `journalctl --dmesg`, and reset the GPU or restart the machine",
        )),
        Ok(reading) => {
            let what = format!("{name}: {} of {} in use", reading.used, reading.total);
            findings.push(DoctorFinding::ok(ACCELERATORS, what));
            findings.extend(check_holders(&name, reading, owner_of));
        }
    }
    let condition = &accelerator.condition;
    if condition.uncorrected_errors > 0 {
        findings.push(DoctorFinding::warning(
            ACCELERATORS,
            format!("{name} has {} memory errors that it could not correct", condition.uncorrected_errors),
            "engines there may fail or answer wrongly",
            "reset the GPU; if the errors come back, have it replaced",
        ));
    }
    if condition.retires_pages {
        findings.push(DoctorFinding::warning(
            ACCELERATORS,
            format!("{name} waits for a reset to take faulty memory out of use"),
            "engines may still get that memory",
            "stop the engines there, and reset the GPU",
        ));
    }
    findings
}

/// Finds programs that hold memory which the gateway would give to engines.
fn check_holders(
    name: &str,
    reading: &NvmlReading,
    owner_of: &impl Fn(u32) -> ProcessOwner,
) -> Option<DoctorFinding> {
    let why = "the gateway gives engines only what is free, so models wait or fit nowhere";
    let is_engine = |pid| owner_of(pid) == ProcessOwner::Engine;
    let holders = foreign_holders(reading, is_engine);
    let knows = reading.by_pid.as_ref().is_some_and(|by_pid| names_owners(by_pid, reading.used));
    let Some(holders) = holders.filter(|_| knows) else {
        let is_idle = reading.used <= Bytes::gib(1);
        return (!is_idle).then(|| {
            DoctorFinding::warning(
                ACCELERATORS,
                format!("{name}: {} are in use, and the driver does not name the processes", reading.used),
                why,
                "look at nvidia-smi on the host: in a container, processes outside it are not shown",
            )
        });
    };
    let sum: Bytes = holders.values().copied().sum();
    if holders.is_empty() {
        return None;
    }
    let shown = holders.iter().map(|(pid, bytes)| match owner_of(*pid) {
        ProcessOwner::Foreign(program) if !program.is_empty() => format!("{program} (pid {pid}) {bytes}"),
        _ => format!("pid {pid} {bytes}"),
    });
    let shown: Vec<String> = shown.collect();
    Some(DoctorFinding::warning(
        ACCELERATORS,
        format!("{name}: other programs hold {sum}: {}", shown.join(", ")),
        why,
        "end these programs, or raise `headroom` by what they hold",
    ))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use rouse_net::nvml::{self, DeviceCondition, DriverVersions};

    use super::*;
    use crate::cli::doctor::finding::FindingLevel;

    const GIB: u64 = 1 << 30;

    fn answer(
        reading: Result<NvmlReading, nvml::Error>,
        condition: DeviceCondition,
    ) -> Result<DriverAnswer, Error> {
        let versions = DriverVersions {
            driver: "580.1".to_owned(),
            nvml: "13.580".to_owned(),
            cuda: Some("13.0".to_owned()),
        };
        let accelerator =
            DetectedAccelerator { id: "GPU-1".into(), usable: Bytes::gib(79), reading, condition };
        Ok(DriverAnswer { versions, accelerators: vec![accelerator] })
    }

    fn reading(used: u64, by_pid: &[(u32, u64)]) -> Result<NvmlReading, nvml::Error> {
        let by_pid: BTreeMap<u32, Bytes> = by_pid.iter().map(|(pid, gib)| (*pid, Bytes(gib * GIB))).collect();
        Ok(NvmlReading { total: Bytes::gib(80), used: Bytes(used * GIB), by_pid: Some(by_pid) })
    }

    fn found(answer: &Result<DriverAnswer, Error>, config: Option<&str>) -> Vec<(FindingLevel, String)> {
        let root = tempfile::tempdir().unwrap();
        let config = config.map(|text| rouse_config::parse(text, "t").unwrap());
        let owner = |pid| match pid {
            7 => ProcessOwner::Engine,
            _ => ProcessOwner::Foreign("python3".to_owned()),
        };
        let findings = check(answer, config.as_ref(), &SystemFiles::below(root.path()), owner);
        findings.into_iter().map(|finding| (finding.level, finding.what)).collect()
    }

    #[test]
    fn versions_and_use_are_told_and_engines_are_no_foreign_programs() {
        let found = found(&answer(reading(3, &[(7, 3)]), DeviceCondition::default()), None);
        let expected = [
            (FindingLevel::Ok, "NVIDIA driver 580.1, NVML 13.580, CUDA up to 13.0".to_owned()),
            (FindingLevel::Ok, "GPU-1 (GPU-1): 3Gi of 80Gi in use".to_owned()),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn other_programs_are_named_with_what_they_hold() {
        let found = found(&answer(reading(5, &[(7, 3), (9, 2)]), DeviceCondition::default()), None);
        assert_eq!(found[2].0, FindingLevel::Warning);
        assert_eq!(found[2].1, "GPU-1 (GPU-1): other programs hold 2Gi: python3 (pid 9) 2Gi");
        let hidden = super::tests::found(&answer(reading(5, &[]), DeviceCondition::default()), None);
        assert!(hidden[2].1.contains("does not name the processes"), "{hidden:?}");
    }

    #[test]
    fn a_lost_accelerator_is_an_error_and_memory_errors_are_a_warning() {
        let condition =
            DeviceCondition { name: Some("L4".to_owned()), uncorrected_errors: 2, retires_pages: true };
        let found = found(&answer(Err(nvml::Error::Lost("GPU-1".into())), condition), None);
        let levels: Vec<_> = found.iter().map(|(level, _)| *level).collect();
        assert_eq!(
            levels,
            [FindingLevel::Ok, FindingLevel::Error, FindingLevel::Warning, FindingLevel::Warning]
        );
        assert!(found[1].1.starts_with("GPU-1 (L4) does not answer"), "{found:?}");
    }

    #[test]
    fn a_missing_driver_is_an_error_only_where_one_is_needed() {
        let none = Err(Error::NoAnswer);
        assert_eq!(found(&none, None)[0].0, FindingLevel::Ok);
        assert_eq!(found(&none, Some("models: []"))[0].0, FindingLevel::Error);
        assert_eq!(found(&none, Some("accelerators: [{id: cpu, memory: 8Gi}]"))[0].0, FindingLevel::Ok);
    }
}
