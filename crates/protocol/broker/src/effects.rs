//! What the broker is told, and what it wants to be done: connections, effects, and facts from outside.

use crate::objects::sync::SyncUser;
use crate::process::{Image, Process};
use crate::record::Record;
use crate::text::Hex16;
use ginnel_layout::channel::Capacities;
use ginnel_layout::ring::SideState;
use ginnel_layout::sync::SyncKind;
use ginnel_layout::{HOST_MEMBER, Name, wire};
use ginnel_sync::authority::Left;
use std::time::Duration;

/// A connection to the attach socket, or one that a guest's daemon relays. Numbers are never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(pub u64);

/// The program at the other end of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Who {
    /// The member in which the program runs.
    pub member: u32,
    /// The program's process, as its member numbers it.
    pub process: Process,
    /// The program that the process ran when it connected. `None` if that is not known, or if it is not on the host.
    pub image: Option<Image>,
    /// The user number.
    pub uid: u32,
    /// The group numbers.
    pub groups: Vec<u32>,
}

impl Who {
    /// Returns whether the program runs in a VM. There doorbells are registers, and file descriptors cannot be sent to it from
    /// here.
    pub fn is_relayed(&self) -> bool {
        self.member != HOST_MEMBER
    }
}

/// A descriptor to send along with a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FdRef {
    /// A segment's file.
    Memory(Name),
    /// A segment's file, open for reading only.
    ReadOnlyMemory(Name),
    /// The eventfd of a member's vector: member, then vector.
    Event(u32, u32),
}

/// An action that the server must perform.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Make a block ready for a channel by zeroing the headers of its rings.
    Zero {
        /// The segment's name.
        segment: Name,
        /// The offset of the block in the segment.
        offset: u64,
        /// The data bytes of the rings.
        capacities: Capacities,
    },
    /// Write the state of a side into a ring.
    Mark {
        /// The segment's name.
        segment: Name,
        /// The offset of the word in the segment.
        at: u64,
        /// The state to write.
        state: SideState,
    },
    /// Make a page a synchronisation object: zero it and write the daemon's fields in front.
    NewSync {
        /// The segment's name.
        segment: Name,
        /// The offset of the page in the segment.
        offset: u64,
        /// The kind of object.
        kind: SyncKind,
        /// The most permits of a semaphore, or the parties of a barrier.
        limit: u32,
        /// The permits of a semaphore at first.
        initial: u32,
    },
    /// Write into a synchronisation object who has a slot.
    Seat {
        /// The segment's name.
        segment: Name,
        /// The offset of the page in the segment.
        offset: u64,
        /// The user of the slot.
        user: SyncUser,
        /// The epoch of the user's endpoint.
        endpoint_epoch: u32,
        /// The user's doorbell: member << 16 | vector.
        bell: u32,
    },
    /// Take back a slot of a synchronisation object, and ring the users that must continue because of it.
    Reclaim {
        /// The number of the object.
        object: u64,
        /// The segment's name.
        segment: Name,
        /// The offset of the page in the segment.
        offset: u64,
        /// The kind of object.
        kind: SyncKind,
        /// The slot.
        slot: u32,
        /// The way in which the user left.
        left: Left,
    },
    /// Ring a doorbell.
    Ring {
        /// The member that has the doorbell.
        member: u32,
        /// The vector.
        vector: u32,
    },
    /// Write a record into the journal. The books have applied it already.
    Record(Box<Record>),
    /// Send a packet.
    Send {
        /// The receiver.
        client: ClientId,
        /// The packet, with its header.
        packet: Vec<u8>,
        /// The descriptors to send along, for a client on the host.
        fds: Vec<FdRef>,
    },
    /// Make a page of a segment a readiness board.
    NewBoard {
        /// The segment's name.
        segment: Name,
        /// The offset of the page in the segment.
        offset: u64,
    },
    /// Wake all who sleep at a readiness board.
    PostAll {
        /// The segment's name.
        segment: Name,
        /// The offset of the board in the segment.
        offset: u64,
    },
    /// Wake the sides of two rings whose peer has ended, through the boards at which they sleep, if they do.
    Post {
        /// The segment's name.
        segment: Name,
        /// The offsets of the sides' wake words in the segment.
        words: [u64; 2],
        /// The offsets of the boards of their endpoint.
        boards: Vec<u64>,
    },
    /// End a connection after everything has been sent that was queued for it.
    Disconnect(ClientId),
    /// Watch an owner of an endpoint on the host. Report its end with [`Broker::owner_ended`](crate::broker::Broker::owner_ended), or
    /// report with [`Broker::owner_unwatched`](crate::broker::Broker::owner_unwatched) that it cannot be watched.
    Watch {
        /// The number of the endpoint.
        endpoint: u32,
        /// The epoch of the endpoint.
        epoch: u32,
        /// The owner.
        process: Process,
    },
    /// Stop watching an owner.
    Unwatch {
        /// The number of the endpoint.
        endpoint: u32,
        /// The epoch of the endpoint.
        epoch: u32,
        /// The owner.
        process: Process,
    },
    /// Start the timer of a hold, and report its end with [`Broker::hold_over`](crate::broker::Broker::hold_over).
    TimeHold {
        /// The number of the endpoint.
        endpoint: u32,
        /// The epoch of the endpoint.
        epoch: u32,
        /// The token of the hold.
        token: Hex16,
        /// The duration in milliseconds.
        millis: u32,
    },
    /// Stop the timer of a hold, because the hold has ended.
    ForgetHold {
        /// The number of the endpoint.
        endpoint: u32,
        /// The token of the hold.
        token: Hex16,
    },
    /// Find out whether a process still runs this program. If it does not, report that with
    /// [`Broker::owner_ended`](crate::broker::Broker::owner_ended).
    Examine {
        /// The number of the endpoint.
        endpoint: u32,
        /// The epoch of the endpoint.
        epoch: u32,
        /// The owner.
        process: Process,
        /// The program that the owner ran when it attached.
        image: Image,
    },
    /// Accept whatever program a process runs now: it owns the endpoint, so the result of an [`Effect::Examine`] does not matter
    /// any more.
    Recognize {
        /// The number of the endpoint.
        endpoint: u32,
        /// The owner.
        process: Process,
    },
    /// Answer with a page of the daemon's state.
    Inspect {
        /// The client that asks.
        client: ClientId,
        /// The number of the request.
        request: u32,
        /// The position at which the previous page ended.
        from: wire::Inspect,
    },
    /// Perform an administrator's request, and answer it.
    Admin {
        /// The client that asks.
        client: ClientId,
        /// The number of the request.
        request: u32,
        /// The request in JSON.
        text: String,
    },
}

/// The records that the journal accepts at present.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recording {
    /// All records.
    #[default]
    Open,
    /// Only records that do not give a client anything ([`Record::gives`]).
    Closed,
    /// The same as `Closed`. In addition, the books contain something that was given to a client and is not in the journal.
    /// No client may learn of it, even if it repeats its request.
    Owing,
}

/// The facts from outside that the broker needs for its decisions.
pub trait World {
    /// Returns whether a segment's memory is lost.
    fn is_broken(&mut self, segment: &Name) -> bool;
    /// Returns why a segment could not be opened, if it could not.
    fn why_broken(&self, _segment: &Name) -> Option<String> {
        None
    }
    /// Returns sixteen bytes that nobody can guess.
    fn random(&mut self) -> [u8; 16];
    /// Returns the time in seconds since 1970.
    fn now(&mut self) -> u64;
    /// Returns the time that has passed since a moment which does not change.
    fn elapsed(&self) -> Duration;
}
