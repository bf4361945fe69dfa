//! Gives back answers that the program has not received, before another process or a call that this library does not follow receives on
//! the connection.
//!
//! The server puts them into the connection: `ginnel echo` is answered with its own value. What the server is still to send comes behind
//! them, so the library waits for that first. From then on the connection is an ordinary one. If the server does not take part soon, the
//! answers stay with this process.

use crate::cache::State;
use crate::cache::filter::Entered;
use crate::cache::queue::Queue;
use crate::state::socket::Socket;
use crate::state::sockets::{SOCKETS, Using, number};
use crate::system::confined::is_confined;
use crate::system::errno::{Errno, Kept, check};
use crate::system::kernel;
use crate::waiting::limit::milliseconds;
use ginnel_cache_protocol::Protocol;
use ginnel_cache_protocol::binary::{Header, REQUEST, opcode};
use ginnel_cache_protocol::text::MOST_ECHO;
use libc::c_int;
use smallvec::SmallVec;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long the server may take to answer what it was asked before.
const PATIENCE: Duration = Duration::from_millis(100);
/// The maximum length of the requests to the server, in bytes. The buffers of the two sockets have room for so much, so the server can
/// send everything while nobody receives.
const MOST: usize = 64 << 10;

/// Gives back the answers on a connection, if there are any. Returns true if only the kernel has anything for the program now.
pub fn give_back(socket: &'static Socket) -> bool {
    if socket.cache.has_answers() && socket.cache.state() == State::Served && !is_confined() {
        let _errno = Kept::new();
        // Threads wait for the lock meanwhile. Otherwise, one of them could send a request of its own in between.
        if let Some(mut filter) = socket.cache.enter() {
            if let Ok(fd) = number(socket, socket.fd.load(Ordering::Relaxed))
                && let Some(_using) = Using::begin(socket, fd)
                && take_outstanding(&mut filter, fd)
                && have_echoed(&mut filter, fd)
            {
                filter.queue = Queue::default();
                filter.tell_queued();
            }
            filter.leave();
        }
    }
    !socket.cache.has_answers()
}

/// Gives back the answers on those connections that another process gets by these descriptors. Returns the descriptors of connections
/// whose answers only this process can receive.
#[cold]
pub fn share(gets: impl Fn(c_int) -> bool) -> SmallVec<[c_int; 4]> {
    let _errno = Kept::new();
    let is_kept = |fd: &c_int| {
        SOCKETS.get(*fd).is_some_and(|socket| socket.cache.has_answers() && gets(*fd) && !give_back(socket))
    };
    SOCKETS.used(0, u32::MAX).filter(is_kept).collect()
}

/// Receives what the server has not answered yet, and queues it. Returns false if it does not come soon.
fn take_outstanding(filter: &mut Entered, fd: c_int) -> bool {
    if filter.is_receiving || !filter.requests.is_between() {
        return false;
    }
    let end = Instant::now() + PATIENCE;
    while !filter.answers.is_idle() {
        let mut bytes = [0; 4096];
        match check(kernel::receive(fd, &mut bytes, libc::MSG_DONTWAIT)) {
            Ok(n @ 1..) => {
                filter.queue.append().0.extend_from_slice(&bytes[..n]);
                filter.tell_queued();
                if filter.answers.look(&bytes[..n]).is_err() {
                    return false;
                }
            }
            Err(Errno(libc::EAGAIN | libc::EINTR)) => {
                let left = end.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return false;
                }
                let _ = kernel::poll_readable(fd, milliseconds(Some(left)));
            }
            Ok(0) | Err(_) => return false,
        }
    }
    true
}

/// Asks the server to send everything that is queued. Returns false if that is impossible.
fn have_echoed(filter: &mut Entered, fd: c_int) -> bool {
    let mut bytes = vec![0; filter.queue.len()];
    filter.queue.look(&mut bytes);
    let mut requests = Vec::new();
    for part in bytes.chunks(MOST_ECHO) {
        match filter.protocol {
            Protocol::Text => {
                requests.extend_from_slice(format!("ginnel echo {}\r\n", part.len()).as_bytes());
            }
            Protocol::Binary => {
                let (opcode, body) = (opcode::GINNEL_ECHO, part.len() as u32);
                Header { magic: REQUEST, opcode, body, ..Header::default() }.append(&mut requests);
            }
        }
        requests.extend_from_slice(part);
    }
    if requests.len() > MOST {
        return false;
    }
    match kernel::send_some(fd, &requests, true) {
        0 => false,
        sent => {
            if sent < requests.len() {
                // The server would take the program's next bytes for the rest of a request.
                kernel::send_no_more(fd);
            }
            true
        }
    }
}
