//! Queue pairs.
#![allow(unsafe_code)] // C structures and functions.

use crate::address::{self, Address};
use crate::completion::queue;
use crate::context::{self, MAX_ELEMENTS, MAX_INLINE, errno, fail, own};
use crate::events::Unacknowledged;
use crate::memory::domain;
use crate::post::{self, Batch};
use crate::program::ProcessMemory;
use crate::{extended_poll, real, shared_receive_queue};
use ginnel_layout::verbs::{Access, Key, Kind, QpNumber, QpState};
use ginnel_shmem::Mapping;
use ginnel_verbs::lock::Lock;
use ginnel_verbs::queue_pair::{Capacity, Change, QueuePair, QueuePairOptions, Refused};
use ginnel_verbs::receive::Shape;
use ginnel_verbs::remote::MAX_ENTRIES;
use ginnel_verbs::work::{Datagram, Element, Operation, Work};
use ginnel_verbs_abi::*;
use std::ffi::c_int;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use std::{ptr, slice};

/// A queue pair of this library.
#[repr(C)]
pub struct Pair {
    qp: ibv_qp_ex,
    pub pair: Arc<QueuePair<Mapping>>,
    /// The batch of the `ibv_wr_*` functions, if the program wants to use them.
    pub batch: Option<Lock<Batch>>,
    signals_all: bool,
    /// The attributes that the program has set.
    attributes: Mutex<ibv_qp_attr>,
    init: ibv_qp_init_attr,
    pub unacknowledged: Unacknowledged,
}

impl Pair {
    /// Returns the number of the queue pair.
    pub fn number(&self) -> u32 {
        self.pair.number().0
    }
}

/// Returns the queue pair if it is one of this library's.
///
/// # Safety
///
/// The pointer is null or points to a queue pair, of this library or the real one.
pub unsafe fn pair<'a>(qp: *mut ibv_qp) -> Option<&'a Pair> {
    if qp.is_null() {
        return None;
    }
    // SAFETY: the caller's queue pair; the queue pairs of our contexts are ours.
    unsafe {
        own((*qp).context)?;
        Some(&*qp.cast::<Pair>())
    }
}

/// Creates a queue pair, and writes the granted sizes into `init`. `operations` are those of the `ibv_wr_*` functions that the program
/// wants. The error is an errno value.
unsafe fn create(
    pd: *mut ibv_pd,
    init: &mut ibv_qp_init_attr,
    operations: Option<u64>,
) -> Result<*mut ibv_qp, c_int> {
    // SAFETY: the caller's objects.
    let ((context, domain), sends, receives) = unsafe {
        let domain = domain(pd).ok_or(libc::EINVAL)?;
        (domain, queue(init.send_cq).ok_or(libc::EINVAL)?, queue(init.recv_cq).ok_or(libc::EINVAL)?)
    };
    let kind = match init.qp_type {
        IBV_QPT_RC => Kind::RC,
        IBV_QPT_UC => Kind::UC,
        IBV_QPT_UD => Kind::UD,
        _ => return Err(libc::EOPNOTSUPP),
    };
    // SAFETY: null, or the caller's shared receive queue.
    let shared = match unsafe { init.srq.as_ref() } {
        // SAFETY: the caller's shared receive queue, of this library or the real one.
        Some(_) => Some(unsafe { shared_receive_queue::own(init.srq) }.ok_or(libc::EINVAL)?),
        None => None,
    };
    let cap = &mut init.cap;
    let shape = match shared {
        Some(_) => Shape { entries: 1, elements: 1 },
        None => context::shape(cap.max_recv_wr, cap.max_recv_sge).ok_or(libc::EINVAL)?,
    };
    let is_too_much = cap.max_send_wr as usize > MAX_ENTRIES
        || cap.max_send_sge as usize > MAX_ELEMENTS
        || cap.max_inline_data as usize > MAX_INLINE;
    if is_too_much {
        return Err(libc::EINVAL);
    }
    let capacity = Capacity {
        sends: cap.max_send_wr.max(1) as usize,
        elements: cap.max_send_sge.max(1) as usize,
        inline: cap.max_inline_data.max(64) as usize,
        receives: shape,
    };
    let completes = (sends.queue.clone(), receives.queue.clone());
    let device = &context.open.device;
    let (tell, address) = context.teller();
    let wanted = QueuePairOptions {
        kind,
        domain: domain.number,
        capacity,
        shared: shared.map(|shared| shared.queue.clone()),
        completes,
        tell,
    };
    let made = device.create_queue_pair(wanted).map_err(|error| errno(&error))?;
    (cap.max_send_wr, cap.max_send_sge) = (capacity.sends as u32, capacity.elements as u32);
    if shared.is_none() {
        (cap.max_recv_wr, cap.max_recv_sge) = (shape.entries as u32, shape.elements as u32);
    }
    cap.max_inline_data = capacity.inline as u32;

    let mut qp = ibv_qp_ex::ZEROED;
    let base = &mut qp.qp_base;
    // SAFETY: the caller's domain, which is ours and so begins with these fields.
    base.context = unsafe { (*pd).context };
    (base.qp_context, base.pd, base.send_cq, base.recv_cq) =
        (init.qp_context, pd, init.send_cq, init.recv_cq);
    base.srq = init.srq;
    (base.handle, base.qp_num, base.qp_type) = (made.number().0, made.number().0, init.qp_type);
    (base.mutex, base.cond) = (libc::PTHREAD_MUTEX_INITIALIZER, libc::PTHREAD_COND_INITIALIZER);
    let mut attributes = ibv_qp_attr::ZEROED;
    attributes.cap = init.cap;
    domain.users.fetch_add(1, Ordering::Relaxed);
    let signals_all = init.sq_sig_all != 0;
    let batch = operations.map(|operations| {
        post::equip(&mut qp);
        Lock::new(Batch::new(operations, kind, capacity, signals_all))
    });
    let (attributes, unacknowledged) = (Mutex::new(attributes), Unacknowledged::default());
    let pair = Box::into_raw(Box::new(Pair {
        qp,
        pair: made,
        batch,
        signals_all,
        attributes,
        init: *init,
        unacknowledged,
    }));
    address.store(pair.expose_provenance(), Ordering::Relaxed);
    Ok(pair.cast())
}

fn made(result: Result<*mut ibv_qp, c_int>) -> *mut ibv_qp {
    result.unwrap_or_else(|error| {
        fail(error);
        ptr::null_mut()
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: the caller's domain and structure.
    unsafe {
        match domain(pd) {
            Some(_) => made(create(pd, &mut *init, None)),
            None => real::ibv_create_qp(pd, init),
        }
    }
}

pub unsafe extern "C" fn create_qp_ex(_: *mut ibv_context, init: *mut ibv_qp_init_attr_ex) -> *mut ibv_qp {
    // SAFETY: the caller's structure, which begins with the fields of the shorter one.
    unsafe {
        let wanted = post::wanted(init);
        made(wanted.and_then(|wanted| create((*init).pd, &mut *init.cast::<ibv_qp_init_attr>(), wanted)))
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: the caller's queue pair.
    unsafe {
        let Some(own) = pair(qp) else { return real::ibv_destroy_qp(qp) };
        if let Some((context, domain)) = domain(own.qp.qp_base.pd) {
            let held = extended_poll::hold(own.qp.qp_base.send_cq, own.qp.qp_base.recv_cq);
            context.open.device.destroy_queue_pair(&own.pair);
            drop(held);
            context.events.remove(|happened| happened.address == qp.addr());
            own.unacknowledged.wait();
            domain.users.fetch_sub(1, Ordering::Release);
        }
        drop(Box::from_raw(qp.cast::<Pair>()));
    }
    0
}

/// Returns the attributes that a state transition requires (InfiniBand Architecture Specification 1.2.1, table 91).
fn required(kind: Kind, from: QpState, to: QpState) -> u32 {
    let (is_reliable, is_connected) = (kind == Kind::RC, kind != Kind::UD);
    let if_connected = |bits| if is_connected { bits } else { 0 };
    let if_reliable = |bits| if is_reliable { bits } else { 0 };
    let bits = match (from, to) {
        (QpState::RESET, QpState::INIT) => {
            let rights = if is_connected { IBV_QP_ACCESS_FLAGS } else { IBV_QP_QKEY };
            IBV_QP_PKEY_INDEX | IBV_QP_PORT | rights
        }
        (QpState::INIT, QpState::RTR) => {
            if_connected(IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN)
                | if_reliable(IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)
        }
        (QpState::RTR, QpState::RTS) => {
            let timers = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
            IBV_QP_SQ_PSN | if_reliable(timers)
        }
        _ => return 0,
    };
    IBV_QP_STATE | bits
}

/// Returns how long to wait for a peer that does not answer, from the attributes `timeout` and `retry_cnt` (InfiniBand Architecture
/// Specification 1.2.1, 9.9.2.1.1). `None` means without limit.
fn timeout(attributes: &ibv_qp_attr) -> Option<Duration> {
    let exponent = u32::from(attributes.timeout & 31);
    let once = Duration::from_nanos(4096 << exponent);
    (exponent > 0).then(|| once * (u32::from(attributes.retry_cnt & 7) + 1))
}

/// Returns how long to wait for the peer to post a receive, from the attribute `rnr_retry`, of which 7 means without limit (`None`). An
/// adapter would use the peer's RNR timer.
fn patience(attributes: &ibv_qp_attr) -> Option<Duration> {
    let times = attributes.rnr_retry & 7;
    (times < 7).then(|| Duration::from_millis(10) * (u32::from(times) + 1))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    // SAFETY: the caller's queue pair and structure.
    let (own, new) = unsafe {
        let Some(own) = pair(qp) else { return real::ibv_modify_qp(qp, attr, mask) };
        (own, &*attr)
    };
    let mask = mask.cast_unsigned();
    let has = |bit| mask & bit != 0;
    let from = own.pair.state();
    let to = if has(IBV_QP_STATE) { QpState(new.qp_state) } else { from };
    let is_complete = |kind, from, to| mask & required(kind, from, to) == required(kind, from, to);
    if has(IBV_QP_CUR_STATE) && QpState(new.cur_qp_state) != from
        || !is_complete(own.pair.kind(), from, to)
        || has(IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE | IBV_QP_RATE_LIMIT)
        || has(IBV_QP_PORT) && new.port_num != 1
        || has(IBV_QP_PKEY_INDEX) && new.pkey_index != 0
    {
        return libc::EINVAL;
    }
    let mut attributes = own.attributes.lock().unwrap_or_else(PoisonError::into_inner);
    let mut change = Change::default();
    if has(IBV_QP_ACCESS_FLAGS) {
        change.access = Some(Access(new.qp_access_flags));
    }
    let mut next = *attributes;
    macro_rules! take {
        ($($bit:ident $field:ident),*) => { $(if has($bit) { next.$field = new.$field; })* };
    }
    take!(
        IBV_QP_ACCESS_FLAGS qp_access_flags, IBV_QP_PKEY_INDEX pkey_index, IBV_QP_PORT port_num, IBV_QP_AV ah_attr,
        IBV_QP_PATH_MTU path_mtu, IBV_QP_TIMEOUT timeout, IBV_QP_RETRY_CNT retry_cnt, IBV_QP_RNR_RETRY rnr_retry,
        IBV_QP_RQ_PSN rq_psn, IBV_QP_SQ_PSN sq_psn, IBV_QP_MAX_QP_RD_ATOMIC max_rd_atomic,
        IBV_QP_MAX_DEST_RD_ATOMIC max_dest_rd_atomic, IBV_QP_MIN_RNR_TIMER min_rnr_timer, IBV_QP_DEST_QPN dest_qp_num,
        IBV_QP_QKEY qkey
    );
    if has(IBV_QP_QKEY) {
        change.qkey = Some(new.qkey);
    }
    if has(IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT) {
        change.timeout = Some(timeout(&next));
    }
    if has(IBV_QP_RNR_RETRY) {
        change.patience = Some(patience(&next));
    }
    if to == QpState::RTR && from != to && own.pair.kind() != Kind::UD {
        change.peer = Some(QpNumber(new.dest_qp_num & 0xff_ffff));
    }
    match own.pair.modify(to, change) {
        Ok(()) => {
            *attributes = next;
            // SAFETY: the caller's queue pair, which is ours. The lock of its attributes keeps other calls from changing the state.
            unsafe { (*qp).state = to.0 };
            0
        }
        Err(_) => libc::EINVAL,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: the caller's queue pair and structures.
    unsafe {
        let Some(own) = pair(qp) else { return real::ibv_query_qp(qp, attr, mask, init) };
        // Other calls change the state under this lock.
        let guard = own.attributes.lock().unwrap_or_else(PoisonError::into_inner);
        let mut attributes = *guard;
        let state = own.pair.state().0;
        (attributes.qp_state, attributes.cur_qp_state) = (state, state);
        (*qp).state = state;
        drop(guard);
        attr.write(attributes);
        init.write(own.init);
    }
    0
}

/// Returns the operation of a work request, or `None` if it is not supported.
unsafe fn operation(wr: &ibv_send_wr) -> Option<Operation> {
    let solicited = wr.send_flags & IBV_SEND_SOLICITED != 0;
    // SAFETY: the opcode says which member of the union the program has set. Both members that are read here consist of integers.
    let (rdma, atomic) = unsafe { (wr.wr.rdma, wr.wr.atomic) };
    let (address, key) = (rdma.remote_addr, Key(rdma.rkey));
    Some(match wr.opcode {
        IBV_WR_SEND => Operation::Send { immediate: None, solicited },
        IBV_WR_SEND_WITH_IMM => Operation::Send { immediate: Some(wr.imm_data), solicited },
        IBV_WR_RDMA_WRITE => Operation::Write { address, key, immediate: None, solicited },
        IBV_WR_RDMA_WRITE_WITH_IMM => {
            Operation::Write { address, key, immediate: Some(wr.imm_data), solicited }
        }
        IBV_WR_RDMA_READ => Operation::Read { address, key },
        IBV_WR_ATOMIC_CMP_AND_SWP => Operation::CompareAndSwap {
            address: atomic.remote_addr,
            key: Key(atomic.rkey),
            compare: atomic.compare_add,
            swap: atomic.swap,
        },
        IBV_WR_ATOMIC_FETCH_AND_ADD => Operation::FetchAndAdd {
            address: atomic.remote_addr,
            key: Key(atomic.rkey),
            add: atomic.compare_add,
        },
        _ => return None,
    })
}

/// Returns the destination of a datagram, or `None` if the address handle is not ours.
///
/// # Safety
///
/// The address handle is null, or one of this library or the real one.
pub unsafe fn datagram(own: &Pair, ud: ibv_send_wr_ud) -> Option<Datagram> {
    // SAFETY: the program's address handle.
    let Address { lid, .. } = unsafe { address::own(ud.ah) }?;
    // If the highest bit is set, the queue pair's own Q_Key is used (InfiniBand Architecture Specification 1.2.1, 10.2.5).
    let qkey = match ud.remote_qkey {
        qkey if qkey >> 31 == 1 => own.attributes.lock().unwrap_or_else(PoisonError::into_inner).qkey,
        qkey => qkey,
    };
    Some(Datagram { number: QpNumber(ud.remote_qpn & QpNumber::MASK), lid: *lid, qkey })
}

/// Returns the elements of a request. The two structures have the same layout.
pub unsafe fn elements<'a>(list: *const ibv_sge, count: c_int) -> &'a [Element] {
    const _: () = assert!(size_of::<ibv_sge>() == size_of::<Element>());
    match usize::try_from(count) {
        // SAFETY: the program promises that there are `count` elements.
        Ok(count) if count > 0 && !list.is_null() => unsafe { slice::from_raw_parts(list.cast(), count) },
        _ => &[],
    }
}

/// Returns the errno value of a refusal.
pub fn refused(refused: Refused) -> c_int {
    match refused {
        Refused::Full => libc::ENOMEM,
        Refused::Invalid => libc::EINVAL,
    }
}

pub unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    mut wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: a program gets this function from a context of ours, so the queue pair is ours. The list is the program's.
    unsafe {
        let own = &*qp.cast::<Pair>();
        // The lock keeps these requests from being mixed with those of another thread's batch.
        let _held = own.batch.as_ref().map(Lock::lock);
        let is_ud = own.pair.kind() == Kind::UD;
        while let Some(request) = wr.as_ref() {
            let datagram = if is_ud { datagram(own, request.wr.ud) } else { None };
            let result = match operation(request) {
                Some(operation) => own.pair.post(
                    &ProcessMemory,
                    &Work {
                        id: request.wr_id,
                        operation,
                        datagram,
                        elements: elements(request.sg_list, request.num_sge),
                        is_inline: request.send_flags & IBV_SEND_INLINE != 0,
                        is_signaled: own.signals_all || request.send_flags & IBV_SEND_SIGNALED != 0,
                    },
                ),
                None => Err(Refused::Invalid),
            };
            if let Err(error) = result {
                *bad = wr;
                return refused(error);
            }
            wr = request.next;
        }
    }
    0
}

pub unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    mut wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: a program gets this function from a context of ours, so the queue pair is ours. The list is the program's.
    unsafe {
        let own = &*qp.cast::<Pair>();
        while let Some(request) = wr.as_ref() {
            let elements = elements(request.sg_list, request.num_sge);
            if let Err(error) = own.pair.post_receive(request.wr_id, elements) {
                *bad = wr;
                return refused(error);
            }
            wr = request.next;
        }
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    // SAFETY: the caller's queue pair.
    unsafe {
        match pair(qp) {
            Some(own) if own.batch.is_some() => qp.cast(),
            Some(_) => ptr::null_mut(),
            None => real::ibv_qp_to_qp_ex(qp),
        }
    }
}
