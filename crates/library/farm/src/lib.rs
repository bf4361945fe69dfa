//! A farm: one manager distributes a job's input over many workers, and gathers their results.
//!
//! Each worker has a channel to its manager, in a segment of its own (a *slice*, which no other worker sees) or in one
//! that all share. A [`Manager`] attaches to all of these segments and maps them side by side. It writes each
//! *piece* of the input in place into a worker's ring; the worker works on it there, and sends its result.
//! While the worker works on one piece, the manager writes the next ([`Options::window`]), so transfer and work overlap.
//!
//! ```no_run
//! // A worker, anywhere: counts the bytes of each piece that are a newline.
//! let mut worker = ginnel_farm::Worker::connect("job.w1/farm", std::time::Duration::from_secs(60))?;
//! worker.serve(|task, result| {
//!     let lines = task.data.to_vec().iter().filter(|byte| **byte == b'\n').count();
//!     result.extend_from_slice(&(lines as u64).to_le_bytes());
//!     Ok(())
//! })?;
//! # Ok::<(), ginnel::Error>(())
//! ```
//!
//! ```no_run
//! // The manager, anywhere that is a member of both slices.
//! use ginnel_farm::{Manager, Options, Refusal, equal};
//! let mut manager = Manager::new(Options::default())?;
//! manager.listen_at("job.w1/farm")?;
//! manager.listen_at("job.w2/farm")?;
//! let input = std::fs::File::open("input")?;
//! let pieces = equal(input.metadata()?.len(), manager.longest_piece());
//! let mut lines = 0;
//! let report = manager.run("lines", pieces, input, |_piece, result| {
//!     let count = result.try_into().map_err(|_| Refusal::Nonsense("no number".into()))?;
//!     lines += u64::from_le_bytes(count);
//!     Ok(())
//! })?;
//! println!("{lines} lines from {} workers", report.workers.len());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Death, delay and lies
//!
//! The manager gives the pieces that a dead worker has not answered to other workers, and reads their bytes from the
//! [`Source`] again. A worker that connects during a job gets pieces at once. However often a piece is given, its result
//! counts once. A worker is another member, and the manager does not trust it: it can answer only the pieces that it holds,
//! with correct or wrong results. A worker that breaks the protocol is dismissed, and harms only itself.

pub mod count;
mod error;
mod job_state;
mod manager;
#[doc(hidden)] // For the fuzz target.
pub mod message;
mod program;
mod report;
mod source;
mod wait;
mod worker;
mod worker_channel;
mod worker_processes;

pub use error::{Error, Refusal};
pub use job_state::{JobState, Piece};
pub use manager::{Manager, Options, Run, Step};
pub use program::run_program;
pub use report::{Departure, Report, WorkerReport};
pub use source::{Generated, Source, equal};
pub use worker::{Task, Worker};
pub use worker_processes::WorkerProcesses;

/// The name at which a manager listens unless told otherwise.
pub const NAME: &str = "farm";
