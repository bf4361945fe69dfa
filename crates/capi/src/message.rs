//! Messages.

use crate::boundary::{bytes, checked, length, output, room, status};
use crate::channel::{Channel, receiving, sending, unclaimed, used};
use libc::{c_int, ssize_t};
use std::ffi::c_void;

/// Sends a message of `len` bytes, which may be 0. The bytes are the caller's again when it returns. Messages that are
/// committed go out before it.
///
/// An operation of the sending direction (one thread at a time); blocks while the channel is full. Errors:
/// GINNEL_ERR_WOULD_BLOCK, GINNEL_ERR_TIMED_OUT, GINNEL_ERR_TOO_LONG, GINNEL_ERR_CLAIMED, GINNEL_ERR_AFTER_FINISH,
/// GINNEL_ERR_CLOSED, GINNEL_ERR_PEER_DEAD, GINNEL_ERR_CORRUPT, GINNEL_ERR_BROKEN.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_message_send(
    channel: *mut Channel,
    data: *const c_void,
    len: usize,
) -> c_int {
    status(|| {
        let (sender, claimed) = checked!(sending(channel)).message()?;
        unclaimed(claimed)?;
        Ok(sender.send(checked!(bytes(data, len)))?)
    })
}

/// Claims room for a message of up to `len` bytes, to be written in place: `*data` points to it, aligned to 8 bytes,
/// until it is sent, committed or aborted, or the channel is finished or closed. Nothing is visible to the peer before.
///
/// An operation of the sending direction (one thread at a time); blocks while the channel is full. Errors: those of
/// ginnel_message_send().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_message_claim(
    channel: *mut Channel,
    len: usize,
    data: *mut *mut c_void,
) -> c_int {
    status(|| {
        let place = checked!(output(data));
        let (sender, claimed) = checked!(sending(channel)).message()?;
        unclaimed(claimed)?;
        place.write(sender.claim(len)?.slice().as_ptr().cast());
        *claimed = Some(len);
        Ok(())
    })
}

/// Sends the first `len` bytes of what is claimed, and all that is committed before.
///
/// An operation of the sending direction (one thread at a time); does not block. Errors: GINNEL_ERR_NOT_CLAIMED;
/// GINNEL_ERR_INVALID if `len` is more than was claimed, and the claim stays; GINNEL_ERR_CLOSED, GINNEL_ERR_PEER_DEAD,
/// GINNEL_ERR_CORRUPT or GINNEL_ERR_BROKEN, and the claim is gone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_message_send_claimed(channel: *mut Channel, len: usize) -> c_int {
    status(|| {
        let (sender, claimed) = checked!(sending(channel)).message()?;
        Ok(sender.claim(used(claimed, len)?)?.send(len)?)
    })
}

/// Makes the first `len` bytes of what is claimed a message that goes out with the next ginnel_message_publish(),
/// ginnel_message_send() or ginnel_message_send_claimed(). So a batch costs the peer one look.
///
/// An operation of the sending direction (one thread at a time); does not block. Errors: those of
/// ginnel_message_send_claimed().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_message_commit(channel: *mut Channel, len: usize) -> c_int {
    status(|| {
        let (sender, claimed) = checked!(sending(channel)).message()?;
        sender.claim(used(claimed, len)?)?.commit(len);
        Ok(())
    })
}

/// Lets all committed messages go out at once. A claim that is open stays open.
///
/// An operation of the sending direction (one thread at a time); does not block. Errors: GINNEL_ERR_BROKEN, and the
/// messages are gone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_message_publish(channel: *mut Channel) -> c_int {
    status(|| {
        let (sender, _) = checked!(sending(channel)).message()?;
        Ok(sender.publish()?)
    })
}

/// Gives up what is claimed, if anything; nothing of it is ever seen.
///
/// An operation of the sending direction (one thread at a time); does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_message_abort(channel: *mut Channel) -> c_int {
    status(|| {
        let (_, claimed) = checked!(sending(channel)).message()?;
        *claimed = None;
        Ok(())
    })
}

/// Receives a message into `buffer`, which has room for `len` bytes; returns the message's length, or a negative status.
/// 0 is an empty message; the end is GINNEL_ERR_FINISHED.
///
/// An operation of the receiving direction (one thread at a time); blocks while there is no message. Errors:
/// GINNEL_ERR_WOULD_BLOCK, GINNEL_ERR_TIMED_OUT; GINNEL_ERR_BUFFER_TOO_SMALL, and the message stays;
/// GINNEL_ERR_FINISHED, GINNEL_ERR_PEER_DEAD, GINNEL_ERR_CORRUPT, GINNEL_ERR_BROKEN.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_message_recv(
    channel: *mut Channel,
    buffer: *mut c_void,
    len: usize,
) -> ssize_t {
    length(|| {
        let (receiver, peeked) = checked!(receiving(channel)).message()?;
        let got = receiver.recv_into(checked!(room(buffer, len)))?;
        *peeked = None;
        Ok(got)
    })
}

/// Looks at the next message in place: `*data` points to its `*len` bytes, aligned to 8, until it is released or
/// received, or the channel is closed. Looking again yields the same message. A hostile peer can still change the
/// bytes: copy what must not change before checking it.
///
/// An operation of the receiving direction (one thread at a time); blocks while there is no message. Errors: those of
/// ginnel_message_recv(), but for GINNEL_ERR_BUFFER_TOO_SMALL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_message_peek(
    channel: *mut Channel,
    data: *mut *const c_void,
    len: *mut usize,
) -> c_int {
    status(|| {
        let (data, len) = (checked!(output(data)), checked!(output(len)));
        let (receiver, peeked) = checked!(receiving(channel)).message()?;
        let message = receiver.peek()?;
        data.write(message.slice().as_ptr().cast());
        *peeked = Some(*len.write(message.len()));
        Ok(())
    })
}

/// Ends the look at a message and gives its room back to the peer.
///
/// An operation of the receiving direction (one thread at a time); does not block. Errors: GINNEL_ERR_NOT_CLAIMED
/// without a ginnel_message_peek() before; GINNEL_ERR_BROKEN, and what was read of the message may be zeros.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_message_release(channel: *mut Channel) -> c_int {
    status(|| {
        let (receiver, peeked) = checked!(receiving(channel)).message()?;
        used(peeked, 0)?;
        Ok(receiver.peek()?.release()?)
    })
}
