//! Shared receive queues.
#![allow(unsafe_code)] // C structures and functions.

use crate::context::{self, errno, fail, own as own_context};
use crate::events::Unacknowledged;
use crate::memory::domain;
use crate::queue_pair::{elements, refused};
use crate::real;
use ginnel_shmem::Mapping;
use ginnel_verbs::shared_receive_queue::SharedReceiveQueue;
use ginnel_verbs_abi::*;
use std::ffi::c_int;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A shared receive queue of this library.
#[repr(C)]
pub struct Shared {
    srq: ibv_srq,
    pub queue: Arc<SharedReceiveQueue<Mapping>>,
    pub unacknowledged: Unacknowledged,
}

/// Returns the shared receive queue if it is one of this library's.
///
/// # Safety
///
/// The pointer is null or points to a shared receive queue, of this library or the real one.
pub unsafe fn own<'a>(srq: *mut ibv_srq) -> Option<&'a Shared> {
    // SAFETY: the caller's queue; the queues of our contexts are ours.
    unsafe {
        own_context(srq.as_ref()?.context)?;
        Some(&*srq.cast::<Shared>())
    }
}

/// Creates a shared receive queue, and writes the granted sizes into `init`. The error is an errno value.
unsafe fn create(pd: *mut ibv_pd, init: &mut ibv_srq_init_attr) -> Result<*mut ibv_srq, c_int> {
    // SAFETY: the caller's domain.
    let (own, domain) = unsafe { domain(pd) }.ok_or(libc::EINVAL)?;
    let shape = context::shape(init.attr.max_wr, init.attr.max_sge).ok_or(libc::EINVAL)?;
    let (tell, address) = own.teller();
    let made = own.open.device.create_shared_receive_queue(domain.number, shape, tell);
    let queue = made.map_err(|error| errno(&error))?;
    (init.attr.max_wr, init.attr.max_sge) = (shape.entries as u32, shape.elements as u32);
    let mut srq = ibv_srq::ZEROED;
    // SAFETY: the caller's domain, which is ours and so begins with these fields.
    srq.context = unsafe { (*pd).context };
    (srq.srq_context, srq.pd, srq.handle) = (init.srq_context, pd, queue.number().0);
    (srq.mutex, srq.cond) = (libc::PTHREAD_MUTEX_INITIALIZER, libc::PTHREAD_COND_INITIALIZER);
    domain.users.fetch_add(1, Ordering::Relaxed);
    let shared = Box::into_raw(Box::new(Shared { srq, queue, unacknowledged: Unacknowledged::default() }));
    address.store(shared.expose_provenance(), Ordering::Relaxed);
    Ok(shared.cast())
}

fn made(result: Result<*mut ibv_srq, c_int>) -> *mut ibv_srq {
    result.unwrap_or_else(|error| {
        fail(error);
        ptr::null_mut()
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_create_srq(pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    // SAFETY: the caller's domain and structure.
    unsafe {
        match domain(pd) {
            Some(_) => made(create(pd, &mut *init)),
            None => real::ibv_create_srq(pd, init),
        }
    }
}

/// Creates a shared receive queue. Only basic ones are supported.
pub unsafe extern "C" fn create_srq_ex(_: *mut ibv_context, init: *mut ibv_srq_init_attr_ex) -> *mut ibv_srq {
    // SAFETY: the caller's structure, which begins with the fields of the shorter one.
    unsafe {
        let mask = (*init).comp_mask;
        let is_basic = mask & IBV_SRQ_INIT_ATTR_TYPE == 0 || (*init).srq_type == IBV_SRQT_BASIC;
        if mask & !(IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD) != 0 || !is_basic {
            return made(Err(libc::EOPNOTSUPP));
        }
        if mask & IBV_SRQ_INIT_ATTR_PD == 0 {
            return made(Err(libc::EINVAL));
        }
        made(create((*init).pd, &mut *init.cast::<ibv_srq_init_attr>()))
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_ibv_destroy_srq(srq: *mut ibv_srq) -> c_int {
    // SAFETY: the caller's queue.
    unsafe {
        let Some(shared) = own(srq) else { return real::ibv_destroy_srq(srq) };
        if let Some((context, domain)) = domain(shared.srq.pd) {
            if !context.open.device.destroy_shared_receive_queue(&shared.queue) {
                return libc::EBUSY;
            }
            context.events.remove(|happened| happened.address == srq.addr());
            shared.unacknowledged.wait();
            domain.users.fetch_sub(1, Ordering::Release);
        }
        drop(Box::from_raw(srq.cast::<Shared>()));
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int {
    // SAFETY: the caller's queue and structure.
    unsafe {
        let Some(shared) = own(srq) else { return real::ibv_modify_srq(srq, attr, mask) };
        let mask = mask.cast_unsigned();
        if mask & IBV_SRQ_MAX_WR != 0 {
            return libc::EOPNOTSUPP;
        }
        if mask & IBV_SRQ_LIMIT != 0 {
            if (*attr).srq_limit as usize > shared.queue.shape().entries {
                return libc::EINVAL;
            }
            shared.queue.set_limit((*attr).srq_limit);
        }
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    // SAFETY: the caller's queue and structure.
    unsafe {
        let Some(shared) = own(srq) else { return real::ibv_query_srq(srq, attr) };
        let shape = shared.queue.shape();
        attr.write(ibv_srq_attr {
            max_wr: shape.entries as u32,
            max_sge: shape.elements as u32,
            srq_limit: shared.queue.limit(),
        });
    }
    0
}

pub unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    mut wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: a program gets this function from a context of ours, so the queue is ours. The list is the program's.
    unsafe {
        let shared = &*srq.cast::<Shared>();
        while let Some(request) = wr.as_ref() {
            let elements = elements(request.sg_list, request.num_sge);
            if let Err(error) = shared.queue.post_receive(request.wr_id, elements) {
                *bad = wr;
                return refused(error);
            }
            wr = request.next;
        }
    }
    0
}
