//! `poll` and `select` on sockets that have to do with caches.

use libc::{c_short, pollfd};
use smallvec::SmallVec;
use std::time::Duration;

use super::filter::is_idle;
use super::{Asleep, State};
use crate::errno::Result;
use crate::poll::Native;
use crate::socket::Socket;
use crate::table::{Call, EPOLLS, SOCKETS};
use crate::wait::Limit;

const INPUT: c_short = libc::POLLIN | libc::POLLRDNORM;
const OUTPUT: c_short = libc::POLLOUT | libc::POLLWRNORM;

/// Whether a call that waits for a socket has to look here.
#[inline]
pub fn concerns(socket: &'static Socket) -> bool {
    socket.cache.is_there()
}

/// What a call that waits for a socket finds here.
#[inline]
pub fn readiness(socket: &'static Socket, interest: c_short) -> c_short {
    if socket.cache.has_answers() { interest & INPUT } else { 0 }
}

/// As `poll`, for descriptors none of which has changed over.
pub fn poll(fds: &mut [pollfd], limit: &mut Limit, mut native: impl Native) -> Result<usize> {
    if let [one] = fds
        && let Some(ready) = alone(one)
    {
        one.revents = ready;
        return Ok(1);
    }
    let mut is_ready = false;
    let mut asleep = SmallVec::<[(Call<Socket>, Asleep); 16]>::new();
    for poll in fds.iter() {
        if let Some(call) = SOCKETS.call(poll.fd).filter(|call| concerns(call.what())) {
            if poll.events & INPUT == 0 {
                continue;
            }
            match Asleep::begin(call.what()) {
                Some(one) => asleep.push((call, one)),
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
    // Those that are awake are so before their sockets can be others.
    asleep.drain(..).for_each(|(_call, asleep)| drop(asleep));
    let mut ready = asked?;
    for poll in fds.iter_mut() {
        let here = here(poll);
        ready += usize::from(poll.revents == 0 && here != 0);
        poll.revents |= here;
    }
    Ok(ready)
}

fn here(poll: &pollfd) -> c_short {
    match SOCKETS.get(poll.fd) {
        Some(socket) => readiness(socket, poll.events),
        None if EPOLLS.get(poll.fd).is_some_and(|instance| instance.is_ready()) => poll.events & INPUT,
        None => 0,
    }
}

/// What a call is told that waits for one socket, if the kernel need not be asked.
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
    // With nothing under way, there is room in the kernel.
    if output != 0 && !is_idle(socket) {
        return None;
    }
    Some(output | readiness(socket, poll.events)).filter(|ready| *ready != 0)
}
