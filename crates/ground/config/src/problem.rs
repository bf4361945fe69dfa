//! Mistakes in configurations.

use serde::de::DeserializeOwned;
use std::fmt::Display;
use std::path::Path;
use thiserror::Error;

/// A mistake: what is wrong, where it is, and how to fix it. Its text is one line.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{place}: {what}; {fix}")]
pub struct Problem {
    /// The file and key.
    pub place: String,
    /// What is wrong.
    pub what: String,
    /// How to fix it.
    pub fix: String,
}

impl Problem {
    /// Makes a problem at `place`.
    pub fn new(place: impl Display, what: impl Display, fix: impl Display) -> Self {
        Self { place: place.to_string(), what: what.to_string(), fix: fix.to_string() }
    }
}

/// Reads a configuration from TOML. The error names `file` and the line of the mistake, and suggests `fix`.
pub fn from_toml<T: DeserializeOwned>(text: &str, file: &Path, fix: &str) -> Result<T, Problem> {
    toml::from_str(text).map_err(|error| {
        let mut place = file.display().to_string();
        let mut what = error.message().trim().replace('\n', ", ");
        if let Some(span) = error.span() {
            let before = text.get(..span.start).unwrap_or_default();
            place += &format!(":{}", before.matches('\n').count() + 1);
            if what == "duplicate key" {
                what = format!("{what} {}", text.get(span).unwrap_or_default());
            }
        }
        Problem::new(place, what, fix)
    })
}

/// The longest path of a socket in bytes: `sun_path` without its final zero byte, unix(7).
pub const SOCKET_PATH_MAX: usize = 107;

/// Checks that a path is short enough for a Unix socket.
pub fn check_socket_path(path: &Path, place: impl Display, fix: impl Display) -> Result<(), Problem> {
    let length = path.as_os_str().len();
    if length <= SOCKET_PATH_MAX {
        return Ok(());
    }
    let path = path.display();
    let what = format!("the socket path {path} has {length} bytes, a Unix socket takes {SOCKET_PATH_MAX}");
    Err(Problem::new(place, what, fix))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Spec {
        #[expect(dead_code)]
        a: u8,
    }

    #[test]
    fn mistakes_in_a_file_have_a_line() {
        for (text, says) in [
            ("\nb = 1", "f.toml:2: unknown field `b`, expected `a`; look"),
            ("a = 1\n\na = 2", "f.toml:3: duplicate key a; look"),
            ("a = 300", "f.toml:1: invalid value: integer `300`"),
            ("a = \"", "f.toml:1: invalid basic string, expected `\"`"),
            ("", "f.toml:1: missing field `a`; look"),
        ] {
            let problem = from_toml::<Spec>(text, Path::new("f.toml"), "look").unwrap_err().to_string();
            assert!(problem.starts_with(says), "{text:?}: {problem}");
            assert!(!problem.contains('\n'), "{problem}");
        }
    }

    #[test]
    fn socket_paths_are_limited_in_length() {
        let path = |n| "x".repeat(n);
        assert!(check_socket_path(Path::new(&path(107)), "socket", "shorter").is_ok());
        let problem = check_socket_path(Path::new(&path(108)), "socket", "shorter").unwrap_err();
        assert!(problem.what.ends_with("has 108 bytes, a Unix socket takes 107"), "{problem}");
    }
}
