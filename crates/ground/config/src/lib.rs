//! The notation of configurations and the messages about mistakes in them. They are the same in files, on command lines and in
//! requests, and for every program.
//!
//! - [`Bytes`], [`Period`], [`seconds`]: amounts with units.
//! - [`Mode`], [`Account`]: permissions and owners of files.
//! - [`words!`], [`LogFormat`]: enumerations that are written as words.
//! - [`Problem`]: a mistake, with its place and a fix; [`from_toml`], [`check_socket_path`].

mod access;
mod amount;
mod problem;
mod words;

pub use access::{Account, Mode};
pub use amount::{Bytes, Period, seconds};
pub use problem::{Problem, SOCKET_PATH_MAX, check_socket_path, from_toml};
pub use words::LogFormat;
