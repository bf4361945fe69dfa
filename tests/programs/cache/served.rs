//! A cache with its server.

use super::{get, options};
use ginnel_cache_client::{Cache, Entry, Error, Options, Swap};
use kit::build;
use kit::process::signal;
use kit::wait::wait_until;
use kit::world::World;
use rustix::process::Signal;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

/// The server `ginnel-cache` of the cache `web/c`.
pub struct CacheServer(pub Child);

impl CacheServer {
    /// Starts the server, which need not serve yet when this returns.
    pub fn start(world: &World, more: &str) -> Self {
        // Built only once: cargo takes longer than a server to start, and waits for other runs of cargo.
        static BUILT: OnceLock<PathBuf> = OnceLock::new();
        let mut command = Command::new(BUILT.get_or_init(|| build::program("ginnel-cache")));
        if !more.contains("--memory") {
            command.args(["--memory", "16M"]);
        }
        command.args(["--segment", "web", "--name", "c", "--log", "warn", "--socket"]);
        command.arg(world.socket()).arg("--unix").arg(unix(world)).args(more.split_whitespace());
        Self(command.stdin(Stdio::null()).spawn().unwrap())
    }

    /// Starts the server, and waits until it serves.
    pub fn serving(world: &World, more: &str) -> Self {
        let server = Self::start(world, more);
        let options = Options { patience: Duration::from_secs(20), ..options(world, "auto") };
        let cache = Cache::open_with("web/c", &options).unwrap();
        cache.stats("ginnel").unwrap();
        server
    }

    pub fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for CacheServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn unix(world: &World) -> PathBuf {
    world.files().join("cache.sock")
}

fn every_call(cache: &Cache) {
    cache.flush().unwrap();
    assert_eq!(get(cache, "a"), None);
    let version = cache.set(b"a", b"one", 7, 0).unwrap();
    let mut value = Vec::new();
    let item = cache.get(b"a", &mut value).unwrap().unwrap();
    assert_eq!((value.as_slice(), item.flags, item.cas, item.len), (&b"one"[..], 7, version, 3));
    assert_eq!(cache.add(b"a", b"two", 0, 0).unwrap(), None);
    assert!(cache.add(b"b", b"two", 0, 0).unwrap().is_some());
    assert_eq!(cache.replace(b"c", b"x", 0, 0).unwrap(), None);
    assert!(cache.replace(b"b", b"three", 3, 0).unwrap().is_some());
    assert_eq!(cache.append(b"c", b"x").unwrap(), None);
    assert!(cache.append(b"b", b">").unwrap().is_some());
    let version = cache.prepend(b"b", b"<").unwrap().unwrap();
    value.clear();
    let item = cache.get(b"b", &mut value).unwrap().unwrap();
    assert_eq!((value.as_slice(), item.flags, item.cas), (&b"<three>"[..], 3, version));
    let Swap::Stored(newer) = cache.cas(b"b", b"four", 0, 0, version).unwrap() else { panic!() };
    assert!(newer > version);
    assert_eq!(cache.cas(b"b", b"five", 0, 0, version).unwrap(), Swap::Changed);
    assert_eq!(cache.cas(b"c", b"five", 0, 0, version).unwrap(), Swap::Missing);
    assert_eq!(get(cache, "b").as_deref(), Some("four"));

    cache.set(b"n", b"10", 0, 0).unwrap();
    assert_eq!(cache.increment(b"n", 5).unwrap(), Some(15));
    assert_eq!(cache.decrement(b"n", 6).unwrap(), Some(9));
    assert_eq!(get(cache, "n").unwrap().trim_end(), "9");
    assert_eq!((cache.increment(b"c", 1).unwrap(), cache.decrement(b"c", 1).unwrap()), (None, None));
    assert!(matches!(cache.increment(b"a", 1), Err(Error::Refused { .. })));

    assert!(cache.touch(b"a", 1000).unwrap() && !cache.touch(b"c", 1000).unwrap());
    value.clear();
    assert!(cache.get_and_touch(b"a", 0, &mut value).unwrap().is_some_and(|item| item.flags == 7));
    assert!(cache.get_and_touch(b"c", 0, &mut value).unwrap().is_none());
    assert_eq!(value, b"one");
    assert!(cache.delete(b"a").unwrap() && !cache.delete(b"a").unwrap());
    assert_eq!(get(cache, "a"), None);

    // Values of all lengths; the longest are sent in many pieces.
    for len in [0, 1, 100, 5000, 70_000, 1_000_000] {
        let bytes: Vec<u8> = (0..len).map(|at: u32| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        cache.set(b"long", &bytes, 0, 0).unwrap();
        value.clear();
        cache.get(b"long", &mut value).unwrap().unwrap();
        assert!(value == bytes, "{len} bytes");
        value.clear();
        cache.get_and_touch(b"long", 0, &mut value).unwrap().unwrap();
        assert!(value == bytes, "{len} bytes from the server");
    }
    assert!(matches!(cache.set(b"long", &vec![b'x'; 2 << 20], 0, 0), Err(Error::TooLarge { .. })));
    assert_eq!(get(cache, "long"), None, "memcached too removes what could not be replaced");

    // Keys of any bytes, and of the maximum length.
    let keys: Vec<Vec<u8>> =
        vec![b"a b\r\n\0\xff".to_vec(), vec![b'k'; 250], vec![b' '; 186], "grüezi".into(), vec![0x7f]];
    for key in &keys {
        cache.set(key, key, 0, 0).unwrap();
    }
    let found = cache.get_many(&keys, |number, item| assert_eq!(item.unwrap().1, keys[number]));
    assert_eq!(found.unwrap(), keys.len());
    for key in &keys {
        value.clear();
        assert!(cache.get_and_touch(key, 0, &mut value).unwrap().is_some() && value == *key);
        assert!(cache.delete(key).unwrap());
    }

    let names: Vec<String> = (0..1000).map(|number| format!("many {number}")).collect();
    let entries: Vec<Entry<'_>> = names
        .iter()
        .zip(0..)
        .map(|(name, flags)| Entry { key: name.as_bytes(), value: name.as_bytes(), flags, ttl: 0 })
        .collect();
    let versions: Vec<u64> = cache.set_many(&entries).into_iter().map(Result::unwrap).collect();
    let found = cache.get_many(&names, |number, item| {
        let (item, value) = item.unwrap();
        assert_eq!(
            (value, item.flags, item.cas),
            (names[number].as_bytes(), number as u32, versions[number])
        );
    });
    assert_eq!(found.unwrap(), names.len());
    cache.flush().unwrap();
    assert_eq!(cache.get_many(&names, |_, item| assert!(item.is_none())).unwrap(), 0);
    cache.set(b"again", b"x", 0, 0).unwrap();
    assert_eq!(get(cache, "again").as_deref(), Some("x"));
    assert!(cache.stats("").unwrap().iter().any(|(name, _)| name == "curr_items"));
    assert_eq!(cache.counters().lost, 0);
    assert_eq!(cache.counters().connections, 1);
}

#[test]
fn every_call_works_over_a_channel_and_over_sockets() {
    let world = World::new();
    let _server = CacheServer::serving(&world, "--listen 127.0.0.1:0");
    let auto = Cache::open_with("web/c", &options(&world, "auto")).unwrap();
    let tcp = auto.contact().lines().find(|line| line.starts_with("tcp ")).unwrap().to_owned();
    for changes in ["auto", "channel web", &tcp, &format!("unix {}", unix(&world).display())] {
        eprintln!("{changes}");
        let options = options(&world, changes);
        every_call(&Cache::open_with("web/c", &options).unwrap());
    }
}

#[test]
fn items_expire_for_readers_too() {
    let world = World::new();
    let mut server = CacheServer::serving(&world, "");
    let cache = Cache::open_with("web/c", &options(&world, "auto")).unwrap();
    cache.set(b"soon", b"x", 0, 1).unwrap();
    cache.set(b"later", b"y", 0, 1000).unwrap();
    cache.set(b"in a month", b"z", 0, 60 * 60 * 24 * 40).unwrap();
    wait_until("the end of an item", || get(&cache, "soon").is_none());
    assert_eq!(get(&cache, "in a month").as_deref(), Some("z"));
    // A server that hangs does not keep items with an expiry time alive for ever: memory does not answer for them any
    // more.
    signal(&server.0, Signal::STOP);
    let impatient = Options { timeout: Duration::from_millis(300), ..options(&world, "auto") };
    let cache = Cache::open_with("web/c", &impatient).unwrap();
    let mut value = Vec::new();
    wait_until("a clock that stands", || cache.get(b"later", &mut value).is_err());
    signal(&server.0, Signal::CONT);
    wait_until("a clock that goes", || matches!(cache.get(b"later", &mut value), Ok(Some(_))));
    server.kill();
    let _successor = CacheServer::serving(&world, "");
    assert_eq!(get(&cache, "later").as_deref(), Some("y"));
    assert_eq!(cache.survey().unwrap().servers, 2);
}

#[test]
fn threads_share_a_client() {
    let world = World::new();
    let _server = CacheServer::serving(&world, "");
    let options = options(&world, "auto");
    let cache = Cache::open_with("web/c", &options).unwrap();
    cache.set(b"n", b"0", 0, 0).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let cache = &cache;
            scope.spawn(move || {
                for round in 0..300 {
                    cache.increment(b"n", 1).unwrap();
                    let key = format!("{thread}");
                    let value = format!("{thread} {round}");
                    cache.set(key.as_bytes(), value.as_bytes(), 0, 0).unwrap();
                    assert_eq!(get(cache, &key), Some(value));
                }
            });
        }
    });
    assert_eq!(get(&cache, "n").as_deref(), Some("1200"));
    assert_eq!(cache.counters().connections, 1);
}

#[test]
fn items_that_readers_use_are_not_evicted() {
    let world = World::new();
    let _server = CacheServer::serving(&world, "--max-item-size 16K");
    let options = options(&world, "auto");
    let (cache, writer) =
        (Cache::open_with("web/c", &options).unwrap(), Cache::open_with("web/c", &options).unwrap());
    let value = [b'x'; 1000];
    let wanted: Vec<String> = (0..200).map(|number| format!("wanted {number}")).collect();
    for key in &wanted {
        writer.set(key.as_bytes(), &value, 0, 0).unwrap();
    }
    // Far more items than there is room for, which no client reads.
    for number in 0..30_000 {
        writer.set(format!("scanned {number}").as_bytes(), &value, 0, 0).unwrap();
        if number % 10 == 0 {
            let _ = cache.get_many(&wanted, |_, _| {}).unwrap();
        }
    }
    let found = cache.get_many(&wanted, |_, _| {}).unwrap();
    assert!(cache.counters().reported > 0);
    assert!(found > 190, "{found} of {}", wanted.len());
}

#[test]
fn the_command_works_on_items() {
    let world = World::new();
    let _server = CacheServer::serving(&world, "");
    world.good("cache set web/c a one --ttl 1000 --flags 3");
    assert_eq!(world.good("cache get web/c a").out, "one\n");
    let said = world.expect(1, "cache set web/c a two --how add");
    assert!(said.err.contains("cache web/c has an item \"a\""), "{said:?}");
    world.good("cache set web/c a ! --how append");
    assert_eq!(world.good("cache get web/c a").out, "one!\n");
    world.expect(2, "cache set web/c a ! --how append --ttl 3");
    let mut child = world.command("cache set web/c piped").stdin(Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"from\nstdin").unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(world.good("cache get web/c piped --raw").out, "from\nstdin");
    let said = world.expect(1, "cache delete web/c piped none");
    assert!(said.err.contains("has no item \"none\""), "{said:?}");
    let said = world.good("cache list");
    let line = said.out.lines().nth(1).unwrap();
    assert!(line.starts_with("web/c  16 MiB  ") && line.contains("@host"), "{said:?}");

    let said = world.good("cache status web/c");
    for part in
        ["cache web/c: server 1 is process ", "1 items in ", "changes go to: channel web, unix ", "QUEUE"]
    {
        assert!(said.out.contains(part), "{part:?} is missing in\n{}", said.out);
    }
    let json = world.good("cache status --json").json();
    assert_eq!(
        (&json[0]["items"], &json[0]["no_server"], &json[0]["server"]["cmd_set"]),
        (&1.into(), &serde_json::Value::Null, &"4".into())
    );
    let said = world.good("cache status --prometheus");
    for line in ["ginnel_cache_up{cache=\"web/c\"} 1", "ginnel_cache_sets_total{cache=\"web/c\"} 4"] {
        assert!(said.out.lines().any(|one| one == line), "{line} is missing in\n{}", said.out);
    }
    let cache = Cache::open_with("web/c", &options(&world, "auto")).unwrap();
    for _ in 0..200 {
        cache.set(b"hot key", b"x", 0, 0).unwrap();
    }
    let said = world.good("cache hot web/c");
    assert!(said.out.lines().nth(1).unwrap().contains("hot"), "{said:?}");
    assert!(world.good("cache hot web/c --json").json()[0]["uses"].as_u64().unwrap() > 100);
    let said = world.expect(1, "cache limit web/c 4M");
    assert!(said.err.contains("MEMLIMIT_TOO_SMALL"), "{said:?}");
    world.good("cache limit web/c 8M");
    assert!(cache.survey().unwrap().limit < cache.survey().unwrap().shape.segments as u64);
    world.good("cache flush web/c");
    world.expect(1, "cache get web/c a");
}

#[test]
fn changes_of_another_process_are_read() {
    let world = World::new();
    let _server = CacheServer::serving(&world, "");
    let cache = Cache::open_with("web/c", &options(&world, "auto")).unwrap();
    cache.set(b"a", b"1", 0, 0).unwrap();
    world.good("cache set web/c a 2");
    assert_eq!(get(&cache, "a").as_deref(), Some("2"));
    assert_eq!(world.good("cache get web/c a").out, "2\n");
}

/// The Python client, with its own tests.
#[test]
fn the_python_client_passes_its_tests() {
    kit::require_programs!(&["python3"]);
    let world = World::new();
    let _server = CacheServer::serving(&world, "");
    let library = build::libraries("crates/faces/capi", "capi").join("libginnel.so");
    let python = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python");
    let output = Command::new("python3")
        .args(["-B", "-m", "unittest", "discover", "-s", "tests", "-v"])
        .current_dir(python)
        .env("GINNEL_SOCKET", world.socket())
        .env("GINNEL_LIBRARY", library)
        .env("GINNEL_TEST_CACHE", "web/c")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !said.contains("skipped"), "{said}");
}
