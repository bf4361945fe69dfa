//! Several queues and threads at once: killed under verified load, cut from power with requests in flight, and an image
//! that QEMU uses.

mod server;

use ginnel_volume_bench::verify::{Ledger, Since, read_stamp};
use ginnel_volume_bench::workload::{Limit, Pattern, Workload, run};
use ginnel_volume_bench::{Client, Error, Operation, Options, Request, Ring, Status};
use kit::random::Random;
use kit::wait::WATCHDOG;
use server::Server;
use std::io::Read;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

fn killed_under_load(ring: Ring, kills: u32, flags: &str) {
    let mut server = Server::start(16 << 20, flags);
    let options = Options { queues: 3, ring, indirect: true, ..server.options() };
    let mut client = Client::connect(options).unwrap();
    assert!(client.has_inflight_region());
    let ended = AtomicBool::new(false);
    let mut random = Random::new(0x1234 + u64::from(kills));
    let (reconnects, verified) = std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            let workload = Workload {
                pattern: Pattern { random: true, reads: 40 },
                depth: 16,
                limit: Limit::Time(Duration::from_millis(500)),
                flush_every: Some(50),
                verify: true,
                sleep: true,
                reconnect: Some(WATCHDOG),
                patience: WATCHDOG,
                ..Workload::default()
            };
            let (mut reconnects, mut verified) = (0, 0);
            // Each run reads back and verifies everything that it has written.
            while !ended.load(Ordering::Relaxed) {
                let outcome = run(&mut client, &workload).unwrap();
                assert_eq!(outcome.failed, 0, "{:?}", outcome.first_failure);
                reconnects += outcome.reconnects;
                verified += outcome.verified;
            }
            (reconnects, verified)
        });
        for _ in 0..kills {
            if load.is_finished() {
                break;
            }
            std::thread::sleep(Duration::from_micros(random.below(80_000)));
            server.kill();
            server.restart();
        }
        ended.store(true, Ordering::Relaxed);
        load.join().unwrap()
    });
    println!("{ring:?}: {kills} kills, {reconnects} reconnects, {verified} blocks verified");
    assert!(reconnects > kills / 2 && verified > 1000);
    assert_eq!(server.count("panicked"), 0);
}

#[test]
fn killed_at_random_with_split_queues() {
    killed_under_load(Ring::Split, 50, "--path IMAGE --queues 3 --threads 2");
}

#[test]
fn killed_at_random_with_packed_queues() {
    killed_under_load(Ring::Packed, 50, "--path IMAGE --queues 3 --threads 2 --wait interrupt --direct off");
}

/// The block size is one sector, which a power cut either writes completely or not at all.
const BLOCK: u32 = 512;
const BLOCKS: usize = 2048;

/// The guest loses power as well, so the requests in flight are forgotten.
#[test]
fn a_power_cut_with_requests_in_flight() {
    let mut server = Server::start(BLOCKS as u64 * u64::from(BLOCK), "--path IMAGE --backend volatile");
    let mut ledger = Ledger::new(BLOCK, BLOCKS, 0);
    let (mut random, mut lost, mut cut_off) = (Random::new(0xfeed), 0, 0);
    for _ in 0..15 {
        let mut client = server.connect();
        cut_off += cut_at(&mut client, &mut ledger, 20 + random.below(500), &mut random, || server.kill());
        server.restart();
        let mut client = server.connect();
        let mut bytes = vec![0; BLOCK as usize];
        for index in 0..BLOCKS {
            client.read(ledger.offset(index), &mut bytes).unwrap();
            // Counts the acknowledged writes that a check for an uninterrupted run would miss. They may be missing
            // after a power cut; flushes exist for that reason.
            let found = read_stamp(&bytes, ledger.offset(index)).unwrap().unwrap_or(0);
            lost += usize::from(ledger.check(index, &bytes, Since::Running).is_err());
            ledger.check(index, &bytes, Since::PowerCut).unwrap_or_else(|wrong| panic!("{wrong}: {found}"));
        }
        client.close().unwrap();
    }
    println!("{lost} acknowledged and not flushed writes were lost, {cut_off} requests were cut off");
    assert!(lost > 0 && cut_off > 0);
}

/// Writes and flushes until this number of requests is done, then cuts the power with more in flight. Returns how many
/// were done.
fn cut_at(
    client: &mut Client,
    ledger: &mut Ledger,
    count: u64,
    random: &mut Random,
    cut: impl FnOnce(),
) -> usize {
    let queue = client.queue(0);
    let (mut busy, mut blocks) = (vec![false; BLOCKS], vec![0; queue.slots()]);
    let (mut flushing, mut done, mut cut) = (false, 0, Some(cut));
    let until = Instant::now() + WATCHDOG;
    loop {
        while let Some(slot) = queue.claim().filter(|_| cut.is_some()) {
            let index = random.next() as usize % BLOCKS;
            if !flushing && random.next() >> 8 & 63 == 0 {
                flushing = true;
                ledger.flush();
                queue.submit(slot, Request::flush()).unwrap();
            } else if busy[index] {
                queue.release(slot);
                break;
            } else {
                let mut bytes = vec![0; BLOCK as usize];
                ledger.write(index, &mut bytes);
                queue.buffer(slot).write(0, &bytes);
                (busy[index], blocks[slot.index()]) = (true, index);
                queue.submit(slot, Request::write(ledger.offset(index), BLOCK)).unwrap();
            }
        }
        match queue.publish() {
            Ok(()) | Err(Error::Gone) => {}
            Err(error) => panic!("{error}"),
        }
        if done >= count
            && let Some(cut) = cut.take()
        {
            cut();
        }
        while let Some(answer) = queue.poll().unwrap() {
            assert_eq!(answer.status, Status::Ok);
            match answer.request.operation {
                Operation::Flush => {
                    ledger.flushed();
                    flushing = false;
                }
                _ => {
                    ledger.acknowledged(blocks[answer.slot.index()]);
                    busy[blocks[answer.slot.index()]] = false;
                }
            }
            queue.release(answer.slot);
            done += 1;
        }
        if cut.is_none() {
            return queue.submitted();
        }
        assert!(Instant::now() < until, "nothing comes back");
        std::thread::yield_now();
    }
}

/// QEMU's storage daemon and a volume exclude each other from an image, whichever locks it first.
#[test]
fn an_image_is_not_shared_with_qemu() {
    let daemon = |server: &Server| {
        let image = format!("driver=file,node-name=disk,filename={}", server.image().display());
        let socket = server.dir.path().join("qemu.sock");
        let export = format!(
            "vhost-user-blk,id=export,node-name=disk,writable=on,addr.type=unix,addr.path={}",
            socket.display()
        );
        let process = Command::new("qemu-storage-daemon")
            .args(["--blockdev", &image, "--export", &export])
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("qemu-storage-daemon (package qemu-system-common) starts");
        (process, socket)
    };
    let mut server = Server::start(8 << 20, "--path IMAGE");
    server.connect().write(0, &[3; 512]).unwrap();
    let (process, _) = daemon(&server);
    let output = process.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("lock"), "{said}");

    assert!(server.terminate().success());
    let (mut process, socket) = daemon(&server);
    let until = Instant::now() + WATCHDOG;
    while Client::connect(Options::new(&socket)).is_err() {
        if process.try_wait().unwrap().is_some() || Instant::now() > until {
            let mut said = String::new();
            process.kill().unwrap();
            process.stderr.take().unwrap().read_to_string(&mut said).unwrap();
            panic!("the daemon does not serve: {said}");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let refused = server.refuses_another();
    process.kill().unwrap();
    process.wait().unwrap();
    refused.unwrap();
    // When the storage daemon has gone, the volume serves the data that the storage daemon has written.
    server.restart();
    let mut bytes = [0; 512];
    server.connect().read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [3; 512]);
}
