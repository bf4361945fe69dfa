//! Connections: requesting, accepting, rejecting and disconnecting.
#![allow(unsafe_code)] // C structures and functions.

use super::binding::reach;
use super::event_channel::{self, EventKind, ginnel_rdma_ack_cm_event, ginnel_rdma_get_cm_event, room};
use super::id::{Id, acknowledge, complete, ginnel_rdma_destroy_id, own, space};
use super::{done, failed, objects, opened};
use crate::queue_pair::pair;
use crate::real;
use ginnel_verbs::cm::manager::{CONSUMER, Connection, Event};
use ginnel_verbs::cm::message::{MOST, Parameters, Reject, Reply, Request};
use ginnel_verbs_abi::rdmacm::*;
use ginnel_verbs_abi::*;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{ptr, slice, thread};

/// How long a connecting thread waits for room in a listener's queue.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a connecting thread looks for a listener. In a network, a request takes some time, and programs rely on that: perftest
/// connects twice, without waiting until the other side listens again.
const GRACE: Duration = Duration::from_millis(100);
const INTERVAL: Duration = Duration::from_millis(2);

/// Reads the parameters and the private data of a call. Uses `otherwise` if the caller passes no parameters.
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
    // Nobody listened there when the address was resolved, or the listener has ended since.
    // SAFETY: the caller's identifier; resolving its address has set the field.
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
        Ok(_) => EventKind::Step(RDMA_CM_EVENT_REJECTED, event_channel::no_service()),
        Err(libc::ETIMEDOUT) => EventKind::Step(RDMA_CM_EVENT_UNREACHABLE, -libc::ETIMEDOUT),
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
    // This side uses the retry count that the other side has requested.
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
        // An identifier with a queue pair of its own is established without this call.
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
            Some(Ok(())) => own.core.push(EventKind::Event(Event::Established)),
            // The connection was established meanwhile.
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
        // The other side may have disconnected first. Then its event has been delivered, or is about to be.
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
