//! Sockets that several processes share after `fork`.
//!
//! Each process may send and receive on such a socket, as over TCP. Shared memory holds what a process needs to
//! continue where another one stopped: the position in each ring ([`Common`]) and the processes that have the socket
//! ([`Entry`]). Before a process uses a ring of such a socket, it takes the lock in that memory and continues at that
//! position. Before it releases the lock, it records how far it has come.
//!
//! While several processes have a socket, it does not change over, and its rings do not grow. A sender whose ring has no room returns
//! to the kernel, as it does alone: it keeps its relatives' wake bytes out of the kernel ([`Common::begin_change`]), and they learn of
//! the return when they take the lock. A process finds that it is the only one left when the others have
//! closed the socket, have executed another program, or have ended. From then on the socket behaves as if there had
//! been no fork.
//!
//! A wake byte wakes all processes that sleep for the socket (`waiting::sleep`). A process that closes the socket does not
//! end a ring; the kernel tells the peer when the last process has closed it.
//!
//! What can go wrong:
//!
//! | | |
//! |---|---|
//! | a process is killed in a call | the others continue where the call began; if the call had moved the ring further, they get ECONNRESET, or EPIPE |
//! | a process takes TCP's bytes for wake bytes, because the peer returns to TCP | only that process has them: the others get ECONNRESET |
//! | a process disconnects the socket (`disconnecting`) | the others leave it to the kernel from then on |
//! | there are too many such sockets, or processes that have one | the child gets ECONNRESET; the socket stays as it is |
//! | a relative writes wrong values there | it breaks its relatives' connections, and nothing else: a position is checked as a peer's words are |
#![allow(unsafe_code)] // Memory that is shared over fork.

use crate::process::ids;
use crate::process::ids::{IS_ABROAD, PROCESS};
use crate::process::lock::Lock;
use crate::state::common::{ALONE, Common};
use crate::state::socket::{Socket, Stage};
use crate::state::sockets::{SOCKETS, Using};
use crate::state::taken;
use crate::system::confined::is_confined;
use crate::system::kernel;
use libc::c_int;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, Ordering, fence};

/// The socket's number if there was no free entry: only this process continues with it.
const NONE_FREE: u32 = u32::MAX;

/// The most sockets that processes can share. Their numbers are indices that begin at 1.
const ENTRIES: usize = 1 << 16;
/// The most processes that can share a socket.
const HOLDERS: usize = 14;
/// The holder that stands for a child that `fork` is about to make.
const UNBORN: i32 = -1;

/// A socket that several processes share.
#[repr(C, align(64))]
struct Entry {
    sending: Common,
    receiving: Common,
    /// What `Socket::delays` is for a socket of one process.
    delays: [AtomicBool; 2],
    /// Counts how often the entry was taken and freed. It is even while the entry is free.
    life: AtomicU32,
    /// More processes than [`HOLDERS`] have had the socket.
    has_more: AtomicBool,
    /// The processes that have the socket; 0 is a free slot.
    holders: [AtomicI32; HOLDERS],
}

static MEMORY: AtomicPtr<Entry> = AtomicPtr::new(std::ptr::null_mut());

/// Makes the shared memory. Runs when the library is loaded.
pub fn load() {
    // SAFETY: new memory, which nothing else is in.
    let memory = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            ENTRIES * size_of::<Entry>(),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if memory != libc::MAP_FAILED {
        MEMORY.store(memory.cast(), Ordering::Release);
    }
}

/// Returns the entry of a number.
fn entry(number: u32) -> Option<&'static Entry> {
    let entries = MEMORY.load(Ordering::Acquire);
    let i = (number as usize).checked_sub(1).filter(|i| *i < ENTRIES && !entries.is_null())?;
    // SAFETY: memory of so many entries, for as long as the process runs; all of it is atomics, for which zeros are valid.
    Some(unsafe { &*entries.add(i) })
}

impl Entry {
    /// Adds a process that has the socket.
    fn add(&self, holder: i32) {
        if self.holders.iter().any(|word| word.load(Ordering::Acquire) == holder && holder != UNBORN) {
            return;
        }
        let is_added = holder != UNBORN && self.replace(UNBORN, holder) || self.replace(0, holder);
        if !is_added {
            self.has_more.store(true, Ordering::Relaxed);
        }
    }

    /// Replaces the placeholder of an unborn child by the child's number.
    fn name(&self, child: i32) {
        let is_known = self.holders.iter().any(|word| word.load(Ordering::Acquire) == child);
        if !is_known {
            self.replace(UNBORN, child);
        }
    }

    /// Removes the placeholder: no child was made.
    fn unname(&self) {
        self.replace(UNBORN, 0);
    }

    fn replace(&self, from: i32, to: i32) -> bool {
        self.holders
            .iter()
            .any(|word| word.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok())
    }

    /// Removes a process that no longer has the socket. The last one frees the entry.
    fn remove(&self, holder: i32) {
        let life = self.life.load(Ordering::Acquire);
        for word in &self.holders {
            let _ = word.compare_exchange(holder, 0, Ordering::AcqRel, Ordering::Relaxed);
        }
        if life % 2 == 1 && self.holders.iter().all(|word| word.load(Ordering::Acquire) == 0) {
            // Two processes may both find that they were the last, and one may act only after the entry has been
            // taken again. So the exchange expects the old count.
            let _ =
                self.life.compare_exchange(life, life.wrapping_add(1), Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// Takes the entry if it is free.
    fn take(&self) -> bool {
        let life = self.life.load(Ordering::Acquire);
        if life % 2 == 1 {
            return false;
        }
        self.life.compare_exchange(life, life.wrapping_add(1), Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Removes processes that have ended. Returns true if only this process is left.
    fn is_left_to(&self, me: i32, lives: fn(i32) -> bool) -> bool {
        for word in &self.holders {
            let holder = word.load(Ordering::Acquire);
            if holder > 0 && holder != me && !lives(holder) {
                let _ = word.compare_exchange(holder, 0, Ordering::AcqRel, Ordering::Relaxed);
            }
        }
        !self.has_more.load(Ordering::Relaxed)
            && self.holders.iter().all(|word| [0, me].contains(&word.load(Ordering::Acquire)))
    }
}

/// Takes a free entry for this process.
fn take_entry() -> Option<u32> {
    /// Where to begin the search for a free entry.
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let from = NEXT.load(Ordering::Relaxed) as usize;
    let numbers = || (0..ENTRIES).map(|i| ((from + i) % ENTRIES) as u32 + 1);
    let free = |number: &u32| entry(*number).is_some_and(Entry::take);
    let found = numbers().find(free).or_else(|| {
        // No entry is free, so free those whose processes were all killed.
        numbers().filter_map(entry).for_each(|entry| {
            if entry.life.load(Ordering::Acquire) % 2 == 1 && entry.is_left_to(0, ids::exists) {
                entry.remove(0);
            }
        });
        numbers().find(free)
    })?;
    NEXT.store(found, Ordering::Relaxed);
    let entry = entry(found)?;
    entry.has_more.store(false, Ordering::Relaxed);
    entry.add(ids::process());
    Some(found)
}

/// Iterates over all sockets of this process whose connection, or next connection, may change over, here or in a relative. Some appear more
/// than once.
fn sockets() -> impl Iterator<Item = &'static Socket> {
    let may_change = |socket: &&Socket| socket.stage() != Stage::Stays || socket.may_be_shared();
    SOCKETS.used(0, u32::MAX).filter_map(|fd| SOCKETS.get(fd)).filter(may_change)
}

/// Held while a socket begins or ends to be shared. Otherwise a thread could find that only this process has a socket, and stop sharing it,
/// while another thread is about to fork. It is taken before the locks of the directions.
static SHARING: Lock<()> = Lock::new(());

/// Counts forks. It is odd in a child.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Prepares for `fork`: from now on the child counts as a holder of the sockets. This function allocates
/// nothing, because an allocator may already have prepared itself for the fork.
pub fn before_fork() {
    let _sharing = SHARING.lock();
    let fork = FORKS.fetch_add(2, Ordering::Relaxed) + 2;
    for socket in sockets().filter(|socket| socket.fork.swap(fork, Ordering::Relaxed) != fork) {
        if socket.family.load(Ordering::Relaxed) == ALONE {
            share(socket);
        }
        if let Some(entry) = entry(socket.family.load(Ordering::Relaxed)) {
            entry.add(UNBORN);
        }
    }
}

/// Records that another process has the socket too, which no fork has made: a child of `vfork`, or of `posix_spawn`. If its number
/// is not known yet (`None`), [`named`] follows.
pub fn also_has(socket: &Socket, process: Option<i32>) {
    let _sharing = SHARING.lock();
    if socket.family.load(Ordering::Relaxed) == ALONE {
        share(socket);
    }
    if let Some(entry) = entry(socket.family.load(Ordering::Relaxed)) {
        entry.add(process.unwrap_or(UNBORN));
    }
}

/// Records the number of that process, or that there is none.
pub fn named(socket: &Socket, process: Option<i32>) {
    if let Some(entry) = entry(socket.family.load(Ordering::Relaxed)) {
        match process {
            Some(process) => entry.name(process),
            None => entry.unname(),
        }
    }
}

fn share(socket: &Socket) {
    socket.may_have_timeouts();
    let Some((number, entry)) = take_entry().and_then(|number| Some((number, entry(number)?))) else {
        return socket.family.store(NONE_FREE, Ordering::Relaxed);
    };
    copy(&socket.delays, &entry.delays);
    entry.sending.known.reset();
    entry.sending.known.learn(&socket.known);
    socket.family.store(number, Ordering::Relaxed);
    socket.sending.share(&entry.sending);
    socket.receiving.share(&entry.receiving);
    // ORDER preload.known: either the thread that notes a fact sees what is shared, or this thread sees the fact, because both write before
    // they read. Pairs with: `Socket::note`.
    fence(Ordering::SeqCst);
    entry.sending.known.learn(&socket.known);
    socket.asleep.share_keeper(&entry.receiving);
    socket.asleep.share_unaware(&entry.receiving);
}

fn copy(from: &[AtomicBool; 2], to: &[AtomicBool; 2]) {
    for (from, to) in from.iter().zip(to) {
        to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// Returns the values of `delays::DELAYS` that the program has set, in this process or a relative.
pub fn delays(socket: &'static Socket) -> &'static [AtomicBool; 2] {
    entry(socket.family.load(Ordering::Relaxed)).map_or(&socket.delays, |entry| &entry.delays)
}

/// Continues in the child of `fork`, which has one thread.
pub fn in_child() {
    SHARING.free_in_child();
    // SAFETY: it cannot fail.
    PROCESS.store(unsafe { libc::getpid() }, Ordering::Relaxed);
    // SAFETY: it cannot fail.
    if unsafe { libc::getppid() } == 0 {
        IS_ABROAD.store(true, Ordering::Relaxed);
    }
    let fork = FORKS.fetch_add(1, Ordering::Relaxed);
    for socket in sockets() {
        let before = socket.fork.swap(fork + 1, Ordering::Relaxed);
        match entry(socket.family.load(Ordering::Relaxed)) {
            _ if before == fork + 1 => {}
            Some(entry) if before == fork => entry.add(ids::process()),
            // Another thread connected the socket after the fork had begun, or there was no room to share it. If it
            // is on TCP, it stays there.
            _ => {
                socket.family.store(NONE_FREE, Ordering::Relaxed);
                socket.sending.lose();
                socket.receiving.lose();
            }
        }
    }
    FORKS.fetch_sub(1, Ordering::Relaxed);
}

/// Continues in the parent of `fork`, which has made this child, or none (`None`). The child may have been killed
/// before it could record that it has the sockets.
pub fn forked(child: Option<i32>) {
    sockets().for_each(|socket| named(socket, child));
}

/// Returns whether other processes may have the socket too. If no other process has it any more, the socket belongs
/// to this process alone from now on. The caller must not hold the locks of the directions.
#[inline]
pub fn is_shared(socket: &Socket) -> bool {
    socket.family.load(Ordering::Relaxed) != ALONE && is_still_shared(socket, ids::exists)
}

/// Does the same for a process that is about to close the socket. If all others are ending, or have ended and nobody has waited for them,
/// this process is the last.
pub fn is_shared_by_the_living(socket: &Socket) -> bool {
    socket.family.load(Ordering::Relaxed) != ALONE && is_still_shared(socket, ids::lives)
}

/// Checks from time to time whether other processes still have the socket. The caller must not hold the locks of the
/// directions.
#[inline]
pub fn attend(socket: &Socket) {
    // A few calls in a hundred are due. Each call counts a few times.
    let is_due = |common: &Common| common.version() % 512 < 8;
    if socket.sending.common().is_some_and(is_due) {
        is_still_shared(socket, ids::exists);
    }
}

#[cold]
fn is_still_shared(socket: &Socket, lives: fn(i32) -> bool) -> bool {
    let me = ids::process();
    let others_have = || match socket.family.load(Ordering::Relaxed) {
        ALONE => false,
        number => is_confined() || entry(number).is_none_or(|entry| !entry.is_left_to(me, lives)),
    };
    // What this process knows of a connection that a relative has made is of no use.
    if socket.sending.is_superseded() || socket.receiving.is_superseded() || others_have() {
        return true;
    }
    // No signal handler comes meanwhile. It could fork, and its child would not share a direction that has been detached already.
    let _sharing = SHARING.lock();
    // Another thread may have stopped sharing the socket meanwhile, and begun again.
    let number = socket.family.load(Ordering::Relaxed);
    if number == ALONE {
        return false;
    }
    let Some(entry) = entry(number).filter(|_| !others_have()) else { return true };
    // What relatives have changed belongs to this process alone from now on, and this process may not know it yet.
    socket.known.learn(&entry.sending.known);
    {
        let fd = socket.fd.load(Ordering::Relaxed);
        let rings = socket.receiving.lock();
        if let Some(_using) = Using::begin(socket, fd)
            && !taken::catch_up(socket, fd, &rings)
        {
            socket.receiving.lose();
        }
    }
    socket.set_nonblocking(None);
    socket.sending.detach();
    socket.receiving.detach();
    copy(&entry.delays, &socket.delays);
    socket.family.store(ALONE, Ordering::Relaxed);
    entry.remove(me);
    false
}

/// Records that this process closes the socket. Other processes may continue with it.
pub fn leave(socket: &Socket) {
    let _sharing = SHARING.lock();
    if let Some(entry) = entry(socket.family.load(Ordering::Relaxed)) {
        // A thread may still be in a call on it.
        socket.sending.detach();
        socket.receiving.detach();
        socket.family.store(ALONE, Ordering::Relaxed);
        entry.remove(ids::process());
    }
}

/// Prepares for the execution of another program. If `exec` fails, this process no longer has those of its sockets
/// that the kernel would have closed.
pub fn execute(fd: c_int, socket: &Socket) {
    let of_this = |fd: &c_int| SOCKETS.get(*fd).is_some_and(|other| std::ptr::eq(other, socket));
    let is_only_one = || socket.fds.load(Ordering::Relaxed) == 1;
    if socket.family.load(Ordering::Relaxed) != ALONE
        && kernel::closes_on_exec(fd)
        && (is_only_one() || SOCKETS.used(0, u32::MAX).filter(of_this).all(kernel::closes_on_exec))
        && is_still_shared(socket, ids::exists)
    {
        leave(socket);
        socket.sending.lose();
        socket.receiving.lose();
    }
}

/// Returns whether no other process has used the receiving direction since the fork, or since this one did.
#[inline]
pub fn may_drain(socket: &Socket) -> bool {
    socket.receiving.common().is_none_or(|common| [0, ids::process()].contains(&common.user()))
}

/// Returns whether another process that has the socket too has used it since the fork.
pub fn is_used_elsewhere(socket: &Socket) -> bool {
    !may_drain(socket) && is_shared(socket)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::carrier::Carrier;
    use crate::state::common::Position;
    use ginnel_ring::Cursor;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    /// Loads one memory for all tests of the process. Tests run in parallel, and a second memory would take away the
    /// entries of the first.
    fn loaded() {
        static ONCE: std::sync::Once = std::sync::Once::new();
        ONCE.call_once(load);
    }

    #[test]
    fn an_entry_is_free_when_nobody_has_its_socket() {
        loaded();
        let me = ids::process();
        let number = take_entry().unwrap();
        let entry = entry(number).unwrap();
        assert!(!entry.take() && entry.is_left_to(me, ids::exists));
        // One child has ended, and one was killed before it could record anything.
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let ended = child.id() as i32;
        child.wait().unwrap();
        entry.add(UNBORN);
        assert!(!entry.is_left_to(me, ids::exists));
        entry.name(ended);
        assert!(entry.is_left_to(me, ids::exists));
        // The parent of this process is alive.
        entry.add(UNBORN);
        // SAFETY: it cannot fail.
        let parent = unsafe { libc::getppid() };
        entry.add(parent);
        entry.name(parent);
        assert!(!entry.is_left_to(me, ids::exists));
        entry.remove(me);
        assert!(!entry.take());
        entry.remove(parent);
        assert!(entry.take());
        entry.remove(0);
    }

    #[test]
    fn more_processes_than_have_room_are_not_forgotten() {
        loaded();
        let number = take_entry().unwrap();
        let entry = entry(number).unwrap();
        for _ in 0..HOLDERS {
            entry.add(UNBORN);
        }
        entry.unname();
        for _ in 0..HOLDERS {
            entry.unname();
        }
        assert!(!entry.is_left_to(ids::process(), ids::exists));
        entry.remove(ids::process());
    }

    #[test]
    fn a_place_is_what_was_said_last() {
        loaded();
        let number = take_entry().unwrap();
        let common = &entry(number).unwrap().sending;
        common.begin(7);
        common.enter();
        let cursor = Cursor { position: 5, pending: 0, released: 3, token: 2, rung: 1 };
        let version = common.record(Position { carrier: Carrier::Ring, cursor, before: 9, steps: 4 });
        common.leave();
        let position = common.position().unwrap();
        assert_eq!((position.carrier, position.cursor), (Carrier::Ring, cursor));
        assert_eq!((position.before, position.steps), (9, 4));
        assert_eq!((common.version(), common.kernels.load(Ordering::Relaxed)), (version, 7));
        assert!(common.begin_change());
        assert!(common.position().is_none());
        leave_entry(number);
    }

    #[test]
    fn bytes_taken_for_wake_bytes_belong_to_all_relatives() {
        loaded();
        let socket: &'static Socket = Box::leak(Box::new(Socket::new()));
        assert!(socket.receiving.stash().push(b"abc"));
        // SAFETY: it cannot fail.
        also_has(socket, Some(unsafe { libc::getppid() }));
        let shared = &entry(socket.family.load(Ordering::Relaxed)).unwrap().receiving.stash;
        assert_eq!(
            (shared.len(), std::ptr::from_ref(shared)),
            (3, std::ptr::from_ref(socket.receiving.stash()))
        );
        shared.remove(1);
        assert!(shared.push(b"d"));
        leave(socket);
        let mut bytes = [0; 4];
        assert_eq!((socket.receiving.stash().show(0, &mut bytes), &bytes), (3, b"bcd\0"));
    }

    #[test]
    fn what_a_killed_relative_has_taken_is_counted_unless_it_was_the_programs() {
        loaded();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut stream = listener.accept().unwrap().0;
        let fd = stream.as_raw_fd();
        let socket: &'static Socket = Box::leak(Box::new(Socket::new()));
        socket.begin(fd);
        // SAFETY: it cannot fail.
        also_has(socket, Some(unsafe { libc::getppid() }));
        let mut take = |bytes: usize| stream.read_exact(&mut vec![0; bytes]).unwrap();
        peer.write_all(&[0; 9]).unwrap();
        take(2);
        assert!(taken::is_counted_until(socket, fd, 4));
        assert_eq!(socket.receiving.kernels(), 2);
        take(2);
        socket.receiving.count_wakes(1);
        assert!(taken::is_counted_until(socket, fd, 4));
        assert_eq!(socket.receiving.kernels(), 4);
        take(1);
        assert!(!taken::is_counted_until(socket, fd, 4));
        // A FIN is no byte.
        take(4);
        drop(peer);
        assert!(matches!(kernel::poll_now(fd, libc::POLLRDHUP), libc::POLLRDHUP));
        assert!(taken::is_counted_until(socket, fd, 20));
        assert_eq!(socket.receiving.kernels(), 9);
        // More has been counted than the kernel has given.
        socket.receiving.count_wakes(1);
        assert!(!taken::is_counted_until(socket, fd, 20));
        leave(socket);
    }

    fn leave_entry(number: u32) {
        entry(number).unwrap().remove(ids::process());
    }
}
