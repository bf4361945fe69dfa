//! What the sockets preload reports of a program's TCP connections.
//!
//! A report is a file of lines, each a JSON object: a [`Record`]. Any number of processes append to one file, each line with a
//! single `write` to a descriptor that was opened with `O_APPEND`, so lines are not mixed up, and a process that is killed loses at
//! most what it had not written yet. A record says all there is to say of its connection at that moment and replaces the connection's
//! earlier ones; [`Report::read`] does that.
//!
//! Readers take what is not there for empty, and leave alone what they do not know: writer and reader may be of different versions.

mod read;
mod record;

pub use read::Report;
pub use record::{Event, LINE, Record, Role, TEXT};
