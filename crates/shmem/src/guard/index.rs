//! Which watched range an address lies in: an index that a signal handler can read.
//!
//! It is built like the processor's page tables. A node divides its run of addresses into `FAN` parts; a range that covers a whole
//! part is entered there, and what is left of it at both ends goes into the nodes below. So a lookup is one walk down, of
//! `LEVELS` loads of each kind, however many ranges there are; it takes no lock, never waits for a writer and never starts again. A
//! range of any length takes a few entries for each level. Ranges do not usually overlap, so writers do not meet either.
//!
//! Nodes are never freed: they amount to 8 KiB for each 2 MiB of addresses in which a range has ever begun or ended within these
//! 2 MiB, and the kernel hands out the same addresses again. A range is freed when it is taken out, or, if somebody is looking
//! something up at that moment, with the next that is taken out.

// Models run this file with other atomics and a smaller tree.
use super::{BITS, LEVELS, PAGE_BITS, atomic};
use atomic::{AtomicPtr, AtomicUsize, Ordering, fence};
use std::io;
use std::ptr;

const FAN: usize = 1 << BITS;

/// Null and 0 to begin with.
pub(crate) struct Index<T> {
    pub root: AtomicPtr<Node<T>>,
    /// How many lookups are under way.
    pub readers: AtomicUsize,
    /// Taken out while somebody was looking; a list.
    pub retired: AtomicPtr<Entry<T>>,
}

pub(crate) struct Node<T> {
    /// The ranges that cover a whole part.
    ranges: [AtomicPtr<Entry<T>>; FAN],
    /// What is known of the others.
    below: [AtomicPtr<Node<T>>; FAN],
}

/// What lies in the index. Nothing of it changes.
#[derive(Clone)]
pub(crate) struct Range<T> {
    pub start: usize,
    pub len: usize,
    pub value: T,
}

pub(crate) struct Entry<T> {
    range: Range<T>,
    /// For whoever has the list of the retired.
    next: *mut Entry<T>,
}

/// A range that is in the index. It stays there until it is given to [`Index::remove`].
pub(crate) struct Entered<T>(*mut Entry<T>);

// SAFETY: the pointer leads to a range that any thread may read and drop.
unsafe impl<T: Send + Sync> Send for Entered<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Entered<T> {}

impl<T> Range<T> {
    fn contains(&self, address: usize) -> bool {
        address.wrapping_sub(self.start) < self.len
    }

    /// The numbers of its first page and of the one behind its last.
    fn pages(&self) -> Option<(usize, usize)> {
        let last = self.start.checked_add(self.len.checked_sub(1)?)?;
        let (first, end) = (self.start >> PAGE_BITS, (last >> PAGE_BITS) + 1);
        (end <= 1 << (BITS * LEVELS)).then_some((first, end))
    }
}

impl<T> Node<T> {
    fn new() -> Self {
        let ranges = std::array::from_fn(|_| AtomicPtr::new(ptr::null_mut()));
        Self { ranges, below: std::array::from_fn(|_| AtomicPtr::new(ptr::null_mut())) }
    }

    /// Calls `f` for the places of the pages from `first` to before `end`, counted from the start of this node, whose parts
    /// are of `FAN` to the power of `level` pages.
    fn visit(&self, level: u32, first: usize, end: usize, f: &mut impl FnMut(&AtomicPtr<Entry<T>>)) {
        let part = 1 << (BITS * level);
        for n in first / part..end.div_ceil(part) {
            let start = n * part;
            let (from, to) = (first.max(start) - start, end.min(start + part) - start);
            if to - from == part {
                f(&self.ranges[n]);
            } else {
                existing_or_new(&self.below[n]).visit(level - 1, from, to, f);
            }
        }
    }
}

/// The node that a place leads to; if there is none, one is put there.
fn existing_or_new<T>(place: &AtomicPtr<Node<T>>) -> &Node<T> {
    // ORDER index.node: the node's contents before its address. Pairs with: `node`.
    if let Some(node) = node(place) {
        return node;
    }
    let new = Box::into_raw(Box::new(Node::new()));
    let node = match place.compare_exchange(ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => new,
        Err(other) => {
            // SAFETY: made above, and seen by nobody.
            drop(unsafe { Box::from_raw(new) });
            other
        }
    };
    // SAFETY: nodes are boxes that are never freed.
    unsafe { &*node }
}

/// The node that a place leads to.
fn node<T>(place: &AtomicPtr<Node<T>>) -> Option<&Node<T>> {
    // ORDER index.node: a node's address before its contents. Pairs with: `existing_or_new`.
    let node = place.load(Ordering::Acquire);
    // SAFETY: null, or a box that is never freed.
    unsafe { node.as_ref() }
}

impl<T: Clone> Index<T> {
    /// Enters a range. Where it overlaps with one that is there already, one of the two is found.
    pub fn enter(&self, start: usize, len: usize, value: T) -> io::Result<Entered<T>> {
        let range = Range { start, len, value };
        let Some((first, end)) = range.pages() else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "no range of addresses to watch"));
        };
        let entry = Box::into_raw(Box::new(Entry { range, next: ptr::null_mut() }));
        // ORDER index.range: the range before its address. Pairs with: `find`.
        let enter = &mut |place: &AtomicPtr<Entry<T>>| place.store(entry, Ordering::Release);
        existing_or_new(&self.root).visit(LEVELS - 1, first, end, enter);
        Ok(Entered(entry))
    }

    /// Takes a range out again.
    pub fn remove(&self, entered: Entered<T>) {
        let Entered(entry) = entered;
        // SAFETY: it is freed below only.
        let pages = unsafe { &(*entry).range }.pages();
        if let (Some((first, end)), Some(root)) = (pages, node(&self.root)) {
            root.visit(LEVELS - 1, first, end, &mut |place| {
                // Not if another range has been put in its place.
                let _ = place.compare_exchange(entry, ptr::null_mut(), Ordering::Relaxed, Ordering::Relaxed);
            });
        }
        // ORDER index.retired: the places of those were empty before they came here. Pairs with: `retire`.
        let others = self.retired.swap(ptr::null_mut(), Ordering::Acquire);
        // SAFETY: nobody changes this but the one who took it out.
        unsafe { (*entry).next = others };
        // ORDER index.readers: the places are empty before the count of readers is looked at. So either a reader finds them
        // empty, or it is counted here. Pairs with: `find`.
        fence(Ordering::SeqCst);
        // ORDER index.done: what a reader has done with a range before it is freed. Pairs with: `find`.
        if self.readers.load(Ordering::Acquire) != 0 {
            self.retire(entry);
            return;
        }
        let mut next = entry;
        while !next.is_null() {
            // SAFETY: made by `enter`; nobody can find it any more, and whoever had found it is done.
            let entry = unsafe { Box::from_raw(next) };
            next = entry.next;
        }
    }

    /// Keeps a list until later.
    fn retire(&self, list: *mut Entry<T>) {
        let mut last = list;
        // SAFETY: the list is the caller's: it has taken all of them out of the index, and out of `retired`.
        unsafe {
            while !(*last).next.is_null() {
                last = (*last).next;
            }
        }
        let mut behind = self.retired.load(Ordering::Relaxed);
        loop {
            // SAFETY: as above, until it is in `retired`. Readers do not look at this.
            unsafe { (&raw mut (*last).next).write(behind) };
            // ORDER index.retired: see `remove`.
            match self.retired.compare_exchange(behind, list, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => behind = now,
            }
        }
    }

    /// A copy of the range that an address lies in. To be called from a signal handler: `T`'s clone must be fit for that.
    pub fn find(&self, address: usize) -> Option<Range<T>> {
        self.readers.fetch_add(1, Ordering::Relaxed);
        // ORDER index.readers: this reader is counted before it looks. Pairs with: `remove`.
        fence(Ordering::SeqCst);
        let mut found = None;
        let page = address >> PAGE_BITS;
        let mut next = if page >> (BITS * LEVELS) == 0 { node(&self.root) } else { None };
        for level in (0..LEVELS).rev() {
            let Some(here) = next else { break };
            let n = (page >> (BITS * level)) % FAN;
            // ORDER index.range: a range's address before the range. Pairs with: `enter`.
            let entry = here.ranges[n].load(Ordering::Acquire);
            if !entry.is_null() {
                // SAFETY: an entry that is not freed while this reader is counted; `next`, which is not for readers, is left out.
                let range = unsafe { &(*entry).range };
                if range.contains(address) {
                    found = Some(range.clone());
                }
            }
            next = node(&here.below[n]);
        }
        // ORDER index.done: see `remove`.
        self.readers.fetch_sub(1, Ordering::Release);
        found
    }
}
