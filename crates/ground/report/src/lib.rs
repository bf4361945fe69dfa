//! The sockets preload library's report about a program's TCP connections.
//!
//! A report is a file of lines, each of which is a JSON object: a [`Record`]. Any number of processes append to one file. Each
//! line is a single `write` to a descriptor that was opened with `O_APPEND`, so lines do not mix, and a process that is killed
//! loses at most what it had not written yet. A record contains everything about its connection at that moment and replaces the
//! connection's earlier records; [`Report::read`] applies this rule.
//!
//! A reader treats a missing field as empty and ignores an unknown field, because writer and reader may have different versions.

mod read;
mod record;

pub use read::Report;
pub use record::{Event, LINE, Record, Role, TEXT};
