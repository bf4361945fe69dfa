//! Providers of the real library, such as libmlx5. When a provider is loaded, it registers itself with the library called
//! `libibverbs.so.1`, which is ours. A program that is linked with a provider loads it at its start, long before the real library is
//! needed, if it is needed at all. So the registrations are recorded here, and passed on when the real library is opened.

use crate::{library, real};
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

/// The version of the private interface that a provider uses, and the address of its description.
type Driver = (Interface, usize);

#[derive(Clone, Copy)]
enum Interface {
    V34,
    V59,
    V65,
}

static NOTED: Mutex<Vec<Driver>> = Mutex::new(Vec::new());

fn register(interface: Interface, driver: *const c_void) {
    {
        let mut noted = NOTED.lock().unwrap_or_else(PoisonError::into_inner);
        if !library::is_open() {
            noted.push((interface, driver.expose_provenance()));
            return;
        }
    }
    tell(interface, driver);
}

/// Passes the recorded registrations on to the real library, which has just been opened.
pub fn hand_over() {
    let noted = std::mem::take(&mut *NOTED.lock().unwrap_or_else(PoisonError::into_inner));
    for (interface, driver) in noted {
        tell(interface, std::ptr::with_exposed_provenance(driver));
    }
}

fn tell(interface: Interface, driver: *const c_void) {
    // SAFETY: a provider passed this pointer to the function of the same name. If the real library has another version of the interface,
    // that function is missing and the call does nothing.
    unsafe {
        match interface {
            Interface::V34 => real::verbs_register_driver_34(driver),
            Interface::V59 => real::verbs_register_driver_59(driver),
            Interface::V65 => real::verbs_register_driver_65(driver),
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_verbs_register_driver_34(driver: *const c_void) {
    register(Interface::V34, driver);
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_verbs_register_driver_59(driver: *const c_void) {
    register(Interface::V59, driver);
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_verbs_register_driver_65(driver: *const c_void) {
    register(Interface::V65, driver);
}
