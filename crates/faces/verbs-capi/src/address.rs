//! Address handles.
#![allow(unsafe_code)] // C structures and functions.

use crate::context::{fail, lid_of, own as own_context};
use crate::memory::domain;
use crate::real;
use ginnel_verbs_abi::*;
use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::Ordering;

/// An address handle of this library.
#[repr(C)]
pub struct Address {
    ah: ibv_ah,
    /// The local identifier (LID) of the destination port.
    pub lid: u16,
}

/// Returns the address handle if it is one of this library's.
///
/// # Safety
///
/// The pointer is null or points to an address handle, of this library or the real one.
pub unsafe fn own<'a>(ah: *mut ibv_ah) -> Option<&'a Address> {
    // SAFETY: the caller's address handle; the handles of our contexts are ours.
    unsafe {
        own_context(ah.as_ref()?.context)?;
        Some(&*ah.cast::<Address>())
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    // SAFETY: the caller's domain and structure.
    let (context, domain, attr) = unsafe {
        let Some((_, domain)) = domain(pd) else { return real::ibv_create_ah(pd, attr) };
        ((*pd).context, domain, &*attr)
    };
    // As in a real network, the destination is the LID if there is one, and otherwise the GID.
    let lid = match attr.dlid {
        0 if attr.is_global != 0 => lid_of(&attr.grh.dgid),
        0 => None,
        lid => Some(lid),
    };
    let Some(lid) = lid.filter(|_| attr.port_num == 1) else {
        fail(libc::EINVAL);
        return ptr::null_mut();
    };
    domain.users.fetch_add(1, Ordering::Relaxed);
    let ah = ibv_ah { context, pd, handle: u32::from(lid) };
    Box::into_raw(Box::new(Address { ah, lid })).cast()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_destroy_ah(ah: *mut ibv_ah) -> c_int {
    // SAFETY: the caller's address handle.
    unsafe {
        let Some(address) = own(ah) else { return real::ibv_destroy_ah(ah) };
        if let Some((_, domain)) = domain(address.ah.pd) {
            domain.users.fetch_sub(1, Ordering::Release);
        }
        drop(Box::from_raw(ah.cast::<Address>()));
    }
    0
}

/// Returns the address of the sender of a datagram. This library's datagrams have no global routing header.
fn sender(port: u8, wc: &ibv_wc) -> ibv_ah_attr {
    let mut attr = ibv_ah_attr::ZEROED;
    (attr.dlid, attr.sl, attr.src_path_bits, attr.port_num) = (wc.slid, wc.sl, wc.dlid_path_bits, port);
    attr
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_init_ah_from_wc(
    context: *mut ibv_context,
    port: u8,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    attr: *mut ibv_ah_attr,
) -> c_int {
    // SAFETY: the caller's context and structures.
    unsafe {
        if own_context(context).is_none() {
            return real::ibv_init_ah_from_wc(context, port, wc, grh, attr);
        }
        attr.write(sender(port, &*wc));
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_create_ah_from_wc(
    pd: *mut ibv_pd,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    port: u8,
) -> *mut ibv_ah {
    // SAFETY: the caller's domain and structures.
    unsafe {
        if domain(pd).is_none() {
            return real::ibv_create_ah_from_wc(pd, wc, grh, port);
        }
        let mut attr = sender(port, &*wc);
        ginnel_ibv_create_ah(pd, &raw mut attr)
    }
}
