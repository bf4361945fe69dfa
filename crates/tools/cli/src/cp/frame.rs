//! The messages of a copy: each consists of a [`Frame`] and the bytes that follow it.
//!
//! The client opens a message channel to `cp@MEMBER` and sends `PUT` or `GET`. Then one side sends files and the other
//! receives them, with the same frames for both requests:
//!
//! | kind | from | fields | followed by |
//! |---|---|---|---|
//! | `PUT` | client | flags, version | the target's path |
//! | `GET` | client | flags, version | the sources' paths, separated by NUL |
//! | `READY` | server | | |
//! | `TOP` | sender | | a source's base name, empty for `.` and `/` |
//! | `FOLDER` | sender | | its path below the source, empty for the source itself, as in all below |
//! | `LEAVE` | sender | mode, time | the path of a folder whose content is complete |
//! | `FILE` | sender | mode, time, size | its path |
//! | `HAVE` | receiver | size, checksum | in answer to a large `FILE`: how much is here already, and its checksum |
//! | `DATA` | sender | size: offset, checksum of the file up to the end of this block | bytes |
//! | `END` | sender | size, checksum of the whole file | |
//! | `DROP` | sender | | text: why the file cannot be read to its end |
//! | `LINK` | sender | time, extra: bytes of the path | path and target of a symbolic link |
//! | `REFUSED` | sender | | text: what is not copied, and why |
//! | `DONE` | sender | | |
//! | `STORED` | receiver | | everything is in its place |
//! | `ERROR` | either | | text; nothing follows |
//!
//! Unused fields are zero. Paths are relative byte strings without NUL, `.` and `..`.

use anyhow::{Result, bail, ensure};
use ginnel::{Message, MessageReceiver, MessageSender};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Version of this protocol, in `PUT` and `GET`.
pub const VERSION: u32 = 1;

/// The smallest size of a file that can be continued after an interrupted copy; smaller files begin anew.
pub const RESUMABLE: u64 = 1 << 20;

/// The largest message that is not `DATA`. It fits into the smallest ring that a copy uses.
pub const MAX_CONTROL: usize = 12 << 10;
/// The number of bytes of a text that are sent.
const MAX_TEXT: usize = 8 << 10;
/// The largest length of a path or of a symbolic link's target.
pub const MAX_PATH: usize = 4096;

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct Kind(pub u32);

impl Kind {
    pub const PUT: Self = Self(1);
    pub const GET: Self = Self(2);
    pub const READY: Self = Self(3);
    pub const TOP: Self = Self(4);
    pub const FOLDER: Self = Self(5);
    pub const LEAVE: Self = Self(6);
    pub const FILE: Self = Self(7);
    pub const HAVE: Self = Self(8);
    pub const DATA: Self = Self(9);
    pub const END: Self = Self(10);
    pub const DROP: Self = Self(11);
    pub const LINK: Self = Self(12);
    pub const REFUSED: Self = Self(13);
    pub const DONE: Self = Self(14);
    pub const STORED: Self = Self(15);
    pub const ERROR: Self = Self(16);
}

/// The header of each message.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Frame {
    pub kind: Kind,
    /// Permission bits, or [`flags`].
    pub mode: u32,
    pub size: u64,
    pub checksum: u64,
    /// Time of the last modification.
    pub seconds: i64,
    pub nanos: u32,
    pub extra: u32,
}
const _: () = assert!(size_of::<Frame>() == Frame::LEN && Frame::LEN.is_multiple_of(8));

/// Options of `PUT` and `GET`, in [`Frame::mode`].
pub mod flags {
    /// Copy folders with their contents.
    pub const RECURSIVE: u32 = 1;
    /// The target must be a folder.
    pub const INTO_FOLDER: u32 = 2;
    /// Begin files anew, even if a part of them exists.
    pub const NO_RESUME: u32 = 4;
    /// Write without the page cache.
    pub const DIRECT: u32 = 8;
}

impl Frame {
    pub const LEN: usize = 40;

    pub fn new(kind: Kind) -> Self {
        Self { kind, ..Self::new_zeroed() }
    }

    /// Reads the frame of a message. Fails if the message is too short.
    pub fn of(message: &Message<'_>) -> Result<Self> {
        let mut bytes = [0; Self::LEN];
        ensure!(
            message.slice().read(0, &mut bytes) == Self::LEN,
            "the peer sent a message that is too short"
        );
        Ok(zerocopy::transmute!(bytes))
    }

    /// Returns the bytes after the frame of a message that is not `DATA`.
    pub fn tail(message: &Message<'_>) -> Result<Vec<u8>> {
        ensure!(message.len() <= MAX_CONTROL, "the peer sent a control message of {} bytes", message.len());
        Ok(message.slice().skip(Self::LEN).to_vec())
    }

    /// Sends the frame and the bytes after it.
    pub fn send(&self, to: &mut MessageSender, tail: &[u8]) -> Result<(), ginnel::Error> {
        let claim = to.claim(Self::LEN + tail.len())?;
        claim.slice().write(0, self.as_bytes());
        claim.slice().write(Self::LEN, tail);
        claim.send(Self::LEN + tail.len())
    }

    /// Receives a frame that is not `DATA`, and the bytes after it.
    pub fn receive(from: &mut MessageReceiver) -> Result<(Self, Vec<u8>)> {
        let message = from.peek()?;
        let (frame, tail) = (Self::of(&message)?, Self::tail(&message)?);
        message.release()?;
        Ok((frame, tail))
    }

    /// Receives a frame of this kind. Returns an error for an `ERROR` frame.
    pub fn expect(from: &mut MessageReceiver, kind: Kind) -> Result<Self> {
        let (frame, tail) = Self::receive(from)?;
        match frame.kind {
            got if got == kind => Ok(frame),
            Kind::ERROR => bail!("{}", plain(&tail)),
            got => bail!("the peer broke the copy protocol: kind {} instead of {}", got.0, kind.0),
        }
    }
}

/// Sends `ERROR` if the channel still allows that.
pub fn send_error(to: &mut MessageSender, error: &anyhow::Error) {
    let text = format!("{error:#}");
    // A peer that has gone needs no error message.
    let _ = Frame::new(Kind::ERROR).send(to, short(&text));
}

/// Returns the part of a text that is sent.
pub fn short(text: &str) -> &[u8] {
    &text.as_bytes()[..text.len().min(MAX_TEXT)]
}

/// Returns text from a peer with control characters escaped, so that it fits on one line of a terminal.
pub fn plain(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    text.chars()
        .flat_map(|c| if c.is_control() { c.escape_default().collect::<Vec<_>>() } else { vec![c] })
        .collect()
}

/// Checks that a path below a source is relative and has no `..`. An empty path is the source itself.
pub fn check_path(path: &[u8]) -> Result<()> {
    ensure!(path.len() <= MAX_PATH, "a path of {} bytes is too long (at most {MAX_PATH})", path.len());
    if path.is_empty() {
        return Ok(());
    }
    for part in path.split(|&b| b == b'/') {
        check_name(part).map_err(|e| e.context(format!("bad path {:?}", plain(path))))?;
    }
    Ok(())
}

/// Checks the name of a directory entry.
pub fn check_name(name: &[u8]) -> Result<()> {
    ensure!(
        !name.is_empty() && name != b"." && name != b"..",
        "{:?} is not the name of a directory entry",
        plain(name)
    );
    ensure!(!name.contains(&b'/') && !name.contains(&0), "{:?} is not a valid file name", plain(name));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_only_go_down() {
        for good in ["", "a", "a/b", "...", "a b/\u{e4}", "..a/b.."] {
            check_path(good.as_bytes()).unwrap();
        }
        for bad in ["/", "/a", "a/", "a//b", ".", "..", "a/../b", "../a", "a/.", "a\0b", &"x/".repeat(3000)] {
            assert!(check_path(bad.as_bytes()).is_err(), "{bad:?} must be refused");
        }
    }

    #[test]
    fn foreign_text_stays_on_its_line() {
        assert_eq!(plain(b"a\n\x1b[2Jb\xff"), "a\\n\\u{1b}[2Jb\u{fffd}");
    }
}
