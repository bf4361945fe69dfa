//! Sections of this library that the program's signal handlers do not interrupt.
//!
//! In the kernel, a call does its work on a socket, and handlers run afterwards. So a handler may use the socket whose call it
//! interrupts, and it may leave that call for good (`longjmp`). Here, a signal may come in the middle of that work. Blocking signals
//! meanwhile would cost two system calls. Instead, a thread counts the sections that it is in, and [`crate::process::handlers`] postpones a
//! signal that comes in one: it blocks all signals, sends the signal again, and the thread unblocks them when it leaves its last
//! section. Then the handler runs.
//!
//! Two kinds of handlers interrupt a section nevertheless: those for faults of the thread itself, and those that the program has
//! installed without the C library. If one of them leaves the section for good, the thread notices that by its stack.

use crate::process::thread;
use crate::process::thread::Thread;
use crate::system::errno::Kept;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{Ordering, compiler_fence};

/// A section, which ends when this is dropped, in the same thread.
pub struct Section(PhantomData<*const ()>);

/// The sections of a thread are one word, because a signal may come between two stores: their number, and the page in which the stack
/// ended when the thread entered the first one.
const NUMBER: usize = 0xfff;

/// The number of bytes by which the stack of a thread in a section may be shorter than at its beginning, beyond that page. The function
/// that begins a section returns to the one that has it.
const SLACK: usize = 4096;

impl Section {
    #[inline]
    pub fn begin() -> Self {
        thread::with(|own| {
            let (sections, here) = (own.sections.load(Ordering::Relaxed), stack_end());
            let is_first = sections == 0 || has_left(sections, here);
            own.sections.store(if is_first { here & !NUMBER | 1 } else { sections + 1 }, Ordering::Relaxed);
        });
        // Handlers run in this same thread, so only the compiler could move something across this.
        compiler_fence(Ordering::SeqCst);
        Self(PhantomData)
    }

    /// Says that this section goes on with the work of an earlier one that a signal handler has left for good, or interrupts. Only one
    /// of the two counts from now on.
    #[cold]
    pub fn replace_earlier(&self) {
        thread::with(|own| {
            let sections = own.sections.load(Ordering::Relaxed);
            own.sections
                .store(if sections & NUMBER > 1 { sections - 1 } else { sections }, Ordering::Relaxed);
        });
    }
}

impl Drop for Section {
    #[inline]
    fn drop(&mut self) {
        compiler_fence(Ordering::SeqCst);
        thread::with(|own| {
            let sections = own.sections.load(Ordering::Relaxed);
            if sections & NUMBER > 1 {
                return own.sections.store(sections - 1, Ordering::Relaxed);
            }
            own.sections.store(0, Ordering::Relaxed);
            compiler_fence(Ordering::SeqCst);
            // While signals are postponed, none comes between the two accesses.
            if own.is_postponed.load(Ordering::Relaxed) {
                deliver(own);
            }
        });
    }
}

/// A value that a call needs for a while, with memory from the C library. A handler may leave the call meanwhile, and the memory is lost
/// then; but no handler interrupts the allocator.
pub struct Scratch<T>(ManuallyDrop<T>);

impl<T> Scratch<T> {
    /// Makes the value in a section.
    pub fn new(make: impl FnOnce() -> T) -> Self {
        let _section = Section::begin();
        Self(ManuallyDrop::new(make()))
    }

    /// Changes the value in a section.
    pub fn change<R>(&mut self, change: impl FnOnce(&mut T) -> R) -> R {
        let _section = Section::begin();
        change(&mut self.0)
    }
}

impl<T> Deref for Scratch<T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for Scratch<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<T> Drop for Scratch<T> {
    #[expect(unsafe_code, reason = "drops the value before its section ends")]
    fn drop(&mut self) {
        let _section = Section::begin();
        // SAFETY: nothing uses the value after this, because this is where its owner ends.
        unsafe { ManuallyDrop::drop(&mut self.0) };
    }
}

/// Unblocks the signals that have been postponed, so that their handlers run now.
#[cold]
fn deliver(own: &Thread) {
    let _errno = Kept::new();
    own.is_postponed.store(false, Ordering::Relaxed);
    crate::process::signals::set_mask(own.mask.load(Ordering::Relaxed));
}

/// Returns whether a thread is in a section, if its stack ends here.
pub fn is_inside(own: &Thread, stack_end: usize) -> bool {
    let sections = own.sections.load(Ordering::Relaxed);
    sections != 0 && !has_left(sections, stack_end)
}

/// Returns whether the calling thread is in a section.
#[cfg(all(debug_assertions, not(test)))]
pub fn is_here() -> bool {
    thread::with(|own| is_inside(own, stack_end()))
}

/// Returns whether a thread has left its sections without ending them, by the present end of its stack.
#[inline]
fn has_left(sections: usize, stack_end: usize) -> bool {
    stack_end > (sections | NUMBER) + SLACK
}

#[cfg(target_arch = "x86_64")]
#[inline]
#[expect(unsafe_code, reason = "reads a register")]
fn stack_end() -> usize {
    let end;
    // SAFETY: the code copies a register.
    unsafe { std::arch::asm!("mov {}, rsp", out(reg) end, options(nomem, nostack, preserves_flags)) };
    end
}

#[cfg(not(target_arch = "x86_64"))]
#[inline]
fn stack_end() -> usize {
    let here = 0_u8;
    std::ptr::from_ref(std::hint::black_box(&here)).addr()
}

#[cfg(test)]
mod tests {
    use super::{SLACK, Section, is_inside, stack_end};
    use crate::process::thread;

    fn is_in_one() -> bool {
        thread::with(|own| is_inside(own, stack_end()))
    }

    #[test]
    fn sections_are_counted() {
        assert!(!is_in_one());
        let outer = Section::begin();
        let inner = Section::begin();
        drop(outer);
        assert!(is_in_one());
        drop(inner);
        assert!(!is_in_one());
    }

    #[test]
    fn a_section_that_goes_on_with_an_earlier_one_counts_once() {
        std::mem::forget(Section::begin());
        let section = Section::begin();
        section.replace_earlier();
        drop(section);
        assert!(!is_in_one());
    }

    #[test]
    fn a_section_that_was_left_for_good_does_not_count() {
        #[inline(never)]
        fn leave() {
            let room = [0_u8; 3 * SLACK];
            std::hint::black_box(&room);
            std::mem::forget(Section::begin());
        }
        leave();
        assert!(!is_in_one());
        let section = Section::begin();
        drop(section);
        assert!(!is_in_one());
    }
}
