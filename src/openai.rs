//! The slice of OpenAI's wire formats that a gateway must touch, and no more.
//!
//! Bodies pass as they came: nothing here has a type for a message, a choice or a tool, because every field that is
//! modelled is a field that can be lost or reordered on the way. Three things cannot be avoided: reading which model a
//! request names ([`head`]), saying why a request fails ([`error`]), and knowing where in a stream one is ([`sse`]).

pub mod error;
pub mod form;
pub mod head;
pub mod sse;

pub use form::Form;
