//! The protocol between the harness and the agent in the guest: frames on one virtio-serial port.
//!
//! A frame is a header of 12 bytes (magic `u16`, kind `u16`, id `u32`, payload length `u32`, all little-endian) and at
//! most [`MAX_PAYLOAD`] bytes. The id names a job or a transfer, and is chosen by the harness. The agent compiles this same
//! file, so it uses only the standard library.
//!
//! | harness | agent |
//! |---|---|
//! | `Hello` | `Welcome` with the same nonce |
//! | `Spawn` | `Started` or `Failed`; then `Stdout` and `Stderr` as they come, `Exited` once |
//! | `Signal` | nothing |
//! | `Put`, `Data`..., `End` | `End` with the bytes stored, or `Failed` |
//! | `Get` | `Data`..., `End` with the bytes sent, or `Failed` |

use std::fmt;
use std::io::{self, Read};

/// The version, to be raised with every change of the frames.
pub const VERSION: u32 = 1;
/// The name of the virtio-serial port.
pub const PORT: &str = "ginnel.agent";
/// The most payload bytes one frame may have.
pub const MAX_PAYLOAD: usize = 64 * 1024;

const MAGIC: u16 = 0x4c47;
const HEADER: usize = 12;

/// How a job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// It returned this status.
    Code(i32),
    /// This signal killed it.
    Signal(i32),
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Exit::Code(code) => write!(f, "exit status {code}"),
            Exit::Signal(signal) => write!(f, "signal {signal}"),
        }
    }
}

/// One frame. The numbers in [`Frame::decode`] are the kinds on the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// Asks whether an agent is there.
    Hello { nonce: u64 },
    /// The answer: the agent's version, and the boot id of its guest.
    Welcome { nonce: u64, version: u32, boot_id: String },
    /// Run a shell command in a new process group.
    Spawn { id: u32, command: String },
    /// The job runs, with this process id in the guest.
    Started { id: u32, pid: u32 },
    /// Bytes of a job's standard output.
    Stdout { id: u32, bytes: Vec<u8> },
    /// Bytes of a job's standard error.
    Stderr { id: u32, bytes: Vec<u8> },
    /// The job's process has ended. Everything that it wrote itself was sent before.
    Exited { id: u32, exit: Exit },
    /// Send a signal to the job's process, or to its whole process group.
    Signal { id: u32, signal: i32, group: bool },
    /// Write a file in the guest; its bytes follow.
    Put { id: u32, mode: u32, path: String },
    /// Send a file of the guest.
    Get { id: u32, path: String },
    /// Bytes of a file.
    Data { id: u32, bytes: Vec<u8> },
    /// The file is complete with this many bytes.
    End { id: u32, total: u64 },
    /// The request with this `id` has failed.
    Failed { id: u32, message: String },
}

/// The reason why bytes are not a valid frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// The header does not begin with the magic number.
    Magic(u16),
    /// No frame has this kind.
    Kind(u16),
    /// The header announces more than [`MAX_PAYLOAD`].
    Length(u32),
    /// The payload is shorter or longer than its kind needs, or not text where text must be.
    Payload(u16),
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Malformed::Magic(found) => write!(f, "not a frame: it begins with {found:#06x}"),
            Malformed::Kind(kind) => write!(f, "unknown frame kind {kind}"),
            Malformed::Length(len) => write!(f, "frame of {len} bytes, at most {MAX_PAYLOAD} are allowed"),
            Malformed::Payload(kind) => write!(f, "bad payload in a frame of kind {kind}"),
        }
    }
}

impl std::error::Error for Malformed {}

impl Frame {
    /// Reads the next frame. Returns `None` when the stream ends between two frames.
    ///
    /// Blocks until a whole frame has arrived. A malformed frame is an error of kind `InvalidData` that contains a
    /// [`Malformed`]; an end inside a frame is `UnexpectedEof`.
    pub fn read_from(stream: &mut impl Read) -> io::Result<Option<Frame>> {
        let mut header = [0; HEADER];
        let mut have = 0;
        while have < HEADER {
            match stream.read(&mut header[have..]) {
                Ok(0) if have == 0 => return Ok(None),
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => have += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        let (kind, id, len) = parse_header(&header).map_err(invalid)?;
        let mut payload = vec![0; len];
        stream.read_exact(&mut payload)?;
        Frame::decode(kind, id, payload).map(Some).map_err(invalid)
    }

    /// Returns the bytes of the frame, to be written in one go.
    ///
    /// Text and bytes beyond [`MAX_PAYLOAD`] make a frame that the other side refuses, so callers cut data into pieces.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![0; HEADER];
        let (kind, id) = match self {
            Frame::Hello { nonce } => {
                out.extend(nonce.to_le_bytes());
                (1, 0)
            }
            Frame::Welcome { nonce, version, boot_id } => {
                out.extend(nonce.to_le_bytes());
                out.extend(version.to_le_bytes());
                out.extend(boot_id.as_bytes());
                (2, 0)
            }
            Frame::Spawn { id, command } => {
                out.extend(command.as_bytes());
                (3, *id)
            }
            Frame::Started { id, pid } => {
                out.extend(pid.to_le_bytes());
                (4, *id)
            }
            Frame::Stdout { id, bytes } => {
                out.extend(bytes);
                (5, *id)
            }
            Frame::Stderr { id, bytes } => {
                out.extend(bytes);
                (6, *id)
            }
            Frame::Exited { id, exit } => {
                let (signalled, number) = match exit {
                    Exit::Code(code) => (0u32, *code),
                    Exit::Signal(signal) => (1, *signal),
                };
                out.extend(signalled.to_le_bytes());
                out.extend(number.to_le_bytes());
                (7, *id)
            }
            Frame::Signal { id, signal, group } => {
                out.extend(signal.to_le_bytes());
                out.extend(u32::from(*group).to_le_bytes());
                (8, *id)
            }
            Frame::Put { id, mode, path } => {
                out.extend(mode.to_le_bytes());
                out.extend(path.as_bytes());
                (9, *id)
            }
            Frame::Get { id, path } => {
                out.extend(path.as_bytes());
                (10, *id)
            }
            Frame::Data { id, bytes } => {
                out.extend(bytes);
                (11, *id)
            }
            Frame::End { id, total } => {
                out.extend(total.to_le_bytes());
                (12, *id)
            }
            Frame::Failed { id, message } => {
                out.extend(message.as_bytes());
                (13, *id)
            }
        };
        let len = (out.len() - HEADER) as u32;
        out[0..2].copy_from_slice(&MAGIC.to_le_bytes());
        out[2..4].copy_from_slice(&u16::to_le_bytes(kind));
        out[4..8].copy_from_slice(&u32::to_le_bytes(id));
        out[8..12].copy_from_slice(&len.to_le_bytes());
        out
    }

    fn decode(kind: u16, id: u32, payload: Vec<u8>) -> Result<Frame, Malformed> {
        let mut p = Payload { kind, rest: &payload };
        let frame = match kind {
            1 => Frame::Hello { nonce: p.u64()? },
            2 => Frame::Welcome { nonce: p.u64()?, version: p.u32()?, boot_id: p.text()? },
            3 => Frame::Spawn { id, command: p.text()? },
            4 => Frame::Started { id, pid: p.u32()? },
            5 => return Ok(Frame::Stdout { id, bytes: payload }),
            6 => return Ok(Frame::Stderr { id, bytes: payload }),
            7 => match (p.u32()?, p.u32()? as i32) {
                (0, code) => Frame::Exited { id, exit: Exit::Code(code) },
                (1, signal) => Frame::Exited { id, exit: Exit::Signal(signal) },
                _ => return Err(Malformed::Payload(kind)),
            },
            8 => Frame::Signal { id, signal: p.u32()? as i32, group: p.u32()? != 0 },
            9 => Frame::Put { id, mode: p.u32()?, path: p.text()? },
            10 => Frame::Get { id, path: p.text()? },
            11 => return Ok(Frame::Data { id, bytes: payload }),
            12 => Frame::End { id, total: p.u64()? },
            13 => Frame::Failed { id, message: p.text()? },
            _ => return Err(Malformed::Kind(kind)),
        };
        if p.rest.is_empty() { Ok(frame) } else { Err(Malformed::Payload(kind)) }
    }
}

fn parse_header(header: &[u8; HEADER]) -> Result<(u16, u32, usize), Malformed> {
    let [m0, m1, k0, k1, i0, i1, i2, i3, l0, l1, l2, l3] = *header;
    let magic = u16::from_le_bytes([m0, m1]);
    let len = u32::from_le_bytes([l0, l1, l2, l3]);
    if magic != MAGIC {
        return Err(Malformed::Magic(magic));
    }
    if len as usize > MAX_PAYLOAD {
        return Err(Malformed::Length(len));
    }
    Ok((u16::from_le_bytes([k0, k1]), u32::from_le_bytes([i0, i1, i2, i3]), len as usize))
}

fn invalid(malformed: Malformed) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, malformed)
}

struct Payload<'a> {
    kind: u16,
    rest: &'a [u8],
}

impl Payload<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (head, rest) = self.rest.split_first_chunk::<N>().ok_or(Malformed::Payload(self.kind))?;
        self.rest = rest;
        Ok(*head)
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Malformed> {
        self.take().map(u64::from_le_bytes)
    }

    /// Takes the rest of the payload as text.
    fn text(&mut self) -> Result<String, Malformed> {
        let bytes = std::mem::take(&mut self.rest);
        String::from_utf8(bytes.to_vec()).map_err(|_| Malformed::Payload(self.kind))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_frames() -> Vec<Frame> {
        let (id, bytes) = (0xdead_beef, vec![0, 255, 1]);
        vec![
            Frame::Hello { nonce: u64::MAX },
            Frame::Welcome { nonce: 1, version: VERSION, boot_id: "4f2c".into() },
            Frame::Spawn { id, command: "echo é".into() },
            Frame::Started { id, pid: 77 },
            Frame::Stdout { id, bytes: bytes.clone() },
            Frame::Stderr { id, bytes: bytes.clone() },
            Frame::Exited { id, exit: Exit::Code(-1) },
            Frame::Exited { id, exit: Exit::Signal(9) },
            Frame::Signal { id, signal: 15, group: true },
            Frame::Put { id, mode: 0o755, path: "/a b".into() },
            Frame::Get { id, path: "/x".into() },
            Frame::Data { id, bytes: vec![7; MAX_PAYLOAD] },
            Frame::End { id, total: 1 << 40 },
            Frame::Failed { id, message: String::new() },
        ]
    }

    fn malformed(bytes: &[u8]) -> Malformed {
        let error = Frame::read_from(&mut &bytes[..]).expect_err("must be refused");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        error.into_inner().and_then(|e| e.downcast::<Malformed>().ok()).map(|e| *e).expect("holds the reason")
    }

    fn raw(kind: u16, payload: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend(MAGIC.to_le_bytes());
        out.extend(kind.to_le_bytes());
        out.extend(1u32.to_le_bytes());
        out.extend((payload.len() as u32).to_le_bytes());
        out.extend(payload);
        out
    }

    #[test]
    fn every_frame_survives_the_wire() {
        let frames = all_frames();
        let wire: Vec<u8> = frames.iter().flat_map(Frame::encode).collect();
        let mut stream = &wire[..];
        for frame in frames {
            assert_eq!(Frame::read_from(&mut stream).unwrap(), Some(frame));
        }
        assert_eq!(Frame::read_from(&mut stream).unwrap(), None);
    }

    #[test]
    fn a_frame_may_come_byte_by_byte() {
        struct Drip<'a>(&'a [u8]);
        impl Read for Drip<'_> {
            fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
                let n = buf.len().min(1);
                self.0.read(&mut buf[..n])
            }
        }
        let frame = Frame::Put { id: 3, mode: 0o644, path: "/etc/x".into() };
        assert_eq!(Frame::read_from(&mut Drip(&frame.encode())).unwrap(), Some(frame));
    }

    #[test]
    fn an_end_inside_a_frame_is_an_error() {
        for frame in all_frames() {
            let wire = frame.encode();
            for cut in [1, HEADER - 1, wire.len() - 1] {
                if cut == HEADER - 1 || cut < wire.len() {
                    let error = Frame::read_from(&mut &wire[..cut]).expect_err("cut short");
                    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{frame:?} cut at {cut}");
                }
            }
        }
    }

    #[test]
    fn a_wrong_header_is_refused() {
        assert_eq!(malformed(b"GET / HTTP/1.1\r\n"), Malformed::Magic(u16::from_le_bytes(*b"GE")));
        assert_eq!(malformed(&raw(0, &[])), Malformed::Kind(0));
        assert_eq!(malformed(&raw(14, &[])), Malformed::Kind(14));
        let mut huge = raw(5, &[]);
        huge[8..12].copy_from_slice(&(MAX_PAYLOAD as u32 + 1).to_le_bytes());
        assert_eq!(malformed(&huge), Malformed::Length(MAX_PAYLOAD as u32 + 1));
        huge[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(malformed(&huge), Malformed::Length(u32::MAX));
    }

    #[test]
    fn a_wrong_payload_is_refused() {
        assert_eq!(malformed(&raw(1, &[0; 7])), Malformed::Payload(1), "short");
        assert_eq!(malformed(&raw(1, &[0; 9])), Malformed::Payload(1), "long");
        assert_eq!(malformed(&raw(3, &[0xff])), Malformed::Payload(3), "not text");
        assert_eq!(
            malformed(&raw(7, &[2, 0, 0, 0, 0, 0, 0, 0])),
            Malformed::Payload(7),
            "neither code nor signal"
        );
        assert_eq!(malformed(&raw(9, &[1, 2])), Malformed::Payload(9), "no room for the mode");
    }
}
