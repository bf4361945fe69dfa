//! Protection domains and memory regions.
#![allow(unsafe_code)] // C structures and functions.

use crate::context::{Context, Open, errno, fail, next_domain, own};
use crate::pages::{self, NotMoved};
use crate::{real, warning};
use ginnel_layout::verbs::{Access, Key};
use ginnel_verbs::device::DeviceError;
use ginnel_verbs::regions::Region;
use ginnel_verbs_abi::*;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// A protection domain of this library.
#[repr(C)]
pub struct Domain {
    pd: ibv_pd,
    pub number: u32,
    /// Number of regions, queue pairs and address handles in it.
    pub users: AtomicU32,
}

/// Returns the protection domain and its context if the domain is one of this library's.
///
/// # Safety
///
/// The pointer is null or points to a protection domain, of this library or the real one.
pub unsafe fn domain<'a>(pd: *mut ibv_pd) -> Option<(&'a Context, &'a Domain)> {
    if pd.is_null() {
        return None;
    }
    // SAFETY: the caller's domain; the domains of our contexts are ours.
    unsafe { Some((own((*pd).context)?, &*pd.cast::<Domain>())) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: the caller's context.
    let Some(own) = (unsafe { own(context) }) else {
        // SAFETY: the context is not ours.
        return unsafe { real::ibv_alloc_pd(context) };
    };
    let number = next_domain(&own.open);
    let pd = ibv_pd { context, handle: number };
    Box::into_raw(Box::new(Domain { pd, number, users: AtomicU32::new(0) })).cast()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: the caller's domain.
    unsafe {
        let Some((_, own)) = domain(pd) else { return real::ibv_dealloc_pd(pd) };
        if own.users.load(Ordering::Acquire) > 0 {
            return libc::EBUSY;
        }
        drop(Box::from_raw(pd.cast::<Domain>()));
    }
    0
}

/// Flags that are only hints, and may be ignored.
const OPTIONAL: c_uint = IBV_ACCESS_OPTIONAL_RANGE | IBV_ACCESS_HUGETLB;
const KNOWN: c_uint =
    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;

/// Registers a range of the program's memory in a protection domain, and moves its pages into the segment if peers or receives may
/// access it. The error is an errno value.
pub fn register(
    open: &Arc<Open>,
    domain: u32,
    address: u64,
    length: usize,
    access: c_uint,
) -> Result<Key, c_int> {
    let access = access & !OPTIONAL;
    if access & !KNOWN != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    let writes = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
    if access & writes != 0 && access & IBV_ACCESS_LOCAL_WRITE == 0 {
        return Err(libc::EINVAL);
    }
    let end = address.checked_add(length as u64).ok_or(libc::EINVAL)?;
    let region = Region { address, length: length as u64, access: Access(access), domain };
    let device = &open.device;
    // A region without any access right is only sent from, so peers need not reach it.
    let is_written = access & (IBV_ACCESS_LOCAL_WRITE | writes) != 0;
    let chunks = match access {
        0 => Ok(Vec::new()),
        _ => pages::move_range(open, address..end, is_written),
    };
    let registered = match chunks {
        Ok(chunks) => device.register(region, &chunks),
        Err(not_moved) => {
            if let NotMoved::Full(error) = not_moved {
                // The memory can be registered where it is, but access to it is slower.
                warning::say(&error);
            }
            Err(DeviceError::Full("memory region"))
        }
    };
    let registered = match registered {
        Err(DeviceError::Full(_)) if access != 0 => {
            // A driver that cannot pin the pages fails in the same way.
            if !ginnel_shmem::is_mapped(address as usize..end as usize, is_written).unwrap_or(false) {
                return Err(libc::EFAULT);
            }
            device.register_shadow(region)
        }
        registered => registered,
    };
    registered.map_err(|error| errno(&error))
}

unsafe fn reg_mr(pd: *mut ibv_pd, address: *mut c_void, length: usize, access: c_uint) -> *mut ibv_mr {
    // SAFETY: the caller's domain, which is ours.
    let Some((context, own)) = (unsafe { domain(pd) }) else { return ptr::null_mut() };
    match register(&context.open, own.number, address as u64, length, access) {
        Ok(key) => {
            own.users.fetch_add(1, Ordering::Relaxed);
            // SAFETY: the caller's domain, which is ours and so begins with these fields.
            let context = unsafe { (*pd).context };
            let (lkey, rkey) = (key.0, key.0);
            Box::into_raw(Box::new(ibv_mr { context, pd, addr: address, length, handle: key.0, lkey, rkey }))
        }
        Err(error) => {
            fail(error);
            ptr::null_mut()
        }
    }
}

/// Calls `register`, which registers memory with the real library.
fn reg_real(
    address: *mut c_void,
    length: usize,
    access: c_uint,
    register: impl FnOnce() -> *mut ibv_mr,
) -> *mut ibv_mr {
    if access & IBV_ACCESS_ON_DEMAND != 0 {
        // The device follows changes of the page tables.
        return register();
    }
    let range = address as u64..(address as u64).saturating_add(length as u64);
    ptr::with_exposed_provenance_mut(pages::pin(range, || register().expose_provenance()))
}

/// Calls `register`, which changes a registration of the real library.
pub fn rereg_real(
    mr: *mut ibv_mr,
    translation: Option<(*mut c_void, usize)>,
    access: c_uint,
    register: impl FnOnce() -> c_int,
) -> c_int {
    let Some((address, length)) = translation else { return register() };
    let mut result = 0;
    reg_real(address, length, access, || {
        result = register();
        if result == 0 { mr } else { ptr::null_mut() }
    });
    result
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_reg_mr(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: the caller's domain.
    unsafe {
        match domain(pd) {
            Some(_) => reg_mr(pd, address, length, access.cast_unsigned()),
            None => reg_real(address, length, access.cast_unsigned(), || {
                real::ibv_reg_mr(pd, address, length, access)
            }),
        }
    }
}

/// Registers memory. The addresses that peers use are those of this process, so any other `iova` is refused.
#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    // SAFETY: the caller's domain.
    unsafe {
        if domain(pd).is_none() {
            return reg_real(address, length, access, || {
                real::ibv_reg_mr_iova2(pd, address, length, iova, access)
            });
        }
        if iova != address as u64 {
            fail(libc::EOPNOTSUPP);
            return ptr::null_mut();
        }
        reg_mr(pd, address, length, access)
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_reg_mr_iova(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: the caller's domain.
    unsafe {
        match domain(pd) {
            Some(_) => ginnel_ibv_reg_mr_iova2(pd, address, length, iova, access.cast_unsigned()),
            None => reg_real(address, length, access.cast_unsigned(), || {
                real::ibv_reg_mr_iova(pd, address, length, iova, access)
            }),
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    // SAFETY: the caller's region; the regions of our contexts are ours.
    unsafe {
        let Some(context) = own((*mr).context) else {
            return pages::unpin(mr.addr(), || real::ibv_dereg_mr(mr));
        };
        match context.open.device.deregister(Key((*mr).lkey)) {
            Ok(true) => {}
            Ok(false) => return libc::EINVAL,
            Err(error) => return errno(&error),
        }
        if let Some((_, domain)) = domain((*mr).pd) {
            domain.users.fetch_sub(1, Ordering::Release);
        }
        drop(Box::from_raw(mr));
    }
    0
}
