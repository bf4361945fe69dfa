//! From a cache's name to its memory.
//!
//! A process has one mapping of each cache, which stays for as long as it runs. While a thread asks the daemon it holds no lock: others that want the
//! same cache wait for what comes of that.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ginnel::{Block, Endpoint, Mapping, Rights};
use ginnel_cache_store::reader::Reader;

use super::hits::Hits;
use crate::lock::Lock;
use crate::settings;
use crate::socket::now;

/// How long the daemon may take for both, attaching and opening.
const PATIENCE: Duration = Duration::from_millis(100);
/// How often somebody looks who waits for another thread.
const STEP: Duration = Duration::from_micros(200);
/// After that, a cache that could not be opened is tried again, in microseconds.
const AGAIN: u64 = 1_000_000;
/// A process opens no more caches than that.
const MOST: usize = 16;

/// A cache that this process reads.
pub struct Cache {
    /// `SEGMENT/NAME`.
    pub name: String,
    pub reader: Reader<Mapping>,
    pub hits: Hits,
    /// They keep the block's memory from being used for something else.
    _kept: Option<(Endpoint, Block)>,
}

#[cfg(test)]
impl Cache {
    /// In memory of this process.
    pub fn of(reader: Reader<Mapping>) -> &'static Self {
        Box::leak(Box::new(Self { name: "test/test".into(), reader, hits: Hits::new(), _kept: None }))
    }
}

#[derive(Clone, Copy)]
enum Found {
    Opening,
    Opened(&'static Cache),
    /// It was tried then.
    Failed(u64),
}

struct Entry {
    /// A hash of the name and the ID.
    key: u64,
    found: Found,
}

static ENTRIES: Lock<Vec<Entry>> = Lock::new(Vec::new());
/// How many caches have been opened.
static OPENED: AtomicU64 = AtomicU64::new(0);

/// The memory of a cache, if this process may read it and it has this ID.
pub fn find(segment: &str, name: &str, id: [u64; 2]) -> Option<&'static Cache> {
    let full = format!("{segment}/{name}");
    let key = super::begin::hash(full.as_bytes()) ^ id[0] ^ id[1].rotate_left(32);
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
        let _ = crate::kernel::poll_readable(fd, (left().as_millis() as libc::c_int).max(1));
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

/// What the parent has open is the parent's.
pub fn in_child() {
    ENTRIES.free_in_child();
    std::mem::forget(std::mem::take(&mut *ENTRIES.lock()));
}
