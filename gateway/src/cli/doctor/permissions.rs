//! Examines what the gateway's user may use: the state directory and the device files.

use std::{fs, path::Path};

use nix::unistd::{AccessFlags, access};
use rouse_config::{Config, host::SystemFiles};

use super::{finding::DoctorFinding, ports::RunningGateway};
use crate::cli::local_machine;

const AREA: &str = "permissions";
/// Where a unit for systemd may be, the strongest first.
const UNITS: [&str; 3] = [
    "/etc/systemd/system/rouse.service",
    "/lib/systemd/system/rouse.service",
    "/usr/lib/systemd/system/rouse.service",
];

/// `uid` is that of this process.
pub(super) fn check(
    config: Option<&Config>,
    gateway: &RunningGateway,
    files: &SystemFiles,
    uid: u32,
) -> Vec<DoctorFinding> {
    let mut findings = check_devices(files);
    let unit = unit_user(files);
    let other_user = unit.as_ref().filter(|user| uid_of(files, user).is_none_or(|known| known != uid));
    if let Some(user) = &unit {
        findings.push(check_unit(files, user, other_user.is_some()));
    }
    // The lock of a running gateway proves that it may write there.
    if let Some(config) = config.filter(|_| !gateway.is_own()) {
        findings.push(check_state(&config.state, other_user.is_some()));
    }
    findings
}

fn check_state(state: &Path, is_for_other_user: bool) -> DoctorFinding {
    let Some(problem) = local_machine::state_directory_problem(state) else {
        return DoctorFinding::ok(AREA, format!("the state directory {} can be written", state.display()));
    };
    let why = "the gateway does not start without it";
    if is_for_other_user {
        let advice = "run doctor as the unit's user, who may be allowed to";
        return DoctorFinding::warning(AREA, problem, why, advice);
    }
    DoctorFinding::error(AREA, problem, why, "set `state`, or create the directory for the gateway's user")
}

/// Finds device files that this user may not open.
fn check_devices(files: &SystemFiles) -> Vec<DoctorFinding> {
    let entries = fs::read_dir(files.path("/dev")).into_iter().flatten().flatten();
    let is_gpu = |name: &String| {
        let number = name.strip_prefix("nvidia");
        let is_nvidia = number.is_some_and(|rest| {
            matches!(rest, "ctl" | "-uvm")
                || (!rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit()))
        });
        is_nvidia || name == "kfd"
    };
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut devices: Vec<String> = names.filter(is_gpu).collect();
    devices.sort();
    let mode = AccessFlags::R_OK | AccessFlags::W_OK;
    let may_open = |name: &String| access(&files.path(&format!("/dev/{name}")), mode).is_ok();
    let closed = devices.iter().filter(|name| !may_open(name)).map(|name| format!("/dev/{name}"));
    let closed: Vec<String> = closed.collect();
    let mut findings = Vec::new();
    if !closed.is_empty() {
        findings.push(DoctorFinding::error(
            AREA,
            format!("this user may not use {}", closed.join(", ")),
            "engines that the gateway starts as this user do not see the GPU",
            "add the user to the group of these files (usually render or video), and log in again",
        ));
    } else if !devices.is_empty() {
        findings.push(DoctorFinding::ok(AREA, format!("{} device files of GPUs can be used", devices.len())));
    }
    let has = |name: &str| devices.iter().any(|device| device == name);
    if has("nvidiactl") && !has("nvidia-uvm") {
        findings.push(DoctorFinding::warning(
            AREA,
            "/dev/nvidia-uvm does not exist",
            "CUDA needs it. The first program of root that uses CUDA creates it, and engines may not",
            "nvidia-modprobe -u -c=0 as root, as the unit of the package does before each start",
        ));
    }
    findings
}

/// Says as whom the unit runs. Otherwise findings for this user could be taken for those of the service.
fn check_unit(files: &SystemFiles, user: &str, is_other: bool) -> DoctorFinding {
    if uid_of(files, user).is_none() {
        return DoctorFinding::error(
            AREA,
            format!("the unit rouse.service runs as {user}, and there is no such user"),
            "systemd does not start the gateway",
            format!("create the user: useradd --system --home-dir /var/lib/rouse {user}"),
        );
    }
    if is_other {
        return DoctorFinding::warning(
            AREA,
            format!("the unit rouse.service runs as {user}, and this is another user"),
            "what this user may do proves little about the service",
            format!("sudo -u {user} rouse-gateway doctor --config /etc/rouse/rouse.yaml"),
        );
    }
    DoctorFinding::ok(AREA, format!("the unit rouse.service runs as this user, {user}"))
}

/// Returns the user of the gateway's unit; `None` without a unit. Drop-in files override the unit.
fn unit_user(files: &SystemFiles) -> Option<String> {
    let unit = UNITS.iter().find_map(|path| files.read(path))?;
    let folder = files.path("/etc/systemd/system/rouse.service.d");
    let mut drop_ins: Vec<_> =
        fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    drop_ins.retain(|path| path.extension().is_some_and(|end| end == "conf"));
    drop_ins.sort();
    let texts = std::iter::once(unit).chain(drop_ins.iter().filter_map(|path| fs::read_to_string(path).ok()));
    let user = texts.fold(None, |user, text| {
        let own = text.lines().filter_map(|line| line.trim().strip_prefix("User=")).next_back();
        own.map(|name| name.trim().to_owned()).or(user)
    });
    // A unit without a user runs as root, and so does one whose user is emptied.
    Some(user.filter(|name| !name.is_empty()).unwrap_or_else(|| "root".to_owned()))
}

/// Looks a user up in the machine's own list. Users of a directory service are unknown there.
fn uid_of(files: &SystemFiles, user: &str) -> Option<u32> {
    if let Ok(uid) = user.parse() {
        return Some(uid);
    }
    let users = files.read("/etc/passwd")?;
    let mut lines = users.lines().map(|line| line.split(':'));
    lines.find_map(|mut fields| (fields.next() == Some(user)).then(|| fields.nth(1)?.parse().ok()).flatten())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::cli::doctor::finding::FindingLevel;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\nrouse:x:998:998::/var/lib/rouse:/bin/false\n";

    fn system(extra: &[(&str, &str)]) -> (tempfile::TempDir, SystemFiles) {
        let root = tempfile::tempdir().unwrap();
        for (path, content) in [("etc/passwd", PASSWD)].iter().chain(extra) {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        let files = SystemFiles::below(root.path());
        (root, files)
    }

    fn found(files: &SystemFiles, uid: u32) -> Vec<(FindingLevel, String)> {
        let findings = check(None, &RunningGateway::default(), files, uid);
        findings.into_iter().map(|finding| (finding.level, finding.what)).collect()
    }

    #[test]
    fn the_units_user_is_compared_with_this_one_and_drop_ins_override_it() {
        let unit = ("lib/systemd/system/rouse.service", "[Service]\nUser=rouse\n");
        let (_root, files) = system(&[unit]);
        assert_eq!(found(&files, 998)[0].0, FindingLevel::Ok);
        assert_eq!(found(&files, 0)[0].0, FindingLevel::Warning);
        let (_root, files) =
            system(&[unit, ("etc/systemd/system/rouse.service.d/a.conf", "[Service]\nUser=root\n")]);
        assert_eq!(found(&files, 0)[0].0, FindingLevel::Ok);
        let (_root, files) = system(&[("etc/systemd/system/rouse.service", "User=nobody-there\n"), unit]);
        assert_eq!(found(&files, 0)[0].0, FindingLevel::Error);
        let (_root, files) = system(&[]);
        assert_eq!(found(&files, 0), []);
    }

    #[test]
    fn device_files_are_those_of_gpus_alone() {
        let (_root, files) =
            system(&[("dev/nvidia0", ""), ("dev/nvidiactl", ""), ("dev/nvidia-caps", ""), ("dev/null", "")]);
        let found = found(&files, 0);
        assert_eq!(found[0], (FindingLevel::Ok, "2 device files of GPUs can be used".to_owned()));
        assert_eq!(found[1].1, "/dev/nvidia-uvm does not exist");
    }

    /// Root may open everything.
    #[test]
    fn device_files_that_this_user_may_not_open_are_named() {
        let (root, files) = system(&[("dev/kfd", "")]);
        fs::set_permissions(root.path().join("dev/kfd"), fs::Permissions::from_mode(0o000)).unwrap();
        let is_root = rustix::process::geteuid().is_root();
        let expected = if is_root { FindingLevel::Ok } else { FindingLevel::Error };
        assert_eq!(found(&files, 0)[0].0, expected);
    }

    #[test]
    fn a_state_directory_that_cannot_be_made_is_an_error() {
        let (_root, files) = system(&[]);
        let config = rouse_config::parse("state: /dev/null/state", "t").unwrap();
        let findings = check(Some(&config), &RunningGateway::default(), &files, 0);
        assert_eq!(findings[0].level, FindingLevel::Error, "{findings:?}");
        let own = RunningGateway { answers: true, holds_state: true };
        assert_eq!(check(Some(&config), &own, &files, 0), []);
    }
}
