//! I/O maps: memory of one side to which the other side writes.
//!
//! Both sides of a connection with I/O maps have an RC queue pair, and a table of what the other side has mapped.
//! [`riomap`](super::calls) writes an entry into the peer's table by RDMA WRITE. `riowrite` looks up an offset in this side's table, and
//! writes to the memory that the entry names. Both complete during the call, because the CPU that posts executes the request. So the
//! data is there before anything that is sent on the stream later. Any member of the segment can write to a table, so an entry is not
//! trusted: the queue pair checks the key and the bounds of each write.
#![allow(unsafe_code)] // Maps pages for tables, and accesses their words.

use super::direction::locked;
use crate::context::{Open, next_domain};
use crate::memory::register;
use crate::program::ProcessMemory;
use ginnel_layout::verbs::{Access, Key, Kind, QpNumber, QpState};
use ginnel_shmem::Mapping;
use ginnel_verbs::cm::hello::Offer;
use ginnel_verbs::completion_queue::CompletionQueue;
use ginnel_verbs::queue_pair::{Capacity, Change, QueuePair, QueuePairOptions};
use ginnel_verbs::receive::Shape;
use ginnel_verbs::work::{Element, Operation, Status, Work};
use ginnel_verbs_abi::{IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_WRITE};
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use std::{ptr, thread};

const PAGE: usize = 4096;
/// Number of pages that are requested from the kernel at a time.
const PAGES: usize = 16;
/// Number of entries of a table.
pub const ENTRIES: usize = PAGE / size_of::<Entry>();
/// Maximum length of one write, in bytes.
const MOST: usize = 1 << 30;
/// How long a peer may take to become ready to receive. The accepting side is ready before the connecting side learns of it. The
/// connecting side becomes ready when it reads the answer, in `rconnect`, or in `rpoll` after a non-blocking call.
const PATIENCE: Duration = Duration::from_secs(5);
/// Number of times that a waiting thread polls and yields, before it polls at intervals.
const LOOKS: u32 = 64;
const INTERVAL: Duration = Duration::from_micros(200);

/// An entry of a table: a range of mapped memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
struct Entry {
    offset: u64,
    length: u64,
    address: u64,
    /// The key of the region, and the bit `VALID` if the entry is in use. This word is written last.
    word: u64,
}

const VALID: u64 = 1 << 32;

/// A page in the segment that contains a table. The page is never unmapped, and is reused.
struct Table {
    open: Arc<Open>,
    page: *mut AtomicU64,
}

// SAFETY: its words are atomic.
unsafe impl Send for Table {}
// SAFETY: threads that share a table access its page, which is never unmapped, by atomic words only.
unsafe impl Sync for Table {}

/// Unused pages, each with the address of the segment that it belongs to.
static FREE: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

/// A guard that keeps other threads from taking such pages.
pub type Held = MutexGuard<'static, Vec<(usize, usize)>>;

/// Waits until no other thread is taking a page.
pub fn hold() -> Held {
    locked(&FREE)
}

impl Table {
    fn new(open: &Arc<Open>) -> Result<Self, c_int> {
        let owner = Arc::as_ptr(open).addr();
        let mut free = locked(&FREE);
        if !free.iter().any(|(known, _)| *known == owner) {
            // SAFETY: these are new pages, which no one else uses.
            let pages = unsafe {
                let (rights, kind) =
                    (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
                libc::mmap(ptr::null_mut(), PAGES * PAGE, rights, kind, -1, 0)
            };
            if pages == libc::MAP_FAILED {
                return Err(libc::ENOMEM);
            }
            free.extend((0..PAGES).map(|n| (owner, pages.expose_provenance() + n * PAGE)));
        }
        let at = free.iter().position(|(known, _)| *known == owner).ok_or(libc::ENOMEM)?;
        let table =
            Self { open: open.clone(), page: ptr::with_exposed_provenance_mut(free.swap_remove(at).1) };
        drop(free);
        (0..PAGE / 8).for_each(|at| table.word(at).store(0, Ordering::Relaxed));
        Ok(table)
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at < PAGE / 8);
        // SAFETY: the word belongs to the page, which is never unmapped. Others change it by whole words only, apart from members of the
        // segment, which may change all of it anyway.
        unsafe { &*self.page.add(at) }
    }

    /// Returns a consistent copy of an entry, if it is in use.
    fn entry(&self, index: usize) -> Option<Entry> {
        let at = index * (size_of::<Entry>() / 8);
        // ORDER copy.last: the last word is loaded before the words in front of it. Pairs with: the peer's
        // `SharedMemory::write_release`.
        let word = self.word(at + 3).load(Ordering::Acquire);
        if word & VALID == 0 {
            return None;
        }
        let [offset, length, address] = [0, 1, 2].map(|i| self.word(at + i).load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        let is_same = self.word(at + 3).load(Ordering::Relaxed) == word;
        is_same.then_some(Entry { offset, length, address, word })
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        locked(&FREE).push((Arc::as_ptr(&self.open).addr(), self.page.addr()));
    }
}

/// Memory of this side that the other side may write to.
struct Mapped {
    address: u64,
    len: usize,
    key: Key,
    /// Index of its entry in the other side's table.
    slot: Option<usize>,
}

/// This side's state of the I/O maps of a connection.
pub struct Maps {
    open: Arc<Open>,
    pair: Arc<QueuePair<Mapping>>,
    completions: Arc<CompletionQueue<Mapping>>,
    domain: u32,
    /// The key of a region with all of the program's memory, from which this side only reads.
    all: Option<Key>,
    /// The table, and the key of its region.
    table: Option<(Table, Key)>,
    theirs: Offer,
    mapped: Mutex<Vec<Mapped>>,
    /// Held during a request, so that its completion can be identified.
    turn: Mutex<()>,
}

fn code(error: ginnel_verbs::device::DeviceError) -> c_int {
    crate::context::errno(&error)
}

impl Maps {
    /// Creates a queue pair and a table on a device.
    pub fn new(open: &Arc<Open>) -> Result<Self, c_int> {
        let domain = next_domain(open);
        let completions = Arc::new(CompletionQueue::new(4));
        let pair = open.device.create_queue_pair(QueuePairOptions {
            kind: Kind::RC,
            domain,
            capacity: Capacity {
                sends: 4,
                elements: 1,
                inline: 64,
                receives: Shape { entries: 1, elements: 1 },
            },
            shared: None,
            completes: (completions.clone(), completions.clone()),
            tell: Box::new(|_| {}),
        });
        let pair = pair.map_err(code)?;
        // If a later step fails, `drop` undoes the earlier ones.
        let mut maps = Self {
            open: open.clone(),
            pair,
            completions,
            domain,
            all: None,
            table: None,
            theirs: Offer::default(),
            mapped: Mutex::default(),
            turn: Mutex::default(),
        };
        maps.all = Some(register(open, domain, 0, usize::MAX, 0)?);
        let table = Table::new(open)?;
        let access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
        let key = register(open, domain, table.page.addr() as u64, PAGE, access)?;
        maps.table = Some((table, key));
        let access = Some(Access(Access::LOCAL_WRITE | Access::REMOTE_WRITE));
        let change = Change { access, ..Change::default() };
        maps.pair.modify(QpState::INIT, change).map_err(|_| libc::EIO)?;
        Ok(maps)
    }

    /// Returns what the other side needs to know.
    pub fn offer(&self) -> Option<Offer> {
        let (table, key) = self.table.as_ref()?;
        Some(Offer {
            queue_pair: self.pair.number().0,
            table: table.page.addr() as u64,
            key: key.0,
            entries: ENTRIES as u32,
        })
    }

    /// Connects to what the other side has offered. `endpoint` is the other side.
    pub fn connect(&mut self, theirs: Offer, endpoint: u32) -> Result<(), c_int> {
        let number = QpNumber(theirs.queue_pair);
        if theirs.queue_pair & !QpNumber::MASK != 0 || number.endpoint() != endpoint {
            return Err(libc::EPROTO);
        }
        let entries = theirs.entries.min(ENTRIES as u32);
        self.theirs = Offer { entries, ..theirs };
        let receive = Change { peer: Some(number), ..Change::default() };
        let patience = Some(Some(PATIENCE));
        let send = Change { timeout: patience, patience, ..Change::default() };
        self.pair.modify(QpState::RTR, receive).map_err(|_| libc::EIO)?;
        self.pair.modify(QpState::RTS, send).map_err(|_| libc::EIO)
    }

    /// Writes data of this process to memory of the other side, and waits until it has been written.
    fn write(&self, from: u64, len: usize, address: u64, key: Key) -> Result<(), c_int> {
        let key_of_all = self.all.ok_or(libc::EOPNOTSUPP)?;
        let elements = [Element { address: from, length: len as u32, key: key_of_all.0 }];
        let operation = Operation::Write { address, key, immediate: None, solicited: false };
        let work = Work {
            id: 0,
            operation,
            datagram: None,
            elements: &elements,
            is_inline: false,
            is_signaled: true,
        };
        let _turn = locked(&self.turn);
        self.pair.post(&ProcessMemory, &work).map_err(|_| libc::EIO)?;
        let mut looks = 0;
        // The limit corresponds to a rate of ten megabytes per second.
        let end = Instant::now() + 2 * PATIENCE + Duration::from_nanos(100 * len as u64);
        let status = loop {
            let mut status = None;
            self.completions.poll(&ProcessMemory, 1, |completed| status = Some(completed.status));
            if let Some(status) = status {
                break status;
            }
            looks += 1;
            // Usually the request was complete when it was posted. Otherwise the queue pair's timeouts end it; or this limit does, if
            // the memory is not in the segment and its owner does not answer.
            if looks > LOOKS && Instant::now() >= end {
                let _ = self.pair.modify(QpState::ERR, Change::default());
            }
            if looks < LOOKS { thread::yield_now() } else { thread::sleep(INTERVAL) }
        };
        match status {
            Status::SUCCESS => Ok(()),
            Status::REM_ACCESS_ERR | Status::LOC_PROT_ERR => Err(libc::EFAULT),
            Status::RETRY_EXC_ERR | Status::WR_FLUSH_ERR => Err(libc::ECONNRESET),
            _ => Err(libc::EIO),
        }
    }

    /// Writes an entry into the other side's table.
    fn tell(&self, slot: usize, entry: &Entry) -> Result<(), c_int> {
        let at = (slot * size_of::<Entry>()) as u64;
        let address = self.theirs.table.checked_add(at).ok_or(libc::EFAULT)?;
        let from = ptr::from_ref(entry).expose_provenance() as u64;
        self.write(from, size_of::<Entry>(), address, Key(self.theirs.key))
    }

    /// Maps memory of the program, so that the other side can write to it (`is_shared`) or not. Returns the offset at which it is
    /// mapped.
    pub fn map(&self, address: u64, len: usize, is_shared: bool, offset: i64) -> Result<i64, c_int> {
        let offset = if offset == -1 { address.cast_signed() } else { offset };
        if len == 0 || offset < 0 || offset.checked_add_unsigned(len as u64).is_none() {
            return Err(libc::EINVAL);
        }
        let mut mapped = locked(&self.mapped);
        let is_free = |slot: &usize| !mapped.iter().any(|known| known.slot == Some(*slot));
        let slot = match is_shared {
            true => Some((0..self.theirs.entries as usize).find(is_free).ok_or(libc::ENOMEM)?),
            false => None,
        };
        let access = if is_shared { IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE } else { 0 };
        let key = register(&self.open, self.domain, address, len, access)?;
        if let Some(slot) = slot {
            let offset = offset.cast_unsigned();
            let entry = Entry { offset, length: len as u64, address, word: VALID | u64::from(key.0) };
            if let Err(error) = self.tell(slot, &entry) {
                let _ = self.open.device.deregister(key);
                return Err(error);
            }
        }
        mapped.push(Mapped { address, len, key, slot });
        Ok(offset)
    }

    /// Removes a map.
    pub fn unmap(&self, address: u64, len: usize) -> Result<(), c_int> {
        let mut mapped = locked(&self.mapped);
        let is_it = |known: &Mapped| (known.address, known.len) == (address, len);
        let at = mapped.iter().position(is_it).ok_or(libc::EINVAL)?;
        let Mapped { key, slot, .. } = mapped.swap_remove(at);
        if let Some(slot) = slot {
            // If the peer has gone, the failure does not matter.
            let _ = self.tell(slot, &Entry::default());
        }
        self.open.device.deregister(key).map(drop).map_err(code)
    }

    /// Writes to memory that the other side has mapped. Returns the number of bytes, which ends with the map that contains the offset.
    pub fn write_at(&self, from: u64, len: usize, offset: i64) -> Result<usize, c_int> {
        let offset = u64::try_from(offset).map_err(|_| libc::EINVAL)?;
        let (table, _) = self.table.as_ref().ok_or(libc::EOPNOTSUPP)?;
        let holds = |entry: &Entry| offset.checked_sub(entry.offset).is_some_and(|at| at < entry.length);
        let found = (0..ENTRIES).filter_map(|index| table.entry(index)).find(holds);
        let entry = found.ok_or(libc::EFAULT)?;
        let at = offset - entry.offset;
        let room = usize::try_from(entry.length - at).unwrap_or(usize::MAX);
        let len = len.min(room).min(MOST);
        if len > 0 {
            let address = entry.address.checked_add(at).ok_or(libc::EFAULT)?;
            self.write(from, len, address, Key(entry.word as u32))?;
        }
        Ok(len)
    }
}

impl Drop for Maps {
    fn drop(&mut self) {
        self.open.device.destroy_queue_pair(&self.pair);
        let mapped = std::mem::take(&mut *locked(&self.mapped));
        mapped.into_iter().for_each(|known| drop(self.open.device.deregister(known.key)));
        if let Some(all) = self.all {
            let _ = self.open.device.deregister(all);
        }
        if let Some((table, key)) = self.table.take()
            && self.open.device.deregister(key).is_err()
        {
            // A peer has stopped in the middle of a write to the page, so the page is not reused.
            std::mem::forget(table);
        }
    }
}
