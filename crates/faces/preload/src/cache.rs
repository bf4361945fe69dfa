//! Caches: the library answers gets of a memcached client in the client's own process, from the memory in which `ginnel-cache`
//! keeps its items.
//!
//! A connection to a port of caches begins like any other. Before its first request, the library asks the server whether it is a
//! `ginnel-cache`, and which one, over a connection of its own ([`crate::served`]). If this process can read that cache's memory (`find`),
//! the connection is *served* from then on: the library follows the requests that the program sends, and answers those that only ask for
//! items (`serve`), provided that the server has answered everything that was sent before. All other requests go to the server, in order.
//! The library follows the server's answers, so it knows when the server has answered all of them. The library queues its own answers in
//! front of what comes from the server. This order is correct, because nothing was to come from the server when the library answered.
//!
//! Bytes that make no sense end this: the connection is *left* to the server, once the program has received what is queued. The
//! same happens if bytes are moved without this library, or if another process sends or receives them. If another process is to receive
//! what is queued, the library first gives it back ([`crate::served::giving_back`]).
//!
//! A get that the library cannot answer goes to the server, as it would without the library. The library therefore treats every
//! complicated case in this way. An example is a thread that already sleeps until something comes on the connection, because the
//! library would have to wake it.
//!
//! A served connection stays on TCP.
//!
//! ```text
//! others   remembers servers that are not caches
//! find     finds the memory of a cache by its name
//! filter   what is under way on a served connection
//! serve    answers one request from the cache's memory
//! queue    holds answers that the program has not received yet
//! hits     the items that were found, of which the server is told
//! ```

pub mod filter;
pub mod find;
pub mod hits;
pub mod others;
pub mod queue;
pub mod serve;

use crate::process::lock::Lock;
use filter::Filter;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// The state of a socket with regard to caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    /// The socket has nothing to do with caches.
    None,
    /// The socket is connected to a port of caches, and nothing has been sent.
    Fresh,
    /// A thread is asking the server whether it is a cache.
    Asking,
    /// The library answers gets.
    Served,
    /// The library answered gets before, and the program has not received all of these answers.
    Left,
}

/// The part of a socket that concerns caches.
pub struct Cache {
    state: AtomicU8,
    /// The number of bytes of answers that the program has not received. Written with the filter's lock held.
    pub queued: AtomicUsize,
    /// The number of threads that sleep in the kernel until something comes, or are about to. Raised with the filter's lock held.
    pub asleep: AtomicU32,
    /// The number of calls of `is_look_due`. One in [`CALLS`] looks at the kernel's socket.
    looks: AtomicU32,
    /// The value of [`ginnel_clock::tick`] at the last of these calls, in nanoseconds.
    looked: AtomicU64,
    /// A hash of the address of the server to which the socket is connected.
    pub server: AtomicU64,
    /// The number of gets that the library answered.
    pub answered: AtomicU64,
    /// The number of gets that the library passed to the server.
    pub passed: AtomicU64,
    /// The name of the cache, `SEGMENT/NAME`, or empty.
    pub name: Lock<&'static str>,
    /// Why the library does not answer gets, as far as that is known.
    pub reason: Lock<&'static str>,
    pub filter: Lock<Option<Box<Filter>>>,
}

/// How often the library looks at the kernel's socket if calls follow each other closely: once in this number of calls. The
/// connection may have ended, and meanwhile another server with other items may run at its address.
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
            reason: Lock::new(""),
            filter: Lock::new(None),
        }
    }

    /// Resets this to the state of a new socket.
    pub fn reset(&self) {
        self.set(State::None);
        self.queued.store(0, Ordering::Relaxed);
        drop(self.filter.lock().take());
        for count in [&self.answered, &self.passed, &self.server] {
            count.store(0, Ordering::Relaxed);
        }
        self.asleep.store(0, Ordering::Relaxed);
        *self.name.lock() = "";
        *self.reason.lock() = "";
    }

    /// Ends the library's work on the connection, which is over.
    pub fn end(&self) {
        if self.is_there() {
            self.set(State::None);
            let mut filter = self.filter.lock();
            self.queued.store(0, Ordering::Relaxed);
            // This may run in a signal handler that has interrupted the call that works with the filter.
            if !filter.as_ref().is_some_and(|filter| filter.is_busy()) {
                drop(filter.take());
            }
        }
    }

    /// Does the same for a socket that gets another connection.
    pub fn renew(&self) {
        self.end();
        for count in [&self.answered, &self.passed, &self.server] {
            count.store(0, Ordering::Relaxed);
        }
        *self.name.lock() = "";
        *self.reason.lock() = "";
    }

    /// Returns whether calls that send, receive or wait have to consider the cache. For all other sockets, this is the only check.
    #[inline]
    pub fn is_there(&self) -> bool {
        self.state.load(Ordering::Relaxed) != State::None as u8
    }

    pub fn state(&self) -> State {
        // ORDER preload.cache: the caller sees everything that was prepared for this state. Pairs with: `Cache::set`.
        match self.state.load(Ordering::Acquire) {
            0 => State::None,
            1 => State::Fresh,
            2 => State::Asking,
            3 => State::Served,
            _ => State::Left,
        }
    }

    pub fn set(&self, state: State) {
        // ORDER preload.cache: publishes what a thread that sees this state uses. Pairs with: `Cache::state`.
        self.state.store(state as u8, Ordering::Release);
    }

    /// Changes the state from `from` to `to`. Returns false if the state was not `from`.
    pub fn change(&self, from: State, to: State) -> bool {
        // ORDER preload.asking: see `Cache::is_fresh`.
        self.state.compare_exchange(from as u8, to as u8, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    /// Returns whether the state is [`State::Fresh`]. If so, a thread that asks the server later will see that the calling thread
    /// sleeps.
    pub fn is_fresh(&self) -> bool {
        // ORDER preload.asking: either a thread that is about to receive sees that the server is asked, or the thread that asks
        // the server sees the receiving thread, because both write before they read and all four accesses are sequentially
        // consistent. Pairs with: `Cache::is_asleep`.
        self.state.load(Ordering::SeqCst) == State::Fresh as u8
    }

    /// Returns whether a thread sleeps, or is about to, that would receive answers past the filter.
    pub fn is_asleep(&self) -> bool {
        // ORDER preload.asking: see `Cache::is_fresh`.
        self.asleep.load(Ordering::SeqCst) != 0
    }

    /// Returns the number of bytes that the program receives before those that the kernel has.
    #[inline]
    pub fn queued(&self) -> usize {
        self.queued.load(Ordering::Acquire)
    }

    /// Returns whether such bytes are queued.
    #[inline]
    pub fn has_answers(&self) -> bool {
        self.queued() > 0
    }

    /// Counts a call, and returns whether it is time to look at the kernel's socket.
    pub fn is_look_due(&self) -> bool {
        let tick = ginnel_clock::tick().as_nanos() as u64;
        let is_later = self.looked.load(Ordering::Relaxed) != tick;
        if is_later {
            self.looked.store(tick, Ordering::Relaxed);
        }
        self.looks.fetch_add(1, Ordering::Relaxed) % CALLS == CALLS - 1 || is_later
    }
}
