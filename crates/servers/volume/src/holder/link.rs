//! The holder's side of the connection to its engine.
//!
//! ```text
//!  nobody  --connects-->  waits for its hello  --hello-->  attached  --ends-->  nobody, but the kernel may still work
//! ```
//!
//! Some messages want an answer. They are numbered, and [`Link::is_settled`] says whether everything up to a number is in force: because
//! an engine has said so, or because there is no engine any more and the kernel has finished its requests. The lock that the last
//! engine has shown tells the latter. An engine that attaches takes the lock first, and then gets everything anew, so
//! its first answer settles whatever its predecessor left unanswered.

use crate::attach::{FromEngine, Gone, HolderEnd, Range, Sent, Terms, ToEngine};
use crate::hush::Hush;
use ginnel_layout::nvme_attach::{Reason, VERSION};
use rustix::fs::{FlockOperation, OFlags, fcntl_getfl, flock};
use rustix::net::sockopt::socket_peercred;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::{error, info, warn};

/// How long whoever connects may take to say hello.
const HELLO: Duration = Duration::from_secs(10);

/// How long an engine may leave its messages unread.
const UNREAD: Duration = Duration::from_secs(60);

/// While so many messages wait for the engine, no more should be made.
const MANY: usize = 1024;

/// A message that waits for the engine.
#[derive(Clone, Debug)]
pub enum Item {
    /// A range of guest memory, and its file.
    Map(Range, Arc<OwnedFd>),
    /// A range is not to be used any more.
    Unmap(Range),
    /// An interrupt vector has a new eventfd, or none.
    Vector(u32, Option<Arc<OwnedFd>>),
    /// Words of the state have changed.
    Control,
}

/// The files of which every engine gets a descriptor.
#[derive(Debug)]
pub struct Files {
    /// The state.
    pub state: OwnedFd,
    /// The doorbells.
    pub doorbells: Arc<OwnedFd>,
}

/// The connection to the engine, if there is one.
#[derive(Debug)]
pub struct Link {
    terms: Terms,
    files: Files,
    newcomer: Option<Newcomer>,
    unaccepted: Hush,
    engine: Option<Engine>,
    /// The lock of the last engine that was attached.
    turn: Option<OwnedFd>,
    /// The number of the last message that wants an answer.
    asked: u64,
    /// Everything up to this number is in force.
    settled: u64,
}

/// Somebody who has connected, and has not said hello yet.
#[derive(Debug)]
struct Newcomer {
    end: HolderEnd,
    since: Instant,
}

/// The engine that is attached.
#[derive(Debug)]
struct Engine {
    end: HolderEnd,
    pid: u32,
    kicks: Vec<OwnedFd>,
    /// Messages that it had no room for, with the number that wants an answer or zero.
    waiting: VecDeque<(Item, u64)>,
    /// Since when it has taken none of them.
    stuck: Option<Instant>,
    /// Its socket has room, but too many descriptors are on their way, which poll(2) does not know.
    is_paused: bool,
}

impl Link {
    /// Returns a link without an engine.
    pub fn new(terms: Terms, files: Files) -> Self {
        Self {
            terms,
            files,
            newcomer: None,
            unaccepted: Hush::default(),
            engine: None,
            turn: None,
            asked: 0,
            settled: 0,
        }
    }

    /// Returns the file with the doorbells.
    pub fn doorbells(&self) -> &Arc<OwnedFd> {
        &self.files.doorbells
    }

    /// Returns whether an engine is attached.
    pub fn is_attached(&self) -> bool {
        self.engine.is_some()
    }

    /// Returns whether somebody is attached or about to be.
    pub fn is_used(&self) -> bool {
        self.engine.is_some() || self.newcomer.is_some()
    }

    /// Returns whether so many messages wait for the engine that no more should be made.
    pub fn is_full(&self) -> bool {
        self.engine.as_ref().is_some_and(|engine| engine.waiting.len() >= MANY)
    }

    /// Returns whether [`Link::flush`] must be called when the engine's socket can be written.
    pub fn wants_room(&self) -> bool {
        self.engine.as_ref().is_some_and(|engine| !engine.waiting.is_empty() && !engine.is_paused)
    }

    /// Returns whether [`Link::look`] or [`Link::flush`] must be called again after a short time.
    pub fn must_look(&self) -> bool {
        self.engine.as_ref().map_or(self.is_unsettled(), |engine| engine.is_paused)
    }

    /// Returns the socket of the engine.
    pub fn engine_fd(&self) -> Option<BorrowedFd<'_>> {
        self.engine.as_ref().map(|engine| engine.end.as_fd())
    }

    /// Returns the socket of whoever has not said hello yet.
    pub fn newcomer_fd(&self) -> Option<BorrowedFd<'_>> {
        self.newcomer.as_ref().map(|newcomer| newcomer.end.as_fd())
    }

    /// Returns whether everything up to this number is in force.
    pub fn is_settled(&self, number: u64) -> bool {
        number <= self.settled
    }

    fn is_unsettled(&self) -> bool {
        self.settled < self.asked
    }

    /// Tells the engine something, if there is one.
    pub fn tell(&mut self, item: Item) {
        let Some(engine) = &mut self.engine else { return };
        // The engine looks at the words as they are when it reads the message.
        let is_told = matches!(engine.waiting.back(), Some((Item::Control, _)));
        if !(is_told && matches!(item, Item::Control)) {
            engine.waiting.push_back((item, 0));
        }
    }

    /// Tells the engine something, and returns the number of its answer. Without any engine it may be settled at once.
    pub fn ask(&mut self, item: Item) -> u64 {
        self.asked += 1;
        if let Some(engine) = &mut self.engine {
            engine.waiting.push_back((item, self.asked));
        }
        self.look();
        self.asked
    }

    /// Settles everything if there is no engine, and the kernel has finished the requests of the last one.
    pub fn look(&mut self) {
        if self.engine.is_some() || !self.is_unsettled() {
            return;
        }
        let is_free = match &self.turn {
            None => true,
            Some(turn) => match flock(turn, FlockOperation::NonBlockingLockExclusive) {
                // Nobody needs the lock of a file that nobody holds; an engine that starts at this moment tries again.
                Ok(()) => flock(turn, FlockOperation::Unlock).is_ok(),
                Err(_) => false,
            },
        };
        if is_free {
            self.turn = None;
            self.settled = self.asked;
        }
    }

    /// Wakes the engine, because a doorbell of this queue was written.
    pub fn kick(&self, queue: u16) {
        if let Some(kick) = self.engine.as_ref().and_then(|engine| engine.kicks.get(usize::from(queue))) {
            // A full counter wakes as well.
            let _ = rustix::io::write(kick, &1u64.to_ne_bytes());
        }
    }

    /// Accepts whoever connects. One newcomer at a time; another one waits until this one has said hello or has gone. An error has
    /// been logged.
    pub fn accept(&mut self, listener: BorrowedFd<'_>, now: Instant) -> io::Result<()> {
        match HolderEnd::accept(listener) {
            Ok(Some(end)) => self.newcomer = Some(Newcomer { end, since: now }),
            Ok(None) => {}
            // The process is out of descriptors or memory.
            Err(error) => {
                if let Some(suppressed) = self.unaccepted.allows(now) {
                    warn!(suppressed, "an engine cannot be accepted: {error}");
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Reads what the newcomer says. Returns true if it is attached now: then it must be told everything, from the beginning.
    pub fn hear_newcomer(&mut self, now: Instant) -> bool {
        let Some(newcomer) = &self.newcomer else { return false };
        let heard = newcomer.end.receive();
        if let Ok(None) = heard {
            if now.duration_since(newcomer.since) >= HELLO {
                warn!("whoever has connected to the engine's socket does not say hello, and is given up");
                self.newcomer = None;
            }
            return false;
        }
        let Some(Newcomer { end, .. }) = self.newcomer.take() else { return false };
        match heard {
            Ok(Some(FromEngine::Hello { version, turn, kicks })) => self.attach(end, version, turn, kicks),
            Ok(_) => {
                warn!(
                    "whoever has connected to the engine's socket does not begin with a hello, and is given up"
                );
                false
            }
            Err(Gone::Closed) => false,
            Err(gone) => {
                warn!("whoever has connected to the engine's socket is given up: {gone}");
                false
            }
        }
    }

    fn attach(&mut self, end: HolderEnd, version: u32, turn: Option<OwnedFd>, kicks: Vec<OwnedFd>) -> bool {
        let pid = socket_peercred(&end).map_or(0, |peer| peer.pid.as_raw_nonzero().get().unsigned_abs());
        // The end of an engine may be there to be read, after that of its successor has begun.
        self.hear();
        let queues = (kicks.len() as u32).saturating_sub(1);
        let refused = match &self.engine {
            _ if version != VERSION => Some((Reason::VERSION, VERSION)),
            _ if queues != self.terms.queues => Some((Reason::QUEUES, self.terms.queues)),
            Some(_) => Some((Reason::BUSY, 0)),
            None => None,
        };
        if let Some((reason, have)) = refused {
            match (reason, &self.engine) {
                (Reason::VERSION, _) => error!(
                    pid,
                    "an engine is refused: it speaks version {version}, this holder {have}; run both from the same release"
                ),
                (Reason::QUEUES, _) => error!(
                    pid,
                    "an engine is refused: it has {queues} queues, this holder {have}; give both the same configuration"
                ),
                (_, engine) => {
                    let other = engine.as_ref().map_or(0, |engine| engine.pid);
                    warn!(pid, other, "a second engine is refused: another one is attached");
                }
            }
            // If it has no room for so little, it finds the connection closed.
            let _ = end.send(ToEngine::Refused { reason, have });
            return false;
        }
        let blocks = |kick: &OwnedFd| !fcntl_getfl(kick).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK));
        if kicks.iter().any(blocks) {
            error!(
                pid,
                "an engine is given up: its eventfds could block this process; run both from the same release"
            );
            return false;
        }
        let welcome = ToEngine::Welcome {
            terms: self.terms,
            state: self.files.state.as_fd(),
            doorbells: self.files.doorbells.as_fd(),
        };
        match end.send(welcome) {
            Ok(Sent::Yes) => {}
            Ok(Sent::Later) => {
                warn!(pid, "an engine is given up: its socket has no room for the first message");
                return false;
            }
            Err(gone) => {
                warn!(pid, "an engine has gone before it was attached: {gone}");
                return false;
            }
        }
        info!(pid, "an engine is attached");
        (self.turn, self.engine) =
            (turn, Some(Engine { end, pid, kicks, waiting: VecDeque::new(), stuck: None, is_paused: false }));
        true
    }

    /// Reads the answers of the engine. Notices when it has gone.
    pub fn hear(&mut self) {
        while let Some(engine) = &self.engine {
            let why = match engine.end.receive() {
                Ok(None) => return,
                Ok(Some(FromEngine::Done(id))) if (self.settled + 1..=self.asked).contains(&id) => {
                    self.settled = id;
                    continue;
                }
                // It was asked for something that the kernel has settled meanwhile.
                Ok(Some(FromEngine::Done(id))) if id <= self.settled => continue,
                Ok(Some(FromEngine::Done(id))) => format!("it answers message {id}, which there is not"),
                Ok(Some(FromEngine::Hello { .. })) => "it says hello a second time".to_owned(),
                Err(Gone::Closed) => {
                    info!(pid = engine.pid, "the engine has gone; the next one continues");
                    self.engine = None;
                    return;
                }
                Err(gone) => gone.to_string(),
            };
            self.give_up(&why);
        }
    }

    /// Sends what waits for the engine, as far as it has room; `room` is whether poll(2) has said so. Gives the engine up if it has read
    /// nothing for a minute.
    pub fn flush(&mut self, now: Instant, room: bool) {
        let Some(engine) = &mut self.engine else { return };
        engine.is_paused = false;
        let mut has_sent = false;
        let why = loop {
            let Some((item, id)) = engine.waiting.front() else {
                engine.stuck = None;
                return;
            };
            match engine.end.send(message(item, *id)) {
                Ok(Sent::Yes) => {
                    engine.waiting.pop_front();
                    engine.stuck = None;
                    has_sent = true;
                }
                Ok(Sent::Later) => {
                    engine.is_paused = room && !has_sent;
                    if now.duration_since(*engine.stuck.get_or_insert(now)) < UNREAD {
                        return;
                    }
                    break "it has not read its messages for a minute".to_owned();
                }
                // What it has said before it ended is still read.
                Err(Gone::Closed) => {
                    engine.waiting.clear();
                    return;
                }
                Err(gone) => break gone.to_string(),
            }
        };
        self.give_up(&why);
    }

    fn give_up(&mut self, why: &str) {
        if let Some(engine) = self.engine.take() {
            error!(pid = engine.pid, "the engine is given up: {why}");
        }
    }
}

fn message(item: &Item, id: u64) -> ToEngine<'_> {
    match item {
        Item::Map(range, file) => ToEngine::Map { range: *range, file: file.as_fd() },
        Item::Unmap(range) => ToEngine::Unmap { id, iova: range.iova, len: range.len },
        Item::Vector(number, eventfd) => {
            ToEngine::Vector { number: *number, eventfd: eventfd.as_ref().map(|eventfd| eventfd.as_fd()) }
        }
        Item::Control => ToEngine::Control { id },
    }
}
