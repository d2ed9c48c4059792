//! The gateway: listeners, the driver, the platforms.

pub mod config;
pub mod demo;
pub mod driver;
pub mod platform;
pub mod routes;
