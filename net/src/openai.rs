//! The parts of OpenAI's and Anthropic's wire formats that a gateway must handle.
//!
//! Bodies pass unchanged: no type here models a message, a choice or a tool, because a modelled field can be lost or
//! reordered on the way. Four tasks cannot be avoided: reading the model that a request names ([`routing_fields`], and
//! [`multipart`] for uploads), rendering why a request fails ([`error`]), keeping an idle stream alive ([`heartbeat`]),
//! and tracking the position in a stream ([`sse`]).
//!
//! Everything that a client reads follows the schema of the API that it called: [`ApiSchema`].

pub mod api_schema;
pub mod error;
mod hash;
pub mod heartbeat;
mod json_members;
pub mod multipart;
pub mod routing_fields;
pub mod sse;

pub use api_schema::ApiSchema;
pub use hash::stable_hash;
