//! Completion queues.
#![allow(unsafe_code)] // C structures and functions.

use crate::context::{MAX_COMPLETIONS, errno, fail, own as own_context};
use crate::events::Unacknowledged;
use crate::extended_poll::{self, Extended};
use crate::program::ProcessMemory;
use crate::{channel, real};
use ginnel_shmem::Mapping;
use ginnel_verbs::completion_queue::CompletionQueue;
use ginnel_verbs::work::Completed;
use ginnel_verbs_abi::*;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A completion queue of this library. It begins with `ibv_cq_ex`, which itself begins like `ibv_cq`.
#[repr(C)]
pub struct Queue {
    cq: ibv_cq_ex,
    pub queue: Arc<CompletionQueue<Mapping>>,
    pub extended: Extended,
    pub unacknowledged: Unacknowledged,
}

/// Returns the completion queue if it is one of this library's.
///
/// # Safety
///
/// The pointer is null or points to a completion queue, of this library or the real one.
pub unsafe fn queue<'a>(cq: *mut ibv_cq) -> Option<&'a Queue> {
    if cq.is_null() {
        return None;
    }
    // SAFETY: the caller's queue; the queues of our contexts are ours.
    unsafe {
        own_context((*cq).context)?;
        Some(&*cq.cast::<Queue>())
    }
}

unsafe fn create(
    context: *mut ibv_context,
    entries: u32,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
) -> *mut ibv_cq_ex {
    if entries == 0 || entries as usize > MAX_COMPLETIONS {
        fail(libc::EINVAL);
        return ptr::null_mut();
    }
    let mut cq = ibv_cq_ex::ZEROED;
    (cq.context, cq.channel, cq.cq_context) = (context, channel, cq_context);
    cq.cqe = entries.cast_signed();
    (cq.mutex, cq.cond) = (libc::PTHREAD_MUTEX_INITIALIZER, libc::PTHREAD_COND_INITIALIZER);
    extended_poll::equip(&mut cq);
    // The address is known only once the queue has been allocated. There are no events before that.
    let address = Arc::<AtomicUsize>::default();
    // SAFETY: the caller's channel.
    let queue = match unsafe { channel::own(channel) } {
        Some(channel) => {
            let (events, address) = (channel.events.clone(), address.clone());
            channel.users.fetch_add(1, Ordering::Relaxed);
            let tell = move || events.push(address.load(Ordering::Relaxed));
            CompletionQueue::with_events(entries as usize, Box::new(tell))
        }
        None => CompletionQueue::new(entries as usize),
    };
    let (queue, extended) = (Arc::new(queue), Extended::new());
    let queue = Queue { cq, queue, extended, unacknowledged: Unacknowledged::default() };
    let queue = Box::into_raw(Box::new(queue));
    address.store(queue.expose_provenance(), Ordering::Relaxed);
    queue.cast()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_ibv_create_cq(
    context: *mut ibv_context,
    entries: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    // SAFETY: the caller's context.
    unsafe {
        if own_context(context).is_none() {
            return real::ibv_create_cq(context, entries, cq_context, channel, vector);
        }
        create(context, u32::try_from(entries).unwrap_or(0), cq_context, channel).cast()
    }
}

pub unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    init: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    // SAFETY: the caller's context and structure.
    unsafe {
        if let Err(error) = extended_poll::is_offered(context, init) {
            fail(error);
            return ptr::null_mut();
        }
        create(context, (*init).cqe, (*init).cq_context, (*init).channel)
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    // SAFETY: the caller's queue.
    unsafe {
        let Some(own) = queue(cq) else { return real::ibv_destroy_cq(cq) };
        if !own.queue.is_unused() {
            return libc::EBUSY;
        }
        if let Some(channel) = channel::own(own.cq.channel) {
            channel.events.remove(|address| *address == cq.addr());
            // Another thread may be handling an event of this queue.
            own.unacknowledged.wait();
            channel.users.fetch_sub(1, Ordering::Release);
        }
        drop(Box::from_raw(cq.cast::<Queue>()));
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_resize_cq(cq: *mut ibv_cq, entries: c_int) -> c_int {
    // SAFETY: the caller's queue.
    unsafe {
        let Some(own) = queue(cq) else { return real::ibv_resize_cq(cq, entries) };
        let count = usize::try_from(entries).unwrap_or(0);
        if count == 0 || count > MAX_COMPLETIONS || !own.queue.resize(count) {
            return libc::EINVAL;
        }
        (*cq).cqe = entries;
    }
    0
}

/// Converts a completion to C's structure.
#[inline]
pub fn write(completed: &Completed) -> ibv_wc {
    let mut wc = ibv_wc::ZEROED;
    wc.wr_id = completed.id;
    wc.status = completed.status.0;
    wc.opcode = completed.opcode.0;
    wc.byte_len = completed.length;
    wc.qp_num = completed.queue_pair.0;
    (wc.src_qp, wc.slid) = (completed.source.0, completed.lid);
    if let Some(immediate) = completed.immediate {
        wc.imm_data = immediate;
        wc.wc_flags = IBV_WC_WITH_IMM;
    }
    wc
}

pub unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, most: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: a program gets this function from a context of ours, so the queue is ours. The program promises room for `most`
    // completions.
    unsafe {
        let own = &*cq.cast::<Queue>();
        let _held = own.extended.hold();
        let mut next = wc;
        let most = usize::try_from(most).unwrap_or(0);
        let found = own.queue.poll(&ProcessMemory, most, |completed| {
            next.write(write(&completed));
            next = next.add(1);
        });
        found as c_int
    }
}

pub unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: a program gets this function from a context of ours, so the queue is ours.
    unsafe {
        let own = &*cq.cast::<Queue>();
        if let Some(context) = own_context((*cq).context).filter(|_| own.queue.has_events())
            && let Err(error) = context.start_notifier()
        {
            return errno(&error);
        }
        own.queue.arm(solicited_only != 0);
    }
    0
}
