//! Messages.

use crate::boundary::{bytes, checked, length, output, room, status};
use crate::channel::{Channel, receiving, sending, unclaimed, used};
use libc::{c_int, ssize_t};
use std::ffi::c_void;

/// Sends a message of `len` bytes, which may be 0. The library does not use `data` after the return. Committed messages
/// are sent before it.
///
/// Counts as an operation in the sending direction (one thread at a time); blocks while the channel is full. Errors:
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

/// Claims room for a message of up to `len` bytes, to be written in place. `*data` points to the room, aligned to 8
/// bytes, until it is sent, committed or aborted, or the channel is finished or closed. Nothing is visible to the peer
/// before.
///
/// Counts as an operation in the sending direction (one thread at a time); blocks while the channel is full. Errors:
/// those of ginnel_message_send().
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

/// Sends the first `len` bytes of the claimed room as a message, after all messages that were committed before.
///
/// Counts as an operation in the sending direction (one thread at a time); does not block. Errors:
/// GINNEL_ERR_NOT_CLAIMED; GINNEL_ERR_INVALID if `len` is more than was claimed, after which the claim stays;
/// GINNEL_ERR_CLOSED, GINNEL_ERR_PEER_DEAD, GINNEL_ERR_CORRUPT or GINNEL_ERR_BROKEN, after which the claim is gone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_message_send_claimed(channel: *mut Channel, len: usize) -> c_int {
    status(|| {
        let (sender, claimed) = checked!(sending(channel)).message()?;
        Ok(sender.claim(used(claimed, len)?)?.send(len)?)
    })
}

/// Commits the first `len` bytes of the claimed room as a message, which becomes visible with the next
/// ginnel_message_publish(), ginnel_message_send() or ginnel_message_send_claimed(). So the peer looks only once for a
/// batch of messages.
///
/// Counts as an operation in the sending direction (one thread at a time); does not block. Errors: those of
/// ginnel_message_send_claimed().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_message_commit(channel: *mut Channel, len: usize) -> c_int {
    status(|| {
        let (sender, claimed) = checked!(sending(channel)).message()?;
        sender.claim(used(claimed, len)?)?.commit(len);
        Ok(())
    })
}

/// Makes all committed messages visible to the peer at once. An open claim stays open.
///
/// Counts as an operation in the sending direction (one thread at a time); does not block. Errors: GINNEL_ERR_BROKEN,
/// after which the messages are gone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_message_publish(channel: *mut Channel) -> c_int {
    status(|| {
        let (sender, _) = checked!(sending(channel)).message()?;
        Ok(sender.publish()?)
    })
}

/// Gives up the claimed room, if there is any. The peer never sees anything of it.
///
/// Counts as an operation in the sending direction (one thread at a time); does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_message_abort(channel: *mut Channel) -> c_int {
    status(|| {
        let (_, claimed) = checked!(sending(channel)).message()?;
        *claimed = None;
        Ok(())
    })
}

/// Receives a message into `buffer`, which has room for `len` bytes. Returns the length of the message, which may be 0,
/// or a negative status. The end of the channel is GINNEL_ERR_FINISHED.
///
/// Counts as an operation in the receiving direction (one thread at a time); blocks while there is no message. Errors:
/// GINNEL_ERR_WOULD_BLOCK, GINNEL_ERR_TIMED_OUT; GINNEL_ERR_BUFFER_TOO_SMALL, after which the message stays;
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

/// Peeks at the next message in place. `*data` points to its `*len` bytes, aligned to 8, until the message is released
/// or received, or the channel is closed. Peeking again returns the same message. A hostile peer can still change the
/// bytes, so copy data that must not change between a check and its use.
///
/// Counts as an operation in the receiving direction (one thread at a time); blocks while there is no message. Errors:
/// those of ginnel_message_recv(), except GINNEL_ERR_BUFFER_TOO_SMALL.
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

/// Ends the peek at a message and gives its room back to the peer.
///
/// Counts as an operation in the receiving direction (one thread at a time); does not block. Errors:
/// GINNEL_ERR_NOT_CLAIMED without an earlier ginnel_message_peek(); GINNEL_ERR_BROKEN, in which case the bytes that
/// were read may have been zeros.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_message_release(channel: *mut Channel) -> c_int {
    status(|| {
        let (receiver, peeked) = checked!(receiving(channel)).message()?;
        used(peeked, 0)?;
        Ok(receiver.peek()?.release()?)
    })
}
