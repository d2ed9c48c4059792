//! Reads `accelerators`: detected by the driver, or declared.

use std::{collections::BTreeMap, path::PathBuf};

use rouse::{
    model::{Accelerator, AcceleratorId},
    units::Bytes,
};

use super::{
    engine::variables,
    reader::ConfigReader,
    yaml::{YamlNode, YamlValue},
};

/// Content of `accelerators`.
pub(super) struct AcceleratorsConfig {
    pub(super) auto: bool,
    pub(super) list: Vec<Accelerator>,
    pub(super) meters: BTreeMap<AcceleratorId, PathBuf>,
    pub(super) visible: BTreeMap<AcceleratorId, BTreeMap<String, String>>,
}

impl Default for AcceleratorsConfig {
    fn default() -> Self {
        Self { auto: true, list: Vec::new(), meters: BTreeMap::new(), visible: BTreeMap::new() }
    }
}

impl AcceleratorsConfig {
    /// The accelerators, if the file declares them.
    pub(super) fn declared(&self) -> Option<&[Accelerator]> {
        (!self.auto).then_some(&self.list)
    }
}

pub(super) fn read_accelerators(
    reader: &mut ConfigReader,
    node: &YamlNode,
    headroom: Bytes,
) -> Option<AcceleratorsConfig> {
    if !matches!(node.value, YamlValue::List(_)) {
        return reader.choice(node, &[("auto", ())]).map(|()| AcceleratorsConfig::default());
    }
    let mut devices = AcceleratorsConfig { auto: false, ..AcceleratorsConfig::default() };
    reader.list(node, |reader, node| {
        let mut section = reader.section(node);
        let id = section.require(reader, "id", ConfigReader::text);
        let memory = section.require(reader, "memory", ConfigReader::memory);
        let meter = section.read(reader, "meter", ConfigReader::text);
        let visible = section.read(reader, "visible", |reader, node| variables(reader, node, ConfigReader::text));
        let at = section.at;
        section.close(reader);
        let (id, memory) = (AcceleratorId::from(id?), memory?);
        if id.as_str().is_empty() || id.as_str().contains(',') {
            reader.note(at, "an accelerator's id must not be empty or contain a comma");
        }
        if devices.list.iter().any(|other| other.id == id) {
            reader.note(at, format_args!("the accelerator '{id}' is listed twice"));
        }
        if memory <= headroom {
            reader.note(
                at,
                format_args!(
                    "memory {memory} does not exceed headroom {headroom}: set the accelerator's real memory, or a \
                     smaller headroom"
                ),
            );
        }
        let capacity = memory.saturating_sub(headroom);
        devices
            .list
            .push(Accelerator { metered: meter.is_some(), ..Accelerator::new(id.clone(), capacity) });
        if let Some(visible) = visible {
            devices.visible.insert(id.clone(), visible);
        }
        if let Some(meter) = meter {
            devices.meters.insert(id, meter.into());
        }
        Some(())
    });
    Some(devices)
}
