//! The settings that the user makes in the environment.

use ginnel::AttachOptions;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

/// The time at which connections are reported to the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Mode {
    /// Connections are never reported, and this library does nothing.
    Off,
    /// A connection is reported when it has carried enough traffic to be worth it.
    Auto,
    /// A connection is reported as soon as it exists, unless earlier ones were not worth it.
    Eager,
}

static MODE: AtomicU8 = AtomicU8::new(Mode::Off as u8);

/// Reads `GINNEL_SOCKETS` (`off`, `auto`, which is the default, or `eager`) and the other settings. Before this call, the mode
/// is `off`.
pub fn load() {
    let mode = match std::env::var_os("GINNEL_SOCKETS") {
        Some(value) if value == "off" => Mode::Off,
        Some(value) if value == "eager" => Mode::Eager,
        _ => Mode::Auto,
    };
    // A program that runs with the rights of another user must not obey the environment of its caller.
    let mode = if is_privileged() { Mode::Off } else { mode };
    MODE.store(mode as u8, Ordering::Relaxed);
    attach();
    LETS_AGE.store(wait().is_none(), Ordering::Relaxed);
    ports();
}

/// The default port of memcached.
const CACHE_PORT: u16 = 11211;

/// Reads `GINNEL_CACHE`: a list of the ports at which caches may listen (11211 by default), or `off`.
fn ports() -> &'static [u16] {
    static PORTS: OnceLock<Vec<u16>> = OnceLock::new();
    PORTS.get_or_init(|| match std::env::var("GINNEL_CACHE") {
        Ok(value) if value == "off" => Vec::new(),
        Ok(value) if !value.is_empty() => {
            value.split(',').filter_map(|port| port.trim().parse().ok()).collect()
        }
        _ => vec![CACHE_PORT],
    })
}

/// Returns whether a cache may listen at this port.
pub fn is_cache_port(port: u16) -> bool {
    ports().contains(&port)
}

#[expect(unsafe_code, reason = "getauxval, which has no rules")]
fn is_privileged() -> bool {
    // SAFETY: `getauxval` accepts any number.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// Returns the options with which this process attaches. They are read when the program starts, because programs may clear
/// their environment.
pub fn attach() -> &'static AttachOptions {
    static ATTACH: OnceLock<AttachOptions> = OnceLock::new();
    ATTACH.get_or_init(AttachOptions::default)
}

/// Returns the time for which `carrying::settle` waits, or `None` if it does not wait. `GINNEL_SOCKETS_WAIT` sets it in milliseconds.
pub fn wait() -> Option<Duration> {
    static WAIT: OnceLock<Option<Duration>> = OnceLock::new();
    *WAIT.get_or_init(|| {
        let value = std::env::var("GINNEL_SOCKETS_WAIT").ok()?;
        value.parse().ok().filter(|wait| *wait > 0).map(Duration::from_millis)
    })
}

/// If true, the library ignores connections with little traffic so far: it does not report them at once, and no call waits for
/// them.
static LETS_AGE: AtomicBool = AtomicBool::new(false);

/// Returns whether the library ignores connections with little traffic so far.
#[inline]
pub fn lets_age() -> bool {
    LETS_AGE.load(Ordering::Relaxed)
}

/// Returns the mode that `GINNEL_SOCKETS` has set.
#[inline]
pub fn mode() -> Mode {
    match MODE.load(Ordering::Relaxed) {
        1 => Mode::Auto,
        2 => Mode::Eager,
        _ => Mode::Off,
    }
}

/// Makes this library handle no further connections.
pub fn turn_off() {
    MODE.store(Mode::Off as u8, Ordering::Relaxed);
}

/// Returns whether this library handles connections at all.
#[inline]
pub fn is_on() -> bool {
    mode() != Mode::Off
}
