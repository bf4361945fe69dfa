//! The interface of volumes: their configuration, the protocol of their control socket with a small blocking client,
//! and their statistics as JSON and Prometheus text.
//!
//! The volume itself, the command `ginnel` and tests share this crate. Nothing here opens an image or maps memory.

mod client;
pub mod config;
mod controller;
mod limits;
mod paths;
mod prometheus;
mod queue_state;
mod request;
mod stat;

pub use client::{Client, Error};
pub use controller::{CompletionQueue, Controller};
pub use limits::{LimitChange, Limits};
pub use paths::VolumePaths;
pub use prometheus::prometheus;
pub use queue_state::{Dump, InFlight, QueueState};
pub use request::{Answer, REQUEST_MAX, Request};
pub use stat::{DiskStat, FrontEnd, Latency, OperationStat, QueueStat, Stat, ThreadStat};
