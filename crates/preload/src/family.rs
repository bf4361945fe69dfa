//! Sockets that several processes have, after `fork`.
//!
//! Each of them has copies of the cursors of a ring, so only one may go on with it. That is whoever uses that direction of the socket
//! first after the fork: it claims it in memory that all of them share. One process may receive and another one send. The others are
//! told that the connection is broken (ECONNRESET), which is better than to mix up its bytes. None of them ends the ring when it closes
//! the socket, because another one may go on; the kernel tells the peer when the last one has closed it.
//!
//! Wake bytes are for whoever receives. A process that only sends leaves them alone, and looks for room by the clock.
#![allow(unsafe_code)] // Memory that is shared over fork.

use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};

use crate::socket::Socket;
use crate::table::SOCKETS;

/// Sockets that can be claimed. After that many, a socket is its parent's.
const CLAIMS: usize = 1 << 20;
const LEN: usize = (1 + CLAIMS * WAYS) * size_of::<AtomicI32>();

/// A direction of a socket.
#[derive(Clone, Copy, Debug)]
pub enum Way {
    Sending,
    Receiving,
}

const WAYS: usize = 2;

/// The process that goes on with each direction; 0: whoever uses it first.
static CLAIMED: AtomicPtr<AtomicI32> = AtomicPtr::new(std::ptr::null_mut());

/// No fork has happened while the socket had rings.
pub const ALONE: u32 = 0;

/// Makes the shared memory. Runs when the library is loaded.
pub fn load() {
    // SAFETY: new memory, which nothing else is in.
    let memory = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            LEN,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if memory != libc::MAP_FAILED {
        CLAIMED.store(memory.cast(), Ordering::Release);
    }
}

/// The word of a direction of a socket that was assigned a number, from 1.
fn claim(number: u32, way: Way) -> Option<&'static AtomicI32> {
    let i = number as usize - 1;
    (i < CLAIMS).then(|| word(1 + i * WAYS + way as usize)).flatten()
}

/// A number that no socket of any of these processes has.
fn fresh_number() -> u32 {
    word(0).map_or(u32::MAX, |used| used.fetch_add(1, Ordering::Relaxed).saturating_add(1) as u32)
}

/// A word of the shared memory: the first counts the numbers, the others are claims.
fn word(i: usize) -> Option<&'static AtomicI32> {
    let words = CLAIMED.load(Ordering::Acquire);
    // SAFETY: memory of so many words, for as long as the process runs.
    (!words.is_null() && i < LEN / size_of::<AtomicI32>()).then(|| unsafe { &*words.add(i) })
}

fn process() -> i32 {
    // SAFETY: it cannot fail.
    unsafe { libc::getpid() }
}

/// `fork` is about to be called: sockets with rings are everybody's until one claims them. Takes no lock.
///
/// Those that the kernel carries change over only in a process that has both sent and received since then, because another one may be
/// who does what this one does not (`change`).
pub fn before_fork() {
    for fd in SOCKETS.used(0, u32::MAX) {
        let Some(socket) = SOCKETS.get(fd) else { continue };
        socket.sending.forks();
        socket.receiving.forks();
        if !socket.is_joined() {
            continue;
        }
        match socket.claim.load(Ordering::Relaxed) {
            ALONE => {
                socket.claim.store(fresh_number(), Ordering::Relaxed);
            }
            number => {
                for claim in [Way::Sending, Way::Receiving].into_iter().filter_map(|way| claim(number, way)) {
                    let _ = claim.compare_exchange(process(), 0, Ordering::AcqRel, Ordering::Relaxed);
                }
            }
        }
    }
}

/// Whether this process may go on with the ring of a direction. Claims it if nobody has.
#[inline]
pub fn may_use(socket: &Socket, way: Way) -> bool {
    match socket.claim.load(Ordering::Relaxed) {
        ALONE => true,
        number => claims(number, way),
    }
}

/// Whether this process may take away the wake bytes that come: not if another one receives.
#[inline]
pub fn may_drain(socket: &Socket) -> bool {
    match socket.claim.load(Ordering::Relaxed) {
        ALONE => true,
        number => matches!(receiver(number), Some(owner) if owner == 0 || owner == process()),
    }
}

/// Whether no other process can take them away, so that one who waits for room is woken for certain.
#[inline]
pub fn is_woken(socket: &Socket) -> bool {
    match socket.claim.load(Ordering::Relaxed) {
        ALONE => true,
        number => receiver(number) == Some(process()),
    }
}

/// Who receives.
#[cold]
fn receiver(number: u32) -> Option<i32> {
    claim(number, Way::Receiving).map(|claim| claim.load(Ordering::Acquire))
}

#[cold]
fn claims(number: u32, way: Way) -> bool {
    let Some(claim) = claim(number, way) else { return false };
    let me = process();
    match claim.compare_exchange(0, me, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => true,
        Err(owner) => owner == me,
    }
}
