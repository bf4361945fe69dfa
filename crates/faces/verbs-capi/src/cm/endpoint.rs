//! `rdma_create_ep`: creates an identifier with its addresses and its queue pair in one call.
#![allow(unsafe_code)] // C structures and functions.

use super::binding::{bind, resolve};
use super::id::{Id, create, ginnel_rdma_destroy_id, own, space};
use super::{addresses, failed, is_here, objects};
use crate::real;
use ginnel_verbs_abi::rdmacm::*;
use ginnel_verbs_abi::*;
use std::ffi::c_int;
use std::ptr;

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_create_ep(
    id: *mut *mut rdma_cm_id,
    res: *mut rdma_addrinfo,
    pd: *mut ibv_pd,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    if !is_here() {
        // SAFETY: the caller's objects.
        return unsafe { real::rdma_create_ep(id, res, pd, init) };
    }
    // SAFETY: the caller's objects, and its room for a pointer; no other thread knows the new identifier yet.
    unsafe {
        let wanted = &*res;
        let ps = wanted.ai_port_space.cast_unsigned();
        let made = space(ps).ok_or(libc::EPROTONOSUPPORT);
        let made = made
            .and_then(|_| create(ptr::null_mut(), ptr::null_mut(), ps, wanted.ai_qp_type.cast_unsigned()));
        let made = match made {
            Ok(made) => made,
            Err(error) => return failed(error),
        };
        let prepared = own(made).ok_or(libc::EINVAL).and_then(|own| prepare(made, own, wanted, pd, init));
        match prepared {
            Ok(()) => {
                id.write(made);
                0
            }
            Err(error) => {
                ginnel_rdma_destroy_id(made);
                failed(error)
            }
        }
    }
}

/// Binds a new identifier, or resolves its destination and creates its queue pair.
unsafe fn prepare(
    id: *mut rdma_cm_id,
    own: &Id,
    wanted: &rdma_addrinfo,
    pd: *mut ibv_pd,
    init: *mut ibv_qp_init_attr,
) -> Result<(), c_int> {
    // SAFETY: the caller's identifier and structures.
    unsafe {
        if !init.is_null() {
            (*init).qp_type = (*id).qp_type;
        }
        let from = addresses::read(wanted.ai_src_addr);
        if wanted.ai_flags.cast_unsigned() & RAI_PASSIVE != 0 {
            bind(id, own, from.ok_or(libc::EAFNOSUPPORT)?)?;
            (*id).pd = pd;
            own.state().wanted = init.as_ref().copied();
            return Ok(());
        }
        let to = addresses::read(wanted.ai_dst_addr).ok_or(libc::EAFNOSUPPORT)?;
        resolve(id, own, from, to)??;
        match init.as_mut() {
            Some(init) => objects::create(id, pd, init),
            None => Ok(()),
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_destroy_ep(id: *mut rdma_cm_id) {
    // SAFETY: the caller's identifier, which the caller gives up.
    unsafe {
        if own(id).is_none() {
            return real::rdma_destroy_ep(id);
        }
        if !(*id).qp.is_null() {
            objects::ginnel_rdma_destroy_qp(id);
        }
        if !(*id).srq.is_null() {
            objects::ginnel_rdma_destroy_srq(id);
        }
        ginnel_rdma_destroy_id(id);
    }
}
