//! Caches: the items that a client finds in memory, its communication with a server, and the command.

mod asked;
mod cached;
mod clients;
mod kills;
mod memory;
mod scripted;
mod served;

kit::test_that_skips_are_seen!();

use ginnel::{AttachOptions, Block, BlockOptions, Endpoint, Mapping, Rights};
use ginnel_cache_client::{Cache, Changes, Error, Options};
use ginnel_cache_store::shape::plan;
use ginnel_cache_store::store::Store;
use kit::world::World;
use std::time::Duration;

fn attach(world: &World) -> AttachOptions {
    AttachOptions { socket: world.socket(), ..AttachOptions::default() }
}

/// How long a client waits for a server's answer.
const TIMEOUT: Duration = Duration::from_secs(30);

fn options(world: &World, changes: &str) -> Options {
    Options {
        attach: attach(world),
        changes: changes.parse::<Changes>().unwrap(),
        patience: Duration::ZERO,
        timeout: TIMEOUT,
    }
}

/// The memory of a cache whose server is the test itself.
struct Keeper {
    endpoint: Endpoint,
    block: Block,
    store: Store<Mapping>,
}

impl Keeper {
    /// Opens the memory of the cache `NAME` in `web`.
    fn new(world: &World, name: &str, key: [u64; 2]) -> Self {
        let endpoint = Endpoint::attach_with("web", &attach(world)).unwrap();
        let options = BlockOptions { persistent: true, others: Rights::READ, ..BlockOptions::default() };
        let block = endpoint.create_block(&format!("cache.{name}"), 1 << 20, &options).unwrap();
        let store = create(&block, key);
        Self { endpoint, block, store }
    }
}

fn create(block: &Block, key: [u64; 2]) -> Store<Mapping> {
    Store::create(block.memory().unwrap(), plan(block.len(), 4000, 100).unwrap(), key, 0).unwrap()
}

/// Returns the result of a get.
fn get(cache: &Cache, key: &str) -> Option<String> {
    let mut value = Vec::new();
    cache.get(key.as_bytes(), &mut value).unwrap()?;
    Some(String::from_utf8(value).unwrap())
}

fn is_no_server(error: &Error) -> bool {
    matches!(error, Error::NoServer { .. })
}
