//! An operation under way on an NVMe namespace: the commands for it, one after another.
//!
//! How a command names the memory of its data depends on who reads it, the kernel or the device: see [`Transfer`].

use super::{Failure, Op};
use ginnel_guest_memory::{Buffer, GuestMemory};
use ginnel_layout::nvme::{Command, Opcode, Range, Status};
use ginnel_shmem::Mapping;
use zerocopy::FromZeros;

/// Length of the runs in which zeros are written where the device cannot make them.
pub(super) const ZEROS: usize = 1 << 20;

/// How often a command is sent again that the device, or a reset of it, has not executed for a passing reason. The kernel's driver does
/// the same for its own commands.
pub(super) const RETRIES: u8 = 5;

/// The type of a status that says that there was no way to the device.
const PATH_RELATED: u16 = 3;

/// "Do not retry", in the status field as the kernel returns it.
pub(super) const DNR: u16 = 1 << 14;

/// How much one command can do, in bytes where nothing else is said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CommandLimits {
    /// The length of a logical block.
    pub block: u64,
    /// Data of one command.
    pub data: u64,
    /// The number of segments of memory of one command. (A number, not bytes.)
    pub segments: u64,
    /// A discard; 0 if the device has none.
    pub discard: u64,
    /// A Write Zeroes command; 0 if the device has none.
    pub zeroes: u64,
}

/// The memory of an operation, as commands name it.
///
/// What a command names stays in place until the operation's next call of any function.
pub(super) trait Transfer {
    /// Takes the memory of the data instead of any other, in this order. (Without data, commands name no memory until they are told to.)
    fn begin(&mut self, data: &[Buffer], memory: &GuestMemory<Mapping>);
    /// Chooses the memory of the next command, from where the last one ended. Returns how many bytes there are: whole blocks, at most
    /// `most` bytes, and none if no command can transfer a block of this memory.
    fn gather(&mut self, most: u64, limits: &CommandLimits) -> u64;
    /// Lets a command name the memory that was chosen.
    fn name_data(&mut self, command: &mut Command);
    /// Lets a command name so many zeros, at most [`ZEROS`].
    fn name_zeros(&mut self, bytes: u64, command: &mut Command);
    /// Lets a command name a list with one range.
    fn name_range(&mut self, range: Range, command: &mut Command);
    /// Notes that the memory that was chosen was transferred.
    fn transferred(&mut self, bytes: u64);
}

/// Returns a command to a namespace, of which only the opcode is set.
pub(super) fn command(nsid: u32, opcode: Opcode) -> Command {
    Command { opcode, nsid, ..Command::new_zeroed() }
}

/// An operation under way.
pub(super) struct Flight<T> {
    pub disk: u16,
    stage: Stage,
    limits: CommandLimits,
    pub transfer: T,
    at: u64,
    left: u64,
    /// The number of bytes of the command under way.
    now: u64,
    retries: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Idle,
    Read,
    Write {
        through: bool,
    },
    Flush,
    Discard,
    Zero {
        unmap: bool,
        through: bool,
    },
    /// Zeros written as data.
    ZeroData {
        through: bool,
    },
}

impl<T: Transfer> Flight<T> {
    pub fn idle(transfer: T) -> Self {
        Self {
            disk: 0,
            stage: Stage::Idle,
            limits: CommandLimits { block: 1, data: 1, segments: 3, discard: 0, zeroes: 0 },
            transfer,
            at: 0,
            left: 0,
            now: 0,
            retries: 0,
        }
    }

    pub fn begin(
        &mut self,
        disk: u16,
        op: Op,
        data: &[Buffer],
        memory: &GuestMemory<Mapping>,
        limits: CommandLimits,
    ) {
        debug_assert_eq!(self.stage, Stage::Idle);
        (self.disk, self.limits) = (disk, limits);
        (self.at, self.left, self.retries) = (op.at(), op.span().unwrap_or(0), RETRIES);
        self.stage = match op {
            Op::Read { .. } => Stage::Read,
            Op::Write { through, .. } => Stage::Write { through },
            Op::Flush => Stage::Flush,
            Op::Discard { .. } => Stage::Discard,
            Op::WriteZeroes { through, .. } if limits.zeroes == 0 => Stage::ZeroData { through },
            Op::WriteZeroes { unmap, through, .. } => Stage::Zero { unmap, through },
        };
        let data = if let Stage::Read | Stage::Write { .. } = self.stage { data } else { &[] };
        self.transfer.begin(data, memory);
        if !data.is_empty() {
            self.left = data.iter().map(|buffer| u64::from(buffer.len)).sum();
        }
    }

    /// Ends the operation.
    pub fn end(&mut self) {
        self.stage = Stage::Idle;
    }

    /// Returns whether its next command needs zeros to write.
    pub fn needs_zeros(&self) -> bool {
        matches!(self.stage, Stage::ZeroData { .. })
    }

    /// Returns whether its next command reads or writes data.
    #[inline]
    pub fn moves_data(&self) -> bool {
        matches!(self.stage, Stage::Read | Stage::Write { .. } | Stage::ZeroData { .. })
    }

    /// Returns the next command. What it names stays in place until the next call of any function of this flight.
    #[inline]
    pub fn step(&mut self, nsid: u32) -> Result<Command, Failure> {
        let block = self.limits.block;
        let fua = |through: bool| if through { Command::FUA } else { 0 };
        let mut command = match self.stage {
            Stage::Read | Stage::Write { .. } => {
                let (opcode, cdw12) = match self.stage {
                    Stage::Write { through } => (Opcode::WRITE, fua(through)),
                    _ => (Opcode::READ, 0),
                };
                self.now = self.transfer.gather(self.left.min(self.limits.data), &self.limits);
                if self.now == 0 {
                    return Err(Failure::Errno(libc::EINVAL));
                }
                let mut command = Command { cdw12, ..command(nsid, opcode) };
                self.transfer.name_data(&mut command);
                command
            }
            Stage::ZeroData { through } => {
                self.now = self.left.min(self.limits.data).min(ZEROS as u64);
                let mut command = Command { cdw12: fua(through), ..command(nsid, Opcode::WRITE) };
                self.transfer.name_zeros(self.now, &mut command);
                command
            }
            Stage::Zero { unmap, through } => {
                self.now = self.left.min(self.limits.zeroes);
                let deallocate = if unmap { Command::DEAC } else { 0 };
                Command { cdw12: fua(through) | deallocate, ..command(nsid, Opcode::WRITE_ZEROES) }
            }
            Stage::Discard => {
                self.now = self.left.min(self.limits.discard);
                let range = Range { attributes: 0, blocks: (self.now / block) as u32, slba: self.at / block };
                let mut command = Command { cdw11: Command::AD, ..command(nsid, Opcode::DATASET_MANAGEMENT) };
                self.transfer.name_range(range, &mut command);
                return Ok(command);
            }
            Stage::Flush | Stage::Idle => {
                self.now = 0;
                return Ok(command(nsid, Opcode::FLUSH));
            }
        };
        let (slba, blocks) = (self.at / block, self.now / block);
        (command.cdw10, command.cdw11) = (slba as u32, (slba >> 32) as u32);
        // The number of blocks is 0's based.
        command.cdw12 |= blocks as u32 - 1;
        Ok(command)
    }

    /// Handles a completion: a negative error number, or the status of the device. Returns the result if the operation has ended, and
    /// `None` if there is another command to send.
    pub fn advance(&mut self, result: i32) -> Option<Result<(), Failure>> {
        if result != 0 {
            return self.failed(result);
        }
        self.retries = RETRIES;
        self.at += self.now;
        self.left -= self.now.min(self.left);
        if let Stage::Read | Stage::Write { .. } = self.stage {
            self.transfer.transferred(self.now);
        }
        (self.left == 0).then_some(Ok(()))
    }

    fn failed(&mut self, result: i32) -> Option<Result<(), Failure>> {
        // The device had no room in a queue that is polled.
        if result == -libc::EAGAIN {
            return None;
        }
        let status = Status(result as u16 & 0x7ff);
        // An error number is not the device's, and neither is a status of the kind "path related" (NVMe 2.0, 4.2.4.4): there was no way to
        // the device, or a reset of the controller has taken the command away.
        let is_of_device = result > 0 && !is_path_related(status);
        let is_transient = match is_of_device {
            false => result > 0 || result == -libc::EINTR,
            // A flush is not sent again: the device may report lost data only once.
            true => result as u16 & DNR == 0 && self.stage != Stage::Flush && !is_final(status),
        };
        if is_transient && self.retries > 0 {
            self.retries -= 1;
            return None;
        }
        // The device does not know the command, or the kernel does not let this process send it.
        let is_refused = match result {
            ..0 => [-libc::EACCES, -libc::EPERM].contains(&result),
            _ => [Status::INVALID_OPCODE, Status::INVALID_FIELD].contains(&status),
        };
        match self.stage {
            Stage::Zero { through, .. } if is_refused => {
                self.stage = Stage::ZeroData { through };
                return None;
            }
            Stage::Discard if is_refused => return Some(Err(Failure::Unsupported)),
            _ => {}
        }
        let errno = match (result, status) {
            // While no path is there, a device with several answers EINVAL to everything.
            (..0, _) if ![-libc::EINTR, -libc::EINVAL].contains(&result) => -result,
            (_, Status::LBA_RANGE) if self.stage != Stage::Flush => return Some(Err(Failure::Truncated)),
            (_, Status::CAPACITY_EXCEEDED) => libc::ENOSPC,
            (_, Status::WRITE_PROTECTED) => libc::EROFS,
            _ => libc::EIO,
        };
        Some(Err(match self.stage {
            Stage::Flush if is_of_device => Failure::Lost(errno),
            _ => Failure::Errno(errno),
        }))
    }
}

/// Returns whether a status says that there was no way to the device.
pub(super) fn is_path_related(status: Status) -> bool {
    status.code().0 >> 8 == PATH_RELATED
}

/// Returns whether the device would answer the same again.
fn is_final(status: Status) -> bool {
    [
        Status::INVALID_OPCODE,
        Status::INVALID_FIELD,
        Status::INVALID_NAMESPACE,
        Status::WRITE_PROTECTED,
        Status::LBA_RANGE,
        Status::CAPACITY_EXCEEDED,
    ]
    .contains(&status)
}
