//! The gateway: listeners, the driver, the platforms.

pub mod config;
pub mod driver;
pub mod http;
pub mod platform;
pub mod routes;
pub mod serve;
