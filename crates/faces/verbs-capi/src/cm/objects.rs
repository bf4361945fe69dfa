//! The queue pairs and other queues of an identifier.
#![allow(unsafe_code)] // C structures and functions.

use super::id::{self, Id};
use super::{Register, done, failed, opened};
use crate::channel::{ginnel_ibv_create_comp_channel, ginnel_ibv_destroy_comp_channel};
use crate::completion::{ginnel_ibv_create_cq, ginnel_ibv_destroy_cq};
use crate::context::fail as set_errno;
use crate::queue_pair::{create_qp_ex, ginnel_ibv_destroy_qp, ginnel_ibv_modify_qp};
use crate::real;
use crate::shared_receive_queue::{create_srq_ex, ginnel_ibv_destroy_srq};
use ginnel_verbs::queue_pair::lid;
use ginnel_verbs_abi::rdmacm::*;
use ginnel_verbs_abi::*;
use std::ffi::{c_int, c_void};
use std::ptr;

/// The timeout that an adapter's kernel would use in a network with a few switches: 4.096 microseconds times 2 to this power.
const TIMEOUT: u8 = 18;

fn last_error() -> c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// Returns the attributes that a queue pair of this identifier needs for a state, with their mask.
fn attributes(own: &Id, is_datagram: bool, state: u32) -> Option<(ibv_qp_attr, u32)> {
    let mut attr = ibv_qp_attr::ZEROED;
    attr.qp_state = state;
    let (this, theirs) = own.parameters();
    let mask = match (state, is_datagram) {
        (IBV_QPS_INIT, _) => {
            attr.port_num = 1;
            attr.qkey = RDMA_UDP_QKEY;
            attr.qp_access_flags = IBV_ACCESS_LOCAL_WRITE
                | IBV_ACCESS_REMOTE_WRITE
                | IBV_ACCESS_REMOTE_READ
                | IBV_ACCESS_REMOTE_ATOMIC;
            let rights = if is_datagram { IBV_QP_QKEY } else { IBV_QP_ACCESS_FLAGS };
            IBV_QP_PKEY_INDEX | IBV_QP_PORT | rights
        }
        (IBV_QPS_RTR, true) => 0,
        (IBV_QPS_RTR, false) => {
            attr.path_mtu = IBV_MTU_4096;
            attr.dest_qp_num = theirs.queue_pair;
            attr.max_dest_rd_atomic = this.responder_resources;
            (attr.ah_attr.dlid, attr.ah_attr.port_num) = (lid(own.peer_member()), 1);
            IBV_QP_AV
                | IBV_QP_PATH_MTU
                | IBV_QP_DEST_QPN
                | IBV_QP_RQ_PSN
                | IBV_QP_MAX_DEST_RD_ATOMIC
                | IBV_QP_MIN_RNR_TIMER
        }
        (IBV_QPS_RTS, true) => IBV_QP_SQ_PSN,
        (IBV_QPS_RTS, false) => {
            attr.timeout = TIMEOUT;
            attr.retry_cnt = this.retry_count;
            // Each side tells the other how often to retry a message for which it has no receive, so this side uses the other side's
            // count.
            attr.rnr_retry = theirs.rnr_retry_count;
            attr.max_rd_atomic = this.initiator_depth;
            IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC
        }
        _ => return None,
    };
    Some((attr, mask | IBV_QP_STATE))
}

fn change(own: &Id, qp: *mut ibv_qp, state: u32) -> Result<(), c_int> {
    // SAFETY: the caller's queue pair, which belongs to this identifier.
    unsafe {
        let is_datagram = (*qp).qp_type == IBV_QPT_UD;
        let (mut attr, mask) = attributes(own, is_datagram, state).ok_or(libc::EINVAL)?;
        match ginnel_ibv_modify_qp(qp, &raw mut attr, mask.cast_signed()) {
            0 => Ok(()),
            error => Err(error),
        }
    }
}

/// Connects a queue pair to the one that the other side has announced.
pub fn connect(own: &Id, qp: *mut ibv_qp) -> Result<(), c_int> {
    change(own, qp, IBV_QPS_RTR)?;
    change(own, qp, IBV_QPS_RTS)
}

/// Puts a queue pair in the error state. Does nothing if the pointer is null.
pub fn fail(qp: *mut ibv_qp) {
    if qp.is_null() {
        return;
    }
    let mut attr = ibv_qp_attr::ZEROED;
    attr.qp_state = IBV_QPS_ERR;
    // SAFETY: the identifier's queue pair. That of a datagram service may keep its state.
    unsafe { ginnel_ibv_modify_qp(qp, &raw mut attr, IBV_QP_STATE.cast_signed()) };
}

/// Creates a completion queue that the program did not provide, and a channel for its events.
unsafe fn create_queue(
    id: *mut rdma_cm_id,
    entries: u32,
) -> Result<(*mut ibv_comp_channel, *mut ibv_cq), c_int> {
    // SAFETY: the caller's identifier.
    unsafe {
        let channel = ginnel_ibv_create_comp_channel((*id).verbs);
        if channel.is_null() {
            return Err(last_error());
        }
        let cq = ginnel_ibv_create_cq((*id).verbs, entries.cast_signed(), id.cast::<c_void>(), channel, 0);
        if cq.is_null() {
            let error = last_error();
            ginnel_ibv_destroy_comp_channel(channel);
            return Err(error);
        }
        Ok((channel, cq))
    }
}

unsafe fn create_queues(id: *mut rdma_cm_id, sends: u32, receives: u32) -> Result<(), c_int> {
    // SAFETY: the caller's identifier.
    unsafe {
        if receives > 0 {
            ((*id).recv_cq_channel, (*id).recv_cq) = create_queue(id, receives)?;
        }
        if sends > 0 {
            ((*id).send_cq_channel, (*id).send_cq) = create_queue(id, sends)?;
        }
    }
    Ok(())
}

unsafe fn destroy_queues(id: *mut rdma_cm_id) {
    // SAFETY: the caller's identifier.
    unsafe {
        let destroy = |channel: &mut *mut ibv_comp_channel, cq: &mut *mut ibv_cq| {
            // A queue without a channel here was provided by the program, or does not exist.
            if !channel.is_null() {
                ginnel_ibv_destroy_cq(std::mem::replace(cq, ptr::null_mut()));
                ginnel_ibv_destroy_comp_channel(std::mem::replace(channel, ptr::null_mut()));
            }
        };
        destroy(&mut (*id).recv_cq_channel, &mut (*id).recv_cq);
        destroy(&mut (*id).send_cq_channel, &mut (*id).send_cq);
    }
}

unsafe fn create_ex(id: *mut rdma_cm_id, init: &mut ibv_qp_init_attr_ex) -> Result<(), c_int> {
    let differ = |a: usize, b: usize| a != 0 && b != 0 && a != b;
    // SAFETY: the caller's identifier and structure.
    unsafe {
        let own = id::own(id).ok_or(libc::EINVAL)?;
        if !(*id).qp.is_null() || (*id).verbs.is_null() {
            return Err(libc::EINVAL);
        }
        if init.comp_mask & IBV_QP_INIT_ATTR_PD == 0 || init.pd.is_null() {
            init.comp_mask |= IBV_QP_INIT_ATTR_PD;
            init.pd = (*id).pd;
        }
        let is_wrong = init.pd.is_null()
            || (*init.pd).context != (*id).verbs
            || differ((*id).recv_cq.addr(), init.recv_cq.addr())
            || differ((*id).send_cq.addr(), init.send_cq.addr())
            || differ((*id).srq.addr(), init.srq.addr());
        if is_wrong {
            return Err(libc::EINVAL);
        }
        if init.srq.is_null() {
            init.srq = (*id).srq;
        }
        let entries = |given: *mut ibv_cq, own: *mut ibv_cq, wanted: u32| {
            if given.is_null() && own.is_null() { wanted.max(1) } else { 0 }
        };
        let sends = entries(init.send_cq, (*id).send_cq, init.cap.max_send_wr);
        let receives = entries(init.recv_cq, (*id).recv_cq, init.cap.max_recv_wr);
        let made = create_queues(id, sends, receives).and_then(|()| {
            if init.send_cq.is_null() {
                init.send_cq = (*id).send_cq;
            }
            if init.recv_cq.is_null() {
                init.recv_cq = (*id).recv_cq;
            }
            let qp = create_qp_ex((*id).verbs, &raw mut *init);
            if qp.is_null() { Err(last_error()) } else { Ok(qp) }
        });
        let prepared = made.and_then(|qp| {
            let states: &[u32] = match (*qp).qp_type {
                IBV_QPT_UD => &[IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS],
                _ => &[IBV_QPS_INIT],
            };
            let changed = states.iter().try_for_each(|state| change(own, qp, *state));
            changed.map(|()| qp).inspect_err(|_| _ = ginnel_ibv_destroy_qp(qp))
        });
        match prepared {
            Ok(qp) => ((*id).qp, (*id).pd) = (qp, (*qp).pd),
            Err(error) => {
                destroy_queues(id);
                return Err(error);
            }
        }
    }
    Ok(())
}

/// Creates a queue pair for an identifier, in the given protection domain, or in the device's default one.
///
/// # Safety
///
/// The identifier is ours, and the domain is null or belongs to its device.
pub unsafe fn create(id: *mut rdma_cm_id, pd: *mut ibv_pd, init: &mut ibv_qp_init_attr) -> Result<(), c_int> {
    let mut extended = ibv_qp_init_attr_ex::ZEROED;
    (extended.qp_context, extended.send_cq, extended.recv_cq) = (init.qp_context, init.send_cq, init.recv_cq);
    (extended.srq, extended.cap, extended.qp_type) = (init.srq, init.cap, init.qp_type);
    (extended.sq_sig_all, extended.comp_mask, extended.pd) = (init.sq_sig_all, IBV_QP_INIT_ATTR_PD, pd);
    // SAFETY: the caller's promise.
    unsafe { create_ex(id, &mut extended)? };
    init.cap = extended.cap;
    Ok(())
}

/// Creates the queue pair that a listener wants for each connection.
///
/// # Safety
///
/// Both identifiers are ours.
pub unsafe fn create_wanted(
    listener: &Id,
    listen: *mut rdma_cm_id,
    id: *mut rdma_cm_id,
) -> Result<(), c_int> {
    match listener.wanted() {
        // SAFETY: the caller's promise.
        Some(mut wanted) => unsafe { create(id, (*listen).pd, &mut wanted) },
        None => Ok(()),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_create_qp(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: the caller's identifier, domain and structure.
    unsafe {
        match id::own(id) {
            Some(_) => done(create(id, pd, &mut *init)),
            None => real::rdma_create_qp(id, pd, init),
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_create_qp_ex(id: *mut rdma_cm_id, init: *mut ibv_qp_init_attr_ex) -> c_int {
    // SAFETY: the caller's identifier and structure.
    unsafe {
        match id::own(id) {
            Some(_) => done(create_ex(id, &mut *init)),
            None => real::rdma_create_qp_ex(id, init),
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_rdma_destroy_qp(id: *mut rdma_cm_id) {
    // SAFETY: the caller's identifier.
    unsafe {
        if id::own(id).is_none() {
            return real::rdma_destroy_qp(id);
        }
        ginnel_ibv_destroy_qp(std::mem::replace(&mut (*id).qp, ptr::null_mut()));
        destroy_queues(id);
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_create_srq_ex(
    id: *mut rdma_cm_id,
    init: *mut ibv_srq_init_attr_ex,
) -> c_int {
    // SAFETY: the caller's identifier and structure.
    unsafe {
        if id::own(id).is_none() {
            return real::rdma_create_srq_ex(id, init);
        }
        let init = &mut *init;
        if !(*id).srq.is_null() || (*id).verbs.is_null() {
            return failed(libc::EINVAL);
        }
        if init.comp_mask & IBV_SRQ_INIT_ATTR_PD == 0 || init.pd.is_null() {
            init.comp_mask |= IBV_SRQ_INIT_ATTR_PD;
            init.pd = (*id).pd;
        }
        let srq = create_srq_ex((*id).verbs, init);
        if srq.is_null() {
            return -1;
        }
        (*id).srq = srq;
        if (*id).pd.is_null() {
            (*id).pd = init.pd;
        }
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_create_srq(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    init: *mut ibv_srq_init_attr,
) -> c_int {
    // SAFETY: the caller's identifier, domain and structure.
    unsafe {
        if id::own(id).is_none() {
            return real::rdma_create_srq(id, pd, init);
        }
        let mut extended = ibv_srq_init_attr_ex::ZEROED;
        (extended.srq_context, extended.attr) = ((*init).srq_context, (*init).attr);
        (extended.comp_mask, extended.srq_type) =
            (IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD, IBV_SRQT_BASIC);
        extended.pd = pd;
        let result = ginnel_rdma_create_srq_ex(id, &raw mut extended);
        (*init).attr = extended.attr;
        result
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_rdma_destroy_srq(id: *mut rdma_cm_id) {
    // SAFETY: the caller's identifier.
    unsafe {
        if id::own(id).is_none() {
            return real::rdma_destroy_srq(id);
        }
        ginnel_ibv_destroy_srq(std::mem::replace(&mut (*id).srq, ptr::null_mut()));
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_init_qp_attr(
    id: *mut rdma_cm_id,
    attr: *mut ibv_qp_attr,
    mask: *mut c_int,
) -> c_int {
    // SAFETY: the caller's identifier, structure and word.
    unsafe {
        let Some(own) = id::own(id) else { return real::rdma_init_qp_attr(id, attr, mask) };
        let Some((filled, bits)) = attributes(own, own.is_datagram(), (*attr).qp_state) else {
            return failed(libc::EINVAL);
        };
        attr.write(filled);
        mask.write(bits.cast_signed());
    }
    0
}

/// Lists of this library's devices that programs hold.
pub static LISTS: Register = Register::new();

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_get_devices(count: *mut c_int) -> *mut *mut ibv_context {
    let contexts: Vec<_> = opened().iter().map(super::Opened::context).collect();
    if contexts.is_empty() {
        // SAFETY: the caller's word.
        return unsafe { real::rdma_get_devices(count) };
    }
    // SAFETY: the size is not zero; the list has room for all contexts and a null.
    unsafe {
        let list = libc::calloc(contexts.len() + 1, size_of::<*mut ibv_context>()).cast::<*mut ibv_context>();
        if list.is_null() {
            set_errno(libc::ENOMEM);
            return list;
        }
        ptr::copy_nonoverlapping(contexts.as_ptr(), list, contexts.len());
        if !count.is_null() {
            count.write(contexts.len() as c_int);
        }
        LISTS.add(list);
        list
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_free_devices(list: *mut *mut ibv_context) {
    // SAFETY: the caller's list, which the caller gives up.
    unsafe {
        if LISTS.remove(list) {
            libc::free(list.cast());
        } else {
            real::rdma_free_devices(list);
        }
    }
}
