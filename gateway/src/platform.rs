//! The platform of one machine. A cluster's is in `rouse_controllers::platform`.

pub mod local;
