//! librdmacm's identifiers, events and calls: the C side of `ginnel_verbs::cm`.
//!
//! A process that sees a segment as a device has its connections made here; all others go on to the real librdmacm. So an event channel, an
//! identifier or a list is ours or the real library's as a whole, and which it is stands in a register of addresses: these calls are
//! rare.
//!
//! ```text
//! addresses       addresses of C, of this machine and of the network namespace
//! event_channel   event channels and events
//! id              identifiers
//! binding         their addresses: bind, listen, resolve
//! connecting      connections: connect, accept, reject, disconnect
//! endpoint        rdma_create_ep
//! objects         queue pairs and queues of an identifier
//! address_info    rdma_getaddrinfo
//! refused         what is not offered
//! ```
#![allow(unsafe_code)] // Structures and functions of C.

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

/// Addresses of objects of ours.
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

/// A device of ours that is open for identifiers, for as long as the process is.
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

    /// The domain of queue pairs for which the program names none.
    fn pd(&self) -> *mut ibv_pd {
        ptr::with_exposed_provenance_mut(self.pd)
    }

    /// The segment.
    pub fn open(&self) -> Arc<Open> {
        // SAFETY: the context is ours, and stays open.
        let own: Option<&Context> = unsafe { own_context(self.context()) };
        own.expect("a context of ours").open.clone()
    }

    fn device(&self) -> Arc<Device> {
        self.open().device.clone()
    }
}

/// Devices that were opened for identifiers, and by which process.
static OPENED: Mutex<Vec<Opened>> = Mutex::new(Vec::new());
/// The manager, and whose it is.
static MANAGER: Mutex<Option<(u32, Arc<Manager>)>> = Mutex::new(None);

/// While this is there, nobody opens devices for identifiers, starts a manager, or makes or looks for an object.
pub struct Held {
    _opened: MutexGuard<'static, Vec<Opened>>,
    _manager: MutexGuard<'static, Option<(u32, Arc<Manager>)>>,
    _registers: [MutexGuard<'static, BTreeSet<usize>>; 5],
}

/// Waits until nobody does that.
pub fn hold() -> Held {
    let registers =
        [&event_channel::CHANNELS, &event_channel::EVENTS, &id::IDS, &objects::LISTS, &address_info::RESULTS];
    Held {
        _opened: locked(&OPENED),
        _manager: locked(&MANAGER),
        _registers: registers.map(|register| locked(&register.0)),
    }
}

/// The devices of ours: those that there are when the first one is needed. The child of a fork opens its own.
pub fn opened() -> Vec<Opened> {
    forks::follow();
    let mut opened = locked(&OPENED);
    let process = process::id();
    let known: Vec<_> = opened.iter().filter(|known| known.process == process).copied().collect();
    if !known.is_empty() {
        return known;
    }
    let open = |listed: *mut ginnel_verbs_abi::ibv_device| {
        // SAFETY: a device of ours; devices are never freed.
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

/// Whether connections are made here: there is a device of ours.
pub fn is_here() -> bool {
    !opened().is_empty()
}

/// The manager of this process.
fn manager() -> Result<Arc<Manager>, DeviceError> {
    let mut manager = locked(&MANAGER);
    if let Some((process, manager)) = &*manager
        && *process == process::id()
    {
        return Ok(manager.clone());
    }
    let new = Manager::start(|run| {
        // Signals are for the program's threads.
        let old = block_signals();
        let thread = thread::Builder::new().name("ginnel-cm".into()).spawn(run);
        // SAFETY: the mask is what it was before.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, ptr::null_mut()) };
        thread
    })?;
    let new = Arc::new(new);
    if let Some((_, parents)) = manager.replace((process::id(), new.clone())) {
        // Its thread is in the parent.
        std::mem::forget(parents);
    }
    Ok(new)
}

/// -1, with this in `errno`.
pub fn failed(error: c_int) -> c_int {
    crate::context::fail(error);
    -1
}

/// 0, or -1 with an error in `errno`.
pub fn done(result: Result<(), c_int>) -> c_int {
    result.map_or_else(failed, |()| 0)
}
