//! What every controller has in common.
//!
//! ```text
//!   caches ──▶ inputs ──▶ apply ─┐
//!   election ──▶ term_changed ───┤──▶ decide ──▶ tasks ──▶ finished ─┐
//!   clock ──▶ next_deadline ─────┘      ▲                            │
//!                                       └────────────────────────────┘
//! ```
//!
//! A controller is a [`Component`], and [`run`] drives it: a component has no loop, no timer, no channel to the
//! election and no set of tasks of its own. Its methods are synchronous and make no calls. Whatever takes time is a
//! task whose outcome comes back through [`Component::finished`]. [`ControllerThread`] gives components threads of
//! their own, so that none delays the thread that renews the Lease or the one that turns the driver.

mod component;
mod tasks;
mod terms;
mod threads;

pub(crate) use self::{
    component::{Component, run},
    tasks::{Tasks, outcome},
    terms::Terms,
    threads::ControllerThread,
};
