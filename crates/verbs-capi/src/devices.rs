//! The list of devices: ours first, then those of the real library.

use crate::real;
use ginnel_verbs_abi::{
    DEVICE_PADDING, IBV_FORK_UNNEEDED, IBV_NODE_CA, IBV_TRANSPORT_IB, ibv_device, ibv_fork_status,
};
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A device of ours. It is there for as long as the process is, because programs keep pointers to it, and nobody counts them.
#[repr(C)]
pub struct Device {
    /// What programs see.
    device: ibv_device,
    /// What the libraries of adapters look at, to see whether the device is theirs.
    padding: [usize; DEVICE_PADDING / size_of::<usize>()],
    guid: u64,
    /// The segment that it is.
    segment: String,
}

// SAFETY: `ibv_device` has pointers to functions only, which are none, and nothing changes after `new`.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// A device with a name (`name`, `dev_name`) and the folders that stand for it (`dev_path`, `ibdev_path`). What is too
    /// long is cut, and ends with a zero in any case.
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

    /// The segment that it is.
    pub fn segment(&self) -> &str {
        &self.segment
    }

    /// Its number among all devices of the host.
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

/// Our devices, in the order in which they are listed. The same device is the same allocation each time.
#[cfg(not(test))]
fn ours() -> Vec<&'static Device> {
    known().clone()
}

/// While this is there, no device is looked up.
pub struct Held {
    #[cfg(not(test))]
    _known: std::sync::MutexGuard<'static, Vec<&'static Device>>,
}

/// Waits until nobody looks up a device.
pub fn hold() -> Held {
    Held {
        #[cfg(not(test))]
        _known: known(),
    }
}

/// Devices that were listed once.
#[cfg(not(test))]
fn known() -> MutexGuard<'static, Vec<&'static Device>> {
    static KNOWN: Mutex<Vec<&'static Device>> = Mutex::new(Vec::new());
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Asks the daemon which segments are devices. Without a daemon there are none. A device that is gone is listed no more, but known.
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

/// A number that all members of a segment find alike, from its name (FNV-1a), with the bit of numbers that are given locally (EUI-64).
#[cfg_attr(test, expect(dead_code, reason = "tests name their devices"))]
fn guid(segment: &str) -> u64 {
    let hash = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    segment.bytes().fold(0xcbf2_9ce4_8422_2325, hash) & !(1 << 56) | 1 << 57
}

#[cfg(test)]
use tests::ours;

/// Our devices as they are now.
pub fn pointers() -> Vec<*mut ibv_device> {
    present().into_iter().map(Device::as_ptr).collect()
}

/// A list that a program has, and frees. It sees `entries` alone, whose last one is null.
struct List {
    entries: Box<[*mut ibv_device]>,
    /// What the real library gave, and wants back. Null if it gave nothing.
    real: *mut *mut ibv_device,
}

/// Ours and the real ones; `None` if there are none of ours and the real library fails, which has said why in `errno`.
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

/// The list of the real library that belongs to a list, by the address of that. It is not beside the entries because some programs give a
/// list to `free` (qperf does), so it must be what `malloc` has returned. The real list of such a program stays, as it would without us.
static REAL: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

fn real_lists() -> MutexGuard<'static, BTreeMap<usize, usize>> {
    REAL.lock().unwrap_or_else(PoisonError::into_inner)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_get_device_list(num_devices: *mut c_int) -> *mut *mut ibv_device {
    let count = |count: usize| {
        if !num_devices.is_null() {
            // SAFETY: a caller that passes a pointer passes one to an int.
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
            // SAFETY: the list is the real library's, and nobody else has it.
            unsafe { real::ibv_free_device_list(real) };
        }
        count(0);
        return ptr::null_mut();
    }
    count(length - 1);
    // SAFETY: there is room for the entries.
    unsafe { ptr::copy_nonoverlapping(entries.as_ptr(), made, length) };
    if real.is_null() {
        // What a program has given to `free` may have been here.
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
    // SAFETY: the list is of the function above, and the caller gives it up; and with it that of the real library, which nobody else has.
    unsafe {
        libc::free(list.cast());
        if let Some(real) = real {
            real::ibv_free_device_list(ptr::with_exposed_provenance_mut(real));
        }
    }
}

/// The device of ours that this is, if it is one.
pub fn own(device: *const ibv_device) -> Option<&'static Device> {
    ours().into_iter().find(|own| ptr::eq(&own.device, device))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    if device.is_null() {
        return ptr::null();
    }
    // SAFETY: the caller's device, ours or not, has this field.
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

/// Does the real library have a device? Then what it says of forks counts.
fn real_devices() -> bool {
    let mut count: c_int = 0;
    // SAFETY: the word is there.
    let list = unsafe { real::ibv_get_device_list(&mut count) };
    if !list.is_null() {
        // SAFETY: it was got just now, and nobody has anything of it.
        unsafe { real::ibv_free_device_list(list) };
    }
    !list.is_null() && count > 0
}

/// The real library calls this too, while it makes its first list, so it must not be asked for one.
#[unsafe(no_mangle)]
extern "C" fn ginnel_ibv_fork_init() -> c_int {
    // SAFETY: it has no arguments.
    match unsafe { real::ibv_fork_init() } {
        // There is no real library, and ours needs nothing.
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

    /// Gets the list, looks at it as a program does, and gives it back.
    fn listed() -> Option<Vec<*mut ibv_device>> {
        let mut count = -1;
        // SAFETY: as a program calls it; the list is read up to its null, then freed.
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
    fn ours_come_first() {
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

    /// qperf does this.
    #[test]
    fn a_list_may_be_given_to_free() {
        OURS.set(vec![device("ginnel_a")]);
        for real in [None, Some(vec![device("mlx5_0").as_ptr()])] {
            let lost = real.is_some();
            DEVICES.set(real);
            let mut count = 0;
            // SAFETY: as a program calls it.
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
            // Later ones, perhaps at the same address, are as always.
            assert!(listed().is_some());
        }
    }

    #[test]
    fn devices_tell_their_names() {
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
        // SAFETY: of a device that is not ours, nothing is read here.
        assert_eq!(unsafe { ginnel_ibv_get_device_guid(self::device("mlx5_0").as_ptr()) }, 7);
    }

    #[test]
    fn adapters_see_that_a_device_is_not_theirs() {
        let device = device("ginnel_a").as_ptr();
        // SAFETY: behind the device there is padding.
        let behind = unsafe { device.add(1).cast::<*const ()>().read() };
        assert!(behind.is_null());
    }

    #[test]
    fn forking_is_the_business_of_real_devices() {
        assert_eq!(ginnel_ibv_is_fork_initialized(), IBV_FORK_UNNEEDED);
        DEVICES.set(Some(vec![device("mlx5_0").as_ptr()]));
        assert_eq!(ginnel_ibv_is_fork_initialized(), ginnel_verbs_abi::IBV_FORK_ENABLED);
        for (real, ours) in [(0, 0), (libc::ENOSYS, 0), (libc::EINVAL, libc::EINVAL)] {
            FORK_INIT.set(real);
            assert_eq!(ginnel_ibv_fork_init(), ours);
        }
    }
}
