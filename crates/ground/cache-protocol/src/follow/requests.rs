//! Finding the boundaries of requests in a client's stream.

use super::{Awaited, Lost};
use crate::answer::{self, Expected};
use crate::{Protocol, binary, text};

/// A request that was forwarded, at least up to its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Passed {
    /// The answer that the request expects.
    pub awaited: Awaited,
    /// Whether the request only reads items.
    pub is_get: bool,
}

/// A tracker of requests, which knows the place of the next byte in a client's stream.
#[derive(Clone, Debug, Default)]
pub struct Requests {
    protocol: Option<Protocol>,
    /// The number of bytes, of a value or to be ignored, before the next request.
    skip: u64,
    /// Whether the next byte belongs to the line of a long `get`.
    is_in_get: bool,
    /// The beginning of a request's incomplete line or head.
    begun: Vec<u8>,
}

impl Requests {
    /// Returns whether the next byte is the first byte of a request.
    #[inline]
    pub fn is_between(&self) -> bool {
        self.skip == 0 && !self.is_in_get && self.begun.is_empty()
    }

    /// Returns the protocol of the connection. The first byte of the connection determines it for good.
    #[inline]
    pub fn protocol(&mut self, first: u8) -> Protocol {
        *self.protocol.get_or_insert_with(|| Protocol::of(first))
    }

    /// Records that the next bytes were forwarded. Calls `note` for each request whose line or head ends in them.
    pub fn pass(
        &mut self,
        mut bytes: &[u8],
        mut note: impl FnMut(Passed) -> Result<(), Lost>,
    ) -> Result<(), Lost> {
        while let Some(&first) = bytes.first() {
            if self.skip > 0 {
                let skipped = self.skip.min(bytes.len() as u64);
                self.skip -= skipped;
                bytes = &bytes[skipped as usize..];
                continue;
            }
            if self.is_in_get {
                let end = bytes.iter().position(|byte| *byte == b'\n');
                self.is_in_get = end.is_none();
                bytes = &bytes[end.map_or(bytes.len(), |end| end + 1)..];
                continue;
            }
            let protocol = self.protocol(first);
            if self.begun.is_empty() {
                let taken = match protocol {
                    Protocol::Text => self.text(bytes, &mut note)?,
                    Protocol::Binary => self.binary(bytes, &mut note)?,
                };
                match taken {
                    Some(taken) => bytes = &bytes[taken..],
                    None => {
                        self.begun.extend_from_slice(bytes);
                        bytes = &[];
                    }
                }
                continue;
            }
            // Only as much as the head needs is taken, so nothing after the head is copied.
            let before = self.begun.len();
            let more = self.wanted(protocol, bytes);
            self.begun.extend_from_slice(&bytes[..more]);
            let begun = std::mem::take(&mut self.begun);
            let taken = match protocol {
                Protocol::Text => self.text(&begun, &mut note)?,
                Protocol::Binary => self.binary(&begun, &mut note)?,
            };
            match taken {
                Some(taken) => {
                    // A long `get` is consumed up to its first key. The bytes after that belong to its line.
                    bytes = if taken >= before { &bytes[taken - before..] } else { &bytes[more..] };
                    self.begun = begun;
                    self.begun.clear();
                }
                None => {
                    self.begun = begun;
                    bytes = &bytes[more..];
                }
            }
        }
        Ok(())
    }

    /// Returns how many of the bytes belong, or may belong, to the head that has begun.
    fn wanted(&self, protocol: Protocol, bytes: &[u8]) -> usize {
        let wanted = match protocol {
            Protocol::Text => match bytes.iter().position(|byte| *byte == b'\n') {
                Some(end) => end + 1,
                None => bytes.len(),
            },
            Protocol::Binary => binary::wanted(&self.begun).saturating_sub(self.begun.len()).max(1),
        };
        // A line without an end needs no more than this.
        let room = text::MOST_GET.saturating_sub(self.begun.len()).max(1);
        let most = if protocol == Protocol::Text { room } else { bytes.len() };
        wanted.min(most).min(bytes.len())
    }

    fn text(
        &mut self,
        bytes: &[u8],
        note: &mut impl FnMut(Passed) -> Result<(), Lost>,
    ) -> Result<Option<usize>, Lost> {
        let (request, head) = match text::parse(bytes) {
            text::Parsed::More => return Ok(None),
            text::Parsed::TooLong => return Err(Lost),
            text::Parsed::LongGet { head, .. } => {
                self.is_in_get = true;
                note(Passed { awaited: Awaited::Values, is_get: true })?;
                return Ok(Some(head));
            }
            // A server that gets this much of the line before its end closes the connection.
            text::Parsed::Request(_, head)
                if head > text::MOST_LINE && text::parse(&bytes[..head - 1]) == text::Parsed::TooLong =>
            {
                return Err(Lost);
            }
            text::Parsed::Request(request, head) => (request, head),
        };
        let awaited = match answer::of_text(&request) {
            Expected::Nothing => Awaited::Nothing,
            Expected::Line if matches!(request, text::Request::MetaNothing) => Awaited::MetaEnd,
            Expected::Line => Awaited::Line,
            Expected::Values => Awaited::Values,
            Expected::Stats => Awaited::Stats,
            Expected::Meta => Awaited::Meta,
            Expected::MetaOrNothing => Awaited::QuietMeta,
            _ => return Err(Lost),
        };
        self.skip = match request {
            text::Request::Refused { swallow, .. } => swallow,
            _ => request.value() as u64,
        };
        let is_get = match &request {
            text::Request::Get(get) => get.end.is_none(),
            text::Request::MetaGet(_) => true,
            _ => false,
        };
        note(Passed { awaited, is_get })?;
        Ok(Some(head))
    }

    fn binary(
        &mut self,
        bytes: &[u8],
        note: &mut impl FnMut(Passed) -> Result<(), Lost>,
    ) -> Result<Option<usize>, Lost> {
        let (request, head) = match binary::parse(bytes) {
            binary::Parsed::More => return Ok(None),
            binary::Parsed::NoRequest => return Err(Lost),
            binary::Parsed::Request(request, head) => (request, head),
        };
        let opcode = request.header.opcode;
        let awaited = match request.command {
            binary::Command::Refused { closes: true, .. }
            | binary::Command::Quit
            | binary::Command::Echo { .. } => return Err(Lost),
            binary::Command::Refused { .. } => Awaited::Packet(opcode),
            binary::Command::Stats => Awaited::Packets(opcode),
            binary::Command::Hits { .. } => Awaited::QuietPacket,
            _ if request.quiet => Awaited::QuietPacket,
            _ => Awaited::Packet(opcode),
        };
        self.skip = match request.command {
            binary::Command::Refused { swallow, .. } => u64::from(swallow),
            _ => request.value() as u64,
        };
        note(Passed { awaited, is_get: matches!(request.command, binary::Command::Get { .. }) })?;
        Ok(Some(head))
    }
}
