//! The functions of the real libraries that this library calls. Without a real library, each returns what the table says.

#[cfg(test)]
pub use fake::*;
use ginnel_verbs_abi::rdmacm::*;
use ginnel_verbs_abi::*;
#[cfg(test)]
use libc::ENOSYS;
use libc::{fd_set, iovec, msghdr, nfds_t, off_t, pollfd, sockaddr, socklen_t, ssize_t, timeval};
use std::ffi::{c_char, c_int, c_uint, c_void};
#[cfg(test)]
use std::ptr::null_mut;
#[cfg(not(test))]
pub use there::*;

#[cfg(not(test))]
mod there {
    use ginnel_verbs_abi::ibv_device;
    use std::ffi::{c_int, c_void};

    unsafe extern "C" {
        #[link_name = "ginnel_real_ibv_get_device_list"]
        pub fn ibv_get_device_list(num_devices: *mut c_int) -> *mut *mut ibv_device;
        #[link_name = "ginnel_real_ibv_free_device_list"]
        pub fn ibv_free_device_list(list: *mut *mut ibv_device);
        #[link_name = "ginnel_real_ibv_get_device_guid"]
        pub fn ibv_get_device_guid(device: *mut ibv_device) -> u64;
        #[link_name = "ginnel_real_ibv_fork_init"]
        pub fn ibv_fork_init() -> c_int;
        #[link_name = "ginnel_real_ibv_is_fork_initialized"]
        pub fn ibv_is_fork_initialized() -> u32;
        #[link_name = "ginnel_real_verbs_register_driver_34"]
        pub fn verbs_register_driver_34(driver: *const c_void);
        #[link_name = "ginnel_real_verbs_register_driver_59"]
        pub fn verbs_register_driver_59(driver: *const c_void);
        #[link_name = "ginnel_real_verbs_register_driver_65"]
        pub fn verbs_register_driver_65(driver: *const c_void);
    }
}

/// A fake real library with the devices that a test sets.
#[cfg(test)]
pub mod fake {
    use ginnel_verbs_abi::ibv_device;
    use std::cell::{Cell, RefCell};
    use std::ffi::{c_int, c_void};
    use std::ptr;

    thread_local! {
        /// The devices. `None` makes the list fail.
        pub static DEVICES: RefCell<Option<Vec<*mut ibv_device>>> = const { RefCell::new(None) };
        /// Number of lists that have not been freed.
        pub static LISTS: Cell<i32> = const { Cell::new(0) };
        /// The result of `ibv_fork_init`.
        pub static FORK_INIT: Cell<c_int> = const { Cell::new(0) };
    }

    pub unsafe fn ibv_get_device_list(num_devices: *mut c_int) -> *mut *mut ibv_device {
        let Some(mut list) = DEVICES.with_borrow(Clone::clone) else { return ptr::null_mut() };
        // SAFETY: the caller's word.
        unsafe { *num_devices = list.len() as c_int };
        list.push(ptr::null_mut());
        LISTS.set(LISTS.get() + 1);
        Box::leak(list.into_boxed_slice()).as_mut_ptr()
    }

    pub unsafe fn ibv_free_device_list(_: *mut *mut ibv_device) {
        LISTS.set(LISTS.get() - 1);
    }

    pub unsafe fn ibv_get_device_guid(_: *mut ibv_device) -> u64 {
        7
    }

    pub unsafe fn ibv_fork_init() -> c_int {
        FORK_INIT.get()
    }

    pub unsafe fn ibv_is_fork_initialized() -> u32 {
        ginnel_verbs_abi::IBV_FORK_ENABLED
    }

    pub unsafe fn verbs_register_driver_34(_: *const c_void) {}
    pub unsafe fn verbs_register_driver_59(_: *const c_void) {}
    pub unsafe fn verbs_register_driver_65(_: *const c_void) {}
}

/// Declares functions of the real library for objects that are not ours. Tests have no such objects, so there the functions return what
/// the table says for a missing library.
macro_rules! foreign {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> $result:ty = $missing:expr;)*) => {
        #[cfg(not(test))]
        mod foreign {
            use super::*;
            unsafe extern "C" {
                $(
                    #[link_name = concat!("ginnel_real_", stringify!($name))]
                    pub fn $name($($argument: $type),*) -> $result;
                )*
            }
        }
        #[cfg(test)]
        mod foreign {
            use super::*;
            $(pub unsafe fn $name($(_: $type),*) -> $result { $missing })*
        }
    };
}

pub use foreign::*;

foreign! {
    fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context = null_mut();
    fn ibv_close_device(context: *mut ibv_context) -> c_int = ENOSYS;
    fn ibv_query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int = ENOSYS;
    fn ibv_query_port(context: *mut ibv_context, port: u8, attr: *mut ibv_port_attr) -> c_int = ENOSYS;
    fn ibv_query_gid(context: *mut ibv_context, port: u8, index: c_int, gid: *mut ibv_gid) -> c_int = -1;
    fn _ibv_query_gid_ex(
        context: *mut ibv_context, port: u32, index: u32, entry: *mut ibv_gid_entry, flags: u32, size: usize,
    ) -> c_int = ENOSYS;
    fn ibv_query_gid_type(context: *mut ibv_context, port: u8, index: u32, kind: *mut u32) -> c_int = -1;
    fn ibv_query_pkey(context: *mut ibv_context, port: u8, index: c_int, pkey: *mut u16) -> c_int = -1;
    fn ibv_get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int = -1;
    fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd = null_mut();
    fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int = ENOSYS;
    fn ibv_reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr = null_mut();
    fn ibv_reg_mr_iova(
        pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: c_int,
    ) -> *mut ibv_mr = null_mut();
    fn ibv_reg_mr_iova2(
        pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: c_uint,
    ) -> *mut ibv_mr = null_mut();
    fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int = ENOSYS;
    fn ibv_create_cq(
        context: *mut ibv_context, cqe: c_int, cq_context: *mut c_void, channel: *mut ibv_comp_channel, vector: c_int,
    ) -> *mut ibv_cq = null_mut();
    fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int = ENOSYS;
    fn ibv_resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int = ENOSYS;
    fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int = ENOSYS;
    fn ibv_get_cq_event(
        channel: *mut ibv_comp_channel, cq: *mut *mut ibv_cq, cq_context: *mut *mut c_void,
    ) -> c_int = -1;
    fn ibv_ack_cq_events(cq: *mut ibv_cq, events: c_uint) -> () = ();
    fn ibv_ack_async_event(event: *mut ibv_async_event) -> () = ();
    fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel = null_mut();
    fn ibv_create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp = null_mut();
    fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int = ENOSYS;
    fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int = ENOSYS;
    fn ibv_query_qp(
        qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int, init: *mut ibv_qp_init_attr,
    ) -> c_int = ENOSYS;
    fn ibv_create_srq(pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> *mut ibv_srq = null_mut();
    fn ibv_attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int = ENOSYS;
    fn ibv_detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int = ENOSYS;
    fn ibv_query_ece(qp: *mut ibv_qp, ece: *mut c_void) -> c_int = ENOSYS;
    fn ibv_set_ece(qp: *mut ibv_qp, ece: *mut c_void) -> c_int = ENOSYS;
    fn ibv_query_qp_data_in_order(qp: *mut ibv_qp, opcode: u32, flags: u32) -> c_int = 0;
    fn ibv_reg_dmabuf_mr(
        pd: *mut ibv_pd, offset: u64, length: usize, iova: u64, fd: c_int, access: c_int,
    ) -> *mut ibv_mr = null_mut();
    fn ibv_rereg_mr(
        mr: *mut ibv_mr, flags: c_int, pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int,
    ) -> c_int = -1;
    fn ibv_import_pd(context: *mut ibv_context, handle: u32) -> *mut ibv_pd = null_mut();
    fn ibv_import_mr(pd: *mut ibv_pd, handle: u32) -> *mut ibv_mr = null_mut();
    fn ibv_import_dm(context: *mut ibv_context, handle: u32) -> *mut c_void = null_mut();
    fn ibv_get_pkey_index(context: *mut ibv_context, port: u8, pkey: u16) -> c_int = -1;
    fn _ibv_query_gid_table(
        context: *mut ibv_context, entries: *mut ibv_gid_entry, most: usize, flags: u32, size: usize,
    ) -> isize = -(ENOSYS as isize);
    fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int = ENOSYS;
    fn ibv_modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int = ENOSYS;
    fn ibv_query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int = ENOSYS;
    fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int = ENOSYS;
    fn ibv_init_ah_from_wc(
        context: *mut ibv_context, port: u8, wc: *mut ibv_wc, grh: *mut ibv_grh, attr: *mut ibv_ah_attr,
    ) -> c_int = -1;
    fn ibv_create_ah_from_wc(pd: *mut ibv_pd, wc: *mut ibv_wc, grh: *mut ibv_grh, port: u8) -> *mut ibv_ah = null_mut();
    fn ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah = null_mut();
    fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex = null_mut();

    fn rdma_create_event_channel() -> *mut rdma_event_channel = null_mut();
    fn rdma_destroy_event_channel(channel: *mut rdma_event_channel) -> () = ();
    fn rdma_get_cm_event(channel: *mut rdma_event_channel, event: *mut *mut rdma_cm_event) -> c_int = -1;
    fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int = -1;
    fn rdma_create_id(
        channel: *mut rdma_event_channel, id: *mut *mut rdma_cm_id, context: *mut c_void, ps: rdma_port_space,
    ) -> c_int = -1;
    fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int = -1;
    fn rdma_migrate_id(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> c_int = -1;
    fn rdma_bind_addr(id: *mut rdma_cm_id, address: *mut sockaddr) -> c_int = -1;
    fn rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int = -1;
    fn rdma_resolve_addr(
        id: *mut rdma_cm_id, from: *mut sockaddr, to: *mut sockaddr, timeout_ms: c_int,
    ) -> c_int = -1;
    fn rdma_resolve_route(id: *mut rdma_cm_id, timeout_ms: c_int) -> c_int = -1;
    fn rdma_connect(id: *mut rdma_cm_id, param: *mut rdma_conn_param) -> c_int = -1;
    fn rdma_accept(id: *mut rdma_cm_id, param: *mut rdma_conn_param) -> c_int = -1;
    fn rdma_reject(id: *mut rdma_cm_id, private: *const c_void, len: u8) -> c_int = -1;
    fn rdma_establish(id: *mut rdma_cm_id) -> c_int = -1;
    fn rdma_notify(id: *mut rdma_cm_id, event: ibv_event_type) -> c_int = -1;
    fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int = -1;
    fn rdma_get_request(listen: *mut rdma_cm_id, id: *mut *mut rdma_cm_id) -> c_int = -1;
    fn rdma_create_ep(
        id: *mut *mut rdma_cm_id, res: *mut rdma_addrinfo, pd: *mut ibv_pd, init: *mut ibv_qp_init_attr,
    ) -> c_int = -1;
    fn rdma_destroy_ep(id: *mut rdma_cm_id) -> () = ();
    fn rdma_set_option(
        id: *mut rdma_cm_id, level: c_int, name: c_int, value: *mut c_void, len: usize,
    ) -> c_int = -1;
    fn rdma_create_qp(id: *mut rdma_cm_id, pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> c_int = -1;
    fn rdma_create_qp_ex(id: *mut rdma_cm_id, init: *mut ibv_qp_init_attr_ex) -> c_int = -1;
    fn rdma_destroy_qp(id: *mut rdma_cm_id) -> () = ();
    fn rdma_create_srq(id: *mut rdma_cm_id, pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> c_int = -1;
    fn rdma_create_srq_ex(id: *mut rdma_cm_id, init: *mut ibv_srq_init_attr_ex) -> c_int = -1;
    fn rdma_destroy_srq(id: *mut rdma_cm_id) -> () = ();
    fn rdma_init_qp_attr(id: *mut rdma_cm_id, attr: *mut ibv_qp_attr, mask: *mut c_int) -> c_int = -1;
    fn rdma_get_devices(count: *mut c_int) -> *mut *mut ibv_context = null_mut();
    fn rdma_free_devices(list: *mut *mut ibv_context) -> () = ();
    fn rdma_getaddrinfo(
        node: *const c_char, service: *const c_char, hints: *const rdma_addrinfo, result: *mut *mut rdma_addrinfo,
    ) -> c_int = -1;
    fn rdma_freeaddrinfo(result: *mut rdma_addrinfo) -> () = ();
    fn rdma_join_multicast(id: *mut rdma_cm_id, address: *mut sockaddr, context: *mut c_void) -> c_int = -1;
    fn rdma_join_multicast_ex(
        id: *mut rdma_cm_id, attr: *mut rdma_cm_join_mc_attr_ex, context: *mut c_void,
    ) -> c_int = -1;
    fn rdma_leave_multicast(id: *mut rdma_cm_id, address: *mut sockaddr) -> c_int = -1;
    fn rdma_set_local_ece(id: *mut rdma_cm_id, ece: *mut c_void) -> c_int = -1;
    fn rdma_get_remote_ece(id: *mut rdma_cm_id, ece: *mut c_void) -> c_int = -1;
    fn rdma_reject_ece(id: *mut rdma_cm_id, private: *const c_void, len: u8) -> c_int = -1;
    fn rdma_resolve_addrinfo(
        id: *mut rdma_cm_id, node: *const c_char, service: *const c_char, hints: *const rdma_addrinfo,
    ) -> c_int = -1;
    fn rdma_query_addrinfo(id: *mut rdma_cm_id, info: *mut *mut rdma_addrinfo) -> c_int = -1;
    fn rdma_write_cm_event(id: *mut rdma_cm_id, event: rdma_cm_event_type, status: c_int, arg: u64) -> c_int = -1;
    fn rsocket(domain: c_int, kind: c_int, protocol: c_int) -> c_int = -1;
    fn rbind(socket: c_int, address: *const sockaddr, len: socklen_t) -> c_int = -1;
    fn rlisten(socket: c_int, backlog: c_int) -> c_int = -1;
    fn raccept(socket: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int = -1;
    fn rconnect(socket: c_int, address: *const sockaddr, len: socklen_t) -> c_int = -1;
    fn rshutdown(socket: c_int, how: c_int) -> c_int = -1;
    fn rclose(socket: c_int) -> c_int = -1;
    fn rrecv(socket: c_int, buffer: *mut c_void, len: usize, flags: c_int) -> ssize_t = -1;
    fn rrecvfrom(
        socket: c_int, buffer: *mut c_void, len: usize, flags: c_int, from: *mut sockaddr, from_len: *mut socklen_t,
    ) -> ssize_t = -1;
    fn rrecvmsg(socket: c_int, message: *mut msghdr, flags: c_int) -> ssize_t = -1;
    fn rsend(socket: c_int, buffer: *const c_void, len: usize, flags: c_int) -> ssize_t = -1;
    fn rsendto(
        socket: c_int, buffer: *const c_void, len: usize, flags: c_int, to: *const sockaddr, to_len: socklen_t,
    ) -> ssize_t = -1;
    fn rsendmsg(socket: c_int, message: *const msghdr, flags: c_int) -> ssize_t = -1;
    fn rread(socket: c_int, buffer: *mut c_void, len: usize) -> ssize_t = -1;
    fn rreadv(socket: c_int, list: *const iovec, count: c_int) -> ssize_t = -1;
    fn rwrite(socket: c_int, buffer: *const c_void, len: usize) -> ssize_t = -1;
    fn rwritev(socket: c_int, list: *const iovec, count: c_int) -> ssize_t = -1;
    fn rpoll(list: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int = -1;
    fn rselect(
        count: c_int, reads: *mut fd_set, writes: *mut fd_set, exceptions: *mut fd_set, timeout: *mut timeval,
    ) -> c_int = -1;
    fn rgetpeername(socket: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int = -1;
    fn rgetsockname(socket: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int = -1;
    fn rsetsockopt(socket: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t) -> c_int = -1;
    fn rgetsockopt(socket: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int = -1;
    fn rfcntl(socket: c_int, command: c_int, argument: *mut c_void) -> c_int = -1;
    fn riomap(
        socket: c_int, buffer: *mut c_void, len: usize, protection: c_int, flags: c_int, offset: off_t,
    ) -> off_t = -1;
    fn riounmap(socket: c_int, buffer: *mut c_void, len: usize) -> c_int = -1;
    fn riowrite(socket: c_int, buffer: *const c_void, count: usize, offset: off_t, flags: c_int) -> usize = usize::MAX;
}
