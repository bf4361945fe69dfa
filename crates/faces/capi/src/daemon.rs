//! The daemon's state.

use crate::boundary::{Outcome, checked, output_handle, return_text, status, text};
use ginnel::Daemon;
use libc::c_int;
use std::ffi::{CString, c_char};
use std::path::Path;

/// Asks the daemon whose socket is given, or the default daemon if that is null.
pub(crate) unsafe fn inspect(socket: *const c_char, name: &str) -> Outcome<String> {
    let mut daemon = if socket.is_null() {
        Daemon::connect()?
    } else {
        // SAFETY: not null, and a C string, as the caller says.
        Daemon::connect_to(Path::new(unsafe { text(socket, name) }?))?
    };
    Ok(daemon.inspect()?)
}

/// Stores the daemon's state as JSON in `*json`: members, segments, endpoints, listeners and channels, as "ginnel
/// status --json" prints them. On the host, administrators get everything, and other users the segments to which they
/// may attach; in a VM, it covers the segments of that VM. `socket` is the path of the daemon's socket; NULL means
/// $GINNEL_SOCKET if it is set, otherwise /run/ginnel/ginnel.sock. On success the caller must free `*json` with
/// ginnel_string_free(); on failure it is NULL.
///
/// Blocks until the daemon answers, for a few seconds if the daemon is being restarted. Any thread may call it. Errors:
/// GINNEL_ERR_NO_DAEMON, GINNEL_ERR_UNAVAILABLE, GINNEL_ERR_PROTOCOL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_inspect(socket: *const c_char, json: *mut *mut c_char) -> c_int {
    status(|| {
        let place = checked!(output_handle(json));
        return_text(place, checked!(inspect(socket)))
    })
}

/// Frees a text that this library has returned for the caller to free. NULL is allowed. Any thread may call it; it does
/// not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_string_free(string: *mut c_char) {
    if !string.is_null() {
        // SAFETY: made by `return_text`. Its allocation has the length of the string, which C must not have changed.
        drop(unsafe { CString::from_raw(string) });
    }
}
