//! Handles for which it is always known whether they are still open.
//!
//! A handle that C gets consists of the address of a slot and, in the upper bits that no address of a program uses (an
//! address has 48 bits on x86-64 and arm64), the slot's generation number. A slot is never freed. A handle that was
//! freed contains a number that the slot does not have any more and never gets again, because a slot that has used all
//! its numbers is taken out of service.

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
    /// Generation number: odd while the handle is open, and only then is there a value.
    number: AtomicU16,
    value: UnsafeCell<MaybeUninit<T>>,
}

/// A type of which C has handles.
pub(crate) trait Handle: Sized + 'static {
    /// Returns the table of all handles of this type.
    fn table() -> &'static HandleTable<Self>;
}

/// `handle!(Mutex, "mutex")` declares that C has handles of this type, and that errors call them that.
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

/// The table of all handles of one kind.
pub(crate) struct HandleTable<T> {
    /// The kind's name in error texts.
    what: &'static str,
    /// Addresses of the slots (`Slot<T>`) that are not open.
    free: Mutex<Vec<usize>>,
    kind: std::marker::PhantomData<fn() -> T>,
}

impl<T> HandleTable<T> {
    pub const fn of(what: &'static str) -> Self {
        Self { what, free: Mutex::new(Vec::new()), kind: std::marker::PhantomData }
    }

    /// Puts a value into a slot and returns its new handle, which is never null.
    pub fn insert(&self, value: T) -> *mut T {
        let address = self.free().pop().unwrap_or_else(|| {
            let slot = Slot::<T> { number: AtomicU16::new(0), value: UnsafeCell::new(MaybeUninit::uninit()) };
            Box::into_raw(Box::new(slot)).expose_provenance()
        });
        // SAFETY: the address comes from the lines above, now or earlier, and nobody else uses the slot, because it was
        // free.
        let slot = unsafe { &*ptr::with_exposed_provenance::<Slot<T>>(address) };
        // SAFETY: the slot was free, so nobody else accesses its value.
        unsafe { (*slot.value.get()).write(value) };
        let number = slot.number.load(Ordering::Relaxed) + 1;
        slot.number.store(number, Ordering::Release);
        ptr::without_provenance_mut(address | usize::from(number) << ADDRESS_BITS)
    }

    /// Returns the value of a handle, if the handle is open.
    ///
    /// # Safety
    ///
    /// The handle comes from [`HandleTable::insert`], and nobody closes it while the result is used.
    #[inline]
    pub unsafe fn get<'a>(&self, handle: *const T) -> Outcome<&'a T> {
        // SAFETY: it is open and stays open, as the caller says. A caller that may change it is its only user.
        Ok(unsafe { (*self.slot(handle)?.value.get()).assume_init_ref() })
    }

    /// Does the same, for changing the value.
    ///
    /// # Safety
    ///
    /// As for [`HandleTable::get`], and nobody else uses the handle meanwhile.
    #[inline]
    pub unsafe fn get_mut<'a>(&self, handle: *mut T) -> Outcome<&'a mut T> {
        // SAFETY: it is open, and nobody else uses it, as the caller says.
        Ok(unsafe { (*self.slot(handle)?.value.get()).assume_init_mut() })
    }

    /// Closes a handle and returns its value. Of several concurrent calls, one succeeds.
    ///
    /// # Safety
    ///
    /// The handle comes from [`HandleTable::insert`], and nobody else uses it, except to close it, too.
    pub unsafe fn remove(&self, handle: *mut T) -> Outcome<T> {
        let mut free = self.free();
        // SAFETY: the handle comes from `insert`, as the caller guarantees.
        let slot = unsafe { self.slot(handle)? };
        let number = slot.number.load(Ordering::Relaxed);
        // The number after the last one is 0, which no handle has. The slot keeps it for ever.
        slot.number.store(number.wrapping_add(1), Ordering::Release);
        if number != u16::MAX {
            free.push(ptr::from_ref(slot).expose_provenance());
        }
        // SAFETY: it was open and is closed now. The lock ensures that of two threads that close it only one gets here,
        // before the slot is given to another handle.
        Ok(unsafe { (*slot.value.get()).assume_init_read() })
    }

    /// # Safety
    ///
    /// The handle comes from [`HandleTable::insert`].
    #[inline]
    unsafe fn slot<'a>(&self, handle: *const T) -> Outcome<&'a Slot<T>> {
        let (address, number) = (handle.addr() & ((1 << ADDRESS_BITS) - 1), handle.addr() >> ADDRESS_BITS);
        // SAFETY: the handle comes from `insert`, as the caller guarantees, so it has the address of a slot, and slots
        // are never freed.
        let slot = unsafe { &*ptr::with_exposed_provenance::<Slot<T>>(address) };
        match usize::from(slot.number.load(Ordering::Acquire)) == number {
            true => Ok(slot),
            false => Err(self.freed()),
        }
    }

    #[cold]
    fn freed(&self) -> Failure {
        Failure::new(GINNEL_ERR_FREED, format!("this handle of a {} was freed already", self.what))
    }

    fn free(&self) -> MutexGuard<'_, Vec<usize>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(table: &HandleTable<u32>, handle: *mut u32) -> Option<u32> {
        // SAFETY: the handle comes from `insert`.
        unsafe { table.get(handle) }.ok().copied()
    }

    fn take(table: &HandleTable<u32>, handle: *mut u32) -> Option<u32> {
        // SAFETY: the handle comes from `insert`.
        unsafe { table.remove(handle) }.ok()
    }

    #[test]
    fn a_freed_handle_stays_freed_after_its_slot_is_reused() {
        let table = HandleTable::of("thing");
        let mut old: Vec<*mut u32> = Vec::new();
        // Often enough that each slot runs out of numbers.
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
