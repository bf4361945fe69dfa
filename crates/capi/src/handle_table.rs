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

struct Slot<T> {
    /// Odd while it is open, and only then is there a value.
    number: AtomicU16,
    value: UnsafeCell<MaybeUninit<T>>,
}

/// What C has a handle of.
pub(crate) trait Handle: Sized + 'static {
    /// All handles of this kind.
    fn table() -> &'static HandleTable<Self>;
}

/// `handle!(Mutex, "mutex")`: C has handles of this type, and errors call them that.
macro_rules! handle {
    ($kind:ty, $what:literal) => {
        impl $crate::handle_table::Handle for $kind {
            fn table() -> &'static $crate::handle_table::HandleTable<Self> {
                static TABLE: $crate::handle_table::HandleTable<$kind> =
                    $crate::handle_table::HandleTable::of($what);
                &TABLE
            }
        }
    };
}
pub(crate) use handle;

/// All handles of one kind.
pub(crate) struct HandleTable<T> {
    /// What to call one of them.
    what: &'static str,
    /// Addresses of those that are not open, of `Slot<T>`.
    free: Mutex<Vec<usize>>,
    kind: std::marker::PhantomData<fn() -> T>,
}

impl<T> HandleTable<T> {
    pub const fn of(what: &'static str) -> Self {
        Self { what, free: Mutex::new(Vec::new()), kind: std::marker::PhantomData }
    }

    /// A new handle. Never null.
    pub fn insert(&self, value: T) -> *mut T {
        let address = self.free().pop().unwrap_or_else(|| {
            let slot = Slot::<T> { number: AtomicU16::new(0), value: UnsafeCell::new(MaybeUninit::uninit()) };
            Box::into_raw(Box::new(slot)).expose_provenance()
        });
        // SAFETY: it comes from the line above, now or earlier, and nobody else has it: it was among the free ones.
        let slot = unsafe { &*ptr::with_exposed_provenance::<Slot<T>>(address) };
        // SAFETY: as above.
        unsafe { (*slot.value.get()).write(value) };
        let number = slot.number.load(Ordering::Relaxed) + 1;
        slot.number.store(number, Ordering::Release);
        ptr::without_provenance_mut(address | usize::from(number) << ADDRESS_BITS)
    }

    /// What stands behind a handle, if it is open.
    ///
    /// # Safety
    ///
    /// The handle comes from [`HandleTable::insert`], and nobody closes it as long as the result is used.
    #[inline]
    pub unsafe fn get<'a>(&self, handle: *const T) -> Outcome<&'a T> {
        // SAFETY: it is open, and stays so, as the caller says; whoever may change it is alone with it.
        Ok(unsafe { (*self.slot(handle)?.value.get()).assume_init_ref() })
    }

    /// The same, to change it.
    ///
    /// # Safety
    ///
    /// As for [`HandleTable::get`], and nobody else uses the handle meanwhile.
    #[inline]
    pub unsafe fn get_mut<'a>(&self, handle: *mut T) -> Outcome<&'a mut T> {
        // SAFETY: it is open, and nobody else uses it, as the caller says.
        Ok(unsafe { (*self.slot(handle)?.value.get()).assume_init_mut() })
    }

    /// Ends a handle, once.
    ///
    /// # Safety
    ///
    /// The handle comes from [`HandleTable::insert`], and nobody else uses it, but for ending it, too.
    pub unsafe fn remove(&self, handle: *mut T) -> Outcome<T> {
        let mut free = self.free();
        // SAFETY: as the caller says.
        let slot = unsafe { self.slot(handle)? };
        let number = slot.number.load(Ordering::Relaxed);
        // After the last number comes 0, which no handle has; it stays that for ever.
        slot.number.store(number.wrapping_add(1), Ordering::Release);
        if number != u16::MAX {
            free.push(ptr::from_ref(slot).expose_provenance());
        }
        // SAFETY: it was open, and is not any more: under the lock, so of two who end it one comes here, before the place
        // is given to anybody.
        Ok(unsafe { (*slot.value.get()).assume_init_read() })
    }

    /// # Safety
    ///
    /// The handle comes from [`HandleTable::insert`].
    #[inline]
    unsafe fn slot<'a>(&self, handle: *const T) -> Outcome<&'a Slot<T>> {
        let (address, number) = (handle.addr() & ((1 << ADDRESS_BITS) - 1), handle.addr() >> ADDRESS_BITS);
        // SAFETY: as the caller says, so there is a place, and places stay.
        let slot = unsafe { &*ptr::with_exposed_provenance::<Slot<T>>(address) };
        match usize::from(slot.number.load(Ordering::Acquire)) == number {
            true => Ok(slot),
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

    fn look(table: &HandleTable<u32>, handle: *mut u32) -> Option<u32> {
        // SAFETY: comes from `give`.
        unsafe { table.get(handle) }.ok().copied()
    }

    fn take(table: &HandleTable<u32>, handle: *mut u32) -> Option<u32> {
        // SAFETY: comes from `give`.
        unsafe { table.remove(handle) }.ok()
    }

    #[test]
    fn a_freed_handle_stays_freed_after_its_slot_is_reused() {
        let table = HandleTable::of("thing");
        let mut old: Vec<*mut u32> = Vec::new();
        // So often that each place runs out of numbers.
        for n in 0..70_000 {
            let (one, two) = (table.insert(n), table.insert(n + 1));
            assert_eq!((look(&table, one), look(&table, two)), (Some(n), Some(n + 1)));
            assert_eq!((take(&table, one), take(&table, two)), (Some(n), Some(n + 1)));
            old.extend([one, two]);
        }
        let now = table.insert(7);
        assert!(old.iter().all(|&handle| look(&table, handle).is_none() && take(&table, handle).is_none()));
        assert_eq!((look(&table, now), take(&table, now), take(&table, now)), (Some(7), Some(7), None));
        old.sort_unstable();
        old.dedup();
        assert_eq!(old.len(), 140_000, "a handle was given twice");
    }

    #[test]
    fn only_one_of_two_concurrent_frees_succeeds() {
        let table = HandleTable::of("thing");
        for n in 0..1000 {
            let handle = table.insert(n);
            let address = handle.addr();
            let free = || take(&table, ptr::without_provenance_mut(address));
            let done: Vec<_> = std::thread::scope(|scope| {
                let threads = [scope.spawn(free), scope.spawn(free)];
                threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
            });
            assert_eq!(done, [n]);
        }
    }
}
