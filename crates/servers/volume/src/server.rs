//! A volume: its disks, its workers, and the front ends that connect to it.
//!
//! The server serves one front end at a time. A second one that connects meanwhile waits until the first disconnects; a
//! third is refused. When a front end disconnects, the requests that were taken are finished before the next front end
//! is served.

mod control;
mod nvme;

use crate::backend::{Backend, Failure, Stores};
use crate::device::Device;
use crate::device::blk::Blk;
use crate::device::nvme::Namespace;
use crate::device::scsi::Scsi;
use crate::disk::Disk;
use crate::limit::Limiter;
use crate::ownership::Ownership;
use crate::session::message::{Connection, Gone};
use crate::session::{Limits, Outcome, Queues, Session};
use crate::stats::Counters;
use crate::worker::{Event, Events, Handle, Order, Peers, Plan, Start, Target};
use ginnel_layout::nvme::PAGE;
use ginnel_volume_control::config::{Config, Device as DeviceKind, OnError};
use ginnel_volume_control::{Controller, Limits as RateLimits};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::sockopt::socket_peercred;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use thiserror::Error;
use tracing::{error, info, warn};

/// Why a volume ends without being asked to.
#[derive(Debug, Error)]
pub enum Failed {
    /// The configuration asks for something that the system does not have.
    #[error("{0}")]
    Config(String),
    /// A worker thread has ended.
    #[error("a worker has failed; start the volume again: what was under way is taken up then")]
    Worker,
    /// The holder of an NVMe volume has ended.
    #[error(
        "the holder has ended, and the VM has lost the disk until its QEMU is started again; start the holder and the volume again"
    )]
    Holder,
    /// A worker does not give a queue back.
    #[error("{0}; start the volume again when the disk is well")]
    Stuck(String),
    /// A system call has failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// How long a front end that starts a queue waits for an image that another process has locked. It is longer than a
/// volume or a QEMU needs to release the lock, and not too long for the front end, which connects again if it is
/// refused.
const PATIENCE: Duration = Duration::from_secs(5);

/// Descriptors that are readable when a signal has come.
#[derive(Clone, Copy, Debug)]
pub struct Signals<'a> {
    /// The volume must end.
    pub stop: BorrowedFd<'a>,
    /// SIGHUP, of which a byte comes.
    pub hangup: &'a UnixStream,
}

impl Signals<'_> {
    /// Says that SIGHUP changes nothing.
    fn hung_up(self) {
        // The configuration cannot be opened from the sandbox.
        if (&mut &*self.hangup).read(&mut [0; 64]).is_ok() {
            info!(
                "SIGHUP: nothing is reloaded; `ginnel volume limit` and `resize` change a volume that serves; restart it for other \
                 settings: its front end waits for it"
            );
        }
    }
}

/// A volume: the main thread's part.
pub struct Server {
    shared: Arc<Shared>,
    events: Events,
}

/// The part of a volume that its threads share.
pub(crate) struct Shared {
    config: Config,
    target: Target,
    /// The number of queues, including those for control, events and administration.
    queues: u16,
    disks: Vec<Arc<Disk>>,
    backends: Vec<Backend>,
    ownership: Ownership,
    counters: Arc<Counters>,
    limiter: Arc<Limiter>,
    workers: Vec<Handle>,
    limits: Mutex<RateLimits>,
    front_end_info: Mutex<FrontEndInfo>,
    /// For each disk, whether its size has changed and the front end has not been told yet.
    resized: Vec<AtomicBool>,
    /// Who waits for the state of the controller of an NVMe volume, which only the main thread knows.
    dumps: Mutex<Vec<SyncSender<Controller>>>,
    wake: OwnedFd,
    started: Instant,
}

/// What the statistics say about the front end.
#[derive(Clone, Debug, Default)]
struct FrontEndInfo {
    front_end: Option<(u32, Instant)>,
    /// The holder of an NVMe volume.
    holder: Option<u32>,
    sessions: u64,
    features: u64,
    protocol: u64,
    /// For each queue, whether it runs, and its size in descriptors.
    rings: Vec<(bool, u16)>,
    sandbox: String,
}

impl Server {
    /// Starts one worker for each of `stores`. `backends` are the disks of the configuration, in order, with their
    /// sizes in bytes.
    pub fn new(
        config: Config,
        backends: Vec<(Backend, u64)>,
        stores: Vec<Stores>,
        ownership: Ownership,
    ) -> Result<Self, Failed> {
        let disks: Vec<_> = config
            .disks
            .iter()
            .zip(&backends)
            .map(|(spec, (_, bytes))| {
                let disk = Disk::new(*bytes, spec.sector, spec.read_only, &spec.serial)
                    .holding_errors(spec.on_error == OnError::Hold);
                Arc::new(if spec.write_cache { disk } else { disk.without_cache() })
            })
            .collect();
        let backends: Vec<_> = backends.into_iter().map(|(backend, _)| backend).collect();
        // Each request of a disk occupies a descriptor of a queue.
        let depth = usize::from(config.queues) * usize::from(config.queue_size);
        backends.iter().try_for_each(|backend| backend.start(depth))?;
        let segments = u16::try_from(config.segments).unwrap_or(u16::MAX);
        let spaces = config.disks.iter().map(|spec| spec.discard);
        let target = match (config.device, &disks[..]) {
            (DeviceKind::Blk, [disk]) => {
                let space = spaces.fold(true, |_, space| space);
                Target::Virtio(Arc::new(Blk::new(disk.clone(), config.queues, segments, space)))
            }
            (DeviceKind::Nvme, [disk]) => {
                let space = spaces.fold(true, |_, space| space);
                let transfer = (PAGE as u32) << config.mdts();
                Target::Nvme(Arc::new(Namespace::new(disk.clone(), transfer, space)))
            }
            (DeviceKind::Blk | DeviceKind::Nvme, _) => {
                return Err(Failed::Config(format!("the device {} has one disk", config.device)));
            }
            (DeviceKind::Scsi, _) => {
                let disks = disks.iter().cloned().zip(spaces);
                Target::Virtio(Arc::new(Scsi::new(disks, config.queues, segments)))
            }
        };
        let queues = match &target {
            Target::Virtio(device) => device.queues(),
            // Number 0 is the admin queue, which no worker serves.
            Target::Nvme(_) => config.queues + 1,
        };
        let counters = Arc::new(Counters::new(queues.into(), stores.len()));
        let limiter = Arc::new(Limiter::new(config.limits));
        let events = Events::new()?;
        let started = Instant::now();
        let peers = Peers::default();
        let workers = stores
            .into_iter()
            .enumerate()
            .map(|(number, stores)| {
                let plan = Plan {
                    number,
                    target: target.clone(),
                    stores,
                    wait: config.wait,
                    budget: config.poll_for,
                    pin_memory: config.pin_memory,
                    counters: counters.clone(),
                    limiter: limiter.clone(),
                    peers: peers.clone(),
                    epoch: started,
                };
                Handle::start(plan, config.cpus.get(number).copied(), &events)
            })
            .collect::<io::Result<Vec<_>>>()?;
        peers.introduce(&workers);
        let resized = disks.iter().map(|_| AtomicBool::new(false)).collect();
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(io::Error::from)?;
        let shared = Shared {
            target,
            queues,
            disks,
            backends,
            ownership,
            counters,
            limiter,
            workers,
            limits: Mutex::new(config.limits),
            front_end_info: Mutex::default(),
            resized,
            dumps: Mutex::default(),
            wake,
            started,
            config,
        };
        Ok(Self { shared: Arc::new(shared), events })
    }

    /// Sets the word by which the statistics name the sandbox of the process.
    pub fn set_sandbox(&self, word: &str) {
        self.shared.front_end_info().sandbox = word.to_owned();
    }

    /// Serves front ends until it must stop; then finishes the requests that were taken, and returns.
    pub fn run(&self, listener: &UnixListener, signals: Signals<'_>) -> Result<(), Failed> {
        let Target::Virtio(device) = &self.shared.target else {
            return Err(Failed::Config(format!("the device {} has a holder", self.shared.config.device)));
        };
        listener.set_nonblocking(true)?;
        let mut next: Option<UnixStream> = None;
        loop {
            let stream = match next.take() {
                Some(stream) => stream,
                None => match self.wait_for_front_end(listener, signals)? {
                    Some(stream) => stream,
                    None => break,
                },
            };
            if !self.serve(device, stream, listener, signals, &mut next)? {
                break;
            }
        }
        self.shared.ownership.end();
        Ok(())
    }

    /// Waits for the next front end. `None` means that the volume must end.
    fn wait_for_front_end(
        &self,
        listener: &UnixListener,
        signals: Signals<'_>,
    ) -> Result<Option<UnixStream>, Failed> {
        loop {
            let [stopped, hung_up, connected, event, wake] = ready([
                signals.stop,
                signals.hangup.as_fd(),
                listener.as_fd(),
                self.events.as_fd(),
                self.shared.wake.as_fd(),
            ])?;
            if stopped {
                return Ok(None);
            }
            if hung_up {
                signals.hung_up();
            }
            if event && self.events.next() == Some(Event::Failed) {
                return Err(Failed::Worker);
            }
            if wake {
                self.tell_resized(None);
            }
            if connected && let Some(stream) = accept(listener) {
                return Ok(Some(stream));
            }
        }
    }

    /// Serves one front end until it disconnects. Returns false if the volume must end.
    fn serve(
        &self,
        device: &Arc<dyn Device>,
        stream: UnixStream,
        listener: &UnixListener,
        signals: Signals<'_>,
        next: &mut Option<UnixStream>,
    ) -> Result<bool, Failed> {
        let pid = peer(&stream);
        let mut connection = Connection::new(stream)?;
        info!(pid, "a front end has connected");
        let limits = Limits {
            queue_size: self.shared.config.queue_size,
            segments: u16::try_from(self.shared.config.segments).unwrap_or(u16::MAX),
            packed: self.shared.config.packed,
        };
        let mut session = Session::new(device.clone(), limits);
        self.shared.front_end_connected(pid);
        let mut workers = Workers(&self.shared);
        let mut go_on = true;
        let end = loop {
            let [stopped, hung_up, message, connected, event, wake] = ready([
                signals.stop,
                signals.hangup.as_fd(),
                connection.as_fd(),
                listener.as_fd(),
                self.events.as_fd(),
                self.shared.wake.as_fd(),
            ])?;
            if stopped {
                go_on = false;
                break None;
            }
            if hung_up {
                signals.hung_up();
            }
            if event {
                match self.events.next() {
                    Some(Event::Failed) => return Err(Failed::Worker),
                    Some(Event::MemoryGone) if session.is_broken() => {
                        break Some(Gone::Refused(
                            "its memory has disappeared: the file was truncated".to_owned(),
                        ));
                    }
                    Some(Event::MemoryGone) | None => {}
                }
            }
            if wake {
                self.tell_resized(Some(&mut session));
            }
            if connected {
                accept_waiting(listener, next);
            }
            if message && let Err(gone) = handle_message(&mut connection, &mut session, &mut workers) {
                break Some(gone);
            }
            self.shared.note(&session);
        };
        // A front end that continues with the next process hands that process the requests in flight.
        let stopped = match go_on {
            true => session.stop_all(&mut workers),
            false => session.pause_all(&mut workers),
        };
        // Closed first, so that an operator who sees the front end disappear from the statistics finds none of its
        // files open.
        drop((session, connection));
        self.shared.front_end_disconnected();
        match end {
            Some(Gone::Closed) => info!(pid, "the front end has gone"),
            Some(gone) => error!(pid, "the front end is given up: {gone}"),
            None => info!(pid, "the volume ends; what was under way is done"),
        }
        match stopped {
            Ok(()) => {
                self.shared.ownership.vm_gone(|disk| self.shared.sync(disk));
                Ok(go_on)
            }
            Err(gone) => Err(Failed::Stuck(gone.to_string())),
        }
    }

    /// Reports new sizes to the front end, if one is connected. A driver that connects later reads the new size anyway.
    /// If the driver has gone, the device tells the next one that it has missed an event.
    fn tell_resized(&self, mut session: Option<&mut Session>) {
        for disk in self.shared.take_resized() {
            if let Some(session) = &mut session {
                session.config_changed();
            }
            let Target::Virtio(device) = &self.shared.target else { continue };
            if let (Some(index), Some(event)) = (device.event_queue(), device.resized(disk)) {
                self.shared.worker_of(index).send(Order::Tell { index, event });
            }
        }
    }
}

/// Handles one message, if all of it has arrived. It handles no second one: a front end that sends faster than it gets
/// answers must not keep the other descriptors waiting, least of all `stop`.
fn handle_message(
    connection: &mut Connection,
    session: &mut Session,
    workers: &mut Workers<'_>,
) -> Result<(), Gone> {
    if let Some(message) = connection.receive()? {
        let request = message.request;
        if let Outcome::Reply(body, fd) = session.handle(message, workers)? {
            connection.reply(request, &body, fd.as_ref().map(OwnedFd::as_fd))?;
        }
    }
    Ok(())
}

/// Accepts a front end that connects while another one is served.
fn accept_waiting(listener: &UnixListener, next: &mut Option<UnixStream>) {
    let Some(stream) = accept(listener) else { return };
    let pid = peer(&stream);
    // A front end that has hung up meanwhile no longer counts as waiting.
    next.take_if(|waiting| has_hung_up(waiting));
    match next {
        Some(_) => warn!(pid, "one front end too many: refused; one is served, and one waits"),
        None => {
            warn!(pid, "a second front end: it waits until the first has gone");
            *next = Some(stream);
        }
    }
}

fn has_hung_up(stream: &UnixStream) -> bool {
    let mut polls = [PollFd::new(stream, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut polls, Some(&now)).is_ok_and(|n| n > 0)
}

fn accept(listener: &UnixListener) -> Option<UnixStream> {
    match listener.accept() {
        Ok((stream, _)) => Some(stream),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
        Err(error) => {
            warn!("a front end cannot be accepted: {error}");
            // The process is out of descriptors or memory: the pause keeps this loop from spinning.
            std::thread::sleep(Duration::from_millis(100));
            None
        }
    }
}

fn peer(stream: &UnixStream) -> u32 {
    socket_peercred(stream).map_or(0, |peer| peer.pid.as_raw_nonzero().get().unsigned_abs())
}

/// Waits until at least one of the descriptors is readable or has hung up. Says which ones are.
fn ready<const N: usize>(fds: [BorrowedFd<'_>; N]) -> Result<[bool; N], Failed> {
    let mut polls = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    match poll(&mut polls, None) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(errno) => return Err(Failed::Io(errno.into())),
    }
    Ok(polls.map(|poll| !poll.revents().is_empty()))
}

/// The interface through which the session controls the workers.
struct Workers<'a>(&'a Shared);

impl Queues for Workers<'_> {
    fn start(&mut self, start: Start) -> Result<(), String> {
        self.0.take_images(PATIENCE)?;
        self.0.worker_of(start.index).send(Order::Start(Box::new(start)));
        Ok(())
    }

    fn stop(&mut self, index: u16, suspend: bool) -> Result<u32, String> {
        self.0.worker_of(index).stop(index, suspend)
    }

    fn vm_left(&mut self) {
        self.0.ownership.vm_stopped(|disk| self.0.sync(disk));
    }

    fn vm_stayed(&mut self) {
        if let Err(error) = self.0.take_images(Duration::ZERO) {
            warn!("the VM runs here, and has lost an image meanwhile: {error}");
        }
    }

    fn sync(&mut self) -> Result<(), String> {
        (0..self.0.disks.len()).try_for_each(|disk| self.0.sync(disk))
    }

    fn set_call(&mut self, index: u16, call: Option<Arc<OwnedFd>>) {
        self.0.worker_of(index).send(Order::Call { index, call });
    }
}

impl Shared {
    fn worker_of(&self, queue: u16) -> &Handle {
        // There is at least one worker; the check of the configuration makes sure of that.
        &self.workers[usize::from(queue) % self.workers.len()]
    }

    /// Locks the images before a queue is served. Waits up to `patience` for another process to release them.
    fn take_images(&self, patience: Duration) -> Result<(), String> {
        for index in self.ownership.take(patience).map_err(|e| e.to_string())? {
            // The process that had the image before may have changed its size.
            if self.config.disks[index].size.is_none() {
                self.take_size(index, self.backends[index].resize(None, self.disks[index].bytes())?);
            }
        }
        Ok(())
    }

    /// Makes all acknowledged writes of a disk durable. Blocks for as long as the disk takes.
    fn sync(&self, number: usize) -> Result<(), String> {
        let disk = &self.disks[number];
        let done = match self.backends[number].sync() {
            Ok(()) if disk.has_lost() => Err(Failure::LostEarlier),
            other => other,
        };
        if let Err(Failure::Lost(_)) = done {
            disk.lose();
            let one = &self.backends[number];
            let others = self.disks.iter().zip(&self.backends).filter(|(_, other)| one.shares_cache(other));
            others.for_each(|(disk, _)| disk.lose());
        }
        done.map_err(|error| format!("disk {number}: its cache cannot be flushed: {error}"))
    }

    fn front_end_info(&self) -> MutexGuard<'_, FrontEndInfo> {
        self.front_end_info.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn front_end_connected(&self, pid: u32) {
        let mut front_end_info = self.front_end_info();
        front_end_info.front_end = Some((pid, Instant::now()));
        front_end_info.sessions += 1;
    }

    fn front_end_disconnected(&self) {
        let mut front_end_info = self.front_end_info();
        *front_end_info = FrontEndInfo {
            sessions: front_end_info.sessions,
            sandbox: std::mem::take(&mut front_end_info.sandbox),
            ..FrontEndInfo::default()
        };
    }

    fn note(&self, session: &Session) {
        let mut front_end_info = self.front_end_info();
        (front_end_info.features, front_end_info.protocol) =
            (session.features(), session.protocol_features());
        front_end_info.rings = session.rings().collect();
    }

    /// Returns the disks whose new size the front end does not know, and resets their flags.
    fn take_resized(&self) -> Vec<usize> {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        let taken = self.resized.iter().enumerate().filter(|(_, flag)| flag.swap(false, Ordering::AcqRel));
        taken.map(|(disk, _)| disk).collect()
    }
}
