//! Calls that this library does not offer for its own objects. For objects of the real library they are forwarded.
#![allow(unsafe_code)] // These are C functions.

use crate::context::{fail, own};
use crate::memory::{domain, rereg_real};
use crate::queue_pair::pair;
use crate::real;
use ginnel_verbs_abi::*;
use std::ffi::{c_int, c_void};
use std::ptr;

fn nothing<T>() -> *mut T {
    fail(libc::EOPNOTSUPP);
    ptr::null_mut()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int {
    // SAFETY: the caller's objects.
    unsafe {
        match pair(qp) {
            Some(_) => libc::EOPNOTSUPP,
            None => real::ibv_attach_mcast(qp, gid, lid),
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int {
    // SAFETY: the caller's objects.
    unsafe {
        match pair(qp) {
            Some(_) => libc::EOPNOTSUPP,
            None => real::ibv_detach_mcast(qp, gid, lid),
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_query_ece(qp: *mut ibv_qp, ece: *mut c_void) -> c_int {
    // SAFETY: the caller's objects.
    unsafe {
        match pair(qp) {
            Some(_) => libc::EOPNOTSUPP,
            None => real::ibv_query_ece(qp, ece),
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_set_ece(qp: *mut ibv_qp, ece: *mut c_void) -> c_int {
    // SAFETY: the caller's objects.
    unsafe {
        match pair(qp) {
            Some(_) => libc::EOPNOTSUPP,
            None => real::ibv_set_ece(qp, ece),
        }
    }
}

/// Returns whether the bytes of a message arrive in order. They do not: a long copy may run backwards, and only the last word is
/// guaranteed to be last.
#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_query_qp_data_in_order(qp: *mut ibv_qp, opcode: u32, flags: u32) -> c_int {
    // SAFETY: the caller's objects.
    unsafe {
        match pair(qp) {
            Some(_) => 0,
            None => real::ibv_query_qp_data_in_order(qp, opcode, flags),
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_reg_dmabuf_mr(
    pd: *mut ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: the caller's objects.
    unsafe {
        match domain(pd) {
            Some(_) => nothing(),
            None => real::ibv_reg_dmabuf_mr(pd, offset, length, iova, fd, access),
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_rereg_mr(
    mr: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    // SAFETY: the caller's objects.
    unsafe {
        if own((*mr).context).is_none() {
            let translation =
                (flags.cast_unsigned() & IBV_REREG_MR_CHANGE_TRANSLATION != 0).then_some((address, length));
            return rereg_real(mr, translation, access.cast_unsigned(), || {
                real::ibv_rereg_mr(mr, flags, pd, address, length, access)
            });
        }
    }
    fail(libc::EOPNOTSUPP);
    // The same result as for invalid input: the region is unchanged.
    IBV_REREG_MR_ERR_INPUT
}

/// The value of `IBV_REREG_MR_ERR_INPUT`: the input is invalid, and the region is unchanged.
const IBV_REREG_MR_ERR_INPUT: c_int = -1;

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_import_pd(context: *mut ibv_context, handle: u32) -> *mut ibv_pd {
    // SAFETY: the caller's objects.
    unsafe {
        match own(context) {
            Some(_) => nothing(),
            None => real::ibv_import_pd(context, handle),
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_import_mr(pd: *mut ibv_pd, handle: u32) -> *mut ibv_mr {
    // SAFETY: the caller's objects.
    unsafe {
        match domain(pd) {
            Some(_) => nothing(),
            None => real::ibv_import_mr(pd, handle),
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_import_dm(context: *mut ibv_context, handle: u32) -> *mut c_void {
    // SAFETY: the caller's objects.
    unsafe {
        match own(context) {
            Some(_) => nothing(),
            None => real::ibv_import_dm(context, handle),
        }
    }
}
