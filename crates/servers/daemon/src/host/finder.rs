//! **Finders**: processes that connect to the control sockets of QEMUs for the daemon, one at a time for each VM.
//!
//! Others may hold the lock of a folder on the way there, or have put a file system on it that does not answer. So nobody waits for a
//! finder: its end is an event. One that takes long is killed, and not waited for either, and another tries later. Each is a copy of the
//! daemon, so a QEMU or a guest that connects in a loop gets one every few seconds only.
//!
//! QEMU's user makes the socket, so he may put a symbolic link in its place, and the finder may connect where he may not. So it looks first
//! whose socket it has found. A finder is the daemon without `exec`, see `forked`.
#![allow(unsafe_code)] // A process without `exec`.

use crate::closer::{Closer, Connected};
use crate::forked::{Abandoned, Forked, Shared, name, part_from_daemon};
use crate::no_answer::no_answer;
use crate::pidwatch;
use crate::poller::{Interest, Poller};
use rustix::fs::{FileType, Mode, OFlags, fstat, open};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::geteuid;
use std::collections::{BTreeMap, VecDeque};
use std::ffi::{CStr, CString};
use std::io::{self, Cursor, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::time::{Duration, Instant};
use thiserror::Error;
use zerocopy::FromZeros;

/// How long a finder may take.
const PATIENCE: Duration = Duration::from_secs(2);
/// The shortest and the longest time between two finders of a VM. It doubles with each that follows soon upon the last. (A VM that is to be
/// stopped has more time than the longest.)
const PAUSES: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(4));
/// The finders with the same path that were killed and do not end, from which on no more are started for it.
const STUCK: usize = 4;
/// The finders that are started before others get their turn.
const TURN: usize = 4;
/// How long after its end a finder is still known, whose connection may wait to be accepted. Its number is not another's so soon.
const KNOWN: Duration = Duration::from_secs(10);

/// To whom a socket must belong, unless it is root's or the daemon's user's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// To this user.
    User(u32),
    /// To the user of this process.
    Process(u32),
}

/// The socket that a finder is to connect to.
#[derive(Clone, Debug)]
pub struct Sought {
    path: CString,
    owner: Owner,
}

impl Sought {
    /// Makes it of a path of the configuration, which may be that of a symbolic link to the socket.
    pub fn new(path: &Path, owner: Owner) -> io::Result<Self> {
        Ok(Self { path: CString::new(path.as_os_str().as_bytes())?, owner })
    }
}

/// Why there is no connection.
#[derive(Debug, Error)]
pub enum NotFound {
    /// The finder takes long, or so many of them do not end that no other is started. Another tries later.
    #[error("{}", no_answer("its folder"))]
    Held,
    /// There is no finder. Another is started later.
    #[error("no process can be started that connects to it: {0}")]
    NoFinder(io::Error),
    /// The socket is another user's.
    #[error("it belongs to user {0}, who is neither that of the VM's QEMU nor root")]
    Foreign(u32),
    /// Others wait for a turn there.
    #[error("another client is connected to it")]
    Busy,
    /// It cannot be connected to.
    #[error("{0}")]
    Failed(Errno),
}

impl NotFound {
    /// Returns whether another finder tries again without being asked for.
    pub fn is_tried_again(&self) -> bool {
        matches!(self, Self::Held | Self::NoFinder(_))
    }
}

/// All finders, and what is known of the VMs for which they look. `u32` is a member number.
#[derive(Debug)]
pub struct Finders {
    /// Makes a token for the poller from a number.
    token: fn(u64) -> u64,
    of_vm: BTreeMap<u32, Way>,
    /// Those that were killed.
    abandoned: Vec<(CString, Abandoned)>,
    /// The numbers of those that have ended, and since when.
    ended: VecDeque<(Instant, u32)>,
    found: Vec<(u32, Result<Connected, NotFound>)>,
    /// Never used again, so an event of a finder that was abandoned matches nothing.
    numbers: u64,
}

/// The way to a VM's socket.
#[derive(Debug)]
struct Way {
    /// What the next finder is to look for, if there is to be one.
    sought: Option<Sought>,
    present: Option<Search>,
    /// The earliest time at which the next one begins, and how long that is after the last one.
    next: Instant,
    pause: Duration,
    /// That there is no connection was said, and nobody has asked again.
    is_said: bool,
}

/// A finder at work.
#[derive(Debug)]
struct Search {
    number: u64,
    sought: Sought,
    socket: Connected,
    process: Forked,
    said: Shared<Said>,
    deadline: Instant,
}

/// What a finder says, in memory that it shares.
#[derive(Debug, FromZeros)]
#[repr(C)]
struct Said {
    outcome: AtomicI32,
    /// The user to whom the socket belongs.
    owner: AtomicU32,
}

/// The outcomes other than error numbers: it has connected, it was killed first, and the socket is another user's.
const CONNECTED: i32 = -1;
const KILLED: i32 = 0;
const FOREIGN: i32 = -2;

impl Finders {
    /// Starts without finders. `token` makes tokens for the poller.
    pub fn new(token: fn(u64) -> u64) -> Self {
        Self {
            token,
            of_vm: BTreeMap::new(),
            abandoned: Vec::new(),
            ended: VecDeque::new(),
            found: Vec::new(),
            numbers: 0,
        }
    }

    /// Asks for a connection to a VM's socket. [`Finders::take_found`] returns it, or why there is none.
    pub fn seek(&mut self, member: u32, sought: Sought) {
        let way = self.of_vm.entry(member).or_insert_with(Way::new);
        (way.sought, way.is_said) = (Some(sought), false);
    }

    /// A connection to a VM's socket is not wanted any more.
    pub fn forget(&mut self, poller: &Poller, member: u32) {
        let Some(way) = self.of_vm.get_mut(&member) else { return };
        way.sought = None;
        if let Some(search) = way.present.take() {
            self.abandoned.push(search.abandon(poller));
        }
        self.found.retain(|(of, _)| *of != member);
    }

    /// Returns what has been found since the last call, for which VM.
    pub fn take_found(&mut self) -> Vec<(u32, Result<Connected, NotFound>)> {
        std::mem::take(&mut self.found)
    }

    /// Returns whether this process is a finder, or was one a short time ago.
    pub fn has(&self, pid: u32) -> bool {
        let present = self.of_vm.values().filter_map(|way| way.present.as_ref());
        let running = present.map(|search| search.process.pid());
        let mut all = running.chain(self.abandoned.iter().map(|(_, finder)| finder.pid()));
        let is_known = |since: &Instant| since.elapsed() < KNOWN;
        all.any(|finder| number(finder) == pid)
            || self.ended.iter().any(|(since, finder)| *finder == pid && is_known(since))
    }

    /// Handles the end of the finder of this number.
    pub fn ready(&mut self, poller: &Poller, number: u64) {
        let is_it = |way: &Way| way.present.as_ref().is_some_and(|search| search.number == number);
        let Some((&member, way)) = self.of_vm.iter_mut().find(|(_, way)| is_it(way)) else { return };
        let Some(search) = way.present.take() else { return };
        poller.remove(search.process.ended());
        self.ended.push_back((Instant::now(), self::number(search.process.pid())));
        let sought = search.sought.clone();
        match search.outcome() {
            Ok(socket) => {
                way.sought = None;
                self.found.push((member, Ok(socket)));
            }
            // It may have looked before there was what somebody has asked for meanwhile.
            Err(_) if way.sought.is_some() => {}
            Err(error) if error.is_tried_again() => {
                way.sought = Some(sought);
                way.say(&mut self.found, member, error);
            }
            Err(error) => self.found.push((member, Err(error))),
        }
    }

    /// Gives up those that take too long, and starts those whose time it is.
    pub fn step(&mut self, poller: &Poller, closer: &Closer) {
        if self.of_vm.is_empty() {
            return; // This returns without reading the clock, which is slow in many VMs.
        }
        let now = Instant::now();
        let is_late = |way: &Way| way.present.as_ref().is_some_and(|search| search.deadline <= now);
        for (member, way) in self.of_vm.iter_mut().filter(|(_, way)| is_late(way)) {
            let Some(search) = way.present.take() else { continue };
            way.sought.get_or_insert_with(|| search.sought.clone());
            self.abandoned.push(search.abandon(poller));
            way.say(&mut self.found, *member, NotFound::Held);
        }
        if self.of_vm.values().any(|way| way.is_due(now)) {
            self.bury(now);
        }
        let due = self.of_vm.iter_mut().filter(|(_, way)| way.is_due(now));
        for (member, way) in due.take(TURN) {
            let Some(sought) = way.sought.take() else { continue };
            way.rest(now);
            let stuck = self.abandoned.iter().filter(|(path, _)| *path == sought.path).count();
            self.numbers += 1;
            let begun = match stuck < STUCK {
                true => {
                    let begun = Search::begin(&sought, poller, closer, self.numbers, self.token);
                    begun.map_err(|(error, unwatched)| {
                        self.abandoned.extend(unwatched.map(|finder| (sought.path.clone(), finder)));
                        NotFound::NoFinder(error)
                    })
                }
                false => Err(NotFound::Held),
            };
            match begun {
                Ok(search) => way.present = Some(search),
                Err(error) => {
                    way.sought = Some(sought);
                    way.say(&mut self.found, *member, error);
                }
            }
        }
        self.of_vm.retain(|_, way| way.sought.is_some() || way.present.is_some() || !way.has_rested(now));
    }

    /// Returns the time until [`Finders::step`] has something to do.
    pub fn until_next(&self) -> Option<Duration> {
        let next = |way: &Way| match &way.present {
            Some(search) => Some(search.deadline),
            None => way.sought.as_ref().map(|_| way.next),
        };
        Some(self.of_vm.values().filter_map(next).min()?.saturating_duration_since(Instant::now()))
    }

    /// Buries those that were killed and have ended, and forgets those that ended long ago.
    fn bury(&mut self, now: Instant) {
        let ended = self.abandoned.extract_if(.., |(_, finder)| finder.is_buried());
        self.ended.extend(ended.map(|(_, finder)| (now, number(finder.pid()))));
        self.ended.retain(|(since, _)| now.saturating_duration_since(*since) < KNOWN);
    }
}

impl Way {
    fn new() -> Self {
        let (next, pause) = (Instant::now(), Duration::ZERO);
        Self { sought: None, present: None, next, pause, is_said: false }
    }

    fn is_due(&self, now: Instant) -> bool {
        self.sought.is_some() && self.present.is_none() && self.next <= now
    }

    /// Returns whether it may begin anew with the shortest pause.
    fn has_rested(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.next) > self.pause
    }

    /// Notes that a finder begins now.
    fn rest(&mut self, now: Instant) {
        let (shortest, longest) = PAUSES;
        let doubled = if self.has_rested(now) { shortest } else { self.pause * 2 };
        self.pause = doubled.clamp(shortest, longest);
        self.next = now + self.pause;
    }

    /// Says once that there is no connection yet.
    fn say(&mut self, found: &mut Vec<(u32, Result<Connected, NotFound>)>, member: u32, error: NotFound) {
        if !std::mem::replace(&mut self.is_said, true) {
            found.push((member, Err(error)));
        }
    }
}

impl Search {
    /// Starts a finder. An error comes with one that was started but cannot be watched, and was killed.
    fn begin(
        sought: &Sought,
        poller: &Poller,
        closer: &Closer,
        number: u64,
        token: fn(u64) -> u64,
    ) -> Result<Self, (io::Error, Option<Abandoned>)> {
        let none = |error: io::Error| (error, None);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let socket = socket.map_err(|error| none(error.into()))?;
        let said = Shared::new().map_err(none)?;
        let process = start(&socket, sought, &said).map_err(none)?;
        let socket = Connected::new(socket, closer);
        if let Err(error) = poller.add(process.ended(), token(number), Interest::READ) {
            // It cannot have been held up yet, but nobody waits for that.
            return Err((error, Some(process.abandon())));
        }
        let deadline = Instant::now() + PATIENCE;
        Ok(Self { number, sought: sought.clone(), socket, process, said, deadline })
    }

    /// Returns what has come of it. It has ended, and its end was seen after all that it has done.
    fn outcome(self) -> Result<Connected, NotFound> {
        Err(match self.said.outcome.load(Ordering::Relaxed) {
            CONNECTED => return Ok(self.socket),
            KILLED => NotFound::NoFinder(io::Error::other("it was killed")),
            FOREIGN => NotFound::Foreign(self.said.owner.load(Ordering::Relaxed)),
            errno => match Errno::from_raw_os_error(errno) {
                Errno::AGAIN => NotFound::Busy,
                errno => NotFound::Failed(errno),
            },
        })
    }

    /// Kills it. The socket may be connected by now, and have something in its queue that nobody can close, which the closer does.
    fn abandon(self, poller: &Poller) -> (CString, Abandoned) {
        poller.remove(self.process.ended());
        (self.sought.path, self.process.abandon())
    }
}

fn number(pid: rustix::process::Pid) -> u32 {
    pid.as_raw_nonzero().get().unsigned_abs()
}

/// Starts a finder that connects this socket.
fn start(socket: &OwnedFd, sought: &Sought, said: &Shared<Said>) -> io::Result<Forked> {
    // SAFETY: `part_from_daemon`, `name` and `look` only make system calls, and the stores are to memory: no allocator, no lock and no log
    // is used.
    unsafe {
        Forked::start(|| {
            part_from_daemon(&[socket]);
            name(c"ginneld-finder");
            let outcome = look(socket, sought, &said.owner).unwrap_or_else(Errno::raw_os_error);
            said.outcome.store(outcome, Ordering::Relaxed);
        })
    }
}

/// Connects the socket, if the one that is found there is one of those it may be. By system calls only.
fn look(socket: &OwnedFd, sought: &Sought, owner: &AtomicU32) -> Result<i32, Errno> {
    let place = open(&*sought.path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let found = fstat(&place)?;
    if FileType::from_raw_mode(found.st_mode) != FileType::Socket {
        return Err(Errno::NOTSOCK);
    }
    let user = match sought.owner {
        Owner::User(user) => Some(user),
        Owner::Process(pid) => pidwatch::read_user_of(pid),
    };
    if found.st_uid != 0 && found.st_uid != geteuid().as_raw() && Some(found.st_uid) != user {
        owner.store(found.st_uid, Ordering::Relaxed);
        return Ok(FOREIGN);
    }
    // The path may lead elsewhere by now.
    let mut path = Cursor::new([0; 32]);
    write!(path, "/proc/self/fd/{}", place.as_raw_fd()).map_err(|_| Errno::INVAL)?;
    let path = path.into_inner();
    let path = CStr::from_bytes_until_nul(&path).map_err(|_| Errno::INVAL)?;
    connect(socket, &SocketAddrUnix::new(path)?)?;
    Ok(CONNECTED)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::at_hand::tests::link_not_at_hand;
    use crate::at_hand::{self};
    use kit::process::Process;
    use kit::wait::wait_for;
    use std::io::Read;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixListener;

    const VM: u32 = 7;

    /// What the daemon has for its finders.
    struct World {
        finders: Finders,
        poller: Poller,
        closer: Closer,
    }

    impl World {
        fn new() -> Self {
            let (poller, closer) = (Poller::new().unwrap(), Closer::start().unwrap());
            Self { finders: Finders::new(|number| number), poller, closer }
        }

        fn seek(&mut self, path: &Path) -> Result<Connected, NotFound> {
            self.seek_of(path, Owner::Process(std::process::id()))
        }

        fn seek_of(&mut self, path: &Path, owner: Owner) -> Result<Connected, NotFound> {
            self.finders.seek(VM, Sought::new(path, owner).unwrap());
            self.next()
        }

        /// Does what the daemon does until something is found.
        fn next(&mut self) -> Result<Connected, NotFound> {
            wait_for("what a finder has found", || {
                self.turn();
                self.finders.take_found().pop().map(|(member, found)| {
                    assert_eq!(member, VM);
                    found
                })
            })
        }

        fn turn(&mut self) {
            let mut ready = Vec::new();
            self.finders.step(&self.poller, &self.closer);
            self.poller.wait(&mut ready, 16, self.finders.until_next()).unwrap();
            ready.iter().for_each(|event| self.finders.ready(&self.poller, event.token));
        }

        /// Has finders for this path that do not end: processes that run stand for them.
        fn get_stuck(&mut self, path: &Path, count: usize) -> Vec<Process> {
            let path = CString::new(path.as_os_str().as_bytes()).unwrap();
            let sleeper = || Process(std::process::Command::new("sleep").arg("600").spawn().unwrap());
            let all: Vec<Process> = (0..count).map(|_| sleeper()).collect();
            let abandoned = all.iter().map(|child| Abandoned::of(rustix::process::Pid::from_child(child)));
            self.finders.abandoned.extend(abandoned.map(|finder| (path.clone(), finder)));
            all
        }
    }

    #[test]
    fn it_connects_through_a_link_that_is_not_at_hand() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let link = link_not_at_hand(dir.path());
        let place = link.join("socket");
        kit::require!(at_hand::look(&place, OFlags::PATH).unwrap().is_none(), "no times of access");
        let mut world = World::new();
        assert!(matches!(world.seek(&place), Err(NotFound::Failed(Errno::NOENT))));
        let listener = UnixListener::bind(&place).unwrap();
        let socket = world.seek(&place).unwrap();
        let mut peer = listener.accept().unwrap().0;
        // The daemon knows its own, for a time.
        let finder = crate::packet::peer(peer.as_fd()).unwrap().pid;
        assert!(world.finders.has(finder) && !world.finders.has(std::process::id()));
        std::io::Write::write_all(&mut peer, b"hello").unwrap();
        let mut said = [0; 5];
        assert_eq!(rustix::io::read(&socket, &mut said), Ok(5));
        // The finder has left nothing open.
        drop(socket);
        assert_eq!(peer.read(&mut said).unwrap(), 0);
        drop(listener);
        assert!(matches!(world.seek(&place), Err(NotFound::Failed(Errno::CONNREFUSED))));
        assert!(matches!(world.seek(dir.path()), Err(NotFound::Failed(Errno::NOTSOCK))));
        assert!(world.finders.abandoned.is_empty());
    }

    #[test]
    fn one_that_does_not_end_does_not_bar_the_way_and_several_do() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let (place, other) = (dir.path().join("socket"), dir.path().join("other"));
        let _listeners = [&place, &other].map(|path| UnixListener::bind(path).unwrap());
        let mut world = World::new();
        let mut stuck = world.get_stuck(&place, STUCK - 1);
        assert!(world.seek(&place).is_ok());
        stuck.extend(world.get_stuck(&place, 1));
        assert!(matches!(world.seek(&place), Err(NotFound::Held)));
        assert!(world.seek(&other).is_ok(), "another path");
        // Once one of them ends, it is tried again, without being asked for.
        assert!(matches!(world.seek(&place), Err(NotFound::Held)));
        stuck[0].kill().unwrap();
        assert!(world.next().is_ok());
    }

    #[test]
    fn one_that_takes_long_is_given_up_and_another_tries_again() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let place = dir.path().join("socket");
        let listener = UnixListener::bind(&place).unwrap();
        let mut world = World::new();
        world.finders.seek(VM, Sought::new(&place, Owner::User(0)).unwrap());
        world.finders.step(&world.poller, &world.closer);
        let search = world.finders.of_vm.get_mut(&VM).unwrap().present.as_mut().unwrap();
        let first = number(search.process.pid());
        search.deadline = Instant::now();
        world.finders.step(&world.poller, &world.closer);
        let found = world.finders.take_found();
        assert!(matches!(found[..], [(VM, Err(NotFound::Held))]), "{found:?}");
        assert!(world.next().is_ok());
        assert!(world.finders.has(first) && world.finders.ended.iter().any(|(_, finder)| *finder == first));
        drop(listener);
    }

    #[test]
    fn nobody_who_asks_often_gets_many() {
        let mut way = Way::new();
        let (shortest, longest) = PAUSES;
        let mut now = way.next;
        let mut begin = |rest: Duration| {
            now = now.max(way.next) + rest;
            way.rest(now);
            way.pause
        };
        let pauses: Vec<Duration> = (0..8).map(|_| begin(Duration::ZERO)).collect();
        assert_eq!(pauses[..3], [shortest, shortest * 2, shortest * 4]);
        assert_eq!(pauses[4..], [longest; 4]);
        assert_eq!(begin(longest), longest, "it has not rested");
        assert_eq!(begin(longest * 2), shortest);
    }

    #[test]
    fn what_is_not_wanted_any_more_is_not_found() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let (place, other) = (dir.path().join("socket"), dir.path().join("other"));
        let _listener = UnixListener::bind(&place).unwrap();
        let mut world = World::new();
        world.finders.seek(VM, Sought::new(&place, Owner::User(0)).unwrap());
        world.finders.step(&world.poller, &world.closer);
        world.finders.forget(&world.poller, VM);
        assert_eq!(world.finders.until_next(), None);
        assert!(matches!(world.seek(&other), Err(NotFound::Failed(Errno::NOENT))));
    }

    #[test]
    fn the_socket_of_another_user_is_not_connected_to() {
        let me = geteuid();
        kit::require!(me.is_root(), "only root has sockets of others");
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let (place, link) = (dir.path().join("socket"), dir.path().join("link"));
        let listener = UnixListener::bind(&place).unwrap();
        listener.set_nonblocking(true).unwrap();
        std::os::unix::fs::symlink("socket", &link).unwrap();
        std::os::unix::fs::chown(&place, Some(1234), None).unwrap();
        let mut world = World::new();
        for owner in [Owner::User(4321), Owner::Process(std::process::id()), Owner::Process(u32::MAX)] {
            assert!(matches!(world.seek_of(&link, owner), Err(NotFound::Foreign(1234))));
        }
        assert!(listener.accept().is_err());
        assert!(world.seek_of(&link, Owner::User(1234)).is_ok());
        // Root's may be that of a QEMU which has given up its rights.
        std::os::unix::fs::chown(&place, Some(0), None).unwrap();
        assert!(world.seek_of(&link, Owner::User(4321)).is_ok());
    }

    kit::program! {
        /// A daemon whose user may have no further process.
        fn crowded_daemon() {
            let mut world = World::new();
            kit::hold::become_user(65534);
            let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
            rustix::process::setrlimit(rustix::process::Resource::Nproc, none).unwrap();
            println!("{}", world.seek(Path::new("/nowhere")).unwrap_err());
        }
    }

    #[test]
    fn a_lack_of_processes_is_not_taken_for_another_client() {
        let crowded = kit::program::command(crowded_daemon).output().unwrap();
        let said = String::from_utf8(crowded.stdout).unwrap();
        assert!(said.contains("no process can be started"), "{said}");
    }
}
