//! Reports the fate of each connection, for `ginnel run --report`.
//!
//! The library opens the report's file for each line. Some programs close all descriptors that they do not know. Such a program
//! would close a permanently open descriptor, and its number would then be given to another file.
#![allow(unsafe_code)] // Makes system calls.

use crate::process::signals::Blocked;
use crate::state::direction::Direction;
use crate::state::socket::Socket;
use crate::state::sockets;
use crate::system::errno::Kept;
use crate::system::{kernel, real};
use ginnel_report::{Event, Record};
use std::ffi::CString;
use std::os::unix::ffi::OsStringExt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

static FILE: OnceLock<CString> = OnceLock::new();
static PROGRAM: OnceLock<String> = OnceLock::new();

/// Begins a report, if the environment names a file for it. Runs when the library is loaded.
pub fn load() {
    let Some(path) = std::env::var_os("GINNEL_SOCKETS_REPORT") else { return };
    let Ok(path) = CString::new(path.into_vec()) else { return };
    let program = std::env::args_os().next().unwrap_or_default();
    let program = program.to_string_lossy();
    let _ = PROGRAM.set(program.rsplit('/').next().unwrap_or_default().to_owned());
    let _ = FILE.set(path);
    let reason = crate::process::settings::why_off();
    write(&Record { event: Event::Process, reason: reason.into(), ..head() });
    // SAFETY: `at_exit` is a function of this library and takes no argument.
    unsafe { libc::atexit(at_exit) };
}

/// Returns a record with the fields that all records of this process have. (The work of a child of `vfork` counts as its parent's.)
fn head() -> Record<'static> {
    let program = PROGRAM.get().map_or("", String::as_str);
    Record { pid: crate::process::ids::process() as u32, program: program.into(), ..Record::default() }
}

fn write(record: &Record<'_>) {
    let Some(path) = FILE.get() else { return };
    let _errno = Kept::new();
    let flags = libc::O_WRONLY | libc::O_APPEND | libc::O_CREAT | libc::O_CLOEXEC;
    // SAFETY: the path ends with a zero.
    let fd = unsafe { libc::open(path.as_ptr(), flags, 0o600) };
    if fd < 0 {
        return;
    }
    // SAFETY: `line` has `line.len()` bytes. A line is lost if the disk is full.
    record.append(|line| unsafe { real::write(fd, line.as_ptr().cast(), line.len()) });
    // SAFETY: the descriptor was opened above.
    unsafe { real::close(fd) };
}

/// There was no daemon at the last attempt.
static NO_DAEMON: AtomicBool = AtomicBool::new(false);

/// Notes whether there was a daemon.
pub fn note_daemon(is_there: bool) {
    NO_DAEMON.store(!is_there, Ordering::Relaxed);
}

/// Reports that a connection stays on TCP.
pub fn stays(socket: &Socket) {
    tell(socket, Event::Stays);
}

/// Reports that a connection has its rings, or that a direction has changed over.
pub fn changed(socket: &Socket) {
    tell(socket, Event::Joined);
}

/// Reports the end of a connection: its last descriptor is about to be closed, or the process ends.
#[inline]
pub fn ended(socket: &Socket) {
    if is_on() {
        tell_end(socket);
    }
}

/// Returns whether this process writes a report.
#[inline]
fn is_on() -> bool {
    FILE.get().is_some() && !crate::system::confined::is_confined()
}

/// Returns the reason why a connection has ended on TCP, if nothing else is known of it.
fn why_not_joined() -> &'static str {
    match NO_DAEMON.load(Ordering::Relaxed) {
        true => "there is no daemon",
        false => "it ended before both its ends were reported",
    }
}

#[cold]
fn tell_end(socket: &Socket) {
    let event = {
        let mut facts = socket.facts.lock();
        match (facts.number, facts.channel) {
            // The socket was never connected.
            (0, _) => return,
            (_, 0) => {
                if facts.reason.is_empty() {
                    facts.reason = why_not_joined();
                }
                Event::Stays
            }
            _ => Event::Ended,
        }
    };
    tell(socket, event);
}

fn tell(socket: &Socket, event: Event) {
    if !is_on() {
        return;
    }
    let _blocked = Blocked::new();
    let facts = {
        let mut facts = socket.facts.lock();
        if facts.addresses.is_none() {
            facts.addresses = ginnel_tcp::addresses(kernel::borrow(socket.fd.load(Ordering::Relaxed))).ok();
        }
        *facts
    };
    let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
    write(&Record {
        event,
        connection: facts.number,
        local: facts.addresses.map(|(local, _)| local),
        remote: facts.addresses.map(|(_, remote)| remote),
        role: Some(match facts.role {
            ginnel_tcp::Role::Connector => ginnel_report::Role::Connector,
            ginnel_tcp::Role::Acceptor => ginnel_report::Role::Acceptor,
        }),
        segment: facts.segment.into(),
        channel: facts.channel,
        ring_bytes: count(&socket.ring_bytes),
        sent_after_us: after(&socket.sending),
        received_after_us: after(&socket.receiving),
        tcp_sent: count(&socket.sending.native),
        tcp_received: count(&socket.receiving.native),
        shared_sent: count(&socket.sending.shared),
        shared_received: count(&socket.receiving.shared),
        wakes_sent: count(&socket.sending.wakes),
        wakes_received: count(&socket.receiving.wakes),
        rings_sent: count(&socket.rings),
        returns: socket.returns.load(Ordering::Relaxed).into(),
        returned: u64::from(socket.sending.has_returned()) + u64::from(socket.receiving.has_returned()),
        cache: (*socket.cache.name.lock()).into(),
        gets_from_memory: count(&socket.cache.answered),
        gets_passed_on: count(&socket.cache.passed),
        no_cache: (*socket.cache.reason.lock()).into(),
        reason: facts.reason.into(),
        ..head()
    });
}

/// Returns the time in microseconds after which a direction changed over, or `None` if it has not.
fn after<R>(direction: &Direction<R>) -> Option<u64> {
    Some(direction.changed_after.load(Ordering::Relaxed)).filter(|after| *after != 0)
}

/// Reports the connections that are still open when the program exits normally.
extern "C" fn at_exit() {
    let _blocked = Blocked::new();
    let mut told = Vec::new();
    for fd in sockets::SOCKETS.used(0, u32::MAX) {
        let Some(socket) = sockets::SOCKETS.get(fd) else { continue };
        let at = std::ptr::from_ref(socket);
        if !told.contains(&at) {
            told.push(at);
            if socket.is_joined() { changed(socket) } else { ended(socket) }
        }
    }
}
