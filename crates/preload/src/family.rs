//! Sockets that several processes have, after `fork`.
//!
//! Each of them has copies of the cursors of a ring, so only one may go on with it. That is whoever uses the socket first after the
//! fork: it claims it in memory that all of them share. The others are told that the connection is broken (ECONNRESET), which is better
//! than to mix up its bytes. None of them ends the ring when it closes the socket, because another one may go on; the kernel tells the peer
//! when the last one has closed it.
#![allow(unsafe_code)] // Memory that is shared over fork.

use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, Ordering};

use crate::socket::Socket;
use crate::table::SOCKETS;

/// Sockets that can be claimed. After that many, a socket is its parent's.
const CLAIMS: usize = 16 << 10;
const LEN: usize = CLAIMS * size_of::<AtomicI32>();

/// The process that goes on with each; 0: whoever uses it first.
static CLAIMED: AtomicPtr<AtomicI32> = AtomicPtr::new(std::ptr::null_mut());
static USED: AtomicU32 = AtomicU32::new(0);

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

/// The word of a socket that was assigned a number, from 1.
fn claim(number: u32) -> Option<&'static AtomicI32> {
    let claims = CLAIMED.load(Ordering::Acquire);
    let i = number as usize - 1;
    // SAFETY: memory of so many words, for as long as the process runs.
    (!claims.is_null() && i < CLAIMS).then(|| unsafe { &*claims.add(i) })
}

fn process() -> i32 {
    // SAFETY: it cannot fail.
    unsafe { libc::getpid() }
}

/// `fork` is about to be called: sockets with rings are everybody's until one claims them. Takes no lock.
pub fn before_fork() {
    for fd in SOCKETS.used(0, u32::MAX) {
        let Some(socket) = SOCKETS.get(fd).filter(|socket| socket.is_joined()) else { continue };
        match socket.claim.load(Ordering::Relaxed) {
            ALONE => {
                let number = USED.fetch_add(1, Ordering::Relaxed).saturating_add(1);
                socket.claim.store(number, Ordering::Relaxed);
            }
            number => {
                if let Some(claim) = claim(number) {
                    let _ = claim.compare_exchange(process(), 0, Ordering::AcqRel, Ordering::Relaxed);
                }
            }
        }
    }
}

/// Whether this process may go on with the rings of a socket. Claims them if nobody has.
#[inline]
pub fn may_use(socket: &Socket) -> bool {
    match socket.claim.load(Ordering::Relaxed) {
        ALONE => true,
        number => claims(number),
    }
}

#[cold]
fn claims(number: u32) -> bool {
    let Some(claim) = claim(number) else { return false };
    let me = process();
    match claim.compare_exchange(0, me, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => true,
        Err(owner) => owner == me,
    }
}
