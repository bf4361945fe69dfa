//! Connections that a program leaves to the program that it executes.
//!
//! The counts of a connection that is still on TCP are passed on in an environment variable, with one item for each descriptor. The
//! new program's library believes an item only if the descriptor refers to the socket that the item names by the kernel's cookie
//! (SO_COOKIE).
#![allow(unsafe_code)] // The environment is an array of C strings.

use crate::calls::descriptors;
use crate::state::family;
use crate::state::socket::{Socket, Stage};
use crate::state::sockets::SOCKETS;
use crate::system::kernel;
use ginnel_tcp::{Connecting, Role};
use libc::{c_char, c_int};
use std::ffi::{CStr, CString};
use std::sync::atomic::Ordering;
use std::time::Duration;

const VARIABLE: &str = "GINNEL_SOCKETS_INHERITED=";

/// A descriptor, and the facts known about its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Item {
    fd: c_int,
    cookie: u64,
    role: Role,
    before: u64,
    after: u64,
    sent: u64,
    received: u64,
}

impl Item {
    fn of(fd: c_int, socket: &Socket) -> Option<Self> {
        let (role, Connecting { before, after }) = {
            let facts = socket.facts.lock();
            (facts.role, facts.connecting)
        };
        Some(Self {
            fd,
            cookie: kernel::cookie(fd)?,
            role,
            before: before.as_nanos() as u64,
            after: after.as_nanos() as u64,
            sent: socket.sending.kernels(),
            received: socket.receiving.kernels(),
        })
    }

    fn write(&self, to: &mut String) {
        use std::fmt::Write as _;
        let Self { fd, cookie, role, before, after, sent, received } = *self;
        let role = if role == Role::Connector { 'c' } else { 'a' };
        let _ = write!(to, "{fd}:{cookie}:{role}:{before}:{after}:{sent}:{received},");
    }

    fn read(text: &str) -> Option<Self> {
        let mut words = text.split(':');
        let mut word = || words.next();
        let item = Self {
            fd: word()?.parse().ok().filter(|fd| *fd >= 0)?,
            cookie: word()?.parse().ok()?,
            role: match word()? {
                "c" => Role::Connector,
                "a" => Role::Acceptor,
                _ => return None,
            },
            before: word()?.parse().ok()?,
            after: word()?.parse().ok()?,
            sent: word()?.parse().ok()?,
            received: word()?.parse().ok()?,
        };
        words.next().is_none().then_some(item)
    }
}

/// The environment for a program that is about to be executed.
pub struct Environment {
    pointers: Vec<*const c_char>,
    _variable: CString,
}

impl Environment {
    /// Builds an environment that contains the facts about the connections which the program inherits. Returns `None` if it
    /// inherits none, and is to have the environment unchanged.
    ///
    /// # Safety
    ///
    /// `environment` is null, or points to an array of strings that ends with null.
    pub unsafe fn with_connections(environment: *const *const c_char) -> Option<Self> {
        let mut value = String::from(VARIABLE);
        for fd in SOCKETS.used(0, u32::MAX) {
            let Some(socket) = SOCKETS.get(fd) else { continue };
            if matches!(socket.stage(), Stage::Native | Stage::Reported)
                && !kernel::closes_on_exec(fd)
                // Otherwise another process may go on with the socket on TCP.
                && !family::is_shared(socket)
                && let Some(item) = Item::of(fd, socket)
            {
                item.write(&mut value);
            }
        }
        if value.len() == VARIABLE.len() {
            return None;
        }
        let variable = CString::new(value).ok()?;
        let mut pointers = vec![variable.as_ptr()];
        let mut at = environment;
        // SAFETY: the array has another entry unless this one is null, and each entry is a string.
        while let Some(entry) = unsafe { at.as_ref() }.copied().filter(|entry| !entry.is_null()) {
            // SAFETY: the entry is not null, so it is a string.
            if !unsafe { CStr::from_ptr(entry) }.to_bytes().starts_with(VARIABLE.as_bytes()) {
                pointers.push(entry);
            }
            // SAFETY: this entry is not null, so the array has another one.
            at = unsafe { at.add(1) };
        }
        pointers.push(std::ptr::null());
        Some(Self { pointers, _variable: variable })
    }

    pub fn as_ptr(&self) -> *const *const c_char {
        self.pointers.as_ptr()
    }
}

/// Continues with the connections that the previous program in this process has left. Runs when the library is loaded.
pub fn load() {
    if !crate::process::settings::is_on() {
        return;
    }
    let Some(value) = std::env::var_os(VARIABLE.trim_end_matches('=')) else { return };
    let Some(value) = value.to_str() else { return };
    let items: Vec<Item> = value.split(',').filter_map(Item::read).collect();
    for (i, item) in items.iter().enumerate() {
        if SOCKETS.get(item.fd).is_some() || kernel::cookie(item.fd) != Some(item.cookie) {
            continue;
        }
        // This descriptor is a copy of one that the table already has.
        let known = items[..i].iter().find(|other| other.cookie == item.cookie);
        if let Some(known) = known.filter(|known| SOCKETS.get(known.fd).is_some()) {
            descriptors::duplicate(known.fd, item.fd);
            continue;
        }
        let socket = descriptors::add_socket(item.fd);
        let connecting =
            Connecting { before: Duration::from_nanos(item.before), after: Duration::from_nanos(item.after) };
        socket.connected(item.role, connecting);
        socket.sending.native.store(item.sent, Ordering::Relaxed);
        socket.receiving.native.store(item.received, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_items_are_read_back() {
        let item = Item {
            fd: 3,
            cookie: u64::MAX,
            role: Role::Acceptor,
            before: 1,
            after: 2,
            sent: 1 << 40,
            received: 0,
        };
        let other = Item { fd: 0, role: Role::Connector, ..item };
        let mut text = String::new();
        item.write(&mut text);
        other.write(&mut text);
        let items: Vec<Item> = text.split(',').filter_map(Item::read).collect();
        assert_eq!(items, [item, other]);
    }

    #[test]
    fn invalid_items_are_refused() {
        let wrong =
            ["", "3", "x:1:a:1:1:1:1", "-1:1:a:1:1:1:1", "3:1:b:1:1:1:1", "3:1:a:1:1:1", "3:1:a:1:1:1:1:1"];
        for text in wrong {
            assert_eq!(Item::read(text), None, "{text}");
        }
    }
}
