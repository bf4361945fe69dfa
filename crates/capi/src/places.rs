//! Handles of which is known for certain whether they are still open.
//!
//! What C is given is the address of a place, which is never freed, and above it, in bits that no address of a program has
//! (48 bits, on x86-64 and arm64), how often the place has been taken. A handle that was freed names a number that the
//! place does not have any more, and never will again: a place that has used all its numbers is taken out of service.

use crate::boundary::Outcome;
use crate::status::Failure;
use crate::status::Status::GINNEL_ERR_FREED;
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

const ADDRESS_BITS: u32 = 48;
const _: () = assert!(usize::BITS == 64, "a handle has an address of 48 bits and a number of 16");

struct Place<T> {
    /// Odd while it is open, and only then is there a value.
    number: AtomicU16,
    value: UnsafeCell<MaybeUninit<T>>,
}

/// What C has a handle of.
pub(crate) trait Handle: Sized + 'static {
    /// All handles of this kind.
    fn places() -> &'static Places<Self>;
}

/// `handle!(Mutex, "mutex")`: C has handles of this type, and errors call them that.
macro_rules! handle {
    ($kind:ty, $what:literal) => {
        impl $crate::places::Handle for $kind {
            fn places() -> &'static $crate::places::Places<Self> {
                static PLACES: $crate::places::Places<$kind> = $crate::places::Places::of($what);
                &PLACES
            }
        }
    };
}
pub(crate) use handle;

/// All handles of one kind.
pub(crate) struct Places<T> {
    /// What to call one of them.
    what: &'static str,
    /// Addresses of those that are not open, of `Place<T>`.
    free: Mutex<Vec<usize>>,
    kind: std::marker::PhantomData<fn() -> T>,
}

impl<T> Places<T> {
    pub const fn of(what: &'static str) -> Self {
        Self { what, free: Mutex::new(Vec::new()), kind: std::marker::PhantomData }
    }

    /// A new handle. Never null.
    pub fn give(&self, value: T) -> *mut T {
        let address = self.free().pop().unwrap_or_else(|| {
            let place =
                Place::<T> { number: AtomicU16::new(0), value: UnsafeCell::new(MaybeUninit::uninit()) };
            Box::into_raw(Box::new(place)).expose_provenance()
        });
        // SAFETY: it comes from the line above, now or earlier, and nobody else has it: it was among the free ones.
        let place = unsafe { &*ptr::with_exposed_provenance::<Place<T>>(address) };
        // SAFETY: as above.
        unsafe { (*place.value.get()).write(value) };
        let number = place.number.load(Ordering::Relaxed) + 1;
        place.number.store(number, Ordering::Release);
        ptr::without_provenance_mut(address | usize::from(number) << ADDRESS_BITS)
    }

    /// What stands behind a handle, if it is open.
    ///
    /// # Safety
    ///
    /// The handle comes from [`Places::give`], and nobody closes it as long as the result is used.
    #[inline]
    pub unsafe fn look<'a>(&self, handle: *const T) -> Outcome<&'a T> {
        // SAFETY: it is open, and stays so, as the caller says; whoever may change it is alone with it.
        Ok(unsafe { (*self.place(handle)?.value.get()).assume_init_ref() })
    }

    /// The same, to change it.
    ///
    /// # Safety
    ///
    /// As for [`Places::look`], and nobody else uses the handle meanwhile.
    #[inline]
    pub unsafe fn look_mut<'a>(&self, handle: *mut T) -> Outcome<&'a mut T> {
        // SAFETY: it is open, and nobody else uses it, as the caller says.
        Ok(unsafe { (*self.place(handle)?.value.get()).assume_init_mut() })
    }

    /// Ends a handle, once.
    ///
    /// # Safety
    ///
    /// The handle comes from [`Places::give`], and nobody else uses it, but for ending it, too.
    pub unsafe fn take(&self, handle: *mut T) -> Outcome<T> {
        let mut free = self.free();
        // SAFETY: as the caller says.
        let place = unsafe { self.place(handle)? };
        let number = place.number.load(Ordering::Relaxed);
        // After the last number comes 0, which no handle has; it stays that for ever.
        place.number.store(number.wrapping_add(1), Ordering::Release);
        if number != u16::MAX {
            free.push(ptr::from_ref(place).expose_provenance());
        }
        // SAFETY: it was open, and is not any more: under the lock, so of two who end it one comes here, before the place
        // is given to anybody.
        Ok(unsafe { (*place.value.get()).assume_init_read() })
    }

    /// # Safety
    ///
    /// The handle comes from [`Places::give`].
    #[inline]
    unsafe fn place<'a>(&self, handle: *const T) -> Outcome<&'a Place<T>> {
        let (address, number) = (handle.addr() & ((1 << ADDRESS_BITS) - 1), handle.addr() >> ADDRESS_BITS);
        // SAFETY: as the caller says, so there is a place, and places stay.
        let place = unsafe { &*ptr::with_exposed_provenance::<Place<T>>(address) };
        match usize::from(place.number.load(Ordering::Acquire)) == number {
            true => Ok(place),
            false => Err(self.freed()),
        }
    }

    #[cold]
    fn freed(&self) -> Failure {
        Failure::new(GINNEL_ERR_FREED, format!("this handle of a {} is freed already", self.what))
    }

    fn free(&self) -> MutexGuard<'_, Vec<usize>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(places: &Places<u32>, handle: *mut u32) -> Option<u32> {
        // SAFETY: comes from `give`.
        unsafe { places.look(handle) }.ok().copied()
    }

    fn take(places: &Places<u32>, handle: *mut u32) -> Option<u32> {
        // SAFETY: comes from `give`.
        unsafe { places.take(handle) }.ok()
    }

    #[test]
    fn a_handle_that_was_freed_stays_so_whoever_has_its_place() {
        let places = Places::of("thing");
        let mut old: Vec<*mut u32> = Vec::new();
        // So often that each place runs out of numbers.
        for n in 0..70_000 {
            let (one, two) = (places.give(n), places.give(n + 1));
            assert_eq!((look(&places, one), look(&places, two)), (Some(n), Some(n + 1)));
            assert_eq!((take(&places, one), take(&places, two)), (Some(n), Some(n + 1)));
            old.extend([one, two]);
        }
        let now = places.give(7);
        assert!(old.iter().all(|&handle| look(&places, handle).is_none() && take(&places, handle).is_none()));
        assert_eq!((look(&places, now), take(&places, now), take(&places, now)), (Some(7), Some(7), None));
        old.sort_unstable();
        old.dedup();
        assert_eq!(old.len(), 140_000, "a handle was given twice");
    }

    #[test]
    fn of_two_who_free_it_one_does() {
        let places = Places::of("thing");
        for n in 0..1000 {
            let handle = places.give(n);
            let address = handle.addr();
            let free = || take(&places, ptr::without_provenance_mut(address));
            let done: Vec<_> = std::thread::scope(|scope| {
                let threads = [scope.spawn(free), scope.spawn(free)];
                threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
            });
            assert_eq!(done, [n]);
        }
    }
}
