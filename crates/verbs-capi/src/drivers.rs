//! Providers of the real library, as libmlx5: they make themselves known when they are loaded, to whoever is called
//! `libibverbs.so.1`. A program that is linked with one loads it at its start, long before the real library is needed, if it ever
//! is. So they are noted, and handed over when it is opened.

use crate::{library, real};
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

/// Which private interface a provider has, and its description.
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

/// Tells the real library, which has just been opened, of all that came before.
pub fn hand_over() {
    let noted = std::mem::take(&mut *NOTED.lock().unwrap_or_else(PoisonError::into_inner));
    for (interface, driver) in noted {
        tell(interface, std::ptr::with_exposed_provenance(driver));
    }
}

fn tell(interface: Interface, driver: *const c_void) {
    // SAFETY: a provider passed this for the function of the same name. Where the real library has another interface, that
    // function is missing, and nothing happens.
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
