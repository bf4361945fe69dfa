//! What happens when this library is loaded, before the program's own constructors run.
#![cfg_attr(not(test), allow(unsafe_code))] // A constructor.

/// Prepares this library. The order matters: everything else calls the C library, and obeys the settings.
extern "C" fn load() {
    crate::system::real::find_all();
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
    }
}

#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static LOAD: extern "C" fn() = load;
