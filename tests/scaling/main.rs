//! Targets of saturation: replicas start and end by them without taking what others use. Variants run side by side.

mod harness;
mod lower_targets;
mod restarts;
mod targets;
mod variants;
