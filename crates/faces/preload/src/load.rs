//! What happens when this library is loaded, before the program's own constructors run.
#![allow(unsafe_code)] // A constructor, and a function of the C library.

/// Prepares this library. The order matters: everything else calls the C library, and obeys the settings.
extern "C" fn load() {
    crate::system::real::find_all();
    ginnel_shmem::install_handlers_with(sigaction);
    crate::process::settings::load();
    crate::daemon::report::load();
    #[cfg(not(test))]
    {
        crate::exports::load();
        crate::process::spin::load();
        crate::epoll::registration::load();
        crate::process::hidden::load();
        ginnel::keep_descriptors(crate::process::hidden::hide);
        crate::state::family::load();
        crate::calls::exec::load();
        // SAFETY: a function of this library that takes no argument.
        unsafe { libc::atexit(at_exit) };
        #[cfg(debug_assertions)]
        crate::process::allocator::load();
    }
}

#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static LOAD: extern "C" fn() = load;

unsafe extern "C" fn sigaction(
    signal: libc::c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> libc::c_int {
    // SAFETY: the rules are the same.
    unsafe { crate::system::real::sigaction(signal, new, old) }
}

#[cfg(not(test))]
extern "C" fn at_exit() {
    crate::carrying::closing::at_exit();
}
