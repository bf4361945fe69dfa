//! NVMe: registers, commands and completions (NVM Express base specification, revision 1.4).
//!
//! Section numbers in this module and those below it are of that revision. Sizes and counts that the specification calls "0's based"
//! are one less than what they count; the comments say where.

pub mod identify;
pub mod log;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The smallest page of memory that a controller can have (`CAP.MPSMIN` 0), and the unit of `MDTS` then.
pub const PAGE: u64 = 4096;
/// Class of the PCI function: mass storage, non-volatile memory, NVM Express (2.1.4).
pub const PCI_CLASS: u32 = 0x01_08_02;
/// Bytes of a command in a submission queue.
pub const COMMAND: usize = size_of::<Command>();
/// Bytes of a completion in a completion queue.
pub const COMPLETION: usize = size_of::<Completion>();
/// Offset in BAR 0 behind the registers: here the doorbells begin (3.1.25).
pub const DOORBELLS: usize = 0x1000;
/// Namespace ID that means all namespaces.
pub const ALL_NAMESPACES: u32 = 0xffff_ffff;

/// Offsets of the registers in BAR 0 (3.1).
pub mod register {
    /// Controller capabilities: see [`cap`](super::cap).
    pub const CAP: usize = 0x00;
    /// Version: see [`VS_1_4`](super::VS_1_4).
    pub const VS: usize = 0x08;
    /// Interrupt mask set. Not used with MSI-X.
    pub const INTMS: usize = 0x0c;
    /// Interrupt mask clear. Not used with MSI-X.
    pub const INTMC: usize = 0x10;
    /// Controller configuration: see [`cc`](super::cc).
    pub const CC: usize = 0x14;
    /// Controller status: see [`csts`](super::csts).
    pub const CSTS: usize = 0x1c;
    /// Subsystem reset.
    pub const NSSR: usize = 0x20;
    /// Sizes of the admin queues: see [`Aqa`](super::Aqa).
    pub const AQA: usize = 0x24;
    /// Guest address of the admin submission queue, a multiple of 4096.
    pub const ASQ: usize = 0x28;
    /// Guest address of the admin completion queue, a multiple of 4096.
    pub const ACQ: usize = 0x30;
}
words!(DOORBELLS; registers {
    register::CAP: u64, register::VS: u32, register::INTMS: u32, register::INTMC: u32, register::CC: u32, register::CSTS: u32,
    register::NSSR: u32, register::AQA: u32, register::ASQ: u64, register::ACQ: u64,
});

/// Version 1.4 in the register VS and in Identify Controller.
pub const VS_1_4: u32 = 0x0001_0400;

/// Fields of the register CAP (3.1.1).
pub mod cap {
    /// Queues must be physically contiguous.
    pub const CQR: u64 = 1 << 16;
    /// The NVM command set is supported.
    pub const CSS_NVM: u64 = 1 << 37;

    /// Returns the field MQES for queues of at most `entries` (2 to 65536) entries.
    pub const fn mqes(entries: u32) -> u64 {
        (entries - 1) as u64 & 0xffff
    }
    /// Returns the maximum number of entries of a queue.
    pub const fn max_entries(cap: u64) -> u32 {
        (cap & 0xffff) as u32 + 1
    }
    /// Returns the field TO: the longest time for `CSTS.RDY` to follow `CC.EN`, in units of 500 ms.
    pub const fn to(units: u8) -> u64 {
        (units as u64) << 24
    }
    /// Returns the longest time for `CSTS.RDY` to follow `CC.EN`, in units of 500 ms.
    pub const fn timeout(cap: u64) -> u8 {
        (cap >> 24) as u8
    }
    /// Returns the field DSTRD: doorbells are `4 << dstrd` bytes apart (0 to 15).
    pub const fn dstrd(dstrd: u8) -> u64 {
        (dstrd as u64 & 15) << 32
    }
    /// Returns the number of bytes from one doorbell to the next.
    pub const fn stride(cap: u64) -> usize {
        4 << (cap >> 32 & 15)
    }
    /// Returns the exponent of the smallest page size: it is `4096 << n`.
    pub const fn mpsmin(cap: u64) -> u8 {
        (cap >> 48 & 15) as u8
    }
}

/// Fields of the register CC (3.1.5).
pub mod cc {
    /// The controller is enabled.
    pub const EN: u32 = 1;
    /// Command set: 0 is NVM.
    pub const CSS: u32 = 7 << 4;
    /// Shutdown notification: not 0 if the controller must shut down.
    pub const SHN: u32 = 3 << 14;

    /// Returns the page size, in bytes: 4096 to 128 MiB.
    pub const fn page_size(cc: u32) -> u64 {
        super::PAGE << (cc >> 7 & 15)
    }
    /// Returns the exponent of the size of a command in I/O submission queues. It must be 6.
    pub const fn iosqes(cc: u32) -> u32 {
        cc >> 16 & 15
    }
    /// Returns the exponent of the size of a completion in I/O completion queues. It must be 4.
    pub const fn iocqes(cc: u32) -> u32 {
        cc >> 20 & 15
    }
    /// Returns a word that enables the controller, with pages of 4096 bytes and the right sizes of entries.
    pub const fn enable() -> u32 {
        EN | 6 << 16 | 4 << 20
    }
}

/// Fields of the register CSTS (3.1.6).
pub mod csts {
    /// The controller is ready.
    pub const RDY: u32 = 1;
    /// A fatal error: the driver must reset the controller.
    pub const CFS: u32 = 1 << 1;
    /// Shutdown status.
    pub const SHST: u32 = 3 << 2;
    /// Shutdown status: it goes on.
    pub const SHST_BUSY: u32 = 1 << 2;
    /// Shutdown status: it is complete.
    pub const SHST_COMPLETE: u32 = 2 << 2;
}

/// The register AQA (3.1.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aqa(pub u32);

impl Aqa {
    /// Returns the register for admin queues of so many entries (2 to 4096).
    pub const fn new(submission: u32, completion: u32) -> Self {
        Self((submission - 1) & 0xfff | ((completion - 1) & 0xfff) << 16)
    }
    /// Returns the number of entries of the admin submission queue, 1 to 4096. A queue of one entry is not allowed.
    pub const fn submission(self) -> u32 {
        (self.0 & 0xfff) + 1
    }
    /// Returns the number of entries of the admin completion queue, 1 to 4096. A queue of one entry is not allowed.
    pub const fn completion(self) -> u32 {
        (self.0 >> 16 & 0xfff) + 1
    }
}

/// Returns the offset in BAR 0 of the doorbell with the tail of submission queue `queue`. `stride` is [`cap::stride`].
pub const fn submission_doorbell(queue: u16, stride: usize) -> usize {
    DOORBELLS + 2 * queue as usize * stride
}

/// Returns the offset in BAR 0 of the doorbell with the head of completion queue `queue`. `stride` is [`cap::stride`]. Less
/// [`DOORBELLS`], it is also the word's offset in both shadow pages (5.7; the stride in them is `CAP.DSTRD` too).
pub const fn completion_doorbell(queue: u16, stride: usize) -> usize {
    DOORBELLS + (2 * queue as usize + 1) * stride
}

/// Opcode of a command. The meaning depends on the kind of queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct Opcode(pub u8);

/// Opcodes in the admin queue (5).
impl Opcode {
    /// Delete I/O Submission Queue.
    pub const DELETE_SUBMISSION: Self = Self(0x00);
    /// Create I/O Submission Queue.
    pub const CREATE_SUBMISSION: Self = Self(0x01);
    /// Get Log Page.
    pub const GET_LOG_PAGE: Self = Self(0x02);
    /// Delete I/O Completion Queue.
    pub const DELETE_COMPLETION: Self = Self(0x04);
    /// Create I/O Completion Queue.
    pub const CREATE_COMPLETION: Self = Self(0x05);
    /// Identify.
    pub const IDENTIFY: Self = Self(0x06);
    /// Abort.
    pub const ABORT: Self = Self(0x08);
    /// Set Features.
    pub const SET_FEATURES: Self = Self(0x09);
    /// Get Features.
    pub const GET_FEATURES: Self = Self(0x0a);
    /// Asynchronous Event Request.
    pub const ASYNC_EVENT: Self = Self(0x0c);
    /// Doorbell Buffer Config.
    pub const DOORBELL_BUFFER: Self = Self(0x7c);
}

/// Opcodes in I/O queues: the NVM command set (6).
impl Opcode {
    /// Flush.
    pub const FLUSH: Self = Self(0x00);
    /// Write.
    pub const WRITE: Self = Self(0x01);
    /// Read.
    pub const READ: Self = Self(0x02);
    /// Write Uncorrectable.
    pub const WRITE_UNCORRECTABLE: Self = Self(0x04);
    /// Compare.
    pub const COMPARE: Self = Self(0x05);
    /// Write Zeroes.
    pub const WRITE_ZEROES: Self = Self(0x08);
    /// Dataset Management.
    pub const DATASET_MANAGEMENT: Self = Self(0x09);
    /// Verify.
    pub const VERIFY: Self = Self(0x0c);
}

/// A command: an entry of a submission queue (4.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Command {
    /// What to do.
    pub opcode: Opcode,
    /// FUSE (bits 0-1) and PSDT (bits 6-7: 0 means that the data are described by PRPs).
    pub flags: u8,
    /// Command identifier, which the driver chooses. It is unique among the commands of a submission queue that are not completed.
    pub cid: u16,
    /// Namespace ID.
    pub nsid: u32,
    /// Reserved in all commands of this module.
    pub cdw2: u32,
    /// Reserved in all commands of this module.
    pub cdw3: u32,
    /// Metadata pointer; not used.
    pub mptr: u64,
    /// First PRP entry.
    pub prp1: u64,
    /// Second PRP entry, or the address of a list of entries.
    pub prp2: u64,
    /// The meaning of this and the following words depends on the opcode.
    pub cdw10: u32,
    /// Word 11.
    pub cdw11: u32,
    /// Word 12.
    pub cdw12: u32,
    /// Word 13.
    pub cdw13: u32,
    /// Word 14.
    pub cdw14: u32,
    /// Word 15.
    pub cdw15: u32,
}
layout!(Command, 64 {
    opcode: 0, flags: 1, cid: 2, nsid: 4, cdw2: 8, cdw3: 12, mptr: 16, prp1: 24, prp2: 32, cdw10: 40, cdw11: 44, cdw12: 48, cdw13: 52,
    cdw14: 56, cdw15: 60,
});

impl Command {
    /// FUSE: not 0 if the command is a half of a fused operation.
    pub const FUSE: u8 = 3;
    /// PSDT: not 0 if SGLs describe the data.
    pub const PSDT: u8 = 3 << 6;
    /// Word 12 of Read and Write: the data must be on stable media before the command completes (6.9, 6.15).
    pub const FUA: u32 = 1 << 30;
    /// Word 12 of Write Zeroes: the controller should deallocate the blocks (6.16).
    pub const DEAC: u32 = 1 << 25;
    /// Word 11 of Dataset Management: the ranges are to be deallocated (6.7).
    pub const AD: u32 = 1 << 2;

    /// Returns the first block of a Read, Write, Write Zeroes, Compare or Verify (SLBA).
    #[inline]
    pub const fn slba(&self) -> u64 {
        self.cdw10 as u64 | (self.cdw11 as u64) << 32
    }
    /// Returns the number of blocks of such a command, 1 to 65536 (NLB is 0's based).
    #[inline]
    pub const fn blocks(&self) -> u32 {
        (self.cdw12 & 0xffff) + 1
    }
}

/// Result of a command: the status field of a completion without the phase tag (4.6.1): SC in bits 0-7, SCT in bits 8-10, CRD in bits
/// 11-12, M in bit 13, DNR in bit 14.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct Status(pub u16);

impl Status {
    /// The command succeeded.
    pub const SUCCESS: Self = Self(0x000);
    /// The opcode is not supported.
    pub const INVALID_OPCODE: Self = Self(0x001);
    /// A field has a value that is reserved or not supported.
    pub const INVALID_FIELD: Self = Self(0x002);
    /// The command identifier is in use.
    pub const CID_CONFLICT: Self = Self(0x003);
    /// The data could not be transferred.
    pub const DATA_TRANSFER: Self = Self(0x004);
    /// An error of the controller.
    pub const INTERNAL: Self = Self(0x006);
    /// The command was aborted by an Abort command.
    pub const ABORT_REQUESTED: Self = Self(0x007);
    /// The command was aborted because its submission queue was deleted.
    pub const ABORTED_QUEUE_DELETED: Self = Self(0x008);
    /// The namespace does not exist, or its format is not supported.
    pub const INVALID_NAMESPACE: Self = Self(0x00b);
    /// Commands came in a wrong order.
    pub const SEQUENCE: Self = Self(0x00c);
    /// The offset of a PRP entry is not allowed.
    pub const PRP_OFFSET: Self = Self(0x013);
    /// The namespace is write-protected.
    pub const WRITE_PROTECTED: Self = Self(0x020);
    /// The command was not completed for a passing reason.
    pub const INTERRUPTED: Self = Self(0x021);
    /// Blocks behind the end of the namespace.
    pub const LBA_RANGE: Self = Self(0x080);
    /// There is no space left for the data.
    pub const CAPACITY_EXCEEDED: Self = Self(0x081);
    /// The namespace is not ready.
    pub const NOT_READY: Self = Self(0x082);

    /// Create I/O Submission Queue: there is no such completion queue.
    pub const COMPLETION_QUEUE_INVALID: Self = Self(0x100);
    /// There is no such queue, or there is one already.
    pub const INVALID_QUEUE_ID: Self = Self(0x101);
    /// The size of a queue is not possible.
    pub const INVALID_QUEUE_SIZE: Self = Self(0x102);
    /// There are more Abort commands than the controller said that it takes.
    pub const ABORT_LIMIT: Self = Self(0x103);
    /// There are more Asynchronous Event Requests than the controller said that it takes.
    pub const ASYNC_EVENT_LIMIT: Self = Self(0x105);
    /// There is no such interrupt vector.
    pub const INVALID_VECTOR: Self = Self(0x108);
    /// The log page is not supported.
    pub const INVALID_LOG_PAGE: Self = Self(0x109);
    /// A completion queue cannot be deleted before its submission queues.
    pub const INVALID_QUEUE_DELETION: Self = Self(0x10c);
    /// The value of the feature cannot be saved.
    pub const NOT_SAVEABLE: Self = Self(0x10d);
    /// The feature cannot be changed.
    pub const NOT_CHANGEABLE: Self = Self(0x10e);

    /// The data could not be written.
    pub const WRITE_FAULT: Self = Self(0x280);
    /// The data could not be read.
    pub const READ_ERROR: Self = Self(0x281);

    /// DNR: the same command would fail again.
    pub const DO_NOT_RETRY: Self = Self(1 << 14);

    /// Returns this status with DNR: the driver should not submit the command again.
    pub const fn for_good(self) -> Self {
        Self(self.0 | Self::DO_NOT_RETRY.0)
    }
    /// Returns whether the command succeeded.
    pub const fn is_success(self) -> bool {
        self.0 & 0x7ff == 0
    }
    /// Returns the status code type (SCT) and status code (SC) without the flags.
    pub const fn code(self) -> Self {
        Self(self.0 & 0x7ff)
    }
}

/// A completion: an entry of a completion queue (4.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Completion {
    /// The meaning depends on the command.
    pub result: u32,
    /// Reserved.
    pub reserved: u32,
    /// Head of the submission queue: the entries before it may be used again.
    pub sqhd: u16,
    /// Submission queue of the command.
    pub sqid: u16,
    /// Identifier of the command.
    pub cid: u16,
    /// Phase tag (bit 0), [`Status`] (bits 1-15).
    pub status: u16,
}
layout!(Completion, 16 { result: 0, reserved: 4, sqhd: 8, sqid: 10, cid: 12, status: 14 });

/// Offset of the second word of a completion: its last 8 bytes. As a 64-bit word it has the phase tag in bit 48.
pub const COMPLETION_WORD: usize = core::mem::offset_of!(Completion, sqhd);

impl Completion {
    /// Returns the second word of a completion.
    #[inline]
    pub const fn word(sqhd: u16, sqid: u16, cid: u16, status: Status, phase: bool) -> u64 {
        sqhd as u64
            | (sqid as u64) << 16
            | (cid as u64) << 32
            | (status.0 as u64) << 49
            | (phase as u64) << 48
    }
    /// Returns the completion with these two words.
    #[inline]
    pub const fn from_words(first: u64, second: u64) -> Self {
        Self {
            result: first as u32,
            reserved: (first >> 32) as u32,
            sqhd: second as u16,
            sqid: (second >> 16) as u16,
            cid: (second >> 32) as u16,
            status: (second >> 48) as u16,
        }
    }
    /// Returns the phase tag.
    #[inline]
    pub const fn phase(&self) -> bool {
        self.status & 1 != 0
    }
    /// Returns the result of the command.
    #[inline]
    pub const fn status(&self) -> Status {
        Status(self.status >> 1)
    }
}

/// Identifier of a feature (5.21.1), in bits 0-7 of word 10 of Set Features and Get Features.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Feature(pub u8);

impl Feature {
    /// Arbitration.
    pub const ARBITRATION: Self = Self(0x01);
    /// Power Management.
    pub const POWER: Self = Self(0x02);
    /// Temperature Threshold.
    pub const TEMPERATURE: Self = Self(0x04);
    /// Error Recovery.
    pub const ERROR_RECOVERY: Self = Self(0x05);
    /// Volatile Write Cache: bit 0 enables it.
    pub const WRITE_CACHE: Self = Self(0x06);
    /// Number of Queues: submission queues in bits 0-15 and completion queues in bits 16-31, both 0's based and without admin queues.
    pub const QUEUES: Self = Self(0x07);
    /// Interrupt Coalescing.
    pub const COALESCING: Self = Self(0x08);
    /// Interrupt Vector Configuration.
    pub const VECTOR: Self = Self(0x09);
    /// Write Atomicity Normal.
    pub const ATOMICITY: Self = Self(0x0a);
    /// Asynchronous Event Configuration.
    pub const ASYNC_EVENTS: Self = Self(0x0b);
}

/// Word 0 of the completion of an Asynchronous Event Request (5.2).
pub mod event {
    /// Event type Notice: the attributes of a namespace have changed. The driver reads the log page Changed Namespace List.
    pub const NAMESPACE_CHANGED: u32 = 2 | (super::log::Page::CHANGED_NAMESPACES.0 as u32) << 16;
    /// Bit of [`Feature::ASYNC_EVENTS`](super::Feature::ASYNC_EVENTS) and of OAES that enables [`NAMESPACE_CHANGED`].
    pub const NAMESPACE_NOTICES: u32 = 1 << 8;
}

/// A range of Dataset Management (6.7.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Range {
    /// Hints about future access.
    pub attributes: u32,
    /// Number of blocks (not 0's based).
    pub blocks: u32,
    /// First block.
    pub slba: u64,
}
layout!(Range, 16 { attributes: 0, blocks: 4, slba: 8 });

/// Most ranges of one Dataset Management command (NR is 0's based, 8 bits).
pub const MAX_RANGES: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_have_their_fields() {
        let all = cap::mqes(1024) | cap::CQR | cap::to(20) | cap::dstrd(10) | cap::CSS_NVM;
        assert_eq!(all, 0x0000_002a_1401_03ff);
        assert_eq!(
            (cap::max_entries(all), cap::timeout(all), cap::stride(all), cap::mpsmin(all)),
            (1024, 20, 4096, 0)
        );
        assert_eq!((cap::mqes(65536), cap::stride(0)), (0xffff, 4));
        let cc = cc::enable();
        assert_eq!((cc::page_size(cc), cc::iosqes(cc), cc::iocqes(cc), cc & cc::EN), (4096, 6, 4, 1));
        assert_eq!((cc::page_size(1 << 7), cc::page_size(15 << 7)), (8192, 128 << 20));
        let aqa = Aqa::new(32, 4096);
        assert_eq!((aqa.0, aqa.submission(), aqa.completion()), (0x0fff_001f, 32, 4096));
        assert_eq!(
            (submission_doorbell(0, 4), completion_doorbell(0, 4), submission_doorbell(1, 4)),
            (0x1000, 0x1004, 0x1008)
        );
        assert_eq!((submission_doorbell(1, 4096), completion_doorbell(2, 4096)), (0x3000, 0x6000));
    }

    #[test]
    fn a_completion_is_two_words() {
        let status = Status::LBA_RANGE.for_good();
        let second = Completion::word(0x1234, 5, 0x6789, status, true);
        let completion =
            Completion { result: 7, reserved: 0, sqhd: 0x1234, sqid: 5, cid: 0x6789, status: 0x8101 };
        assert_eq!(Completion::from_words(7, second), completion);
        assert_eq!(completion.as_bytes()[8..], second.to_le_bytes());
        assert_eq!(
            (completion.status(), completion.phase(), status.code()),
            (status, true, Status::LBA_RANGE)
        );
        assert!(!status.is_success() && Status::SUCCESS.for_good().is_success());
    }

    #[test]
    fn a_command_has_a_first_block_and_a_number_of_blocks() {
        let command = Command {
            cdw10: 0x89ab_cdef,
            cdw11: 0x0123_4567,
            cdw12: 0xffff_0007,
            ..zerocopy::FromZeros::new_zeroed()
        };
        assert_eq!((command.slba(), command.blocks()), (0x0123_4567_89ab_cdef, 8));
        assert_eq!(Command { cdw12: Command::FUA | 0xffff, ..command }.blocks(), 65536);
    }
}
