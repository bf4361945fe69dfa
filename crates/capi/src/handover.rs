//! Handing endpoints and channels over.

use crate::boundary::{
    Outcome, borrow, checked, invalid, output_handle, return_handle, return_text, status, text,
};
use crate::channel::{Channel, unclaimed_channel};
use crate::endpoint::{AttachOptions, Endpoint, attach_options};
use crate::handle_table::Handle;
use ginnel::{ChannelKind, MessageChannel, SavedChannel, StreamChannel, Token};
use libc::c_int;
use std::ffi::c_char;
use std::time::Duration;

/// Has an endpoint live for `time_ns` even if no process owns it, so that the program which this process executes next, or
/// another process, can adopt it. On success `*token`, which it needs for ginnel_adopt(), is the caller's, to be freed with
/// ginnel_string_free(); on failure it is NULL. The token is a secret: whoever has it can be the endpoint.
///
/// Blocks for the daemon's answer, up to 10 s. Any thread. Errors: GINNEL_ERR_LIMIT if the time is longer than the daemon
/// allows, or there are too many holds; GINNEL_ERR_TIMED_OUT, GINNEL_ERR_NO_DAEMON, GINNEL_ERR_UNRECORDED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_hold(
    endpoint: *const Endpoint,
    time_ns: i64,
    token: *mut *mut c_char,
) -> c_int {
    status(|| {
        let place = checked!(output_handle(token));
        let Endpoint(endpoint) = checked!(borrow(endpoint));
        let time = u64::try_from(time_ns).ok().filter(|&ns| ns > 0);
        let time = time.ok_or_else(|| invalid(format!("time_ns is {time_ns}; a hold takes some time")))?;
        return_text(place, endpoint.hold(Duration::from_nanos(time))?.reveal())
    })
}

/// Ends a hold of this endpoint before its time. Without effect if somebody has adopted the endpoint with this token.
///
/// Any thread; does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_release(endpoint: *const Endpoint, token: *const c_char) -> c_int {
    status(|| {
        let Endpoint(endpoint) = checked!(borrow(endpoint));
        endpoint.release(&read(checked!(text(token)), "token")?);
        Ok(())
    })
}

/// Becomes an owner of the endpoint that is held with this token, and ends that hold. `options` are those of ginnel_attach(),
/// and may be NULL; their name is of no importance. On success `*endpoint` is the caller's, to be freed with ginnel_detach();
/// on failure it is NULL.
///
/// Blocks as ginnel_attach() does. Any thread. Errors: GINNEL_ERR_STALE if the hold is over or another process was faster,
/// GINNEL_ERR_DENIED if this user is neither that of the endpoint nor one who may use the segment, GINNEL_ERR_LIMIT,
/// GINNEL_ERR_NO_DAEMON, GINNEL_ERR_BROKEN.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_adopt(
    token: *const c_char,
    options: *const AttachOptions,
    endpoint: *mut *mut Endpoint,
) -> c_int {
    status(|| {
        let place = checked!(output_handle(endpoint));
        let token: Token = read(checked!(text(token)), "token")?;
        let options = checked!(attach_options(options));
        return_handle(place, Endpoint(ginnel::Endpoint::adopt_with(&token, &options)?));
        Ok(())
    })
}

/// Stops using a channel and says where it stands, for ginnel_channel_resume(). On success the channel is freed, and `*saved` is
/// the caller's, to be freed with ginnel_string_free(); it is no secret. On failure it is NULL, and the channel is as before. The
/// peer notices nothing: what it sends meanwhile waits in the ring. What is claimed must be sent or given up before; what is peeked at
/// and not released comes again.
///
/// Counts as an operation in both directions; does not block. Errors: GINNEL_ERR_CLAIMED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_channel_save(channel: *mut Channel, saved: *mut *mut c_char) -> c_int {
    status(|| {
        let place = checked!(output_handle(saved));
        checked!(unclaimed_channel(channel));
        // SAFETY: `give` has made it, and nobody uses it, as said on top of ginnel.h.
        let channel = unsafe { Channel::table().remove(channel) }?;
        return_text(place, channel.save()?.to_string())
    })
}

/// Goes on with a channel of this endpoint where it was saved: nothing that was on its way is lost, or comes twice. Each saved
/// channel is resumed once, by one process. What was set of it (timeouts, how it waits, a ready set) is to be set again. On
/// success `*channel` is the caller's, to be freed with ginnel_channel_close(); on failure it is NULL.
///
/// Blocks for the daemon's answer, up to 10 s. Any thread. Errors: GINNEL_ERR_NOT_FOUND if the endpoint has no such channel,
/// GINNEL_ERR_CORRUPT if it does not stand where it was saved (it is closed then), GINNEL_ERR_TIMED_OUT, GINNEL_ERR_NO_DAEMON,
/// GINNEL_ERR_READ_ONLY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_channel_resume(
    endpoint: *const Endpoint,
    saved: *const c_char,
    channel: *mut *mut Channel,
) -> c_int {
    status(|| {
        let place = checked!(output_handle(channel));
        let Endpoint(endpoint) = checked!(borrow(endpoint));
        let saved: SavedChannel = read(checked!(text(saved)), "saved")?;
        let resumed = match saved.kind() {
            ChannelKind::STREAM => endpoint.resume::<StreamChannel>(&saved)?.into(),
            _ => endpoint.resume::<MessageChannel>(&saved)?.into(),
        };
        return_handle(place, resumed);
        Ok(())
    })
}

/// A text that the library has made.
fn read<T: std::str::FromStr>(text: &str, name: &str) -> Outcome<T> {
    text.parse().map_err(|_| invalid(format!("{name} is not what the library has made")))
}
