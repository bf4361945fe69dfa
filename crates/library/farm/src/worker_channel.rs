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

/// The amount of work that is worth a doorbell: a few times the cost of waking a sleeper.
pub(super) const WORTH: Duration = Duration::from_micros(200);

/// The manager's end of one worker's channel. No method waits: the receiver is in the manager's set.
pub(super) struct WorkerChannel {
    sender: MessageSender,
    receiver: MessageReceiver,
    /// The channel's key in the set.
    pub key: u64,
    /// There may be something to receive: the set has reported the key, and the receiver has not returned
    /// [`Error::WouldBlock`] since then.
    pub awake: bool,
    /// The worker's number in the [`JobState`](crate::JobState) of the current job.
    pub worker: usize,
    /// The worker has been told about the current job.
    pub told: bool,
    /// Pieces of earlier jobs that the worker still holds. Their results are ignored.
    pub stale: HashSet<u64>,
    /// The time of the worker's last answer. A worker that answered a moment ago is awake, and its caches are warm.
    pub heard: Instant,
    /// The shortest time that the worker has been seen to take for a piece.
    pace: Option<Duration>,
    /// The time since which the worker has been asleep although it has a piece to work on.
    owed: Option<Instant>,
    /// The ring had no room for the last piece that the manager tried to send to the worker.
    pub full: bool,
}

/// Wakes a sleeping worker when the manager closes its channel, so that it notices.
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

    /// Returns the name that the worker gives itself, and the member that it belongs to.
    pub fn name(&self) -> String {
        let peer = &self.receiver.info().peer;
        format!("{}:{}#{}", peer.member_name, peer.name, peer.endpoint)
    }

    /// Returns whether the channel has ended, so that nothing more can come from it.
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

    /// Returns the longest piece that the channel takes, in bytes.
    pub fn longest(&self) -> usize {
        self.sender.max_message() - HEADER
    }

    /// Records that the worker has answered this many pieces since `since`, the last of them just now.
    pub fn answered(&mut self, pieces: u32, since: Instant) {
        self.heard = Instant::now();
        let each = self.heard.saturating_duration_since(since) / pieces.max(1);
        self.pace = Some(self.pace.map_or(each, |pace| pace.min(each)));
    }

    /// Returns how many pieces make up work worth a doorbell, at most `most`. That is one, unless the worker is known
    /// to be quick.
    pub fn batch(&self, most: usize) -> usize {
        let Some(pace) = self.pace else { return 1 };
        let pieces = WORTH.as_nanos() / pace.as_nanos().max(1);
        usize::try_from(pieces).unwrap_or(most).clamp(1, most.max(1))
    }

    /// Wakes the worker if it sleeps although it has pieces, and either `enough` is set or it has slept for long.
    pub fn wake(&mut self, enough: bool) {
        if self.owed.is_some_and(|since| enough || since.elapsed() >= WORTH) {
            self.owed = None;
            self.sender.wake();
        }
    }

    /// Returns whether the ring has room for a piece of this length now.
    pub fn has_room(&mut self, len: usize) -> Result<bool, Departure> {
        self.sender.has_room(HEADER + len).map_err(|error| self.departure(error))
    }

    /// Tells the worker about a job. Returns false if there is no room for that now.
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

    /// Sends a piece, for which there is room. `fill` writes its bytes.
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

    /// Returns the worker's next answer, if there is one. Its content goes into `buffer`.
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

    /// Returns how the worker has departed, according to its channel's error.
    fn departure(&self, error: Error) -> Departure {
        match error {
            Error::PeerDead => Departure::Died,
            Error::Finished | Error::Closed => Departure::Left,
            other => Departure::Dismissed(other.to_string()),
        }
    }
}
