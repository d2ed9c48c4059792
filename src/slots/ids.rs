//! Names of configurations, instances, slots and virtual devices.

string_ids! {
    /// A DeviceConfiguration: devices of one kind.
    ConfigurationName;
    /// A DeviceInstance: one device. It ends in the digest of the device's id.
    InstanceName;
    /// A slot: `INSTANCE-NUMBER`.
    SlotName;
    /// A virtual device of a configuration on one node: `CONFIGURATION-NUMBER`.
    VirtualId;
}
