//! Tests of the server: its clients, its death and its successors.

mod support;

use ginnel::{Rights, StreamChannel};
use ginnel_cache_store::reader::{Found, Reader};
use kit::process::Process;
use kit::random::Random;
use kit::wait::{WATCHDOG, takes_less_than, wait_until};
use rustix::process::Signal;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use support::World;

kit::test_that_skips_are_seen!();

/// Sends a request over a channel, and returns the bytes that the server answers up to and including `end`.
fn over_channel(channel: &mut StreamChannel, request: &[u8], end: &str) -> String {
    channel.write_all(request).unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(end.as_bytes()) {
        let mut buffer = [0; 4096];
        let count = channel.read(&mut buffer).unwrap();
        assert!(count > 0, "closed behind {}", answer.escape_ascii());
        answer.extend_from_slice(&buffer[..count]);
    }
    String::from_utf8(answer).unwrap()
}

#[test]
fn channels_and_sockets_and_readers_see_one_cache() {
    let world = World::new();
    let path = world.file("cache.sock");
    let served = world.serve(&format!("--channel items --channel web --unix {}", path.display()));
    assert_eq!(served.text("set a 7 0 5\r\nvalue\r\n"), "STORED\r\n");
    let mut unix = UnixStream::connect(&path).unwrap();
    unix.write_all(b"get a\r\nquit\r\n").unwrap();
    let mut answer = String::new();
    unix.read_to_string(&mut answer).unwrap();
    assert_eq!(answer, "VALUE a 7 5\r\nvalue\r\nEND\r\n");
    for segment in ["items", "web"] {
        let endpoint = world.attach(segment);
        let mut channel: StreamChannel = endpoint.connect("cache.main").unwrap();
        let answer = over_channel(&mut channel, b"get a\r\n", "END\r\n");
        assert_eq!(answer, "VALUE a 7 5\r\nvalue\r\nEND\r\n");
        let large = vec![b'x'; 900_000];
        let set = [b"set large 0 0 900000\r\n", &large[..], b"\r\n"].concat();
        assert_eq!(over_channel(&mut channel, &set, "\r\n"), "STORED\r\n");
        let answer = over_channel(&mut channel, b"get large\r\n", "END\r\n");
        assert_eq!(answer.len(), "VALUE large 0 900000\r\n".len() + 900_000 + "\r\nEND\r\n".len());
    }
    let block = world.attach("items").open_block("cache.main", Rights::READ).unwrap();
    let reader = Reader::new(block.memory().unwrap()).unwrap();
    let mut value = Vec::new();
    assert!(matches!(reader.get(b"a", &mut value), Found::Hit(meta) if meta.flags == 7));
    assert_eq!(value, b"value");
    let contact = reader.contact();
    let expected =
        format!("channel items\nchannel web\ntcp 127.0.0.1:{}\nunix {}\n", served.port, path.display());
    assert_eq!(contact, expected);
    let [high, low] = reader.id();
    let answer = served.text("stats ginnel\r\n");
    assert_eq!(answer, format!("STAT ginnel items/main {high:016x}{low:016x}\r\nEND\r\n"));
    assert_eq!(served.text(&format!("ginnel hits {:016x} x\r\n", reader.hash(b"a"))), "");
    assert_eq!(served.stat("ginnel_reader_hits"), 1);
    assert!(served.text("stats settings\r\n").contains("STAT item_size_max 1048576\r\n"));
    for of in ["items", "slabs", "conns", "hot"] {
        assert!(served.text(&format!("stats {of}\r\n")).ends_with("END\r\n"), "{of}");
    }
}

#[test]
fn a_client_learns_whether_the_server_itself_has_its_connection() {
    let world = World::new();
    let served = world.serve("");
    let mut client = TcpStream::connect(("127.0.0.1", served.port)).unwrap();
    let address = client.local_addr().unwrap();
    let ask = |address: &str| served.text(&format!("stats ginnel {address}\r\n"));
    let is_known = |answer: &str| answer.ends_with("STAT ginnel_client yes\r\nEND\r\n");
    assert!(is_known(&ask(&address.to_string())));
    assert!(is_known(&ask(&format!("[::ffff:127.0.0.1]:{}", address.port()))));
    for other in ["127.0.0.1:1", "x", "127.0.0.2:99999"] {
        assert!(ask(other).ends_with("STAT ginnel_client no\r\nEND\r\n"), "{other}");
    }
    client.write_all(b"ginnel echo 5\r\nVALUEversion\r\n").unwrap();
    let mut answer = [0; 10];
    client.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"VALUEVERSI");
    drop(client);
    wait_until("that the client is gone", || !is_known(&ask(&address.to_string())));
}

#[test]
fn a_successor_serves_the_same_items() {
    let world = World::new();
    let mut served = world.serve("");
    let id = served.text("stats ginnel\r\n");
    for round in 0..5 {
        let set = format!("set key{round} {round} 0 6\r\nvalue{round}\r\n");
        assert_eq!(served.text(&set), "STORED\r\n");
        served.process.signal(if round % 2 == 0 { Signal::KILL } else { Signal::TERM });
        let ended = served.process.wait().unwrap();
        assert_eq!(ended.success(), round % 2 == 1, "{ended:?}");
        served = world.serve("");
        for key in 0..=round {
            let expected = format!("VALUE key{key} {key} 6\r\nvalue{key}\r\nEND\r\n");
            assert_eq!(served.text(&format!("get key{key}\r\n")), expected);
        }
    }
    assert_eq!(served.text("stats ginnel\r\n"), id);
    assert_eq!(served.stat("ginnel_server"), 6);
}

#[test]
fn a_second_server_is_told_who_has_the_cache() {
    let world = World::new();
    let served = world.serve("");
    let output = world.command("--channel web").output().unwrap();
    let complaint = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success());
    let who = format!("process {}", served.process.id());
    assert!(complaint.contains("is served already") && complaint.contains(&who), "{complaint}");
    // A server with another name serves another cache.
    let other = world.serve("--name other");
    assert_eq!(served.text("set a 0 0 1\r\n1\r\n"), "STORED\r\n");
    assert_eq!(other.text("get a\r\n"), "END\r\n");
}

#[test]
fn the_death_of_the_daemon_changes_nothing() {
    let mut world = World::new();
    let mut all = Vec::new();
    for flags in ["--name plain --channel none", "--name channels --channel web"] {
        let served = world.serve(flags);
        assert_eq!(served.text("set a 0 0 1\r\n1\r\n"), "STORED\r\n");
        world.replace_daemon();
        assert_eq!(served.text("get a\r\nset b 0 0 1\r\n2\r\n"), "VALUE a 0 1\r\n1\r\nEND\r\nSTORED\r\n");
        // The daemon's successor knows which server owns the cache.
        let output = world.command(flags).args(["--listen", "127.0.0.1:0"]).output().unwrap();
        let complaint = String::from_utf8(output.stderr).unwrap();
        assert!(complaint.contains("is served already"), "{complaint}");
        all.push(served);
    }
    let mut channel: StreamChannel = world.attach("web").connect("cache.channels").unwrap();
    assert_eq!(over_channel(&mut channel, b"get b\r\n", "END\r\n"), "VALUE b 0 1\r\n2\r\nEND\r\n");
}

#[test]
fn impossible_options_are_named() {
    let world = World::new();
    for (flags, part) in [
        ("--channel none", "no client could reach this cache"),
        ("--name small --memory 1M", "too few for a cache"),
        ("--channel nothing", "segment nothing cannot be used for channels"),
        ("--listen 127.0.0.1:1 --max-connections 1 --name large --memory 100G", "cannot be made"),
        ("--name bad/name", "bad/name"),
    ] {
        let output = world.command(flags).output().unwrap();
        let complaint = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && complaint.contains(part), "{flags}: {complaint}");
    }
}

#[test]
fn hup_changes_nothing_and_term_ends() {
    let world = World::new();
    let mut served = world.serve("");
    served.process.signal(Signal::HUP);
    assert_eq!(served.text("version\r\n"), "VERSION 1.6.18\r\n");
    let mut client = served.connect();
    served.process.signal(Signal::TERM);
    assert!(served.process.wait().unwrap().success());
    assert_eq!(client.read(&mut [0; 10]).unwrap_or(0), 0);
}

#[test]
fn a_delayed_flush_comes() {
    let world = World::new();
    let served = world.serve("");
    assert_eq!(served.text("set a 0 0 1\r\n1\r\nflush_all 2\r\n"), "STORED\r\nOK\r\n");
    wait_until("the flush", || served.text("get a\r\n") == "END\r\n");
    // Items that are stored after the flush stay.
    assert_eq!(served.text("set a 0 0 1\r\n1\r\nget a\r\n"), "STORED\r\nVALUE a 0 1\r\n1\r\nEND\r\n");
}

#[test]
fn items_end_on_time() {
    let world = World::new();
    let served = world.serve("");
    takes_less_than(Duration::from_secs(4), || {
        let begin = Instant::now();
        assert_eq!(served.text("set a 0 2 1\r\n1\r\n"), "STORED\r\n");
        wait_until("the end of the item", || served.text("get a\r\n") == "END\r\n");
        let took = begin.elapsed();
        assert!(took >= Duration::from_millis(900), "{took:?}");
        took
    });
}

#[test]
fn the_limit_of_memory_can_be_changed() {
    let world = World::new();
    let served = world.serve("--memory 64M");
    let value = "v".repeat(100_000);
    let fill = || {
        for round in 0..1000 {
            let set = format!("set key{round} 0 0 {} noreply\r\n{value}\r\n", value.len());
            served.ask(set.as_bytes());
        }
        served.stat("bytes")
    };
    let full = fill();
    assert!(full > 45 << 20 && full < 64 << 20, "{full}");
    assert_eq!(served.text("cache_memlimit 16\r\n"), "OK\r\n");
    let small = fill();
    assert!(small < 16 << 20, "{small}");
    assert_eq!(served.text("cache_memlimit 64\r\n"), "OK\r\n");
    assert!(fill() > 45 << 20);
    assert!(served.stat("evictions") > 0);
    assert!(served.text("cache_memlimit 65\r\n").starts_with("MEMLIMIT_ADJUST_FAILED"));
}

/// Returns the bytes of anonymous memory that a process has in RAM (RssAnon).
fn memory_of(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[test]
fn ten_thousand_clients() {
    const CLIENTS: usize = 10_000;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let wanted = CLIENTS as u64 + 200;
    let raised = rustix::process::Rlimit { current: Some(wanted), maximum: limit.maximum };
    let allowed = rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).is_ok();
    kit::require!(allowed, "{wanted} file descriptors are needed; raise `ulimit -Hn`");
    let world = World::new();
    let path = world.file("cache.sock");
    let served = world.serve(&format!("--unix {} --max-connections 10100", path.display()));
    let before = memory_of(served.process.id());
    let mut clients: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let mut client = UnixStream::connect(&path);
            // The backlog may be full, because it is shorter than the number of clients.
            while client.as_ref().is_err_and(|error| error.kind() == ErrorKind::WouldBlock) {
                std::thread::yield_now();
                client = UnixStream::connect(&path);
            }
            client.unwrap()
        })
        .collect();
    for (number, client) in clients.iter_mut().enumerate() {
        client.write_all(format!("set key{number} 0 0 5\r\nvalue\r\n").as_bytes()).unwrap();
    }
    for client in &mut clients {
        let mut answer = [0; 8];
        client.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"STORED\r\n");
    }
    assert_eq!(served.stat("curr_connections"), CLIENTS as u64 + 1);
    let each = (memory_of(served.process.id()) - before) / CLIENTS as u64;
    assert!(each < 1024, "{each} bytes for each idle client");
    // All clients ask at once, each for its own key.
    for (number, client) in clients.iter_mut().enumerate() {
        client.write_all(format!("get key{number}\r\n").as_bytes()).unwrap();
    }
    for (number, client) in clients.iter_mut().enumerate() {
        let expected = format!("VALUE key{number} 0 5\r\nvalue\r\nEND\r\n");
        let mut answer = vec![0; expected.len()];
        client.read_exact(&mut answer).unwrap();
        assert_eq!(String::from_utf8(answer).unwrap(), expected);
    }
    drop(clients);
    wait_until("the end of all clients", || served.stat("curr_connections") == 1);
}

#[test]
fn a_client_above_the_limit_waits() {
    let world = World::new();
    let served = world.serve("--max-connections 3");
    wait_until("a place", || served.stat("curr_connections") == 1);
    let mut clients: Vec<_> = (0..3).map(|_| served.connect()).collect();
    for client in &mut clients {
        client.write_all(b"mn\r\n").unwrap();
        client.read_exact(&mut [0; 4]).unwrap();
    }
    let mut waits = served.connect();
    waits.write_all(b"mn\r\n").unwrap();
    waits.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    assert!(waits.read(&mut [0; 4]).is_err());
    clients.pop();
    waits.set_read_timeout(Some(WATCHDOG)).unwrap();
    waits.read_exact(&mut [0; 4]).unwrap();
}

#[test]
fn a_client_that_reads_nothing_costs_little_and_harms_nobody() {
    let world = World::new();
    let served = world.serve("");
    let value = "v".repeat(1_000_000);
    served.ask(format!("set a 0 0 {}\r\n{value}\r\n", value.len()).as_bytes());
    let before = memory_of(served.process.id());
    let clients: Vec<TcpStream> = (0..20)
        .map(|_| {
            let client = served.connect();
            client.set_nonblocking(true).unwrap();
            client
        })
        .collect();
    // Each client sends as many requests as its socket accepts, and reads no answer.
    let line = format!("get {}\r\n", "a ".repeat(200)).repeat(50);
    for mut client in &clients {
        while client.write(line.as_bytes()).is_ok() {}
    }
    // Other clients are served, and the memory for waiting answers is bounded.
    for _ in 0..10 {
        assert_eq!(served.text("version\r\n"), "VERSION 1.6.18\r\n");
        let more = memory_of(served.process.id()).saturating_sub(before);
        assert!(more < 20 * (1_500_000 + (256 << 10)), "{more}");
    }
    // A client that starts to read gets all answers.
    let mut client = &clients[0];
    client.set_nonblocking(false).unwrap();
    let each = format!("VALUE a 0 {}\r\n{value}\r\n", value.len());
    for _ in 0..40 {
        let mut answer = vec![0; each.len()];
        client.read_exact(&mut answer).unwrap();
        assert!(answer == each.as_bytes());
    }
    drop(clients);
    wait_until("the end of all clients", || served.stat("curr_connections") == 1);
}

#[test]
fn a_client_that_sends_no_more_gets_its_answers() {
    let world = World::new();
    let served = world.serve("");
    // The client sends a request without its whole value, a request without the end of its line, and many whole requests.
    assert_eq!(served.text("set a 0 0 100\r\nhalf"), "");
    assert_eq!(served.text("get a"), "");
    let many = served.text(&"mn\r\n".repeat(100_000));
    assert_eq!(many, "MN\r\n".repeat(100_000));
    assert_eq!(served.text("get a\r\n"), "END\r\n");
}

#[test]
fn a_very_long_get_is_answered_key_by_key() {
    let world = World::new();
    let served = world.serve("");
    served.text("set key5000 0 0 1\r\n5\r\nset key60000 0 0 1\r\n6\r\n");
    let keys: String = (0..100_000).map(|key| format!("key{key} ")).collect();
    let expected = "VALUE key5000 0 1\r\n5\r\nVALUE key60000 0 1\r\n6\r\nEND\r\nMN\r\n";
    assert_eq!(served.text(&format!("get {keys}\r\nmn\r\n")), expected);
    let cut = format!("get {keys} {} x\r\nmn\r\n", "k".repeat(300));
    let expected =
        "VALUE key5000 0 1\r\n5\r\nVALUE key60000 0 1\r\n6\r\nCLIENT_ERROR bad command line format\r\nMN\r\n";
    assert_eq!(served.text(&cut), expected);
}

/// Returns the ticks of CPU time that a process has used, in user mode and in the kernel.
fn ticks_of(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<_> = text.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn an_idle_server_uses_no_cpu() {
    let world = World::new();
    let served = world.serve("--channel web");
    let mut client = served.connect();
    let endpoint = world.attach("web");
    let mut channel: StreamChannel = endpoint.connect("cache.main").unwrap();
    client.write_all(b"mn\r\n").unwrap();
    client.read_exact(&mut [0; 4]).unwrap();
    assert_eq!(over_channel(&mut channel, b"mn\r\n", "MN\r\n"), "MN\r\n");
    let pid = served.process.id();
    let before = ticks_of(pid);
    std::thread::sleep(Duration::from_secs(3));
    let used = ticks_of(pid) - before;
    // A tick is a hundredth of a second.
    assert!(used <= 2, "{used} ticks in three seconds");
}

#[test]
fn whatever_is_written_to_its_memory_the_server_goes_on() {
    let world = World::new();
    let served = world.serve("--memory 16M");
    for key in 0..2000 {
        served.ask(format!("set key{key} 0 0 5 noreply\r\nvalue\r\n").as_bytes());
    }
    // A member, which may write all memory of the segment, overwrites the block with random bytes.
    let endpoint = world.attach("items");
    let block = endpoint.open_block("cache.main", Rights::READ).unwrap();
    let len = block.len();
    let memory = endpoint.memory();
    let place = find_block(memory, &block);
    let mut random = Random::new(1);
    for round in 0..200 {
        for _ in 0..500 {
            let at = place + 4096 + random.below(len as u64 - 4104) as usize / 8 * 8;
            ginnel::SharedMemory::store_relaxed_u64(memory, at, random.next());
        }
        let key = round * 7;
        let requests = format!(
            "get key{key}\r\nset key{key} 0 0 3\r\nabc\r\nappend key{key} 0 0 1\r\nd\r\nmg key{key} v s t l h\r\nincr key{key} 1\r\ntouch key{key} 5\r\ndelete key{key}\r\nmn\r\n"
        );
        assert!(served.ask(requests.as_bytes()).ends_with(b"MN\r\n"));
    }
    assert_eq!(served.text("version\r\n"), "VERSION 1.6.18\r\n");
}

/// Returns the offset of a block in the memory of its segment.
fn find_block(memory: &ginnel::Mapping, block: &ginnel::Block) -> usize {
    use ginnel::SharedMemory;
    let mut head = [0; 64];
    block.read(0, &mut head).unwrap();
    let pages = (0..memory.len()).step_by(4096);
    let found = pages.into_iter().find(|at| {
        let mut bytes = [0; 64];
        memory.read(*at, &mut bytes);
        bytes == head
    });
    found.unwrap()
}

#[test]
fn a_million_items_are_served_at_once_after_a_restart() {
    let world = World::new();
    let flags = "--memory 256M --usual-item-size 100 --channel none";
    let mut served = world.serve(flags);
    let mut sets = String::new();
    for key in 0..1_000_000 {
        use std::fmt::Write;
        write!(sets, "set key{key} 0 0 8 noreply\r\n{key:08}\r\n").unwrap();
    }
    assert_eq!(served.text(&(sets + "mn\r\n")), "MN\r\n");
    assert!(served.stat("curr_items") > 990_000);
    let path = world.file("warm.sock");
    // The goal of 100 ms is for an optimized build.
    let most = if cfg!(debug_assertions) { 2000 } else { 100 };
    takes_less_than(Duration::from_millis(most), || {
        served.process.signal(Signal::KILL);
        served.process.wait().unwrap();
        let begin = Instant::now();
        let child = world.command(&format!("{flags} --unix {}", path.display())).spawn().unwrap();
        served.process = Process(child);
        let mut client = loop {
            match UnixStream::connect(&path) {
                Ok(client) => break client,
                Err(error) => assert!(begin.elapsed() < WATCHDOG, "{error}"),
            }
            std::thread::sleep(Duration::from_micros(100));
        };
        let mut answer = String::new();
        client.write_all(b"get key999999\r\nquit\r\n").unwrap();
        client.read_to_string(&mut answer).unwrap();
        let took = begin.elapsed();
        assert_eq!(answer, "VALUE key999999 0 8\r\n00999999\r\nEND\r\n");
        eprintln!("served {took:?} after the start");
        took
    });
}
