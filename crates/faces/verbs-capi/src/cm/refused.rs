//! Calls that this library does not support for its own identifiers. For identifiers of the real library they are forwarded.
#![allow(unsafe_code)] // These are C functions.

use super::failed;
use super::id::own;
use crate::real;
use ginnel_verbs_abi::rdmacm::*;
use libc::sockaddr;
use std::ffi::{c_int, c_void};

/// Defines functions that fail for identifiers of this library.
macro_rules! refused {
    ($($name:ident = $real:ident($($argument:ident: $type:ty),*);)*) => {
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name(id: *mut rdma_cm_id, $($argument: $type),*) -> c_int {
                // SAFETY: the caller's objects.
                unsafe {
                    match own(id) {
                        Some(_) => failed(libc::EOPNOTSUPP),
                        None => real::$real(id, $($argument),*),
                    }
                }
            }
        )*
    };
}

refused! {
    // Multicast.
    ginnel_rdma_join_multicast = rdma_join_multicast(address: *mut sockaddr, context: *mut c_void);
    ginnel_rdma_join_multicast_ex = rdma_join_multicast_ex(
        attr: *mut rdma_cm_join_mc_attr_ex, context: *mut c_void
    );
    ginnel_rdma_leave_multicast = rdma_leave_multicast(address: *mut sockaddr);
    // Vendor-specific options of a connection (ECE).
    ginnel_rdma_set_local_ece = rdma_set_local_ece(ece: *mut c_void);
    ginnel_rdma_get_remote_ece = rdma_get_remote_ece(ece: *mut c_void);
    ginnel_rdma_reject_ece = rdma_reject_ece(private: *const c_void, len: u8);
    // Service names.
    ginnel_rdma_resolve_addrinfo = rdma_resolve_addrinfo(
        node: *const i8, service: *const i8, hints: *const rdma_addrinfo
    );
    ginnel_rdma_query_addrinfo = rdma_query_addrinfo(info: *mut *mut rdma_addrinfo);
    ginnel_rdma_write_cm_event = rdma_write_cm_event(event: rdma_cm_event_type, status: c_int, arg: u64);
}
