//! `poll` and `select` where no connection has rings: on sockets that concern caches, and for threads that may find out only afterwards
//! that a connection has got some.

use crate::cache::State;
use crate::epoll::EPOLLS;
use crate::process::section::Scratch;
use crate::served::Asleep;
use crate::served::transfer::is_idle;
use crate::state::socket::Socket;
use crate::state::sockets::SOCKETS;
use crate::state::table::Lease;
use crate::system::errno::Result;
use crate::waiting::FEW;
use crate::waiting::limit::{Limit, Native};
use crate::waiting::unaware::Unaware;
use libc::{c_short, pollfd};
use smallvec::SmallVec;
use std::time::Duration;

const INPUT: c_short = libc::POLLIN | libc::POLLRDNORM;
const OUTPUT: c_short = libc::POLLOUT | libc::POLLWRNORM;

/// Returns whether a call that waits for this socket has to consider queued answers.
#[inline]
pub fn concerns(socket: &'static Socket) -> bool {
    socket.cache.is_there()
}

/// Returns the events of `interest` that the queued answers of this socket cause.
#[inline]
pub fn readiness(socket: &'static Socket, interest: c_short) -> c_short {
    if socket.cache.has_answers() { interest & INPUT } else { 0 }
}

/// Does the work of `poll` for descriptors none of which has changed over to shared memory. Returns `None` if one of them does so
/// meanwhile.
pub fn poll(fds: &mut [pollfd], limit: &mut Limit, native: &mut impl Native) -> Option<Result<usize>> {
    if let [one] = fds
        && let Some(ready) = alone(one)
    {
        one.revents = ready;
        return Some(Ok(1));
    }
    let unaware = if limit.is_zero() { None } else { Some(Unaware::begin(fds)?) };
    let mut is_ready = false;
    let mut asleep = Scratch::new(SmallVec::<[(Lease<Socket>, Asleep); FEW]>::new);
    for poll in fds.iter() {
        if let Some(call) = SOCKETS.call(poll.fd).filter(|call| concerns(call.what())) {
            if poll.events & INPUT == 0 {
                continue;
            }
            match Asleep::begin(call.what()) {
                Some(one) => asleep.change(|asleep| asleep.push((call, one))),
                None => is_ready = true,
            }
        } else if let Some(instance) = EPOLLS.get(poll.fd)
            && poll.events & INPUT != 0
        {
            instance.arm();
            is_ready |= instance.is_ready();
        }
    }
    let timeout = if is_ready { Some(Duration::ZERO) } else { limit.left() };
    let asked = native.poll(fds, timeout);
    // The marks of the sleeping threads end before the calls do: after its call, a socket's memory can become that of another socket.
    asleep.drain(..).for_each(|(_call, asleep)| drop(asleep));
    drop(unaware);
    let mut ready = match asked {
        // What the kernel has may be a wake byte.
        Ok(1..) if fds.iter().any(|poll| SOCKETS.get(poll.fd).is_some_and(Socket::is_joined)) => return None,
        Ok(ready) => ready,
        Err(errno) => return Some(Err(errno)),
    };
    for poll in fds.iter_mut() {
        let here = here(poll);
        ready += usize::from(poll.revents == 0 && here != 0);
        poll.revents |= here;
    }
    Some(Ok(ready))
}

/// Returns the events of one descriptor that are due to queued answers.
fn here(poll: &pollfd) -> c_short {
    match SOCKETS.get(poll.fd) {
        Some(socket) => readiness(socket, poll.events),
        None if EPOLLS.get(poll.fd).is_some_and(|instance| instance.is_ready()) => poll.events & INPUT,
        None => 0,
    }
}

/// Returns the events for a call that waits for one socket only, or `None` if the kernel must be asked.
fn alone(poll: &pollfd) -> Option<c_short> {
    let call = SOCKETS.call(poll.fd)?;
    let socket = call.what();
    if socket.cache.state() != State::Served
        || poll.events & (INPUT | OUTPUT) == 0
        || socket.cache.is_look_due()
    {
        return None;
    }
    let output = poll.events & OUTPUT;
    // If nothing is under way, the kernel's send buffer has room.
    if output != 0 && !is_idle(socket) {
        return None;
    }
    Some(output | readiness(socket, poll.events)).filter(|ready| *ready != 0)
}
