//! Completion channels.
#![allow(unsafe_code)] // C structures and functions.

use crate::completion::{Queue, queue};
use crate::context::{fail, own as own_context};
use crate::events::Events;
use crate::real;
use ginnel_verbs_abi::*;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// A completion channel of this library.
#[repr(C)]
pub struct Channel {
    channel: ibv_comp_channel,
    /// Each event is the address of a completion queue.
    pub events: Arc<Events<usize>>,
    /// Number of completion queues that use the channel.
    pub users: AtomicU32,
}

/// Returns the completion channel if it is one of this library's.
///
/// # Safety
///
/// The pointer is null or points to a completion channel, of this library or the real one.
pub unsafe fn own<'a>(channel: *mut ibv_comp_channel) -> Option<&'a Channel> {
    // SAFETY: the caller's channel; the channels of our contexts are ours.
    unsafe {
        own_context(channel.as_ref()?.context)?;
        Some(&*channel.cast::<Channel>())
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    // SAFETY: the caller's context.
    unsafe {
        if own_context(context).is_none() {
            return real::ibv_create_comp_channel(context);
        }
    }
    match Events::new() {
        Ok(events) => {
            let channel = ibv_comp_channel { context, fd: events.fd(), refcnt: 0 };
            let (events, users) = (Arc::new(events), AtomicU32::new(0));
            Box::into_raw(Box::new(Channel { channel, events, users })).cast()
        }
        Err(error) => {
            fail(error.raw_os_error().unwrap_or(libc::EMFILE));
            ptr::null_mut()
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    // SAFETY: the caller's channel.
    unsafe {
        let Some(own) = own(channel) else { return real::ibv_destroy_comp_channel(channel) };
        if own.users.load(Ordering::Acquire) > 0 {
            return libc::EBUSY;
        }
        drop(Box::from_raw(channel.cast::<Channel>()));
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    // SAFETY: the caller's channel and words.
    unsafe {
        let Some(own) = own(channel) else { return real::ibv_get_cq_event(channel, cq, cq_context) };
        let taken = own.events.take(|address| {
            let queue: *mut ibv_cq = ptr::with_exposed_provenance_mut(address);
            (*queue.cast::<Queue>()).unacknowledged.give();
            queue
        });
        match taken {
            Ok(queue) => {
                cq.write(queue);
                cq_context.write((*queue).cq_context);
                0
            }
            Err(error) => {
                fail(error.raw_os_error().unwrap_or(libc::EIO));
                -1
            }
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_ack_cq_events(cq: *mut ibv_cq, events: c_uint) {
    // SAFETY: the caller's queue.
    unsafe {
        match queue(cq) {
            Some(own) => own.unacknowledged.acknowledge(events),
            None => real::ibv_ack_cq_events(cq, events),
        }
    }
}
