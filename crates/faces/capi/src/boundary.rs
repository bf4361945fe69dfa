//! The boundary between C and Rust: pointers, results, errors and panics.

use crate::handle_table::{Handle, Use};
use crate::status::Status::{GINNEL_ERR_INTERNAL, GINNEL_ERR_INVALID, GINNEL_ERR_NAME, GINNEL_ERR_NULL};
use crate::status::{Failure, Status};
use libc::{c_int, ssize_t};
use std::ffi::{CStr, CString, c_char, c_void};
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::time::Duration;

pub(crate) type Outcome<T> = Result<T, Failure>;

/// Runs the body of a function that returns a status.
pub(crate) fn status(body: impl FnOnce() -> Outcome<()>) -> c_int {
    match guarded(body) {
        Ok(()) => Status::GINNEL_OK as c_int,
        Err(failure) => failure.record(),
    }
}

/// Runs the body of a function that returns a number of bytes, or a status.
pub(crate) fn length(body: impl FnOnce() -> Outcome<usize>) -> ssize_t {
    match guarded(body) {
        // No object in memory is longer than that.
        Ok(length) => ssize_t::try_from(length).unwrap_or(ssize_t::MAX),
        Err(failure) => failure.record() as ssize_t,
    }
}

/// Runs the body of a function that returns another number, or a status.
pub(crate) fn number(body: impl FnOnce() -> Outcome<c_int>) -> c_int {
    guarded(body).unwrap_or_else(Failure::record)
}

/// The body of a function that frees a handle. Null is allowed.
pub(crate) unsafe fn close<T: Handle>(handle: *mut T) -> c_int {
    status(|| {
        if !handle.is_null() {
            // SAFETY: no other thread uses it, unless its uses are counted, as the head of ginnel.h requires.
            unsafe { T::table().close(handle) }?;
        }
        Ok(())
    })
}

/// Catches panics. A panic is a bug of this library and must not unwind into C.
fn guarded<T>(body: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().copied();
        let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("");
        Err(Failure::new(GINNEL_ERR_INTERNAL, format!("bug in the library, please report it: {text}")))
    })
}

/// `checked!(borrow(endpoint))` applies one of the functions below to an argument of the C function around it, and
/// returns from that function's body with the error if there is one. Errors name the argument.
#[allow(clippy::macro_metavars_in_unsafe)] // What is expanded there is one call and its plain arguments.
macro_rules! checked {
    ($look:ident($argument:ident $(, $more:expr)*)) => {
        // SAFETY: the caller of the C function is responsible for its pointers, as the head of ginnel.h says.
        unsafe { $look($argument, stringify!($argument) $(, $more)*) }?
    };
}
pub(crate) use checked;

fn null(name: &str) -> Failure {
    Failure::new(GINNEL_ERR_NULL, format!("{name} is NULL"))
}

pub(crate) fn invalid(detail: impl Into<String>) -> Failure {
    Failure::new(GINNEL_ERR_INVALID, detail)
}

/// Checks that a pointer is not null.
pub(crate) fn require<T>(pointer: *const T, name: &str) -> Outcome<()> {
    if pointer.is_null() { Err(null(name)) } else { Ok(()) }
}

/// Returns the object behind a handle that other threads may use, and even free, meanwhile.
pub(crate) unsafe fn share<T: Handle>(handle: *const T, name: &str) -> Outcome<Use<'static, T>> {
    unsafe extern "C" fn forget_uses<T: Handle>() {
        T::table().forget_uses();
    }
    require(handle, name)?;
    T::table().at_forks(forget_uses::<T>);
    // SAFETY: nobody changes an object of a type that is shared.
    unsafe { T::table().share(handle) }
}

/// Returns the object behind a handle that several threads may use.
#[inline]
pub(crate) unsafe fn borrow<'a, T: Handle>(handle: *const T, name: &str) -> Outcome<&'a T> {
    require(handle, name)?;
    // SAFETY: nobody closes it meanwhile, as the head of ginnel.h requires.
    unsafe { T::table().get(handle) }
}

/// Returns the object behind a handle that only one thread may use.
#[inline]
pub(crate) unsafe fn borrow_mut<'a, T: Handle>(handle: *mut T, name: &str) -> Outcome<&'a mut T> {
    require(handle, name)?;
    // SAFETY: nobody else uses or closes it meanwhile, as the head of ginnel.h requires.
    unsafe { T::table().get_mut(handle) }
}

/// Returns the place for a result, which may hold anything until it is written.
pub(crate) unsafe fn output<'a, T>(result: *mut T, name: &str) -> Outcome<&'a mut MaybeUninit<T>> {
    // SAFETY: null, or room for a `T`; `MaybeUninit` does not assume that it holds one.
    unsafe { result.cast::<MaybeUninit<T>>().as_mut() }.ok_or_else(|| null(name))
}

/// Returns the place for a new handle, and sets it to null until there is one.
pub(crate) unsafe fn output_handle<'a, T>(result: *mut *mut T, name: &str) -> Outcome<&'a mut *mut T> {
    // SAFETY: null, or room for a handle, which may hold anything until it is written.
    Ok(unsafe { output(result, name) }?.write(ptr::null_mut()))
}

/// Returns a new handle to C.
pub(crate) fn return_handle<T: Handle>(place: &mut *mut T, value: T) {
    *place = T::table().insert(value);
}

/// Returns a C string, which must be UTF-8.
pub(crate) unsafe fn text<'a>(string: *const c_char, name: &str) -> Outcome<&'a str> {
    if string.is_null() {
        return Err(null(name));
    }
    // SAFETY: not null, and a C string, as the caller says.
    let string = unsafe { CStr::from_ptr(string) };
    string.to_str().map_err(|_| Failure::new(GINNEL_ERR_NAME, format!("{name} {string:?} is not UTF-8")))
}

/// Returns bytes to send. They may lie in shared memory, for example if a program forwards bytes that it peeks at, and
/// a peer can write to them while they are copied. They are used only for one copy, on the assumption that the `shmem`
/// crate states at its head.
pub(crate) unsafe fn bytes<'a>(data: *const c_void, name: &str, len: usize) -> Outcome<&'a [u8]> {
    if len == 0 {
        return Ok(&[]);
    }
    if data.is_null() {
        return Err(null(name));
    }
    if len > isize::MAX as usize {
        return Err(invalid(format!("{name} has {len} bytes")));
    }
    // SAFETY: not null, and the caller says that `len` bytes are there.
    Ok(unsafe { std::slice::from_raw_parts(data.cast(), len) })
}

/// Returns room for received bytes, which are copied into it and never read from it.
pub(crate) unsafe fn room<'a>(buffer: *mut c_void, name: &str, len: usize) -> Outcome<&'a mut [u8]> {
    if len == 0 {
        return Ok(&mut []);
    }
    if buffer.is_null() {
        return Err(null(name));
    }
    if len > isize::MAX as usize {
        return Err(invalid(format!("{name} has {len} bytes")));
    }
    // SAFETY: not null, and the caller says that `len` bytes are there, used only by this call.
    Ok(unsafe { std::slice::from_raw_parts_mut(buffer.cast(), len) })
}

/// A structure that grows from version to version. Its first member is its size, with which the calling program was
/// compiled.
///
/// # Safety
///
/// `repr(C)`, begins with a `usize`, and all zeros are a valid value.
pub(crate) unsafe trait Growing: Copy {}

/// Larger than every structure of ours. A larger size means that the program has not set it.
const LARGEST: usize = 4096;

unsafe fn size_of_given<T>(structure: *const T, name: &str) -> Outcome<usize> {
    // SAFETY: not null, and begins with its size.
    let size = unsafe { structure.cast::<usize>().read() };
    if !(size_of::<usize>()..=LARGEST).contains(&size) {
        return Err(invalid(format!("{name}->size is {size}; set it to sizeof *{name}")));
    }
    Ok(size)
}

/// Reads options; null means all zeros. Members that an older program does not know are zero. Members that only a newer
/// program knows must be zero.
pub(crate) unsafe fn read_options<T: Growing>(options: *const T, name: &str) -> Outcome<T> {
    // SAFETY: all zeros are a valid value, as the trait requires.
    let mut known: T = unsafe { MaybeUninit::zeroed().assume_init() };
    if options.is_null() {
        return Ok(known);
    }
    // SAFETY: not null.
    let size = unsafe { size_of_given(options, name) }?;
    // SAFETY: the structure has `size` bytes, and no more are copied than there is room for.
    unsafe {
        ptr::copy_nonoverlapping(options.cast::<u8>(), (&raw mut known).cast(), size.min(size_of::<T>()))
    };
    for at in size_of::<T>()..size {
        // SAFETY: still inside the structure.
        if unsafe { options.cast::<u8>().add(at).read() } != 0 {
            return Err(invalid(format!(
                "{name} has a member that this version of the library does not know"
            )));
        }
    }
    Ok(known)
}

/// Fills in a structure, as far as the calling program knows it.
pub(crate) unsafe fn fill<T: Growing>(structure: *mut T, name: &str, value: T) -> Outcome<()> {
    if structure.is_null() {
        return Err(null(name));
    }
    // SAFETY: not null.
    let size = unsafe { size_of_given(structure, name) }?.min(size_of::<T>());
    // SAFETY: the structure has at least `size` bytes, and the value too.
    unsafe { ptr::copy_nonoverlapping((&raw const value).cast::<u8>(), structure.cast::<u8>(), size) };
    // SAFETY: it begins with its size.
    unsafe { structure.cast::<usize>().write(size) };
    Ok(())
}

/// Returns a text to C, which must free it.
pub(crate) fn return_text(place: &mut *mut c_char, text: String) -> Outcome<()> {
    let text =
        CString::new(text).map_err(|_| Failure::new(GINNEL_ERR_INTERNAL, "a text with a zero byte"))?;
    *place = text.into_raw();
    Ok(())
}

/// Returns a name as an array of fixed size that ends with a zero. A name that is too long (there is none) is cut.
pub(crate) fn name_array(name: &str) -> [c_char; 64] {
    let mut array = [0; 64];
    for (to, from) in array[..63].iter_mut().zip(name.bytes()) {
        *to = from as c_char;
    }
    array
}

/// Converts a timeout in nanoseconds; a negative one means for ever.
pub(crate) fn timeout(ns: i64) -> Option<Duration> {
    u64::try_from(ns).ok().map(Duration::from_nanos)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::ginnel_last_error;

    fn last_error() -> String {
        // SAFETY: never null, and valid until the next error of this thread.
        unsafe { CStr::from_ptr(ginnel_last_error()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_panic_becomes_an_error() {
        assert_eq!(status(|| panic!("one {}", 1)), GINNEL_ERR_INTERNAL as c_int);
        assert!(last_error().ends_with("please report it: one 1"), "{}", last_error());
        assert_eq!(length(|| panic!("two")), GINNEL_ERR_INTERNAL as ssize_t);
        assert!(last_error().ends_with(": two"), "{}", last_error());
    }

    #[test]
    fn an_error_stays_until_the_next_one() {
        assert_eq!(status(|| Err(invalid("first"))), GINNEL_ERR_INVALID as c_int);
        assert_eq!(number(|| Ok(3)), 3);
        assert_eq!(last_error(), "first");
        std::thread::spawn(|| assert_eq!(last_error(), "")).join().unwrap();
        status(|| Err(Failure::new(GINNEL_ERR_NAME, "cut\0here")));
        assert_eq!(last_error(), "cut");
    }

    #[test]
    fn a_name_is_cut_to_its_array() {
        let array = name_array(&"n".repeat(70));
        assert!(array[..63].iter().all(|&c| c as u8 == b'n') && array[63] == 0);
    }
}
