//! What both kinds of channel have in common.

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

/// A channel of either kind, with two directions that are independent: one thread may send while another receives, but
/// no two may send at once, or receive at once. Made by ginnel_connect(), ginnel_endpoint_connect() or ginnel_accept(),
/// freed by ginnel_channel_close().
pub struct Channel {
    // A cell each, so that two threads can hold one each.
    sending: UnsafeCell<Sending>,
    receiving: UnsafeCell<Receiving>,
    kind: Kind,
    max_message: usize,
    info: ginnel::ChannelInfo,
}
handle!(Channel, "channel");

/// The sending half.
///
/// A C program cannot hold a claim, which borrows the half, so only its length is kept: claiming again yields the same
/// place, for as long as nothing else is sent, and that is refused meanwhile.
pub(crate) struct Sending {
    pub(crate) half: SendingHalf,
    claimed: Option<usize>,
}

pub(crate) enum SendingHalf {
    Message(MessageSender),
    Stream(StreamSender),
}

/// The receiving half. As with claims, peeking again yields the same bytes.
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
    /// Stops using it, and says where it stands.
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

/// Nothing may be claimed of a channel, which one thread uses.
pub(crate) unsafe fn unclaimed_channel(channel: *mut Channel, name: &str) -> Outcome<()> {
    // SAFETY: as the caller says.
    unclaimed(&unsafe { sending(channel, name) }?.claimed)
}

/// The sending half, for this thread alone until the function ends.
pub(crate) unsafe fn sending<'a>(channel: *mut Channel, name: &str) -> Outcome<&'a mut Sending> {
    // SAFETY: null, or a channel that nobody closes meanwhile; its cell is reached by the one thread that sends.
    let channel = unsafe { borrow(channel, name) }?;
    // SAFETY: as above.
    Ok(unsafe { &mut *channel.sending.get() })
}

/// The receiving half, for this thread alone until the function ends.
pub(crate) unsafe fn receiving<'a>(channel: *mut Channel, name: &str) -> Outcome<&'a mut Receiving> {
    // SAFETY: as in `sending`, with the one thread that receives.
    let channel = unsafe { borrow(channel, name) }?;
    // SAFETY: as above.
    Ok(unsafe { &mut *channel.receiving.get() })
}

/// A half, and what is claimed or peeked at in it.
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

/// Nothing may be claimed.
pub(crate) fn unclaimed(claimed: &Option<usize>) -> Outcome<()> {
    if claimed.is_some() { Err(GINNEL_ERR_CLAIMED.into()) } else { Ok(()) }
}

/// Ends a claim (or a look) of which `len` bytes are used; returns how many it had.
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
    /// What this side sends.
    GINNEL_SEND = 1,
    /// What this side receives.
    GINNEL_RECEIVE = 2,
}

const SEND: c_int = Direction::GINNEL_SEND as c_int;
const RECEIVE: c_int = Direction::GINNEL_RECEIVE as c_int;

/// The directions that are meant, of which there is at least one.
pub(crate) fn directions(directions: c_int) -> Outcome<(bool, bool)> {
    if !(SEND..=SEND | RECEIVE).contains(&directions) {
        let detail = format!("{directions} is no direction; use GINNEL_SEND, GINNEL_RECEIVE, or both");
        return Err(invalid(detail));
    }
    Ok((directions & SEND != 0, directions & RECEIVE != 0))
}

/// True to send; for functions of one direction.
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

/// Does the same with the halves of these directions.
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

/// How long operations in these directions may wait, in nanoseconds: 0 means one look, a negative number (the default)
/// for ever. After that they return GINNEL_ERR_TIMED_OUT.
///
/// Counts as an operation in these directions (one thread at a time each); does not block.
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

/// How operations in these directions wait: one of GINNEL_WAIT_*. `budget_ns` is for GINNEL_WAIT_ADAPTIVE: how long to
/// look before sleeping, in nanoseconds; 0 means the default, 100000. Where it is not set it is what was said at
/// ginnel_attach().
///
/// Counts as an operation in these directions (one thread at a time each); does not block.
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

/// Whether operations in these directions return GINNEL_ERR_WOULD_BLOCK instead of waiting; 0 (the default) means no.
///
/// Counts as an operation in these directions (one thread at a time each); does not block.
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

/// A file descriptor for poll(2) and epoll(7), or a negative status. After an operation in this direction has returned
/// GINNEL_ERR_WOULD_BLOCK, it becomes readable (POLLIN, for both directions) when another try is worth it, which may
/// still say GINNEL_ERR_WOULD_BLOCK; it says nothing at other times, so always try first. It belongs to the channel: do
/// not read or close it, nor use it after the channel is closed.
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

/// What one direction of a channel has done so far, on this side.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Counters {
    /// sizeof(ginnel_counters).
    pub size: usize,
    /// Messages, or calls on a stream.
    pub operations: u64,
    /// Bytes of payload.
    pub bytes: u64,
    /// Doorbells rung for the peer.
    pub rings: u64,
    /// Operations that had to wait.
    pub waits: u64,
}
// SAFETY: as the trait asks.
unsafe impl Growing for Counters {}

impl From<RustCounters> for Counters {
    fn from(counters: RustCounters) -> Self {
        let RustCounters { operations, bytes, rings, waits } = counters;
        Self { size: 0, operations, bytes, rings, waits }
    }
}

/// Fills in `*counters`, whose `size` the caller has set, for one direction.
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

/// Facts about a channel, and who is at its other end.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ChannelInfo {
    /// sizeof(ginnel_channel_info).
    pub size: usize,
    /// Number of the channel; never used again in this installation.
    pub id: u64,
    /// Bytes that the ring holds into which this side sends.
    pub capacity: usize,
    /// The longest message, in bytes; 0 for a stream, which has no such limit.
    pub max_message: usize,
    /// GINNEL_MESSAGE or GINNEL_STREAM.
    pub kind: c_int,
    /// Number of the peer's member (host or VM); 0 is the host.
    pub peer_member: u32,
    /// Number of the peer's endpoint.
    pub peer_endpoint: u32,
    /// Epoch of that number.
    pub peer_epoch: u32,
    /// Name of the peer's member.
    pub peer_member_name: [c_char; 64],
    /// What the peer's endpoint calls itself.
    pub peer_name: [c_char; 64],
    /// Bytes that the ring holds from which this side receives.
    pub input_capacity: usize,
}
// SAFETY: as the trait asks.
unsafe impl Growing for ChannelInfo {}

/// Fills in `*info`, whose `size` the caller has set. Any thread; does not block.
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

/// Half-close: says that nothing more comes from this side. The peer receives the rest, then GINNEL_ERR_FINISHED (or 0,
/// the end of its stream). Receiving goes on. An open claim is aborted, messages that are committed go out.
///
/// An operation of the sending direction (one thread at a time); does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_channel_finish(channel: *mut Channel) -> c_int {
    status(|| {
        let sending = checked!(sending(channel));
        sending.claimed = None;
        either!(sending, SendingHalf, half => half.finish());
        Ok(())
    })
}

/// Ends these directions at once, and makes void what is on its way in them: what was sent and is not received yet never is,
/// and the next operation of the peer says GINNEL_ERR_ABORTED. Of this side, the next to receive says so, and the next to send
/// GINNEL_ERR_AFTER_FINISH. Open claims and peeks end.
///
/// Counts as an operation in these directions (one thread at a time each); does not block.
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

/// Closes a channel and frees it: the peer receives what was sent, then the end, and its sends fail with
/// GINNEL_ERR_CLOSED. Pointers from claims and peeks end. NULL is allowed. No other thread may be using the handle. Tells
/// the daemon, for at most a second.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_channel_close(channel: *mut Channel) -> c_int {
    // SAFETY: the caller vouches for it.
    unsafe { close(channel) }
}
