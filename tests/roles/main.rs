//! One gateway leads and the others follow: what each decides, and what happens when that changes.
//!
//! `follower` has what a follower decides, and `takeover` what changes when a gateway begins or ceases to lead.

mod follower;
mod harness;
mod takeover;
