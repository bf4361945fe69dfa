//! Caches: gets of a memcached client are answered in its own process, out of the memory in which `ginnel-cache` keeps its items.
//!
//! A connection to a port of caches begins as any other. With its first request, the server is asked whether it is a `ginnel-cache`, and which
//! (`begin`). If this process can read that cache's memory (`find`), the connection is *served* from then on: the library follows the requests that the
//! program sends, and answers those that only ask for items (`serve`), if nothing that was sent before is still unanswered. All else goes to the
//! server, in order, and by what comes back the library knows when all of that has been answered. What it has answered itself is
//! queued in front of what comes from the server, because nothing came from there when it was answered.
//!
//! Bytes that make no sense end that: the connection is *left* to the server, once what is queued has been received. So does everything that moves
//! bytes past this library, or has another process send or receive them.
//!
//! A get that cannot be answered here goes to the server as it would anyway. So whatever is complicated does that: a thread that sleeps already
//! until something comes on the connection would have to be woken, for instance.
//!
//! A served connection stays on TCP.
//!
//! ```text
//! begin    asking the server
//! find     from the cache's name to its memory
//! filter   what a served connection sends and receives
//! serve    one request, answered out of memory
//! queue    what the program has not received yet
//! waiting  poll and select
//! hits     what the server is told of what was found
//! ```

mod begin;
mod filter;
mod find;
mod hits;
mod queue;
mod serve;
#[cfg(test)]
mod tests;
mod waiting;

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use smallvec::SmallVec;

use crate::kernel;
use crate::lock::Lock;
use crate::socket::Socket;
use crate::table::SOCKETS;

#[cfg(not(test))]
pub use begin::connected;
pub use filter::{leave, receive, receive_further, send};
pub use waiting::{concerns, poll, readiness};

use filter::Filter;

/// Pieces that a call sends, none of which is empty.
pub type Pieces<'a> = SmallVec<[&'a [u8]; 8]>;
/// Pieces into which a call receives.
pub type Rooms<'a> = SmallVec<[&'a mut [u8]; 8]>;

/// How a socket stands to caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum State {
    /// It has nothing to do with them.
    None,
    /// It is connected to where there may be one, and nothing has been sent.
    Fresh,
    /// A thread asks the server.
    Asking,
    /// The server was asked, and has not answered in time. Its answer is not for the program.
    Late,
    /// Gets are answered here.
    Served,
    /// They were. The program has not received all of it.
    Left,
}

/// What a socket knows of caches.
pub struct Cache {
    state: AtomicU8,
    /// Bytes of answers that the program has not received. Written with the filter's lock held.
    queued: AtomicUsize,
    /// Threads that sleep in the kernel until something comes, or are about to. Raised with the filter's lock held.
    asleep: AtomicU32,
    /// Calls that have not looked at the kernel's socket, and when the last one has, in ticks of the kernel's clock.
    looks: AtomicU32,
    looked: AtomicU64,
    /// Which server it is connected to: a hash of its address.
    server: AtomicU64,
    /// Gets that were answered here, and such that were passed on.
    pub answered: AtomicU64,
    pub passed: AtomicU64,
    /// Which cache it is.
    pub name: Lock<&'static str>,
    filter: Lock<Option<Box<Filter>>>,
}

/// So many calls are made between two looks at the kernel's socket, which may have ended, if they follow each other closely: another server may be
/// there meanwhile, which has other items.
const CALLS: u32 = 64;

impl Cache {
    pub const fn new() -> Self {
        Self {
            state: AtomicU8::new(State::None as u8),
            queued: AtomicUsize::new(0),
            asleep: AtomicU32::new(0),
            looks: AtomicU32::new(0),
            looked: AtomicU64::new(0),
            server: AtomicU64::new(0),
            answered: AtomicU64::new(0),
            passed: AtomicU64::new(0),
            name: Lock::new(""),
            filter: Lock::new(None),
        }
    }

    /// As new.
    pub fn reset(&self) {
        self.set(State::None);
        self.queued.store(0, Ordering::Relaxed);
        drop(self.filter.lock().take());
        for count in [&self.answered, &self.passed, &self.server] {
            count.store(0, Ordering::Relaxed);
        }
        self.asleep.store(0, Ordering::Relaxed);
        *self.name.lock() = "";
    }

    /// The connection is over.
    pub fn end(&self) {
        if self.is_there() {
            self.set(State::None);
            let mut filter = self.filter.lock();
            self.queued.store(0, Ordering::Relaxed);
            // A handler may have interrupted the call that works with it.
            if !filter.as_ref().is_some_and(|filter| filter.is_busy()) {
                drop(filter.take());
            }
        }
    }

    /// Whether calls that send, receive or wait have to look here. All other sockets look no further.
    #[inline]
    pub fn is_there(&self) -> bool {
        self.state.load(Ordering::Relaxed) != State::None as u8
    }

    fn state(&self) -> State {
        // ORDER preload.cache: what was made for it before. Pairs with: `Cache::set`.
        match self.state.load(Ordering::Acquire) {
            0 => State::None,
            1 => State::Fresh,
            2 => State::Asking,
            3 => State::Late,
            4 => State::Served,
            _ => State::Left,
        }
    }

    fn set(&self, state: State) {
        // ORDER preload.cache: what a thread that sees it uses. Pairs with: `Cache::state`.
        self.state.store(state as u8, Ordering::Release);
    }

    /// Goes from one state to another. False if it was not in that one.
    fn change(&self, from: State, to: State) -> bool {
        // ORDER preload.asking: see `Cache::is_fresh`.
        self.state.compare_exchange(from as u8, to as u8, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    /// Whether nobody asks the server who has not seen this thread sleep.
    fn is_fresh(&self) -> bool {
        // ORDER preload.asking: either a thread that is about to receive sees that the server is asked, or whoever asks it sees that thread, because
        // both write before they read and all four are sequentially consistent. Pairs with: `Cache::is_asleep`.
        self.state.load(Ordering::SeqCst) == State::Fresh as u8
    }

    /// Whether a thread sleeps, or is about to, that would get what the server is asked now.
    fn is_asleep(&self) -> bool {
        // ORDER preload.asking: see `Cache::is_fresh`.
        self.asleep.load(Ordering::SeqCst) != 0
    }

    /// Bytes that can be received before those that the kernel has.
    #[inline]
    pub fn queued(&self) -> usize {
        self.queued.load(Ordering::Acquire)
    }

    /// Whether there are some.
    #[inline]
    pub fn has_answers(&self) -> bool {
        self.queued() > 0
    }

    /// Whether it is time to look at the kernel's socket.
    fn is_look_due(&self) -> bool {
        let tick = kernel::tick();
        let is_later = self.looked.load(Ordering::Relaxed) != tick;
        if is_later {
            self.looked.store(tick, Ordering::Relaxed);
        }
        self.looks.fetch_add(1, Ordering::Relaxed) % CALLS == CALLS - 1 || is_later
    }
}

/// A thread that sleeps in the kernel until something comes on a connection. Gets are passed on meanwhile, as nobody would wake it.
pub struct Asleep(&'static Socket);

impl Asleep {
    /// `None` if something has been queued.
    pub fn begin(socket: &'static Socket) -> Option<Self> {
        let _filter = socket.cache.filter.lock();
        (!socket.cache.has_answers()).then(|| Self::anyway(socket))
    }

    fn anyway(socket: &'static Socket) -> Self {
        // ORDER preload.asking: see `Cache::is_fresh`.
        socket.cache.asleep.fetch_add(1, Ordering::SeqCst);
        Self(socket)
    }
}

impl Drop for Asleep {
    fn drop(&mut self) {
        // A socket whose memory is another's meanwhile has begun to count anew.
        let count = |n: u32| n.checked_sub(1);
        let _ = self.0.cache.asleep.fetch_update(Ordering::Relaxed, Ordering::Relaxed, count);
    }
}

/// In the child of a fork: its parent goes on answering. What has been queued is here too, for the one of them that receives it.
pub fn in_child() {
    for fd in SOCKETS.used(0, u32::MAX) {
        let Some(socket) = SOCKETS.get(fd).filter(|socket| socket.cache.is_there()) else { continue };
        socket.cache.filter.free_in_child();
        socket.cache.name.free_in_child();
        socket.cache.asleep.store(0, Ordering::Relaxed);
        match socket.cache.state() {
            // Nothing has been asked, or its answer is still to be taken out.
            State::Fresh | State::Late => {}
            _ if socket.cache.has_answers() => socket.cache.set(State::Left),
            _ => socket.cache.set(State::None),
        }
    }
    find::in_child();
}
