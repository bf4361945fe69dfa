//! What TCP may say of a connection, from what its ends have done so far.

use std::collections::BTreeMap;

pub const IN: i16 = libc::POLLIN;
pub const OUT: i16 = libc::POLLOUT;
pub const RDHUP: i16 = libc::POLLRDHUP;
pub const HUP: i16 = libc::POLLHUP;
pub const ERR: i16 = libc::POLLERR;

/// The kernel has room for this many bytes.
const FEW: u64 = 16 << 10;

/// Whether the kernel has broken a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reset {
    #[default]
    No,
    /// It depends on what the kernel still remembers of the connection.
    Perhaps,
    Yes,
}

/// One end of the connection.
#[derive(Clone, Debug, Default)]
pub struct End {
    /// Bytes that this end has sent.
    pub sent: u64,
    /// Bytes that this end has received.
    pub received: u64,
    /// It has shut down sending, or nobody has it any more.
    pub has_ended: bool,
    /// More was under way than the peer's kernel has room for, and the peer has not received all of it since. On the loopback device,
    /// a kernel that was full may take nothing more before its program has received everything.
    pub is_stuck: bool,
    /// It has shut down receiving.
    pub is_deaf: bool,
    /// Nobody has it any more.
    pub is_closed: bool,
    /// What the peer has done to it.
    pub reset: Reset,
    pub is_nonblocking: bool,
    /// Closing it breaks the connection.
    pub lingers_not: bool,
}

/// A socket in an epoll instance. Each process has at most one instance.
#[derive(Clone, Debug)]
pub struct Watch {
    pub end: usize,
    pub interest: i16,
    pub is_edge_triggered: bool,
    pub is_once: bool,
    /// It reports nothing until it is modified.
    pub is_spent: bool,
    /// The events that must come, if they are still true: their edges have not been reported.
    pub edges: i16,
    /// There was no room since it has reported `OUT` last.
    pub was_full: bool,
    /// A call has waited since before the watch was made or modified. What the call reports may be from the time before.
    pub is_old: bool,
}

#[derive(Default)]
pub struct Model {
    pub ends: [End; 2],
    /// The descriptors: which end a place of a process names.
    pub open: BTreeMap<(u32, i64), usize>,
    /// The watches, by the process and the place.
    pub watches: BTreeMap<(u32, i64), Watch>,
}

impl Model {
    /// Returns how many bytes an end can receive.
    pub fn available(&self, end: usize) -> u64 {
        self.ends[1 - end].sent - self.ends[end].received
    }

    /// Returns how many bytes of an end its peer has not received.
    pub fn outstanding(&self, end: usize) -> u64 {
        self.available(1 - end)
    }

    /// Returns whether a call that receives returns at once.
    pub fn is_readable(&self, end: usize) -> bool {
        let own = &self.ends[end];
        self.available(end) > 0 || self.peer_has_ended(end) || own.is_deaf || own.reset == Reset::Yes
    }

    /// Returns whether an end must know that the peer has ended. The end of the stream waits behind bytes for which the kernel has no room.
    fn knows_end(&self, end: usize) -> bool {
        self.peer_has_ended(end) && !self.ends[1 - end].is_stuck
    }

    pub fn peer_has_ended(&self, end: usize) -> bool {
        self.ends[1 - end].has_ended
    }

    /// Returns the events that `poll` must report, sooner or later.
    pub fn must(&self, end: usize) -> i16 {
        let own = &self.ends[end];
        let is_broken = own.reset == Reset::Yes;
        let no_more = self.knows_end(end) || own.is_deaf;
        let mut events = 0;
        if self.is_readable(end) {
            events |= IN;
        }
        if self.outstanding(end) == 0 || own.has_ended || is_broken {
            events |= OUT;
        }
        if no_more || is_broken {
            events |= RDHUP;
        }
        if no_more && own.has_ended || is_broken {
            events |= HUP;
        }
        events
    }

    /// Returns the events that `poll` may report at this moment.
    pub fn may(&self, end: usize) -> i16 {
        match self.ends[end].reset {
            Reset::No if self.peer_has_ended(end) && self.ends[end].has_ended => {
                self.must(end) | OUT | RDHUP | HUP
            }
            Reset::No if self.peer_has_ended(end) => self.must(end) | OUT | RDHUP,
            Reset::No => self.must(end) | OUT,
            _ => IN | OUT | RDHUP | HUP | ERR,
        }
    }

    /// Marks that something has become true for an end. An edge-triggered watch must report it.
    pub fn edge(&mut self, end: usize, events: i16) {
        self.watches.values_mut().filter(|watch| watch.end == end).for_each(|watch| watch.edges |= events);
    }

    /// An end has sent bytes.
    pub fn sent(&mut self, end: usize, bytes: u64) {
        // Bytes for which the peer's kernel has no room come later.
        let arrives = !self.ends[end].is_stuck;
        self.ends[end].sent += bytes;
        self.ends[end].is_stuck |= self.outstanding(end) > FEW;
        let peer = &mut self.ends[1 - end];
        if peer.is_closed {
            // Bytes for which there is no window are tried again seconds later, and only then the peer's kernel answers.
            let reset = if arrives { Reset::Yes } else { Reset::Perhaps };
            let own = &mut self.ends[end];
            let was_whole = own.reset == Reset::No;
            own.reset = own.reset.max(reset);
            if arrives && was_whole {
                self.edge(end, IN | RDHUP);
            }
        } else if peer.is_deaf && peer.has_ended {
            // The kernel may break a connection if bytes come of which nobody can want to know any more. They may be under way for
            // long, so there need not be an edge.
            peer.reset = peer.reset.max(Reset::Perhaps);
            self.ends[end].reset = self.ends[end].reset.max(Reset::Perhaps);
        } else if arrives {
            self.edge(1 - end, IN);
        }
    }

    /// An end has found no room.
    pub fn found_full(&mut self, end: usize) {
        self.watches.values_mut().filter(|watch| watch.end == end).for_each(|watch| watch.was_full = true);
    }

    /// An end has received bytes.
    pub fn received(&mut self, end: usize, bytes: u64) {
        self.ends[end].received += bytes;
        if bytes > 0 && self.available(end) == 0 {
            self.ends[1 - end].is_stuck = false;
            for watch in self.watches.values_mut().filter(|watch| watch.end == 1 - end) {
                if std::mem::take(&mut watch.was_full) {
                    watch.edges |= OUT;
                }
            }
        }
    }

    /// An end sends no more.
    pub fn ended(&mut self, end: usize) {
        // The peer of a broken connection has been told before.
        if !std::mem::replace(&mut self.ends[end].has_ended, true)
            && !self.ends[end].is_stuck
            && self.ends[1 - end].reset == Reset::No
        {
            self.edge(1 - end, IN | RDHUP);
        }
    }

    /// An end has shut down one direction or both.
    pub fn shut_down(&mut self, end: usize, receiving: bool, sending: bool) {
        self.ends[end].is_deaf |= receiving;
        if sending {
            self.ended(end);
        }
        // Bytes that are still on their way break the connection when they come.
        if self.ends[end].is_deaf && self.ends[end].has_ended && self.available(end) > 0 {
            self.ends.iter_mut().for_each(|end| end.reset = end.reset.max(Reset::Perhaps));
        }
    }

    /// A process closes a descriptor.
    pub fn close(&mut self, process: u32, place: i64) {
        let Some(end) = self.open.remove(&(process, place)) else { return };
        if self.open.values().any(|other| *other == end) {
            return;
        }
        self.watches.retain(|_, watch| watch.end != end);
        let both_ended = self.ends[end].has_ended && self.peer_has_ended(end);
        self.ends[end].is_closed = true;
        if self.available(end) > 0 || self.ends[end].lingers_not {
            // The kernel may have forgotten a connection of which both ends have shut down, and what has not come yet is not unread. If
            // nobody could receive it any more, the connection may be broken already. And a kernel that had no room does not say that it
            // has some again once the program has shut down receiving.
            let is_stuck = self.ends[1 - end].is_stuck;
            let own = &self.ends[end];
            let may_be_over = both_ended || own.is_deaf && (own.has_ended || is_stuck);
            let reset = if may_be_over { Reset::Perhaps } else { Reset::Yes };
            let peer = &mut self.ends[1 - end];
            let was_whole = peer.reset == Reset::No;
            peer.reset = peer.reset.max(reset);
            // If it was broken already, the edge may have been reported, and what is under way breaks it when it comes.
            if was_whole && reset == Reset::Yes && !self.ends[1 - end].is_stuck {
                self.edge(1 - end, IN | RDHUP);
            }
        }
        self.ended(end);
    }

    /// Closes all descriptors of a process.
    pub fn exit(&mut self, process: u32) {
        self.watches.retain(|(owner, _), _| *owner != process);
        let places: Vec<i64> =
            self.open.keys().filter(|(owner, _)| *owner == process).map(|(_, place)| *place).collect();
        places.into_iter().for_each(|place| self.close(process, place));
    }

    /// Returns the events that a watch must report, sooner or later.
    pub fn watch_must(&self, watch: &Watch) -> i16 {
        if watch.is_spent || watch.is_old && watch.is_once {
            return 0;
        }
        let edges = if watch.is_edge_triggered { watch.edges } else { !0 };
        self.must(watch.end) & edges & (watch.interest | HUP | ERR)
    }
}
