//! Pages of the program that peers can reach. They are moved into an arena, keep their virtual addresses, and stay in the arena.
//!
//! Memory is registered in chunks of 2 MiB of the program's addresses, of which only the pages that are needed are moved. Pages stay in
//! the arena after their region has been deregistered, so registering them again costs only a check whether they are still there: the
//! program may have unmapped them.
//!
//! Other threads that store to the pages during a move sleep until it is over. Stacks, and the thread-local memory next to them, are
//! never moved, for two reasons. After a fork, the child has its parent's pages until [`in_child`] has run, so both would run on one
//! stack. And any member of the segment could change the return addresses on the stack.
#![allow(unsafe_code)] // Replaces pages of the program.

use crate::context::Open;
use ginnel_layout::verbs::{CHUNK, Chunk};
use ginnel_shmem::{Mapping, Placed, Threads};
use ginnel_verbs::device::DeviceError;
use ginnel_verbs::regions::chunks_of;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};

const PAGE: usize = 4096;

/// The reason why pages were not moved. Peers cannot reach them; the owner has to access them on the peers' behalf.
#[derive(Debug)]
pub enum NotMoved {
    /// This kind of memory or process does not allow it.
    Unsuitable,
    /// There is no room.
    Full(DeviceError),
}

/// The state of a chunk of the program's addresses of which pages have been moved.
struct Held {
    /// Keeps the device open even if the program closes it and opens it again, because these pages are useful only in this segment.
    open: Arc<Open>,
    chunk: Chunk,
    memory: Mapping,
    file_at: u64,
    placed: Vec<Placed>,
}

/// All chunks, by their first addresses.
static HELD: Mutex<BTreeMap<u64, Held>> = Mutex::new(BTreeMap::new());

fn held() -> MutexGuard<'static, BTreeMap<u64, Held>> {
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Memory that is registered with devices of the real library, by the address of its `ibv_mr`. Those devices access the pages that were
/// there at the time of registration, so the pages must not be replaced. Only accessed while the lock of [`HELD`] is held.
static PINNED: Mutex<BTreeMap<usize, Range<u64>>> = Mutex::new(BTreeMap::new());

fn pinned() -> MutexGuard<'static, BTreeMap<usize, Range<u64>>> {
    PINNED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls `register` to register memory with a real device, while no page is being moved. Returns the result of `register`: the address
/// of an `ibv_mr`, or 0.
pub fn pin(range: Range<u64>, register: impl FnOnce() -> usize) -> usize {
    let _held = held();
    let mr = register();
    if mr != 0 {
        pinned().insert(mr, range);
    }
    mr
}

/// Calls `deregister` to end a registration with a real device, while no page is being moved. Returns the result of `deregister`, which
/// is 0 on success.
pub fn unpin(mr: usize, deregister: impl FnOnce() -> c_int) -> c_int {
    let _held = held();
    let result = deregister();
    if result == 0 {
        pinned().remove(&mr);
    }
    result
}

/// Returns whether memory in this range is registered with a real device.
fn is_pinned(pages: Range<u64>) -> bool {
    pinned().values().any(|pinned| pinned.start < pages.end && pages.start < pinned.end)
}

/// Calls `look` while no page is being moved.
pub fn while_none_move<T>(look: impl FnOnce() -> T) -> T {
    let _held = held();
    look()
}

/// Moves all pages of a range that have not been moved yet, and returns the chunks of the range. If peers may write there
/// (`is_written`), the program must be able to write as well, because it may have protected the pages.
pub fn move_range(open: &Arc<Open>, range: Range<u64>, is_written: bool) -> Result<Vec<Chunk>, NotMoved> {
    follow_forks();
    let first = range.start / PAGE as u64 * PAGE as u64;
    let end = range.end.checked_next_multiple_of(PAGE as u64).ok_or(NotMoved::Unsuitable)?;
    let mut held = held();
    let mut new = Vec::new();
    let moved = match reserve(&mut held, open, first..end, &mut new) {
        Ok(()) => chunks_of(first, end - first)
            .map(|at| {
                let known = held.get_mut(&at).ok_or(NotMoved::Unsuitable)?;
                let wanted = first.max(at)..end.min(at + CHUNK as u64);
                let pages = (wanted.start - at) as usize / PAGE..(wanted.end - at) as usize / PAGE;
                known.place(pages, at, is_written)?;
                Ok(known.chunk)
            })
            .collect(),
        Err(not_moved) => Err(not_moved),
    };
    if moved.is_err() {
        // These chunks were allocated in vain.
        for at in new {
            if held.get(&at).is_some_and(|known| known.placed.is_empty())
                && let Some(known) = held.remove(&at)
            {
                open.device.give_chunk(known.chunk);
            }
        }
    }
    moved
}

/// Allocates a chunk for each part of the range that has none, before any page is moved. Pages that have been moved stay moved, and
/// would waste room if there is not enough for all.
fn reserve(
    held: &mut BTreeMap<u64, Held>,
    open: &Arc<Open>,
    range: Range<u64>,
    new: &mut Vec<u64>,
) -> Result<(), NotMoved> {
    for at in chunks_of(range.start, range.end - range.start) {
        match held.get(&at) {
            // A page can lie in one segment only.
            Some(known) if !Arc::ptr_eq(&known.open, open) => return Err(NotMoved::Unsuitable),
            Some(_) => {}
            None => new.push(at),
        }
    }
    // Shared memory is not moved. The move itself would also fail, but only after chunks have been allocated.
    for run in new.chunk_by(|a, b| a + CHUNK as u64 == *b) {
        let (first, end) = (run[0].max(range.start), (run[run.len() - 1] + CHUNK as u64).min(range.end));
        if !ginnel_shmem::is_private(first as usize..end as usize).unwrap_or(false) {
            new.clear();
            return Err(NotMoved::Unsuitable);
        }
    }
    let taken = open.device.take_chunks(new.len()).map_err(NotMoved::Full)?;
    for (at, (chunk, memory, file_at)) in new.iter().zip(taken) {
        held.insert(*at, Held { open: open.clone(), chunk, memory, file_at, placed: Vec::new() });
    }
    Ok(())
}

impl Held {
    /// Moves those of these pages that have not been moved yet.
    fn place(&mut self, wanted: Range<usize>, chunk: u64, is_written: bool) -> Result<(), NotMoved> {
        let addresses = chunk as usize + wanted.start * PAGE..chunk as usize + wanted.end * PAGE;
        // All placed pages of a chunk have the same offset between address and file, so any of them can answer this.
        let there = match self.placed.first() {
            Some(placed) => placed.in_place(addresses.clone()).map_err(|_| NotMoved::Unsuitable)?,
            None => Vec::new(),
        };
        if there.iter().map(Range::len).sum::<usize>() == addresses.len() {
            return Ok(());
        }
        if is_written && !ginnel_shmem::is_mapped(addresses.clone(), true).unwrap_or(false) {
            return Err(NotMoved::Unsuitable);
        }
        let threads = Threads::look().map_err(|_| NotMoved::Unsuitable)?;
        if threads.stacks.iter().any(|stack| stack.start < addresses.end && addresses.start < stack.end) {
            return Err(NotMoved::Unsuitable);
        }
        // Removes the records of pages that the program has unmapped as a whole. If it has unmapped only a part, the rest is still in
        // use.
        let is_gone = |placed: &Placed| {
            let start = placed.start().as_ptr() as usize;
            let range = start..start + placed.len();
            let may_be = range.start < addresses.end && addresses.start < range.end;
            may_be && placed.in_place(range).is_ok_and(|there| there.is_empty())
        };
        for n in (0..self.placed.len()).rev() {
            if is_gone(&self.placed[n]) {
                self.placed.swap_remove(n).abandon();
            }
        }
        let mut at = addresses.start;
        let end = addresses.end..addresses.end;
        for there in there.into_iter().chain([end]) {
            if at < there.start {
                if is_pinned(at as u64..there.start as u64) {
                    return Err(NotMoved::Unsuitable);
                }
                self.place_run((at - chunk as usize) / PAGE, (there.start - at) / PAGE, chunk, &threads)?;
            }
            at = there.end;
        }
        Ok(())
    }

    fn place_run(
        &mut self,
        first: usize,
        count: usize,
        chunk: u64,
        threads: &Threads,
    ) -> Result<(), NotMoved> {
        let (at, len) = ((first * PAGE) as u64, count * PAGE);
        let start = NonNull::new((chunk + at) as *mut u8).ok_or(NotMoved::Unsuitable)?;
        // This avoids a reallocation of the vector while its pages may be replaced.
        self.placed.reserve(1);
        let (file, file_at) = (&*self.open.file, self.file_at + at);
        // SAFETY: the program has asked for its pages to be registered, and does not unmap them during the call. They contain no stack
        // and no thread-local memory. If this is the only thread, no other one can start during the call.
        let placed = unsafe {
            match threads.is_one {
                true => self.memory.place(file, file_at, start, len, PAGE),
                false => self.memory.place_among_threads(file, file_at, start, len, PAGE),
            }
        };
        match placed {
            Ok(placed) => {
                self.placed.push(placed);
                Ok(())
            }
            // Pages with different protections are moved one by one.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput && count > 1 => {
                (first..first + count).try_for_each(|page| self.place_run(page, 1, chunk, threads))
            }
            // The memory is shared or belongs to a file, or userfaultfd is forbidden or in use.
            Err(_) => Err(NotMoved::Unsuitable),
        }
    }
}

/// Gives the child of each fork its own copies of the moved pages, with their contents at the time of the fork. What the parent has
/// registered stays the parent's.
pub fn follow_forks() {
    static ONCE: Once = Once::new();
    // SAFETY: the handlers are functions of this library.
    ONCE.call_once(|| unsafe {
        libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(in_child));
    });
}

thread_local! {
    /// The guard that the forking thread holds during a fork, so that the child finds consistent data.
    static FORKING: std::cell::Cell<Option<MutexGuard<'static, BTreeMap<u64, Held>>>> = const { std::cell::Cell::new(None) };
}

extern "C" fn before_fork() {
    FORKING.set(Some(held()));
}

extern "C" fn after_fork() {
    drop(FORKING.take());
}

extern "C" fn in_child() {
    if let Some(mut held) = FORKING.take() {
        // These registrations are of the parent's pages.
        pinned().clear();
        for (_, known) in std::mem::take(&mut *held) {
            for placed in known.placed {
                // SAFETY: this is the child's only thread, and its stack was not moved. A store by the parent at this time may or may
                // not be visible, like a store before or after the fork.
                if let Err((placed, _)) = unsafe { placed.lift() } {
                    drop(placed);
                }
            }
            // The device and its chunk belong to the parent.
            std::mem::forget(known.open);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_pinned_while_it_is_registered() {
        assert!(!is_pinned(0..u64::MAX));
        assert_eq!(pin(0x1800..0x2800, || 7), 7);
        assert_eq!(pin(0x9000..0xa000, || 0), 0, "the device has refused it");
        assert!(is_pinned(0x1000..0x2000) && is_pinned(0x2000..0x3000));
        assert!(!is_pinned(0x1000..0x1800) && !is_pinned(0x3000..0x4000) && !is_pinned(0x9000..0xa000));
        assert_eq!(unpin(7, || libc::EBUSY), libc::EBUSY);
        assert!(is_pinned(0x2000..0x3000));
        // The same region is registered again, with another range.
        assert_eq!(pin(0x5000..0x6000, || 7), 7);
        assert!(!is_pinned(0x2000..0x3000) && is_pinned(0x5000..0x6000));
        assert_eq!(unpin(7, || 0), 0);
        assert!(!is_pinned(0..u64::MAX));
    }
}
