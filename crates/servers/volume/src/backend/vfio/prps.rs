//! The memory of an operation, as a device reads it: by the addresses of pages (PRP entries, NVMe 1.4, 4.3).

use super::dma::Attached;
use crate::backend::commands::{CommandLimits, Transfer};
use ginnel_guest_memory::{Buffer, GuestMemory};
use ginnel_layout::nvme::{Command, PAGE, Range};
use ginnel_shmem::Mapping;
use std::sync::Arc;

/// The longest data of a command: all that the first entry and one page with a list name, wherever the first page begins.
pub const DATA: u64 = PAGE * (PAGE / 8);

/// The length of the memory for data that is copied, in each slot of a queue.
pub const COPY: usize = 4 * PAGE as usize;

/// A run of guest memory.
#[derive(Clone, Copy, Debug)]
struct Piece {
    /// Its address for the device; [`UNREACHABLE`] if that cannot reach it.
    iova: u64,
    buffer: Buffer,
}

const UNREACHABLE: u64 = u64::MAX;

/// What the memory of the command under way is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// There is none, or the command names it already.
    Named,
    /// The pages of [`Prps::list`] follow the first one.
    List,
    /// So many bytes of the slot's memory, to or from which the data is copied.
    Copy(usize),
    /// So many zeros.
    Zeros(u64),
    /// A range, which the device reads.
    Range(Range),
}

/// The memory of an operation.
pub struct Prps {
    /// The guest's memory, in which data lies.
    pub attached: Option<Arc<Attached>>,
    /// The memory that is left to transfer, in order. The first piece may be a remainder.
    pieces: Vec<Piece>,
    /// Index of the first piece that is not done.
    next: usize,
    /// The pages of the command under way. (The first may be a part.)
    entries: Vec<u64>,
    form: Form,
}

impl Prps {
    pub fn new() -> Self {
        Self { attached: None, pieces: Vec::new(), next: 0, entries: Vec::new(), form: Form::Named }
    }

    /// Returns what the memory of the command under way is.
    #[inline]
    pub fn form(&self) -> Form {
        self.form
    }

    /// Returns the pages behind the first one.
    pub fn list(&self) -> &[u64] {
        &self.entries[1..]
    }

    /// Chooses what the device can reach as it is. Returns its length: whole blocks.
    #[inline]
    fn choose(&mut self, most: u64, block: u64) -> u64 {
        self.entries.clear();
        let mut bytes = 0;
        for piece in &self.pieces[self.next.min(self.pieces.len())..] {
            // All pages but the first begin at their beginning, and all but the last end at their end. An address has whole dwords.
            let unit = if bytes == 0 { 4 } else { PAGE };
            if piece.iova == UNREACHABLE || !piece.iova.is_multiple_of(unit) {
                break;
            }
            let len = u64::from(piece.buffer.len).min(most - bytes);
            let end = piece.iova + len;
            self.entries.push(piece.iova);
            let mut page = (piece.iova & !(PAGE - 1)) + PAGE;
            while page < end {
                self.entries.push(page);
                page += PAGE;
            }
            bytes += len;
            if bytes == most || !end.is_multiple_of(PAGE) {
                break;
            }
        }
        bytes -= bytes % block;
        let first = self.entries.first().map_or(0, |first| first % PAGE);
        self.entries.truncate((first + bytes).div_ceil(PAGE) as usize);
        bytes
    }

    /// Copies the data of the command under way from the guest's memory.
    #[cold]
    pub fn copy_to(&self, to: &Mapping, at: usize, len: usize) {
        self.copy(len, |done, slice| slice.copy_to(to, at + done));
    }

    /// Copies it into the guest's memory.
    #[cold]
    pub fn copy_from(&self, from: &Mapping, at: usize, len: usize) {
        self.copy(len, |done, slice| slice.copy_from(from, at + done));
    }

    fn copy(&self, len: usize, mut copy: impl FnMut(usize, ginnel_shmem::SharedSlice<'_, Mapping>)) {
        let Some(memory) = self.attached.as_ref().and_then(|attached| attached.memory()) else { return };
        let mut done = 0;
        for piece in &self.pieces[self.next.min(self.pieces.len())..] {
            let slice = memory.slice(&piece.buffer);
            let n = slice.len().min(len - done);
            copy(done, slice.first(n));
            done += n;
            if done == len {
                break;
            }
        }
    }
}

impl Transfer for Prps {
    #[inline]
    fn begin(&mut self, data: &[Buffer], memory: &GuestMemory<Mapping>) {
        self.pieces.clear();
        (self.next, self.form) = (0, Form::Named);
        let attached = self.attached.as_deref().filter(|attached| attached.is(memory));
        for buffer in data {
            let iova = attached.and_then(|attached| attached.iova(buffer)).unwrap_or(UNREACHABLE);
            // Two runs that adjoin are one.
            if let Some(last) = self.pieces.last_mut()
                && last.buffer.region == buffer.region
                && last.buffer.at + last.buffer.len as usize == buffer.at
                && (last.iova == UNREACHABLE) == (iova == UNREACHABLE)
                && let Some(len) = last.buffer.len.checked_add(buffer.len)
            {
                last.buffer.len = len;
                continue;
            }
            self.pieces.push(Piece { iova, buffer: *buffer });
        }
    }

    #[inline]
    fn gather(&mut self, most: u64, limits: &CommandLimits) -> u64 {
        let bytes = self.choose(most, limits.block);
        if bytes > 0 {
            self.form = Form::List;
            return bytes;
        }
        let bytes = most.min(COPY as u64);
        let bytes = bytes - bytes % limits.block;
        // Without the memory there is nothing to copy.
        let is_there = self.attached.is_some();
        self.form = Form::Copy(bytes as usize);
        if is_there { bytes } else { 0 }
    }

    #[inline]
    fn name_data(&mut self, command: &mut Command) {
        if self.form != Form::List {
            return;
        }
        match self.entries[..] {
            [one] => command.prp1 = one,
            [one, other] => (command.prp1, command.prp2) = (one, other),
            _ => {
                command.prp1 = self.entries.first().copied().unwrap_or(0);
                return;
            }
        }
        self.form = Form::Named;
    }

    fn name_zeros(&mut self, bytes: u64, _: &mut Command) {
        self.form = Form::Zeros(bytes);
    }

    fn name_range(&mut self, range: Range, _: &mut Command) {
        self.form = Form::Range(range);
    }

    #[inline]
    fn transferred(&mut self, bytes: u64) {
        let mut moved = bytes;
        while let Some(piece) = self.pieces.get_mut(self.next) {
            let len = u64::from(piece.buffer.len);
            if moved < len {
                piece.buffer.at += moved as usize;
                piece.buffer.len -= moved as u32;
                if piece.iova != UNREACHABLE {
                    piece.iova += moved;
                }
                break;
            }
            moved -= len;
            self.next += 1;
        }
    }
}
