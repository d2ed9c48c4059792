//! Examines the listeners' addresses and the ports of engines, and finds a running gateway.

use rouse_config::{Config, DEFAULT_ADMIN_ADDRESS, host::SystemFiles};
use rouse_net::port;

use super::finding::DoctorFinding;
use crate::{
    cli::client::{self, AdminClient, AdminEndpoint},
    platform::local,
    serve,
};

const AREA: &str = "ports";

/// Whether a gateway runs here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RunningGateway {
    /// A gateway answers at the address of the admin API.
    pub(super) answers: bool,
    /// A gateway holds the state directory of the configuration.
    pub(super) holds_state: bool,
}

impl RunningGateway {
    /// Whether it is the configuration's own gateway that runs, whose ports are taken by itself.
    pub(super) const fn is_own(self) -> bool {
        self.holds_state
    }
}

/// Looks for a gateway at the admin address and in the state directory.
pub(super) async fn find_gateway(config: Option<&Config>) -> RunningGateway {
    let address = config.map_or(DEFAULT_ADMIN_ADDRESS, |config| config.admin.address);
    // Another program may have the port, so it is sent no token.
    let asked = AdminClient::new(AdminEndpoint::from(address), None).get("/healthz").await;
    let answers = matches!(asked, Ok(_) | Err(client::Error::TokenRequired(_) | client::Error::Refused(_)));
    RunningGateway { answers, holds_state: config.is_some_and(|config| local::is_in_use(&config.state)) }
}

pub(super) fn check(
    config: Option<&Config>,
    gateway: &RunningGateway,
    files: &SystemFiles,
) -> Vec<DoctorFinding> {
    let mut findings = Vec::new();
    let admin = config.map_or(DEFAULT_ADMIN_ADDRESS, |config| config.admin.address);
    match (gateway.answers, gateway.holds_state) {
        (true, true) => {
            findings.push(DoctorFinding::ok(AREA, format!("the gateway runs, and answers at {admin}")))
        }
        (false, true) => {
            findings.push(DoctorFinding::ok(
                AREA,
                "a gateway runs with this state directory, on other addresses or with TLS",
            ));
        }
        (true, false) => {
            findings.push(DoctorFinding::ok(AREA, format!("another gateway answers at {admin}")))
        }
        (false, false) => {}
    }
    if let Some(config) = config.filter(|_| !gateway.is_own()) {
        findings.extend(check_listeners(config));
    }
    if config.is_none_or(|config| config.kubernetes.is_none()) {
        findings.extend(check_engine_ports(files));
    }
    findings
}

fn check_listeners(config: &Config) -> Vec<DoctorFinding> {
    let errors: Vec<_> = serve::bind_errors(config.api, config.admin.address).collect();
    if errors.is_empty() {
        let what = format!("{} and {} are free", config.api, config.admin.address);
        return vec![DoctorFinding::ok(AREA, what)];
    }
    let finding = |error: &serve::Error| {
        let text = error.to_string();
        let elsewhere = "set another address: listen.api, listen.admin";
        let (what, advice) = text.split_once("; ").unwrap_or((text.as_str(), elsewhere));
        DoctorFinding::error(AREA, what, "the gateway does not start", advice)
    };
    errors.iter().map(finding).collect()
}

/// Checks that the kernel leaves the ports alone that engines get.
fn check_engine_ports(files: &SystemFiles) -> Option<DoctorFinding> {
    let range = files.read("/proc/sys/net/ipv4/ip_local_port_range")?;
    let lowest = port::lowest_ephemeral_port(&range)?;
    let (first, end) = (port::CANDIDATE_PORTS.start, port::CANDIDATE_PORTS.end);
    Some(if lowest >= end {
        DoctorFinding::ok(AREA, format!("engines get ports from {first} to {}", end - 1))
    } else {
        DoctorFinding::warning(
            AREA,
            format!("the kernel gives ports from {lowest} on to connections"),
            format!(
                "engines bind their ports minutes after these are chosen, and get them from the same range instead of \
                 {first} to {}: a start can fail because its port was taken meanwhile",
                end - 1
            ),
            "sysctl -w net.ipv4.ip_local_port_range=\"32768 60999\", and in /etc/sysctl.d",
        )
    })
}

#[cfg(test)]
mod tests {
    use std::{fs, net::TcpListener};

    use super::*;
    use crate::cli::doctor::finding::FindingLevel;

    fn system(range: &str) -> (tempfile::TempDir, SystemFiles) {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("proc/sys/net/ipv4")).unwrap();
        fs::write(root.path().join("proc/sys/net/ipv4/ip_local_port_range"), range).unwrap();
        let files = SystemFiles::below(root.path());
        (root, files)
    }

    #[test]
    fn a_taken_port_is_an_error_unless_the_own_gateway_has_taken_it() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let text = format!("listen: {{api: '127.0.0.1:{port}', admin: '127.0.0.1:0'}}");
        let config = rouse_config::parse(&text, "t").unwrap();
        let (_root, files) = system("32768\t60999\n");
        let found = check(Some(&config), &RunningGateway::default(), &files);
        assert_eq!(found[0].level, FindingLevel::Error);
        assert!(found[0].what.contains("address in use"), "{found:?}");
        assert!(found[0].advice.as_ref().unwrap().contains("ss -ltnp"), "{found:?}");
        let own = RunningGateway { answers: true, holds_state: true };
        let found = check(Some(&config), &own, &files);
        assert!(found.iter().all(|finding| finding.level == FindingLevel::Ok), "{found:?}");
    }

    #[test]
    fn engines_need_a_range_that_no_connection_is_given() {
        let (_root, files) = system("1024\t65535\n");
        assert_eq!(check_engine_ports(&files).unwrap().level, FindingLevel::Warning);
        let (_root, files) = system("32768\t60999\n");
        assert_eq!(check_engine_ports(&files).unwrap().level, FindingLevel::Ok);
    }

    #[tokio::test]
    async fn a_gateway_is_found_where_it_answers() {
        let state = tempfile::tempdir().unwrap();
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = silent.local_addr().unwrap();
        drop(silent);
        let text = format!("listen: {{api: '127.0.0.1:0', admin: '{address}'}}\nstate: {:?}", state.path());
        let config = rouse_config::parse(&text, "t").unwrap();
        assert_eq!(find_gateway(Some(&config)).await, RunningGateway::default());
    }
}
