//! Loom models of the index, with a tree of four pages: two nodes of two parts below a root.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
pub(super) use loom::sync::atomic;
use loom::thread;
use std::ptr;

#[path = "index.rs"]
mod index;

const BITS: u32 = 1;
const LEVELS: u32 = 2;
const PAGE_BITS: u32 = 12;
const PAGE: usize = 1 << PAGE_BITS;

/// A value that notices if a copy of it is made before it exists, or while it is dropped.
struct Canary(usize, UnsafeCell<()>);

impl Canary {
    fn new(n: usize) -> Self {
        let canary = Self(n, UnsafeCell::new(()));
        canary.1.with_mut(|_| ());
        canary
    }
}

impl Clone for Canary {
    fn clone(&self) -> Self {
        self.1.with(|_| ());
        Self::new(self.0)
    }
}

impl Drop for Canary {
    fn drop(&mut self) {
        self.1.with_mut(|_| ());
    }
}

// SAFETY: the cell contains nothing; loom is asked to report threads that access it at the same time.
unsafe impl Sync for Canary {}
// SAFETY: it consists of a number and of a cell that contains nothing, so any thread may use and drop it.
unsafe impl Send for Canary {}

type Index = index::Index<Canary>;

fn new() -> Arc<Index> {
    Arc::new(Index {
        root: atomic::AtomicPtr::new(ptr::null_mut()),
        readers: atomic::AtomicUsize::new(0),
        retired: atomic::AtomicPtr::new(ptr::null_mut()),
    })
}

fn found(index: &Index, page: usize) -> Option<usize> {
    index.find(page * PAGE + 5).map(|range| range.value.0)
}

/// Explores `model` with at most three preemptions, or the number in LOOM_MAX_PREEMPTIONS.
fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(3));
    builder.check(model);
}

#[test]
fn a_range_is_found_while_its_neighbours_come_and_go() {
    explore(|| {
        let index = new();
        let neighbour = index.clone();
        let thread = thread::spawn(move || {
            let entered = neighbour.enter(PAGE, 2 * PAGE, Canary::new(1)).unwrap();
            assert_eq!((found(&neighbour, 1), found(&neighbour, 2)), (Some(1), Some(1)));
            neighbour.remove(entered);
            assert_eq!((found(&neighbour, 1), found(&neighbour, 2)), (None, None));
        });
        let entered = index.enter(0, PAGE, Canary::new(2)).unwrap();
        assert_eq!(found(&index, 0), Some(2));
        index.remove(entered);
        assert_eq!(found(&index, 0), None);
        thread.join().unwrap();
    });
}

#[test]
fn a_range_is_freed_after_the_last_look() {
    explore(|| {
        let index = new();
        let entered = index.enter(0, PAGE, Canary::new(1)).unwrap();
        let reader = index.clone();
        let thread = thread::spawn(move || {
            let found = found(&reader, 0);
            assert!(found.is_none_or(|n| n == 1), "{found:?}");
        });
        index.remove(entered);
        thread.join().unwrap();
        assert_eq!(found(&index, 0), None);
    });
}

#[test]
fn addresses_are_used_again() {
    explore(|| {
        let index = new();
        let entered = index.enter(0, 2 * PAGE, Canary::new(1)).unwrap();
        let reader = index.clone();
        let thread = thread::spawn(move || {
            let found = found(&reader, 1);
            assert!(found.is_none_or(|n| n == 1 || n == 2), "{found:?}");
        });
        index.remove(entered);
        let again = index.enter(PAGE, PAGE, Canary::new(2)).unwrap();
        assert_eq!((found(&index, 0), found(&index, 1)), (None, Some(2)));
        index.remove(again);
        thread.join().unwrap();
    });
}

#[test]
fn a_range_is_whole_when_it_is_found() {
    explore(|| {
        let index = new();
        // With this range, the nodes exist already, and do not order what is entered below.
        let neighbour = index.enter(0, PAGE, Canary::new(1)).unwrap();
        let reader = index.clone();
        let thread = thread::spawn(move || {
            let found = found(&reader, 1);
            assert!(found.is_none_or(|n| n == 2), "{found:?}");
        });
        let entered = index.enter(PAGE, PAGE, Canary::new(2)).unwrap();
        thread.join().unwrap();
        index.remove(entered);
        index.remove(neighbour);
    });
}

#[test]
fn an_entry_that_could_not_be_freed_is_freed_later() {
    explore(|| {
        let index = new();
        let second = index.enter(PAGE, PAGE, Canary::new(2)).unwrap();
        let reader = index.clone();
        let thread = thread::spawn(move || _ = found(&reader, 1));
        let remover = index.clone();
        let other = thread::spawn(move || {
            let first = remover.enter(0, PAGE, Canary::new(1)).unwrap();
            remover.remove(first);
        });
        index.remove(second);
        other.join().unwrap();
        thread.join().unwrap();
    });
}
