//! Tracking which forwarded requests a server has answered.

use super::{Awaited, Lost};
use crate::Protocol;
use crate::answer::{Expected, Found, Scan};
use crate::binary::{self, Header};
use std::collections::VecDeque;

/// The most runs of expected answers. A run consists of any number of successive answers of the same kind.
const MOST_RUNS: usize = 1 << 16;
/// The number of bytes in which the first word of an answer is searched. No first word that matters is longer.
const MOST_WORD: usize = 16;

/// The answers that a server still has to give.
#[derive(Clone, Debug)]
pub struct Answers {
    protocol: Protocol,
    /// The expected answers in order: the kind of each run, and its length.
    runs: VecDeque<(Awaited, u32)>,
    /// The number of outstanding `MN` answers that end vague requests. Requests are vague if they are meta requests, some of
    /// which are quiet: until `MN` arrives, it cannot be known which of them have been answered.
    ends: u32,
    /// Whether there are vague requests after the last `mn`, so that no outstanding `MN` ends them.
    is_vague: bool,
    /// The scanner of an answer that has begun.
    scan: Option<Scan>,
    /// The first word or the header of an answer, while it is incomplete.
    first: Vec<u8>,
    /// Whether the current answer is an `MN` that ends vague requests.
    is_end: bool,
    /// Whether the current answer is not for the first of `runs` that expects one.
    is_extra: bool,
}

impl Answers {
    /// Creates a tracker that expects no answers.
    pub fn new(protocol: Protocol) -> Self {
        Self {
            protocol,
            runs: VecDeque::new(),
            ends: 0,
            is_vague: false,
            scan: None,
            first: Vec::new(),
            is_end: false,
            is_extra: false,
        }
    }

    /// Returns whether all forwarded requests have been executed and answered.
    #[inline]
    pub fn is_idle(&self) -> bool {
        self.runs.is_empty() && !self.is_in_vague()
    }

    #[inline]
    fn is_in_vague(&self) -> bool {
        self.is_vague || self.ends > 0
    }

    /// Records that a request was forwarded.
    pub fn expect(&mut self, awaited: Awaited) -> Result<(), Lost> {
        match awaited {
            // Now that an `MN` will end all vague requests, later answers can be expected in turn after it.
            Awaited::MetaEnd if self.is_vague => {
                self.is_vague = false;
                self.ends = self.ends.checked_add(1).ok_or(Lost)?;
                return Ok(());
            }
            Awaited::Meta | Awaited::QuietMeta | Awaited::Nothing if self.is_vague => return Ok(()),
            _ if self.is_vague => return Err(Lost),
            // Only one stretch of vague requests is tracked, and no expected answers may follow its last `MN`.
            Awaited::QuietMeta if self.ends == 0 || self.runs.is_empty() => {
                self.is_vague = true;
                // The answers expected before come first. They become vague too, if their kind allows it.
                let is_meta = |run: &(Awaited, u32)| {
                    matches!(run.0, Awaited::Meta | Awaited::Nothing | Awaited::MetaEnd)
                };
                if !self.runs.iter().all(is_meta) {
                    return Err(Lost);
                }
                let ends = self.runs.iter().filter(|run| run.0 == Awaited::MetaEnd);
                self.ends = ends.fold(self.ends, |ends, run| ends.saturating_add(run.1));
                self.runs.clear();
                return Ok(());
            }
            Awaited::QuietMeta => return Err(Lost),
            _ => {}
        }
        let runs = self.runs.len();
        match self.runs.back_mut() {
            Some((last, count)) if *last == awaited && *count < u32::MAX => *count += 1,
            _ if runs >= MOST_RUNS => return Err(Lost),
            _ => self.runs.push_back((awaited, 1)),
        }
        Ok(())
    }

    /// Examines the next bytes from the server.
    pub fn look(&mut self, mut bytes: &[u8]) -> Result<(), Lost> {
        while !bytes.is_empty() {
            let Some(scan) = &mut self.scan else {
                let taken = self.begin(bytes)?;
                bytes = &bytes[taken..];
                continue;
            };
            match scan.look(bytes) {
                Found::More => return Ok(()),
                Found::NoAnswer => return Err(Lost),
                Found::End(end) => {
                    bytes = &bytes[end..];
                    self.end();
                }
            }
        }
        Ok(())
    }

    /// Reads the beginning of an answer until its kind is known. Returns how many of the bytes were consumed.
    fn begin(&mut self, bytes: &[u8]) -> Result<usize, Lost> {
        if self.is_idle() {
            return Err(Lost);
        }
        let before = self.first.len();
        let (taken, is_whole) = match self.protocol {
            Protocol::Text => {
                let look = &bytes[..bytes.len().min(MOST_WORD - before)];
                match look.iter().position(|byte| matches!(byte, b' ' | b'\r' | b'\n')) {
                    Some(end) => (end + 1, true),
                    None => (look.len(), before + look.len() == MOST_WORD),
                }
            }
            Protocol::Binary => {
                let taken = bytes.len().min(binary::HEADER - before);
                (taken, before + taken == binary::HEADER)
            }
        };
        self.first.extend_from_slice(&bytes[..taken]);
        if !is_whole {
            return Ok(taken);
        }
        let first = std::mem::take(&mut self.first);
        let mut scan = Scan::new(self.judge(&first)?);
        let found = scan.look(&first);
        self.scan = Some(scan);
        self.first = first;
        self.first.clear();
        match found {
            Found::More => {}
            Found::End(end) if end == before + taken => self.end(),
            Found::End(_) | Found::NoAnswer => return Err(Lost),
        }
        Ok(taken)
    }

    /// Determines the kind of an answer from its first word or header.
    fn judge(&mut self, first: &[u8]) -> Result<Expected, Lost> {
        (self.is_end, self.is_extra) = (false, false);
        if self.protocol == Protocol::Binary {
            return self.judge_packet(Header::parse(first).ok_or(Lost)?);
        }
        let word = first.split_last().map_or(first, |(_, word)| word);
        let is_error = matches!(word, b"ERROR" | b"CLIENT_ERROR" | b"SERVER_ERROR");
        if self.is_in_vague() {
            // The answers that are expected in turn come after the last `MN`.
            self.is_end = word == b"MN";
            self.is_extra = true;
            return match self.is_end && self.ends == 0 || is_error {
                true => Err(Lost),
                false => Ok(if word == b"VA" { Expected::Meta } else { Expected::Line }),
            };
        }
        let (awaited, had_quiet) = match (self.runs.front(), self.runs.get(1)) {
            (Some((Awaited::Nothing, _)), Some((next, _))) => (*next, true),
            (Some((Awaited::Nothing, _)), None) | (None, _) => return Err(Lost),
            (Some((awaited, _)), _) => (*awaited, false),
        };
        if had_quiet && is_error {
            return Err(Lost);
        }
        match awaited {
            Awaited::Line => Ok(Expected::Line),
            Awaited::MetaEnd if word == b"MN" => Ok(Expected::Line),
            Awaited::Values => Ok(Expected::Values),
            Awaited::Stats => Ok(Expected::Stats),
            Awaited::Meta => Ok(Expected::Meta),
            _ => Err(Lost),
        }
    }

    fn judge_packet(&mut self, header: Header) -> Result<Expected, Lost> {
        let next = self.runs.iter().position(|(awaited, _)| *awaited != Awaited::QuietPacket);
        match next.and_then(|next| self.runs.get(next)).map(|(awaited, _)| *awaited) {
            Some(Awaited::Packet(opcode)) if opcode == header.opcode => return Ok(Expected::Packet),
            Some(Awaited::Packets(opcode)) if opcode == header.opcode => return Ok(Expected::Packets),
            _ => {}
        }
        // This can only answer one of the quiet requests before it.
        self.is_extra = true;
        let has_quiet = next != Some(0);
        if has_quiet && is_quiet(header.opcode) { Ok(Expected::Packet) } else { Err(Lost) }
    }

    /// Records that an answer is complete.
    fn end(&mut self) {
        self.scan = None;
        if self.is_end {
            self.ends -= 1;
        }
        if self.is_extra {
            return;
        }
        // This answers the first request that is not quiet. The quiet requests before it are done, too.
        while let Some((awaited, count)) = self.runs.front_mut() {
            if matches!(awaited, Awaited::Nothing | Awaited::QuietPacket) {
                self.runs.pop_front();
                continue;
            }
            *count -= 1;
            if *count == 0 {
                self.runs.pop_front();
            }
            break;
        }
    }
}

/// Returns whether a command of the binary protocol has no answer on success.
const fn is_quiet(opcode: u8) -> bool {
    use binary::opcode::*;
    matches!(opcode, GETQ | GETKQ | SETQ..=FLUSHQ | APPENDQ | PREPENDQ | GATQ | GATKQ)
}
