//! `poll` and `select`, in all their variants.

use crate::carrying::attend::attend_if_needed;
use crate::carrying::{returning, wakeups};
use crate::epoll::EPOLLS;
use crate::process::section::Scratch;
use crate::process::spin;
use crate::served;
use crate::served::waiting;
use crate::state::carrier::Carrier;
use crate::state::early;
use crate::state::known::Fact;
use crate::state::socket::{End, Socket, Stage};
use crate::state::sockets::SOCKETS;
use crate::state::table::Lease;
use crate::system::confined::is_confined;
use crate::system::errno::{Kept, Result};
use crate::system::kernel;
use crate::waiting::limit::{Limit, Native};
use crate::waiting::readiness::Armed;
use crate::waiting::sleep::{Point, Sleep};
use crate::waiting::unaware::Unaware;
use crate::waiting::{FEW, readiness, sleep, unaware};
use libc::{c_int, c_short, pollfd};
use smallvec::SmallVec;
use std::time::Duration;

/// The interval at which a thread that cannot be woken checks again.
const STEP: Duration = Duration::from_millis(1);

/// The descriptors of a call.
pub type List = SmallVec<[pollfd; FEW]>;
/// With this many descriptors, the call may already contain all that the program is allowed to have.
const MANY: usize = 256;

/// The events that are reported whatever the program is interested in.
const ALWAYS: c_short = libc::POLLHUP | libc::POLLERR | libc::POLLNVAL;

fn joined(fd: c_int) -> Option<&'static Socket> {
    SOCKETS.get(fd).filter(|socket| socket.is_joined())
}

/// Returns whether the call must handle at least one descriptor itself, because the kernel alone does not carry it.
pub fn concerns_us(fds: &[pollfd]) -> bool {
    let mut any = false;
    for poll in fds {
        if let Some(socket) = SOCKETS.get(poll.fd) {
            attend_if_needed(socket, poll.fd);
            any |= socket.is_joined()
                || is_early(poll)
                || waiting::concerns(socket)
                || unaware::concerns(socket);
        } else if let Some(instance) = EPOLLS.get(poll.fd) {
            any |= instance.is_polled();
        }
    }
    any
}

/// Returns whether the connection may change over while the thread sleeps, and the kernel would not wake the thread then.
fn is_early(poll: &pollfd) -> bool {
    const BYTES: c_short = libc::POLLIN | libc::POLLRDNORM | libc::POLLOUT | libc::POLLWRNORM;
    let may_change = |socket: &'static Socket| matches!(socket.stage(), Stage::Native | Stage::Reported);
    poll.events & BYTES == 0 && !is_confined() && SOCKETS.get(poll.fd).is_some_and(may_change)
}

/// A socket for which a thread sleeps, until it is awake or cancelled.
struct Asleep {
    /// The index of its descriptor in the list.
    index: usize,
    armed: Armed,
    /// How the thread is woken, if it waits for something.
    sleep: Option<Sleep>,
    /// Keeps the socket's memory from being reused for another socket.
    call: Lease<Socket>,
}

impl Drop for Asleep {
    fn drop(&mut self) {
        readiness::rise(self.call.what(), &mut self.armed);
    }
}

/// Does what `poll` does, for descriptors of which some are not carried by the kernel alone.
pub fn poll(fds: &mut [pollfd], limit: &mut Limit, mut native: impl Native) -> Result<usize> {
    if !fds.iter().any(|poll| joined(poll.fd).is_some() || is_early(poll))
        && let Some(ready) = waiting::poll(fds, limit, &mut native)
    {
        return ready;
    }
    // The entries for the kernel. While this thread sleeps, the last one is its wait point at the doorbell.
    let nothing = pollfd { fd: -1, events: libc::POLLIN, revents: 0 };
    let mut asked: Scratch<List> = Scratch::new(|| fds.iter().copied().chain([nothing]).collect());
    let own = fds.len();
    let mut may_look = spin::may_look();
    loop {
        for (asked, poll) in asked.iter_mut().zip(fds.iter()) {
            *asked = question(poll);
        }
        // The kernel is always asked too, because the call must report everything that is ready. As in the kernel, signals that only
        // this call lets come do not come if something is ready.
        match native.sets_mask() && any_ready(fds) {
            true => kernel::poll_all_now(&mut asked[..own])?,
            false => native.poll(&mut asked[..own], Some(Duration::ZERO))?,
        };
        let ready = answer(fds, &asked);
        if ready > 0 || limit.is_zero() {
            return Ok(ready);
        }
        let mut left = limit.left();
        if std::mem::take(&mut may_look) {
            let mut kernel = Ok(0);
            let found = spin::spin_between(
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
        let may_add = own < MANY || own < kernel::most_descriptors();
        let mut point = if may_add { Point::at_doorbell() } else { Point::none() };
        let early: Scratch<SmallVec<[usize; FEW]>> =
            Scratch::new(|| (0..own).filter(|i| is_early(&fds[*i])).collect());
        let sleeper = (!early.is_empty()).then(early::Sleeper::begin);
        let mut sleepers = Scratch::new(SmallVec::<[Asleep; FEW]>::new);
        let mut asleep = Scratch::new(SmallVec::<[_; FEW]>::new);
        for (index, poll) in fds.iter().enumerate() {
            if let Some(call) = SOCKETS.call(poll.fd).filter(|call| call.what().is_joined()) {
                let socket = call.what();
                let sleeps = readiness::needs(socket, poll.events) != 0 || returning::may_be_woken(socket);
                let sleep = sleeps.then(|| Sleep::begin(socket, poll.fd, &mut point));
                let one = Asleep { index, armed: Armed::default(), sleep, call };
                sleepers.change(|sleepers| sleepers.push(one));
            } else if let Some(call) = SOCKETS.call(poll.fd).filter(|call| waiting::concerns(call.what())) {
                // Queued events are found below.
                let one = served::Asleep::begin(call.what()).map(|asleep| (call, asleep));
                asleep.change(|asleep| asleep.extend(one));
            } else if let Some(instance) = EPOLLS.get(poll.fd) {
                instance.arm();
            }
        }
        if let Some(sleeper) = &sleeper
            && !sleeper.event().is_some_and(|event| point.watch(event))
        {
            left = Some(left.map_or(STEP, |left| left.min(STEP)));
        }
        sleep::settle(&point, sleepers.iter().filter_map(|asleep| asleep.sleep.as_ref()));
        for asleep in sleepers.iter_mut() {
            let (socket, interest) = (asleep.call.what(), fds[asleep.index].events);
            readiness::arm_more(socket, interest, point.wake_for(socket), &mut asleep.armed);
            wakeups::probe(socket);
            let sleep = asleep.sleep.as_ref();
            if sleep.is_none_or(|sleep| sleep.keeper().is_none()) {
                // An end that is there already, behind which a ring or bytes are left, would wake the thread again and again.
                let is_behind = !returning::may_be_woken(socket);
                let unwanted = if is_behind { libc::POLLIN | libc::POLLRDHUP } else { libc::POLLIN };
                asked[asleep.index].events &= !unwanted;
            }
            if !readiness::can_be_woken(socket, interest) || sleep.is_some_and(|sleep| !sleep.is_woken()) {
                left = Some(left.map_or(STEP, |left| left.min(STEP)));
            }
        }
        if let (Some(point), Some(last)) = (point.taken(), asked.last_mut()) {
            last.fd = point.epoll();
        }
        let unaware = Unaware::begin(fds);
        // A connection that has got its rings since the lists were made.
        let has_changed = unaware.is_none()
            || fds.iter().enumerate().any(|(i, poll)| match joined(poll.fd) {
                Some(_) => !sleepers.iter().any(|asleep| asleep.index == i),
                None => is_early(poll) && !early.contains(&i),
            });
        // To look for room may have returned a connection to TCP, whose room the kernel is not asked for yet.
        let is_unasked =
            |asleep: &Asleep| question(&fds[asleep.index]).events & OUTPUT & !asked[asleep.index].events != 0;
        let slept = if has_changed || any_ready(fds) || sleepers.iter().any(is_unasked) {
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
        drop((sleepers, sleeper, unaware));
        asleep.drain(..).for_each(|(_call, asleep)| drop(asleep));
        let Some(slept) = slept else { continue };
        slept?;
        if limit.left() == Some(Duration::ZERO) {
            let ready = answer(fds, &asked);
            return Ok(ready);
        }
    }
}

/// What says that there is room.
const OUTPUT: c_short = libc::POLLOUT | libc::POLLWRNORM;

/// Returns the events for which the kernel is asked about a descriptor.
fn question(poll: &pollfd) -> pollfd {
    let Some(socket) = joined(poll.fd) else { return pollfd { revents: 0, ..*poll } };
    // Bytes and ends wake the thread. A socket that has ended would wake it again and again.
    let mut events = 0;
    let interest = readiness::needs(socket, poll.events);
    // A byte may also come because the peer wants this side to return to TCP.
    if socket.end() == End::None && (interest != 0 || returning::may_be_woken(socket)) {
        events |= libc::POLLIN | libc::POLLRDHUP;
    } else if socket.end() == End::None && socket.receiving.carrier() == Carrier::Ring {
        // A broken connection is an event for every interest, and the kernel may report it as an end in order.
        events |= libc::POLLRDHUP;
    }
    if socket.sending.carrier() != Carrier::Ring {
        events |= poll.events & OUTPUT;
    }
    let fd = if socket.end() == End::None && !socket.has(Fact::ShutDownReceiving) { poll.fd } else { -1 };
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
                    sleep::take(socket, poll.fd);
                }
                readiness::readiness(socket, poll.fd, poll.events)
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
        Some(socket) => readiness::readiness(socket, poll.fd, poll.events) != 0,
        None if answered(poll) != 0 => true,
        None => EPOLLS.get(poll.fd).is_some_and(|instance| instance.is_ready()),
    })
}

/// Returns the events for what the cache has queued for a socket that has not changed over.
fn answered(poll: &pollfd) -> c_short {
    SOCKETS.get(poll.fd).map_or(0, |socket| waiting::readiness(socket, poll.events))
}
