//! Requests as commands of the NVM command set, and the results of commands.

use crate::error::Error;
use crate::request::{Operation, Request, Status};
use ginnel_layout::nvme::{Command, Opcode, Status as NvmeStatus};
use ginnel_nvme::identify::NSID;

/// A command without data, for the disk's namespace.
pub(crate) const fn command(opcode: Opcode) -> Command {
    Command {
        opcode,
        flags: 0,
        cid: 0,
        nsid: NSID,
        cdw2: 0,
        cdw3: 0,
        mptr: 0,
        prp1: 0,
        prp2: 0,
        cdw10: 0,
        cdw11: 0,
        cdw12: 0,
        cdw13: 0,
        cdw14: 0,
        cdw15: 0,
    }
}

/// Returns whether the controller writes the request's data, and the length of the data in bytes; `None` if there are
/// none.
#[inline]
pub(crate) fn data(request: &Request) -> Option<(bool, u32)> {
    match request.operation {
        Operation::Read | Operation::Other(_) => Some((true, request.len)),
        Operation::Write => Some((false, request.len)),
        _ => None,
    }
    .filter(|(_, len)| *len > 0)
}

/// Returns the command for a request, without its data. `exponent` is that of the block size.
#[inline]
pub(crate) fn encode(request: &Request, exponent: u8) -> Result<Command, Error> {
    let (opcode, flags) = match request.operation {
        Operation::Read => (Opcode::READ, 0),
        Operation::Write => (Opcode::WRITE, 0),
        Operation::WriteZeroes { unmap } => (Opcode::WRITE_ZEROES, if unmap { Command::DEAC } else { 0 }),
        // Its range is in its data.
        Operation::Discard => {
            return Ok(Command { cdw11: Command::AD, ..command(Opcode::DATASET_MANAGEMENT) });
        }
        Operation::Flush => return Ok(command(Opcode::FLUSH)),
        Operation::Other(opcode) => return Ok(command(Opcode(opcode as u8))),
        Operation::GetId | Operation::Command(_) => return Err(not_nvme(request)),
    };
    let blocks = request.len >> exponent;
    if !(1..=1 << 16).contains(&blocks) || blocks << exponent != request.len {
        return Err(not_nvme(request));
    }
    let slba = request.offset >> exponent;
    Ok(Command {
        cdw10: slba as u32,
        cdw11: (slba >> 32) as u32,
        cdw12: (blocks - 1) | flags,
        ..command(opcode)
    })
}

#[cold]
fn not_nvme(request: &Request) -> Error {
    Error::Invalid(format!("{request}: there is no such NVMe command"))
}

/// Returns the status of a completed command.
#[inline]
pub(crate) fn status(status: NvmeStatus) -> Status {
    if status.is_success() { Status::Ok } else { Status::Nvme(status.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_become_commands() {
        let read = encode(&Request::read(0x12_3456_7890 << 12, 8192), 12).unwrap();
        assert_eq!((read.opcode, read.slba(), read.blocks()), (Opcode::READ, 0x12_3456_7890, 2));
        let zero = Request { operation: Operation::WriteZeroes { unmap: true }, offset: 512, len: 512 };
        let zero = encode(&zero, 9).unwrap();
        assert_eq!((zero.slba(), zero.blocks(), zero.cdw12 & Command::DEAC), (1, 1, Command::DEAC));
        // Lengths that a command cannot have.
        for len in [0, 512, 4097, (1 << 16 << 12) + 4096] {
            encode(&Request::read(0, len), 12).unwrap_err();
        }
        encode(&Request { operation: Operation::GetId, offset: 0, len: 20 }, 9).unwrap_err();
    }
}
