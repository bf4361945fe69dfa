//! `poll` and `select`, in all their variants.

use crate::direction::Carrier;
use crate::doorbell::Wake;
use crate::errno::{Kept, Result};
use crate::receive::{self, Found};
use crate::send::{self, attend_if_needed};
use crate::socket::{End, Socket};
use crate::table::{Call, EPOLLS, SOCKETS};
use crate::wait::Limit;
use crate::wakes::{self, Point, Sleep};
use crate::{cache, disconnecting, kernel, returning, wait};
use libc::{c_int, c_short, pollfd};
use smallvec::SmallVec;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The interval at which a thread that cannot be woken checks again.
const STEP: Duration = Duration::from_millis(1);

/// The descriptors of a call. A few of them need no allocation: a signal handler may jump out of `poll`, but not out
/// of an allocator.
pub type List = SmallVec<[pollfd; FEW]>;
const FEW: usize = 32;
/// With this many descriptors, the call may already contain all that the program is allowed to have.
const MANY: usize = 256;

/// The events that are reported whatever the program is interested in.
const ALWAYS: c_short = libc::POLLHUP | libc::POLLERR | libc::POLLNVAL;

/// Returns which events of interest (as for `poll`) are present at a socket that the kernel alone does not carry.
pub fn readiness(socket: &'static Socket, fd: c_int, interest: c_short) -> c_short {
    let mut events = 0;
    disconnecting::follow_if_due(socket);
    let input = libc::POLLIN | libc::POLLRDNORM;
    let output = interest & (libc::POLLOUT | libc::POLLWRNORM | libc::POLLWRBAND);
    let mut is_ending = socket.has_shut_down_receiving();
    let found = match socket.receiving.carrier() {
        Carrier::Kernel | Carrier::Changing => {
            let now = kernel::poll_now(fd, interest & !output | libc::POLLRDHUP);
            is_ending |= now & libc::POLLRDHUP != 0;
            events |= now & (interest | libc::POLLHUP | libc::POLLERR);
            Found::Nothing
        }
        _ => {
            // Where the kernel says what can be received, it also says how the connection has ended.
            let mut kernels = 0;
            let (found, is_ending_in_ring) = receive::look_ahead(socket, || {
                kernels = kernel::poll_now(fd, libc::POLLIN | libc::POLLRDHUP);
                kernels != 0
            });
            is_ending |= is_ending_in_ring || kernels & libc::POLLRDHUP != 0;
            events |= kernels & (libc::POLLHUP | libc::POLLERR);
            found
        }
    };
    match found {
        Found::Nothing => {}
        Found::Something => events |= interest & input,
        Found::End => events |= interest & (input | libc::POLLRDHUP),
    }
    let has_shut_down = send::has_shut_down(socket);
    if is_ending {
        events |= interest & (input | libc::POLLRDHUP);
        // Both directions have ended.
        if has_shut_down {
            events |= libc::POLLHUP;
        }
    }
    if output != 0 {
        match socket.sending.carrier() {
            _ if has_shut_down => events |= output,
            Carrier::Ring if returning::is_full(socket, fd) => {}
            Carrier::Ring if socket.sending.carrier() == Carrier::Ring => events |= output,
            _ => events |= kernel::poll_now(fd, output),
        }
    }
    if is_ending && (socket.said.closed.load(Ordering::Relaxed) || receive::is_reset(socket)) {
        events |= interest & (input | libc::POLLRDHUP | output) | libc::POLLHUP;
        if !socket.said.reset.load(Ordering::Relaxed) {
            events |= libc::POLLERR;
        }
    } else if found == Found::End && is_lost(socket) {
        events |= libc::POLLHUP;
        if socket.untold().is_some() {
            events |= libc::POLLERR;
        }
    }
    events
}

/// Returns whether the kernel has lost the connection. (Wake bytes that nobody has read make the kernel reset the connection too, where
/// TCP would have ended it in order. So a reset counts only where the kernel carries the program's bytes.)
fn is_lost(socket: &'static Socket) -> bool {
    match socket.end() {
        End::Lost => true,
        End::Reset => socket.sending.carrier() != Carrier::Ring,
        _ => false,
    }
}

/// Returns what a sleeper must be woken for, so that events are not missed which are reported whatever the interest is.
fn needs(socket: &'static Socket, interest: c_short) -> c_short {
    if send::has_shut_down(socket) { interest | libc::POLLRDHUP } else { interest }
}

/// The conditions for which a sleeper waits. The peer wakes it for them until [`rise`].
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Armed {
    data: bool,
    space: bool,
}

/// Makes the peer wake a sleeper for the events of interest. The sleeper may wait already. The caller must check once more before it
/// sleeps.
pub fn arm_more(socket: &'static Socket, interest: c_short, how: Wake, armed: &mut Armed) {
    let interest = needs(socket, interest);
    if interest & (libc::POLLIN | libc::POLLRDNORM | libc::POLLRDHUP) != 0 {
        match std::mem::replace(&mut armed.data, true) {
            false => receive::arm(socket, how),
            true => receive::arm_again(socket, how),
        }
    }
    if interest & (libc::POLLOUT | libc::POLLWRNORM) != 0 && socket.sending.carrier() == Carrier::Ring {
        match std::mem::replace(&mut armed.space, true) {
            false => send::arm(socket, how),
            true => send::arm_again(socket, how),
        }
    }
}

/// Records that the sleeper is awake.
pub fn rise(socket: &'static Socket, armed: &mut Armed) {
    let armed = std::mem::take(armed);
    if armed.data {
        receive::rise(socket);
    }
    if armed.space {
        send::rise(socket);
    }
}

/// Returns whether the peer can wake this side for all events of interest. This side must have asked for it with [`arm`].
pub fn can_be_woken(socket: &'static Socket, interest: c_short) -> bool {
    receive::begin_ring_if_due(socket);
    // The daemon wakes no sleeper. The kernel's socket always is readable once the program has shut down receiving.
    if socket.has_shut_down_receiving() || crate::grow::attend_waiting(socket) || kernel::is_undecided(socket)
    {
        return false;
    }
    let output = interest & (libc::POLLOUT | libc::POLLWRNORM) != 0;
    if !output || socket.sending.carrier() != Carrier::Ring {
        return true;
    }
    // A thread that waits for room in a full ring checks by the clock, because no event reports that the peer will make no
    // room. After a while, `returning::is_full` then returns the direction to the kernel.
    send::has_room(socket, 1) && socket.receiving.carrier() == Carrier::Ring
}

/// A system call that waits for events of descriptors. With a timeout of `None` it waits without a limit.
pub trait Native {
    fn poll(&mut self, fds: &mut [pollfd], timeout: Option<Duration>) -> Result<usize>;
}

impl<F: FnMut(&mut [pollfd], Option<Duration>) -> Result<usize>> Native for F {
    fn poll(&mut self, fds: &mut [pollfd], timeout: Option<Duration>) -> Result<usize> {
        self(fds, timeout)
    }
}

fn joined(fd: c_int) -> Option<&'static Socket> {
    SOCKETS.get(fd).filter(|socket| socket.is_joined())
}

/// Returns whether the call must handle at least one descriptor itself, because the kernel alone does not carry it.
pub fn concerns_us(fds: &[pollfd]) -> bool {
    let mut any = false;
    for poll in fds {
        if let Some(socket) = SOCKETS.get(poll.fd) {
            attend_if_needed(socket, poll.fd);
            any |= socket.is_joined() || cache::concerns(socket);
        } else if let Some(instance) = EPOLLS.get(poll.fd) {
            any |= instance.is_polled();
        }
    }
    any
}

/// A socket for which a thread sleeps, until it is awake or cancelled.
struct Asleep {
    /// The index of its descriptor in the list.
    index: usize,
    armed: Armed,
    /// How the thread is woken, if it waits for something.
    sleep: Option<Sleep>,
    /// Keeps the socket's memory from being reused for another socket.
    call: Call<Socket>,
}

impl Drop for Asleep {
    fn drop(&mut self) {
        rise(self.call.what(), &mut self.armed);
    }
}

/// Does what `poll` does, for descriptors of which some are not carried by the kernel alone.
pub fn poll(fds: &mut [pollfd], limit: &mut Limit, mut native: impl Native) -> Result<usize> {
    if !fds.iter().any(|poll| joined(poll.fd).is_some()) {
        return cache::poll(fds, limit, native);
    }
    // The entries for the kernel. While this thread sleeps, the last one is its wait point at the doorbell.
    let nothing = pollfd { fd: -1, events: libc::POLLIN, revents: 0 };
    let mut asked: List = fds.iter().copied().chain([nothing]).collect();
    let own = fds.len();
    let mut may_look = wait::may_look();
    loop {
        for (asked, poll) in asked.iter_mut().zip(fds.iter()) {
            *asked = question(poll);
        }
        // The kernel is always asked too, because the call must report everything that is ready.
        native.poll(&mut asked[..own], Some(Duration::ZERO))?;
        let ready = answer(fds, &asked);
        if ready > 0 || limit.is_zero() {
            return Ok(ready);
        }
        let mut left = limit.left();
        if std::mem::take(&mut may_look) {
            let mut kernel = Ok(0);
            let found = wait::spin_between(
                || any_ready(fds),
                || {
                    kernel = native.poll(&mut asked[..own], Some(Duration::ZERO));
                    kernel != Ok(0)
                },
            );
            // A signal handler has run: a second call would sleep as if none had.
            kernel?;
            if found {
                continue;
            }
            left = limit.left();
        }
        // The kernel takes no more entries than the program may have descriptors.
        let mut point = if own >= MANY { Point::none() } else { Point::at_doorbell() };
        let mut sleepers = SmallVec::<[Asleep; FEW]>::new();
        let mut asleep = SmallVec::<[_; 8]>::new();
        for (index, poll) in fds.iter().enumerate() {
            if let Some(call) = SOCKETS.call(poll.fd).filter(|call| call.what().is_joined()) {
                let socket = call.what();
                let sleeps = needs(socket, poll.events) != 0;
                let sleep = sleeps.then(|| Sleep::begin(socket, poll.fd, &mut point));
                sleepers.push(Asleep { index, armed: Armed::default(), sleep, call });
            } else if let Some(call) = SOCKETS.call(poll.fd).filter(|call| cache::concerns(call.what())) {
                // Queued events are found below.
                asleep.extend(cache::Asleep::begin(call.what()).map(|asleep| (call, asleep)));
            } else if let Some(instance) = EPOLLS.get(poll.fd) {
                instance.arm();
            }
        }
        wakes::settle(&point, sleepers.iter().filter_map(|asleep| asleep.sleep.as_ref()));
        for asleep in &mut sleepers {
            let (socket, interest) = (asleep.call.what(), fds[asleep.index].events);
            arm_more(socket, interest, point.wake_for(socket), &mut asleep.armed);
            let sleep = asleep.sleep.as_ref();
            if sleep.is_none_or(|sleep| sleep.keeper().is_none()) {
                asked[asleep.index].events &= !libc::POLLIN;
            }
            if !can_be_woken(socket, interest) || sleep.is_some_and(|sleep| !sleep.is_woken()) {
                left = Some(left.map_or(STEP, |left| left.min(STEP)));
            }
        }
        if let (Some(point), Some(last)) = (point.taken(), asked.last_mut()) {
            last.fd = point.epoll();
        }
        let slept = if any_ready(fds) {
            None
        } else {
            Some(native.poll(&mut asked[..own + usize::from(point.taken().is_some())], left))
        };
        if let (Some(point), Some(last)) = (point.taken(), asked.last_mut()) {
            if slept.is_some() && last.revents != 0 {
                point.drain();
            }
            *last = nothing;
        }
        drop(sleepers);
        asleep.drain(..).for_each(|(_call, asleep)| drop(asleep));
        let Some(slept) = slept else { continue };
        slept?;
        if limit.left() == Some(Duration::ZERO) {
            let ready = answer(fds, &asked);
            return Ok(ready);
        }
    }
}

/// Returns the events for which the kernel is asked about a descriptor.
fn question(poll: &pollfd) -> pollfd {
    let Some(socket) = joined(poll.fd) else { return pollfd { revents: 0, ..*poll } };
    // Bytes and ends wake the thread. A socket that has ended would wake it again and again.
    let mut events = 0;
    let interest = needs(socket, poll.events);
    if socket.end() == End::None && interest != 0 {
        events |= libc::POLLIN | libc::POLLRDHUP;
    } else if socket.end() == End::None && socket.receiving.carrier() == Carrier::Ring {
        // A broken connection is an event for every interest, and the kernel may report it as an end in order.
        events |= libc::POLLRDHUP;
    }
    if socket.sending.carrier() != Carrier::Ring {
        events |= poll.events & (libc::POLLOUT | libc::POLLWRNORM);
    }
    let fd = if socket.end() == End::None && !socket.has_shut_down_receiving() { poll.fd } else { -1 };
    pollfd { fd, events, revents: 0 }
}

/// Writes the results for the program. Returns how many descriptors have an event.
fn answer(fds: &mut [pollfd], asked: &[pollfd]) -> usize {
    let mut ready = 0;
    for (poll, asked) in fds.iter_mut().zip(asked) {
        poll.revents = match joined(poll.fd) {
            Some(socket) => {
                if asked.revents != 0 {
                    let _errno = Kept::new();
                    wakes::take(socket, poll.fd);
                }
                readiness(socket, poll.fd, poll.events)
            }
            None if EPOLLS.get(poll.fd).is_some_and(|instance| instance.is_ready()) => {
                asked.revents | poll.events & libc::POLLIN
            }
            // It may have had rings when the kernel was asked, which was then asked for other events than the program's.
            None => asked.revents & (poll.events | ALWAYS) | answered(poll),
        };
        ready += usize::from(poll.revents != 0);
    }
    ready
}

fn any_ready(fds: &[pollfd]) -> bool {
    fds.iter().any(|poll| match joined(poll.fd) {
        Some(socket) => readiness(socket, poll.fd, poll.events) != 0,
        None if answered(poll) != 0 => true,
        None => EPOLLS.get(poll.fd).is_some_and(|instance| instance.is_ready()),
    })
}

/// Returns the events for what the cache has queued for a socket that has not changed over.
fn answered(poll: &pollfd) -> c_short {
    SOCKETS.get(poll.fd).map_or(0, |socket| cache::readiness(socket, poll.events))
}
