//! Servers that die, hang, lie, or belong to another cache.

use super::{Keeper, TIMEOUT, get, is_no_server, options};
use ginnel_cache_client::{Cache, Entry, Error, Options, Swap};
use kit::wait::WATCHDOG;
use kit::world::World;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A server that answers each connection in its own way, one after another.
fn serve(world: &World, scripts: Vec<Box<dyn FnOnce(Peer) + Send>>) -> (PathBuf, JoinHandle<()>) {
    let path = world.files().join("server.sock");
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).unwrap();
    let thread = std::thread::spawn(move || {
        for script in scripts {
            script(Peer(listener.accept().unwrap().0));
        }
    });
    (path, thread)
}

struct Peer(UnixStream);

impl Peer {
    /// Reads this many bytes.
    fn read(&mut self, bytes: usize) -> String {
        let mut read = vec![0; bytes];
        self.0.read_exact(&mut read).unwrap();
        String::from_utf8(read).unwrap()
    }

    /// Reads exactly these bytes.
    fn expect(&mut self, bytes: &str) {
        assert_eq!(self.read(bytes.len()), bytes);
    }

    fn say(&mut self, bytes: &str) {
        // The client may have received enough already.
        let _ = self.0.write_all(bytes.as_bytes());
    }

    fn greet(&mut self, id: [u64; 2]) {
        self.expect("stats ginnel\r\n");
        self.say(&format!("STAT ginnel web/c {:016x}{:016x}\r\nEND\r\n", id[0], id[1]));
    }
}

fn open(world: &World, path: &Path) -> Cache {
    Cache::open_with("web/c", &options(world, &format!("unix {}", path.display()))).unwrap()
}

/// For servers that hang.
fn open_impatiently(world: &World, path: &Path) -> Cache {
    let timeout = Duration::from_secs(1);
    let options = Options { timeout, ..options(world, &format!("unix {}", path.display())) };
    Cache::open_with("web/c", &options).unwrap()
}

#[test]
fn requests_and_answers() {
    let world = World::new();
    let keeper = Keeper::new(&world, "c", [1, 2]);
    let id = keeper.store.id();
    let (path, server) = serve(
        &world,
        vec![Box::new(move |mut peer| {
            peer.greet(id);
            for (request, answer) in [
                ("ms k 1 c F3 T60\r\nv\r\n", "HD c5\r\n"),
                ("ms k 1 c ME\r\nv\r\n", "NS \r\n"),
                ("ms k 1 c MR\r\nv\r\n", "HD c6\r\n"),
                ("ms k 1 c MA\r\nv\r\n", "HD\r\n"),
                ("ms k 1 c MP\r\nv\r\n", "NS\r\n"),
                ("ms k 1 c C9\r\nv\r\n", "EX\r\n"),
                ("ms k 1 c C9\r\nv\r\n", "NF\r\n"),
                ("ms k 1 c C9\r\nv\r\n", "HD c10\r\n"),
                ("md k\r\n", "HD\r\n"),
                ("md k\r\n", "NF\r\n"),
                ("ma k v D2\r\n", "VA 2\r\n12\r\n"),
                ("ma k v D2 MD\r\n", "NF\r\n"),
                ("mg k T5\r\n", "HD\r\n"),
                ("mg k T5\r\n", "EN\r\n"),
                ("mg k v f c T5\r\n", "VA 3 f4 c5\r\na\nb\r\n"),
                ("flush_all\r\n", "OK\r\n"),
                ("cache_memlimit 64\r\n", "OK\r\n"),
                ("stats hot\r\n", "STAT a 3\r\nSTAT b c 2\r\nEND\r\n"),
                ("ms k 1 c\r\nv\r\n", "SERVER_ERROR object too large for cache\r\n"),
                ("ma k v D1\r\n", "CLIENT_ERROR cannot increment or decrement non-numeric value\r\n"),
            ] {
                peer.expect(request);
                peer.say(answer);
            }
        })],
    );
    let cache = open(&world, &path);
    assert_eq!(cache.set(b"k", b"v", 3, 60).unwrap(), 5);
    assert_eq!(cache.add(b"k", b"v", 0, 0).unwrap(), None);
    assert_eq!(cache.replace(b"k", b"v", 0, 0).unwrap(), Some(6));
    assert_eq!(cache.append(b"k", b"v").unwrap(), Some(0));
    assert_eq!(cache.prepend(b"k", b"v").unwrap(), None);
    for swap in [Swap::Changed, Swap::Missing, Swap::Stored(10)] {
        assert_eq!(cache.cas(b"k", b"v", 0, 0, 9).unwrap(), swap);
    }
    assert!(cache.delete(b"k").unwrap() && !cache.delete(b"k").unwrap());
    assert_eq!((cache.increment(b"k", 2).unwrap(), cache.decrement(b"k", 2).unwrap()), (Some(12), None));
    assert!(cache.touch(b"k", 5).unwrap() && !cache.touch(b"k", 5).unwrap());
    let mut value = Vec::new();
    let item = cache.get_and_touch(b"k", 5, &mut value).unwrap().unwrap();
    assert_eq!((value.as_slice(), item.flags, item.cas, item.len), (&b"a\nb"[..], 4, 5, 3));
    cache.flush().unwrap();
    cache.set_limit(64).unwrap();
    let hot = [("a", "3"), ("b", "c 2")].map(|(key, uses)| (key.to_owned(), uses.to_owned()));
    assert_eq!(cache.stats("hot").unwrap(), hot);
    assert!(matches!(cache.set(b"k", b"v", 0, 0), Err(Error::TooLarge { len: 1, .. })));
    let error = cache.increment(b"k", 1).unwrap_err();
    assert!(matches!(&error, Error::Refused { .. }) && error.to_string().contains("non-numeric"), "{error}");
    server.join().unwrap();
    assert_eq!((cache.counters().connections, cache.counters().lost), (1, 0));
}

#[test]
fn a_lost_answer_is_reported_and_the_next_request_goes_to_the_next_server() {
    let world = World::new();
    let keeper = Keeper::new(&world, "c", [1, 2]);
    let id = keeper.store.id();
    let (path, server) = serve(
        &world,
        vec![
            // The server dies when it gets the request.
            Box::new(move |mut peer| {
                peer.greet(id);
                peer.expect("ms k 1 c\r\n1\r\n");
            }),
            // The server dies while there is no request.
            Box::new(move |mut peer| {
                peer.greet(id);
                peer.expect("ms k 1 c\r\n2\r\n");
                peer.say("HD c2\r\n");
            }),
            // The server dies in the middle of an answer.
            Box::new(move |mut peer| {
                peer.greet(id);
                peer.expect("ms k 1 c\r\n3\r\n");
                peer.say("HD c3\r\n");
                peer.expect("md k\r\n");
                peer.say("H");
            }),
            // The server hangs.
            Box::new(move |mut peer| {
                peer.greet(id);
                peer.expect("ma k v D1\r\n");
                assert_eq!(peer.0.read(&mut [0]).unwrap(), 0);
            }),
            Box::new(move |mut peer| {
                peer.greet(id);
                peer.expect("md k\r\n");
                peer.say("HD\r\n");
            }),
        ],
    );
    let cache = open_impatiently(&world, &path);
    assert!(matches!(cache.set(b"k", b"1", 0, 0), Err(Error::Lost { .. })));
    assert_eq!(cache.set(b"k", b"2", 0, 0).unwrap(), 2);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(cache.set(b"k", b"3", 0, 0).unwrap(), 3);
    assert!(matches!(cache.delete(b"k"), Err(Error::Lost { .. })));
    let began = Instant::now();
    let error = cache.increment(b"k", 1).unwrap_err();
    assert!(matches!(&error, Error::Lost { .. }) && error.to_string().contains("in the time"), "{error}");
    assert!(began.elapsed() < WATCHDOG);
    assert!(cache.delete(b"k").unwrap());
    server.join().unwrap();
    assert_eq!((cache.counters().lost, cache.counters().connections), (3, 5));
}

#[test]
fn of_many_requests_only_the_unanswered_ones_are_lost() {
    let world = World::new();
    let keeper = Keeper::new(&world, "c", [1, 2]);
    let id = keeper.store.id();
    let (path, server) = serve(
        &world,
        vec![Box::new(move |mut peer| {
            peer.greet(id);
            peer.expect("ms a 1 c\r\nx\r\nms b 1 c\r\nx\r\nms c 1 c\r\nx\r\nms d 1 c\r\nx\r\n");
            peer.say("HD c1\r\nSERVER_ERROR out of memory storing object\r\nHD c3\r\n");
        })],
    );
    let cache = open(&world, &path);
    let entry = |key: &'static str| Entry { key: key.as_bytes(), value: b"x", ..Entry::default() };
    let stored = cache.set_many(&[entry("a"), entry("b"), entry(""), entry("c"), entry("d")]);
    assert!(matches!(stored[0], Ok(1)) && matches!(stored[1], Err(Error::Refused { .. })), "{stored:?}");
    assert!(matches!(stored[2], Err(Error::Key(0))) && matches!(stored[3], Ok(3)), "{stored:?}");
    assert!(matches!(stored[4], Err(Error::Lost { .. })), "{stored:?}");
    assert!(cache.set_many(&[]).is_empty());
    server.join().unwrap();
}

#[test]
fn the_client_disconnects_from_a_server_that_lies() {
    let world = World::new();
    let keeper = Keeper::new(&world, "c", [1, 2]);
    let id = keeper.store.id();
    let endless = "x".repeat(100_000);
    let lies = ["VA 1 f0 c1\r\nx\r\n", "HD\r\nHD\r\n", "VA 99999999999\r\n", "\r\n", "NONE\r\n", &endless];
    let scripts: Vec<Box<dyn FnOnce(Peer) + Send>> = lies
        .iter()
        .map(|lie| {
            let lie = (*lie).to_owned();
            Box::new(move |mut peer: Peer| {
                peer.greet(id);
                peer.expect("md k\r\n");
                peer.say(&lie);
                // The client disconnects.
                let _ = peer.0.read_to_end(&mut Vec::new());
            }) as _
        })
        .collect();
    let (path, server) = serve(&world, scripts);
    let cache = open(&world, &path);
    for lie in lies {
        let error = cache.delete(b"k").unwrap_err();
        assert!(matches!(error, Error::Nonsense { .. }), "{error} to {:?}", &lie[..lie.len().min(20)]);
    }
    server.join().unwrap();
}

#[test]
fn a_server_of_another_cache_is_not_asked() {
    let world = World::new();
    let mut keeper = Keeper::new(&world, "c", [1, 2]);
    let hello = |said: &'static str| -> Box<dyn FnOnce(Peer) + Send> {
        Box::new(move |mut peer| {
            peer.expect("stats ginnel\r\n");
            peer.say(said);
            assert_eq!(peer.0.read(&mut [0]).unwrap(), 0, "asked something");
        })
    };
    let (path, server) = serve(
        &world,
        vec![
            hello("ERROR\r\n"),
            hello("STAT ginnel web/c 00000000000000000000000000000000\r\nEND\r\n"),
            hello("END\r\n"),
            hello("HTTP/1.1 400 Bad Request\r\n\r\n"),
        ],
    );
    let cache = open(&world, &path);
    for part in
        ["not a ginnel-cache", "there is the cache web/c 0000", "not a ginnel-cache", "not a ginnel-cache"]
    {
        let error = cache.set(b"k", b"v", 0, 0).unwrap_err();
        assert!(is_no_server(&error) && error.to_string().contains(part), "{error}");
    }
    server.join().unwrap();

    // The header may name any server; the server that answers must belong to this cache.
    keeper.store.set_contact(&format!("tcp nowhere\nnonsense\nunix {}\nchannel none\n", path.display()));
    keeper.store.set(b"k", &[b"there"], 0, 0).unwrap();
    let id = keeper.store.id();
    let (_, server) = serve(
        &world,
        vec![Box::new(move |mut peer| {
            peer.greet(id);
            peer.expect("md k\r\n");
            peer.say("HD\r\n");
        })],
    );
    let cache = Cache::open_with("web/c", &options(&world, "auto")).unwrap();
    assert!(cache.delete(b"k").unwrap());
    server.join().unwrap();
    let error = cache.delete(b"k").unwrap_err();
    assert!(is_no_server(&error) && error.to_string().contains("channel none: "), "{error}");
}

#[test]
fn a_server_that_is_being_replaced_is_waited_for() {
    let world = World::new();
    let keeper = Keeper::new(&world, "c", [1, 2]);
    let id = keeper.store.id();
    let path = world.files().join("server.sock");
    let options =
        Options { patience: Duration::from_secs(20), ..options(&world, &format!("unix {}", path.display())) };
    let cache = Cache::open_with("web/c", &options).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| cache.set(b"k", b"v", 0, 0));
        std::thread::sleep(Duration::from_millis(300));
        let (_, server) = serve(
            &world,
            vec![
                // The server dies before it sends anything.
                Box::new(|_| {}),
                Box::new(move |mut peer| {
                    peer.greet(id);
                    peer.expect("ms k 1 c\r\nv\r\n");
                    peer.say("HD c4\r\n");
                }),
            ],
        );
        assert_eq!(waiting.join().unwrap().unwrap(), 4);
        server.join().unwrap();
    });
}

#[test]
fn hits_are_reported_while_memory_is_short() {
    let world = World::new();
    let mut keeper = Keeper::new(&world, "c", [1, 2]);
    let id = keeper.store.id();
    let mut keys = Vec::new();
    while keys.len() < 300 {
        let key = format!("k{}", keys.len());
        keeper.store.set(key.as_bytes(), &[&[b'v'; 100]], 0, 0).unwrap();
        keys.push(key);
    }
    let hashes: Vec<String> =
        keys.iter().map(|key| format!("{:016x}", keeper.store.hash(key.as_bytes()))).collect();
    let (path, server) = serve(
        &world,
        vec![Box::new(move |mut peer| {
            peer.greet(id);
            let (mut told, mut room) = (Vec::new(), [0; 4096]);
            while !told.ends_with(b"md over\r\n") {
                let got = peer.0.read(&mut room).unwrap();
                told.extend_from_slice(&room[..got]);
            }
            let told = String::from_utf8(told).unwrap();
            peer.say("NF\r\n");
            let reports = told.strip_suffix("md over\r\n").unwrap();
            let mut words = 0;
            for line in reports.lines() {
                let line = line.strip_prefix("ginnel hits ").unwrap();
                for word in line.split(' ') {
                    assert!(hashes.iter().any(|hash| hash == word), "{word}");
                    words += 1;
                }
            }
            // Keys that share a slot are reported in turn, but no more than a limit.
            assert!((100..=256 * 25).contains(&words), "{words}");
        })],
    );
    let cache = open(&world, &path);
    assert!(get(&cache, "k1").is_some());
    assert_eq!(cache.counters().connections, 0, "nobody wants to know");
    let limit = keeper.store.segments().0;
    keeper.store.set_limit(limit);
    let end = Instant::now() + Duration::from_millis(200);
    while Instant::now() < end {
        keys.iter().for_each(|key| assert!(get(&cache, key).is_some()));
    }
    assert!(!cache.delete(b"over").unwrap());
    server.join().unwrap();
    assert!(cache.counters().reported >= 100);
}

#[test]
fn a_get_does_not_wait_for_a_server_that_hangs() {
    let world = World::new();
    let mut keeper = Keeper::new(&world, "c", [1, 2]);
    for number in 0..300 {
        keeper.store.set(format!("k{number}").as_bytes(), &[&[b'v'; 100]], 0, 0).unwrap();
    }
    let limit = keeper.store.segments().0;
    keeper.store.set_limit(limit);
    let path = world.files().join("server.sock");
    // A client that connects waits in the server's queue.
    let listener = UnixListener::bind(&path).unwrap();
    let cache = open(&world, &path);
    let began = Instant::now();
    assert!(get(&cache, "k1").is_some());
    assert!(began.elapsed() < TIMEOUT, "{:?}", began.elapsed());
    listener.set_nonblocking(true).unwrap();
    assert!(listener.accept().is_ok(), "it was tried to tell the server");
}

#[test]
fn waiting_for_an_endless_answer_times_out() {
    let world = World::new();
    let keeper = Keeper::new(&world, "c", [1, 2]);
    let id = keeper.store.id();
    let drip = |mut peer: Peer| {
        // The server sends a line now and then.
        while peer.0.write_all(b"STAT a 1\r\n").is_ok() {
            std::thread::sleep(Duration::from_millis(100));
        }
    };
    let (path, server) = serve(
        &world,
        vec![
            Box::new(drip),
            Box::new(move |mut peer| {
                peer.greet(id);
                drip(peer);
            }),
        ],
    );
    let cache = open_impatiently(&world, &path);
    let began = Instant::now();
    assert!(is_no_server(&cache.delete(b"k").unwrap_err()));
    assert!(matches!(cache.stats("").unwrap_err(), Error::Lost { .. }));
    assert!(began.elapsed() < WATCHDOG, "{:?}", began.elapsed());
    drop(cache);
    server.join().unwrap();
}

#[test]
fn waiting_for_a_server_that_does_not_accept_times_out() {
    let world = World::new();
    let _keeper = Keeper::new(&world, "c", [1, 2]);
    let path = world.files().join("server.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let cache = open_impatiently(&world, &path);
    let began = Instant::now();
    // The server sends nothing, and when its queue is full it accepts no connection.
    let mut waiting = Vec::new();
    assert!(is_no_server(&cache.delete(b"k").unwrap_err()));
    rustix::net::listen(&listener, 0).unwrap();
    for _ in 0..200 {
        let flags = rustix::net::SocketFlags::NONBLOCK;
        let kind = rustix::net::SocketType::STREAM;
        let socket = rustix::net::socket_with(rustix::net::AddressFamily::UNIX, kind, flags, None).unwrap();
        let address = rustix::net::SocketAddrUnix::new(&path).unwrap();
        let refused = rustix::net::connect(&socket, &address).is_err();
        waiting.push(socket);
        if refused {
            break;
        }
    }
    let error = cache.delete(b"k").unwrap_err();
    assert!(is_no_server(&error), "{error}");
    assert!(began.elapsed() < WATCHDOG, "{:?}", began.elapsed());
}
