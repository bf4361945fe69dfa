//! How configurations are written, and what is said of mistakes in them: the same in files, on command lines and in
//! requests, of every program.
//!
//! - [`Bytes`], [`Period`], [`seconds`]: amounts with units.
//! - [`Mode`], [`Account`]: who may use a file.
//! - [`words!`], [`LogFormat`]: a choice of words.
//! - [`Problem`]: a mistake, with place and fix; [`from_toml`], [`check_socket_path`].

mod access;
mod amount;
mod problem;
mod words;

pub use access::{Account, Mode};
pub use amount::{Bytes, Period, seconds};
pub use problem::{Problem, SOCKET_PATH_MAX, check_socket_path, from_toml};
pub use words::LogFormat;
