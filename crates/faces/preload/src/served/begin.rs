//! Decides whether a connection is served, when the program sends the first bytes.
//!
//! If they are requests of memcached, the library [asks](crate::served::ask) the server whether it is a cache, and which one. The
//! program's call waits for the answer meanwhile, because the request may be a get. A server that is no cache is not asked again.

use crate::cache::filter::Filter;
use crate::cache::{State, find, others};
use crate::daemon::session;
use crate::process::settings;
use crate::process::signals::Blocked;
use crate::served::ask::{self, Answer};
use crate::served::{Pieces, TOGETHER};
use crate::state::socket::Socket;
use crate::system::cancel::Disabled;
use crate::system::confined::is_confined;
use crate::system::errno::Kept;
use ginnel_cache_protocol::{Protocol, first};
use libc::c_int;
use smallvec::SmallVec;
use std::sync::atomic::Ordering;

/// The reason why a served connection stays on TCP.
const SERVED: &str = "a cache: gets are answered from its memory";

const NOT_MEMCACHED: &str = "its first bytes are not a request of memcached";
const AWAITED: &str = "a thread waited for its answers before the first request";
const UNREADABLE: &str = "the memory of its cache cannot be read";

/// Notes that the socket is being connected to this address, at this port.
pub fn connected(socket: &'static Socket, port: u16, address: &[u8]) {
    if !settings::is_cache_port(port) {
        return;
    }
    let server = find::hash(address);
    if let Some(reason) = others::reason(server) {
        *socket.cache.reason.lock() = reason;
        return;
    }
    socket.cache.server.store(server, Ordering::Relaxed);
    socket.cache.set(State::Fresh);
    socket.watchers.serve();
}

/// Begins with a fresh connection, on which the program is about to send the first bytes. Afterwards the connection is served or not, or
/// it is still being made.
#[cold]
pub fn begin(socket: &'static Socket, fd: c_int, pieces: &Pieces<'_>) {
    let _errno = Kept::new();
    let _blocked = Blocked::new();
    // A thread that is cancelled here would leave others waiting for it.
    let _disabled = Disabled::new();
    let cache = &socket.cache;
    let connection = socket.connection();
    if !cache.change(State::Fresh, State::Asking) {
        return;
    }
    let next = match spoken(pieces) {
        None => unserved(socket, NOT_MEMCACHED),
        // What that thread receives does not pass through the filter.
        Some(_) if cache.is_asleep() => unserved(socket, AWAITED),
        Some(protocol) if may_ask(socket) => ask(socket, fd, protocol),
        Some(_) => State::None,
    };
    end(socket, connection, next);
}

/// Returns the protocol that a client speaks whose first call sends these pieces.
fn spoken(pieces: &Pieces<'_>) -> Option<Protocol> {
    if let [one] = &pieces[..] {
        return first::spoken(&one[..one.len().min(TOGETHER)]);
    }
    let mut bytes = SmallVec::<[u8; TOGETHER]>::new();
    for piece in pieces {
        bytes.extend_from_slice(&piece[..piece.len().min(TOGETHER - bytes.len())]);
    }
    first::spoken(&bytes)
}

/// Ends the asking with this state.
fn end(socket: &'static Socket, connection: u64, next: State) {
    // Meanwhile, another thread may have found rings for the connection, or have connected the socket to another server.
    let is_served = next == State::Served
        && session::stays_if(socket, SERVED, || !socket.is_joined() && socket.connection() == connection);
    if is_served {
        session::withdraw(socket);
        socket.watchers.serve();
    }
    let next = if next == State::Served && !is_served { State::None } else { next };
    socket.cache.change(State::Asking, next);
}

fn may_ask(socket: &'static Socket) -> bool {
    // Without a daemon, no cache can be found.
    !is_confined() && !socket.is_joined() && settings::attach().socket.exists()
}

/// Leaves the connection to the server, for this reason.
fn unserved(socket: &'static Socket, reason: &'static str) -> State {
    *socket.cache.reason.lock() = reason;
    State::None
}

/// Asks the server. Returns the next state of the socket.
fn ask(socket: &'static Socket, fd: c_int, protocol: Protocol) -> State {
    let server = socket.cache.server.load(Ordering::Relaxed);
    // Another connection may have asked meanwhile.
    if let Some(reason) = others::reason(server) {
        return unserved(socket, reason);
    }
    let (reason, is_for_good) = match ask::ask(socket, fd) {
        Answer::Cache { segment, name, id } => match find::find(&segment, &name, id) {
            Some(found) => {
                *socket.cache.name.lock() = &found.name;
                *socket.cache.filter.lock() = Some(Box::new(Filter::new(found, protocol)));
                return State::Served;
            }
            None => (UNREADABLE, false),
        },
        Answer::NotConnected => return State::Fresh,
        Answer::Unknown(reason) => (reason, false),
        Answer::Other(reason) => (reason, true),
    };
    others::note(server, reason, is_for_good);
    unserved(socket, reason)
}
