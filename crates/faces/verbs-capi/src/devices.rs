//! The list of devices: first those of this library, then those of the real library.

use crate::real;
use ginnel_verbs_abi::{
    DEVICE_PADDING, IBV_FORK_UNNEEDED, IBV_NODE_CA, IBV_TRANSPORT_IB, ibv_device, ibv_fork_status,
};
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A device of this library. It is never freed, because programs keep uncounted pointers to it.
#[repr(C)]
pub struct Device {
    /// The part that programs see.
    device: ibv_device,
    /// The bytes that the providers' own libraries read to see whether the device is theirs.
    padding: [usize; DEVICE_PADDING / size_of::<usize>()],
    guid: u64,
    /// The name of the segment.
    segment: String,
}

// SAFETY: the only pointers in `ibv_device` are function pointers, which are null, and nothing changes after `new`.
unsafe impl Send for Device {}
// SAFETY: threads that share a device only read it, since nothing changes after `new`, and its function pointers are null.
unsafe impl Sync for Device {}

impl Device {
    /// Returns a device with a name (`name`, `dev_name`) and the sysfs folders that represent it (`dev_path`, `ibdev_path`). Strings
    /// that are too long are truncated; they are always zero-terminated.
    pub fn new(name: &str, dev_path: &str, ibdev_path: &str, guid: u64, segment: &str) -> &'static Self {
        let mut device = ibv_device::ZEROED;
        device.node_type = IBV_NODE_CA;
        device.transport_type = IBV_TRANSPORT_IB;
        write(&mut device.name, name);
        write(&mut device.dev_name, name);
        write(&mut device.dev_path, dev_path);
        write(&mut device.ibdev_path, ibdev_path);
        Box::leak(Box::new(Self { device, padding: [0; _], guid, segment: segment.to_owned() }))
    }

    /// Returns the name of the segment.
    pub fn segment(&self) -> &str {
        &self.segment
    }

    /// Returns the GUID, which is unique among all devices of the host.
    pub fn guid(&self) -> u64 {
        self.guid
    }

    fn as_ptr(&'static self) -> *mut ibv_device {
        ptr::from_ref(&self.device).cast_mut()
    }
}

fn write(to: &mut [c_char], text: &str) {
    let room = to.len() - 1;
    for (to, byte) in to[..room].iter_mut().zip(text.bytes()) {
        *to = byte.cast_signed();
    }
}

/// Returns this library's devices that have been listed so far. The same device is the same allocation each time.
#[cfg(not(test))]
fn ours() -> Vec<&'static Device> {
    known().clone()
}

/// A guard that keeps other threads from looking up a device.
pub struct Held {
    #[cfg(not(test))]
    _known: std::sync::MutexGuard<'static, Vec<&'static Device>>,
}

/// Waits until no other thread is looking up a device.
pub fn hold() -> Held {
    Held {
        #[cfg(not(test))]
        _known: known(),
    }
}

/// All devices that have ever been listed.
#[cfg(not(test))]
fn known() -> MutexGuard<'static, Vec<&'static Device>> {
    static KNOWN: Mutex<Vec<&'static Device>> = Mutex::new(Vec::new());
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Asks the daemon which segments are devices, and returns them. Without a daemon there are none. A device that has gone is not listed
/// any more, but stays known.
#[cfg(not(test))]
fn present() -> Vec<&'static Device> {
    let socket = ginnel::AttachOptions::default().socket;
    let segments = ginnel_verbs::device::list(&socket).unwrap_or_default();
    let mut known = known();
    let device = |segment: String| {
        if let Some(device) = known.iter().find(|device| device.segment == segment) {
            return *device;
        }
        let name = format!("ginnel_{segment}");
        let path = format!("/sys/class/infiniband/{name}");
        let device = Device::new(
            &name,
            &format!("/sys/class/infiniband_verbs/{name}"),
            &path,
            guid(&segment),
            &segment,
        );
        known.push(device);
        device
    };
    segments.into_iter().map(device).collect()
}

#[cfg(test)]
use ours as present;

/// Returns a GUID that is the same for all members of a segment. It is a hash (FNV-1a) of the segment's name, with the bit for locally
/// administered numbers (EUI-64).
#[cfg_attr(test, expect(dead_code, reason = "tests name their devices"))]
fn guid(segment: &str) -> u64 {
    let hash = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    segment.bytes().fold(0xcbf2_9ce4_8422_2325, hash) & !(1 << 56) | 1 << 57
}

#[cfg(test)]
use tests::ours;

/// Returns the devices that exist now.
pub fn pointers() -> Vec<*mut ibv_device> {
    present().into_iter().map(Device::as_ptr).collect()
}

/// A list of devices that a program gets, and frees. The program sees only `entries`, which end with a null pointer.
struct List {
    entries: Box<[*mut ibv_device]>,
    /// The list of the real library, which must be freed too. Null if there is none.
    real: *mut *mut ibv_device,
}

/// Lists the devices of this library and the real ones. Returns `None` if this library has none and the real one fails, which has set
/// `errno` then.
fn list() -> Option<List> {
    let ours = present();
    let mut count: c_int = 0;
    // SAFETY: the word is there.
    let real = unsafe { real::ibv_get_device_list(&mut count) };
    if real.is_null() && ours.is_empty() {
        return None;
    }
    let mut entries: Vec<_> = ours.into_iter().map(Device::as_ptr).collect();
    if !real.is_null() {
        for index in 0..usize::try_from(count).unwrap_or(0) {
            // SAFETY: the real library says that its list is this long.
            entries.push(unsafe { *real.add(index) });
        }
    }
    entries.push(ptr::null_mut());
    Some(List { entries: entries.into_boxed_slice(), real })
}

/// The real library's list that belongs to each list of a program, by the address of the latter. It is not stored next to the entries,
/// because some programs (qperf) pass a list to `free`, so the list must be what `malloc` returned. In that case the real list leaks, as
/// it would without this library.
static REAL: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

fn real_lists() -> MutexGuard<'static, BTreeMap<usize, usize>> {
    REAL.lock().unwrap_or_else(PoisonError::into_inner)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_get_device_list(num_devices: *mut c_int) -> *mut *mut ibv_device {
    let count = |count: usize| {
        if !num_devices.is_null() {
            // SAFETY: a non-null pointer of the caller points to an int.
            unsafe { *num_devices = c_int::try_from(count).unwrap_or(c_int::MAX) };
        }
    };
    let Some(List { entries, real }) = list() else {
        count(0);
        return ptr::null_mut();
    };
    let length = entries.len();
    // SAFETY: the size is not zero.
    let made = unsafe { libc::malloc(length * size_of::<*mut ibv_device>()) }.cast::<*mut ibv_device>();
    if made.is_null() {
        if !real.is_null() {
            // SAFETY: the list comes from the real library, and no one else uses it.
            unsafe { real::ibv_free_device_list(real) };
        }
        count(0);
        return ptr::null_mut();
    }
    count(length - 1);
    // SAFETY: there is room for the entries.
    unsafe { ptr::copy_nonoverlapping(entries.as_ptr(), made, length) };
    if real.is_null() {
        // A list that a program passed to `free` may have had the same address.
        real_lists().remove(&made.addr());
    } else {
        real_lists().insert(made.addr(), real.expose_provenance());
    }
    made
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_free_device_list(list: *mut *mut ibv_device) {
    if list.is_null() {
        return;
    }
    let real = real_lists().remove(&list.addr());
    // SAFETY: the list comes from the function above, and the caller gives it up; no one else uses the real library's list that belongs
    // to it.
    unsafe {
        libc::free(list.cast());
        if let Some(real) = real {
            real::ibv_free_device_list(ptr::with_exposed_provenance_mut(real));
        }
    }
}

/// Returns the device if it is one of this library's.
pub fn own(device: *const ibv_device) -> Option<&'static Device> {
    ours().into_iter().find(|own| ptr::eq(&own.device, device))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    if device.is_null() {
        return ptr::null();
    }
    // SAFETY: every device has this field, ours or not.
    unsafe { (&raw const (*device).name).cast() }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_get_device_guid(device: *mut ibv_device) -> u64 {
    match own(device) {
        Some(device) => device.guid.to_be(),
        // SAFETY: a device that is not ours is the real library's.
        None => unsafe { real::ibv_get_device_guid(device) },
    }
}

/// Returns whether the real library has a device. If so, its answer about forks counts.
fn real_devices() -> bool {
    let mut count: c_int = 0;
    // SAFETY: the word is there.
    let list = unsafe { real::ibv_get_device_list(&mut count) };
    if !list.is_null() {
        // SAFETY: it was obtained just now, and nothing of it is in use.
        unsafe { real::ibv_free_device_list(list) };
    }
    !list.is_null() && count > 0
}

/// Initializes fork support. The real library calls this too while it creates its first list, so this must not ask it for a list.
#[unsafe(no_mangle)]
extern "C" fn ginnel_ibv_fork_init() -> c_int {
    // SAFETY: it has no arguments.
    match unsafe { real::ibv_fork_init() } {
        // There is no real library, and this one needs no initialization.
        libc::ENOSYS => 0,
        result => result,
    }
}

#[unsafe(no_mangle)]
extern "C" fn ginnel_ibv_is_fork_initialized() -> ibv_fork_status {
    if !real_devices() {
        return IBV_FORK_UNNEEDED;
    }
    // SAFETY: it has no arguments.
    unsafe { real::ibv_is_fork_initialized() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::real::fake::{DEVICES, FORK_INIT, LISTS};
    use std::cell::RefCell;
    use std::ffi::CStr;

    thread_local! {
        static OURS: RefCell<Vec<&'static Device>> = const { RefCell::new(Vec::new()) };
    }

    pub fn ours() -> Vec<&'static Device> {
        OURS.with_borrow(Clone::clone)
    }

    fn device(name: &str) -> &'static Device {
        Device::new(name, "/dev/infiniband/x", "/run/infiniband/x", 5, name)
    }

    /// Gets the list, reads it like a program, and frees it.
    fn listed() -> Option<Vec<*mut ibv_device>> {
        let mut count = -1;
        // SAFETY: there is room for the count; the list is read up to its null, then freed.
        unsafe {
            let list = ginnel_ibv_get_device_list(&mut count);
            if list.is_null() {
                assert_eq!(count, 0);
                return None;
            }
            let entries: Vec<_> =
                (0..).map(|at| *list.add(at)).take_while(|entry| !entry.is_null()).collect();
            assert_eq!(entries.len(), count as usize);
            ginnel_ibv_free_device_list(list);
            assert_eq!(LISTS.get(), 0, "the real list was given back");
            Some(entries)
        }
    }

    #[test]
    fn this_librarys_devices_come_first() {
        let (ours, real) = (device("ginnel_a"), device("mlx5_0"));
        assert_eq!(listed(), None);
        DEVICES.set(Some(vec![]));
        assert_eq!(listed(), Some(vec![]), "no devices is a list");
        OURS.set(vec![ours]);
        DEVICES.set(Some(vec![real.as_ptr()]));
        assert_eq!(listed(), Some(vec![ours.as_ptr(), real.as_ptr()]));
        DEVICES.set(None);
        assert_eq!(listed(), Some(vec![ours.as_ptr()]), "without a real library");
    }

    /// qperf does this to its list.
    #[test]
    fn a_device_list_can_be_passed_to_free() {
        OURS.set(vec![device("ginnel_a")]);
        for real in [None, Some(vec![device("mlx5_0").as_ptr()])] {
            let lost = real.is_some();
            DEVICES.set(real);
            let mut count = 0;
            // SAFETY: there is room for the count, and the list is what `malloc` returned, so `free` takes it.
            unsafe {
                let list = ginnel_ibv_get_device_list(&mut count);
                assert!(
                    libc::malloc_usable_size(list.cast())
                        >= (count as usize + 1) * size_of::<*mut ibv_device>()
                );
                libc::free(list.cast());
            }
            assert_eq!(LISTS.get(), i32::from(lost));
            LISTS.set(0);
            // Later lists work as usual, even at the same address.
            assert!(listed().is_some());
        }
    }

    #[test]
    fn devices_report_their_names() {
        let long = "x".repeat(100);
        for (name, shown) in [("ginnel_a", "ginnel_a"), (&long, &long[..63])] {
            let device = device(name);
            OURS.set(vec![device]);
            // SAFETY: a device with a name that ends with a zero.
            let name = unsafe { CStr::from_ptr(ginnel_ibv_get_device_name(device.as_ptr())) };
            assert_eq!(name.to_str(), Ok(shown));
            // SAFETY: a device.
            assert_eq!(unsafe { ginnel_ibv_get_device_guid(device.as_ptr()) }, 5_u64.to_be());
        }
        // SAFETY: a device that is not ours is not dereferenced here.
        assert_eq!(unsafe { ginnel_ibv_get_device_guid(self::device("mlx5_0").as_ptr()) }, 7);
    }

    #[test]
    fn providers_see_that_a_device_is_not_theirs() {
        let device = device("ginnel_a").as_ptr();
        // SAFETY: behind the device there is padding.
        let behind = unsafe { device.add(1).cast::<*const ()>().read() };
        assert!(behind.is_null());
    }

    #[test]
    fn fork_support_depends_on_the_real_devices() {
        assert_eq!(ginnel_ibv_is_fork_initialized(), IBV_FORK_UNNEEDED);
        DEVICES.set(Some(vec![device("mlx5_0").as_ptr()]));
        assert_eq!(ginnel_ibv_is_fork_initialized(), ginnel_verbs_abi::IBV_FORK_ENABLED);
        for (real, ours) in [(0, 0), (libc::ENOSYS, 0), (libc::EINVAL, libc::EINVAL)] {
            FORK_INIT.set(real);
            assert_eq!(ginnel_ibv_fork_init(), ours);
        }
    }
}
