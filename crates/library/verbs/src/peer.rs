//! The tables and memory of another endpoint, as a poster sees them.
//!
//! All of it is hostile input. Each word is loaded once, checked, and then used. What passes the checks lies within the peer's own
//! arenas, so a peer that writes false values harms only its own memory.

use crate::regions::Region;
use ginnel_layout::verbs::{Access, CHUNK, CHUNK_TABLE, CHUNKS, Chunk, Key, MEMBER, Place, region};
use ginnel_shmem::SharedMemory;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The arenas of an endpoint, and its doorbell.
pub trait Arenas<M>: Send + Sync {
    /// Returns the memory of an arena. May ask the daemon when the arena is first needed.
    fn arena(&self, number: u16) -> Option<M>;

    /// The same as [`Arenas::arena`], for a thread for which others wait: gives up soon if the daemon does not answer.
    fn arena_soon(&self, number: u16) -> Option<M> {
        self.arena(number)
    }

    /// Wakes the threads of the endpoint that wait for completions.
    fn ring(&self);
}

/// An endpoint, this one or another, to whose queue pairs this endpoint posts requests.
pub struct Peer<M> {
    tables: M,
    arenas: Box<dyn Arenas<M>>,
    is_dead: AtomicBool,
}

impl<M: SharedMemory> Peer<M> {
    /// Returns the endpoint with these tables and arenas.
    pub fn new(tables: M, arenas: Box<dyn Arenas<M>>) -> Self {
        Self { tables, arenas, is_dead: AtomicBool::new(false) }
    }

    /// Returns the tables.
    pub fn tables(&self) -> &M {
        &self.tables
    }

    /// Returns the number of the member that the endpoint belongs to, as the endpoint itself claims.
    pub fn member(&self) -> u32 {
        self.tables.load_relaxed_u32(MEMBER)
    }

    /// Wakes the threads of the endpoint that wait for completions.
    pub fn ring(&self) {
        self.arenas.ring();
    }

    /// Records that the endpoint has ended.
    pub fn set_dead(&self) {
        self.is_dead.store(true, Ordering::Relaxed);
    }

    /// Returns whether the endpoint has ended, or its memory is gone.
    pub fn is_dead(&self) -> bool {
        self.is_dead.load(Ordering::Relaxed) || self.tables.is_broken()
    }

    /// Returns the mapping that contains `len` bytes at a place, and their offset in it.
    pub fn place(&self, place: Place, len: usize) -> Option<(M, usize)> {
        Self::part(self.arenas.arena(place.arena())?, place, len)
    }

    /// The same as [`Peer::place`], except that it gives up if the daemon does not answer soon.
    pub(crate) fn place_soon(&self, place: Place, len: usize) -> Option<(M, usize)> {
        Self::part(self.arenas.arena_soon(place.arena())?, place, len)
    }

    fn part(memory: M, place: Place, len: usize) -> Option<(M, usize)> {
        let at = usize::try_from(place.offset()).ok()?;
        let is_inside = at.is_multiple_of(8) && at.checked_add(len).is_some_and(|end| end <= memory.len());
        is_inside.then_some((memory, at))
    }
}

/// A region of a peer.
struct Window<M> {
    key: Key,
    /// The value of the region's word when the region was looked up.
    word: u64,
    region: Region,
    chunks: Vec<(M, usize)>,
}

/// How memory of a peer is found: [`Peer::place`] or [`Peer::place_soon`].
pub(crate) type FindPlace<M> = fn(&Peer<M>, Place, usize) -> Option<(M, usize)>;

/// The peer's memory must not be accessed in this way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Denied;

/// The regions of a peer that were accessed recently.
pub struct Windows<M> {
    peer: Arc<Peer<M>>,
    known: Vec<Window<M>>,
    /// Index of the region that was used last.
    last: usize,
}

/// The maximum number of regions to remember.
const MOST: usize = 64;

/// A region of a peer that may be accessed.
pub struct Target<'a, M> {
    window: &'a Window<M>,
}

impl<M: SharedMemory> Target<'_, M> {
    /// Returns the longest contiguous range that begins at `address` and has at most `len` bytes: the mapping, the offset in it, and the
    /// length.
    #[inline]
    pub fn piece(&self, address: u64, len: usize) -> (&M, usize, usize) {
        let in_chunk = (address % CHUNK as u64) as usize;
        let first = self.window.region.address / CHUNK as u64;
        let (memory, at) = &self.window.chunks[(address / CHUNK as u64 - first) as usize];
        (memory, at + in_chunk, len.min(CHUNK - in_chunk))
    }

    /// Calls `each` with each contiguous part of a range of addresses: its first address, the mapping, the offset in it, and the length
    /// in bytes.
    pub fn for_each_piece(&self, range: Range<u64>, mut each: impl FnMut(u64, &M, usize, usize)) {
        let mut first = range.start;
        while first < range.end {
            let (memory, at, n) = self.piece(first, (range.end - first) as usize);
            each(first, memory, at, n);
            first += n as u64;
        }
    }
}

impl<M: SharedMemory> Windows<M> {
    /// Returns an empty set of regions of this peer.
    pub fn new(peer: Arc<Peer<M>>) -> Self {
        Self { peer, known: Vec::new(), last: 0 }
    }

    /// Returns the region of a key, if a queue pair in this protection domain of the peer may access `len` bytes at `address` in this
    /// way. The caller must have announced that it accesses the region of this key.
    #[inline(always)]
    pub fn look_up(
        &mut self,
        key: Key,
        address: u64,
        len: u32,
        wanted: u32,
        domain: u32,
    ) -> Result<Target<'_, M>, Denied> {
        self.find(key, Some(Peer::place))?;
        self.check(address, len, wanted, domain)
    }

    /// The same as [`Windows::look_up`], but only for a region that is already known and whose word has not changed.
    pub fn look_up_known(
        &mut self,
        key: Key,
        address: u64,
        len: u32,
        wanted: u32,
        domain: u32,
    ) -> Result<Target<'_, M>, Denied> {
        self.find(key, None)?;
        self.check(address, len, wanted, domain)
    }

    /// Looks up a region if it is not known yet. Returns whether there is such a region. May ask the daemon, and gives up soon if the
    /// daemon does not answer.
    pub fn know(&mut self, key: Key) -> bool {
        self.find(key, Some(Peer::place_soon)).is_ok()
    }

    /// Makes the region of a key the one that was used last. `place` finds the memory of a region that is not known yet.
    #[inline(always)]
    fn find(&mut self, key: Key, place: Option<FindPlace<M>>) -> Result<(), Denied> {
        let at = key.at().ok_or(Denied)?;
        // ORDER verbs.region: the region's word is loaded before the rest of the region. Pairs with: `Regions::add`.
        // ORDER verbs.executing: the announcement in `executing` is visible before this load. Pairs with: `Regions::remove`.
        let word = self.peer.tables.load_acquire_u64(at + region::WORD);
        let is_known = |window: &Window<M>| window.key == key && window.word == word;
        if !self.known.get(self.last).is_some_and(is_known) {
            self.last = match self.known.iter().position(is_known) {
                Some(known) => known,
                None => self.learn(key, at, word, place.ok_or(Denied)?)?,
            };
        }
        Ok(())
    }

    #[inline(always)]
    fn check(&self, address: u64, len: u32, wanted: u32, domain: u32) -> Result<Target<'_, M>, Denied> {
        let window = &self.known[self.last];
        let element = crate::work::Element { address, length: len, key: window.key.0 };
        if !window.region.allows(&element, wanted, domain) {
            return Err(Denied);
        }
        Ok(Target { window })
    }

    /// Prefetches the cache line of a byte that will be stored soon, if its region is the one that was used last.
    #[inline]
    pub fn prefetch_to_store(&self, key: Key, address: u64) {
        if let Some(window) = self.known.get(self.last).filter(|window| window.key == key)
            && address.wrapping_sub(window.region.address) < window.region.length
        {
            let target = Target { window };
            let (memory, at, _) = target.piece(address, 1);
            memory.prefetch_to_store(at);
        }
    }

    #[cold]
    fn learn(&mut self, key: Key, at: usize, word: u64, place: FindPlace<M>) -> Result<usize, Denied> {
        let tables = &self.peer.tables;
        let access = Access(word as u32);
        if !access.allows(Access::VALID) || Key::new(key.index(), (word >> 32) as u32) != key {
            return Err(Denied);
        }
        let address = tables.load_relaxed_u64(at + region::ADDRESS);
        let length = tables.load_relaxed_u64(at + region::LENGTH);
        let domain = tables.load_relaxed_u32(at + region::DOMAIN);
        let first = tables.load_relaxed_u32(at + region::CHUNK) as usize;
        let last = address.checked_add(length.max(1) - 1).ok_or(Denied)?;
        let count = last / CHUNK as u64 - address / CHUNK as u64 + 1;
        let end = usize::try_from(count).ok().and_then(|count| first.checked_add(count));
        let end = end.filter(|end| *end <= CHUNKS).ok_or(Denied)?;
        let mut chunks = Vec::with_capacity(end - first);
        for i in first..end {
            let chunk = Chunk(tables.load_relaxed_u32(CHUNK_TABLE + i * 4));
            chunks.push(place(&self.peer, chunk.place(), CHUNK).ok_or(Denied)?);
        }
        // The owner may have removed the region meanwhile and registered another one. The words above are loaded before this check.
        tables.full_fence();
        if tables.load_acquire_u64(at + region::WORD) != word {
            return Err(Denied);
        }
        let window = Window { key, word, region: Region { address, length, access, domain }, chunks };
        let known = &mut self.known;
        // An entry of an earlier generation of the same key is replaced first.
        let stale = known.iter().position(|window| window.key.index() == key.index());
        let index = stale.unwrap_or(if known.len() < MOST { known.len() } else { (self.last + 1) % MOST });
        match known.get_mut(index) {
            Some(old) => *old = window,
            None => known.push(window),
        }
        Ok(index)
    }
}
