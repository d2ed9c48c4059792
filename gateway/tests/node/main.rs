//! A gateway beside a real kubelet: engines are containers of our images, the scheduler counts accelerators, and the
//! kubelet probes stubs. Other tests cover the gateway's decisions with Pods that are processes; these tests cover what
//! only a node can show.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod chart;
mod dual;
mod ends;
mod external;
mod failures;
mod flow;
#[path = "../cluster/granted.rs"]
mod granted;
mod images;
#[path = "../cluster/installation.rs"]
#[allow(dead_code, reason = "the tests beside Pods that are processes need the rest of it")]
mod installation;
#[path = "../cluster/launched.rs"]
#[allow(dead_code, reason = "the tests beside Pods that are processes need the rest of it")]
mod launched;
mod pages;
#[path = "../cluster/pairs.rs"]
#[allow(dead_code, reason = "the tests beside Pods that are processes need the rest of it")]
mod pairs;
#[path = "../cluster/rendered.rs"]
#[allow(dead_code, reason = "the tests beside Pods that are processes need the rest of it")]
mod rendered;
mod shared_node;
#[path = "../cluster/site.rs"]
#[allow(dead_code, reason = "the tests beside Pods that are processes need the rest of it")]
mod site;
mod slots;
#[path = "../cluster/summary.rs"]
mod summary;
#[path = "../cluster/support.rs"]
#[allow(dead_code, reason = "the tests beside Pods that are processes need the rest of it")]
mod support;
mod warmup;
#[path = "../cluster/warmup/objects.rs"]
#[allow(dead_code, reason = "the tests beside Pods that are processes need the rest of it")]
mod warmup_objects;

use rouse_testing::raw_client as client;
