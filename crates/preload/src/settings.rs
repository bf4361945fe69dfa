//! What the user has set in the environment.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

use ginnel::AttachOptions;

/// When connections are reported to the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Mode {
    /// Never: this library does nothing.
    Off,
    /// Once they have shown life.
    Auto,
    /// At once.
    Eager,
}

static MODE: AtomicU8 = AtomicU8::new(Mode::Off as u8);

/// Reads `GINNEL_SOCKETS`: `off`, `auto` (the default) or `eager`. Until then, nothing is done.
pub fn load() {
    let mode = match std::env::var_os("GINNEL_SOCKETS") {
        Some(value) if value == "off" => Mode::Off,
        Some(value) if value == "eager" => Mode::Eager,
        _ => Mode::Auto,
    };
    // A program that runs with the rights of another user must not be led by its caller's environment.
    let mode = if is_privileged() { Mode::Off } else { mode };
    MODE.store(mode as u8, Ordering::Relaxed);
    attach();
    LETS_AGE.store(mode == Mode::Auto && wait().is_none(), Ordering::Relaxed);
    ports();
    crate::report::load();
}

/// Where memcached listens, if nobody says otherwise.
const CACHE_PORT: u16 = 11211;

/// Reads `GINNEL_CACHE`: ports at which there may be caches (11211 by default), or `off`.
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

/// Whether there may be a cache at this port.
pub fn is_cache_port(port: u16) -> bool {
    ports().contains(&port)
}

#[expect(unsafe_code, reason = "getauxval, which has no rules")]
fn is_privileged() -> bool {
    // SAFETY: it can be asked anything.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// How this process attaches. As it was set when the program began, because programs may clear their environment.
pub fn attach() -> &'static AttachOptions {
    static ATTACH: OnceLock<AttachOptions> = OnceLock::new();
    ATTACH.get_or_init(AttachOptions::default)
}

/// `GINNEL_SOCKETS_WAIT`: for how many milliseconds `settle` waits, if it does.
pub fn wait() -> Option<Duration> {
    static WAIT: OnceLock<Option<Duration>> = OnceLock::new();
    *WAIT.get_or_init(|| {
        let value = std::env::var("GINNEL_SOCKETS_WAIT").ok()?;
        value.parse().ok().filter(|wait| *wait > 0).map(Duration::from_millis)
    })
}

/// Nothing is done for connections that have shown no life: neither are they reported at once, nor does anybody wait for them.
static LETS_AGE: AtomicBool = AtomicBool::new(false);

/// Whether nothing is done for connections that have shown no life.
#[inline]
pub fn lets_age() -> bool {
    LETS_AGE.load(Ordering::Relaxed)
}

/// What is set.
#[inline]
pub fn mode() -> Mode {
    match MODE.load(Ordering::Relaxed) {
        1 => Mode::Auto,
        2 => Mode::Eager,
        _ => Mode::Off,
    }
}

/// Whether this library does anything.
#[inline]
pub fn is_on() -> bool {
    mode() != Mode::Off
}
