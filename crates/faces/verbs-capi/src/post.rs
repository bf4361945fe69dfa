//! The functions of the `ibv_wr_*` family (`ibv_wr_post(3)`).
//!
//! Requests are collected from `ibv_wr_start` on, and `ibv_wr_complete` posts them. A request that cannot be posted is already refused
//! when it is collected, so either all requests of a batch are posted or none is. Once a batch has reached its largest size, nothing is
//! allocated any more.
#![allow(unsafe_code)] // C structures and functions.

use crate::program::ProcessMemory;
use crate::queue_pair::{Pair, datagram, refused};
use ginnel_layout::verbs::{Key, Kind, MTU};
use ginnel_shmem::Mapping;
use ginnel_verbs::lock::Lock;
use ginnel_verbs::queue_pair::{Capacity, QueuePair};
use ginnel_verbs::work::{Datagram, Element, MAX_MESSAGE, Operation, Work, total};
use ginnel_verbs_abi::*;
use std::ffi::{c_int, c_uint, c_void};
use std::{mem, slice};

/// Initial capacity for requests.
const ROOM: usize = 64;

/// Returns the operations that queue pairs of a type support.
fn offered(kind: ibv_qp_type) -> u64 {
    let sends = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
    let writes = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
    let answered =
        IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
    match kind {
        IBV_QPT_RC => (sends | writes | answered).into(),
        IBV_QPT_UC => (sends | writes).into(),
        IBV_QPT_UD => sends.into(),
        _ => 0,
    }
}

/// Returns the operations that a program wants for a new queue pair, or `None` if it does not use this family of functions. The error is
/// an errno value.
///
/// # Safety
///
/// The pointer is the argument of `ibv_create_qp_ex`. A program with older headers has no memory for fields that its mask does not name.
pub unsafe fn wanted(init: *const ibv_qp_init_attr_ex) -> Result<Option<u64>, c_int> {
    // SAFETY: the caller's promise.
    unsafe {
        let mask = (*init).comp_mask;
        if mask & IBV_QP_INIT_ATTR_PD == 0 {
            return Err(libc::EINVAL);
        }
        if mask & !(IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) != 0 {
            return Err(libc::EOPNOTSUPP);
        }
        if mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS == 0 {
            return Ok(None);
        }
        match (*init).send_ops_flags {
            flags if flags & !offered((*init).qp_type) != 0 => Err(libc::EOPNOTSUPP),
            flags => Ok(Some(flags)),
        }
    }
}

/// The data of a request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Data {
    /// The program has not set the data yet.
    None,
    /// The range of the request's own element.
    One,
    /// Several elements, which are stored in the batch.
    Elements { first: usize, count: usize },
    /// Inline data, which has been copied. The address of the request's own element is an offset in the batch's `bytes`.
    Inline,
}

/// A request that has not been posted yet.
#[derive(Clone, Copy)]
struct Request {
    /// The request as it will be posted, except for its elements.
    work: Work<'static>,
    data: Data,
    element: Element,
}

impl Request {
    /// An unused slot for a request.
    const EMPTY: Self = {
        let operation = Operation::Send { immediate: None, solicited: false };
        let work =
            Work { id: 0, operation, datagram: None, elements: &[], is_inline: false, is_signaled: false };
        Self { work, data: Data::None, element: Element { address: 0, length: 0, key: 0 } }
    };
}

/// Requests that are posted together.
pub struct Batch {
    /// The operations that the program asked for when it created the queue pair.
    wanted: u64,
    capacity: Capacity,
    signals_all: bool,
    is_ud: bool,
    /// Maximum length of a message, in bytes.
    longest: u32,
    /// The first `count` slots are in use.
    requests: Vec<Request>,
    count: usize,
    /// How many of the requests are datagrams with an address. They precede those without one.
    addressed: usize,
    /// The elements of requests that have several.
    elements: Vec<Element>,
    /// The inline data of requests.
    bytes: Vec<u8>,
    /// The first error of the batch, as an errno value; 0 if there is none.
    error: c_int,
}

impl Batch {
    /// Returns an empty batch for a queue pair.
    pub fn new(wanted: u64, kind: Kind, capacity: Capacity, signals_all: bool) -> Self {
        let room = capacity.sends.min(ROOM);
        let is_ud = kind == Kind::UD;
        Self {
            wanted,
            capacity,
            signals_all,
            is_ud,
            longest: if is_ud { MTU as u32 } else { MAX_MESSAGE },
            requests: vec![Request::EMPTY; room],
            count: 0,
            addressed: 0,
            elements: Vec::with_capacity(room * capacity.elements),
            bytes: Vec::with_capacity(room * capacity.inline),
            error: 0,
        }
    }

    /// Records an error. The program gets the first one.
    #[cold]
    fn fail(&mut self, error: c_int) {
        if self.error == 0 {
            self.error = error;
        }
    }

    #[inline]
    fn clear(&mut self) {
        self.count = 0;
        if self.addressed != 0 {
            self.addressed = 0;
        }
        if self.error != 0 {
            self.error = 0;
        }
        if !self.elements.is_empty() {
            self.elements.clear();
        }
        if !self.bytes.is_empty() {
            self.bytes.clear();
        }
    }

    /// Starts another request.
    #[inline]
    fn add(&mut self, kind: ibv_qp_create_send_ops_flags, id: u64, flags: c_uint, operation: Operation) {
        if self.wanted & u64::from(kind) == 0 {
            return self.fail(libc::EINVAL);
        }
        let is_signaled = self.signals_all || flags & IBV_SEND_SIGNALED != 0;
        let Some(Request { work, data, .. }) = self.requests.get_mut(self.count) else {
            return self.fail(libc::ENOMEM);
        };
        // The fields are stored one by one, because each store costs time while the queue pair's lock is held.
        (work.id, work.operation, work.is_signaled, work.is_inline) = (id, operation, is_signaled, false);
        *data = Data::None;
        self.count += 1;
        if self.count == self.requests.len() {
            self.add_place();
        }
    }

    /// Adds a slot for the next request, if there may be one more. It is called last, so that the common path needs to save nothing for
    /// this call.
    #[cold]
    fn add_place(&mut self) {
        if self.count < self.capacity.sends {
            self.requests.push(Request::EMPTY);
        }
    }

    /// Returns the last request, if there is one and its data has not been set yet. The data of a request is set exactly once.
    #[inline]
    fn last(&mut self) -> Option<&mut Request> {
        let last = self.requests.get_mut(self.count.wrapping_sub(1));
        last.filter(|last| self.error == 0 && last.data == Data::None)
    }

    /// Makes this element the data of the last request.
    #[inline]
    fn set_element(&mut self, element: Element) {
        let fits = element.length <= self.longest;
        match self.last() {
            Some(last) if fits => (last.data, last.element) = (Data::One, element),
            _ => self.fail(libc::EINVAL),
        }
    }

    /// Makes these elements the data of the last request.
    #[inline]
    fn set_elements(&mut self, elements: &[Element]) {
        let (first, count) = (self.elements.len(), elements.len());
        let fits =
            count <= self.capacity.elements && total(elements).is_some_and(|total| total <= self.longest);
        match self.last() {
            Some(last) if fits => last.data = Data::Elements { first, count },
            _ => return self.fail(libc::EINVAL),
        }
        self.elements.extend_from_slice(elements);
    }

    /// Copies these parts as the inline data of the last request. The program may change them afterwards.
    #[inline]
    fn set_inline<'a>(&mut self, parts: impl Iterator<Item = &'a [u8]>) {
        let (most, start) = (self.capacity.inline, self.bytes.len());
        if self.last().is_none_or(|last| last.work.operation.fills_elements()) {
            return self.fail(libc::EINVAL);
        }
        for part in parts {
            if part.len() > most - (self.bytes.len() - start) {
                return self.fail(libc::EINVAL);
            }
            self.bytes.extend_from_slice(part);
        }
        let length = (self.bytes.len() - start) as u32;
        if let Some(last) = self.last() {
            (last.data, last.work.is_inline) = (Data::Inline, true);
            last.element = Element { address: start as u64, length, key: 0 };
        }
    }

    /// Sets the destination of the last request.
    fn set_datagram(&mut self, datagram: Option<Datagram>) {
        if !self.is_ud {
            return self.fail(libc::EOPNOTSUPP);
        }
        let is_next = self.count == self.addressed + 1;
        match (self.requests.get_mut(self.addressed), datagram) {
            (Some(last), Some(_)) if is_next => (last.work.datagram, self.addressed) = (datagram, self.count),
            _ => self.fail(libc::EINVAL),
        }
    }

    /// Posts all requests. Returns 0, or an errno value if none was posted.
    #[inline]
    fn post(&mut self, pair: &QueuePair<Mapping>) -> c_int {
        if self.error != 0 {
            return self.error;
        }
        if self.is_ud && self.addressed != self.count {
            return libc::EINVAL;
        }
        // If a single request does not fit, `QueuePair::post` refuses it. No other thread posts meanwhile, so the room cannot shrink.
        if self.count > 1 && self.count > pair.room() {
            return libc::ENOMEM;
        }
        let bytes = self.bytes.as_ptr() as u64;
        for Request { work, data, element } in self.requests.iter_mut().take(self.count) {
            let elements = match *data {
                Data::None => &[],
                Data::One => slice::from_ref(element),
                Data::Elements { first, count } => &self.elements[first..][..count],
                Data::Inline => {
                    element.address += bytes;
                    slice::from_ref(element)
                }
            };
            // SAFETY: the batch does not change until it is cleared, and clearing it ends the request.
            work.elements = unsafe { slice::from_raw_parts(elements.as_ptr(), elements.len()) };
            if let Err(error) = pair.post(&ProcessMemory, work) {
                return refused(error);
            }
        }
        0
    }
}

/// Returns the lock of the batch of a queue pair. A program that posts holds the lock from `ibv_wr_start` on.
#[inline]
unsafe fn lock<'a>(qp: *mut ibv_qp_ex) -> &'a Lock<Batch> {
    // SAFETY: a program gets these functions only from a queue pair of this library.
    match unsafe { &(*qp.cast::<Pair>()).batch } {
        Some(batch) => batch,
        None => unreachable!("only queue pairs with a batch have these functions"),
    }
}

#[inline]
unsafe fn batch<'a>(qp: *mut ibv_qp_ex) -> &'a mut Batch {
    // SAFETY: `ibv_wr_post(3)` requires that a program calls `ibv_wr_start` first, which takes the lock.
    unsafe { &mut *lock(qp).data_ptr() }
}

unsafe extern "C" fn start(qp: *mut ibv_qp_ex) {
    // SAFETY: the caller's queue pair.
    unsafe { mem::forget(lock(qp).lock()) }
}

unsafe extern "C" fn complete(qp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: the caller's queue pair; the caller has called `ibv_wr_start`.
    unsafe {
        let batch = batch(qp);
        let result = batch.post(&(*qp.cast::<Pair>()).pair);
        batch.clear();
        lock(qp).force_unlock();
        result
    }
}

unsafe extern "C" fn abort(qp: *mut ibv_qp_ex) {
    // SAFETY: the caller's queue pair; the caller has called `ibv_wr_start`, and gives up the lock.
    unsafe {
        batch(qp).clear();
        lock(qp).force_unlock();
    }
}

/// Starts a request. `operation` gets whether the request is solicited.
#[inline]
unsafe fn add(
    qp: *mut ibv_qp_ex,
    kind: ibv_qp_create_send_ops_flags,
    operation: impl FnOnce(bool) -> Operation,
) {
    // SAFETY: the caller's queue pair; the caller has set these two fields before.
    let (id, flags) = unsafe { ((*qp).wr_id, (*qp).wr_flags) };
    // SAFETY: the caller's queue pair; the caller has called `ibv_wr_start`, so it has the lock of the batch.
    unsafe { batch(qp).add(kind, id, flags, operation(flags & IBV_SEND_SOLICITED != 0)) }
}

unsafe extern "C" fn send(qp: *mut ibv_qp_ex) {
    // SAFETY: the caller's queue pair; the caller has called `ibv_wr_start`, and then set the request's ID and flags.
    unsafe { add(qp, IBV_QP_EX_WITH_SEND, |solicited| Operation::Send { immediate: None, solicited }) }
}

unsafe extern "C" fn send_imm(qp: *mut ibv_qp_ex, immediate: u32) {
    let immediate = Some(immediate);
    // SAFETY: the caller's queue pair; the caller has called `ibv_wr_start`, and then set the request's ID and flags.
    unsafe { add(qp, IBV_QP_EX_WITH_SEND_WITH_IMM, |solicited| Operation::Send { immediate, solicited }) }
}

unsafe extern "C" fn rdma_write(qp: *mut ibv_qp_ex, key: u32, address: u64) {
    let key = Key(key);
    // SAFETY: the caller's queue pair; the caller has called `ibv_wr_start`, and then set the request's ID and flags.
    unsafe {
        add(qp, IBV_QP_EX_WITH_RDMA_WRITE, |solicited| Operation::Write {
            address,
            key,
            immediate: None,
            solicited,
        });
    }
}

unsafe extern "C" fn rdma_write_imm(qp: *mut ibv_qp_ex, key: u32, address: u64, immediate: u32) {
    let (key, immediate) = (Key(key), Some(immediate));
    // SAFETY: the caller's queue pair; the caller has called `ibv_wr_start`, and then set the request's ID and flags.
    unsafe {
        add(qp, IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM, |solicited| Operation::Write {
            address,
            key,
            immediate,
            solicited,
        });
    }
}

unsafe extern "C" fn rdma_read(qp: *mut ibv_qp_ex, key: u32, address: u64) {
    let key = Key(key);
    // SAFETY: the caller's queue pair; the caller has called `ibv_wr_start`, and then set the request's ID and flags.
    unsafe { add(qp, IBV_QP_EX_WITH_RDMA_READ, |_| Operation::Read { address, key }) }
}

unsafe extern "C" fn atomic_cmp_swp(qp: *mut ibv_qp_ex, key: u32, address: u64, compare: u64, swap: u64) {
    let operation = Operation::CompareAndSwap { address, key: Key(key), compare, swap };
    // SAFETY: the caller's queue pair; the caller has called `ibv_wr_start`, and then set the request's ID and flags.
    unsafe { add(qp, IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP, |_| operation) }
}

unsafe extern "C" fn atomic_fetch_add(qp: *mut ibv_qp_ex, key: u32, address: u64, value: u64) {
    let operation = Operation::FetchAndAdd { address, key: Key(key), add: value };
    // SAFETY: the caller's queue pair; the caller has called `ibv_wr_start`, and then set the request's ID and flags.
    unsafe { add(qp, IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD, |_| operation) }
}

unsafe extern "C" fn set_sge(qp: *mut ibv_qp_ex, key: u32, address: u64, length: u32) {
    // SAFETY: the caller's queue pair; the caller has called `ibv_wr_start`.
    unsafe { batch(qp).set_element(Element { address, length, key }) }
}

/// Returns a list of the program: `count` values at an address, which is used only if `count` is not 0.
unsafe fn list<'a, T>(count: usize, first: *const T) -> &'a [T] {
    match count {
        0 => &[],
        // SAFETY: the program promises that the values exist.
        _ => unsafe { slice::from_raw_parts(first, count) },
    }
}

unsafe extern "C" fn set_sge_list(qp: *mut ibv_qp_ex, count: usize, first: *const ibv_sge) {
    // The two structures have the same layout.
    const _: () = assert!(size_of::<ibv_sge>() == size_of::<Element>());
    // SAFETY: the caller's queue pair; the caller has called `ibv_wr_start`, and says that the list has `count` elements.
    unsafe { batch(qp).set_elements(list(count, first.cast())) }
}

unsafe extern "C" fn set_inline_data(qp: *mut ibv_qp_ex, address: *mut c_void, length: usize) {
    // SAFETY: the caller's queue pair; the caller has called `ibv_wr_start`, and says that there are `length` bytes.
    unsafe { batch(qp).set_inline([list(length, address.cast_const().cast())].into_iter()) }
}

unsafe extern "C" fn set_inline_data_list(qp: *mut ibv_qp_ex, count: usize, first: *const ibv_data_buf) {
    // SAFETY: the caller's queue pair; the caller has called `ibv_wr_start`, and says that the list has `count` parts, with as many
    // bytes as each of them says.
    unsafe {
        let parts = list(count, first).iter();
        batch(qp).set_inline(parts.map(|part| list(part.length, part.addr.cast_const().cast())));
    }
}

unsafe extern "C" fn set_ud_addr(qp: *mut ibv_qp_ex, ah: *mut ibv_ah, remote_qpn: u32, remote_qkey: u32) {
    // SAFETY: the caller's queue pair; the caller has called `ibv_wr_start`. The address handle is null, or one of this library or the real
    // one.
    unsafe {
        let to = datagram(&*qp.cast::<Pair>(), ibv_send_wr_ud { ah, remote_qpn, remote_qkey });
        batch(qp).set_datagram(to);
    }
}

// Operations that no queue pair of this library supports. A real provider leaves these pointers null, so a program that calls them
// crashes; here its batch fails.

unsafe extern "C" fn set_xrc_srqn(qp: *mut ibv_qp_ex, _: u32) {
    // SAFETY: the caller's queue pair; the caller has called `ibv_wr_start`.
    unsafe { batch(qp).fail(libc::EOPNOTSUPP) }
}

unsafe extern "C" fn invalidate(qp: *mut ibv_qp_ex, _: u32) {
    // SAFETY: the caller's queue pair; the caller has called `ibv_wr_start`.
    unsafe { batch(qp).fail(libc::EOPNOTSUPP) }
}

unsafe extern "C" fn bind_mw(qp: *mut ibv_qp_ex, _: *mut ibv_mw, _: u32, _: *const ibv_mw_bind_info) {
    // SAFETY: the caller's queue pair; the caller has called `ibv_wr_start`.
    unsafe { batch(qp).fail(libc::EOPNOTSUPP) }
}

unsafe extern "C" fn send_tso(qp: *mut ibv_qp_ex, _: *mut c_void, _: u16, _: u16) {
    // SAFETY: the caller's queue pair; the caller has called `ibv_wr_start`.
    unsafe { batch(qp).fail(libc::EOPNOTSUPP) }
}

unsafe extern "C" fn atomic_write(qp: *mut ibv_qp_ex, _: u32, _: u64, _: *const c_void) {
    // SAFETY: the caller's queue pair; the caller has called `ibv_wr_start`.
    unsafe { batch(qp).fail(libc::EOPNOTSUPP) }
}

/// Sets the function pointers of a queue pair.
pub fn equip(qp: &mut ibv_qp_ex) {
    qp.wr_atomic_cmp_swp = Some(atomic_cmp_swp);
    qp.wr_atomic_fetch_add = Some(atomic_fetch_add);
    qp.wr_bind_mw = Some(bind_mw);
    qp.wr_local_inv = Some(invalidate);
    qp.wr_rdma_read = Some(rdma_read);
    qp.wr_rdma_write = Some(rdma_write);
    qp.wr_rdma_write_imm = Some(rdma_write_imm);
    qp.wr_send = Some(send);
    qp.wr_send_imm = Some(send_imm);
    qp.wr_send_inv = Some(invalidate);
    qp.wr_send_tso = Some(send_tso);
    qp.wr_set_ud_addr = Some(set_ud_addr);
    qp.wr_set_xrc_srqn = Some(set_xrc_srqn);
    qp.wr_set_inline_data = Some(set_inline_data);
    qp.wr_set_inline_data_list = Some(set_inline_data_list);
    qp.wr_set_sge = Some(set_sge);
    qp.wr_set_sge_list = Some(set_sge_list);
    qp.wr_start = Some(start);
    qp.wr_complete = Some(complete);
    qp.wr_abort = Some(abort);
    qp.wr_atomic_write = Some(atomic_write);
}
