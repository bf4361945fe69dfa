//! Event channels, and the events that programs take from them.
#![allow(unsafe_code)] // C structures and functions.

use super::id::{self, Id};
use super::{Register, done, failed, is_here};
use crate::context::fail;
use crate::events::Events;
use crate::real;
use ginnel_verbs::cm::manager::{Event, NO_SERVICE};
use ginnel_verbs::cm::message::{MOST, Parameters};
use ginnel_verbs::queue_pair::lid;
use ginnel_verbs_abi::rdmacm::*;
use std::ffi::{CStr, c_char, c_int};
use std::ptr;
use std::sync::Arc;

/// The event channels of this library.
pub static CHANNELS: Register = Register::new();
/// Events of this library that programs have not acknowledged yet.
pub static EVENTS: Register = Register::new();

/// An event channel of this library.
#[repr(C)]
pub struct EventChannel {
    channel: rdma_event_channel,
    pub events: Arc<Events<Happened>>,
}

/// An event of the identifier at this address.
pub struct Happened {
    pub id: usize,
    pub what: EventKind,
}

pub enum EventKind {
    /// A step of this side, with the event's status.
    Step(rdma_cm_event_type, c_int),
    /// An event of the connection manager.
    Event(Event),
}

impl EventChannel {
    pub fn create() -> Result<*mut rdma_event_channel, c_int> {
        let events = Events::new().map_err(|error| error.raw_os_error().unwrap_or(libc::EMFILE))?;
        let channel = rdma_event_channel { fd: events.fd() };
        let made = Box::into_raw(Box::new(Self { channel, events: Arc::new(events) }));
        CHANNELS.add(made);
        Ok(made.cast())
    }

    /// Frees a channel of this library.
    ///
    /// # Safety
    ///
    /// The channel is one, and no thread uses it any more.
    pub unsafe fn free(channel: *mut rdma_event_channel) {
        if CHANNELS.remove(channel) {
            // SAFETY: `create` allocated it, and the caller gives it up.
            drop(unsafe { Box::from_raw(channel.cast::<Self>()) });
        }
    }
}

/// Returns the event channel if it is one of this library's.
///
/// # Safety
///
/// The pointer points to an event channel, of this library or the real one.
pub unsafe fn own<'a>(channel: *mut rdma_event_channel) -> Option<&'a EventChannel> {
    // SAFETY: registered channels are ours, and exist.
    CHANNELS.has(channel).then(|| unsafe { &*channel.cast::<EventChannel>() })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_create_event_channel() -> *mut rdma_event_channel {
    if !is_here() {
        // SAFETY: the function has no arguments.
        return unsafe { real::rdma_create_event_channel() };
    }
    EventChannel::create().unwrap_or_else(|error| {
        fail(error);
        ptr::null_mut()
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_destroy_event_channel(channel: *mut rdma_event_channel) {
    // SAFETY: the caller's channel, which the caller gives up.
    unsafe {
        match own(channel) {
            Some(_) => EventChannel::free(channel),
            None => real::rdma_destroy_event_channel(channel),
        }
    }
}

/// An event as a program receives it.
#[repr(C)]
struct DeliveredEvent {
    event: rdma_cm_event,
    /// The address of the identifier that counts the event as unacknowledged.
    counted: usize,
    /// The private data, padded with zeros: an adapter reports how much space there is, not how much was sent.
    private: [u8; MOST + 1],
}

/// Returns the space for private data in an event of this type, in bytes (InfiniBand Architecture Specification 1.2.1, 12.6, minus the
/// part of a request that the kernel's part of librdmacm uses for the addresses).
pub fn room(event: rdma_cm_event_type, is_datagram: bool) -> usize {
    match (event, is_datagram) {
        (RDMA_CM_EVENT_CONNECT_REQUEST, false) => 56,
        (RDMA_CM_EVENT_CONNECT_REQUEST, true) => 180,
        (RDMA_CM_EVENT_CONNECT_RESPONSE | RDMA_CM_EVENT_ESTABLISHED, false) => 196,
        (RDMA_CM_EVENT_CONNECT_RESPONSE | RDMA_CM_EVENT_ESTABLISHED, true) => 136,
        (RDMA_CM_EVENT_REJECTED, false) => 148,
        (RDMA_CM_EVENT_REJECTED, true) => 136,
        _ => 0,
    }
}

impl DeliveredEvent {
    fn new(id: *mut rdma_cm_id, event: rdma_cm_event_type, status: c_int) -> Box<Self> {
        let mut given = Self { event: rdma_cm_event::ZEROED, counted: id.addr(), private: [0; _] };
        (given.event.id, given.event.event, given.event.status) = (id, event, status);
        Box::new(given)
    }

    fn put(
        mut self: Box<Self>,
        parameters: &Parameters,
        private: &[u8],
        is_datagram: bool,
        member: u32,
    ) -> Box<Self> {
        let private = &private[..private.len().min(MOST)];
        self.private[..private.len()].copy_from_slice(private);
        let len = room(self.event.event, is_datagram);
        let private_data = if len == 0 { ptr::null() } else { (&raw const self.private).cast() };
        if is_datagram {
            let mut ud = rdma_ud_param::ZEROED;
            (ud.private_data, ud.private_data_len) = (private_data, len as u8);
            (ud.ah_attr.dlid, ud.ah_attr.port_num) = (lid(member), 1);
            (ud.qp_num, ud.qkey) = (parameters.queue_pair, parameters.qkey);
            self.event.param.ud = ud;
        } else {
            let mut conn = rdma_conn_param::ZEROED;
            (conn.private_data, conn.private_data_len) = (private_data, len as u8);
            // Each side responds to what the other side initiates, so the two values are exchanged.
            conn.responder_resources = parameters.initiator_depth;
            conn.initiator_depth = parameters.responder_resources;
            conn.flow_control = parameters.flow_control;
            conn.retry_count = parameters.retry_count;
            conn.rnr_retry_count = parameters.rnr_retry_count;
            (conn.srq, conn.qp_num) = (parameters.srq, parameters.queue_pair);
            self.event.param.conn = conn;
        }
        self
    }
}

/// Does the library's own work for an event, and returns what the program receives.
fn given(own: &Id, id: *mut rdma_cm_id, what: EventKind) -> Result<Box<DeliveredEvent>, c_int> {
    let is_datagram = own.is_datagram();
    Ok(match what {
        EventKind::Step(event, status) => DeliveredEvent::new(id, event, status),
        EventKind::Event(Event::Request(connection, request)) => {
            own.take_request();
            let member = connection.peer_member();
            let (child, parameters) = own.child(id, connection, &request)?;
            let mut given = DeliveredEvent::new(child, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
            (given.event.listen_id, given.counted) = (id, id.addr());
            given.put(&parameters, &request.private, is_datagram, member)
        }
        EventKind::Event(Event::Reply(reply)) => {
            let (event, status) = own.agreed(&reply.parameters);
            let member = own.peer_member();
            DeliveredEvent::new(id, event, status).put(&reply.parameters, &reply.private, is_datagram, member)
        }
        EventKind::Event(Event::Reject(reject)) => {
            own.fail_queue_pair();
            let status = c_int::from(reject.reason);
            let given = DeliveredEvent::new(id, RDMA_CM_EVENT_REJECTED, status);
            given.put(&Parameters::default(), &reject.private, is_datagram, own.peer_member())
        }
        EventKind::Event(Event::Established) => DeliveredEvent::new(id, RDMA_CM_EVENT_ESTABLISHED, 0),
        EventKind::Event(Event::Disconnected) => DeliveredEvent::new(id, RDMA_CM_EVENT_DISCONNECTED, 0),
        EventKind::Event(Event::Unreachable) => {
            own.fail_queue_pair();
            DeliveredEvent::new(id, RDMA_CM_EVENT_UNREACHABLE, -libc::ETIMEDOUT)
        }
    })
}

/// The status of a rejection because nobody listens at the address.
pub fn no_service() -> c_int {
    NO_SERVICE.into()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_rdma_get_cm_event(
    channel: *mut rdma_event_channel,
    event: *mut *mut rdma_cm_event,
) -> c_int {
    // SAFETY: the caller's channel and pointer. Identifiers of queued events exist, because each one counts the events that it has
    // delivered.
    unsafe {
        let Some(own) = own(channel) else { return real::rdma_get_cm_event(channel, event) };
        if event.is_null() {
            return failed(libc::EINVAL);
        }
        let taken = own.events.take(|Happened { id, what }| {
            let id: *mut rdma_cm_id = ptr::with_exposed_provenance_mut(id);
            if let Some(own) = id::own(id) {
                own.unacknowledged.give();
            }
            (id, what)
        });
        done(taken.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO)).and_then(|(id, what)| {
            let own = id::own(id).ok_or(libc::EINVAL)?;
            let given = given(own, id, what).inspect_err(|_| own.unacknowledged.acknowledge(1))?;
            let given = Box::into_raw(given);
            EVENTS.add(given);
            event.write(given.cast());
            Ok(())
        }))
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int {
    if event.is_null() {
        return failed(libc::EINVAL);
    }
    // SAFETY: the caller's event, which the caller gives up.
    unsafe {
        if !EVENTS.remove(event) {
            return real::rdma_ack_cm_event(event);
        }
        let given = Box::from_raw(event.cast::<DeliveredEvent>());
        if let Some(own) = id::own(ptr::with_exposed_provenance_mut(given.counted)) {
            own.unacknowledged.acknowledge(1);
        }
    }
    0
}

#[unsafe(no_mangle)]
extern "C" fn ginnel_rdma_event_str(event: rdma_cm_event_type) -> *const c_char {
    const WORDS: [&CStr; 16] = [
        c"RDMA_CM_EVENT_ADDR_RESOLVED",
        c"RDMA_CM_EVENT_ADDR_ERROR",
        c"RDMA_CM_EVENT_ROUTE_RESOLVED",
        c"RDMA_CM_EVENT_ROUTE_ERROR",
        c"RDMA_CM_EVENT_CONNECT_REQUEST",
        c"RDMA_CM_EVENT_CONNECT_RESPONSE",
        c"RDMA_CM_EVENT_CONNECT_ERROR",
        c"RDMA_CM_EVENT_UNREACHABLE",
        c"RDMA_CM_EVENT_REJECTED",
        c"RDMA_CM_EVENT_ESTABLISHED",
        c"RDMA_CM_EVENT_DISCONNECTED",
        c"RDMA_CM_EVENT_DEVICE_REMOVAL",
        c"RDMA_CM_EVENT_MULTICAST_JOIN",
        c"RDMA_CM_EVENT_MULTICAST_ERROR",
        c"RDMA_CM_EVENT_ADDR_CHANGE",
        c"RDMA_CM_EVENT_TIMEWAIT_EXIT",
    ];
    WORDS.get(event as usize).unwrap_or(&c"UNKNOWN EVENT").as_ptr()
}
