//! One engine's life.
