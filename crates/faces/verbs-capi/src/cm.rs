//! The functions, identifiers (`rdma_cm_id`) and events of librdmacm: the C side of `ginnel_verbs::cm`.
//!
//! In a process that sees a segment as a device, this library makes the connections; in any other process, all calls are forwarded to
//! the real librdmacm. So each event channel, identifier or list belongs entirely to one of the two libraries. A register of addresses
//! says which objects are ours; looking them up is acceptable because these calls are rare.
//!
//! ```text
//! addresses       conversion of C addresses; the addresses of this machine and its network namespace
//! event_channel   event channels and events
//! id              creating and destroying identifiers
//! binding         addresses of identifiers: bind, listen, resolve
//! connecting      connections: connect, accept, reject, disconnect
//! endpoint        rdma_create_ep
//! objects         the queue pairs and other queues of an identifier
//! address_info    rdma_getaddrinfo
//! refused         calls that are not supported
//! ```
#![allow(unsafe_code)] // C structures and functions.

mod address_info;
pub mod addresses;
mod binding;
mod connecting;
mod endpoint;
mod event_channel;
mod id;
mod objects;
mod refused;

use crate::context::{Context, Open, block_signals, ginnel_ibv_open_device, own as own_context};
use crate::memory::ginnel_ibv_alloc_pd;
use crate::{devices, forks};
use ginnel_verbs::cm::manager::Manager;
use ginnel_verbs::device::{Device, DeviceError};
use ginnel_verbs_abi::{ibv_context, ibv_pd};
use std::collections::BTreeSet;
use std::ffi::c_int;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{process, ptr, thread};

pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A set of the addresses of this library's objects of one kind.
struct Register(Mutex<BTreeSet<usize>>);

impl Register {
    const fn new() -> Self {
        Self(Mutex::new(BTreeSet::new()))
    }

    fn add<T>(&self, object: *const T) {
        locked(&self.0).insert(object.addr());
    }

    fn remove<T>(&self, object: *const T) -> bool {
        locked(&self.0).remove(&object.addr())
    }

    fn has<T>(&self, object: *const T) -> bool {
        locked(&self.0).contains(&object.addr())
    }
}

/// A device of this library that is open for identifiers. It stays open for as long as the process lives.
#[derive(Clone, Copy)]
pub struct Opened {
    process: u32,
    context: usize,
    pd: usize,
}

impl Opened {
    fn context(&self) -> *mut ibv_context {
        ptr::with_exposed_provenance_mut(self.context)
    }

    /// The protection domain for queue pairs for which the program names none.
    fn pd(&self) -> *mut ibv_pd {
        ptr::with_exposed_provenance_mut(self.pd)
    }

    /// Returns the open segment.
    pub fn open(&self) -> Arc<Open> {
        // SAFETY: the context is ours, and is never closed.
        let own: Option<&Context> = unsafe { own_context(self.context()) };
        own.expect("a context of ours").open.clone()
    }

    fn device(&self) -> Arc<Device> {
        self.open().device.clone()
    }
}

/// Devices that have been opened for identifiers, each with the process that opened it.
static OPENED: Mutex<Vec<Opened>> = Mutex::new(Vec::new());
/// The connection manager, and the process that started it.
static MANAGER: Mutex<Option<(u32, Arc<Manager>)>> = Mutex::new(None);

/// A guard that keeps other threads from opening devices for identifiers, from starting a manager, and from creating or looking up
/// objects.
pub struct Held {
    _opened: MutexGuard<'static, Vec<Opened>>,
    _manager: MutexGuard<'static, Option<(u32, Arc<Manager>)>>,
    _registers: [MutexGuard<'static, BTreeSet<usize>>; 5],
}

/// Waits until no other thread is doing any of this.
pub fn hold() -> Held {
    let registers =
        [&event_channel::CHANNELS, &event_channel::EVENTS, &id::IDS, &objects::LISTS, &address_info::RESULTS];
    Held {
        _opened: locked(&OPENED),
        _manager: locked(&MANAGER),
        _registers: registers.map(|register| locked(&register.0)),
    }
}

/// Returns this library's devices that existed when the first one was needed. The child of a fork opens its own.
pub fn opened() -> Vec<Opened> {
    forks::follow();
    let mut opened = locked(&OPENED);
    let process = process::id();
    let known: Vec<_> = opened.iter().filter(|known| known.process == process).copied().collect();
    if !known.is_empty() {
        return known;
    }
    let open = |listed: *mut ginnel_verbs_abi::ibv_device| {
        // SAFETY: the devices are ours, and are never freed.
        unsafe {
            let context = ginnel_ibv_open_device(listed);
            let pd = if context.is_null() { ptr::null_mut() } else { ginnel_ibv_alloc_pd(context) };
            (!pd.is_null()).then(|| Opened {
                process,
                context: context.expose_provenance(),
                pd: pd.expose_provenance(),
            })
        }
    };
    let found: Vec<_> = devices::pointers().into_iter().filter_map(open).collect();
    opened.extend(&found);
    found
}

/// Returns whether this library makes the connections, which is so if it has a device.
pub fn is_here() -> bool {
    !opened().is_empty()
}

/// Returns the connection manager of this process, and starts it if necessary.
fn manager() -> Result<Arc<Manager>, DeviceError> {
    let mut manager = locked(&MANAGER);
    if let Some((process, manager)) = &*manager
        && *process == process::id()
    {
        return Ok(manager.clone());
    }
    let new = Manager::start(|run| {
        // Signals must be handled by the program's threads.
        let old = block_signals();
        let thread = thread::Builder::new().name("ginnel-cm".into()).spawn(run);
        // SAFETY: this restores the earlier mask.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, ptr::null_mut()) };
        thread
    })?;
    let new = Arc::new(new);
    if let Some((_, parents)) = manager.replace((process::id(), new.clone())) {
        // Its thread runs in the parent only.
        std::mem::forget(parents);
    }
    Ok(new)
}

/// Sets `errno` and returns -1.
pub fn failed(error: c_int) -> c_int {
    crate::context::fail(error);
    -1
}

/// Returns 0, or sets `errno` and returns -1.
pub fn done(result: Result<(), c_int>) -> c_int {
    result.map_or_else(failed, |()| 0)
}
