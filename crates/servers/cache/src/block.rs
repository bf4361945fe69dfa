//! The block that holds the items: creates it, or opens the one that an earlier server has left.

use anyhow::{Context, Result, bail};
use ginnel::{Block, BlockOptions, Endpoint, Error, ErrorCode, Mapping, Rights};
use ginnel_cache_store::shape::plan;
use ginnel_cache_store::store::{NotACache, Store};
use rustix::rand::{GetRandomFlags, getrandom};
use rustix::time::{ClockId, clock_gettime};
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// How long the daemon may take to notice that an earlier server has died.
const PATIENCE: Duration = Duration::from_secs(5);

/// The sizes of a new cache, as the command line gives them.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Bytes of the whole block, including the index.
    pub memory: usize,
    /// The most bytes of an item, as memcached counts them.
    pub largest: usize,
    /// Bytes of a usual item, including its key.
    pub usual: usize,
}

/// Returns the time of CLOCK_BOOTTIME in milliseconds.
pub fn boot_time() -> u64 {
    let time = clock_gettime(ClockId::Boottime);
    time.tv_sec as u64 * 1000 + time.tv_nsec as u64 / 1_000_000
}

/// Returns the wall-clock time in seconds since 1970.
pub fn unix_time() -> i64 {
    clock_gettime(ClockId::Realtime).tv_sec
}

/// Opens the cache with this name, or creates it if it does not exist. The caller must keep the block as long as it
/// uses the store.
///
/// Waits up to five seconds while another server has the cache open. After that it fails, and the error names that
/// server if the daemon reports one.
pub fn open(endpoint: &Endpoint, segment: &str, name: &str, sizes: Sizes) -> Result<(Block, Store<Mapping>)> {
    let block_name = format!("cache.{name}");
    let until = Instant::now() + PATIENCE;
    loop {
        match endpoint.open_block(&block_name, Rights::WRITE_EXCLUSIVE) {
            Ok(block) => return take_over(block, segment, name, sizes),
            Err(error) => match error.code() {
                Some(ErrorCode::NOT_FOUND) => match create(endpoint, &block_name, sizes) {
                    // Another server has just created it.
                    Err(error) if code_of(&error) == Some(ErrorCode::IN_USE) => {}
                    made => {
                        return made.with_context(|| format!("cache {segment}/{name} cannot be made"));
                    }
                },
                // Until the daemon has noticed that the previous server has died, that server's endpoint owns the block, and
                // others may only read it.
                Some(ErrorCode::BUSY | ErrorCode::DENIED) if Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                code => {
                    let is_taken = matches!(code, Some(ErrorCode::BUSY | ErrorCode::DENIED));
                    if let Some(holder) = is_taken.then(|| holder(endpoint, segment, &block_name)).flatten() {
                        bail!(
                            "cache {segment}/{name} is served already, by {holder}; stop that server first, or choose another --name"
                        );
                    }
                    return Err(error).with_context(|| format!("cache {segment}/{name} cannot be opened"));
                }
            },
        }
    }
}

fn code_of(error: &anyhow::Error) -> Option<ErrorCode> {
    error.downcast_ref::<Error>().and_then(Error::code)
}

fn shape(sizes: Sizes, len: usize) -> Result<ginnel_layout::cache::Shape> {
    plan(len, sizes.largest, sizes.usual).context("there is no such cache")
}

fn create(endpoint: &Endpoint, block_name: &str, sizes: Sizes) -> Result<(Block, Store<Mapping>)> {
    let shape = shape(sizes, sizes.memory)?;
    // The block has no name until it is a cache, so no client can find it earlier. The old contents of its memory do not
    // matter then, so the memory is not zeroed.
    let options = BlockOptions {
        exclusive: true,
        others: Rights::READ,
        persistent: true,
        zero: false,
        ..BlockOptions::default()
    };
    let block = endpoint.create_block("", sizes.memory, &options)?;
    let store = Store::create(block.memory()?, shape, random()?, boot_time())?;
    block.link(block_name)?;
    info!(items = shape.buckets * ginnel_layout::cache::SLOTS, bytes = shape.len(), "made a cache");
    Ok((block, store))
}

/// Continues with an existing block. If its contents are not a valid cache, creates an empty cache in it.
fn take_over(block: Block, segment: &str, name: &str, sizes: Sizes) -> Result<(Block, Store<Mapping>)> {
    let memory = block.memory()?;
    let store = match Store::open(memory.clone(), boot_time()) {
        Ok(store) => {
            if block.len() != sizes.memory {
                warn!(
                    "cache {segment}/{name} has {} bytes and keeps them, not {}; to make it anew, stop the server and remove the block \
                     cache.{name}",
                    block.len(),
                    sizes.memory
                );
            }
            store
        }
        Err(problem) => {
            if problem == NotACache::Corrupt {
                warn!("cache {segment}/{name} begins anew: {problem}");
            }
            Store::create(memory, shape(sizes, block.len())?, random()?, boot_time())?
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

/// Returns a description of a process that has a block open for writing, or `None` if the daemon does not report one.
fn holder(endpoint: &Endpoint, segment: &str, block_name: &str) -> Option<String> {
    let state: serde_json::Value = serde_json::from_str(&endpoint.inspect().ok()?).ok()?;
    let blocks = state.get("blocks")?.as_array()?;
    let block = blocks.iter().find(|block| block["segment"] == segment && block["name"] == block_name)?;
    let users = block["handles"].as_array()?;
    let user = users.iter().find(|user| user["rights"] != "read")?;
    let text = |key: &str| user[key].as_str().unwrap_or("?").to_owned();
    let pid = user["pid"].as_u64().map_or_else(|| "?".into(), |pid| pid.to_string());
    Some(format!("process {pid} ({}) of {}", text("name"), text("member")))
}
