//! Locations of the form `PATH` or `MEMBER:PATH`.

use ginnel_layout::Name;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

/// One end of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// The member that has the file; `None` for this machine.
    pub member: Option<String>,
    pub path: Vec<u8>,
}

impl Location {
    /// Parses a location. A colon makes it remote, unless a slash comes first (`./a:b` is a local file), as in scp(1).
    pub fn parse(text: &OsStr) -> Result<Self, String> {
        let bytes = text.as_bytes();
        if bytes.is_empty() {
            return Err("an empty path".into());
        }
        let local = Self { member: None, path: bytes.to_vec() };
        let Some(colon) = bytes.iter().position(|&b| b == b':' || b == b'/').filter(|&at| bytes[at] == b':')
        else {
            return Ok(local);
        };
        let member = String::from_utf8_lossy(&bytes[..colon]).into_owned();
        match Name::new(&member) {
            Ok(_) => Ok(Self { member: Some(member), path: bytes[colon + 1..].to_vec() }),
            Err(reason) => Err(format!(
                "{:?}: {member:?} is not a name of a member: {reason}; write a local file with a colon as ./FILE",
                text.to_string_lossy()
            )),
        }
    }

    /// Returns the last component, under which the source appears in a folder; empty if it has none (`.`, `..`, `/`).
    pub fn base(&self) -> &[u8] {
        base(&self.path)
    }
}

/// Returns the last component of a path; empty for `.`, `..` and `/`.
pub fn base(path: &[u8]) -> &[u8] {
    let end = path.iter().rposition(|&b| b != b'/').map_or(0, |at| at + 1);
    let start = path[..end].iter().rposition(|&b| b == b'/').map_or(0, |at| at + 1);
    match &path[start..end] {
        b"." | b".." => b"",
        name => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> (Option<String>, String) {
        let location = Location::parse(text.as_ref()).unwrap();
        (location.member, String::from_utf8(location.path).unwrap())
    }

    #[test]
    fn a_colon_before_a_slash_names_a_member() {
        assert_eq!(parse("vm-a:/tmp/x"), (Some("vm-a".into()), "/tmp/x".into()));
        assert_eq!(parse("vm-a:"), (Some("vm-a".into()), "".into()));
        assert_eq!(parse("vm-a:x:y"), (Some("vm-a".into()), "x:y".into()));
        assert_eq!(parse("./a:b"), (None, "./a:b".into()));
        assert_eq!(parse("/a:b"), (None, "/a:b".into()));
        assert_eq!(parse("plain"), (None, "plain".into()));
        assert!(Location::parse(":x".as_ref()).is_err() && Location::parse("a b:x".as_ref()).is_err());
    }

    #[test]
    fn base_names() {
        for (path, name) in [
            ("a", "a"),
            ("/a/b", "b"),
            ("a/b//", "b"),
            (".", ""),
            ("a/..", ""),
            ("/", ""),
            ("", ""),
            ("...", "..."),
        ] {
            assert_eq!(base(path.as_bytes()), name.as_bytes(), "{path}");
        }
    }
}
