//! Lists of members, endpoints and listeners. ginnel_inspect() returns everything that the daemon tells.

use crate::boundary::{
    Growing, borrow_mut, checked, close, fill, name_array, number, output_handle, return_handle, status,
};
use crate::daemon::inspect;
use crate::handle_table::handle;
use crate::listener::Kind;
use crate::status::Failure;
use crate::status::Status::GINNEL_ERR_PROTOCOL;
use ginnel_status::{Endpoint, Inspect, Listener};
use libc::c_int;
use std::ffi::c_char;
use std::vec::IntoIter;

/// The subject of an entry of a list.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(non_camel_case_types)] // The names are C's.
pub enum Subject {
    /// A member: the host, or a VM. `active` is 1 while its VM is connected.
    GINNEL_MEMBER = 1,
    /// An endpoint: an attached process. `active` is 0 while it reconnects to a daemon that was restarted.
    GINNEL_ENDPOINT = 2,
    /// A name at which an endpoint listens. `number` and `epoch` are those of the endpoint.
    GINNEL_LISTENER = 3,
}

/// A list, as it was when it was opened. One thread at a time may use it. Created by ginnel_list_open(), freed by
/// ginnel_list_close().
pub struct List(IntoIter<ListEntry>);
handle!(List, "list");

/// An entry of a list.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ListEntry {
    /// sizeof(ginnel_list_entry).
    pub size: usize,
    /// GINNEL_MEMBER, GINNEL_ENDPOINT or GINNEL_LISTENER.
    pub subject: c_int,
    /// For listeners: GINNEL_MESSAGE or GINNEL_STREAM. Otherwise 0.
    pub kind: c_int,
    /// Number of the member or of the endpoint. The host is member 0.
    pub number: u32,
    /// Epoch of the endpoint's number. 0 for a member.
    pub epoch: u32,
    /// 1 if the subject is active, otherwise 0; see ginnel_subject.
    pub active: u32,
    /// Name of the segment. Empty for a member.
    pub segment: [c_char; 64],
    /// Name of the member.
    pub member: [c_char; 64],
    /// Name of the endpoint, or the name at which it listens. Empty for a member.
    pub name: [c_char; 64],
}
// SAFETY: the structure is as the trait requires.
unsafe impl Growing for ListEntry {}

fn entries(known: &Inspect) -> Vec<ListEntry> {
    let members = known.members.iter().map(|member| {
        let active = member.connected || member.number == 0;
        ListEntry { number: member.number, ..entry(Subject::GINNEL_MEMBER, active, "", &member.name, "") }
    });
    let endpoints = known.endpoints.iter().map(|endpoint| {
        let Endpoint { number, epoch, member, segment, name, attached, .. } = endpoint;
        let entry = entry(Subject::GINNEL_ENDPOINT, *attached, segment, member, name);
        ListEntry { number: *number, epoch: *epoch, ..entry }
    });
    let listeners = known.listeners.iter().map(|listener| {
        let Listener { segment, name, kind, endpoint, .. } = listener;
        let kind = match kind.as_str() {
            "message" => Kind::GINNEL_MESSAGE as c_int,
            "stream" => Kind::GINNEL_STREAM as c_int,
            _ => 0,
        };
        let owner = known.endpoints.iter().find(|owner| owner.number == *endpoint);
        let (member, epoch) = owner.map_or(("", 0), |owner| (&owner.member, owner.epoch));
        let active = owner.is_some_and(|owner| owner.attached);
        let entry = entry(Subject::GINNEL_LISTENER, active, segment, member, name);
        ListEntry { kind, number: *endpoint, epoch, ..entry }
    });
    members.chain(endpoints).chain(listeners).collect()
}

fn entry(subject: Subject, active: bool, segment: &str, member: &str, name: &str) -> ListEntry {
    ListEntry {
        size: 0,
        subject: subject as c_int,
        kind: 0,
        number: 0,
        epoch: 0,
        active: active.into(),
        segment: name_array(segment),
        member: name_array(member),
        name: name_array(name),
    }
}

/// Lists the members, endpoints and listeners that the daemon tells this user about. In a VM they are those of the VM's
/// segments. `socket` is the path of the daemon's socket; NULL means $GINNEL_SOCKET if it is set, otherwise
/// /run/ginnel/ginnel.sock. On success the caller must free `*list` with ginnel_list_close(); on failure it is NULL.
///
/// Blocks until the daemon answers, for a few seconds if the daemon is being restarted. Any thread may call it. Errors:
/// GINNEL_ERR_NO_DAEMON, GINNEL_ERR_UNAVAILABLE, GINNEL_ERR_PROTOCOL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_list_open(socket: *const c_char, list: *mut *mut List) -> c_int {
    status(|| {
        let place = checked!(output_handle(list));
        let json = checked!(inspect(socket));
        let known: Inspect = serde_json::from_str(&json).map_err(|error| {
            Failure::new(GINNEL_ERR_PROTOCOL, format!("the daemon's status is not as expected: {error}"))
        })?;
        return_handle(place, List(entries(&known).into_iter()));
        Ok(())
    })
}

/// Fills in `*entry`, whose `size` the caller has set, with the next entry: first the members, then the endpoints, then
/// the listeners. Returns 1, or 0 at the end, or a negative status. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_list_next(list: *mut List, entry: *mut ListEntry) -> c_int {
    number(|| {
        let List(entries) = checked!(borrow_mut(list));
        let Some(next) = entries.as_slice().first() else { return Ok(0) };
        checked!(fill(entry, *next));
        entries.next();
        Ok(1)
    })
}

/// Frees a list. NULL is allowed. No other thread may be using the handle. Does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_list_close(list: *mut List) -> c_int {
    // SAFETY: the caller is responsible for it.
    unsafe { close(list) }
}
