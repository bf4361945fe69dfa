//! The holder of an NVMe volume: the process that has QEMU's connection.
//!
//! QEMU connects to a vfio-user device once, at the start of the VM; a device whose process ends is lost. So the process that QEMU
//! talks to does nothing but to keep what the engine needs: it has no disk, does no I/O, never maps the guest's memory, and never
//! waits. The engine, which serves the commands, can be killed and replaced behind it.
//!
//! ```text
//!  holder     one thread: accepts, receives, answers, and waits in poll(2)
//!  device     the controller as QEMU sees it
//!  link       the connection to the engine, and what it has not answered yet
//!  registers, pci, ranges   the parts of the device
//!  door       those who have connected, and have not negotiated yet
//! ```
//!
//! One QEMU and one engine are served at a time. When QEMU has gone, the next one is accepted as soon as nobody uses the memory of the
//! last one.

pub mod device;
mod door;
pub mod link;
pub mod pci;
pub mod ranges;
pub mod registers;

use crate::attach::Terms;
use device::{Answer, Device};
use door::{Client, Door};
use ginnel_nvme::State;
use ginnel_shmem::{Mapping, Protection};
use ginnel_vfio_user::{Errno, Gone, Limits, MAX_DATA, MAX_FDS, Message, ReplyTo};
use link::{Files, Link};
use ranges::MAX_RANGES;
use registers::Shape;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thiserror::Error;
use tracing::{error, info, warn};

/// How long a request of QEMU may wait for the engine. QEMU stands still as long.
const PATIENCE: Duration = Duration::from_secs(60);

/// The interval at which a holder without an engine looks whether the kernel has finished the requests of the last one.
const LOOK: Duration = Duration::from_millis(20);

/// The interval at which the times above are looked at.
const TICK: Duration = Duration::from_secs(1);

/// Most requests that wait for the engine. While there are so many, nothing is received from QEMU.
const MOST_WAITING: usize = 1024;

/// Most messages of QEMU that are handled before everything else is looked at again.
const BATCH: usize = 16;

/// Why a holder ends without being asked to.
#[derive(Debug, Error)]
pub enum Failed {
    /// The configuration asks for a controller that cannot be.
    #[error(transparent)]
    State(#[from] ginnel_nvme::SetupError),
    /// A system call has failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<Errno> for Failed {
    fn from(errno: Errno) -> Self {
        Self::Io(errno.into())
    }
}

/// When a holder ends by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lifetime {
    /// Never.
    Unlimited,
    /// When neither a QEMU nor an engine has been there for ten seconds.
    WhileUsed,
}

/// How long a holder with [`Lifetime::WhileUsed`] waits for its first user, or the next one.
const UNUSED: Duration = Duration::from_secs(10);

/// A holder.
pub struct Holder {
    device: Device,
    link: Link,
    client: Option<Client>,
    /// What QEMU waits for, in its order.
    waiting: VecDeque<Waiting>,
    /// The number that the link settles when nobody uses the memory of the last client any more.
    leaving: Option<(u64, Instant)>,
    door: Door,
    /// Nobody is accepted before.
    rests_until: Option<Instant>,
    /// The answer to a client that says its version.
    version: Vec<u8>,
}

/// A request that waits for the engine.
struct Waiting {
    number: u64,
    to: ReplyTo,
    body: Vec<u8>,
    what: &'static str,
    since: Instant,
}

/// The sockets of a holder.
#[derive(Clone, Copy, Debug)]
pub struct Sockets<'a> {
    /// For QEMU; nonblocking.
    pub clients: &'a UnixListener,
    /// For engines; nonblocking, see [`attach::listen`](crate::attach::listen).
    pub engines: BorrowedFd<'a>,
    /// Readable when the holder must end.
    pub stop: BorrowedFd<'a>,
}

impl Holder {
    /// Creates the state and the doorbells of a controller, in files of this process.
    pub fn new(shape: Shape) -> Result<Self, Failed> {
        let (state, state_memory) = file("nvme-state", State::<Mapping>::len(shape.queues, shape.slots))?;
        let (doorbells, doorbell_memory) = file("nvme-doorbells", shape.bar())?;
        let device = Device::new(shape, state_memory, doorbell_memory)?;
        let terms = Terms {
            queues: shape.queues.into(),
            slots: shape.slots.into(),
            mapped: shape.mapped,
            vectors: u32::from(shape.queues) + 1,
        };
        let link = Link::new(terms, Files { state, doorbells: Arc::new(doorbells) });
        let version = Limits { fds: MAX_FDS, data: MAX_DATA, maps: MAX_RANGES }.version();
        let (waiting, door) = (VecDeque::new(), Door::default());
        Ok(Self { device, link, client: None, waiting, leaving: None, door, rests_until: None, version })
    }

    /// Serves QEMU and engines until it must end.
    pub fn run(&mut self, sockets: Sockets<'_>, lifetime: Lifetime) -> Result<(), Failed> {
        let mut used = Instant::now();
        loop {
            let ready = self.wait(sockets)?;
            let now = Instant::now();
            if ready.stop {
                if let Some(client) = &self.client {
                    warn!(
                        pid = client.pid,
                        "the holder ends: the VM loses the device until its QEMU is started again"
                    );
                }
                return Ok(());
            }
            // Engines first: what they have settled, QEMU waits for.
            if ready.engine {
                self.link.hear();
            }
            if ready.engines {
                let accepted = self.link.accept(sockets.engines, now);
                self.rest_after(accepted, now);
            }
            if self.link.hear_newcomer(now) {
                self.device.introduce(&mut self.link);
            }
            self.link.look();
            if ready.client_gone {
                self.lose_client(&Gone::Closed, now);
            }
            if let Some(client) = &mut self.client
                && let Err(gone) = serve(client, &mut self.device, &mut self.link, &mut self.waiting, now)
            {
                self.lose_client(&gone, now);
            }
            // Behind the look at the last client, whose end may be there to be read.
            if ready.clients {
                let accepted = self.door.accept(sockets.clients, now);
                self.rest_after(accepted, now);
            }
            self.greet(now);
            self.settle(now);
            self.link.flush(now, ready.engine_room);
            if let Some(client) = &mut self.client
                && let Err(gone) = client.server.flush()
            {
                self.lose_client(&gone, now);
            }
            let has_client = self.client.is_some() || self.leaving.is_some() || !self.door.is_empty();
            if has_client || self.link.is_used() {
                used = now;
            } else if lifetime == Lifetime::WhileUsed && now.duration_since(used) >= UNUSED {
                info!("neither a VM nor an engine is there: the holder ends");
                return Ok(());
            }
        }
    }

    /// Accepts nobody for a while if the process is out of descriptors or memory: whoever has connected is still there.
    fn rest_after(&mut self, accepted: io::Result<()>, now: Instant) {
        if accepted.is_err() {
            self.rests_until = Some(now + TICK);
        }
    }

    /// Waits until something can be done.
    fn wait(&self, sockets: Sockets<'_>) -> Result<Ready, Failed> {
        // A second newcomer waits in the queue of the listener, and so does a VM while the last one leaves.
        let accepts = self.rests_until.is_none_or(|then| Instant::now() >= then);
        let engines = (accepts && self.link.newcomer_fd().is_none()).then_some(sockets.engines);
        let clients = accepts && self.leaving.is_none() && self.door.has_room();
        let clients = clients.then_some(sockets.clients.as_fd());
        let client = self.client.as_ref().map(|client| client.server.as_fd());
        let receives =
            self.client.as_ref().is_some_and(|client| client.server.is_receiving()) && self.has_room();
        let sends = self.client.as_ref().is_some_and(|client| client.server.is_waiting());
        let events = |receives: bool, sends: bool| {
            let mut events = PollFlags::empty();
            events.set(PollFlags::IN, receives);
            events.set(PollFlags::OUT, sends);
            events
        };
        let wanted = [
            (Some(sockets.stop), events(true, false)),
            (clients, events(true, false)),
            (engines, events(true, false)),
            (client, events(receives, sends)),
            (self.link.engine_fd(), events(true, self.link.wants_room())),
            (self.link.newcomer_fd(), events(true, false)),
        ];
        let mut polls: Vec<_> = wanted
            .iter()
            .filter_map(|(fd, events)| Some(PollFd::from_borrowed_fd((*fd)?, *events)))
            .collect();
        if self.leaving.is_none() {
            polls.extend(self.door.fds().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        }
        let timeout = if self.link.must_look() { LOOK } else { TICK };
        let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
        match poll(&mut polls, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let mut found = polls.iter().map(PollFd::revents);
        let [stop, clients, engines, client, engine, _] =
            wanted.map(|(fd, _)| fd.and_then(|_| found.next()).unwrap_or(PollFlags::empty()));
        Ok(Ready {
            stop: !stop.is_empty(),
            clients: !clients.is_empty(),
            engines: !engines.is_empty(),
            // Nobody would notice otherwise, as long as nothing is received.
            client_gone: client.contains(PollFlags::HUP) && !receives,
            engine: !engine.is_empty(),
            engine_room: engine.contains(PollFlags::OUT),
        })
    }

    fn has_room(&self) -> bool {
        self.waiting.len() < MOST_WAITING && !self.link.is_full()
    }

    fn lose_client(&mut self, gone: &Gone, now: Instant) {
        let Some(client) = self.client.take() else { return };
        let pid = client.pid;
        self.waiting.clear();
        match gone {
            Gone::Closed => info!(pid, "the VM has gone"),
            gone => error!(
                pid,
                "the VM is given up, and loses the device until its QEMU is started again: {gone}"
            ),
        }
        self.leaving = Some((self.device.client_gone(&mut self.link), now));
    }

    /// Lets the next VM in.
    fn greet(&mut self, now: Instant) {
        if self.leaving.is_some() {
            return;
        }
        let served = self.client.as_ref().map(|client| client.pid);
        if let Some(client) = self.door.greet(served, &self.version, now) {
            self.client = Some(client);
        }
    }

    /// Answers what the engine has settled, and what has waited too long.
    fn settle(&mut self, now: Instant) {
        if let Some((number, since)) = self.leaving {
            if self.link.is_settled(number) {
                self.leaving = None;
                self.door.forget_time(now);
            } else if now.duration_since(since) >= PATIENCE {
                error!(
                    "the engine still uses the memory of the last VM; no other VM is accepted until it has ended"
                );
                self.leaving = Some((number, now));
            }
        }
        let Some(client) = &mut self.client else { return };
        // The numbers of those that wait only grow.
        while let Some(first) = self.waiting.front() {
            let settled = self.link.is_settled(first.number);
            if !settled && now.duration_since(first.since) < PATIENCE {
                break;
            }
            let Some(Waiting { to, body, what, .. }) = self.waiting.pop_front() else { break };
            if settled {
                client.server.reply(to, &body, None);
            } else {
                let seconds = PATIENCE.as_secs();
                error!(
                    "the VM has waited {seconds} seconds for {what}, and gets an error: is the disk well?"
                );
                client.server.fail(to, Errno::TIMEDOUT);
            }
        }
    }
}

/// What is ready, of what is looked at only then. The others are looked at each time: they do not block, and some have waited too long.
struct Ready {
    stop: bool,
    clients: bool,
    engines: bool,
    client_gone: bool,
    engine: bool,
    engine_room: bool,
}

/// Handles what QEMU has sent.
fn serve(
    client: &mut Client,
    device: &mut Device,
    link: &mut Link,
    waiting: &mut VecDeque<Waiting>,
    now: Instant,
) -> Result<(), Gone> {
    for _ in 0..BATCH {
        if waiting.len() >= MOST_WAITING || link.is_full() {
            return Ok(());
        }
        let Some(message) = client.server.receive()? else { break };
        answer(client, message, device, link, waiting, now);
    }
    Ok(())
}

fn answer(
    client: &mut Client,
    mut message: Message,
    device: &mut Device,
    link: &mut Link,
    waiting: &mut VecDeque<Waiting>,
    now: Instant,
) {
    let to = message.reply_to();
    let request = match message.request() {
        Ok(request) => request,
        Err(errno) => return client.server.fail(to, errno),
    };
    match device.handle(request, link) {
        Answer::Now(body) => client.server.reply(to, &body, None),
        Answer::File(body, file) => client.server.reply(to, &body, Some(file)),
        Answer::When(number, body, _) if link.is_settled(number) && waiting.is_empty() => {
            client.server.reply(to, &body, None);
        }
        Answer::When(number, body, what) => waiting.push_back(Waiting { number, to, body, what, since: now }),
        Answer::Refused(errno) => client.server.fail(to, errno),
    }
}

/// Creates a file in memory whose length nobody can change, and maps it.
fn file(name: &str, len: usize) -> Result<(OwnedFd, Mapping), Failed> {
    let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, len as u64)?;
    // So that QEMU, which has the doorbells, cannot take their pages from under an engine.
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    let memory = Mapping::of_file(&file, 0, len, Protection::ReadWrite)?;
    Ok((file, memory))
}

#[cfg(test)]
mod tests;
