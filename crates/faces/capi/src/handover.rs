//! Handing over endpoints and channels.

use crate::boundary::{
    Outcome, checked, invalid, output_handle, return_handle, return_text, share, status, text,
};
use crate::channel::{Channel, unclaimed_channel};
use crate::endpoint::{AttachOptions, Endpoint, attach_options};
use crate::handle_table::Handle;
use ginnel::{ChannelKind, MessageChannel, SavedChannel, StreamChannel, Token};
use libc::c_int;
use std::ffi::c_char;
use std::time::Duration;

/// Keeps an endpoint alive for `time_ns` nanoseconds even if no process owns it, so that the program that this process
/// executes next, or another process, can adopt it. On success the caller must free `*token` with ginnel_string_free();
/// on failure it is NULL. The token is needed for ginnel_adopt(). It is secret, because any process that has it can
/// become the endpoint.
///
/// Blocks until the daemon answers, for at most 10 s. Any thread may call it. Errors: GINNEL_ERR_LIMIT if the time is
/// longer than the daemon allows or there are too many holds; GINNEL_ERR_TIMED_OUT, GINNEL_ERR_NO_DAEMON,
/// GINNEL_ERR_UNRECORDED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_hold(
    endpoint: *const Endpoint,
    time_ns: i64,
    token: *mut *mut c_char,
) -> c_int {
    status(|| {
        let place = checked!(output_handle(token));
        let Endpoint(endpoint) = &*checked!(share(endpoint));
        let time = u64::try_from(time_ns).ok().filter(|&ns| ns > 0);
        let time = time.ok_or_else(|| invalid(format!("time_ns is {time_ns}; a hold takes some time")))?;
        return_text(place, endpoint.hold(Duration::from_nanos(time))?.reveal())
    })
}

/// Ends a hold of this endpoint early. Has no effect if a process has adopted the endpoint with this token.
///
/// Any thread may call it; it does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_release(endpoint: *const Endpoint, token: *const c_char) -> c_int {
    status(|| {
        let Endpoint(endpoint) = &*checked!(share(endpoint));
        endpoint.release(&read(checked!(text(token)), "token")?);
        Ok(())
    })
}

/// Becomes an owner of the endpoint that is held with this token, and ends that hold. `options` are those of
/// ginnel_attach() and may be NULL; their name is ignored. On success the caller must free `*endpoint` with
/// ginnel_detach(); on failure it is NULL.
///
/// Blocks like ginnel_attach(). Any thread may call it. Errors: GINNEL_ERR_STALE if the hold is over or another process
/// was faster, GINNEL_ERR_DENIED if this user is neither the endpoint's user nor allowed to use the segment,
/// GINNEL_ERR_LIMIT, GINNEL_ERR_NO_DAEMON, GINNEL_ERR_BROKEN.
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

/// Stops using a channel and returns its position for ginnel_channel_resume(). On success the channel is freed, and the
/// caller must free `*saved` with ginnel_string_free(); it is not secret. On failure `*saved` is NULL, and the channel
/// is unchanged. The peer notices nothing: what it sends meanwhile waits in the ring. Send or abort a claim before this
/// call; a message or bytes that were peeked at and not released will be received again.
///
/// Counts as an operation in both directions; does not block. Errors: GINNEL_ERR_CLAIMED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_channel_save(channel: *mut Channel, saved: *mut *mut c_char) -> c_int {
    status(|| {
        let place = checked!(output_handle(saved));
        checked!(unclaimed_channel(channel));
        // SAFETY: no other thread uses it, as the head of ginnel.h requires.
        let channel = unsafe { Channel::table().take(channel) }?;
        return_text(place, channel.save()?.to_string())
    })
}

/// Continues a channel of this endpoint at the position where it was saved: no data is lost or received twice. Each
/// saved channel must be resumed only once, by one process. Its settings (timeouts, wait mode, ready set) must be made
/// again. On success the caller must free `*channel` with ginnel_channel_close(); on failure it is NULL.
///
/// Blocks until the daemon answers, for at most 10 s. Any thread may call it. Errors: GINNEL_ERR_NOT_FOUND if the
/// endpoint has no such channel, GINNEL_ERR_CORRUPT if the channel is not at the saved position (it is closed then),
/// GINNEL_ERR_TIMED_OUT, GINNEL_ERR_NO_DAEMON, GINNEL_ERR_READ_ONLY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_channel_resume(
    endpoint: *const Endpoint,
    saved: *const c_char,
    channel: *mut *mut Channel,
) -> c_int {
    status(|| {
        let place = checked!(output_handle(channel));
        let Endpoint(endpoint) = &*checked!(share(endpoint));
        let saved: SavedChannel = read(checked!(text(saved)), "saved")?;
        let resumed = match saved.kind() {
            ChannelKind::STREAM => endpoint.resume::<StreamChannel>(&saved)?.into(),
            _ => endpoint.resume::<MessageChannel>(&saved)?.into(),
        };
        return_handle(place, resumed);
        Ok(())
    })
}

/// Parses a text that the library has made.
fn read<T: std::str::FromStr>(text: &str, name: &str) -> Outcome<T> {
    text.parse().map_err(|_| invalid(format!("{name} is not what the library has made")))
}
