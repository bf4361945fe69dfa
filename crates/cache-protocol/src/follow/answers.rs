//! Which requests have been answered, by what a server sends.

use std::collections::VecDeque;

use super::{Awaited, Lost};
use crate::Protocol;
use crate::answer::{Expected, Found, Scan};
use crate::binary::{self, Header};

/// So many kinds of answers may be awaited one after the other; any number of the same kind.
const MOST_RUNS: usize = 1 << 16;
/// A first word of an answer that matters is not longer.
const MOST_WORD: usize = 16;

/// What a server still has to answer.
#[derive(Clone, Debug)]
pub struct Answers {
    protocol: Protocol,
    /// What is awaited, and how often in a row.
    runs: VecDeque<(Awaited, u32)>,
    /// Meta requests of which some are quiet have been passed on: until `MN` has come, it cannot be told which of them has been answered.
    /// So many `MN` are to come, if that is not 0,
    ends: u32,
    /// and these are not covered by them.
    is_vague: bool,
    /// The answer that has begun.
    scan: Option<Scan>,
    /// Its first word, or its header, while it is not whole.
    first: Vec<u8>,
    /// It ends what is vague.
    is_end: bool,
    /// It is none that is awaited in turn.
    is_extra: bool,
}

impl Answers {
    /// Nothing is awaited yet.
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

    /// Whether everything that was passed on has been done and answered.
    #[inline]
    pub fn is_idle(&self) -> bool {
        self.runs.is_empty() && !self.is_in_vague()
    }

    #[inline]
    fn is_in_vague(&self) -> bool {
        self.is_vague || self.ends > 0
    }

    /// A request was passed on.
    pub fn expect(&mut self, awaited: Awaited) -> Result<(), Lost> {
        match awaited {
            // What is awaited in turn comes behind what is vague, once all of that is going to end.
            Awaited::MetaEnd if self.is_vague => {
                self.is_vague = false;
                self.ends = self.ends.checked_add(1).ok_or(Lost)?;
                return Ok(());
            }
            Awaited::Meta | Awaited::QuietMeta | Awaited::Nothing if self.is_vague => return Ok(()),
            _ if self.is_vague => return Err(Lost),
            // Only one such stretch is followed, and only at the end of what is awaited.
            Awaited::QuietMeta if self.ends == 0 || self.runs.is_empty() => {
                self.is_vague = true;
                // What was awaited before comes first: it is vague too, if that can be.
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

    /// The next bytes have come from the server.
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

    /// An answer begins, or goes on before it is known what it is. How many of the bytes were taken.
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

    /// What kind of answer begins so.
    fn judge(&mut self, first: &[u8]) -> Result<Expected, Lost> {
        (self.is_end, self.is_extra) = (false, false);
        if self.protocol == Protocol::Binary {
            return self.judge_packet(Header::parse(first).ok_or(Lost)?);
        }
        let word = first.split_last().map_or(first, |(_, word)| word);
        let is_error = matches!(word, b"ERROR" | b"CLIENT_ERROR" | b"SERVER_ERROR");
        if self.is_in_vague() {
            // What is awaited in turn comes behind the last end.
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
        // One of the quiet ones that come first.
        self.is_extra = true;
        let has_quiet = next != Some(0);
        if has_quiet && is_quiet(header.opcode) { Ok(Expected::Packet) } else { Err(Lost) }
    }

    /// An answer has come, up to its end.
    fn end(&mut self) {
        self.scan = None;
        if self.is_end {
            self.ends -= 1;
        }
        if self.is_extra {
            return;
        }
        // It is the first that is not quiet, and those that are quiet are done with it.
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

/// Whether a command of the binary protocol has no answer if it succeeds.
const fn is_quiet(opcode: u8) -> bool {
    use binary::opcode::*;
    matches!(opcode, GETQ | GETKQ | SETQ..=FLUSHQ | APPENDQ | PREPENDQ | GATQ | GATKQ)
}
