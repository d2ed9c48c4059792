//! The slice of OpenAI's and Anthropic's wire formats that a gateway must touch, and no more.
//!
//! Bodies pass as they came: nothing here has a type for a message, a choice or a tool, because every field that is
//! modelled is a field that can be lost or reordered on the way. Four things cannot be avoided: reading which model a
//! request names ([`routing_fields`], and [`multipart`] for uploads), saying why a request fails ([`error`]), keeping a stream
//! alive that has nothing to say yet ([`heartbeat`]), and knowing where in a stream one is ([`sse`]).
//!
//! Whatever a client reads is written in the words of the API it called: [`ApiSchema`].

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
