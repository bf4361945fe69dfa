//! The life cycle of a volume, driven by the polling client: it is killed, loses power, is drained, resized and paused.

mod server;

use ginnel_layout::virtio_scsi::Event;
use ginnel_volume_bench::verify::{Ledger, Since};
use ginnel_volume_bench::{Client, Device, Operation, Options, Recovery, Request, Ring, Status};
use kit::random::Random;
use kit::wait::WATCHDOG;
use server::Server;
use std::time::{Duration, Instant};

const BLOCK: u32 = 4096;
const BLOCKS: usize = 2048;
const BYTES: u64 = BLOCKS as u64 * BLOCK as u64;

/// A load of random reads and writes, with an occasional flush. Each request has its own slot of one queue.
struct Load {
    ledger: Ledger,
    random: Random,
    /// The block of each slot's request, or `None` for a flush.
    slots: Vec<Option<usize>>,
    busy: Vec<bool>,
    flushing: bool,
    done: u64,
}

impl Load {
    fn new(depth: usize, seed: u64) -> Self {
        Self {
            ledger: Ledger::new(BLOCK, BLOCKS, 0),
            random: Random::new(seed),
            slots: vec![None; depth],
            busy: vec![false; BLOCKS],
            flushing: false,
            done: 0,
        }
    }

    /// Submits requests until the queue is full.
    fn submit(&mut self, client: &mut Client) {
        let queue = client.queue(0);
        while let Some(slot) = queue.claim() {
            let dice = self.random.next();
            let index = (dice >> 32) as usize % BLOCKS;
            let request = if dice.is_multiple_of(64) && !self.flushing {
                self.flushing = true;
                self.ledger.flush();
                self.slots[slot.index()] = None;
                Request::flush()
            } else if self.busy[index] {
                queue.release(slot);
                break;
            } else {
                self.busy[index] = true;
                self.slots[slot.index()] = Some(index);
                let at = self.ledger.offset(index);
                if dice.is_multiple_of(3) {
                    Request::read(at, BLOCK)
                } else {
                    let mut bytes = vec![0; BLOCK as usize];
                    self.ledger.write(index, &mut bytes);
                    queue.buffer(slot).write(0, &bytes);
                    Request::write(at, BLOCK)
                }
            };
            queue.submit(slot, request).unwrap();
        }
        queue.publish().unwrap();
    }

    /// Handles completions; returns whether there were any.
    fn poll(&mut self, client: &mut Client) -> bool {
        let queue = client.queue(0);
        let mut any = false;
        while let Some(done) = queue.poll().unwrap() {
            any = true;
            assert_eq!(done.status, Status::Ok, "{}", done.request);
            self.done += 1;
            match (done.request.operation, self.slots[done.slot.index()]) {
                (Operation::Read, Some(index)) => {
                    let bytes = queue.buffer(done.slot).to_vec();
                    self.ledger.check(index, &bytes[..BLOCK as usize], Since::Running).unwrap();
                    self.busy[index] = false;
                }
                (Operation::Write, Some(index)) => {
                    self.ledger.acknowledged(index);
                    self.busy[index] = false;
                }
                (Operation::Flush, None) => {
                    self.ledger.flushed();
                    self.flushing = false;
                }
                other => panic!("{other:?}"),
            }
            queue.release(done.slot);
        }
        any
    }

    /// Waits until no request is in flight.
    fn drain(&mut self, client: &mut Client) {
        let until = Instant::now() + WATCHDOG;
        while client.queue(0).submitted() > 0 {
            self.poll(client);
            assert!(Instant::now() < until, "{} requests never come back", client.queue(0).submitted());
            std::thread::yield_now();
        }
    }

    fn run_for(&mut self, client: &mut Client, time: Duration) {
        let until = Instant::now() + time;
        while Instant::now() < until {
            self.submit(client);
            if !self.poll(client) {
                std::thread::yield_now();
            }
        }
    }

    /// Reads and verifies every block that was ever written.
    fn check_all(&mut self, client: &mut Client, since: Since) {
        let mut bytes = vec![0; BLOCK as usize];
        for index in 0..BLOCKS {
            client.read(self.ledger.offset(index), &mut bytes).unwrap();
            self.ledger.check(index, &bytes, since).unwrap();
        }
    }
}

fn killed_at_random(ring: Ring, kills: usize, flags: &str) {
    let mut server = Server::start(BYTES, flags);
    let options = Options { depth: 32, ring, ..server.options() };
    let mut client = Client::connect(options).unwrap();
    let mut load = Load::new(32, 0x5eed + kills as u64);
    let mut longest = 0;
    for _ in 0..kills {
        let time = Duration::from_micros(load.random.below(30_000));
        load.run_for(&mut client, time);
        server.kill();
        longest = longest.max(client.queue(0).submitted());
        server.restart();
        assert_eq!(client.reconnect_within(WATCHDOG).unwrap(), Recovery::ByServer);
    }
    load.drain(&mut client);
    load.check_all(&mut client, Since::Running);
    println!("{ring:?}: {kills} kills, {} requests, at most {longest} on their way at a kill", load.done);
    assert!(longest > 0 && load.done > kills as u64);
}

#[test]
fn killed_at_random_it_loses_and_repeats_nothing() {
    killed_at_random(Ring::Split, 100, "--path IMAGE --wait interrupt");
}

#[test]
fn killed_at_random_with_packed_rings() {
    killed_at_random(Ring::Packed, 100, "--path IMAGE --direct off");
}

/// Holds the lock beside the socket, as the io_uring rings of a killed volume do until the disk has answered.
fn hold_turn(server: &Server) -> std::fs::File {
    use rustix::fs::{FlockOperation, flock};
    let held = std::fs::File::open(server.dir.path().join("v.sock.lock")).unwrap();
    let until = Instant::now() + WATCHDOG;
    while flock(&held, FlockOperation::NonBlockingLockExclusive).is_err() {
        assert!(Instant::now() < until, "the kernel does not let go");
        std::thread::yield_now();
    }
    held
}

/// The kernel may take a while until it has closed everything that a killed volume used.
#[test]
fn a_successor_waits_until_its_predecessor_is_gone() {
    use ginnel_volume::lock::{Use, lock};
    let mut server = Server::start(BYTES, "--path IMAGE");
    server.kill();
    let file = std::fs::File::options().read(true).write(true).open(server.image()).unwrap();
    lock(&file, &server.image(), Use::Write, WATCHDOG).unwrap();
    let turn = hold_turn(&server);
    let releases = std::thread::spawn(move || {
        // This is longer than a volume waits for an image if it does not know of a killed predecessor.
        std::thread::sleep(Duration::from_secs(8));
        drop((file, turn));
    });
    server.restart();
    assert!(server.log().contains("trying again for 60 seconds"), "{}", server.log());
    releases.join().unwrap();
    server.connect().read(0, &mut [0; 512]).unwrap();
}

/// This also holds if no lock on the image shows that another process uses it.
#[test]
fn a_successor_waits_even_without_an_image_lock() {
    let mut server = Server::start(BYTES, "--path IMAGE --lock false");
    server.kill();
    let held = hold_turn(&server);
    server.launch();
    server.wait_for_line("the kernel has not finished the requests of the last process", 1);
    assert_eq!(server.count("serving"), 1);
    drop(held);
    server.wait_for_line("serving", 2);
    server.connect().read(0, &mut [0; 512]).unwrap();
    // What has ended by itself is not waited for, although its names are there.
    assert!(server.terminate().success());
    server.restart();
    assert_eq!(server.count("has not finished the requests"), 1, "{}", server.log());
}

#[test]
fn a_power_cut_takes_only_what_was_not_flushed() {
    let mut server = Server::start(BYTES, "--path IMAGE --backend volatile");
    let mut client = Client::connect(Options { depth: 16, ..server.options() }).unwrap();
    let mut load = Load::new(16, 0xcafe);
    let mut lost = 0;
    for _ in 0..20 {
        let time = Duration::from_micros(5000 + load.random.below(30_000));
        load.run_for(&mut client, time);
        load.drain(&mut client);
        server.kill();
        server.restart();
        client.reconnect_within(WATCHDOG).unwrap();
        // First checks what the power cut has left, and then continues from there.
        let mut bytes = vec![0; BLOCK as usize];
        for index in 0..BLOCKS {
            client.read(load.ledger.offset(index), &mut bytes).unwrap();
            if load.ledger.check(index, &bytes, Since::Running).is_err() {
                lost += 1;
                load.ledger.check(index, &bytes, Since::PowerCut).unwrap();
            }
        }
    }
    // Otherwise the disk has no volatile cache, and the test proves nothing.
    assert!(lost > 0, "nothing was lost in {} requests", load.done);
}

#[test]
fn without_a_write_cache_a_power_cut_takes_nothing() {
    let mut server = Server::start(BYTES, "--path IMAGE --backend volatile");
    let mut client = server.connect();
    client.set_write_cache(false).unwrap();
    let mut load = Load::new(32, 0xbeef);
    load.run_for(&mut client, Duration::from_millis(200));
    load.drain(&mut client);
    server.kill();
    server.restart();
    client.reconnect_within(WATCHDOG).unwrap();
    load.check_all(&mut client, Since::Running);
}

/// A driver that turns the write cache off sends no more flushes, so the volume flushes the cache at that time.
#[test]
fn turning_the_cache_off_flushes_it() {
    let mut server = Server::start(BYTES, "--path IMAGE --backend volatile");
    let mut client = server.connect();
    let block = |n: u64| [n as u8 + 1; BLOCK as usize];
    for n in 0..16 {
        client.write(n * u64::from(BLOCK), &block(n)).unwrap();
    }
    client.set_write_cache(false).unwrap();
    server.kill();
    server.restart();
    client.reconnect_within(WATCHDOG).unwrap();
    let mut bytes = [0; BLOCK as usize];
    for n in 0..16 {
        client.read(n * u64::from(BLOCK), &mut bytes).unwrap();
        assert!(bytes == block(n), "block {n}");
    }
}

#[test]
fn a_signal_drains_the_volume() {
    let mut server = Server::start(BYTES, "--path IMAGE");
    let mut client = server.connect();
    let mut load = Load::new(32, 7);
    for _ in 0..5 {
        load.run_for(&mut client, Duration::from_millis(20));
        assert!(server.terminate().success());
        // The volume has answered all requests that it had taken. The others are still in the queue.
        load.poll(&mut client);
        server.restart();
        client.reconnect_within(WATCHDOG).unwrap();
    }
    load.drain(&mut client);
    load.check_all(&mut client, Since::Running);
    assert_eq!(server.count("what was under way is done"), 5);
}

#[test]
fn hup_changes_nothing() {
    let mut server = Server::start(BYTES, "--path IMAGE");
    server.hang_up();
    server.wait_for_line("SIGHUP: nothing is reloaded", 1);
    let mut client = server.connect();
    let mut load = Load::new(32, 7);
    for _ in 0..50 {
        load.run_for(&mut client, Duration::from_millis(2));
        server.hang_up();
    }
    load.drain(&mut client);
    load.check_all(&mut client, Since::Running);
    assert!(server.is_running());
    assert_eq!(server.count(" serving"), 1, "{}", server.log());
    assert!(server.terminate().success());
}

#[test]
fn a_second_front_end_waits_and_a_third_is_refused() {
    let server = Server::start(BYTES, "--backend ram --size 8M --wait interrupt");
    let mut first = server.connect();
    let socket = server.socket();
    let second = std::thread::spawn(move || {
        let mut second = Client::connect(Options { patience: WATCHDOG, ..Options::new(socket) }).unwrap();
        let mut bytes = [0; 512];
        second.read(0, &mut bytes).unwrap();
        bytes
    });
    server.wait_for_line("a second front end: it waits", 1);
    assert!(Client::connect(server.options()).is_err());
    server.wait_for_line("refused", 1);
    first.write(0, &[7; 512]).unwrap();
    first.close().unwrap();
    assert_eq!(second.join().unwrap(), [7; 512]);
}

#[test]
fn a_disk_grows_while_it_is_used() {
    let server = Server::start(BYTES, "--path IMAGE");
    let mut client = server.connect();
    let mut load = Load::new(32, 9);
    load.run_for(&mut client, Duration::from_millis(20));
    let answer = server.control(&format!(r#"{{"op":"resize","size":{}}}"#, 2 * BYTES));
    assert!(answer.contains(&(2 * BYTES).to_string()), "{answer}");
    let until = Instant::now() + WATCHDOG;
    while !client.has_changed().unwrap() {
        assert!(Instant::now() < until, "the client is not told");
        load.run_for(&mut client, Duration::from_millis(1));
    }
    load.drain(&mut client);
    assert_eq!(client.disk().bytes, 2 * BYTES);
    client.write(2 * BYTES - 4096, &[1; 4096]).unwrap();
    assert!(client.write(2 * BYTES, &[1; 4096]).is_err());
    // The image is grown by another program.
    std::fs::File::options().write(true).open(server.image()).unwrap().set_len(3 * BYTES).unwrap();
    let answer = server.control(r#"{"op":"resize"}"#);
    assert!(answer.contains(&(3 * BYTES).to_string()), "{answer}");
    let answer = server.control(r#"{"op":"resize","size":1000}"#);
    assert!(answer.contains("not a multiple"), "{answer}");
}

/// Waits for the next event of a SCSI target.
fn event(client: &mut Client) -> Event {
    let until = Instant::now() + WATCHDOG;
    loop {
        match client.take_event().unwrap() {
            Some(event) => return event,
            None => assert!(Instant::now() < until, "no event comes"),
        }
        std::thread::yield_now();
    }
}

/// Virtio 1.2, section 5.6.6.3.1: the device tells the driver if it has dropped events because it had no buffer.
#[test]
fn dropped_events_are_reported() {
    let missed = Event { event: Event::NONE | Event::MISSED, lun: [0; 8], reason: 0 };
    for ring in [Ring::Split, Ring::Packed] {
        let server = Server::start(BYTES, "--device scsi --path IMAGE --wait interrupt");
        let device = Device::Scsi { target: 0, lun: 0, wide: false };
        let options = Options { device, ring, ..server.options() };
        let mut client = Client::connect(options.clone()).unwrap();
        let mut size = BYTES;
        let mut resize = || {
            size += BYTES;
            let answer = server.control(&format!(r#"{{"op":"resize","size":{size}}}"#));
            assert!(answer.contains(&size.to_string()), "{answer}");
        };
        client.offer_event_buffer().unwrap();
        resize();
        assert_eq!(event(&mut client).event, Event::PARAM_CHANGE);

        // One event is dropped. The flag that says so comes with the next buffer, and only once.
        resize();
        server.wait_for_line("no buffer for an event", 1);
        client.offer_event_buffer().unwrap();
        assert_eq!(event(&mut client), missed);
        client.offer_event_buffer().unwrap();
        resize();
        assert_eq!(event(&mut client).event, Event::PARAM_CHANGE);

        // Events that happen while no front end is connected count as dropped too.
        drop(client);
        resize();
        let mut client = Client::connect(options).unwrap();
        client.offer_event_buffer().unwrap();
        assert_eq!(event(&mut client), missed);
        client.offer_event_buffer().unwrap();
        client.write(size - 4096, &[1; 4096]).unwrap();
        assert_eq!(client.take_event().unwrap(), None);
    }
}

#[test]
fn written_pages_are_marked_for_a_guest_that_migrates() {
    for ring in [Ring::Split, Ring::Packed] {
        // With one slot, the test knows which one is used.
        let server = Server::start(BYTES, "--path IMAGE");
        let mut client = Client::connect(Options { ring, depth: 1, ..server.options() }).unwrap();
        let mut load = Load::new(1, 11);
        load.run_for(&mut client, Duration::from_millis(20));
        load.drain(&mut client);
        client.start_log().unwrap();
        client.take_dirty();
        client.read(0, &mut [0; 8192]).unwrap();
        let [buffer, answer, used] = client.pages_of(0, 0);
        let dirty = client.take_dirty();
        for page in buffer.take(8192).step_by(4096).chain(answer.step_by(4096)) {
            assert!(dirty.contains(&page), "{ring:?}: page {page:#x} of {dirty:x?}");
        }
        assert!(ring == Ring::Packed || used.step_by(4096).any(|page| dirty.contains(&page)), "{dirty:x?}");
        // Writing to the disk changes the status and the ring in the guest's memory, but not the buffer.
        client.write(0, &[1; 8192]).unwrap();
        let dirty = client.take_dirty();
        let [buffer, answer, _] = client.pages_of(0, 0);
        assert!(answer.step_by(4096).all(|page| dirty.contains(&page)));
        assert!(buffer.step_by(4096).all(|page| !dirty.contains(&page)), "{dirty:x?}");
        client.stop_log().unwrap();
        client.take_dirty();
        load.run_for(&mut client, Duration::from_millis(20));
        load.drain(&mut client);
        assert!(client.take_dirty().is_empty());
    }
}

#[test]
fn a_paused_guest_goes_on_where_it_stopped() {
    for ring in [Ring::Split, Ring::Packed] {
        let server = Server::start(BYTES, "--path IMAGE --queues 2 --threads 2");
        let mut client = Client::connect(Options { ring, queues: 2, ..server.options() }).unwrap();
        let mut load = Load::new(32, 13);
        for _ in 0..20 {
            load.run_for(&mut client, Duration::from_millis(5));
            client.pause().unwrap();
        }
        load.drain(&mut client);
        load.check_all(&mut client, Since::Running);
    }
}

#[test]
fn requests_of_many_pieces_and_unaligned_ones() {
    for (flags, sector) in
        [("--path IMAGE", 512), ("--path IMAGE --sector 4096", 4096), ("--backend ram --size 8M", 512)]
    {
        for indirect in [false, true] {
            let server = Server::start(BYTES, flags);
            let options = Options {
                buffer: 64 << 10,
                segment: 512,
                depth: 4,
                indirect,
                ring_size: Some(1024),
                ..server.options()
            };
            let mut client = Client::connect(options).unwrap();
            assert_eq!(client.disk().block, sector);
            let bytes: Vec<u8> = (0..60 << 10).map(|i: u32| (i / 7) as u8).collect();
            client.write(1 << 20, &bytes).unwrap();
            let mut back = vec![0; bytes.len()];
            client.read(1 << 20, &mut back).unwrap();
            assert!(back == bytes, "{flags} {indirect}");
            client.write_zeroes(1 << 20, 8192, true).unwrap();
            client.write_zeroes((1 << 20) + 8192, 8192, false).unwrap();
            client.discard((1 << 20) + 16384, 8192).unwrap();
            client.flush().unwrap();
            client.read(1 << 20, &mut back).unwrap();
            assert!(back[..16384].iter().all(|b| *b == 0) && back[24576..] == bytes[24576..], "{flags}");
            assert_eq!(client.id().unwrap(), "v");
        }
    }
}

#[test]
fn an_idle_volume_sleeps() {
    let server = Server::start(BYTES, "--path IMAGE --queues 2 --threads 2");
    let mut client = Client::connect(Options { queues: 2, ..server.options() }).unwrap();
    client.write(0, &[1; 512]).unwrap();
    let turns = || {
        let answer: serde_json::Value = serde_json::from_str(&server.control(r#"{"op":"stat"}"#)).unwrap();
        let threads = answer["stat"]["threads"].as_array().unwrap().clone();
        threads.iter().map(|thread| thread["turns"].as_u64().unwrap()).sum::<u64>()
    };
    // Once the last polling budget is used up, nothing wakes the volume: its workers make no turn within a second.
    let until = Instant::now() + WATCHDOG;
    let mut before = turns();
    loop {
        std::thread::sleep(Duration::from_secs(1));
        let now = turns();
        if now == before {
            break;
        }
        assert!(Instant::now() < until, "it still turns: {before} {now}");
        before = now;
    }
}
