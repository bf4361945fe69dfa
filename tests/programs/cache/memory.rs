//! The items that a client finds in memory, without a server.

use super::{Keeper, attach, create, get, is_no_server, options};
use ginnel::{BlockOptions, Endpoint, Rights, SharedMemory};
use ginnel_cache_client::{Cache, Error, NotACache};
use ginnel_cache_store::store::Store;
use kit::wait::wait_until;
use kit::world::World;
use std::time::{Duration, Instant};

#[test]
fn items_are_found_without_a_server() {
    let world = World::new();
    let mut keeper = Keeper::new(&world, "c", [1, 2]);
    let cache = Cache::open_with("web/c", &options(&world, "auto")).unwrap();
    assert_eq!(cache.id(), Some(keeper.store.id()));
    assert_eq!(get(&cache, "a"), None);
    let version = keeper.store.set(b"a", &[b"one"], 7, 0).unwrap();
    let mut value = b"before ".to_vec();
    let item = cache.get(b"a", &mut value).unwrap().unwrap();
    assert_eq!((value.as_slice(), item.flags, item.cas, item.len), (&b"before one"[..], 7, version, 3));
    let mut small = [0; 2];
    assert_eq!(cache.get_into(b"a", &mut small).unwrap().unwrap().len, 3);
    assert_eq!(&small, b"on");
    let changed = keeper.store.set(b"a", &[b"two"], 7, 0).unwrap();
    assert!(changed > version);
    assert_eq!(get(&cache, "a").as_deref(), Some("two"));
    assert!(keeper.store.delete(b"a"));
    assert_eq!(get(&cache, "a"), None);
    assert!(matches!(cache.get(&[b'k'; 251], &mut value), Err(Error::Key(251))));

    let keys: Vec<String> = (0..500).map(|number| format!("key {number}")).collect();
    for key in keys.iter().step_by(2) {
        keeper.store.set(key.as_bytes(), &[key.as_bytes(), b"!"], 0, 0).unwrap();
    }
    let mut found = vec![None; keys.len()];
    let before = cache.counters();
    let hits = cache.get_many(&keys, |number, item| {
        assert!(found[number].is_none(), "told twice");
        found[number] = Some(item.map(|(item, value)| {
            assert_eq!(item.len, value.len());
            String::from_utf8(value.to_vec()).unwrap()
        }));
    });
    assert_eq!(hits.unwrap(), 250);
    for (number, key) in keys.iter().enumerate() {
        assert_eq!(found[number], Some((number % 2 == 0).then(|| format!("{key}!"))));
    }
    let after = cache.counters();
    assert_eq!((after.hits - before.hits, after.misses - before.misses, after.asked), (250, 250, 0));
    let survey = cache.survey().unwrap();
    assert_eq!((survey.items, survey.servers), (250, 1));
    assert!(
        survey.small.bytes > 0 && survey.small.segments + survey.main.segments + survey.free.segments > 3
    );

    // A change needs a server, and the header names none.
    let error = cache.set(b"a", b"x", 0, 0).unwrap_err();
    assert!(is_no_server(&error) && error.to_string().contains("its header names none"), "{error}");
}

#[test]
fn a_read_only_member_can_open_a_cache() {
    let world = World::new();
    world.good("segment create news --size 16M --members vm-a --readers host --memory dax --page 4K");
    // No other program creates the cache, so only the refusals can be seen here.
    let endpoint = Endpoint::attach_with("news", &attach(&world)).unwrap();
    assert!(endpoint.is_read_only());
    let error = Cache::open_with("news/c", &options(&world, "auto")).unwrap_err();
    assert!(matches!(&error, Error::Segment { cache, .. } if cache == "news/c"), "{error}");
}

#[test]
fn a_block_that_is_not_a_cache_is_reported() {
    let world = World::new();
    let open = |address: &str| Cache::open_with(address, &options(&world, "auto")).unwrap_err();
    assert!(matches!(open("web"), Error::Address { .. }));
    assert!(matches!(open("web/none"), Error::Segment { .. }));
    assert!(matches!(open("none/c"), Error::Segment { .. }));
    let endpoint = Endpoint::attach_with("web", &attach(&world)).unwrap();
    let _block = endpoint.create_block("cache.empty", 1 << 20, &BlockOptions::default()).unwrap();
    assert!(matches!(open("web/empty"), Error::NotACache { source: NotACache::Unknown, .. }));
    let keeper = Keeper::new(&world, "broken", [1, 2]);
    keeper.block.memory().unwrap().store_relaxed_u64(ginnel_layout::cache::SEGMENTS, u64::MAX);
    assert!(matches!(open("web/broken"), Error::NotACache { source: NotACache::Corrupt, .. }));
}

#[test]
fn a_new_cache_with_the_same_name_is_noticed_at_once() {
    let world = World::new();
    let mut keeper = Keeper::new(&world, "c", [1, 2]);
    keeper.store.set(b"a", &[b"old"], 0, 0).unwrap();
    let cache = Cache::open_with("web/c", &options(&world, "auto")).unwrap();
    assert_eq!(get(&cache, "a").as_deref(), Some("old"));
    // Make a new cache in the same block.
    let mut store = create(&keeper.block, [3, 4]);
    assert_eq!(get(&cache, "a"), None);
    store.set(b"a", &[b"new"], 0, 0).unwrap();
    assert_eq!(get(&cache, "a").as_deref(), Some("new"));
    assert_eq!(cache.id(), Some(store.id()));

    // In another block, and the old one is marked as replaced.
    let memory = keeper.block.memory().unwrap();
    keeper.endpoint.unlink_block("cache.c").unwrap();
    let mut keeper = Keeper::new(&world, "c", [5, 6]);
    keeper.store.set(b"a", &[b"newer"], 0, 0).unwrap();
    assert_eq!(get(&cache, "a").as_deref(), Some("new"), "nobody has said anything");
    memory.store_release_u64(ginnel_layout::cache::MAGIC, 0);
    wait_until("the other cache", || get(&cache, "a").as_deref() == Some("newer"));
    assert_eq!(cache.counters().asked, 0);
}

#[test]
fn an_abandoned_cache_is_noticed_when_its_clock_stands() {
    let world = World::new();
    let mut keeper = Keeper::new(&world, "c", [1, 2]);
    keeper.store.set(b"a", &[b"old"], 0, 0).unwrap();
    let cache = Cache::open_with("web/c", &options(&world, "auto")).unwrap();
    keeper.endpoint.unlink_block("cache.c").unwrap();
    let mut other = Keeper::new(&world, "c", [5, 6]);
    other.store.set(b"a", &[b"new"], 0, 0).unwrap();
    let began = Instant::now();
    wait_until("the other cache", || {
        // Each miss checks the clock, and hits do so now and then.
        get(&cache, "none");
        get(&cache, "a").as_deref() == Some("new")
    });
    assert!(began.elapsed() > Duration::from_secs(1), "{:?}", began.elapsed());

    // Now there is no cache at all.
    other.endpoint.unlink_block("cache.c").unwrap();
    let mut value = Vec::new();
    wait_until("the end of the cache", || cache.get(b"none", &mut value).is_err());
    assert!(cache.id().is_none() && cache.survey().is_none());
    let keeper = Keeper::new(&world, "c", [7, 8]);
    wait_until("a third cache", || cache.get(b"none", &mut value).is_ok());
    assert_eq!(cache.id(), Some(keeper.store.id()));
}

#[test]
fn expiry_times_are_checked_only_while_the_clock_runs() {
    let world = World::new();
    let mut keeper = Keeper::new(&world, "c", [1, 2]);
    keeper.store.set(b"for a while", &[b"x"], 0, 100).unwrap();
    keeper.store.set(b"for ever", &[b"y"], 0, 0).unwrap();
    let cache = Cache::open_with("web/c", &options(&world, "unix /nowhere")).unwrap();
    assert_eq!(get(&cache, "for a while").as_deref(), Some("x"));
    let mut value = Vec::new();
    wait_until("a clock that stands", || cache.get(b"for a while", &mut value).is_err());
    assert!(cache.counters().asked > 0);
    assert_eq!(get(&cache, "for ever").as_deref(), Some("y"));
    keeper.store.tick(1000);
    assert_eq!(get(&cache, "for a while").as_deref(), Some("x"));
    keeper.store.tick(100_000);
    assert_eq!(get(&cache, "for a while"), None);
    // The next server opens the cache.
    let mut store = Store::open(keeper.block.memory().unwrap(), 0).unwrap();
    store.flush();
    assert_eq!(get(&cache, "for ever"), None);
    assert_eq!(keeper.block.rights(), Rights::READ_WRITE);
}

#[test]
fn the_command_shows_the_items_in_memory() {
    let world = World::new();
    let said = world.good("cache list");
    assert!(said.out.is_empty() && said.err.contains("there are no caches"), "{said:?}");
    let mut keeper = Keeper::new(&world, "c", [1, 2]);
    keeper.store.set(b"a", &[b"one"], 0, 0).unwrap();
    let said = world.good("cache list web");
    assert!(said.out.lines().nth(1).unwrap().starts_with("web/c  1 MiB  "), "{said:?}");
    assert_eq!(world.good("cache list --json").json()[0]["name"], "c");
    assert_eq!(world.good("cache get web/c a --patience 0").out, "one\n");
    assert_eq!(world.good("cache get web/c a --raw").out, "one");
    let said = world.expect(1, "cache get web/c b");
    assert!(said.err.contains("cache web/c has no item \"b\""), "{said:?}");
    let said = world.expect(1, "cache set web/c a two --patience 0");
    assert!(said.err.contains("start ginnel-cache"), "{said:?}");
    let said = world.expect(1, "cache status web/c --json --patience 0");
    let json = said.json();
    assert_eq!(
        (&json[0]["items"], &json[0]["servers"], &json[0]["clock_stands"]),
        (&1.into(), &1.into(), &true.into())
    );
    let said = world.expect(1, "cache status --prometheus --patience 0");
    assert!(said.out.contains("ginnel_cache_up{cache=\"web/c\"} 0\n"), "{said:?}");
    world.expect(2, "cache get web a");
    world.expect(2, "cache get web/c a --changes nowhere");
    world.expect(2, "cache limit web/c 10K");
    let said = world.expect(1, "cache get none/c a");
    assert!(said.err.contains("none"), "{said:?}");
}
