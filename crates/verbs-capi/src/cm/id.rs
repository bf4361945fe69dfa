//! Identifiers, and the states of a connection.
#![allow(unsafe_code)] // Structures and functions of C.

use super::addresses::{self, storage};
use super::event_channel::{
    self, EventChannel, Happened, What, ginnel_rdma_ack_cm_event, ginnel_rdma_get_cm_event, room,
};
use super::{Opened, Register, done, failed, is_here, locked, manager, objects, opened};
use crate::context::errno;
use crate::events::{Events, Unacknowledged};
use crate::queue_pair::pair;
use crate::real;
use ginnel_verbs::cm::manager::{CONSUMER, Connection, Event, Listeners, Owner};
use ginnel_verbs::cm::message::{MOST, Parameters, Reject, Reply, Request};
use ginnel_verbs::cm::names::Space;
use ginnel_verbs::device::{Device, DeviceError};
use ginnel_verbs_abi::rdmacm::*;
use ginnel_verbs_abi::*;
use libc::sockaddr;
use std::ffi::{c_int, c_void};
use std::net::{Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use std::{ptr, slice, thread};

/// Identifiers of ours.
pub static IDS: Register = Register::new();

/// An identifier of ours.
#[repr(C)]
pub struct Id {
    id: rdma_cm_id,
    core: Arc<Core>,
    state: Mutex<State>,
    pub unacknowledged: Unacknowledged,
}

/// What the manager's thread knows of an identifier.
#[derive(Default)]
struct Core {
    address: AtomicUsize,
    /// Where its events go. None once the identifier is destroyed.
    events: Mutex<Option<Arc<Events<Happened>>>>,
    /// Of a listener: requests that the program has not taken, and how many there may be.
    requests: AtomicUsize,
    backlog: AtomicUsize,
}

/// The most requests that wait for a program, and as many as wait if it does not say.
const BACKLOG: usize = 1024;

#[derive(Default)]
struct State {
    /// Calls wait for what they begin, and the event channel is the identifier's own.
    is_sync: bool,
    bound: Option<SocketAddr>,
    /// The port was chosen here.
    is_port_chosen: bool,
    listeners: Option<Listeners>,
    target: Option<SocketAddr>,
    connection: Option<Arc<Connection>>,
    /// What this side has asked for, or agreed to, and what the other side has.
    own: Parameters,
    theirs: Parameters,
    /// What a listener of `rdma_create_ep` makes queue pairs by.
    wanted: Option<ibv_qp_init_attr>,
}

impl Owner for Core {
    fn happened(&self, event: Event) {
        if matches!(event, Event::Request(..)) {
            let backlog = self.backlog.load(Ordering::Relaxed);
            let more = |waiting: usize| (waiting < backlog).then_some(waiting + 1);
            if self.requests.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_err() {
                // The other side sees the end of the connection.
                return;
            }
        }
        self.push(What::Event(event));
    }
}

impl Core {
    fn push(&self, what: What) {
        if let Some(events) = &*locked(&self.events) {
            events.push(Happened { id: self.address.load(Ordering::Relaxed), what });
        }
    }
}

/// The identifier of ours that this is, if it is one.
///
/// # Safety
///
/// The pointer is an identifier's, of this library or another one.
pub unsafe fn own<'a>(id: *mut rdma_cm_id) -> Option<&'a Id> {
    // SAFETY: those that are registered are ours, and there.
    IDS.has(id).then(|| unsafe { &*id.cast::<Id>() })
}

fn space(ps: rdma_port_space) -> Option<Space> {
    Some(match ps {
        RDMA_PS_TCP => Space::Tcp,
        RDMA_PS_UDP => Space::Udp,
        RDMA_PS_IPOIB => Space::Ipoib,
        RDMA_PS_IB => Space::Ib,
        _ => return None,
    })
}

fn code(error: &DeviceError) -> c_int {
    match error {
        DeviceError::Ginnel(error) if error.code() == Some(ginnel::ErrorCode::IN_USE) => libc::EADDRINUSE,
        error => errno(error),
    }
}

/// Makes an identifier. Without a channel, it is a synchronous one.
unsafe fn create(
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

/// The type of queue pairs of a port space.
fn qp_type(ps: rdma_port_space) -> ibv_qp_type {
    if matches!(ps, RDMA_PS_UDP | RDMA_PS_IPOIB) { IBV_QPT_UD } else { IBV_QPT_RC }
}

impl Id {
    fn state(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }

    pub fn is_datagram(&self) -> bool {
        self.id.qp_type == IBV_QPT_UD
    }

    fn connection(&self) -> Option<Arc<Connection>> {
        self.state().connection.clone()
    }

    /// Number of the member at the other side.
    pub fn peer_member(&self) -> u32 {
        self.connection().map_or(0, |connection| connection.peer_member())
    }

    /// What both sides have said.
    pub fn parameters(&self) -> (Parameters, Parameters) {
        let state = self.state();
        (state.own, state.theirs)
    }

    /// The program takes a request.
    pub fn take_request(&self) {
        self.core.requests.fetch_sub(1, Ordering::Relaxed);
    }

    /// What a listener makes queue pairs by.
    pub fn wanted(&self) -> Option<ibv_qp_init_attr> {
        self.state().wanted
    }

    fn queue_pair(&self) -> *mut ibv_qp {
        // The program, and `rdma_create_qp`, may have changed it since.
        // SAFETY: a field of the identifier, which is there.
        unsafe { (&raw const self.id.qp).read_volatile() }
    }

    /// After a failure nothing goes through the queue pair any more.
    pub fn fail_queue_pair(&self) {
        objects::fail(self.queue_pair());
    }

    /// The other side agrees: the queue pair becomes ready to send. What the program is told, and an error.
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

    /// An identifier for a connection that somebody asks a listener for, and what that one says of its queue pair.
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
        // SAFETY: the listener's channel; the new identifier is nobody else's yet.
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

/// The identifier belongs to a device from now on.
unsafe fn attach(id: *mut rdma_cm_id, device: Opened) {
    // SAFETY: the caller's identifier.
    unsafe { ((*id).verbs, (*id).pd, (*id).port_num) = (device.context(), device.pd(), 1) }
}

/// A synchronous call waits for what it has begun.
unsafe fn complete(id: *mut rdma_cm_id) -> Result<(), c_int> {
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

/// Acknowledges the event that a synchronous identifier keeps.
unsafe fn acknowledge(id: *mut rdma_cm_id) {
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
unsafe extern "C" fn ginnel_rdma_destroy_id(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: the caller's identifier, which the caller gives up.
    unsafe {
        let Some(own) = own(id) else { return real::rdma_destroy_id(id) };
        acknowledge(id);
        // From here on nobody tells it anything.
        let events = locked(&own.core.events).take();
        let mut state = own.state();
        let (listeners, connection) = (state.listeners.take(), state.connection.take());
        let is_sync = state.is_sync;
        drop(state);
        drop(listeners);
        if let Some(connection) = &connection {
            connection.set_owner(None);
        }
        // Those who have asked and were not answered see the end, as the peer does.
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

/// Gives an identifier a local address.
unsafe fn bind(id: *mut rdma_cm_id, own: &Id, address: SocketAddr) -> Result<(), c_int> {
    if own.state().bound.is_some() {
        return Err(libc::EINVAL);
    }
    if !address.ip().is_unspecified() {
        if !addresses::is_local(address.ip()) {
            return Err(libc::EADDRNOTAVAIL);
        }
        // SAFETY: the caller's identifier.
        unsafe { attach(id, *opened().first().ok_or(libc::ENODEV)?) };
    }
    let is_port_chosen = address.port() == 0;
    let port = if is_port_chosen { addresses::any_port() } else { address.port() };
    let address = SocketAddr::new(address.ip(), port);
    let mut state = own.state();
    (state.bound, state.is_port_chosen) = (Some(address), is_port_chosen);
    // SAFETY: as above.
    unsafe { (*id).route.addr.src_storage = storage(address).0 };
    Ok(())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_bind_addr(id: *mut rdma_cm_id, address: *mut sockaddr) -> c_int {
    // SAFETY: the caller's identifier and address.
    unsafe {
        let Some(own) = own(id) else { return real::rdma_bind_addr(id, address) };
        done(addresses::read(address).ok_or(libc::EAFNOSUPPORT).and_then(|address| bind(id, own, address)))
    }
}

unsafe fn listen(id: *mut rdma_cm_id, own: &Id, backlog: c_int) -> Result<(), c_int> {
    // SAFETY: the caller's identifier.
    let space = space(unsafe { (*id).ps }).ok_or(libc::EPROTONOSUPPORT)?;
    if own.state().bound.is_none() {
        // SAFETY: as above.
        unsafe { bind(id, own, SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0))? };
    }
    let (mut bound, is_port_chosen) = {
        let state = own.state();
        if state.listeners.is_some() || state.connection.is_some() {
            return Err(libc::EINVAL);
        }
        (state.bound.ok_or(libc::EINVAL)?, state.is_port_chosen)
    };
    let devices: Vec<Arc<Device>> = opened().iter().map(Opened::device).collect();
    let manager = manager().map_err(|error| code(&error))?;
    let backlog = usize::try_from(backlog).ok().filter(|backlog| *backlog > 0).unwrap_or(BACKLOG);
    own.core.backlog.store(backlog.min(BACKLOG), Ordering::Relaxed);
    let owner: Arc<dyn Owner> = own.core.clone();
    let mut tries = if is_port_chosen { 64 } else { 1 };
    let listeners = loop {
        let made =
            manager.listen(&devices, space, &addresses::listened(bound), addresses::namespace(), &owner);
        tries -= 1;
        match made.map_err(|error| code(&error)) {
            Err(libc::EADDRINUSE) if tries > 0 => bound.set_port(addresses::any_port()),
            made => break made?,
        }
    };
    let mut state = own.state();
    (state.bound, state.listeners) = (Some(bound), Some(listeners));
    // SAFETY: as above.
    unsafe { (*id).route.addr.src_storage = storage(bound).0 };
    Ok(())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int {
    // SAFETY: the caller's identifier.
    unsafe {
        match own(id) {
            Some(own) => done(listen(id, own, backlog)),
            None => real::rdma_listen(id, backlog),
        }
    }
}

/// How long whoever connects waits for room in a listener's queue, and between two tries.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long is looked for a listener. On a network, a request takes its time; perftest, for one, connects twice, and does not wait until
/// the other side listens again.
const GRACE: Duration = Duration::from_millis(100);
const INTERVAL: Duration = Duration::from_millis(2);

/// The way to an address: through the device where somebody listens at it. If nobody does yet, through the first. An error of a device
/// counts if there is no way through another one. ETIMEDOUT: the listener's queue is full.
fn reach(
    space: Space,
    to: SocketAddr,
    devices: &[Opened],
) -> Result<(Opened, Option<Arc<Connection>>), c_int> {
    let manager = manager().map_err(|error| code(&error))?;
    let namespace = addresses::namespace();
    let mut failure = None;
    for opened in devices {
        match manager.reach(&opened.device(), space, to, namespace) {
            Ok(None) => {}
            Ok(found) => return Ok((*opened, found)),
            Err(DeviceError::Ginnel(error)) if error.code() == Some(ginnel::ErrorCode::LIMIT) => {
                failure = Some(libc::ETIMEDOUT);
            }
            Err(error) => failure = Some(code(&error)),
        }
    }
    match failure {
        Some(failure) => Err(failure),
        None => Ok((*devices.first().ok_or(libc::ENODEV)?, None)),
    }
}

/// Finds the way to an address. The error of an event, or that of the call.
unsafe fn resolve(
    id: *mut rdma_cm_id,
    own: &Id,
    from: Option<SocketAddr>,
    to: SocketAddr,
) -> Result<Result<(), c_int>, c_int> {
    // SAFETY: the caller's identifier.
    let space = space(unsafe { (*id).ps }).ok_or(libc::EPROTONOSUPPORT)?;
    if let Some(from) = from.filter(|_| own.state().bound.is_none()) {
        // SAFETY: as above.
        unsafe { bind(id, own, from)? };
    }
    let (to, bound) = (addresses::target(to), own.state().bound);
    let from = match addresses::origin(bound, to) {
        Ok(from) => from,
        Err(error) => return Ok(Err(error.raw_os_error().unwrap_or(libc::ENETUNREACH))),
    };
    let devices = opened();
    let (opened, connection) = match reach(space, to, &devices) {
        // There is time until the program connects.
        Err(libc::ETIMEDOUT) if devices.len() == 1 => (devices[0], None),
        reached => reached?,
    };
    // SAFETY: as above.
    unsafe {
        attach(id, opened);
        (*id).route.addr.src_storage = storage(from).0;
        (*id).route.addr.dst_storage = storage(to).0;
    }
    let mut state = own.state();
    (state.bound, state.target, state.connection) = (Some(from), Some(to), connection);
    Ok(Ok(()))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_resolve_addr(
    id: *mut rdma_cm_id,
    from: *mut sockaddr,
    to: *mut sockaddr,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: the caller's identifier and addresses.
    unsafe {
        let Some(own) = own(id) else { return real::rdma_resolve_addr(id, from, to, timeout_ms) };
        let Some(to) = addresses::read(to) else { return failed(libc::EAFNOSUPPORT) };
        done(resolve(id, own, addresses::read(from), to).and_then(|resolved| {
            own.core.push(match resolved {
                Ok(()) => What::Step(RDMA_CM_EVENT_ADDR_RESOLVED, 0),
                Err(error) => What::Step(RDMA_CM_EVENT_ADDR_ERROR, -error),
            });
            complete(id)
        }))
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_resolve_route(id: *mut rdma_cm_id, timeout_ms: c_int) -> c_int {
    // SAFETY: the caller's identifier.
    unsafe {
        let Some(own) = own(id) else { return real::rdma_resolve_route(id, timeout_ms) };
        if own.state().target.is_none() {
            return failed(libc::EINVAL);
        }
        own.core.push(What::Step(RDMA_CM_EVENT_ROUTE_RESOLVED, 0));
        done(complete(id))
    }
}

/// What a call says of the queue pair, and its private data.
unsafe fn read(
    id: *mut rdma_cm_id,
    param: *const rdma_conn_param,
    otherwise: Parameters,
    event: rdma_cm_event_type,
) -> Result<(Parameters, Vec<u8>), c_int> {
    // SAFETY: the caller's identifier and structure.
    unsafe {
        let is_datagram = (*id).qp_type == IBV_QPT_UD;
        let (mut parameters, private) = match param.as_ref() {
            Some(param) => {
                let parameters = Parameters {
                    queue_pair: param.qp_num,
                    qkey: 0,
                    responder_resources: param.responder_resources,
                    initiator_depth: param.initiator_depth,
                    flow_control: param.flow_control,
                    retry_count: param.retry_count & 7,
                    rnr_retry_count: param.rnr_retry_count & 7,
                    srq: param.srq,
                };
                let len = usize::from(param.private_data_len);
                let private = match param.private_data.is_null() {
                    true => &[],
                    false => slice::from_raw_parts(param.private_data.cast::<u8>(), len),
                };
                (parameters, private.to_vec())
            }
            None => (otherwise, Vec::new()),
        };
        if private.len() > room(event, is_datagram).min(MOST) {
            return Err(libc::EINVAL);
        }
        if let Some(own) = pair((*id).qp) {
            parameters.queue_pair = own.number();
            parameters.srq = u8::from(!(*(*id).qp).srq.is_null());
        }
        parameters.qkey = if is_datagram { RDMA_UDP_QKEY } else { 0 };
        Ok((parameters, private))
    }
}

unsafe fn connect(id: *mut rdma_cm_id, own: &Id, param: *const rdma_conn_param) -> Result<(), c_int> {
    let otherwise = Parameters {
        responder_resources: RDMA_MAX_RESP_RES,
        initiator_depth: RDMA_MAX_INIT_DEPTH,
        retry_count: 7,
        rnr_retry_count: 7,
        ..Parameters::default()
    };
    // SAFETY: the caller's identifier and structure.
    let (ps, (mut parameters, private)) =
        unsafe { ((*id).ps, read(id, param, otherwise, RDMA_CM_EVENT_CONNECT_REQUEST)?) };
    let space = space(ps).ok_or(libc::EPROTONOSUPPORT)?;
    let (from, to) = {
        let mut state = own.state();
        state.own = parameters;
        (state.bound.ok_or(libc::EINVAL)?, state.target.ok_or(libc::EINVAL)?)
    };
    if space.is_datagram() {
        parameters = Parameters::default();
    }
    let request = Request { space, from, to, parameters, private };
    let ask = |connection: Arc<Connection>| {
        connection.set_owner(Some(own.core.clone()));
        own.state().connection = Some(connection.clone());
        connection.request(request.clone()).is_ok()
    };
    if own.connection().is_some_and(ask) {
        return Ok(());
    }
    // Nobody was there when the address was resolved, or has gone since.
    // SAFETY: as above.
    let verbs = unsafe { (*id).verbs };
    let devices: Vec<_> = opened().into_iter().filter(|opened| opened.context() == verbs).collect();
    let begun = Instant::now();
    let reached = loop {
        match reach(space, to, &devices) {
            Ok((_, Some(connection))) if ask(connection.clone()) => return Ok(()),
            Ok(_) if begun.elapsed() < GRACE => thread::sleep(INTERVAL),
            Err(libc::ETIMEDOUT) if begun.elapsed() < PATIENCE => thread::sleep(INTERVAL),
            reached => break reached,
        }
    };
    let failure = match reached {
        Ok(_) => What::Step(RDMA_CM_EVENT_REJECTED, event_channel::no_service()),
        Err(libc::ETIMEDOUT) => What::Step(RDMA_CM_EVENT_UNREACHABLE, -libc::ETIMEDOUT),
        Err(error) => return Err(error),
    };
    own.fail_queue_pair();
    own.core.push(failure);
    Ok(())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_connect(id: *mut rdma_cm_id, param: *mut rdma_conn_param) -> c_int {
    // SAFETY: the caller's identifier and structure.
    unsafe {
        match own(id) {
            Some(own) => done(connect(id, own, param).and_then(|()| complete(id))),
            None => real::rdma_connect(id, param),
        }
    }
}

unsafe fn accept(id: *mut rdma_cm_id, own: &Id, param: *const rdma_conn_param) -> Result<(), c_int> {
    let theirs = own.parameters().1;
    let otherwise = Parameters {
        responder_resources: theirs.initiator_depth,
        initiator_depth: theirs.responder_resources,
        retry_count: theirs.retry_count,
        rnr_retry_count: theirs.rnr_retry_count,
        ..Parameters::default()
    };
    // SAFETY: the caller's identifier and structure.
    let (qp, (mut parameters, private)) =
        unsafe { ((*id).qp, read(id, param, otherwise, RDMA_CM_EVENT_CONNECT_RESPONSE)?) };
    // This side goes by what the other one has asked for.
    parameters.retry_count = theirs.retry_count;
    own.state().own = parameters;
    let connection = own.connection().ok_or(libc::EINVAL)?;
    if !own.is_datagram() && !qp.is_null() {
        objects::connect(own, qp)?;
    }
    if connection.accept(Reply { parameters, private }).is_err() {
        objects::fail(qp);
        return Err(libc::ENOTCONN);
    }
    Ok(())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_accept(id: *mut rdma_cm_id, param: *mut rdma_conn_param) -> c_int {
    // SAFETY: the caller's identifier and structure.
    unsafe {
        let Some(own) = own(id) else { return real::rdma_accept(id, param) };
        let wait = |()| if own.is_datagram() { Ok(()) } else { complete(id) };
        done(accept(id, own, param).and_then(wait))
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_reject(id: *mut rdma_cm_id, private: *const c_void, len: u8) -> c_int {
    // SAFETY: the caller's identifier and data.
    unsafe {
        let Some(own) = own(id) else { return real::rdma_reject(id, private, len) };
        let len = usize::from(len);
        let most = room(RDMA_CM_EVENT_REJECTED, own.is_datagram());
        if len > most {
            return failed(libc::EINVAL);
        }
        let private = if private.is_null() { &[] } else { slice::from_raw_parts(private.cast::<u8>(), len) };
        let reject = Reject { reason: CONSUMER, private: private.to_vec() };
        let rejected = own.connection().map(|connection| connection.reject(reject));
        done(rejected.and_then(Result::ok).ok_or(libc::EINVAL))
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_establish(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: the caller's identifier.
    unsafe {
        let Some(own) = own(id) else { return real::rdma_establish(id) };
        // With a queue pair of its own, an identifier is established without this call.
        if !(*id).qp.is_null() {
            return failed(libc::EINVAL);
        }
        done(own.connection().and_then(|connection| connection.ready().ok()).ok_or(libc::EINVAL))
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_notify(id: *mut rdma_cm_id, event: ibv_event_type) -> c_int {
    // SAFETY: the caller's identifier.
    unsafe {
        let Some(own) = own(id) else { return real::rdma_notify(id, event) };
        if event != IBV_EVENT_COMM_EST {
            return failed(libc::EINVAL);
        }
        match own.connection().map(|connection| connection.is_in_use()) {
            Some(Ok(())) => own.core.push(What::Event(Event::Established)),
            // It was established meanwhile.
            Some(Err(_)) => {}
            None => return failed(libc::EINVAL),
        }
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_disconnect(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: the caller's identifier.
    unsafe {
        let Some(own) = own(id) else { return real::rdma_disconnect(id) };
        own.fail_queue_pair();
        let Some(connection) = own.connection() else { return failed(libc::EINVAL) };
        // The other side may have been faster: its end has been told, or is about to be.
        let is_first = connection.disconnect().is_ok();
        done(if is_first { complete(id) } else { Ok(()) })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_get_request(listen: *mut rdma_cm_id, id: *mut *mut rdma_cm_id) -> c_int {
    // SAFETY: the caller's identifier and pointer.
    unsafe {
        let Some(own) = own(listen) else { return real::rdma_get_request(listen, id) };
        if !own.state().is_sync {
            return failed(libc::EINVAL);
        }
        acknowledge(listen);
        let mut event = ptr::null_mut();
        if ginnel_rdma_get_cm_event((*listen).channel, &raw mut event) != 0 {
            return -1;
        }
        let made = match ((*event).event, (*event).status) {
            (RDMA_CM_EVENT_CONNECT_REQUEST, 0) => objects::create_wanted(own, listen, (*event).id),
            (_, 0) => Err(libc::EINVAL),
            (_, status) => Err(status.abs()),
        };
        match made {
            Ok(()) => {
                (*(*event).id).event = event;
                id.write((*event).id);
                0
            }
            Err(error) => {
                let child = (*event).id;
                let is_child = (*event).event == RDMA_CM_EVENT_CONNECT_REQUEST;
                ginnel_rdma_ack_cm_event(event);
                if is_child {
                    ginnel_rdma_destroy_id(child);
                }
                failed(error)
            }
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_create_ep(
    id: *mut *mut rdma_cm_id,
    res: *mut rdma_addrinfo,
    pd: *mut ibv_pd,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    if !is_here() {
        // SAFETY: the caller's objects.
        return unsafe { real::rdma_create_ep(id, res, pd, init) };
    }
    // SAFETY: as above; the new identifier is nobody else's yet.
    unsafe {
        let wanted = &*res;
        let ps = wanted.ai_port_space.cast_unsigned();
        let made = space(ps).ok_or(libc::EPROTONOSUPPORT);
        let made = made
            .and_then(|_| create(ptr::null_mut(), ptr::null_mut(), ps, wanted.ai_qp_type.cast_unsigned()));
        let made = match made {
            Ok(made) => made,
            Err(error) => return failed(error),
        };
        let prepared = own(made).ok_or(libc::EINVAL).and_then(|own| prepare(made, own, wanted, pd, init));
        match prepared {
            Ok(()) => {
                id.write(made);
                0
            }
            Err(error) => {
                ginnel_rdma_destroy_id(made);
                failed(error)
            }
        }
    }
}

/// Binds a new identifier, or finds its way, and makes its queue pair.
unsafe fn prepare(
    id: *mut rdma_cm_id,
    own: &Id,
    wanted: &rdma_addrinfo,
    pd: *mut ibv_pd,
    init: *mut ibv_qp_init_attr,
) -> Result<(), c_int> {
    // SAFETY: the caller's identifier and structures.
    unsafe {
        if !init.is_null() {
            (*init).qp_type = (*id).qp_type;
        }
        let from = addresses::read(wanted.ai_src_addr);
        if wanted.ai_flags.cast_unsigned() & RAI_PASSIVE != 0 {
            bind(id, own, from.ok_or(libc::EAFNOSUPPORT)?)?;
            (*id).pd = pd;
            own.state().wanted = init.as_ref().copied();
            return Ok(());
        }
        let to = addresses::read(wanted.ai_dst_addr).ok_or(libc::EAFNOSUPPORT)?;
        resolve(id, own, from, to)??;
        match init.as_mut() {
            Some(init) => objects::create(id, pd, init),
            None => Ok(()),
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_destroy_ep(id: *mut rdma_cm_id) {
    // SAFETY: the caller's identifier, which the caller gives up.
    unsafe {
        if own(id).is_none() {
            return real::rdma_destroy_ep(id);
        }
        if !(*id).qp.is_null() {
            objects::ginnel_rdma_destroy_qp(id);
        }
        if !(*id).srq.is_null() {
            objects::ginnel_rdma_destroy_srq(id);
        }
        ginnel_rdma_destroy_id(id);
    }
}

/// A port as C has it, in the order of the network.
unsafe fn port(address: *const libc::sockaddr_storage) -> u16 {
    // SAFETY: the caller's address.
    unsafe { addresses::read(address.cast()).map_or(0, |address| address.port().to_be()) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_get_src_port(id: *mut rdma_cm_id) -> u16 {
    // SAFETY: the caller's identifier: anybody's has this field.
    unsafe { port(&raw const (*id).route.addr.src_storage) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_get_dst_port(id: *mut rdma_cm_id) -> u16 {
    // SAFETY: as above.
    unsafe { port(&raw const (*id).route.addr.dst_storage) }
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
    // There are no classes of service and no acknowledgements; an address is free again at once.
    match (level, name) {
        (RDMA_OPTION_ID, RDMA_OPTION_ID_TOS | RDMA_OPTION_ID_ACK_TIMEOUT) if len == 1 => 0,
        (RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR | RDMA_OPTION_ID_AFONLY) if len == size_of::<c_int>() => 0,
        (RDMA_OPTION_ID, _) => failed(libc::EINVAL),
        _ => failed(libc::ENOSYS),
    }
}
