//! Open devices.
#![allow(unsafe_code)] // C structures and functions.

use crate::devices::{self, Device as Listed};
use crate::events::{Events, Unacknowledged};
use crate::program::ProcessMemory;
use crate::{completion, forks, queue_pair, real, shared_receive_queue, threads, warning};
use ginnel::{AttachOptions, ErrorCode};
use ginnel_verbs::device::{Device, DeviceError};
use ginnel_verbs::queue_pair::{Event, EventCallback, lid};
use ginnel_verbs::receive::Shape;
use ginnel_verbs::remote::MAX_ENTRIES;
use ginnel_verbs_abi::*;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::{process, ptr, thread};

/// The number of the only port.
const PORT: u8 = 1;
/// The only partition key: the default partition, as a full member.
const PKEY: u16 = 0xffff;
/// Maximum number of elements of a request.
pub const MAX_ELEMENTS: usize = ginnel_layout::verbs::receive::MOST;
/// Maximum length of inline data, in bytes.
pub const MAX_INLINE: usize = 512;
/// The operand sizes of atomic operations.
const ATOMIC_SIZES: u16 = IBV_PCI_ATOMIC_OPERATION_8_BYTE_SIZE_SUP as u16;
/// Maximum number of completions of a queue.
pub const MAX_COMPLETIONS: usize = 1 << 22;

/// An open segment, which all contexts of a process share.
pub struct Open {
    pub device: Arc<Device>,
    pub file: Arc<OwnedFd>,
    guid: u64,
    domains: AtomicU32,
    loss: Arc<Loss>,
}

/// Tells the contexts of a device that the device is lost for good. It is a separate object, because the thread that tells them must not
/// be the one that drops the last reference to the device.
#[derive(Default)]
struct Loss(Mutex<(bool, Vec<Weak<Events<Happened>>>)>);

impl Loss {
    const HAPPENED: Happened = Happened { event: Event::DEVICE_FATAL, address: 0 };

    fn tell(&self) {
        let (is_lost, contexts) = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *is_lost = true;
        contexts
            .drain(..)
            .filter_map(|events| events.upgrade())
            .for_each(|events| events.push(Self::HAPPENED));
    }

    /// Adds a new context. If the device is already lost, the context gets the event at once.
    fn add(&self, events: &Arc<Events<Happened>>) {
        let (is_lost, contexts) = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if *is_lost {
            return events.push(Self::HAPPENED);
        }
        contexts.retain(|events| events.strong_count() > 0);
        contexts.push(Arc::downgrade(events));
    }
}

/// A context of this library.
#[repr(C)]
pub struct Context {
    verbs: verbs_context,
    pub open: Arc<Open>,
    pub events: Arc<Events<Happened>>,
}

/// An event, and the address of the object that it concerns.
#[derive(Clone, Copy)]
pub struct Happened {
    pub event: Event,
    pub address: usize,
}

impl Context {
    /// Starts the notifier, unless there is one: a thread that handles completion queues while the program sleeps.
    pub fn start_notifier(&self) -> Result<(), DeviceError> {
        start_notifier(&self.open.device)
    }

    /// Returns a callback that delivers the events of a new object to the program. The caller stores the object's address in the second
    /// value once it is known.
    pub fn teller(&self) -> (EventCallback, Arc<AtomicUsize>) {
        let (events, address) = (self.events.clone(), Arc::<AtomicUsize>::default());
        let known = address.clone();
        let tell = move |event| events.push(Happened { event, address: known.load(Ordering::Relaxed) });
        (Box::new(tell), address)
    }
}

fn start_notifier(device: &Device) -> Result<(), DeviceError> {
    device.start_notifier(ProcessMemory, |run| {
        // Signals must be handled by the program's threads.
        let old = block_signals();
        let thread = thread::Builder::new().name("ginnel-verbs".into()).spawn(run);
        // SAFETY: this restores the earlier mask.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, ptr::null_mut()) };
        thread
    })
}

/// Blocks all signals of this thread except those that report a fault of the thread itself: the kernel kills a process that blocks
/// these, and one of them may make a thread sleep while it stores to pages that are being moved into the segment. Returns the earlier
/// mask.
pub fn block_signals() -> libc::sigset_t {
    let (mut all, mut old) = (MaybeUninit::<libc::sigset_t>::uninit(), MaybeUninit::uninit());
    // SAFETY: these calls fill both sets, and cannot fail with these arguments.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        for caused in [libc::SIGBUS, libc::SIGSEGV, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP] {
            libc::sigdelset(all.as_mut_ptr(), caused);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), old.as_mut_ptr());
        old.assume_init()
    }
}

/// Open segments, by the process that opened them (the child of a `fork` opens its own) and by name.
static OPEN: Mutex<BTreeMap<(u32, String), Weak<Open>>> = Mutex::new(BTreeMap::new());

/// A guard that keeps other threads from opening a device.
pub type Held = MutexGuard<'static, BTreeMap<(u32, String), Weak<Open>>>;

/// Waits until no other thread is opening a device.
pub fn hold() -> Held {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the context if it is one of this library's.
///
/// # Safety
///
/// The pointer is null or points to a context, of this library or the real one.
pub unsafe fn own<'a>(context: *mut ibv_context) -> Option<&'a Context> {
    if context.is_null() {
        return None;
    }
    // SAFETY: the caller's context.
    let post_send = unsafe { (*context).ops.post_send };
    let ours = queue_pair::post_send as *const ();
    if post_send.map(|function| function as *const ()) != Some(ours) {
        return None;
    }
    let offset = std::mem::offset_of!(verbs_context, context);
    // SAFETY: only contexts of this library have that function, and each of them is the last part of a `verbs_context`.
    Some(unsafe { &*context.byte_sub(offset).cast::<Context>() })
}

/// Returns a number for a new protection domain.
pub fn next_domain(open: &Open) -> u32 {
    open.domains.fetch_add(1, Ordering::Relaxed).wrapping_add(1)
}

/// Sets `errno`.
pub fn fail(error: c_int) {
    // SAFETY: each thread has its own errno.
    unsafe { *libc::__errno_location() = error }
}

/// Returns the errno value of an error. If the error means that there is no room, prints the reason for the user.
pub fn errno(error: &DeviceError) -> c_int {
    let errno = number(error);
    if matches!(errno, libc::ENOMEM | libc::EUSERS) {
        warning::say(error);
    }
    errno
}

fn number(error: &DeviceError) -> c_int {
    match error {
        DeviceError::Full(_) => libc::ENOMEM,
        DeviceError::Busy => libc::EBUSY,
        DeviceError::Number(_) => libc::EUSERS,
        DeviceError::Ginnel(error) => match error.code() {
            Some(ErrorCode::NO_MEMORY | ErrorCode::QUOTA | ErrorCode::LIMIT) => libc::ENOMEM,
            Some(ErrorCode::DENIED | ErrorCode::READ_ONLY) => libc::EACCES,
            Some(ErrorCode::NOT_FOUND | ErrorCode::NO_SEGMENT) => libc::ENOENT,
            _ => libc::EIO,
        },
    }
}

fn open(listed: &Listed) -> Result<Arc<Open>, c_int> {
    forks::follow();
    threads::watch();
    let mut all = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    let segment = listed.segment();
    let key = (process::id(), segment.to_owned());
    // A lost device stays lost, but there may be a new segment of that name.
    if let Some(open) = all.get(&key).and_then(Weak::upgrade).filter(|open| !open.device.is_lost()) {
        return Ok(open);
    }
    let code = |error: &DeviceError| match error {
        // The daemon has ended since the device was listed.
        DeviceError::Ginnel(ginnel::Error::NoDaemon { .. }) => libc::ENODEV,
        error => {
            // Some programs, such as UCX, report only that there is no such device.
            warning::say(error);
            number(error)
        }
    };
    let device = match Device::open(segment, &AttachOptions::default()) {
        Ok(device) => device,
        Err(error) => {
            // Other threads must not wait while this writes to stderr.
            drop(all);
            return Err(code(&error));
        }
    };
    let file = device.file().map_err(|error| error.raw_os_error().unwrap_or(libc::EMFILE))?;
    let device = Arc::new(device);
    let weak = Arc::downgrade(&device);
    device.start_notifier_by(move || weak.upgrade().map_or(Ok(()), |device| start_notifier(&device)));
    let loss = Arc::<Loss>::default();
    let told = loss.clone();
    device.when_lost(move || told.tell());
    let (file, domains) = (Arc::new(file), AtomicU32::new(0));
    let open = Arc::new(Open { device, file, guid: listed.guid(), domains, loss });
    all.insert(key, Arc::downgrade(&open));
    Ok(open)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    let Some(listed) = devices::own(device) else {
        // SAFETY: a device that is not ours is the real library's.
        return unsafe { real::ibv_open_device(device) };
    };
    let open = match open(listed) {
        Ok(open) => open,
        Err(error) => {
            fail(error);
            return ptr::null_mut();
        }
    };
    let events = match Events::new() {
        Ok(events) => Arc::new(events),
        Err(error) => {
            fail(error.raw_os_error().unwrap_or(libc::EMFILE));
            return ptr::null_mut();
        }
    };
    open.loss.add(&events);
    let mut verbs = verbs_context::ZEROED;
    verbs.query_port = Some(query_port);
    verbs.query_device_ex = Some(query_device_ex);
    verbs.create_qp_ex = Some(queue_pair::create_qp_ex);
    verbs.create_cq_ex = Some(completion::create_cq_ex);
    verbs.create_srq_ex = Some(shared_receive_queue::create_srq_ex);
    // Programs call this pointer without checking it.
    verbs.close_xrcd = Some(not_offered);
    verbs.sz = size_of::<verbs_context>();
    let context = &mut verbs.context;
    context.device = device;
    context.ops.poll_cq = Some(completion::poll_cq);
    context.ops.req_notify_cq = Some(completion::req_notify_cq);
    context.ops.post_send = Some(queue_pair::post_send);
    context.ops.post_recv = Some(queue_pair::post_recv);
    context.ops.post_srq_recv = Some(shared_receive_queue::post_srq_recv);
    context.ops.alloc_mw = Some(alloc_mw);
    context.ops.dealloc_mw = Some(dealloc_mw);
    context.cmd_fd = -1;
    context.async_fd = events.fd();
    context.num_comp_vectors = 1;
    context.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
    context.abi_compat = ABI_COMPAT_EXTENDED as *mut _;
    let context = Box::leak(Box::new(Context { verbs, open, events }));
    &raw mut context.verbs.context
}

unsafe extern "C" fn not_offered() {
    fail(libc::EOPNOTSUPP);
}

unsafe extern "C" fn alloc_mw(_: *mut ibv_pd, _: ibv_mw_type) -> *mut ibv_mw {
    fail(libc::EOPNOTSUPP);
    ptr::null_mut()
}

unsafe extern "C" fn dealloc_mw(_: *mut ibv_mw) -> c_int {
    libc::EOPNOTSUPP
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_close_device(context: *mut ibv_context) -> c_int {
    // SAFETY: the caller's context.
    match unsafe { own(context) } {
        Some(own) => {
            // SAFETY: `ginnel_ibv_open_device` allocated it, and the caller gives it up.
            drop(unsafe { Box::from_raw(ptr::from_ref(own).cast_mut()) });
            0
        }
        // SAFETY: a context that is not ours is the real library's.
        None => unsafe { real::ibv_close_device(context) },
    }
}

fn write(to: &mut [c_char], text: &str) {
    for (to, byte) in to.iter_mut().zip(text.bytes()) {
        *to = byte.cast_signed();
    }
}

fn attributes(open: &Open) -> ibv_device_attr {
    let mut attr = ibv_device_attr::ZEROED;
    write(&mut attr.fw_ver, env!("CARGO_PKG_VERSION"));
    attr.node_guid = open.guid.to_be();
    attr.sys_image_guid = open.guid.to_be();
    attr.max_mr_size = 1 << 36;
    attr.page_size_cap = 0xffff_f000;
    attr.max_qp = ginnel_layout::verbs::QPS as c_int - 1;
    attr.max_qp_wr = MAX_ENTRIES as c_int;
    attr.device_cap_flags = IBV_DEVICE_RC_RNR_NAK_GEN | IBV_DEVICE_SYS_IMAGE_GUID;
    attr.max_sge = MAX_ELEMENTS as c_int;
    attr.max_sge_rd = MAX_ELEMENTS as c_int;
    attr.max_cq = 1 << 16;
    attr.max_cqe = MAX_COMPLETIONS as c_int;
    attr.max_mr = ginnel_layout::verbs::REGIONS as c_int;
    attr.max_pd = 1 << 16;
    attr.max_ah = 1 << 16;
    attr.max_srq = ginnel_layout::verbs::QPS as c_int - 1;
    attr.max_srq_wr = MAX_ENTRIES as c_int;
    attr.max_srq_sge = MAX_ELEMENTS as c_int;
    attr.max_qp_rd_atom = 255;
    attr.max_res_rd_atom = 255;
    attr.max_qp_init_rd_atom = 255;
    // The operations are atomic for CPUs as well, which `IBV_ATOMIC_GLOB` would express, and `pci_atomic_caps` does. But adapters report
    // this value, so programs are tested with it: UCX offers no atomic operations on a device that reports the other one.
    attr.atomic_cap = IBV_ATOMIC_HCA;
    attr.max_pkeys = 1;
    attr.phys_port_cnt = PORT;
    attr
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    // SAFETY: the caller's context and structure.
    unsafe {
        let Some(own) = own(context) else { return real::ibv_query_device(context, attr) };
        attr.write(attributes(&own.open));
    }
    0
}

unsafe extern "C" fn query_device_ex(
    context: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    size: usize,
) -> c_int {
    // SAFETY: the caller's context and input.
    let (own, comp_mask) = unsafe { (own(context), input.as_ref().map_or(0, |input| input.comp_mask)) };
    let Some(own) = own.filter(|_| comp_mask == 0) else { return libc::EINVAL };
    let mut all = ibv_device_attr_ex::ZEROED;
    all.orig_attr = attributes(&own.open);
    all.pci_atomic_caps.fetch_add = ATOMIC_SIZES;
    all.pci_atomic_caps.compare_swap = ATOMIC_SIZES;
    all.phys_port_cnt_ex = PORT.into();
    // SAFETY: the caller has room for `size` bytes, and no more is written.
    unsafe {
        ptr::write_bytes(attr.cast::<u8>(), 0, size);
        ptr::copy_nonoverlapping((&raw const all).cast::<u8>(), attr.cast(), size.min(size_of_val(&all)));
    }
    0
}

fn port(open: &Open) -> ibv_port_attr {
    let mut attr = ibv_port_attr::ZEROED;
    attr.state = IBV_PORT_ACTIVE;
    attr.max_mtu = IBV_MTU_4096;
    attr.active_mtu = IBV_MTU_4096;
    attr.gid_tbl_len = 1;
    attr.max_msg_sz = ginnel_verbs::work::MAX_MESSAGE;
    attr.pkey_tbl_len = 1;
    attr.lid = lid(open.device.member());
    attr.max_vl_num = 1;
    // 4X, EDR, LinkUp: see InfiniBand Architecture Specification 1.2.1, PortInfo.
    attr.active_width = 2;
    attr.active_speed = 32;
    attr.phys_state = 5;
    attr.link_layer = IBV_LINK_LAYER_INFINIBAND;
    attr
}

unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    number: u8,
    attr: *mut ibv_port_attr,
    size: usize,
) -> c_int {
    // SAFETY: the caller's context.
    let Some(own) = (unsafe { own(context) }).filter(|_| number == PORT) else { return libc::EINVAL };
    let all = port(&own.open);
    // SAFETY: the caller has room for `size` bytes, and no more is written.
    unsafe {
        ptr::write_bytes(attr.cast::<u8>(), 0, size);
        ptr::copy_nonoverlapping((&raw const all).cast::<u8>(), attr.cast(), size.min(size_of_val(&all)));
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_query_port(
    context: *mut ibv_context,
    number: u8,
    attr: *mut ibv_port_attr,
) -> c_int {
    // SAFETY: the caller's context and structure, which may have the size of older headers.
    unsafe {
        match own(context) {
            Some(_) => query_port(context, number, attr, COMPAT_PORT_ATTR_SIZE),
            None => real::ibv_query_port(context, number, attr),
        }
    }
}

/// The high bits of the interface identifier of each port, which mark it as locally administered.
const INTERFACE: u64 = 0x0200_0000_0000_0000;

/// Returns the LID of the port with this GID.
pub fn lid_of(gid: &ibv_gid) -> Option<u16> {
    let interface = u64::from_be_bytes(*gid.raw.last_chunk()?);
    u16::try_from(interface ^ INTERFACE).ok().filter(|lid| *lid > 0)
}

/// Returns the GID of the port. Its prefix is that of a private subnet and identifies the segment; its interface identifier identifies
/// the member.
fn gid(open: &Open) -> ibv_gid {
    let prefix = 0xfd << 56 | open.guid >> 8;
    let interface = INTERFACE | u64::from(lid(open.device.member()));
    let mut raw = [0; 16];
    raw[..8].copy_from_slice(&prefix.to_be_bytes());
    raw[8..].copy_from_slice(&interface.to_be_bytes());
    ibv_gid { raw }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_query_gid(
    context: *mut ibv_context,
    number: u8,
    index: c_int,
    to: *mut ibv_gid,
) -> c_int {
    // SAFETY: the caller's context and structure.
    unsafe {
        let Some(own) = own(context) else { return real::ibv_query_gid(context, number, index, to) };
        if (number, index) != (PORT, 0) {
            fail(libc::EINVAL);
            return -1;
        }
        to.write(gid(&own.open));
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel__ibv_query_gid_ex(
    context: *mut ibv_context,
    number: u32,
    index: u32,
    entry: *mut ibv_gid_entry,
    flags: u32,
    size: usize,
) -> c_int {
    // SAFETY: the caller's context and structure, which has `size` bytes.
    unsafe {
        let Some(own) = own(context) else {
            return real::_ibv_query_gid_ex(context, number, index, entry, flags, size);
        };
        if (number, flags) != (PORT.into(), 0) {
            return libc::EINVAL;
        }
        if index != 0 {
            return libc::ENODATA;
        }
        let mut all = ibv_gid_entry::ZEROED;
        (all.gid, all.port_num) = (gid(&own.open), number);
        ptr::copy_nonoverlapping((&raw const all).cast::<u8>(), entry.cast(), size.min(size_of_val(&all)));
    }
    0
}

/// Returns all entries of the GID table, which has one.
#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel__ibv_query_gid_table(
    context: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    most: usize,
    flags: u32,
    size: usize,
) -> isize {
    // SAFETY: the caller's context and structures, each of which has `size` bytes.
    unsafe {
        if own(context).is_none() {
            return real::_ibv_query_gid_table(context, entries, most, flags, size);
        }
        if most == 0 || flags != 0 {
            return -(libc::EINVAL as isize);
        }
        ginnel__ibv_query_gid_ex(context, PORT.into(), 0, entries, 0, size);
    }
    1
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_get_pkey_index(context: *mut ibv_context, number: u8, pkey: u16) -> c_int {
    // SAFETY: the caller's context.
    unsafe {
        if own(context).is_none() {
            return real::ibv_get_pkey_index(context, number, pkey);
        }
    }
    if (number, pkey) == (PORT, PKEY.to_be()) { 0 } else { -1 }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_query_gid_type(
    context: *mut ibv_context,
    number: u8,
    index: u32,
    kind: *mut ibv_gid_type,
) -> c_int {
    // SAFETY: the caller's context and word.
    unsafe {
        if own(context).is_none() {
            return real::ibv_query_gid_type(context, number, index, kind);
        }
        kind.write(IBV_GID_TYPE_IB);
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_query_pkey(
    context: *mut ibv_context,
    number: u8,
    index: c_int,
    pkey: *mut u16,
) -> c_int {
    // SAFETY: the caller's context and word.
    unsafe {
        if own(context).is_none() {
            return real::ibv_query_pkey(context, number, index, pkey);
        }
        if (number, index) != (PORT, 0) {
            fail(libc::EINVAL);
            return -1;
        }
        pkey.write(PKEY.to_be());
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_get_async_event(
    context: *mut ibv_context,
    event: *mut ibv_async_event,
) -> c_int {
    // SAFETY: the caller's context and structure.
    unsafe {
        let Some(own) = own(context) else { return real::ibv_get_async_event(context, event) };
        if own.events.is_empty() {
            // Without the notifier, nothing would detect events while the program sleeps here. If it cannot be started, threads that
            // poll detect them.
            let _ = own.start_notifier();
        }
        let taken = own.events.take(|Happened { event: Event(kind), address }| {
            let mut told = ibv_async_event::ZEROED;
            told.event_type = kind;
            match kind {
                IBV_EVENT_DEVICE_FATAL => {}
                IBV_EVENT_SRQ_LIMIT_REACHED => told.element.srq = ptr::with_exposed_provenance_mut(address),
                _ => told.element.qp = ptr::with_exposed_provenance_mut(address),
            }
            if let Some(unacknowledged) = unacknowledged(&told) {
                unacknowledged.give();
            }
            told
        });
        let told = match taken {
            Ok(told) => told,
            Err(error) => {
                fail(error.raw_os_error().unwrap_or(libc::EIO));
                return -1;
            }
        };
        event.write(told);
    }
    0
}

/// Returns the counter of unacknowledged events of the object that an event concerns, if the object is ours.
unsafe fn unacknowledged(event: &ibv_async_event) -> Option<&Unacknowledged> {
    // SAFETY: the event type says which object it concerns, and that object exists until the event has been acknowledged.
    unsafe {
        match event.event_type {
            IBV_EVENT_SRQ_LIMIT_REACHED => {
                shared_receive_queue::own(event.element.srq).map(|shared| &shared.unacknowledged)
            }
            IBV_EVENT_QP_FATAL
            | IBV_EVENT_QP_REQ_ERR
            | IBV_EVENT_QP_ACCESS_ERR
            | IBV_EVENT_QP_LAST_WQE_REACHED => {
                queue_pair::pair(event.element.qp).map(|pair| &pair.unacknowledged)
            }
            _ => None,
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_ack_async_event(event: *mut ibv_async_event) {
    // SAFETY: the caller's structure, which `ibv_get_async_event` has filled.
    unsafe {
        match unacknowledged(&*event) {
            Some(unacknowledged) => unacknowledged.acknowledge(1),
            // The event concerns no object, so no call waits for its acknowledgement. That also holds for the real library.
            None if (*event).event_type == IBV_EVENT_DEVICE_FATAL => {}
            None => real::ibv_ack_async_event(event),
        }
    }
}

/// Returns the size of a receive queue for a program's request, or `None` if the request is too large.
pub fn shape(entries: u32, elements: u32) -> Option<Shape> {
    let entries = (entries.max(1) as usize).next_power_of_two();
    let elements = elements.max(1) as usize;
    (entries <= MAX_ENTRIES && elements <= MAX_ELEMENTS).then_some(Shape { entries, elements })
}
