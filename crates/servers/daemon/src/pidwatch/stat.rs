//! `/proc/PID/stat`, and the user in `/proc/PID/status`, read without memory from the allocator.

use ginnel_broker::process::Image;
use rustix::fs::{CWD, Mode, OFlags, openat};
use std::ffi::CStr;
use std::io::{Cursor, Write};

/// What is known about a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen<T> {
    /// This is true of it.
    Is(T),
    /// There is no such process, as far as this one may see.
    Gone,
    /// Nobody could look.
    Unknown,
}

impl<T> From<Option<T>> for Seen<T> {
    fn from(seen: Option<T>) -> Self {
        seen.map_or(Self::Gone, Self::Is)
    }
}

impl<T> Seen<T> {
    /// Returns what is true, if that is known.
    pub fn known(self) -> Option<T> {
        match self {
            Self::Is(seen) => Some(seen),
            Self::Gone | Self::Unknown => None,
        }
    }
}

/// The fields that are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// The time at which the process started (field 22).
    pub started: u64,
    /// The program that it runs.
    pub image: Image,
}

impl Stat {
    /// Makes it of the fields 22, 26 and 28.
    pub fn new(started: u64, code: u64, stack: u64) -> Self {
        Self { started, image: Image { code, stack } }
    }
}

/// Reads the line. Returns `None` if there is no such process.
pub fn read(pid: u32) -> Option<Stat> {
    // A name has at most 64 bytes here, and each of the other 51 fields at most 20.
    let mut line = [0; 2048];
    parse(read_file(pid, "stat", &mut line)?)
}

/// Returns the user on whose behalf a process runs. `None` if it has ended.
pub fn user_of(pid: u32) -> Option<u32> {
    // The user is near the beginning. (The owner of the files in /proc is root for a process that must not be dumped.)
    let mut status = [0; 1024];
    let status = read_file(pid, "status", &mut status)?;
    let line = status.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"Uid:"))?;
    // The real one comes first, and then the effective one.
    std::str::from_utf8(line).ok()?.split_ascii_whitespace().nth(1)?.parse().ok()
}

fn read_file<'a>(pid: u32, name: &str, buffer: &'a mut [u8]) -> Option<&'a [u8]> {
    if pid == 0 {
        return None;
    }
    // The longest number has ten digits, and a zero ends the path.
    let mut path = Cursor::new([0; 32]);
    write!(path, "/proc/{pid}/{name}").ok()?;
    let path = path.into_inner();
    let path = CStr::from_bytes_until_nul(&path).ok()?;
    let file = openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let len = rustix::io::read(&file, &mut *buffer).ok()?;
    Some(&buffer[..len])
}

/// Parses the line. Its second field is a name in parentheses that may contain any bytes, so the fields are counted from behind the
/// last parenthesis.
fn parse(line: &[u8]) -> Option<Stat> {
    let end = line.iter().rposition(|&byte| byte == b')')?;
    let fields = std::str::from_utf8(&line[end + 1..]).ok()?;
    // The first field here is the third of the line.
    let field = |number: usize| fields.split_ascii_whitespace().nth(number - 3)?.parse().ok();
    Some(Stat::new(field(22)?, field(26)?, field(28)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_is_parsed() {
        let stat =
            b"42 (a) b) S) R 1 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 77 2 3 9 5 6 7 8 9 0 0 0 0 0 0 0 0";
        assert_eq!(parse(stat), Some(Stat::new(77, 5, 7)));
        for cut in [&b"1 (x"[..], b"1 (x) R 2", b"", b")", b"1 (\xff) R 2"] {
            assert_eq!(parse(cut), None);
        }
    }
}
