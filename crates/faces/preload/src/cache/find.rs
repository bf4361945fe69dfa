//! Finds the memory of a cache by its name.
//!
//! A process has one mapping of each cache, which stays for as long as the process runs. A thread that asks the daemon for a
//! cache holds no lock meanwhile. Other threads that want the same cache wait for its result.

use crate::cache::hits::Hits;
use crate::process::lock::Lock;
use crate::process::settings;
use crate::system::clock::now;
use ginnel::{Block, Endpoint, Mapping, Rights};
use ginnel_cache_store::reader::Reader;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long the daemon may take to attach this process and to open the block, together.
const PATIENCE: Duration = Duration::from_millis(100);
/// How long a thread that waits for another thread's result sleeps between two looks.
const STEP: Duration = Duration::from_micros(200);
/// How long a process does not try again to open a cache that it could not open, in microseconds.
const AGAIN: u64 = 1_000_000;
/// The maximum number of caches that a process opens.
const MOST: usize = 16;

/// A cache that this process reads.
pub struct Cache {
    /// `SEGMENT/NAME`.
    pub name: String,
    pub reader: Reader<Mapping>,
    pub hits: Hits,
    /// The endpoint and the block stay open, so that the daemon does not reuse the block's memory.
    _kept: Option<(Endpoint, Block)>,
}

#[cfg(test)]
impl Cache {
    /// Makes a cache whose items are in private memory of this process.
    pub fn of(reader: Reader<Mapping>) -> &'static Self {
        Box::leak(Box::new(Self { name: "test/test".into(), reader, hits: Hits::new(), _kept: None }))
    }
}

#[derive(Clone, Copy)]
enum Found {
    /// A thread is opening the cache.
    Opening,
    Opened(&'static Cache),
    /// The last attempt failed at this time, in microseconds.
    Failed(u64),
}

struct Entry {
    /// A combined hash of the cache's name and ID.
    key: u64,
    found: Found,
}

static ENTRIES: Lock<Vec<Entry>> = Lock::new(Vec::new());
/// The number of caches that this process has opened.
static OPENED: AtomicU64 = AtomicU64::new(0);

/// Returns the memory of a cache, or `None` if this process may not read it or if its ID differs. Waits for the daemon, but for a
/// bounded time.
pub fn find(segment: &str, name: &str, id: [u64; 2]) -> Option<&'static Cache> {
    let full = format!("{segment}/{name}");
    let key = crate::cache::find::hash(full.as_bytes()) ^ id[0] ^ id[1].rotate_left(32);
    let end = Instant::now() + PATIENCE * 2;
    loop {
        let mut entries = ENTRIES.lock();
        match entries.iter_mut().find(|entry| entry.key == key) {
            Some(Entry { found: Found::Opened(cache), .. }) => {
                return Some(*cache).filter(|cache| cache.name == full && cache.reader.id() == id);
            }
            Some(Entry { found: Found::Failed(at), .. }) if now() < *at + AGAIN => return None,
            Some(entry @ Entry { found: Found::Failed(_), .. }) => entry.found = Found::Opening,
            Some(_) => {
                drop(entries);
                if Instant::now() >= end {
                    return None;
                }
                std::thread::sleep(STEP);
                continue;
            }
            None => entries.push(Entry { key, found: Found::Opening }),
        }
        break;
    }
    let opened = open(segment, name, full, id);
    let found = opened.map_or_else(|| Found::Failed(now()), Found::Opened);
    let mut entries = ENTRIES.lock();
    if let Some(entry) = entries.iter_mut().find(|entry| entry.key == key) {
        entry.found = found;
    }
    opened
}

fn open(segment: &str, name: &str, full: String, id: [u64; 2]) -> Option<&'static Cache> {
    if OPENED.load(Ordering::Relaxed) >= MOST as u64 {
        return None;
    }
    let end = Instant::now() + PATIENCE;
    let left = || end.saturating_duration_since(Instant::now());
    let mut opening = Endpoint::begin_attach(segment, settings::attach()).ok()?;
    let endpoint = loop {
        if let Some(endpoint) = opening.poll().ok()? {
            break endpoint;
        }
        if left().is_zero() {
            return None;
        }
        let fd = std::os::fd::AsRawFd::as_raw_fd(&opening.poll_fd().ok()?);
        let _ = crate::system::kernel::poll_readable(fd, (left().as_millis() as libc::c_int).max(1));
    };
    let block = endpoint.open_block_soon(&format!("cache.{name}"), Rights::READ, left()).ok()?;
    let reader = Reader::new(block.memory().ok()?).ok()?;
    if reader.id() != id {
        return None;
    }
    OPENED.fetch_add(1, Ordering::Relaxed);
    let cache = Cache { name: full, reader, hits: Hits::new(), _kept: Some((endpoint, block)) };
    Some(Box::leak(Box::new(cache)))
}

/// Forgets the parent's caches in the child of a fork, without closing them.
pub fn in_child() {
    ENTRIES.free_in_child();
    std::mem::forget(std::mem::take(&mut *ENTRIES.lock()));
}

/// Returns the FNV-1a hash of these bytes.
pub fn hash(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}
