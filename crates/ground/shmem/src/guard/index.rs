//! The index in which a signal handler finds the watched range that contains an address.
//!
//! It is built like the processor's page tables. A node divides its range of addresses into `FAN` parts. A watched range that
//! covers a whole part is entered there, and the rest of it at both ends goes into the nodes below. Thus a lookup is one walk
//! down, of `LEVELS` loads of each kind, however many ranges there are; it takes no lock, never waits for a writer and never
//! starts again. A range of any length takes a few entries for each level. Ranges do not usually overlap, so writers do not
//! meet either.
//!
//! Nodes are never freed. They amount to 8 KiB for each 2 MiB of addresses within which a range has ever begun or ended, and
//! the kernel hands out the same addresses again. A range is freed when it is removed or, if a lookup is in progress at that
//! moment, together with the next one that is removed.

// The models compile this file with other atomics and a smaller tree.
use super::{BITS, LEVELS, PAGE_BITS, atomic};
use atomic::{AtomicPtr, AtomicUsize, Ordering, fence};
use std::{io, ptr};

const FAN: usize = 1 << BITS;

/// All fields are null or 0 at first.
pub(crate) struct Index<T> {
    pub root: AtomicPtr<Node<T>>,
    /// Number of lookups in progress.
    pub readers: AtomicUsize,
    /// List of the entries that were removed during a lookup.
    pub retired: AtomicPtr<Entry<T>>,
}

pub(crate) struct Node<T> {
    /// The ranges that cover a whole part.
    ranges: [AtomicPtr<Entry<T>>; FAN],
    /// Nodes for the parts that no range covers completely.
    below: [AtomicPtr<Node<T>>; FAN],
}

/// Content of the index, which never changes.
#[derive(Clone)]
pub(crate) struct Range<T> {
    pub start: usize,
    pub len: usize,
    pub value: T,
}

pub(crate) struct Entry<T> {
    range: Range<T>,
    /// The link of a list of retired entries. Only the owner of the list uses it.
    next: *mut Entry<T>,
}

/// A range that is in the index. It stays there until it is given to [`Index::remove`].
pub(crate) struct Entered<T>(*mut Entry<T>);

// SAFETY: the pointer refers to an entry that any thread may read and drop.
unsafe impl<T: Send + Sync> Send for Entered<T> {}
// SAFETY: threads that share an `Entered` can only read the entry through it.
unsafe impl<T: Send + Sync> Sync for Entered<T> {}

impl<T> Range<T> {
    fn contains(&self, address: usize) -> bool {
        address.wrapping_sub(self.start) < self.len
    }

    /// Returns the number of the first page, and of the one after the last.
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
    /// have `FAN` to the power of `level` pages.
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

/// Returns the node to which a place leads. Makes it if there is none.
fn existing_or_new<T>(place: &AtomicPtr<Node<T>>) -> &Node<T> {
    // ORDER index.node: the node's contents are visible before its address. Pairs with: `node`.
    if let Some(node) = node(place) {
        return node;
    }
    let new = Box::into_raw(Box::new(Node::new()));
    let node = match place.compare_exchange(ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => new,
        Err(other) => {
            // SAFETY: made above, and not visible to any other thread.
            drop(unsafe { Box::from_raw(new) });
            other
        }
    };
    // SAFETY: nodes are boxes that are never freed.
    unsafe { &*node }
}

/// Returns the node to which a place leads, if there is one.
fn node<T>(place: &AtomicPtr<Node<T>>) -> Option<&Node<T>> {
    // ORDER index.node: a node's address is loaded before its contents. Pairs with: `existing_or_new`.
    let node = place.load(Ordering::Acquire);
    // SAFETY: null, or a box that is never freed.
    unsafe { node.as_ref() }
}

impl<T: Clone> Index<T> {
    /// Enters a range. If it overlaps with another one, a lookup finds one of the two.
    pub fn enter(&self, start: usize, len: usize, value: T) -> io::Result<Entered<T>> {
        let range = Range { start, len, value };
        let Some((first, end)) = range.pages() else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a valid range of addresses"));
        };
        let entry = Box::into_raw(Box::new(Entry { range, next: ptr::null_mut() }));
        // ORDER index.range: the range is visible before its address. Pairs with: `find`.
        let enter = &mut |place: &AtomicPtr<Entry<T>>| place.store(entry, Ordering::Release);
        existing_or_new(&self.root).visit(LEVELS - 1, first, end, enter);
        Ok(Entered(entry))
    }

    /// Removes a range.
    pub fn remove(&self, entered: Entered<T>) {
        let Entered(entry) = entered;
        // SAFETY: it is freed only below.
        let pages = unsafe { &(*entry).range }.pages();
        if let (Some((first, end)), Some(root)) = (pages, node(&self.root)) {
            root.visit(LEVELS - 1, first, end, &mut |place| {
                // The place stays if another range has been entered in it.
                let _ = place.compare_exchange(entry, ptr::null_mut(), Ordering::Relaxed, Ordering::Relaxed);
            });
        }
        // ORDER index.retired: the places of these entries were emptied before the entries came here. Pairs with: `retire`.
        let others = self.retired.swap(ptr::null_mut(), Ordering::Acquire);
        // SAFETY: only the thread that has removed the entry changes this.
        unsafe { (*entry).next = others };
        // ORDER index.readers: the places are empty before the number of readers is loaded. So either a reader finds them
        // empty, or it is counted here. Pairs with: `find`.
        fence(Ordering::SeqCst);
        // ORDER index.done: a reader's last use of a range comes before the range is freed. Pairs with: `find`.
        if self.readers.load(Ordering::Acquire) != 0 {
            self.retire(entry);
            return;
        }
        let mut next = entry;
        while !next.is_null() {
            // SAFETY: made by `enter`. It cannot be found any more, and all readers that had found it are done.
            let entry = unsafe { Box::from_raw(next) };
            next = entry.next;
        }
    }

    /// Keeps a list of entries until a later removal.
    fn retire(&self, list: *mut Entry<T>) {
        let mut last = list;
        // SAFETY: the list belongs to the caller, which has removed all its entries from the index, and from `retired`.
        unsafe {
            while !(*last).next.is_null() {
                last = (*last).next;
            }
        }
        let mut behind = self.retired.load(Ordering::Relaxed);
        loop {
            // SAFETY: the list belongs to the caller, and so its last entry does, until it is in `retired`. Readers do not use
            // this field.
            unsafe { (&raw mut (*last).next).write(behind) };
            // ORDER index.retired: see `remove`.
            match self.retired.compare_exchange(behind, list, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => behind = now,
            }
        }
    }

    /// Returns a copy of the range that contains an address. A signal handler may call this; therefore `T`'s clone must be
    /// safe there.
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
            // ORDER index.range: a range's address is loaded before the range. Pairs with: `enter`.
            let entry = here.ranges[n].load(Ordering::Acquire);
            if !entry.is_null() {
                // SAFETY: the entry is not freed while this reader is counted; `next`, which readers must not use, is not
                // accessed.
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
