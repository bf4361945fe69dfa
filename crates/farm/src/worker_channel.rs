//! The manager's end of one worker's channel.

use crate::Piece;
use crate::message::{Answer, HEADER};
use crate::report::Departure;
use crate::wait::Watch;
use ginnel::{Error, Mapping, MessageChannel, MessageReceiver, MessageSender, SharedSlice};
use ginnel_layout::farm::{Header, Kind, VERSION};
use std::collections::HashSet;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Work that is worth a doorbell: what it takes to wake a sleeper, a few times over.
pub(super) const WORTH: Duration = Duration::from_micros(200);

/// The manager's end of one worker's channel. Nothing here waits: its receiver is in the manager's set.
pub(super) struct WorkerChannel {
    sender: MessageSender,
    receiver: MessageReceiver,
    /// Its key in the set.
    pub key: u64,
    /// There may be something to receive: the set has reported its key, and the receiver has not said
    /// [`Error::WouldBlock`] since then.
    pub awake: bool,
    /// Its number in the books of the current job.
    pub worker: usize,
    /// Whether it knows of the current job.
    pub told: bool,
    /// Pieces of earlier jobs that it still holds: nobody wants their results any more.
    pub stale: HashSet<u64>,
    /// When it was heard of last: who was a moment ago is awake, and has its caches warm.
    pub heard: Instant,
    /// The shortest time for a piece that it has been seen to take.
    pace: Option<Duration>,
    /// Since when it has slept over a piece that it was sent.
    owed: Option<Instant>,
    /// There was no room for the last piece that it should have got.
    pub full: bool,
}

/// Who goes is not left asleep either.
impl Drop for WorkerChannel {
    fn drop(&mut self) {
        self.wake(true);
    }
}

impl WorkerChannel {
    pub fn new(channel: MessageChannel, watch: &mut Watch) -> Result<Self, Error> {
        let (mut sender, mut receiver) = channel.split();
        let key = match watch.enter(&mut receiver) {
            Ok(key) => key,
            Err(error) => {
                // Otherwise the worker would take it for the end of all work.
                sender.abort();
                return Err(error);
            }
        };
        Ok(Self {
            sender,
            receiver,
            key,
            awake: true,
            worker: 0,
            told: false,
            stale: HashSet::new(),
            heard: Instant::now(),
            pace: None,
            owed: None,
            full: false,
        })
    }

    /// What it calls itself, and whose member it is.
    pub fn name(&self) -> String {
        let peer = &self.receiver.info().peer;
        format!("{}:{}#{}", peer.member_name, peer.name, peer.endpoint)
    }

    /// Whether nothing more will come of it.
    pub fn is_gone(&mut self) -> bool {
        if !self.awake {
            return false;
        }
        match self.receiver.peek() {
            Ok(_) => false,
            Err(Error::WouldBlock) => {
                self.awake = false;
                false
            }
            Err(_) => true,
        }
    }

    /// The longest piece.
    pub fn longest(&self) -> usize {
        self.sender.max_message() - HEADER
    }

    /// It has answered so many pieces since `since`, and before now.
    pub fn answered(&mut self, pieces: u32, since: Instant) {
        self.heard = Instant::now();
        let each = self.heard.saturating_duration_since(since) / pieces.max(1);
        self.pace = Some(self.pace.map_or(each, |pace| pace.min(each)));
    }

    /// Pieces that make up work worth a doorbell, at most `most`: one, unless it is known to be quick.
    pub fn batch(&self, most: usize) -> usize {
        let Some(pace) = self.pace else { return 1 };
        let pieces = WORTH.as_nanos() / pace.as_nanos().max(1);
        usize::try_from(pieces).unwrap_or(most).clamp(1, most.max(1))
    }

    /// Wakes it if it sleeps over pieces: over `enough` of them or for long, or at once.
    pub fn wake(&mut self, enough: bool) {
        if self.owed.is_some_and(|since| enough || since.elapsed() >= WORTH) {
            self.owed = None;
            self.sender.wake();
        }
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
            match claim.send_quietly(HEADER + len) {
                Ok(true) => _ = self.owed.get_or_insert_with(Instant::now),
                Ok(false) => {}
                Err(error) => return Err(self.departure(error)),
            }
        }
        Ok(filled)
    }

    /// What it has said, if anything; the content goes into `buffer`.
    pub fn answer(&mut self, buffer: &mut Vec<u8>) -> Result<Option<Answer>, Departure> {
        let message = match self.receiver.peek() {
            Ok(message) => message,
            Err(Error::WouldBlock) => {
                self.awake = false;
                return Ok(None);
            }
            Err(error) => return Err(self.departure(error)),
        };
        let answer = Answer::read(message.slice(), buffer);
        if let Err(error) = message.release() {
            return Err(self.departure(error));
        }
        answer.map(Some).map_err(|what| Departure::Dismissed(format!("it broke the farm's protocol: {what}")))
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
