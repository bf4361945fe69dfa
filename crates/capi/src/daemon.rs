//! What the daemon knows.

use crate::boundary::{Outcome, checked, output_handle, return_text, status, text};
use ginnel::Daemon;
use libc::c_int;
use std::ffi::{CString, c_char};
use std::path::Path;

/// Asks the daemon at a socket, or at the usual one.
pub(crate) unsafe fn inspect(socket: *const c_char, name: &str) -> Outcome<String> {
    let mut daemon = if socket.is_null() {
        Daemon::connect()?
    } else {
        // SAFETY: not null, and a string as C has them.
        Daemon::connect_to(Path::new(unsafe { text(socket, name) }?))?
    };
    Ok(daemon.inspect()?)
}

/// What the daemon knows of members, segments, endpoints, listeners and channels, as JSON: what `ginnel status --json`
/// prints. On the host it is all; in a VM, what concerns the segments that the VM has a share in. `socket` is the path of
/// the daemon's socket; NULL: $GINNEL_SOCKET, else /run/ginnel/ginnel.sock. On success `*json` is the caller's, to be
/// freed with ginnel_string_free(); on failure it is NULL.
///
/// Blocks for the daemon's answer, for a few seconds where the daemon is being restarted. Any thread. Errors:
/// GINNEL_ERR_NO_DAEMON, GINNEL_ERR_UNAVAILABLE, GINNEL_ERR_PROTOCOL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_inspect(socket: *const c_char, json: *mut *mut c_char) -> c_int {
    status(|| {
        let place = checked!(output_handle(json));
        return_text(place, checked!(inspect(socket)))
    })
}

/// Frees a text that this library has handed out. NULL is allowed. Any thread; does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_string_free(string: *mut c_char) {
    if !string.is_null() {
        // SAFETY: made by `return_text`; its length is that of the string, which C must not have changed.
        drop(unsafe { CString::from_raw(string) });
    }
}
