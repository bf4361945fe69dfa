//! The functions that both kinds of channel have in common.

use crate::boundary::{
    Growing, Outcome, borrow, checked, close, fill, invalid, name_array, number, status, timeout,
};
use crate::endpoint::wait_mode;
use crate::handle_table::handle;
use crate::listener::Kind;
use crate::status::Failure;
use crate::status::Status::{
    GINNEL_ERR_CLAIMED, GINNEL_ERR_INTERNAL, GINNEL_ERR_KIND, GINNEL_ERR_NOT_CLAIMED,
};
use ginnel::{
    Counters as RustCounters, MessageChannel, MessageReceiver, MessageSender, SavedChannel, StreamChannel,
    StreamReceiver, StreamSender,
};
use libc::c_int;
use std::cell::UnsafeCell;
use std::ffi::c_char;
use std::os::fd::AsRawFd;

/// A channel of either kind. Its two directions are independent: one thread may send while another receives, but no two
/// threads may send at once or receive at once. Created by ginnel_connect(), ginnel_endpoint_connect() or
/// ginnel_accept(), freed by ginnel_channel_close().
pub struct Channel {
    // One cell for each half, so that two threads can use one half each.
    sending: UnsafeCell<Sending>,
    receiving: UnsafeCell<Receiving>,
    kind: Kind,
    max_message: usize,
    info: ginnel::ChannelInfo,
}
handle!(Channel, "channel");

/// The sending half.
///
/// A guard of the Rust library borrows the half, so a C program cannot hold one. Only the claim's length is kept:
/// claiming again returns the same place as long as nothing else is sent, and sending is refused while a claim is open.
pub(crate) struct Sending {
    pub(crate) half: SendingHalf,
    claimed: Option<usize>,
}

pub(crate) enum SendingHalf {
    Message(MessageSender),
    Stream(StreamSender),
}

/// The receiving half. As with claims, peeking again returns the same bytes.
pub(crate) struct Receiving {
    pub(crate) half: ReceivingHalf,
    peeked: Option<usize>,
}

pub(crate) enum ReceivingHalf {
    Message(MessageReceiver),
    Stream(StreamReceiver),
}

impl From<MessageChannel> for Channel {
    fn from(channel: MessageChannel) -> Self {
        let (max_message, info) = (channel.max_message(), channel.info().clone());
        let (sender, receiver) = channel.split();
        Self::new(
            SendingHalf::Message(sender),
            ReceivingHalf::Message(receiver),
            Kind::GINNEL_MESSAGE,
            max_message,
            info,
        )
    }
}

impl From<StreamChannel> for Channel {
    fn from(channel: StreamChannel) -> Self {
        let info = channel.info().clone();
        let (sender, receiver) = channel.split();
        Self::new(SendingHalf::Stream(sender), ReceivingHalf::Stream(receiver), Kind::GINNEL_STREAM, 0, info)
    }
}

impl Channel {
    fn new(
        sending: SendingHalf,
        receiving: ReceivingHalf,
        kind: Kind,
        max_message: usize,
        info: ginnel::ChannelInfo,
    ) -> Self {
        Self {
            sending: UnsafeCell::new(Sending { half: sending, claimed: None }),
            receiving: UnsafeCell::new(Receiving { half: receiving, peeked: None }),
            kind,
            max_message,
            info,
        }
    }
}

impl Channel {
    /// Stops using the channel and returns its position.
    pub(crate) fn save(self) -> Outcome<SavedChannel> {
        let halves = (self.sending.into_inner().half, self.receiving.into_inner().half);
        let saved = match halves {
            (SendingHalf::Message(sender), ReceivingHalf::Message(receiver)) => {
                MessageChannel::reunite(sender, receiver).ok().map(MessageChannel::save)
            }
            (SendingHalf::Stream(sender), ReceivingHalf::Stream(receiver)) => {
                StreamChannel::reunite(sender, receiver).ok().map(StreamChannel::save)
            }
            _ => None,
        };
        saved.ok_or_else(|| {
            Failure::new(GINNEL_ERR_INTERNAL, "a channel of halves that do not belong together")
        })
    }
}

/// Checks that no claim is open in a channel that only this thread uses.
pub(crate) unsafe fn unclaimed_channel(channel: *mut Channel, name: &str) -> Outcome<()> {
    // SAFETY: null, or a channel that nobody closes meanwhile and that only this thread uses, as the caller guarantees.
    unclaimed(&unsafe { sending(channel, name) }?.claimed)
}

/// Returns the sending half, which only this thread uses until the function ends.
pub(crate) unsafe fn sending<'a>(channel: *mut Channel, name: &str) -> Outcome<&'a mut Sending> {
    // SAFETY: null, or a channel that nobody closes meanwhile. Only the one thread that sends accesses its cell.
    let channel = unsafe { borrow(channel, name) }?;
    // SAFETY: only the one thread that sends accesses this cell, so there is no other reference to its content.
    Ok(unsafe { &mut *channel.sending.get() })
}

/// Returns the receiving half, which only this thread uses until the function ends.
pub(crate) unsafe fn receiving<'a>(channel: *mut Channel, name: &str) -> Outcome<&'a mut Receiving> {
    // SAFETY: null, or a channel that nobody closes meanwhile. Only the one thread that receives accesses its cell.
    let channel = unsafe { borrow(channel, name) }?;
    // SAFETY: only the one thread that receives accesses this cell, so there is no other reference to its content.
    Ok(unsafe { &mut *channel.receiving.get() })
}

/// A half, and the number of bytes that are claimed or peeked at in it.
type Half<'a, H> = (&'a mut H, &'a mut Option<usize>);

fn other_kind(needed: &str) -> Failure {
    Failure::new(GINNEL_ERR_KIND, format!("the channel was not opened with {needed}"))
}

impl Sending {
    pub fn message(&mut self) -> Outcome<Half<'_, MessageSender>> {
        match &mut self.half {
            SendingHalf::Message(half) => Ok((half, &mut self.claimed)),
            SendingHalf::Stream(_) => Err(other_kind("GINNEL_MESSAGE")),
        }
    }

    pub fn stream(&mut self) -> Outcome<Half<'_, StreamSender>> {
        match &mut self.half {
            SendingHalf::Stream(half) => Ok((half, &mut self.claimed)),
            SendingHalf::Message(_) => Err(other_kind("GINNEL_STREAM")),
        }
    }
}

impl Receiving {
    pub fn message(&mut self) -> Outcome<Half<'_, MessageReceiver>> {
        match &mut self.half {
            ReceivingHalf::Message(half) => Ok((half, &mut self.peeked)),
            ReceivingHalf::Stream(_) => Err(other_kind("GINNEL_MESSAGE")),
        }
    }

    pub fn stream(&mut self) -> Outcome<Half<'_, StreamReceiver>> {
        match &mut self.half {
            ReceivingHalf::Stream(half) => Ok((half, &mut self.peeked)),
            ReceivingHalf::Message(_) => Err(other_kind("GINNEL_STREAM")),
        }
    }
}

/// Checks that no claim is open.
pub(crate) fn unclaimed(claimed: &Option<usize>) -> Outcome<()> {
    if claimed.is_some() { Err(GINNEL_ERR_CLAIMED.into()) } else { Ok(()) }
}

/// Ends a claim or a peek of which `len` bytes are used; returns the number of bytes that it had.
pub(crate) fn used(claimed: &mut Option<usize>, len: usize) -> Outcome<usize> {
    let most = claimed.ok_or(GINNEL_ERR_NOT_CLAIMED)?;
    if len > most {
        return Err(invalid(format!("len is {len}, and {most} bytes are claimed or peeked at")));
    }
    *claimed = None;
    Ok(most)
}

/// A direction of a channel, seen from this side. Some functions take both at once: GINNEL_SEND | GINNEL_RECEIVE.
#[repr(C)]
#[allow(non_camel_case_types)] // The names are C's.
pub enum Direction {
    /// The direction in which this side sends.
    GINNEL_SEND = 1,
    /// The direction in which this side receives.
    GINNEL_RECEIVE = 2,
}

const SEND: c_int = Direction::GINNEL_SEND as c_int;
const RECEIVE: c_int = Direction::GINNEL_RECEIVE as c_int;

/// Returns whether the sending and the receiving direction are meant, of which there is at least one.
pub(crate) fn directions(directions: c_int) -> Outcome<(bool, bool)> {
    if !(SEND..=SEND | RECEIVE).contains(&directions) {
        let detail = format!("{directions} is not a direction; use GINNEL_SEND, GINNEL_RECEIVE, or both");
        return Err(invalid(detail));
    }
    Ok((directions & SEND != 0, directions & RECEIVE != 0))
}

/// Returns whether the sending direction is meant, for functions of one direction.
fn sends(direction: c_int) -> Outcome<bool> {
    match directions(direction)? {
        (true, true) => Err(invalid("one direction at a time: GINNEL_SEND or GINNEL_RECEIVE")),
        (sends, _) => Ok(sends),
    }
}

/// Does the same with a half of either kind.
macro_rules! either {
    ($half:expr, $kinds:ident, $name:ident => $body:expr) => {
        match &mut $half.half {
            $kinds::Message($name) => $body,
            $kinds::Stream($name) => $body,
        }
    };
}

/// Does the same with the halves of the given directions.
macro_rules! either_half {
    ($channel:ident, $send:expr, $receive:expr, $name:ident => $body:expr) => {
        if $send {
            match &mut $crate::boundary::checked!(sending($channel)).half {
                SendingHalf::Message($name) => $body,
                SendingHalf::Stream($name) => $body,
            }
        }
        if $receive {
            match &mut $crate::boundary::checked!(receiving($channel)).half {
                ReceivingHalf::Message($name) => $body,
                ReceivingHalf::Stream($name) => $body,
            }
        }
    };
}
pub(crate) use either_half;

/// Sets how long each operation in these directions may wait, in nanoseconds: 0 means that it checks once, a negative
/// number (the default) that it waits for ever. After that it returns GINNEL_ERR_TIMED_OUT.
///
/// Counts as an operation in these directions (one thread at a time in each); does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_channel_set_timeout(
    channel: *mut Channel,
    directions: c_int,
    timeout_ns: i64,
) -> c_int {
    status(|| {
        let (send, receive) = self::directions(directions)?;
        either_half!(channel, send, receive, half => half.set_timeout(timeout(timeout_ns)));
        Ok(())
    })
}

/// Sets how operations in these directions wait: one of GINNEL_WAIT_*. `budget_ns` is for GINNEL_WAIT_ADAPTIVE: how
/// long to spin before sleeping, in nanoseconds; 0 means the default, 100000. A channel that is not set uses the mode
/// that was given to ginnel_attach().
///
/// Counts as an operation in these directions (one thread at a time in each); does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_channel_set_wait(
    channel: *mut Channel,
    directions: c_int,
    wait: c_int,
    budget_ns: u64,
) -> c_int {
    status(|| {
        let (send, receive) = self::directions(directions)?;
        let mode = wait_mode(wait, budget_ns)?;
        either_half!(channel, send, receive, half => half.set_mode(mode));
        Ok(())
    })
}

/// Sets whether operations in these directions return GINNEL_ERR_WOULD_BLOCK instead of waiting; 0 (the default) means
/// that they wait.
///
/// Counts as an operation in these directions (one thread at a time in each); does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_channel_set_nonblocking(
    channel: *mut Channel,
    directions: c_int,
    nonblocking: c_int,
) -> c_int {
    status(|| {
        let (send, receive) = self::directions(directions)?;
        either_half!(channel, send, receive, half => half.set_nonblocking(nonblocking != 0));
        Ok(())
    })
}

/// Returns a file descriptor for poll(2) and epoll(7), or a negative status. After an operation in this direction has
/// returned GINNEL_ERR_WOULD_BLOCK, the descriptor becomes readable (POLLIN, for both directions) when another attempt
/// is worthwhile; that attempt may still return GINNEL_ERR_WOULD_BLOCK. At other times the descriptor has no meaning,
/// so always try first. It belongs to the channel: do not read or close it, and do not use it after the channel is
/// closed.
///
/// Counts as an operation in this direction (one thread at a time); does not block. Errors: GINNEL_ERR_UNSUPPORTED in a
/// VM without interrupts.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_channel_fd(channel: *mut Channel, direction: c_int) -> c_int {
    number(|| {
        Ok(if sends(direction)? {
            either!(checked!(sending(channel)), SendingHalf, half => half.poll_fd()?.as_raw_fd())
        } else {
            either!(checked!(receiving(channel)), ReceivingHalf, half => half.poll_fd()?.as_raw_fd())
        })
    })
}

/// Counters of one direction of a channel, on this side, since the channel was opened.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Counters {
    /// sizeof(ginnel_counters).
    pub size: usize,
    /// Number of messages, or of calls on a stream.
    pub operations: u64,
    /// Number of payload bytes.
    pub bytes: u64,
    /// Number of times that the peer's doorbell was rung.
    pub rings: u64,
    /// Number of operations that had to wait.
    pub waits: u64,
}
// SAFETY: the structure is as the trait requires.
unsafe impl Growing for Counters {}

impl From<RustCounters> for Counters {
    fn from(counters: RustCounters) -> Self {
        let RustCounters { operations, bytes, rings, waits } = counters;
        Self { size: 0, operations, bytes, rings, waits }
    }
}

/// Fills in `*counters`, whose `size` the caller has set, with the counters of one direction.
///
/// Counts as an operation in this direction (one thread at a time); does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_channel_get_counters(
    channel: *mut Channel,
    direction: c_int,
    counters: *mut Counters,
) -> c_int {
    status(|| {
        let counted = if sends(direction)? {
            either!(checked!(sending(channel)), SendingHalf, half => half.counters())
        } else {
            either!(checked!(receiving(channel)), ReceivingHalf, half => half.counters())
        };
        checked!(fill(counters, counted.into()));
        Ok(())
    })
}

/// Properties of a channel and of its peer.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ChannelInfo {
    /// sizeof(ginnel_channel_info).
    pub size: usize,
    /// Number of the channel, which is never reused in this installation.
    pub id: u64,
    /// Size in bytes of the ring into which this side sends.
    pub capacity: usize,
    /// The longest message, in bytes; 0 for a stream, which has no such limit.
    pub max_message: usize,
    /// GINNEL_MESSAGE or GINNEL_STREAM.
    pub kind: c_int,
    /// Number of the peer's member (host or VM); 0 is the host.
    pub peer_member: u32,
    /// Number of the peer's endpoint.
    pub peer_endpoint: u32,
    /// Epoch of that number: see ginnel_endpoint_info.
    pub peer_epoch: u32,
    /// Name of the peer's member.
    pub peer_member_name: [c_char; 64],
    /// Name that the peer's endpoint has chosen for itself.
    pub peer_name: [c_char; 64],
    /// Size in bytes of the ring from which this side receives.
    pub input_capacity: usize,
}
// SAFETY: the structure is as the trait requires.
unsafe impl Growing for ChannelInfo {}

/// Fills in `*info`, whose `size` the caller has set. Any thread may call it; it does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_channel_get_info(channel: *const Channel, info: *mut ChannelInfo) -> c_int {
    status(|| {
        let Channel { info: known, kind, max_message, .. } = checked!(borrow(channel));
        let facts = ChannelInfo {
            size: 0,
            id: known.id,
            capacity: known.capacity,
            max_message: *max_message,
            kind: *kind as c_int,
            peer_member: known.peer.member,
            peer_endpoint: known.peer.endpoint,
            peer_epoch: known.peer.epoch,
            peer_member_name: name_array(&known.peer.member_name),
            peer_name: name_array(&known.peer.name),
            input_capacity: known.input_capacity,
        };
        checked!(fill(info, facts));
        Ok(())
    })
}

/// Closes the sending direction. The peer receives everything that was sent, and then GINNEL_ERR_FINISHED (for a
/// stream, 0 bytes). This side can continue to receive. An open claim is aborted; committed messages are sent.
///
/// Counts as an operation in the sending direction (one thread at a time); does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_channel_finish(channel: *mut Channel) -> c_int {
    status(|| {
        let sending = checked!(sending(channel));
        sending.claimed = None;
        either!(sending, SendingHalf, half => half.finish());
        Ok(())
    })
}

/// Ends these directions at once and discards the data in them: what was sent and not received is lost, and the peer's
/// next operation returns GINNEL_ERR_ABORTED. On this side, the next receive returns that too, and the next send
/// returns GINNEL_ERR_AFTER_FINISH. Open claims and peeks end.
///
/// Counts as an operation in these directions (one thread at a time in each); does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_channel_abort(channel: *mut Channel, directions: c_int) -> c_int {
    status(|| {
        let (send, receive) = self::directions(directions)?;
        if send {
            checked!(sending(channel)).claimed = None;
        }
        if receive {
            checked!(receiving(channel)).peeked = None;
        }
        either_half!(channel, send, receive, half => half.abort());
        Ok(())
    })
}

/// Closes and frees a channel. The peer receives everything that was sent and then the end, and its sends fail with
/// GINNEL_ERR_CLOSED. Pointers from claims and peeks become invalid. NULL is allowed. No other thread may be using the
/// handle. Informs the daemon, which takes at most a second.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_channel_close(channel: *mut Channel) -> c_int {
    // SAFETY: the caller is responsible for it.
    unsafe { close(channel) }
}
