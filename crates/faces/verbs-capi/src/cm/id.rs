//! Identifiers (`rdma_cm_id`): their state, creation and destruction.
#![allow(unsafe_code)] // C structures and functions.

use super::addresses::storage;
use super::event_channel::{
    self, EventChannel, EventKind, Happened, ginnel_rdma_ack_cm_event, ginnel_rdma_get_cm_event,
};
use super::{Opened, Register, done, failed, is_here, locked, objects, opened};
use crate::context::errno;
use crate::events::{Events, Unacknowledged};
use crate::real;
use ginnel_verbs::cm::manager::{CONSUMER, Connection, Event, EventHandler, Listeners};
use ginnel_verbs::cm::message::{Parameters, Reject, Request};
use ginnel_verbs::cm::names::PortSpace;
use ginnel_verbs::device::DeviceError;
use ginnel_verbs_abi::rdmacm::*;
use ginnel_verbs_abi::*;
use std::ffi::{c_int, c_void};
use std::net::SocketAddr;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// The identifiers of this library.
pub static IDS: Register = Register::new();

/// An identifier of this library.
#[repr(C)]
pub struct Id {
    id: rdma_cm_id,
    pub core: Arc<Core>,
    state: Mutex<State>,
    pub unacknowledged: Unacknowledged,
}

/// The part of an identifier that the manager's thread accesses.
#[derive(Default)]
pub struct Core {
    address: AtomicUsize,
    /// The queue of the identifier's event channel. `None` once the identifier is being destroyed.
    events: Mutex<Option<Arc<Events<Happened>>>>,
    /// Of a listener: the number of requests that the program has not taken yet, and its limit.
    requests: AtomicUsize,
    pub backlog: AtomicUsize,
}

/// The maximum and the default number of requests that wait for a program.
pub const BACKLOG: usize = 1024;

#[derive(Default)]
pub struct State {
    /// Whether the identifier is synchronous: its calls wait for their result, and it has an event channel of its own.
    pub is_sync: bool,
    pub bound: Option<SocketAddr>,
    /// Whether this library chose the port.
    pub is_port_chosen: bool,
    pub listeners: Option<Listeners>,
    pub target: Option<SocketAddr>,
    pub connection: Option<Arc<Connection>>,
    /// The parameters that this side has requested or accepted, and those of the other side.
    pub own: Parameters,
    pub theirs: Parameters,
    /// The attributes of the queue pairs that a listener of `rdma_create_ep` creates.
    pub wanted: Option<ibv_qp_init_attr>,
}

impl EventHandler for Core {
    fn handle_event(&self, event: Event) {
        if matches!(event, Event::Request(..)) {
            let backlog = self.backlog.load(Ordering::Relaxed);
            let more = |waiting: usize| (waiting < backlog).then_some(waiting + 1);
            if self.requests.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_err() {
                // The connection is dropped, and the other side sees its end.
                return;
            }
        }
        self.push(EventKind::Event(event));
    }
}

impl Core {
    pub fn push(&self, what: EventKind) {
        if let Some(events) = &*locked(&self.events) {
            events.push(Happened { id: self.address.load(Ordering::Relaxed), what });
        }
    }
}

/// Returns the identifier if it is one of this library's.
///
/// # Safety
///
/// The pointer points to an identifier, of this library or the real one.
pub unsafe fn own<'a>(id: *mut rdma_cm_id) -> Option<&'a Id> {
    // SAFETY: registered identifiers are ours, and exist.
    IDS.has(id).then(|| unsafe { &*id.cast::<Id>() })
}

pub fn space(ps: rdma_port_space) -> Option<PortSpace> {
    Some(match ps {
        RDMA_PS_TCP => PortSpace::Tcp,
        RDMA_PS_UDP => PortSpace::Udp,
        RDMA_PS_IPOIB => PortSpace::Ipoib,
        RDMA_PS_IB => PortSpace::Ib,
        _ => return None,
    })
}

pub fn code(error: &DeviceError) -> c_int {
    match error {
        DeviceError::Ginnel(error) if error.code() == Some(ginnel::ErrorCode::IN_USE) => libc::EADDRINUSE,
        error => errno(error),
    }
}

/// Creates an identifier. Without a channel, it is synchronous.
pub unsafe fn create(
    channel: *mut rdma_event_channel,
    context: *mut c_void,
    ps: rdma_port_space,
    qp_type: ibv_qp_type,
) -> Result<*mut rdma_cm_id, c_int> {
    let is_sync = channel.is_null();
    let channel = if is_sync { EventChannel::create()? } else { channel };
    // SAFETY: the caller's channel, or the new one.
    let events = unsafe { event_channel::own(channel) }.ok_or(libc::EINVAL)?.events.clone();
    let mut id = rdma_cm_id::ZEROED;
    (id.channel, id.context, id.ps, id.qp_type) = (channel, context, ps, qp_type);
    let core = Arc::new(Core { events: Mutex::new(Some(events)), ..Core::default() });
    let state = Mutex::new(State { is_sync, ..State::default() });
    let (known, unacknowledged) = (core.clone(), Unacknowledged::default());
    let made = Box::into_raw(Box::new(Id { id, core, state, unacknowledged }));
    known.address.store(made.expose_provenance(), Ordering::Relaxed);
    IDS.add(made);
    Ok(made.cast())
}

/// Returns the type of the queue pairs of a port space.
fn qp_type(ps: rdma_port_space) -> ibv_qp_type {
    if matches!(ps, RDMA_PS_UDP | RDMA_PS_IPOIB) { IBV_QPT_UD } else { IBV_QPT_RC }
}

impl Id {
    pub fn state(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }

    pub fn is_datagram(&self) -> bool {
        self.id.qp_type == IBV_QPT_UD
    }

    pub fn connection(&self) -> Option<Arc<Connection>> {
        self.state().connection.clone()
    }

    /// Returns the number of the member at the other side, or 0 if there is none.
    pub fn peer_member(&self) -> u32 {
        self.connection().map_or(0, |connection| connection.peer_member())
    }

    /// Returns the parameters of this side and of the other side.
    pub fn parameters(&self) -> (Parameters, Parameters) {
        let state = self.state();
        (state.own, state.theirs)
    }

    /// Counts a request that the program takes.
    pub fn take_request(&self) {
        self.core.requests.fetch_sub(1, Ordering::Relaxed);
    }

    /// Returns the attributes of the queue pairs that a listener creates.
    pub fn wanted(&self) -> Option<ibv_qp_init_attr> {
        self.state().wanted
    }

    fn queue_pair(&self) -> *mut ibv_qp {
        // The program or `rdma_create_qp` may have changed the field through its own pointer.
        // SAFETY: the field belongs to the identifier, which exists.
        unsafe { (&raw const self.id.qp).read_volatile() }
    }

    /// Puts the queue pair in the error state after a failure.
    pub fn fail_queue_pair(&self) {
        objects::fail(self.queue_pair());
    }

    /// Handles the acceptance by the other side: the queue pair becomes ready to send. Returns the type and the status of the event for
    /// the program.
    pub fn agreed(&self, theirs: &Parameters) -> (rdma_cm_event_type, c_int) {
        self.state().theirs = *theirs;
        if self.is_datagram() {
            return (RDMA_CM_EVENT_ESTABLISHED, 0);
        }
        let qp = self.queue_pair();
        if qp.is_null() {
            return (RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
        }
        let connected = objects::connect(self, qp);
        let ready =
            |()| self.connection().and_then(|connection| connection.ready().ok()).ok_or(libc::ENOTCONN);
        match connected.and_then(ready) {
            Ok(()) => (RDMA_CM_EVENT_ESTABLISHED, 0),
            Err(error) => {
                objects::fail(qp);
                if let Some(connection) = self.connection() {
                    let _ = connection.reject(Reject { reason: CONSUMER, private: Vec::new() });
                }
                (RDMA_CM_EVENT_CONNECT_ERROR, -error)
            }
        }
    }

    /// Creates an identifier for a connection request to a listener. Returns it with the parameters of the other side.
    pub fn child(
        &self,
        id: *mut rdma_cm_id,
        connection: Arc<Connection>,
        request: &Request,
    ) -> Result<(*mut rdma_cm_id, Parameters), c_int> {
        let is_sync = self.state().is_sync;
        let channel = if is_sync { ptr::null_mut() } else { self.id.channel };
        let device = opened().into_iter().find(|opened| Arc::ptr_eq(&opened.device(), connection.device()));
        let device = device.ok_or(libc::ENODEV)?;
        // SAFETY: the listener's channel; no other thread knows the new identifier yet.
        unsafe {
            let child = create(channel, (*id).context, (*id).ps, (*id).qp_type)?;
            let own = own(child).ok_or(libc::EINVAL)?;
            attach(child, device);
            (*child).route.addr.src_storage = storage(request.to).0;
            (*child).route.addr.dst_storage = storage(request.from).0;
            connection.set_owner(Some(own.core.clone()));
            let mut state = own.state();
            state.connection = Some(connection);
            state.theirs = request.parameters;
            (state.bound, state.target) = (Some(request.to), Some(request.from));
            drop(state);
            Ok((child, request.parameters))
        }
    }
}

/// Assigns an identifier to a device.
pub unsafe fn attach(id: *mut rdma_cm_id, device: Opened) {
    // SAFETY: the caller's identifier.
    unsafe { ((*id).verbs, (*id).pd, (*id).port_num) = (device.context(), device.pd(), 1) }
}

/// Waits for the result of a call on a synchronous identifier. Returns at once for any other.
pub unsafe fn complete(id: *mut rdma_cm_id) -> Result<(), c_int> {
    // SAFETY: the caller's identifier, and its event.
    unsafe {
        let own = own(id).ok_or(libc::EINVAL)?;
        if !own.state().is_sync {
            return Ok(());
        }
        acknowledge(id);
        if ginnel_rdma_get_cm_event((*id).channel, &raw mut (*id).event) != 0 {
            return Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO));
        }
        let event = &*(*id).event;
        match (event.event, event.status) {
            (_, 0) => Ok(()),
            (RDMA_CM_EVENT_REJECTED, _) => Err(libc::ECONNREFUSED),
            (_, status) => Err(status.abs()),
        }
    }
}

/// Acknowledges the event that a synchronous identifier holds.
pub unsafe fn acknowledge(id: *mut rdma_cm_id) {
    // SAFETY: the caller's identifier.
    unsafe {
        let event = std::mem::replace(&mut (*id).event, ptr::null_mut());
        if !event.is_null() {
            ginnel_rdma_ack_cm_event(event);
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_create_id(
    channel: *mut rdma_event_channel,
    id: *mut *mut rdma_cm_id,
    context: *mut c_void,
    ps: rdma_port_space,
) -> c_int {
    // SAFETY: the caller's channel and pointer.
    unsafe {
        let is_ours = if channel.is_null() { is_here() } else { event_channel::own(channel).is_some() };
        if !is_ours {
            return real::rdma_create_id(channel, id, context, ps);
        }
        if space(ps).is_none() {
            return failed(libc::EPROTONOSUPPORT);
        }
        done(create(channel, context, ps, qp_type(ps)).map(|made| id.write(made)))
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_rdma_destroy_id(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: the caller's identifier, which the caller gives up.
    unsafe {
        let Some(own) = own(id) else { return real::rdma_destroy_id(id) };
        acknowledge(id);
        // From here on, the identifier gets no more events.
        let events = locked(&own.core.events).take();
        let mut state = own.state();
        let (listeners, connection) = (state.listeners.take(), state.connection.take());
        let is_sync = state.is_sync;
        drop(state);
        drop(listeners);
        if let Some(connection) = &connection {
            connection.set_owner(None);
        }
        // Peers whose requests were not answered see the end of their connection, and so does the connected peer.
        drop(connection);
        if let Some(events) = events {
            events.remove(|happened| happened.id == id.addr());
        }
        own.unacknowledged.wait();
        IDS.remove(id);
        let channel = (*id).channel;
        drop(Box::from_raw(id.cast::<Id>()));
        if is_sync {
            EventChannel::free(channel);
        }
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_migrate_id(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> c_int {
    // SAFETY: the caller's identifier and channel.
    unsafe {
        let Some(own) = own(id) else { return real::rdma_migrate_id(id, channel) };
        let is_sync = channel.is_null();
        let made = if is_sync { EventChannel::create() } else { Ok(channel) };
        let (channel, new) =
            match made.and_then(|made| Ok((made, event_channel::own(made).ok_or(libc::EINVAL)?))) {
                Ok(made) => made,
                Err(error) => return failed(error),
            };
        acknowledge(id);
        let mut events = locked(&own.core.events);
        if let Some(old) = events.replace(new.events.clone()) {
            for happened in old.remove(|happened| happened.id == id.addr()) {
                new.events.push(happened);
            }
        }
        drop(events);
        let was_sync = std::mem::replace(&mut own.state().is_sync, is_sync);
        let old = std::mem::replace(&mut (*id).channel, channel);
        if was_sync {
            EventChannel::free(old);
        }
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_set_option(
    id: *mut rdma_cm_id,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: usize,
) -> c_int {
    // SAFETY: the caller's identifier and value.
    unsafe {
        if own(id).is_none() {
            return real::rdma_set_option(id, level, name, value, len);
        }
    }
    // These options have no effect: there are no classes of service and no acknowledgements, and an address is free again at once.
    match (level, name) {
        (RDMA_OPTION_ID, RDMA_OPTION_ID_TOS | RDMA_OPTION_ID_ACK_TIMEOUT) if len == 1 => 0,
        (RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR | RDMA_OPTION_ID_AFONLY) if len == size_of::<c_int>() => 0,
        (RDMA_OPTION_ID, _) => failed(libc::EINVAL),
        _ => failed(libc::ENOSYS),
    }
}
