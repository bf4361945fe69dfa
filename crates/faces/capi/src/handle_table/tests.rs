use super::*;
use proptest::prelude::*;
use std::sync::Arc;

fn look(table: &HandleTable<u32>, handle: *mut u32) -> Option<u32> {
    // SAFETY: nobody closes it meanwhile.
    unsafe { table.get(handle) }.ok().copied()
}

fn take(table: &HandleTable<u32>, handle: *mut u32) -> Option<u32> {
    // SAFETY: nobody uses it.
    unsafe { table.take(handle) }.ok()
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

#[test]
fn what_is_no_handle_is_an_error_and_is_not_read() {
    let (table, other) = (HandleTable::of("thing"), HandleTable::of("other thing"));
    let (open, foreign) = (table.insert(1), other.insert(2));
    let local = 3;
    let mut garbage: Vec<usize> =
        vec![1, 8, 16, 0xdead_beef, usize::MAX, (&raw const local).addr(), foreign.addr()];
    garbage.extend((0..64).map(|bit| 1 << bit));
    // Each bit of an open handle matters.
    garbage.extend((0..64).map(|bit| open.addr() ^ 1 << bit));
    for address in garbage {
        let handle = ptr::without_provenance_mut(address);
        assert_eq!((look(&table, handle), take(&table, handle)), (None, None), "{address:#x}");
        // SAFETY: nobody changes or uses it.
        unsafe { assert!(table.share(handle).is_err() && table.close(handle).is_err(), "{address:#x}") };
    }
    assert_eq!((take(&table, open), take(&other, foreign)), (Some(1), Some(2)));
}

#[test]
fn more_handles_than_a_chunk_has_slots_are_all_different() {
    let table = HandleTable::of("thing");
    let handles: Vec<_> = (0..5000).map(|n| table.insert(n)).collect();
    assert!(handles.iter().enumerate().all(|(n, &handle)| look(&table, handle) == Some(n as u32)));
    assert!(handles.iter().enumerate().all(|(n, &handle)| take(&table, handle) == Some(n as u32)));
}

#[test]
fn a_value_is_kept_until_its_last_use_and_dropped_once() {
    let (table, value) = (HandleTable::of("thing"), Arc::new(()));
    let handle = table.insert(value.clone());
    // SAFETY: nobody changes it.
    let uses = unsafe { [table.share(handle), table.share(handle)] };
    // SAFETY: nobody uses it by `get`.
    unsafe { assert!(table.close(handle).is_ok() && table.close(handle).is_err()) };
    // SAFETY: nobody changes it.
    assert!(unsafe { table.share(handle) }.is_err());
    for used in uses {
        assert_eq!(Arc::strong_count(&used.ok().expect("an open handle")), 2);
    }
    assert_eq!(Arc::strong_count(&value), 1);
    // The slot is used again.
    assert_eq!(place_of(table.insert(value)), place_of(handle));
}

#[test]
fn a_handle_that_is_closed_while_others_use_it_is_dropped_once() {
    let (table, value) = (HandleTable::of("thing"), Arc::new(()));
    for _ in 0..1000 {
        let address = table.insert(value.clone()).addr();
        let handle = || ptr::without_provenance_mut(address);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    // SAFETY: nobody changes it.
                    let used = unsafe { table.share(handle()) };
                    used.map(|used| assert!(Arc::strong_count(&used) > 1))
                });
            }
            // SAFETY: nobody uses it by `get`.
            scope.spawn(|| unsafe { assert!(table.close(handle()).is_ok()) });
        });
        assert_eq!(Arc::strong_count(&value), 1);
    }
}

/// Values that could be handles: any at all, and odd numbers with places near `base` or address 0.
fn garbage(base: usize) -> impl Strategy<Value = usize> {
    let near =
        (any::<u16>(), any::<bool>(), 0..5000_usize, 0..ALIGN).prop_map(move |(number, near, at, chunk)| {
            let address = if near { base } else { 0 } + at * ALIGN;
            usize::from(number | 1) << NUMBER_AT | address | chunk
        });
    prop_oneof![any::<usize>(), near]
}

fn is_refused(table: &HandleTable<u32>, address: usize) -> bool {
    let handle = ptr::without_provenance_mut(address);
    // SAFETY: nobody changes or uses it.
    let refused = unsafe { table.share(handle).is_err() && table.close(handle).is_err() };
    look(table, handle).is_none() && take(table, handle).is_none() && refused
}

#[test]
fn a_table_that_never_had_a_handle_has_none() {
    let table = HandleTable::of("thing");
    for at in 0..2 * FIRST {
        for chunk in 0..ALIGN {
            let address = (1 << NUMBER_AT) + at * size_of::<Slot<u32>>() + chunk;
            assert!(is_refused(&table, address), "{address:#x}");
        }
    }
    proptest!(|(address in garbage(0))| prop_assert!(is_refused(&table, address)));
}

#[test]
fn only_what_was_handed_out_is_a_handle() {
    let table = HandleTable::of("thing");
    // Two chunks, with open and free slots.
    let mut open: Vec<_> = (0..2000).map(|n| table.insert(n)).collect();
    for handle in open.split_off(1000) {
        take(&table, handle).expect("an open handle");
    }
    let open: Vec<_> = open.into_iter().map(|handle| handle.addr()).collect();
    proptest!(|(address in garbage(place_of(ptr::without_provenance::<u32>(open[0]))))| {
        prop_assert!(open.contains(&address) || is_refused(&table, address));
    });
}

/// Forks, and fails unless `child` returns in the child. A child that hangs is ended by a signal.
fn in_a_child(child: impl FnOnce()) {
    // SAFETY: the child only calls the table, which other threads may have been using during the fork, and ends.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "{}", std::io::Error::last_os_error());
    if pid == 0 {
        // SAFETY: they only concern this process.
        unsafe { libc::alarm(30) };
        child();
        // SAFETY: as above.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: it is a child of this process, and `status` a number of this function.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(status, 0, "the child hung or failed");
}

#[test]
fn the_child_of_a_fork_can_open_and_close_whatever_other_threads_did() {
    let (table, done) = (HandleTable::of("thing"), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let handle = table.insert(1);
                    assert_eq!(take(&table, handle), Some(1));
                }
            });
        }
        // Ends the threads also if a child fails.
        let forks = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for _ in 0..200 {
                in_a_child(|| {
                    let handle = table.insert(2);
                    // SAFETY: nobody uses it.
                    if unsafe { table.close(handle) }.is_err() {
                        std::process::abort();
                    }
                });
            }
        }));
        done.store(true, Ordering::Relaxed);
        forks.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

#[test]
fn threads_that_open_and_close_at_the_same_time_never_have_the_same_slot() {
    let table = HandleTable::of("thing");
    std::thread::scope(|scope| {
        for n in 0..4 {
            let table = &table;
            scope.spawn(move || {
                for _ in 0..50 {
                    // Together more than the first chunk has, so that they also make chunks at the same time.
                    let handles: Vec<_> = (0..400).map(|at| table.insert(n * 400 + at)).collect();
                    for (handle, at) in handles.into_iter().zip(0..) {
                        assert_eq!(
                            (look(table, handle), take(table, handle)),
                            (Some(n * 400 + at), Some(n * 400 + at))
                        );
                    }
                }
            });
        }
    });
    // What is freed is used again.
    assert!(table.used.load(Ordering::Relaxed) <= 1600);
}
