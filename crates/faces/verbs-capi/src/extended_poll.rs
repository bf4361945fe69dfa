//! The functions of the `ibv_start_poll` family (`ibv_create_cq_ex(3)`).
//!
//! `ibv_start_poll` takes one completion, since many programs need no more, and `ibv_next_poll` takes several at a time. `ibv_end_poll`
//! puts back those that the program has not reached, so that plain polls, resizing and the destruction of a queue pair find them in the
//! queue. From `ibv_start_poll` to `ibv_end_poll`, no other thread polls the queue.
#![allow(unsafe_code)] // C structures and functions.

use crate::completion::{Queue, queue, write};
use crate::program::ProcessMemory;
use ginnel_shmem::Mapping;
use ginnel_verbs::completion_queue::CompletionQueue;
use ginnel_verbs::lock::{Lock, Locked};
use ginnel_verbs::work::Completed;
use ginnel_verbs_abi::*;
use std::ffi::{c_int, c_uint};
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};

/// The maximum number of completions that are taken at a time.
const BATCH: usize = 16;

/// The fields of a completion that can be read.
const READABLE: u64 = IBV_WC_STANDARD_FLAGS as u64;

/// Returns whether a queue with these properties can be created. The error is an errno value.
///
/// # Safety
///
/// The arguments are those of `ibv_create_cq_ex`. A program with older headers has no memory for fields that its mask does not name.
pub unsafe fn is_offered(context: *mut ibv_context, init: *const ibv_cq_init_attr_ex) -> Result<(), c_int> {
    // These flags can be ignored: completions are never lost, and locks cost little in a process with one thread.
    let harmless = IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
    // SAFETY: the caller's promise.
    unsafe {
        let mask = (*init).comp_mask;
        let has_flags = mask & IBV_CQ_INIT_ATTR_MASK_FLAGS != 0;
        if mask & !IBV_CQ_INIT_ATTR_MASK_FLAGS != 0
            || (*init).wc_flags & !READABLE != 0
            || has_flags && (*init).flags & !harmless != 0
        {
            return Err(libc::EOPNOTSUPP);
        }
        if i64::from((*init).comp_vector) >= i64::from((*context).num_comp_vectors) {
            return Err(libc::EINVAL);
        }
    }
    Ok(())
}

/// Completions that were taken from a queue.
pub struct Taken {
    completions: Vec<Completed>,
    /// Index of the first completion that the program has not reached. The program reads the one before.
    next: usize,
}

/// The state of a queue for this family of functions.
pub struct Extended {
    taken: Lock<Taken>,
    /// Whether the program has ever used them. If not, plain polls need no lock.
    is_used: AtomicBool,
}

impl Extended {
    /// Returns the state of a queue of which nothing has been taken.
    pub fn new() -> Self {
        let taken = Taken { completions: Vec::new(), next: 0 };
        Self { taken: Lock::new(taken), is_used: AtomicBool::new(false) }
    }

    /// Waits until no thread has completions that may be put back, and keeps others from taking any while the guard exists.
    #[inline]
    pub fn hold(&self) -> Option<Locked<'_, Taken>> {
        self.is_used.load(Ordering::Relaxed).then(|| self.taken.lock())
    }
}

/// Keeps other threads from polling the queues of a queue pair. When a queue pair is destroyed, its completions are dropped, so no
/// thread may put some back afterwards.
///
/// # Safety
///
/// The pointers are those of a queue pair of this library. Completion queues outlive their queue pairs.
pub unsafe fn hold<'a>(sends: *mut ibv_cq, receives: *mut ibv_cq) -> [Option<Locked<'a, Taken>>; 2] {
    // The order is the same in all threads, so that two of them cannot deadlock.
    let (first, second) = (sends.min(receives), sends.max(receives));
    // SAFETY: the caller's promise.
    let (first, second) = unsafe { (queue(first), queue(second).filter(|_| first != second)) };
    [first, second].map(|queue| queue.map(|queue| queue.extended.taken.lock()))
}

impl Taken {
    /// Advances to the next completion. Takes up to `most` from the queue if none is left.
    #[inline]
    fn advance(&mut self, queue: &CompletionQueue<Mapping>, most: usize) -> Option<&Completed> {
        if self.next == self.completions.len() {
            self.next = 0;
            self.completions.clear();
            let completions = &mut self.completions;
            if queue.poll(&ProcessMemory, most, |completed| completions.push(completed)) == 0 {
                return None;
            }
        }
        let current = self.completions.get(self.next)?;
        self.next += 1;
        Some(current)
    }

    /// Returns the completion that the program reads.
    #[inline]
    fn current(&self) -> ibv_wc {
        // There is no completion only if the program violates the interface.
        let current = self.next.checked_sub(1).and_then(|current| self.completions.get(current));
        current.map_or(ibv_wc::ZEROED, write)
    }

    /// Puts back the completions that the program has not reached.
    #[inline]
    fn give_back(&mut self, queue: &CompletionQueue<Mapping>) {
        if self.next < self.completions.len() {
            queue.put_back(self.completions.drain(self.next..));
        }
        self.completions.clear();
        self.next = 0;
    }
}

#[inline]
unsafe fn own<'a>(cq: *mut ibv_cq_ex) -> &'a Queue {
    // SAFETY: a program gets these functions only from a completion queue of this library.
    unsafe { &*cq.cast::<Queue>() }
}

/// Returns the completions that were taken. The program holds the lock.
#[inline]
unsafe fn taken<'a>(cq: *mut ibv_cq_ex) -> &'a mut Taken {
    // SAFETY: `ibv_create_cq_ex(3)` requires that a program calls `ibv_start_poll` first, which takes the lock.
    unsafe { &mut *own(cq).extended.taken.data_ptr() }
}

#[inline]
unsafe fn advance(cq: *mut ibv_cq_ex, most: usize) -> c_int {
    // SAFETY: the caller's queue; the caller holds the lock.
    unsafe {
        let Some(current) = taken(cq).advance(&own(cq).queue, most) else { return libc::ENOENT };
        ((*cq).wr_id, (*cq).status) = (current.id, current.status.0);
    }
    0
}

unsafe extern "C" fn start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    // SAFETY: the caller's structure.
    if unsafe { attr.as_ref() }.is_some_and(|attr| attr.comp_mask != 0) {
        return libc::EINVAL;
    }
    // SAFETY: the caller's queue.
    unsafe {
        let extended = &own(cq).extended;
        mem::forget(extended.taken.lock());
        extended.is_used.store(true, Ordering::Relaxed);
        let result = advance(cq, 1);
        if result != 0 {
            // After this result, the program does not call `ibv_end_poll`.
            extended.taken.force_unlock();
        }
        result
    }
}

unsafe extern "C" fn next_poll(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: the caller's queue; the caller has called `ibv_start_poll`.
    unsafe { advance(cq, BATCH) }
}

unsafe extern "C" fn end_poll(cq: *mut ibv_cq_ex) {
    // SAFETY: the caller's queue; the caller has called `ibv_start_poll`, and gives up the lock.
    unsafe {
        taken(cq).give_back(&own(cq).queue);
        own(cq).extended.taken.force_unlock();
    }
}

macro_rules! read {
    ($($name:ident $field:ident: $type:ty),* $(,)?) => {$(
        unsafe extern "C" fn $name(cq: *mut ibv_cq_ex) -> $type {
            // SAFETY: the caller's queue; the caller has called `ibv_start_poll`, so it has the lock.
            unsafe { taken(cq).current().$field.into() }
        }
    )*};
}

read! {
    read_opcode opcode: ibv_wc_opcode,
    read_vendor_err vendor_err: u32,
    read_byte_len byte_len: u32,
    read_imm_data imm_data: u32,
    read_qp_num qp_num: u32,
    read_src_qp src_qp: u32,
    read_wc_flags wc_flags: c_uint,
    read_slid slid: u32,
    read_sl sl: u8,
    read_dlid_path_bits dlid_path_bits: u8,
}

/// Sets the function pointers of a queue. Those of fields that cannot be read stay null.
pub fn equip(cq: &mut ibv_cq_ex) {
    cq.start_poll = Some(start_poll);
    cq.next_poll = Some(next_poll);
    cq.end_poll = Some(end_poll);
    cq.read_opcode = Some(read_opcode);
    cq.read_vendor_err = Some(read_vendor_err);
    cq.read_byte_len = Some(read_byte_len);
    cq.read_imm_data = Some(read_imm_data);
    cq.read_qp_num = Some(read_qp_num);
    cq.read_src_qp = Some(read_src_qp);
    cq.read_wc_flags = Some(read_wc_flags);
    cq.read_slid = Some(read_slid);
    cq.read_sl = Some(read_sl);
    cq.read_dlid_path_bits = Some(read_dlid_path_bits);
}
