//! The state of an NVMe controller, in a file that its two processes share: the *holder*, which owns the front end's connection, and
//! the *engine*, which serves the commands and may be killed at any instruction.
//!
//! The file belongs to the two alone; a guest or its VMM never gets it.
//!
//! ```text
//! 0      header: one page
//! 4096   completion queues 0..=N, 64 bytes each
//!        submission queues 0..=N, 64 bytes each
//!        slots: for each submission queue 0..=N, S slots of 64 bytes, from a multiple of 4096 on
//! ```
//!
//! N is the largest number of I/O queues. S, a power of two, is the number of commands that one queue can have in flight, and the largest
//! number of entries of an I/O queue.
//!
//! # Slots
//!
//! The commands of a submission queue are numbered from 1; command n was in entry `(n - 1) % size`. Each command that is taken lies in a
//! slot. The bytes 8 to 23 of a command are reserved or not used (CDW2, CDW3 and MPTR), and a slot has its two words there. Thus a
//! slot is one cache line.
//!
//! - [`slot::TAKEN`] is `2 * number + 1` if the command in the slot is in flight, and `2 * number` if it is completed. A slot that was
//!   never used has 0. So the largest number of all slots is that of the last command that was taken.
//! - [`slot::COMPLETING`] is 0, or, from the moment before the completion is written, its position + 1. The position of a
//!   completion is the number of all completions that were posted to its queue before.
//!
//! To take a command: the command; `COMPLETING` 0; `TAKEN`. To complete it: `COMPLETING`; the completion in the guest's memory;
//! [`completion::TAIL`]; `TAKEN`. A process that is killed has done all its stores up to some instruction, so only the compiler could
//! change these orders, and each store is a release.

use crate::nvme::{COMMAND, Command};

/// The first word of a state file: "gnl-nvme".
pub const MAGIC: u64 = u64::from_le_bytes(*b"gnl-nvme");
/// Version of the format.
pub const VERSION: u64 = 1;
/// Bytes of the header.
pub const HEADER: usize = 4096;
/// The largest number of I/O queues (N) of any controller.
pub const MAX_QUEUES: u16 = 64;
/// The largest number of entries of a queue, and of slots (S), of any controller.
pub const MAX_SIZE: u16 = 32768;

/// Offset of [`MAGIC`]; it is stored last.
pub const MAGIC_AT: usize = 0;
/// Offset of [`VERSION`].
pub const VERSION_AT: usize = 8;
/// Offset of N.
pub const QUEUES: usize = 16;
/// Offset of S.
pub const SLOTS: usize = 24;
/// Offset of a word that is 1 if the doorbells are mapped into the guest, and 0 if each write to one is trapped.
pub const MAPPED: usize = 32;
/// Offset of the register CAP.
pub const CAP: usize = 40;
/// Offset of the register VS.
pub const VS: usize = 48;

/// Offset of the register CC, as the driver last wrote it.
pub const CC: usize = 64;
/// Offset of the register AQA.
pub const AQA: usize = 72;
/// Offset of the register ASQ.
pub const ASQ: usize = 80;
/// Offset of the register ACQ.
pub const ACQ: usize = 88;
/// Offset of the interrupts that are masked (INTMS and INTMC).
pub const INTMS: usize = 96;
/// Offset of a word that is 1 while the device may access the guest's memory (bus master enable of its PCI command register).
pub const BUS_MASTER: usize = 104;
/// Offset of the number of resets: `CC.EN` from 1 to 0, DEVICE_RESET, and the loss of the front end.
pub const RESET_GENERATION: usize = 112;

/// Offset of the register CSTS.
pub const CSTS: usize = 128;
/// Offset of the last [`RESET_GENERATION`] whose reset is complete.
pub const DONE_GENERATION: usize = 136;
/// Offset of the guest address of the shadow doorbells; 0 if there are none.
pub const DBBUF_SHADOW: usize = 144;
/// Offset of the guest address of the event indexes; 0 if there are none.
pub const DBBUF_EVENTS: usize = 152;
/// Offset of what the engine notes about its disk.
pub const NOTE: usize = 160;
/// Offset of the 16 words in which the engine keeps features that the driver has set.
pub const FEATURES: usize = 192;
/// Number of words at [`FEATURES`].
pub const FEATURE_WORDS: usize = 16;

words!(HEADER;
    constant { MAGIC_AT: u64, VERSION_AT: u64, QUEUES: u64, SLOTS: u64, MAPPED: u64, CAP: u64, VS: u64 }
    holder { CC: u64, AQA: u64, ASQ: u64, ACQ: u64, INTMS: u64, BUS_MASTER: u64, RESET_GENERATION: u64 }
    engine {
        CSTS: u64, DONE_GENERATION: u64, DBBUF_SHADOW: u64, DBBUF_EVENTS: u64, NOTE: u64, FEATURES: [u64; FEATURE_WORDS],
    }
);

/// Bytes of the record of a queue.
pub const QUEUE: usize = 64;
/// Bytes of a slot.
pub const SLOT: usize = COMMAND;

/// Offsets in the record of a completion queue.
pub mod completion {
    /// 0 if the queue does not exist; otherwise a number that the engine chooses.
    pub const CREATED: usize = 0;
    /// Guest address of the queue.
    pub const BASE: usize = 8;
    /// Number of entries (bits 0-15), interrupt vector (16-31), whether interrupts are enabled (32).
    pub const CONFIG: usize = 16;
    /// Number of all completions that were ever posted.
    pub const TAIL: usize = 24;
}
words!(QUEUE; engine { completion::CREATED: u64, completion::BASE: u64, completion::CONFIG: u64, completion::TAIL: u64 });

/// Offsets in the record of a submission queue.
pub mod submission {
    /// 0 if the queue does not exist; otherwise a number that the engine chooses.
    pub const CREATED: usize = 0;
    /// Guest address of the queue.
    pub const BASE: usize = 8;
    /// Number of entries (bits 0-15), completion queue (16-31).
    pub const CONFIG: usize = 16;
}
words!(QUEUE; engine { submission::CREATED: u64, submission::BASE: u64, submission::CONFIG: u64 });

/// Offsets in a slot.
pub mod slot {
    use super::Command;
    use core::mem::offset_of;

    /// The number of the command, and whether it is in flight.
    pub const TAKEN: usize = offset_of!(Command, cdw2);
    /// The position of its completion + 1, or 0.
    pub const COMPLETING: usize = offset_of!(Command, mptr);
}
words!(SLOT; engine { slot::TAKEN: u64, slot::COMPLETING: u64 });

/// Returns the offset of the record of completion queue `queue`.
pub const fn completion(queue: u16) -> usize {
    HEADER + QUEUE * queue as usize
}

/// Returns the offset of the record of submission queue `queue`, in a file for `queues` I/O queues.
pub const fn submission(queue: u16, queues: u16) -> usize {
    completion(queues) + QUEUE + QUEUE * queue as usize
}

/// Returns the offset of the first slot of submission queue `queue`, in a file for `queues` I/O queues with `slots` slots each.
pub const fn slots(queue: u16, queues: u16, slots: u16) -> usize {
    let first = (submission(queues, queues) + QUEUE).next_multiple_of(4096);
    first + SLOT * slots as usize * queue as usize
}

/// Returns the bytes of a file for `queues` I/O queues with `slots` slots each: a multiple of 4096.
pub const fn len(queues: u16, slots: u16) -> usize {
    (self::slots(queues, queues, slots) + SLOT * slots as usize).next_multiple_of(4096)
}

const _: () = {
    assert!(QUEUE == crate::CACHE_LINE && SLOT == crate::CACHE_LINE);
    assert!(
        completion(1) == 4160 && submission(0, 1) == 4224 && slots(0, 1, 4) == 8192 && slots(1, 1, 4) == 8448
    );
    assert!(len(1, 4) == 12288 && len(MAX_QUEUES, 1024) == 16384 + 65 * 65536);
};
