//! Attaching.

use crate::boundary::{
    Growing, Outcome, checked, close, fill, invalid, output_handle, read_options, return_handle, share,
    status, text,
};
use crate::handle_table::handle;
use ginnel::WaitMode;
use libc::c_int;
use std::ffi::c_char;
use std::time::Duration;

/// An attached process, which can listen, connect, and open blocks and locks in one segment. Any number of threads may
/// use it at once. Created by ginnel_attach(), freed by ginnel_detach().
pub struct Endpoint(pub(crate) ginnel::Endpoint);
handle!(Endpoint, "endpoint");

/// How an operation waits.
#[repr(C)]
#[allow(non_camel_case_types)] // The names are C's.
pub enum Wait {
    /// Spin for as long as the budget, then sleep. The default.
    GINNEL_WAIT_ADAPTIVE = 0,
    /// Spin until the operation is possible. Lowest latency; uses a CPU, but after some microseconds leaves it to other
    /// threads that need it.
    GINNEL_WAIT_POLL = 1,
    /// Sleep at once. Uses no CPU; each wake-up costs a doorbell, some tens of microseconds.
    GINNEL_WAIT_INTERRUPT = 2,
}

/// Converts a wait mode of C.
pub(crate) fn wait_mode(mode: c_int, budget_ns: u64) -> Outcome<WaitMode> {
    const ADAPTIVE: c_int = Wait::GINNEL_WAIT_ADAPTIVE as c_int;
    const POLL: c_int = Wait::GINNEL_WAIT_POLL as c_int;
    const INTERRUPT: c_int = Wait::GINNEL_WAIT_INTERRUPT as c_int;
    match (mode, budget_ns) {
        (ADAPTIVE, 0) => Ok(WaitMode::default()),
        (ADAPTIVE, ns) => Ok(WaitMode::Adaptive { budget: Duration::from_nanos(ns) }),
        (POLL, _) => Ok(WaitMode::Poll),
        (INTERRUPT, _) => Ok(WaitMode::Interrupt),
        _ => Err(invalid(format!("{mode} is not a wait mode; use one of GINNEL_WAIT_*"))),
    }
}

/// Options for attaching. Fill the structure with zeros, set `size`, then the members that should differ from the
/// default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AttachOptions {
    /// sizeof(ginnel_attach_options).
    pub size: usize,
    /// Path of the daemon's socket. NULL: $GINNEL_SOCKET if it is set, otherwise /run/ginnel/ginnel.sock.
    pub socket: *const c_char,
    /// The name under which this endpoint appears to people and peers. NULL: the program's name.
    pub name: *const c_char,
    /// The default wait mode of channels and locks: one of GINNEL_WAIT_*.
    pub wait: c_int,
    /// For GINNEL_WAIT_ADAPTIVE: how long to spin, in nanoseconds. 0: the default, 100000.
    pub budget_ns: u64,
}
// SAFETY: the structure is as the trait requires.
unsafe impl Growing for AttachOptions {}

/// Converts the options to those of the Rust library; null means the defaults.
pub(crate) unsafe fn attach_options(
    options: *const AttachOptions,
    name: &str,
) -> Outcome<ginnel::AttachOptions> {
    // SAFETY: the caller of the C function is responsible for its pointers, as the head of ginnel.h says.
    let asked = unsafe { read_options(options, name) }?;
    let mut attach = ginnel::AttachOptions::default();
    let (socket, name) = (asked.socket, asked.name);
    if !socket.is_null() {
        attach.socket = checked!(text(socket)).into();
    }
    if !name.is_null() {
        attach.name = Some(checked!(text(name)).into());
    }
    attach.mode = wait_mode(asked.wait, asked.budget_ns)?;
    Ok(attach)
}

/// How a process has the segment's memory mapped.
#[repr(C)]
#[allow(non_camel_case_types)] // The names are C's.
pub enum MemoryKind {
    /// In a VM, from a PCI BAR (ivshmem-plain).
    GINNEL_MEMORY_BAR = 1,
    /// In a VM, from /dev/dax* (virtio-pmem).
    GINNEL_MEMORY_DAX = 2,
    /// On the host, from a file.
    GINNEL_MEMORY_FILE = 3,
}

/// Properties of an endpoint.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct EndpointInfo {
    /// sizeof(ginnel_endpoint_info).
    pub size: usize,
    /// Number of the endpoint's member (host or VM); 0 is the host.
    pub member: u32,
    /// Number of the endpoint.
    pub endpoint: u32,
    /// Epoch of that number, which distinguishes the endpoint from earlier ones with the same number.
    pub epoch: u32,
    /// 1 if this endpoint can sleep on a doorbell; 0 in a VM without interrupts, where a waiting thread checks at short
    /// intervals.
    pub interrupts: u32,
    /// Page size of the segment in bytes: the unit in which it is mapped.
    pub page: usize,
    /// 1 if this machine may only read the segment and so cannot open channels; otherwise 0.
    pub read_only: u32,
    /// How the segment's memory is mapped: one of GINNEL_MEMORY_*.
    pub memory: u32,
}
// SAFETY: the structure is as the trait requires.
unsafe impl Growing for EndpointInfo {}

/// Attaches to a segment through the daemon of this machine. `options` may be NULL. On success the caller must free
/// `*endpoint` with ginnel_detach(); on failure it is NULL.
///
/// Blocks until the daemon answers, for up to 10 s if the daemon is being restarted; if there was never a daemon at the
/// socket, it fails at once. Any thread may call it. Errors: GINNEL_ERR_NO_DAEMON, GINNEL_ERR_NO_SEGMENT,
/// GINNEL_ERR_DENIED, GINNEL_ERR_LIMIT, GINNEL_ERR_NAME.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_attach(
    segment: *const c_char,
    options: *const AttachOptions,
    endpoint: *mut *mut Endpoint,
) -> c_int {
    status(|| {
        let place = checked!(output_handle(endpoint));
        let segment = checked!(text(segment));
        let attach = checked!(attach_options(options));
        return_handle(place, Endpoint(ginnel::Endpoint::attach_with(segment, &attach)?));
        Ok(())
    })
}

/// Frees an endpoint. Its listeners and channels continue to work; the daemon considers the endpoint ended when the
/// last of them is closed. NULL is allowed. A call of another thread that uses the endpoint goes on. May inform the daemon,
/// which takes at most a second.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_detach(endpoint: *mut Endpoint) -> c_int {
    // SAFETY: the caller is responsible for it.
    unsafe { close(endpoint) }
}

/// Fills in `*info`, whose `size` the caller has set. Any thread may call it; it does not block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_endpoint_get_info(
    endpoint: *const Endpoint,
    info: *mut EndpointInfo,
) -> c_int {
    status(|| {
        let Endpoint(of) = &*checked!(share(endpoint));
        let (number, epoch) = of.number();
        let facts = EndpointInfo {
            size: 0,
            member: of.member(),
            endpoint: number,
            epoch,
            interrupts: of.has_interrupts().into(),
            page: of.page(),
            read_only: of.is_read_only().into(),
            memory: of.mapping_kind().0,
        };
        checked!(fill(info, facts));
        Ok(())
    })
}
