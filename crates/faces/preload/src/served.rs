//! The program's calls on connections to caches ([`crate::cache`]): they are served from memory as far as possible.
//!
//! ```text
//! begin        decides with the first request whether a connection is served
//! ask          asks the server whether it is a cache
//! transfer     sends and receives
//! waiting      implements poll and select for them, and for connections without rings
//! giving_back  puts answers into the connection that another process is to receive
//! ```

mod ask;
pub mod begin;
pub mod giving_back;
pub mod transfer;
pub mod waiting;

use crate::cache::State;
use crate::state::socket::Socket;
use crate::state::sockets::SOCKETS;
use smallvec::SmallVec;
use std::sync::atomic::Ordering;

/// The pieces that a call sends. None of them is empty.
pub type Pieces<'a> = SmallVec<[&'a [u8]; 8]>;
/// The pieces of memory into which a call receives.
pub type Rooms<'a> = SmallVec<[&'a mut [u8]; 8]>;

/// The maximum total length of a call's pieces, in bytes, for which the library joins them. Some clients send one request in
/// several pieces. No more of a call is looked at to find out which protocol it is.
const TOGETHER: usize = 4096;

/// Marks that a thread sleeps in the kernel until something comes on a connection. Meanwhile, all gets go to the server, because
/// an answer of the library would not wake this thread.
pub struct Asleep(&'static Socket);

impl Asleep {
    /// Marks the calling thread as asleep. Returns `None` if an answer is queued, so that the thread need not sleep.
    pub fn begin(socket: &'static Socket) -> Option<Self> {
        let _filter = socket.cache.filter.lock();
        (!socket.cache.has_answers()).then(|| Self::anyway(socket))
    }

    /// Marks the calling thread as asleep, whether or not an answer is queued.
    pub fn anyway(socket: &'static Socket) -> Self {
        // ORDER preload.asking: see `Cache::is_fresh`.
        socket.cache.asleep.fetch_add(1, Ordering::SeqCst);
        Self(socket)
    }
}

impl Drop for Asleep {
    fn drop(&mut self) {
        // If another socket uses this memory by now, its count has begun at zero again.
        let count = |n: u32| n.checked_sub(1);
        let _ = self.0.cache.asleep.fetch_update(Ordering::Relaxed, Ordering::Relaxed, count);
    }
}

/// Prepares the child of a fork. The parent goes on answering gets, and the child does not. Answers that were not given back before the
/// fork are the parent's.
pub fn in_child() {
    for fd in SOCKETS.used(0, u32::MAX) {
        let Some(socket) = SOCKETS.get(fd).filter(|socket| socket.cache.is_there()) else { continue };
        socket.cache.filter.free_in_child();
        socket.cache.name.free_in_child();
        socket.cache.reason.free_in_child();
        socket.cache.asleep.store(0, Ordering::Relaxed);
        match socket.cache.state() {
            State::Fresh => {}
            _ => {
                socket.cache.set(State::None);
                socket.cache.queued.store(0, Ordering::Relaxed);
            }
        }
    }
    crate::cache::find::in_child();
    crate::cache::others::in_child();
}
