//! I/O maps: memory of one side into which the other one writes.
//!
//! Both sides of a connection with I/O maps have an RC queue pair and a table of what the other side has mapped: [`riomap`](super::calls) writes
//! an entry into the peer's table by RDMA WRITE, and riowrite looks there for an offset, and writes to where the entry says. Both
//! happen in the call, as the CPU that posts does the work; so what was written is there before what the stream carries later. Anybody
//! in the segment can write to a table, so an entry is a wish, which the queue pair's checks of keys and bounds follow up.
#![allow(unsafe_code)] // Pages for tables, and the words in them.

use super::line::locked;
use crate::context::{Open, next_domain};
use crate::memory::register;
use crate::program::Process;
use ginnel_layout::verbs::{Access, Key, Kind, QpNumber, QpState};
use ginnel_shmem::Mapping;
use ginnel_verbs::cm::hello::Offer;
use ginnel_verbs::completion_queue::CompletionQueue;
use ginnel_verbs::queue_pair::{Capacity, Change, QueuePair, Wanted};
use ginnel_verbs::receive::Shape;
use ginnel_verbs::work::{Element, Operation, Status, Work};
use ginnel_verbs_abi::{IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_WRITE};
use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

const PAGE: usize = 4096;
/// Pages that are taken from the kernel at once.
const PAGES: usize = 16;
/// Entries of a table.
pub const ENTRIES: usize = PAGE / size_of::<Entry>();
/// The most bytes of one write.
const MOST: usize = 1 << 30;
/// How long a peer may take to be ready to receive. The side that accepts is ready before the other one knows of it; that one is once it
/// looks for the answer, which it does in rconnect, or in rpoll after a call that did not wait.
const PATIENCE: Duration = Duration::from_secs(5);
/// Looks, each followed by a turn for other threads, before a request that has to wait is looked for at intervals.
const LOOKS: u32 = 64;
const INTERVAL: Duration = Duration::from_micros(200);

/// What is mapped, as words in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
struct Entry {
    offset: u64,
    length: u64,
    address: u64,
    /// The key of the region, and a bit that says that there is something. The last word is the last to be written.
    word: u64,
}

const VALID: u64 = 1 << 32;

/// A page that lies in the segment, for as long as the process lives: it is used again.
struct Table {
    open: Arc<Open>,
    page: *mut AtomicU64,
}

// SAFETY: its words are atomic.
unsafe impl Send for Table {}
// SAFETY: as above.
unsafe impl Sync for Table {}

/// Pages that nobody uses, and to which segment each belongs.
static FREE: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

/// While this is there, nobody takes such pages.
pub type Held = MutexGuard<'static, Vec<(usize, usize)>>;

/// Waits until nobody does that.
pub fn hold() -> Held {
    locked(&FREE)
}

impl Table {
    fn new(open: &Arc<Open>) -> Result<Self, c_int> {
        let owner = Arc::as_ptr(open).addr();
        let mut free = locked(&FREE);
        if !free.iter().any(|(known, _)| *known == owner) {
            // SAFETY: new pages, which nobody else knows.
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
        // SAFETY: a word of the page, which stays. Others change it only as a whole, or as they may change all of the segment.
        unsafe { &*self.page.add(at) }
    }

    /// An entry as it is at one moment, if there is something in it.
    fn entry(&self, index: usize) -> Option<Entry> {
        let at = index * (size_of::<Entry>() / 8);
        // ORDER copy.last: the last word before those in front of it. Pairs with: the peer's `SharedSharedMemory::write_release`.
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

/// Memory of this side that the other one may write to.
struct Mapped {
    address: u64,
    len: usize,
    key: Key,
    /// Where it stands in the other side's table.
    slot: Option<usize>,
}

/// This side's part in the I/O maps of a connection.
pub struct Maps {
    open: Arc<Open>,
    pair: Arc<QueuePair<Mapping>>,
    completions: Arc<CompletionQueue<Mapping>>,
    domain: u32,
    /// The region of all of the program's memory, for reading.
    all: Option<Key>,
    /// The table, and its region.
    table: Option<(Table, Key)>,
    theirs: Offer,
    mapped: Mutex<Vec<Mapped>>,
    /// One request at a time, so that its completion is known.
    turn: Mutex<()>,
}

fn code(error: ginnel_verbs::device::DeviceError) -> c_int {
    crate::context::errno(&error)
}

impl Maps {
    /// A queue pair and a table on a device.
    pub fn new(open: &Arc<Open>) -> Result<Self, c_int> {
        let domain = next_domain(open);
        let completions = Arc::new(CompletionQueue::new(4));
        let pair = open.device.create_queue_pair(Wanted {
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
        // Whatever fails from here on, is cleared away by `drop`.
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

    /// What the other side is told.
    pub fn offer(&self) -> Option<Offer> {
        let (table, key) = self.table.as_ref()?;
        Some(Offer {
            queue_pair: self.pair.number().0,
            table: table.page.addr() as u64,
            key: key.0,
            entries: ENTRIES as u32,
        })
    }

    /// Connects with what the other side, this endpoint, has told.
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

    /// Writes bytes of this process to memory of the other side, and waits until they are there.
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
        self.pair.post(&Process, &work).map_err(|_| libc::EIO)?;
        let mut looks = 0;
        // Ten megabytes in a second, at least.
        let end = Instant::now() + 2 * PATIENCE + Duration::from_nanos(100 * len as u64);
        let status = loop {
            let mut status = None;
            self.completions.poll(&Process, 1, |completed| status = Some(completed.status));
            if let Some(status) = status {
                break status;
            }
            looks += 1;
            // Usually it was done when it was posted. Otherwise the queue pair's patience ends this, or this one's, if the memory is not in the
            // segment and its owner does not answer.
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

    /// Puts an entry into the other side's table.
    fn tell(&self, slot: usize, entry: &Entry) -> Result<(), c_int> {
        let at = (slot * size_of::<Entry>()) as u64;
        let address = self.theirs.table.checked_add(at).ok_or(libc::EFAULT)?;
        let from = ptr::from_ref(entry).expose_provenance() as u64;
        self.write(from, size_of::<Entry>(), address, Key(self.theirs.key))
    }

    /// Maps memory of the program, for writing by the other side or for nobody. The offset at which it is mapped.
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

    /// Ends what was mapped.
    pub fn unmap(&self, address: u64, len: usize) -> Result<(), c_int> {
        let mut mapped = locked(&self.mapped);
        let is_it = |known: &Mapped| (known.address, known.len) == (address, len);
        let at = mapped.iter().position(is_it).ok_or(libc::EINVAL)?;
        let Mapped { key, slot, .. } = mapped.swap_remove(at);
        if let Some(slot) = slot {
            // A peer that has gone needs to know nothing.
            let _ = self.tell(slot, &Entry::default());
        }
        self.open.device.deregister(key).map(drop).map_err(code)
    }

    /// Writes to what the other side has mapped. How many bytes: as many as lie in one map.
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
            // A peer has stopped in the middle of writing to it.
            std::mem::forget(table);
        }
    }
}
