//! The block of the cache, which this process has open.

use crate::error::Error;
use arc_swap::{ArcSwapOption, Guard};
use ginnel::{AttachOptions, Block, Endpoint, ErrorCode, Mapping, Rights};
use ginnel_cache_store::reader::Reader;
use ginnel_cache_store::store::NotACache;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often the name of the block is looked up again while there is a reason to do so.
const AGAIN: Duration = Duration::from_secs(1);
/// How often to check whether an awaited cache has been created.
const SOON: Duration = Duration::from_millis(5);
/// How long the daemon may take to answer a caller that only wants to read.
const ANSWER: Duration = Duration::from_millis(200);

/// An open block.
pub struct Opened {
    pub reader: Reader<Mapping>,
    endpoint: Endpoint,
    block: Block,
}

/// The block that, as far as is known, holds the cache.
pub struct CacheBlock {
    /// The address, `SEGMENT/NAME`.
    pub address: String,
    segment: String,
    /// The name of the block.
    pub name: String,
    attach: AttachOptions,
    /// The open block, or `None` if it has been removed.
    opened: ArcSwapOption<Opened>,
    /// When the name was last looked up.
    looked: Mutex<Option<Instant>>,
}

impl CacheBlock {
    /// Opens the block, and waits up to `patience` for there to be a cache in it.
    pub fn open(address: &str, attach: &AttachOptions, patience: Duration) -> Result<Self, Error> {
        let what = "no address of a cache; write SEGMENT/NAME";
        let bad = || Error::Address { given: address.into(), what };
        let (segment, name) = address.split_once('/').ok_or_else(bad)?;
        let memory = Self {
            address: address.into(),
            segment: segment.into(),
            name: format!("cache.{name}"),
            attach: attach.clone(),
            opened: ArcSwapOption::empty(),
            looked: Mutex::new(None),
        };
        let end = Instant::now() + patience;
        let endpoint = memory.attached()?;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let block = endpoint.open_block_within(&memory.name, Rights::READ, left);
            let block = block.map_err(|source| memory.failed(source))?;
            match memory.begin(&endpoint, block) {
                // The server is about to create the cache.
                Err(Error::NotACache { source: NotACache::Unknown, .. }) if !left.is_zero() => {
                    std::thread::sleep(SOON.min(left));
                }
                Err(error) => return Err(error),
                Ok(opened) => {
                    memory.opened.store(Some(Arc::new(opened)));
                    return Ok(memory);
                }
            }
        }
    }

    fn attached(&self) -> Result<Endpoint, Error> {
        Endpoint::attach_with(&self.segment, &self.attach).map_err(|source| self.failed(source))
    }

    fn begin(&self, endpoint: &Endpoint, block: Block) -> Result<Opened, Error> {
        let mapping = block.memory().map_err(|source| self.failed(source))?;
        let reader = Reader::new(mapping);
        let reader = reader.map_err(|source| Error::NotACache { cache: self.address.clone(), source })?;
        Ok(Opened { reader, endpoint: endpoint.clone(), block })
    }

    fn failed(&self, source: ginnel::Error) -> Error {
        Error::Segment { cache: self.address.clone(), source }
    }

    /// Returns the block that is open now.
    #[inline]
    pub fn now(&self) -> Guard<Option<Arc<Opened>>> {
        self.opened.load()
    }

    /// Returns the segment's name, and this process's endpoint in it.
    pub fn endpoint(&self) -> (&str, Option<Endpoint>) {
        (&self.segment, self.now().as_ref().map(|opened| opened.endpoint.clone()))
    }

    /// Asks the daemon whether the name still stands for this block. Calls that follow each other too closely do
    /// nothing.
    pub fn look_again(&self) {
        let Ok(mut looked) = self.looked.try_lock() else { return };
        if looked.is_none_or(|looked| looked.elapsed() >= AGAIN) {
            self.look();
            *looked = Some(Instant::now());
        }
    }

    /// Asks the daemon at once, for a caller that knows that this block no longer holds the cache. Does nothing if
    /// `is_good` says that another thread has found the right one meanwhile.
    pub fn look_now(&self, is_good: impl Fn(&Opened) -> bool) {
        let mut looked = self.looked.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.now().as_ref().is_some_and(|opened| is_good(opened)) {
            self.look();
            *looked = Some(Instant::now());
        }
    }

    fn look(&self) {
        let before = self.opened.load_full();
        let endpoint = before.as_ref().map(|opened| opened.endpoint.clone());
        let endpoint = endpoint.filter(|endpoint| {
            endpoint.process_events();
            endpoint.check().is_ok()
        });
        let Some(endpoint) = endpoint.or_else(|| self.attached().ok()) else { return };
        let block = match endpoint.open_block_soon(&self.name, Rights::READ, ANSWER) {
            Ok(block) => block,
            Err(error) if error.code() == Some(ErrorCode::NOT_FOUND) => return self.opened.store(None),
            // The daemon cannot tell at the moment.
            Err(_) => return,
        };
        let is_same = before.as_ref().is_some_and(|before| {
            before.block.number() == block.number()
                && before.endpoint.number() == endpoint.number()
                && before.reader.is_current()
        });
        if !is_same {
            match self.begin(&endpoint, block) {
                Ok(opened) => self.opened.store(Some(Arc::new(opened))),
                // The new block has no cache yet. The old block may hold one that will be moved.
                Err(_) if before.is_some_and(|before| before.reader.is_current()) => {}
                Err(_) => self.opened.store(None),
            }
        }
    }
}
