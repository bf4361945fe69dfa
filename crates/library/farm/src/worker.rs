//! A worker, which works on the pieces that its manager sends.

use crate::manager::Options;
use crate::message::{HEADER, Order};
use ginnel::{
    AttachOptions, ChannelOptions, Endpoint, Error, Mapping, MessageChannel, MessageReceiver, MessageSender,
    SharedSlice,
};
use ginnel_layout::farm::{Header, Kind};
use std::time::Duration;
use zerocopy::IntoBytes;

/// The length in bytes to which a worker's message about a failed piece is cut.
const LONGEST_REASON: usize = 1024;

/// A piece, as its worker sees it.
#[derive(Clone, Copy)]
pub struct Task<'a> {
    /// The name of the job.
    pub job: &'a str,
    /// The number of the piece.
    pub number: u64,
    /// The offset of the piece in the input.
    pub offset: u64,
    /// The bytes of the piece, in place. They begin at a multiple of eight.
    pub data: SharedSlice<'a, Mapping>,
}

/// A worker of a farm: a process, or a thread, with a channel to its manager.
pub struct Worker {
    sender: MessageSender,
    receiver: MessageReceiver,
    job: String,
    pieces: u64,
    bytes: u64,
}

impl Worker {
    /// Attaches to the segment of `address` (`segment/name`), and connects to the manager that listens there. Waits
    /// for the manager for up to `patience`.
    pub fn connect(address: &str, patience: Duration) -> Result<Self, Error> {
        let (segment, name) = ginnel::split(address)?;
        let endpoint = Endpoint::attach_with(
            segment,
            &AttachOptions { mode: Options::MODE, ..AttachOptions::default() },
        )?;
        let options = ChannelOptions { patience, ..ChannelOptions::default() };
        Ok(Self::over(endpoint.connect_with(name, &options)?))
    }

    /// Makes a worker that uses this channel to its manager. It waits in the way that the channel is set to.
    pub fn over(channel: MessageChannel) -> Self {
        let (sender, receiver) = channel.split();
        Self { sender, receiver, job: String::new(), pieces: 0, bytes: 0 }
    }

    /// Works until the manager has no more jobs: calls `work` for each piece, which appends its result to the empty
    /// vector. If `work` returns an error, the worker sends it to the manager, which tries the piece again. Fails if
    /// the manager dies, dismisses this worker or breaks the protocol.
    pub fn serve(
        &mut self,
        mut work: impl FnMut(&Task<'_>, &mut Vec<u8>) -> Result<(), String>,
    ) -> Result<(), Error> {
        let longest = self.longest_result();
        let mut answer = Vec::new();
        loop {
            let message = match self.receiver.peek() {
                Ok(message) => message,
                Err(Error::Finished) => return Ok(()),
                Err(error) => return Err(error),
            };
            match Order::read(message.slice()).map_err(broken)? {
                Order::Job(name) => {
                    message.release()?;
                    self.job = name;
                }
                Order::Piece(header, data) => {
                    answer.clear();
                    let task = Task { job: &self.job, number: header.piece, offset: header.offset, data };
                    let made = work(&task, &mut answer).and_then(|()| match answer.len() {
                        len if len > longest => {
                            Err(format!("its result has {len} bytes, and the channel takes {longest}"))
                        }
                        _ => Ok(Kind::RESULT),
                    });
                    let kind = made.unwrap_or_else(|why| {
                        answer.clear();
                        answer
                            .extend_from_slice(&why.as_bytes()[..why.len().min(longest).min(LONGEST_REASON)]);
                        Kind::FAILED
                    });
                    let len = data.len();
                    // The ring's room is released before the answer is sent: a manager that sees the answer can send
                    // another piece.
                    message.release()?;
                    let header = Header { kind, ..header };
                    let claim = self.sender.claim(HEADER + answer.len())?;
                    claim.slice().write(0, header.as_bytes());
                    claim.slice().write(HEADER, &answer);
                    claim.send(HEADER + answer.len())?;
                    if kind == Kind::RESULT {
                        self.pieces += 1;
                        self.bytes += len as u64;
                    }
                }
            }
        }
    }

    /// Returns how many pieces this worker has answered, and how many bytes they had.
    pub fn done(&self) -> (u64, u64) {
        (self.pieces, self.bytes)
    }

    /// Returns the length in bytes of the longest result that the channel takes.
    pub fn longest_result(&self) -> usize {
        self.sender.max_message() - HEADER
    }

    /// Sets how the channel waits.
    pub fn set_mode(&mut self, mode: ginnel::WaitMode) {
        self.sender.set_mode(mode);
        self.receiver.set_mode(mode);
    }
}

fn broken(what: String) -> Error {
    Error::System { what: "the manager broke the farm's protocol", source: std::io::Error::other(what) }
}
