//! Reads the devices of a DeviceConfiguration.

use std::collections::{BTreeMap, BTreeSet};

use http::Uri;
use rouse::units::Millis;

use super::{AcceptedDiscovery, ID_PROPERTY, URL_PROPERTY};
use crate::{
    convert::{names, spec_reader::SpecReader},
    crd::device_configuration::{Discovery, HttpDiscovery, HttpEndpoint, StaticDevice, StaticDiscovery},
};

/// Reads the discovery; `None` if no single one is set.
pub(super) fn discovery(reader: &mut SpecReader, written: &Discovery) -> Option<AcceptedDiscovery> {
    match (&written.accelerators, &written.listed, &written.http) {
        (Some(_), None, None) => Some(AcceptedDiscovery::Accelerators),
        (None, Some(listed), None) => {
            Some(AcceptedDiscovery::Static { devices: listed_devices(reader, listed) })
        }
        (None, None, Some(http)) => Some(endpoints(reader, http)),
        (None, None, None) => {
            reader.reject_spec("discovery is empty: set accelerators, static or http");
            None
        }
        _ => {
            reader.reject_spec(
                "discovery.accelerators, discovery.static and discovery.http exclude each other: keep one of them, \
                 and create another DeviceConfiguration for each of the others",
            );
            None
        }
    }
}

fn listed_devices(reader: &mut SpecReader, written: &StaticDiscovery) -> Vec<StaticDevice> {
    if written.devices.is_empty() {
        reader.reject_spec("discovery.static.devices is empty: list the devices");
    }
    let mut ids = BTreeSet::new();
    let read = |device: &StaticDevice| {
        let at = format!("discovery.static.devices '{}'", device.id.escape_debug());
        if device.id.is_empty() {
            reader.reject_spec(format!("{at}: the id is empty"));
        }
        if !ids.insert(device.id.clone()) {
            reader.reject_spec(format!("{at} is listed twice: remove one of the two"));
        }
        for name in device.nodes.iter().filter(|name| !names::is_dns_subdomain(name)) {
            reader.reject_spec(format!("{at}: '{}' is not the name of a node", name.escape_debug()));
        }
        let properties = properties(reader, &at, &device.properties, (ID_PROPERTY, device.id.as_str()));
        StaticDevice { properties, ..device.clone() }
    };
    written.devices.iter().map(read).collect()
}

fn endpoints(reader: &mut SpecReader, written: &HttpDiscovery) -> AcceptedDiscovery {
    let at = "discovery.http";
    if written.endpoints.is_empty() {
        reader.reject_spec(format!("{at}.endpoints is empty: list the servers"));
    }
    if written.timeout_seconds == 0 || written.timeout_seconds > written.interval_seconds {
        reader.reject_spec(format!(
            "{at}.timeoutSeconds ({}) must be at least 1 and at most intervalSeconds ({})",
            written.timeout_seconds, written.interval_seconds
        ));
    }
    let mut urls = BTreeSet::new();
    let read = |endpoint: &HttpEndpoint| {
        let at = format!("{at}.endpoints '{}'", endpoint.url.escape_debug());
        if !urls.insert(endpoint.url.clone()) {
            reader.reject_spec(format!("{at} is listed twice: remove one of the two"));
        }
        if !is_http_url(&endpoint.url) {
            reader.reject_spec(format!(
                "{at} is not a URL: write http://HOST:PORT/PATH, or https, without a password"
            ));
        }
        let properties = properties(reader, &at, &endpoint.properties, (URL_PROPERTY, endpoint.url.as_str()));
        HttpEndpoint { properties, ..endpoint.clone() }
    };
    AcceptedDiscovery::Http {
        endpoints: written.endpoints.iter().map(read).collect(),
        interval: Millis::secs(u64::from(written.interval_seconds)),
        timeout: Millis::secs(u64::from(written.timeout_seconds)),
    }
}

fn is_http_url(text: &str) -> bool {
    let Ok(url) = text.parse::<Uri>() else { return false };
    let has_host = url.authority().is_some_and(|authority| !authority.as_str().contains('@'));
    // The parser drops a fragment silently, so the check for `#` reads the text.
    matches!(url.scheme_str(), Some("http" | "https")) && has_host && !text.contains('#')
}

/// Reads the properties of a device, and adds the one that all devices of its kind have.
fn properties(
    reader: &mut SpecReader,
    at: &str,
    written: &BTreeMap<String, String>,
    (own, value): (&str, &str),
) -> BTreeMap<String, String> {
    let mut variables = BTreeSet::new();
    for name in written.keys() {
        if !is_property_name(name) {
            reader.reject_spec(format!(
                "{at}: '{}' is not the name of a property: write letters, digits and '_', and no digit at the start",
                name.escape_debug()
            ));
        }
        if name == own {
            reader.reject_spec(format!("{at}: the property '{own}' is set by Rouse: remove it"));
        } else if !variables.insert(name.to_ascii_uppercase()) || name.eq_ignore_ascii_case(own) {
            reader.reject_spec(format!(
                "{at}: two properties are named '{}', but for the case of letters, and would be one variable: rename \
                 one of them",
                name.escape_debug()
            ));
        }
    }
    let mut properties = written.clone();
    properties.insert(own.to_owned(), value.to_owned());
    properties
}

/// Whether it can be the name of a variable, too.
pub(super) fn is_property_name(name: &str) -> bool {
    name.starts_with(|letter: char| letter.is_ascii_alphabetic() || letter == '_')
        && name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_')
}
