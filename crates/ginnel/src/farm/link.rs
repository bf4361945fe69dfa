//! The manager's end of one worker's channel.

use super::Piece;
use super::report::Departure;
use crate::{Error, Mapping, MessageChannel, MessageReceiver, MessageSender, SharedSlice};
use ginnel_layout::farm::{Header, Kind, VERSION};
use std::collections::HashSet;
use zerocopy::{FromBytes, IntoBytes};

pub(super) const HEADER: usize = size_of::<Header>();

/// What a worker said.
pub(super) enum Answer {
    /// What it made of the piece of this number; the bytes are in the buffer.
    Result(u64),
    /// It could make nothing of it; why is in the buffer.
    Failed(u64),
}

/// The manager's end of one worker's channel. Nothing here waits.
pub(super) struct Link {
    sender: MessageSender,
    pub receiver: MessageReceiver,
    /// Its number in the books of the current job.
    pub worker: usize,
    /// Whether it knows of the current job.
    pub told: bool,
    /// Pieces of earlier jobs that it still holds: nobody wants their results any more.
    pub stale: HashSet<u64>,
}

impl Link {
    pub fn new(channel: MessageChannel) -> Self {
        let (sender, receiver) = channel.split();
        Self { sender, receiver, worker: 0, told: false, stale: HashSet::new() }
    }

    /// What it calls itself, and whose member it is.
    pub fn name(&self) -> String {
        let peer = &self.receiver.info().peer;
        format!("{}:{}#{}", peer.member_name, peer.name, peer.endpoint)
    }

    /// Whether nothing more will come of it.
    pub fn is_gone(&mut self) -> bool {
        self.receiver.is_ready() && self.receiver.peek().is_err()
    }

    /// The longest piece.
    pub fn longest(&self) -> usize {
        self.sender.max_message() - HEADER
    }

    /// Whether a piece of this length finds room now.
    pub fn has_room(&mut self, len: usize) -> Result<bool, Departure> {
        self.sender.has_room(HEADER + len).map_err(|error| self.departure(error))
    }

    /// Tells it of a job; false if there is no room for that now.
    pub fn tell(&mut self, job: &str) -> Result<bool, Departure> {
        if !self.has_room(job.len())? {
            return Ok(false);
        }
        let header = Header { kind: Kind::JOB, version: VERSION, piece: 0, offset: 0 };
        self.put(header, job.len(), |room| {
            room.write(0, job.as_bytes());
            Ok(())
        })
        .map(|_: Result<(), std::convert::Infallible>| true)
    }

    /// Sends a piece, for which there is room, and whose bytes `fill` writes.
    pub fn send<E>(
        &mut self,
        piece: &Piece,
        fill: impl FnOnce(SharedSlice<'_, Mapping>) -> Result<(), E>,
    ) -> Result<Result<(), E>, Departure> {
        let header =
            Header { kind: Kind::PIECE, version: VERSION, piece: piece.number, offset: piece.offset };
        self.put(header, piece.len, fill)
    }

    fn put<E>(
        &mut self,
        header: Header,
        len: usize,
        fill: impl FnOnce(SharedSlice<'_, Mapping>) -> Result<(), E>,
    ) -> Result<Result<(), E>, Departure> {
        let claim = match self.sender.claim(HEADER + len) {
            Ok(claim) => claim,
            Err(error) => return Err(self.departure(error)),
        };
        claim.slice().write(0, header.as_bytes());
        let filled = fill(claim.slice().skip(HEADER));
        if filled.is_ok() {
            claim.send(HEADER + len);
        }
        Ok(filled)
    }

    /// What it has said, if anything; the content goes into `buffer`.
    pub fn answer(&mut self, buffer: &mut Vec<u8>) -> Result<Option<Answer>, Departure> {
        if !self.receiver.is_ready() {
            return Ok(None);
        }
        let message = match self.receiver.peek() {
            Ok(message) => message,
            Err(error) => return Err(self.departure(error)),
        };
        let slice = message.slice();
        let mut header = [0; HEADER];
        let whole = slice.read(0, &mut header) == HEADER;
        if whole {
            let content = slice.skip(HEADER);
            buffer.resize(content.len(), 0);
            content.read(0, buffer);
        }
        message.release();
        let broken = |what: &str| Departure::Dismissed(format!("it broke the farm's protocol: {what}"));
        let Ok(header) = Header::read_from_bytes(&header) else { return Err(broken("no header")) };
        match header {
            _ if !whole => Err(broken("a message without a header")),
            Header { version, .. } if version != VERSION => Err(Departure::Dismissed(format!(
                "it speaks version {version} of the farm's protocol, not {VERSION}"
            ))),
            Header { kind: Kind::RESULT, piece, .. } => Ok(Some(Answer::Result(piece))),
            Header { kind: Kind::FAILED, piece, .. } => Ok(Some(Answer::Failed(piece))),
            _ => Err(broken("an unknown kind of message")),
        }
    }

    /// How a worker went whose channel says this.
    fn departure(&self, error: Error) -> Departure {
        match error {
            Error::PeerDead => Departure::Died,
            Error::Finished | Error::Closed => Departure::Left,
            other => Departure::Dismissed(other.to_string()),
        }
    }
}
