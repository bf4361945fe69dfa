//! Handles for which it is always known whether they are open.
//!
//! A handle that C gets consists of the address of a slot, the number of the chunk of slots in which it lies, and the slot's generation
//! number:
//!
//! ```text
//!  63                48 47                                      7 6      0
//! +--------------------+-----------------------------------------+--------+
//! | generation number  |             address / 128               | chunk  |
//! +--------------------+-----------------------------------------+--------+
//! ```
//!
//! The chunk says between which addresses, and at which distances, there are slots. So whatever a program passes, nothing is read but
//! slots of this table: another number, an address, a handle of another type and one that was freed are errors. An address of a program
//! has zeros in place of a generation number (it has at most 48 bits on x86-64 and arm64), and no handle has: it is odd. A handle
//! that was freed contains a number that its slot does not have any more and never gets again, because a slot that has used all its
//! numbers is taken out of service. Slots are never freed.
//!
//! Nothing here waits for another thread, except [`HandleTable::take`] for the uses that are counted. So whatever other threads were doing
//! during a fork, the child can open and close handles.
//!
//! A slot's address could be computed from its number, but the processor would have to wait for that. It tests an address while it
//! already reads what is there. For the first chunk, which is the only one of most programs, the test is a few instructions.

use crate::boundary::Outcome;
use crate::status::Failure;
use crate::status::Status::{GINNEL_ERR_FREED, GINNEL_ERR_INVALID};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::cell::{Cell, UnsafeCell};
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

const NUMBER_AT: u32 = 48;
/// Slots lie at multiples of this, so that the low bits of an address are free for the number of a chunk. No two threads that use different
/// handles use the same cache line.
const ALIGN: usize = 128;
const _: () =
    assert!(usize::BITS == 64 && CHUNKS <= ALIGN, "a handle has an address of 48 bits and a number of 16");

/// The slots of the first chunk. Each further one has twice as many as the one before.
const FIRST: usize = 1024;
const CHUNKS: usize = 22;
const _: () = assert!(FIRST << CHUNKS <= 1 << 32, "the list of free slots has numbers of 32 bits");

/// In [`Slot::state`], above the generation number: the value is to be dropped by whoever uses it last.
const OWED: u64 = 1 << 16;
/// One use of the value. The uses are counted above that.
const USE: u64 = 1 << 17;

#[repr(align(128))]
struct Slot<T> {
    /// The generation number, which is odd while the handle is open; [`OWED`]; and the number of uses that are counted. Zero at first.
    state: AtomicU64,
    /// While the slot is in the list of free ones: the next one there, as in [`HandleTable::free`].
    next: AtomicU32,
    /// There is one while the handle is open, and as long as its last use is to drop it.
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

/// The table of all handles of one type.
pub(crate) struct HandleTable<T> {
    /// The type's name in error texts.
    what: &'static str,
    /// Chunks of slots: `FIRST << n` in the chunk with number n. They are made at the first need, and never freed; until then they are
    /// [`NOWHERE`].
    chunks: [AtomicPtr<Slot<T>>; CHUNKS],
    /// The list of slots that have had a handle and have none. The lower half is one more than the number of the first one, or 0. The upper
    /// half changes with each change of the list, so that nobody takes the first slot off who has seen another list that began with it.
    free: AtomicU64,
    /// The number of slots that have ever been used.
    used: AtomicUsize,
    /// Children of a fork forget the uses of their parent's threads.
    forks: AtomicBool,
}

/// Where no slot is: each address that fits into a handle is below, and so out of range of a chunk here.
const NOWHERE: usize = 1 << 63;

impl<T> HandleTable<T> {
    pub const fn of(what: &'static str) -> Self {
        let chunks = [const { AtomicPtr::new(ptr::without_provenance_mut(NOWHERE)) }; CHUNKS];
        let (free, used, forks) = (AtomicU64::new(0), AtomicUsize::new(0), AtomicBool::new(false));
        Self { what, chunks, free, used, forks }
    }

    /// Puts a value into a slot and returns its new handle, which is never null.
    pub fn insert(&self, value: T) -> *mut T {
        let number = self.take_free().unwrap_or_else(|| self.used.fetch_add(1, Ordering::Relaxed));
        let place = self.place(number);
        // SAFETY: it is the place of a slot.
        let slot = unsafe { slot_at(place) };
        // SAFETY: the slot was free, so nobody else accesses its value.
        unsafe { (*slot.value.get()).write(value) };
        // Uses that fail may be counted at the same time. The number is even, so nothing is carried.
        let number = (slot.state.fetch_add(1, Ordering::Release) + 1) as u16;
        ptr::without_provenance_mut(usize::from(number) << NUMBER_AT | place)
    }

    /// Returns the value of a handle, if the handle is open.
    ///
    /// # Safety
    ///
    /// Nobody closes the handle while the result is used.
    #[inline]
    pub unsafe fn get<'a>(&self, handle: *const T) -> Outcome<&'a T> {
        // SAFETY: it is open and stays open, as the caller says. A caller that may change it is its only user.
        Ok(unsafe { (*self.find(handle)?.value.get()).assume_init_ref() })
    }

    /// Does the same, for changing the value.
    ///
    /// # Safety
    ///
    /// As for [`HandleTable::get`], and nobody else uses the handle meanwhile.
    #[inline]
    pub unsafe fn get_mut<'a>(&self, handle: *mut T) -> Outcome<&'a mut T> {
        // SAFETY: it is open, and nobody else uses it, as the caller says.
        Ok(unsafe { (*self.find(handle)?.value.get()).assume_init_mut() })
    }

    /// Returns the value of a handle, if the handle is open, and keeps the value while it is used. Others may close the handle meanwhile.
    /// Counting costs two locked instructions, which is too much for what programs do for each message.
    ///
    /// # Safety
    ///
    /// Nobody changes the value of this handle by [`HandleTable::get_mut`] meanwhile.
    pub unsafe fn share(&self, handle: *const T) -> Outcome<Use<'_, T>> {
        let slot = self.find(handle)?;
        let state = slot.state.fetch_add(USE, Ordering::Acquire);
        USES.set(USES.get() + 1);
        // From here on the use is counted, and ends when this is dropped.
        let used = Use { table: self, slot, place: place_of(handle) };
        if state as u16 == number_of(handle) { Ok(used) } else { Err(self.freed()) }
    }

    /// Lets `forget`, which calls [`HandleTable::forget_uses`], run in each child of a fork.
    pub fn at_forks(&self, forget: unsafe extern "C" fn()) {
        // Threads that get here together all register it, which does no harm. If one did it for the others, they would wait for ever in the
        // child of a fork at that moment.
        if !self.forks.load(Ordering::Acquire) {
            // SAFETY: the function only loads and stores atomic numbers. If there is no memory to remember it, a value that another thread
            // uses during a fork is not dropped in the child.
            let _ = unsafe { libc::pthread_atfork(None, None, Some(forget)) };
            self.forks.store(true, Ordering::Release);
        }
    }

    /// Forgets, in the child of a fork, the uses of threads that do not exist here. They would never end.
    pub fn forget_uses(&self) {
        // A signal handler that has interrupted a call of the library may fork. The child goes on with that call.
        if USES.get() > 0 {
            return;
        }
        for (chunk, slots) in self.chunks.iter().enumerate() {
            let slots = slots.load(Ordering::Acquire);
            for at in 0..if slots.addr() == NOWHERE { 0 } else { FIRST << chunk } {
                // SAFETY: the chunk has so many slots, and is never freed.
                let state = unsafe { &(*slots.add(at)).state };
                // No page that is not in use is written to, and so copied.
                if state.load(Ordering::Relaxed) >= USE {
                    state.fetch_and(USE - 1, Ordering::Relaxed);
                }
            }
        }
    }

    /// Closes a handle. Its value is dropped, by this call or at the end of the last use that is counted. Of several concurrent calls,
    /// one succeeds.
    ///
    /// # Safety
    ///
    /// Nobody uses the result of [`HandleTable::get`] or [`HandleTable::get_mut`] for this handle.
    pub unsafe fn close(&self, handle: *mut T) -> Outcome<()> {
        let slot = self.end(handle, OWED)?;
        self.settle(slot, place_of(handle));
        Ok(())
    }

    /// Closes a handle and returns its value. Of several concurrent calls, one succeeds. Waits for uses that are counted; so this is for
    /// types that are not shared.
    ///
    /// # Safety
    ///
    /// As for [`HandleTable::close`].
    pub unsafe fn take(&self, handle: *mut T) -> Outcome<T> {
        let slot = self.end(handle, 0)?;
        while slot.state.load(Ordering::Acquire) >= USE {
            std::thread::yield_now();
        }
        // SAFETY: it was open. Of those that close it only this one has got here, and nobody uses it.
        let value = unsafe { (*slot.value.get()).assume_init_read() };
        self.give_back(slot, place_of(handle));
        Ok(value)
    }

    /// Gives the slot of an open handle its next number, and sets `flag`.
    fn end(&self, handle: *const T, flag: u64) -> Outcome<&Slot<T>> {
        let (slot, number) = (self.find(handle)?, number_of(handle));
        // The number after the last one is 0, which no handle has. The slot keeps it for ever.
        let ended = |state: u64| state & !0xffff | u64::from(number.wrapping_add(1)) | flag;
        let end = |state: u64| (state as u16 == number).then(|| ended(state));
        let done = slot.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, end);
        done.map(|_| slot).map_err(|_| self.freed())
    }

    /// Drops the value of a closed handle if nobody uses it any more, once.
    fn settle(&self, slot: &Slot<T>, place: usize) {
        let paid = |state: u64| (state & OWED != 0 && state < USE).then_some(state & !OWED);
        if slot.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, paid).is_ok() {
            // SAFETY: the handle was open, and nobody uses the value. Only one thread clears the flag, and it is not set again before
            // the slot is given to another handle.
            let value = unsafe { (*slot.value.get()).assume_init_read() };
            self.give_back(slot, place);
            drop(value);
        }
    }

    fn give_back(&self, slot: &Slot<T>, place: usize) {
        if slot.state.load(Ordering::Relaxed) as u16 != 0 {
            self.put_free(slot, self.number(place));
        }
    }

    /// Takes a slot off the list of free ones, and returns its number.
    fn take_free(&self) -> Option<usize> {
        let rest = |free: u64| {
            let first = (free as u32 as usize).checked_sub(1)?;
            // SAFETY: it is the place of a slot.
            let slot: &Slot<T> = unsafe { slot_at(self.place(first)) };
            // If another thread has taken the slot since, this is of no use, and the list has changed.
            Some(changed(free) | u64::from(slot.next.load(Ordering::Relaxed)))
        };
        let taken = self.free.fetch_update(Ordering::Acquire, Ordering::Acquire, rest);
        taken.ok().map(|free| free as u32 as usize - 1)
    }

    /// Puts the slot with this number into the list of free ones. It is in no list, and has no handle.
    fn put_free(&self, slot: &Slot<T>, number: u32) {
        let longer = |free: u64| {
            slot.next.store(free as u32, Ordering::Relaxed);
            Some(changed(free) | u64::from(number + 1))
        };
        let _ = self.free.fetch_update(Ordering::AcqRel, Ordering::Acquire, longer);
    }

    /// Returns the slot of a handle, if the handle is open.
    #[inline]
    fn find(&self, handle: *const T) -> Outcome<&Slot<T>> {
        let (number, place) = (number_of(handle), place_of(handle));
        if number & 1 == 0 || !self.has(place) {
            return Err(self.foreign());
        }
        // SAFETY: it is the place of a slot.
        let slot: &Slot<T> = unsafe { slot_at(place) };
        match slot.state.load(Ordering::Acquire) as u16 == number {
            true => Ok(slot),
            false => Err(self.freed()),
        }
    }

    /// Whether this is the place of a slot of this table.
    #[inline]
    fn has(&self, place: usize) -> bool {
        is_slot(self.chunks[0].load(Ordering::Acquire), FIRST, place) || self.has_in_another_chunk(place)
    }

    #[cold]
    fn has_in_another_chunk(&self, place: usize) -> bool {
        let (chunk, address) = (place % ALIGN, place - place % ALIGN);
        let Some(slots) = self.chunks.get(chunk) else { return false };
        is_slot(slots.load(Ordering::Acquire), FIRST << chunk, address)
    }

    /// Returns the place of the slot with this number, and makes its chunk if there is none.
    fn place(&self, number: usize) -> usize {
        // The chunk with number n begins with the slot with number FIRST * (2^n - 1).
        let number = number + FIRST;
        let chunk = (number / FIRST).ilog2() as usize;
        let mut slots = self.chunks[chunk].load(Ordering::Acquire);
        if slots.addr() == NOWHERE {
            slots = self.make_chunk(chunk);
        }
        slots.wrapping_add(number - (FIRST << chunk)).expose_provenance() | chunk
    }

    /// Returns the number of the slot with this place.
    fn number(&self, place: usize) -> u32 {
        let (chunk, address) = (place % ALIGN, place - place % ALIGN);
        let at = (address - self.chunks[chunk].load(Ordering::Acquire).addr()) / size_of::<Slot<T>>();
        ((FIRST << chunk) - FIRST + at) as u32
    }

    /// Makes a chunk of slots that have never been used, for ever, unless another thread does so first. Returns it.
    #[cold]
    fn make_chunk(&self, chunk: usize) -> *mut Slot<T> {
        let layout = Layout::array::<Slot<T>>(FIRST << chunk)
            .unwrap_or_else(|_| unreachable!("more slots than addresses"));
        // Zeros are slots that have never been used. Their pages get memory when they are used.
        // SAFETY: a slot has a size.
        let made = unsafe { alloc_zeroed(layout) }.cast::<Slot<T>>();
        if made.is_null() {
            handle_alloc_error(layout);
        }
        let nowhere = ptr::without_provenance_mut(NOWHERE);
        match self.chunks[chunk].compare_exchange(nowhere, made, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => made,
            Err(others) => {
                // SAFETY: it was allocated with this layout, and nobody else has it.
                unsafe { dealloc(made.cast(), layout) };
                others
            }
        }
    }

    #[cold]
    fn freed(&self) -> Failure {
        Failure::new(GINNEL_ERR_FREED, format!("this handle of a {} was freed already", self.what))
    }

    #[cold]
    fn foreign(&self) -> Failure {
        Failure::new(GINNEL_ERR_INVALID, format!("this is not a handle of a {}", self.what))
    }
}

/// Returns the upper half of the next list of free slots after this one.
fn changed(free: u64) -> u64 {
    (free >> 32).wrapping_add(1) << 32
}

fn number_of<T>(handle: *const T) -> u16 {
    (handle.addr() >> NUMBER_AT) as u16
}

/// Returns the part of a handle that says where its slot is.
fn place_of<T>(handle: *const T) -> usize {
    handle.addr() & ((1 << NUMBER_AT) - 1)
}

/// Whether one of so many slots lies at this address.
#[inline]
fn is_slot<T>(slots: *const Slot<T>, number: usize, address: usize) -> bool {
    // Below the first slot this is a huge number.
    let at = address.wrapping_sub(slots.addr());
    at < size_of::<Slot<T>>() * number && at.is_multiple_of(size_of::<Slot<T>>())
}

/// # Safety
///
/// It is the place of a slot of the table of this type, from [`HandleTable::place`] or because [`HandleTable::has`] it.
#[inline]
unsafe fn slot_at<'a, T>(place: usize) -> &'a Slot<T> {
    // SAFETY: there is a slot, as the caller says, and slots are never freed. `place` has exposed them.
    unsafe { &*ptr::with_exposed_provenance::<Slot<T>>(place - place % ALIGN) }
}

thread_local! {
    /// The uses that this thread has in all tables.
    static USES: Cell<usize> = const { Cell::new(0) };
}

/// The use of a handle's value, which keeps the value.
pub(crate) struct Use<'a, T> {
    table: &'a HandleTable<T>,
    slot: &'a Slot<T>,
    place: usize,
}

impl<T> Deref for Use<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the handle was open after this use had been counted, so the value stays. Nobody changes it, as the caller of `share` has
        // said.
        unsafe { (*self.slot.value.get()).assume_init_ref() }
    }
}

impl<T> Drop for Use<'_, T> {
    fn drop(&mut self) {
        let before = self.slot.state.fetch_sub(USE, Ordering::AcqRel);
        USES.set(USES.get() - 1);
        if before & OWED != 0 {
            self.table.settle(self.slot, self.place);
        }
    }
}

#[cfg(test)]
mod tests;
