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
/// Why the library does nothing; empty if it does something.
static WHY_OFF: OnceLock<&str> = OnceLock::new();

/// Returns the mode that a value of `GINNEL_SOCKETS` names, or why it is `off`. Somebody who writes a word of his own probably wants the
/// library off, and `off` harms nobody.
fn named(value: Option<&str>) -> Result<Mode, &'static str> {
    let is = |word: &str| value.is_some_and(|value| value.eq_ignore_ascii_case(word));
    match value {
        None | Some("") => Ok(Mode::Auto),
        _ if is("auto") => Ok(Mode::Auto),
        _ if is("eager") => Ok(Mode::Eager),
        _ if is("off") => Err("GINNEL_SOCKETS is off"),
        _ => Err("GINNEL_SOCKETS has an unknown value: use auto, eager or off"),
    }
}

/// Reads `GINNEL_SOCKETS` (`off`, `auto`, which is the default, or `eager`) and the other settings. Before this call, the mode
/// is `off`.
pub fn load() {
    let value = std::env::var_os("GINNEL_SOCKETS").map(|value| value.to_string_lossy().into_owned());
    // A program that runs with the rights of another user must not obey the environment of its caller.
    let mode = match is_privileged() {
        true => Err("the program has the rights of another user"),
        false => named(value.as_deref()),
    };
    let _ = WHY_OFF.set(mode.err().unwrap_or_default());
    MODE.store(mode.unwrap_or(Mode::Off) as u8, Ordering::Relaxed);
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

/// Returns why the library does nothing, or an empty text.
pub fn why_off() -> &'static str {
    WHY_OFF.get().copied().unwrap_or_default()
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

#[cfg(test)]
mod tests {
    use super::{Mode, named};

    #[test]
    fn an_unknown_mode_is_off() {
        assert_eq!(named(None), Ok(Mode::Auto));
        assert_eq!(named(Some("")), Ok(Mode::Auto));
        assert_eq!(named(Some("auto")), Ok(Mode::Auto));
        assert_eq!(named(Some("Eager")), Ok(Mode::Eager));
        for off in ["off", "OFF", "0", "no", "fast", "\u{fffd}"] {
            assert!(named(Some(off)).is_err(), "{off}");
        }
    }
}
