//! Slots beside a real kubelet: the node's agent is a process on the kubelet's sockets, and containers get the slots.
//!
//! All these tests share one node, of a cluster of their own, because a leader acts on all slots of its cluster. They
//! use it one after the other: they stop its kubelet, its agent, or all of it.

mod agent;
#[path = "../cluster/slots/agent_process.rs"]
mod agent_process;
mod containers;
#[path = "../cluster/slots/device.rs"]
#[allow(dead_code, reason = "the tests beside kubelets that they play need the rest of it")]
mod device;
mod ended;
mod rejected;
mod restarts;
mod slots_node;
mod switches;
mod worker;
