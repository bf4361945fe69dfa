//! Functions of the real libraries, for those of ours that need them: each gives what the table says if there is none.

#[cfg(not(test))]
pub use there::*;

#[cfg(test)]
pub use fake::*;

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

/// A library with as many devices as a test wants.
#[cfg(test)]
pub mod fake {
    use ginnel_verbs_abi::ibv_device;
    use std::cell::{Cell, RefCell};
    use std::ffi::{c_int, c_void};
    use std::ptr;

    thread_local! {
        /// The devices. None: the list fails.
        pub static DEVICES: RefCell<Option<Vec<*mut ibv_device>>> = const { RefCell::new(None) };
        /// Lists that have not been given back.
        pub static LISTS: Cell<i32> = const { Cell::new(0) };
        /// What `ibv_fork_init` says.
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
