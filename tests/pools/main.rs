//! What models say of themselves (when they may be put away, how their requests wait), and pools of accelerators of which
//! somebody else picks the ones.

mod own_policy;
mod taken;
mod world;
