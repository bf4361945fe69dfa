//! What the tests of several crates share. No product code may depend on this crate.
//!
//! | module | for tests that |
//! |---|---|
//! | [`skip`](mod@skip) | lack something on this machine |
//! | [`wait`] | wait for a condition, under a watchdog that watches progress |
//! | [`random`] | need numbers that look random and can be repeated |
//! | [`program`](mod@program) | start a process of their own code |
//! | [`stepper`] | stop or kill a process at any of its instructions |
//! | `mortal` | let a process die between two stores to shared memory (feature `memory`) |
//! | [`models`] | run operations that a property test or the fuzzer makes, and know what must happen |
//! | [`hold`] | send a program what holds up its receiver |
//! | [`process`] | send signals to their processes, or look at them |
//! | [`build`] | start a program of another package |
//! | `daemon` (feature) | need a running `ginneld`, and clients that speak to it |
//! | `world` (feature) | need a daemon, and the command beside it |

pub mod build;
#[cfg(feature = "daemon")]
pub mod daemon;
pub mod hold;
pub mod models;
#[cfg(feature = "memory")]
pub mod mortal;
pub mod process;
pub mod program;
pub mod random;
pub mod skip;
pub mod stepper;
pub mod wait;
#[cfg(feature = "world")]
pub mod world;
