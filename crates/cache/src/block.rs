//! The block in which the items lie.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ginnel::{Block, BlockOptions, Endpoint, Error, ErrorCode, Mapping, Rights};
use ginnel_cache_store::shape::plan;
use ginnel_cache_store::store::{NotACache, Store};
use rustix::rand::{GetRandomFlags, getrandom};
use rustix::time::{ClockId, clock_gettime};
use tracing::{info, warn};

/// How long the daemon may take to notice that an earlier server has died.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a new cache is like.
#[derive(Clone, Copy, Debug)]
pub struct Wish {
    /// Bytes of all.
    pub memory: usize,
    /// The largest item.
    pub largest: usize,
    /// What an item usually has.
    pub usual: usize,
}

/// CLOCK_BOOTTIME in milliseconds.
pub fn boot_time() -> u64 {
    let time = clock_gettime(ClockId::Boottime);
    time.tv_sec as u64 * 1000 + time.tv_nsec as u64 / 1_000_000
}

/// Seconds since 1970.
pub fn unix_time() -> i64 {
    clock_gettime(ClockId::Realtime).tv_sec
}

/// Opens the cache of a name, or makes it. The block is to be kept as long as the store is used.
pub fn open(endpoint: &Endpoint, segment: &str, name: &str, wish: Wish) -> Result<(Block, Store<Mapping>)> {
    let block_name = format!("cache.{name}");
    let until = Instant::now() + PATIENCE;
    loop {
        match endpoint.open_block(&block_name, Rights::WRITE_EXCLUSIVE) {
            Ok(block) => return take_over(block, segment, name, wish),
            Err(error) => match error.code() {
                Some(ErrorCode::NOT_FOUND) => match create(endpoint, &block_name, wish) {
                    // Another server was faster.
                    Err(error) if code_of(&error) == Some(ErrorCode::IN_USE) => {}
                    made => {
                        return made.with_context(|| format!("cache {segment}/{name} cannot be made"));
                    }
                },
                // As long as the daemon has not seen the death of the server before, its endpoint is the owner, and others may only read.
                Some(ErrorCode::BUSY | ErrorCode::DENIED) if Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Some(ErrorCode::BUSY) => {
                    bail!(
                        "cache {segment}/{name} is served already, by {}; stop that server first, or choose another --name",
                        holder(endpoint, segment, &block_name).unwrap_or_else(|| "somebody else".into())
                    );
                }
                _ => return Err(error).with_context(|| format!("cache {segment}/{name} cannot be opened")),
            },
        }
    }
}

fn code_of(error: &anyhow::Error) -> Option<ErrorCode> {
    error.downcast_ref::<Error>().and_then(Error::code)
}

fn shape(wish: Wish, len: usize) -> Result<ginnel_layout::cache::Shape> {
    plan(len, wish.largest, wish.usual).context("there is no such cache")
}

fn create(endpoint: &Endpoint, block_name: &str, wish: Wish) -> Result<(Block, Store<Mapping>)> {
    let shape = shape(wish, wish.memory)?;
    // Nobody finds it before it is a cache; what was in its memory is of no interest then.
    let options = BlockOptions {
        exclusive: true,
        others: Rights::READ,
        persistent: true,
        zero: false,
        ..BlockOptions::default()
    };
    let block = endpoint.create_block("", wish.memory, &options)?;
    let store = Store::create(block.memory()?, shape, random()?, boot_time())?;
    block.link(block_name)?;
    info!(items = shape.buckets * ginnel_layout::cache::SLOTS, bytes = shape.len(), "made a cache");
    Ok((block, store))
}

/// Goes on with a cache that is there.
fn take_over(block: Block, segment: &str, name: &str, wish: Wish) -> Result<(Block, Store<Mapping>)> {
    let memory = block.memory()?;
    let store = match Store::open(memory.clone(), boot_time()) {
        Ok(store) => {
            if block.len() != wish.memory {
                warn!(
                    "cache {segment}/{name} has {} bytes and keeps them, not {}; to make it anew, stop the server and remove the block \
                     cache.{name}",
                    block.len(),
                    wish.memory
                );
            }
            store
        }
        Err(problem) => {
            if problem == NotACache::Corrupt {
                warn!("cache {segment}/{name} begins anew: {problem}");
            }
            Store::create(memory, shape(wish, block.len())?, random()?, boot_time())?
        }
    };
    Ok((block, store))
}

fn random() -> Result<[u64; 2]> {
    let mut bytes = [0; 16];
    let count = getrandom(&mut bytes, GetRandomFlags::empty()).context("no random numbers")?;
    anyhow::ensure!(count == bytes.len(), "too few random numbers");
    let [low, high] = [0, 8].map(|at| bytes[at..].first_chunk().map_or(0, |word| u64::from_ne_bytes(*word)));
    Ok([low, high])
}

/// Who has a block open, as far as the daemon tells.
fn holder(endpoint: &Endpoint, segment: &str, block_name: &str) -> Option<String> {
    let state: serde_json::Value = serde_json::from_str(&endpoint.inspect().ok()?).ok()?;
    let blocks = state.get("blocks")?.as_array()?;
    let block = blocks.iter().find(|block| block["segment"] == segment && block["name"] == block_name)?;
    let user = block["handles"].as_array()?.first()?;
    let text = |key: &str| user[key].as_str().unwrap_or("?").to_owned();
    let pid = user["pid"].as_u64().map_or_else(|| "?".into(), |pid| pid.to_string());
    Some(format!("process {pid} ({}) of {}", text("name"), text("member")))
}
