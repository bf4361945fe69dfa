//! A socket in an instance: what the program has asked for, and what it was told.

use crate::carrying::bell::Wake;
use crate::carrying::{look, output, room, wakeups};
use crate::epoll::edge::Edge;
use crate::state::carrier::Carrier;
use crate::state::known::Fact;
use crate::state::socket::Socket;
use crate::waiting::readiness;
use crate::waiting::readiness::Armed;
use libc::{c_int, c_short, epoll_event};
use std::sync::atomic::Ordering;
use std::time::Duration;

pub struct Watch {
    pub(super) socket: &'static Socket,
    /// The value of `Socket::life` when the program added the socket. The socket's memory may belong to another socket later.
    pub(super) life: u64,
    /// True if the program has removed the socket while the kernel's registration stays in place.
    pub(super) is_absent: bool,
    /// The events that the program has asked for, and its data.
    pub(super) events: u32,
    pub(super) data: u64,
    pub(super) is_joined: bool,
    /// True once an EPOLLONESHOT event has been reported.
    pub(super) is_spent: bool,
    /// For edge-triggered events: what was reported.
    pub(super) edge: Edge<Progress>,
    pub(super) is_hot: bool,
    /// The number of consecutive looks that have found nothing while the socket was hot.
    pub(super) misses: u32,
    /// How the peer has been asked to wake this instance.
    pub(super) armed: Armed,
    /// True if a thread that sleeps for the socket looks again by the clock.
    pub(super) is_by_clock: bool,
    /// The value of `State::told` at the call that last reported this socket to the program.
    pub(super) told: u64,
}

/// How far everything at a socket has come of which a program with edge-triggered events is told.
#[derive(PartialEq)]
pub struct Progress {
    /// What has come in the rings.
    rings: look::Progress,
    /// The carrier of the receiving direction. Bytes that TCP carries after a return may have arrived, and woken this side, while the
    /// ring still carried the direction.
    carrier: Carrier,
    /// The number of calls that have found no room, as long as there is room again after them.
    without_room: u32,
    /// Whether the program has shut down receiving, and sending. A relative may have done that.
    shut_down: [bool; 2],
}

impl Progress {
    pub(super) const NONE: Self = Self {
        rings: look::Progress { position: 0, is_ending: false, is_left: false },
        carrier: Carrier::Kernel,
        without_room: 0,
        shut_down: [false; 2],
    };

    pub(super) fn of(socket: &'static Socket, seen: &Self) -> Self {
        Self {
            rings: look::progress(socket),
            carrier: socket.receiving.carrier(),
            without_room: output::room_again(socket, seen.without_room),
            shut_down: [socket.has(Fact::ShutDownReceiving), socket.has(Fact::ShutDownSending)],
        }
    }
}

impl Watch {
    /// Returns whether the watch is for this socket, and not for an earlier one with the same memory.
    pub(super) fn is_of(&self, socket: &'static Socket) -> bool {
        std::ptr::eq(self.socket, socket) && self.life == socket.life.load(Ordering::Relaxed)
    }

    /// Returns whether no event of it is reported at present.
    pub(super) fn is_silent(&self) -> bool {
        self.is_spent || self.is_absent
    }

    /// Makes the peer wake this side. Returns true if the peer can.
    pub(super) fn arm(&mut self, how: Wake) -> bool {
        let mut interest = self.events as c_short;
        // Programs with edge-triggered events ask for room all the time. As long as there is some, they need no wake-up for it, which
        // would come with each message that the peer takes. If a call finds none later, `Instance::without_room` learns of it.
        if self.socket.sending.common().is_none() && room::has_room(self.socket, 1) {
            interest &= !(libc::POLLOUT | libc::POLLWRNORM);
        }
        readiness::arm_more(self.socket, interest, how, &mut self.armed);
        readiness::can_be_woken(self.socket, self.events as c_short)
    }

    /// Handles bytes that the peer has not taken, for a thread that is about to sleep (`wakeups::probe`). If it sleeps `by_clock`,
    /// returns how long it may sleep before it looks again.
    pub(super) fn probe(&mut self, by_clock: bool) -> Option<Duration> {
        let counts = by_clock && self.armed.is_for_data();
        if std::mem::replace(&mut self.is_by_clock, counts) != counts {
            let count = &self.socket.asleep.by_clock;
            let change = |count: u32| if counts { Some(count + 1) } else { count.checked_sub(1) };
            let _ = count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, change);
        }
        if by_clock {
            return wakeups::probe_by_clock(self.socket);
        }
        wakeups::probe(self.socket);
        None
    }

    /// Tells the peer that it need not wake this side any more.
    pub(super) fn rise(&mut self) {
        if self.is_of(self.socket) {
            if std::mem::take(&mut self.is_by_clock) {
                let count = &self.socket.asleep.by_clock;
                let _ =
                    count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| count.checked_sub(1));
            }
            readiness::rise(self.socket, &mut self.armed);
        }
    }

    /// Lets the peer wake this side instead of looking at the ring. Returns false if the peer cannot, or if something is ready.
    pub(super) fn rests(&mut self, fd: c_int) -> bool {
        // A wake byte, unlike a doorbell, says which socket it is for.
        let rests = self.is_silent() || (self.arm(Wake::Byte) && self.ready(fd, true) == 0);
        if rests {
            self.is_hot = false;
            if self.is_of(self.socket) {
                self.probe(false);
            }
        } else {
            self.rise();
        }
        rests
    }

    /// Stores what the program wants to know from now on.
    pub(super) fn ask(&mut self, event: epoll_event) {
        (self.events, self.data, self.is_spent) = (event.events, event.u64, false);
        self.edge.set_due();
    }

    /// Returns the events to report.
    pub(super) fn ready(&mut self, fd: c_int, only_look: bool) -> u32 {
        if self.is_silent() {
            return 0;
        }
        let (socket, interest) = (self.socket, self.events as c_short);
        let ready = || readiness::readiness(socket, fd, interest) as u16 as u32;
        if self.events & libc::EPOLLET as u32 == 0 {
            return ready();
        }
        self.edge.news(only_look, |seen| Progress::of(socket, seen), ready)
    }
}
