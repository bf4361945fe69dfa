//! The addresses of identifiers: binding, listening, and resolving the address of a peer.
#![allow(unsafe_code)] // C structures and functions.

use super::addresses::{self, storage};
use super::event_channel::EventKind;
use super::id::{BACKLOG, Id, attach, code, complete, own, space};
use super::{Opened, done, failed, manager, opened};
use crate::real;
use ginnel_verbs::cm::manager::{Connection, EventHandler};
use ginnel_verbs::cm::names::PortSpace;
use ginnel_verbs::device::{Device, DeviceError};
use ginnel_verbs_abi::rdmacm::*;
use libc::sockaddr;
use std::ffi::c_int;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Returns whether an address determines the device. The RDMA code of the kernel treats loopback addresses as unspecified
/// (`cma_any_addr`). Programs rely on that: libfabric binds a loopback address to find out whether it has to look for the addresses that
/// other machines know. If this machine has no other address, a loopback address is as good as any.
fn names_a_device(ip: IpAddr) -> bool {
    !ip.is_unspecified() && (!ip.to_canonical().is_loopback() || addresses::local().is_empty())
}

/// Binds an identifier to a local address.
pub unsafe fn bind(id: *mut rdma_cm_id, own: &Id, address: SocketAddr) -> Result<(), c_int> {
    if own.state().bound.is_some() {
        return Err(libc::EINVAL);
    }
    if !address.ip().is_unspecified() {
        if !addresses::is_local(address.ip()) {
            return Err(libc::EADDRNOTAVAIL);
        }
        let first = *opened().first().ok_or(libc::ENODEV)?;
        if names_a_device(address.ip()) {
            // SAFETY: the caller's identifier.
            unsafe { attach(id, first) };
        }
    }
    let is_port_chosen = address.port() == 0;
    let port = if is_port_chosen { addresses::any_port() } else { address.port() };
    let address = SocketAddr::new(address.ip(), port);
    let mut state = own.state();
    (state.bound, state.is_port_chosen) = (Some(address), is_port_chosen);
    // SAFETY: the caller's identifier, in which this library stores the address.
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
        // SAFETY: the caller's identifier, to which `own` belongs.
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
    let owner: Arc<dyn EventHandler> = own.core.clone();
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
    // SAFETY: the caller's identifier, in which this library stores the address.
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

/// Connects to an address, through the device at which a peer listens there. Returns the first device without a connection if nobody
/// listens there yet. Fails with the error of a device only if no other device has a listener; ETIMEDOUT means that the listener's queue
/// is full.
pub fn reach(
    space: PortSpace,
    to: SocketAddr,
    devices: &[Opened],
) -> Result<(Opened, Option<Arc<Connection>>), c_int> {
    let manager = manager().map_err(|error| code(&error))?;
    let namespace = addresses::namespace();
    let mut failure = None;
    for opened in devices {
        match manager.connect(&opened.device(), space, to, namespace) {
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

/// Resolves an address. The inner error is reported by an event, the outer one by the call.
pub unsafe fn resolve(
    id: *mut rdma_cm_id,
    own: &Id,
    from: Option<SocketAddr>,
    to: SocketAddr,
) -> Result<Result<(), c_int>, c_int> {
    // SAFETY: the caller's identifier.
    let space = space(unsafe { (*id).ps }).ok_or(libc::EPROTONOSUPPORT)?;
    if let Some(from) = from.filter(|_| own.state().bound.is_none()) {
        // SAFETY: the caller's identifier, to which `own` belongs.
        unsafe { bind(id, own, from)? };
    }
    let (to, bound) = (addresses::target(to), own.state().bound);
    let from = match addresses::origin(bound, to) {
        Ok(from) => from,
        Err(error) => return Ok(Err(error.raw_os_error().unwrap_or(libc::ENETUNREACH))),
    };
    let devices = opened();
    let (opened, connection) = match reach(space, to, &devices) {
        // The listener's queue is full, but it may have room when the program connects.
        Err(libc::ETIMEDOUT) if devices.len() == 1 => (devices[0], None),
        reached => reached?,
    };
    // SAFETY: the caller's identifier, in which this library stores the device and the addresses.
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
                Ok(()) => EventKind::Step(RDMA_CM_EVENT_ADDR_RESOLVED, 0),
                Err(error) => EventKind::Step(RDMA_CM_EVENT_ADDR_ERROR, -error),
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
        own.core.push(EventKind::Step(RDMA_CM_EVENT_ROUTE_RESOLVED, 0));
        done(complete(id))
    }
}

/// Returns the port of an address in network byte order.
unsafe fn port(address: *const libc::sockaddr_storage) -> u16 {
    // SAFETY: the caller's address.
    unsafe { addresses::read(address.cast()).map_or(0, |address| address.port().to_be()) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_get_src_port(id: *mut rdma_cm_id) -> u16 {
    // SAFETY: the caller's identifier; those of both libraries have this field.
    unsafe { port(&raw const (*id).route.addr.src_storage) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_get_dst_port(id: *mut rdma_cm_id) -> u16 {
    // SAFETY: the caller's identifier; those of both libraries have this field.
    unsafe { port(&raw const (*id).route.addr.dst_storage) }
}
