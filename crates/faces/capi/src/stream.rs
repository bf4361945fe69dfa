//! Streams of bytes.

use crate::boundary::{bytes, checked, length, output, room, status};
use crate::channel::{Channel, receiving, sending, unclaimed, used};
use libc::{c_int, ssize_t};
use std::ffi::c_void;

/// Sends a part of `len` bytes. Returns how many bytes were sent, at least one unless `len` is 0, or a negative status.
///
/// Counts as an operation in the sending direction (one thread at a time); blocks while the channel is full. Errors:
/// GINNEL_ERR_WOULD_BLOCK, GINNEL_ERR_TIMED_OUT, GINNEL_ERR_CLAIMED, GINNEL_ERR_AFTER_FINISH, GINNEL_ERR_CLOSED,
/// GINNEL_ERR_PEER_DEAD, GINNEL_ERR_CORRUPT, GINNEL_ERR_BROKEN.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_stream_send(
    channel: *mut Channel,
    data: *const c_void,
    len: usize,
) -> ssize_t {
    length(|| {
        let (sender, claimed) = checked!(sending(channel)).stream()?;
        unclaimed(claimed)?;
        Ok(sender.send(checked!(bytes(data, len)))?)
    })
}

/// Sends all of `len` bytes. The timeout limits the whole call. After an error it is unknown how many bytes have been
/// sent, so non-blocking programs should use ginnel_stream_send().
///
/// Counts as an operation in the sending direction (one thread at a time); blocks until all bytes are sent. Errors:
/// those of ginnel_stream_send().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_stream_send_all(
    channel: *mut Channel,
    data: *const c_void,
    len: usize,
) -> c_int {
    status(|| {
        let (sender, claimed) = checked!(sending(channel)).stream()?;
        unclaimed(claimed)?;
        Ok(sender.send_all(checked!(bytes(data, len)))?)
    })
}

/// Claims room for at most `most` contiguous bytes of the stream, to be written in place. `*data` points to `*len`
/// bytes (at least one, unless `most` is 0) until they are sent or aborted, or the channel is finished or closed.
///
/// Counts as an operation in the sending direction (one thread at a time); blocks while the channel is full. Errors:
/// those of ginnel_stream_send().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_stream_claim(
    channel: *mut Channel,
    most: usize,
    data: *mut *mut c_void,
    len: *mut usize,
) -> c_int {
    status(|| {
        let (data, len) = (checked!(output(data)), checked!(output(len)));
        let (sender, claimed) = checked!(sending(channel)).stream()?;
        unclaimed(claimed)?;
        let claim = sender.claim(most)?;
        let slice = claim.slice();
        data.write(slice.as_ptr().cast());
        *claimed = Some(*len.write(slice.len()));
        Ok(())
    })
}

/// Sends the first `len` bytes of the claimed room.
///
/// Counts as an operation in the sending direction (one thread at a time); does not block. Errors:
/// GINNEL_ERR_NOT_CLAIMED; GINNEL_ERR_INVALID if `len` is more than was claimed, after which the claim stays;
/// GINNEL_ERR_CLOSED, GINNEL_ERR_PEER_DEAD, GINNEL_ERR_CORRUPT or GINNEL_ERR_BROKEN, after which the claim is gone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_stream_send_claimed(channel: *mut Channel, len: usize) -> c_int {
    status(|| {
        let (sender, claimed) = checked!(sending(channel)).stream()?;
        Ok(sender.claim(used(claimed, len)?)?.send(len)?)
    })
}

/// Gives up the claimed room, if there is any. The peer never sees anything of it.
///
/// Counts as an operation in the sending direction (one thread at a time); does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_stream_abort(channel: *mut Channel) -> c_int {
    status(|| {
        let (_, claimed) = checked!(sending(channel)).stream()?;
        *claimed = None;
        Ok(())
    })
}

/// Receives the available bytes into `buffer`, which has room for `len` bytes. Returns how many bytes were received, 0
/// at the end of the stream (or if `len` is 0), or a negative status.
///
/// Counts as an operation in the receiving direction (one thread at a time); blocks while there are no bytes. Errors:
/// GINNEL_ERR_WOULD_BLOCK, GINNEL_ERR_TIMED_OUT, GINNEL_ERR_PEER_DEAD, GINNEL_ERR_CORRUPT, GINNEL_ERR_BROKEN.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_stream_recv(
    channel: *mut Channel,
    buffer: *mut c_void,
    len: usize,
) -> ssize_t {
    length(|| {
        let (receiver, peeked) = checked!(receiving(channel)).stream()?;
        let got = receiver.recv(checked!(room(buffer, len)))?;
        *peeked = None;
        Ok(got)
    })
}

/// Peeks at the available bytes in place, as one contiguous run. `*data` points to `*len` bytes (at least one) until
/// they are released or received, or the channel is closed. Peeking again returns the same bytes, perhaps followed by
/// more. A hostile peer can still change the bytes, so copy data that must not change between a check and its use.
///
/// Counts as an operation in the receiving direction (one thread at a time); blocks while there are no bytes. Errors:
/// those of ginnel_stream_recv(), and GINNEL_ERR_FINISHED at the end of the stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_stream_peek(
    channel: *mut Channel,
    data: *mut *const c_void,
    len: *mut usize,
) -> c_int {
    status(|| {
        let (data, len) = (checked!(output(data)), checked!(output(len)));
        let (receiver, peeked) = checked!(receiving(channel)).stream()?;
        let run = receiver.peek()?;
        data.write(run.slice().as_ptr().cast());
        *peeked = Some(*len.write(run.len()));
        Ok(())
    })
}

/// Ends the peek at the first `len` bytes and gives their room back to the peer; the rest stays for the next peek.
///
/// Counts as an operation in the receiving direction (one thread at a time); does not block. Errors:
/// GINNEL_ERR_NOT_CLAIMED without an earlier ginnel_stream_peek(); GINNEL_ERR_INVALID if `len` is more than was peeked
/// at, after which the peek stays; GINNEL_ERR_BROKEN, in which case the bytes that were read may have been zeros.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_stream_release(channel: *mut Channel, len: usize) -> c_int {
    status(|| {
        let (receiver, peeked) = checked!(receiving(channel)).stream()?;
        used(peeked, len)?;
        Ok(receiver.peek()?.release(len)?)
    })
}
