//! The client against QEMU's storage daemon.

use ginnel_volume_bench::workload::{Limit, Pattern, Workload, run};
use ginnel_volume_bench::{Client, Error, Operation, Options, Recovery, Request, Status};
use kit::wait::{WATCHDOG, wait_until};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;
use tempfile::TempDir;

const SIZE: u64 = 32 << 20;

/// An image and the storage daemon that serves it.
struct Server {
    dir: TempDir,
    process: Child,
}

impl Server {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::File::create(dir.path().join("image")).unwrap().set_len(SIZE).unwrap();
        let process = serve(dir.path());
        Self { dir, process }
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    fn image(&self) -> Vec<u8> {
        std::fs::read(self.dir.path().join("image")).unwrap()
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    fn restart(&mut self) {
        self.process = serve(self.dir.path());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Starts the daemon, and waits until it accepts connections.
fn serve(dir: &Path) -> Child {
    let socket = dir.join("socket");
    let _ = std::fs::remove_file(&socket);
    let mut process = Command::new("qemu-storage-daemon")
        .arg("--blockdev")
        .arg(format!("driver=file,node-name=disk,discard=unmap,filename={}", dir.join("image").display()))
        .arg("--export")
        .arg(format!(
            "vhost-user-blk,id=export,node-name=disk,writable=on,num-queues=2,addr.type=unix,addr.path={}",
            socket.display()
        ))
        .stdin(Stdio::null())
        .spawn()
        .expect("qemu-storage-daemon (package qemu-system-common) starts");
    // Closing this connection at once does no harm: the daemon accepts the next one.
    wait_until("the daemon to listen", || {
        assert!(process.try_wait().unwrap().is_none(), "the daemon has ended");
        UnixStream::connect(&socket).is_ok()
    });
    process
}

fn pattern(len: usize, salt: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8) ^ salt).collect()
}

#[test]
fn written_data_are_in_the_image() {
    let server = Server::new();
    for indirect in [false, true] {
        let options = Options { indirect, segment: 4096, ..Options::new(server.socket()) };
        let mut disk = Client::connect(options).unwrap();
        assert_eq!((disk.disk().bytes, disk.disk().block, disk.disk().queues), (SIZE, 512, 2));
        assert_eq!(disk.id().unwrap(), "vhost_user_blk");
        let bytes = pattern(48 << 10, u8::from(indirect));
        disk.write(1 << 20, &bytes).unwrap();
        disk.flush().unwrap();
        assert_eq!(&server.image()[1 << 20..][..bytes.len()], &bytes[..]);
        let mut back = vec![0; bytes.len()];
        disk.read(1 << 20, &mut back).unwrap();
        assert!(back == bytes);
        disk.write_zeroes((1 << 20) + 4096, 8192, true).unwrap();
        disk.discard((1 << 20) + 16384, 4096).unwrap();
        disk.read(1 << 20, &mut back).unwrap();
        assert_eq!(&back[4096..12288], &[0; 8192]);
        assert_eq!(&back[12288..16384], &bytes[12288..16384]);
        disk.close().unwrap();
    }
}

#[test]
fn errors_come_back() {
    let server = Server::new();
    let mut disk = Client::connect(Options::new(server.socket())).unwrap();
    let beyond = disk.write(SIZE, &[0; 512]).unwrap_err();
    assert!(matches!(beyond, Error::Failed { status: Status::IoError, .. }), "{beyond}");
    let unknown = Request { operation: Operation::Other(77), offset: 0, len: 512 };
    let done = disk.queue(0).call(unknown, &mut [0; 512], WATCHDOG).unwrap();
    assert_eq!(done.status, Status::Unsupported);
    let long = disk.read(0, &mut vec![0; 1 << 20]).unwrap_err();
    assert!(matches!(long, Error::Invalid(_)), "{long}");
    // The queue works as before.
    disk.write(0, &[7; 512]).unwrap();
    let many = Client::connect(Options { queues: 3, ..Options::new(server.socket()) });
    // The daemon serves one front end at a time, so connecting fails because of either the time limit or the number of
    // queues.
    assert!(many.is_err());
}

#[test]
fn a_full_ring_says_so() {
    let server = Server::new();
    let options = Options { ring_size: Some(8), depth: 8, ..Options::new(server.socket()) };
    let mut disk = Client::connect(options).unwrap();
    let queue = disk.queue(0);
    for _ in 0..2 {
        let slot = queue.claim().unwrap();
        queue.submit(slot, Request::read(0, 4096)).unwrap();
    }
    let slot = queue.claim().unwrap();
    assert!(matches!(queue.submit(slot, Request::read(0, 4096)), Err(Error::Full)));
    queue.publish().unwrap();
    wait_until("the answers", || {
        if let Some(done) = queue.poll().unwrap() {
            assert_eq!(done.status, Status::Ok);
            queue.release(done.slot);
        }
        queue.submitted() == 0
    });
    queue.submit(slot, Request::read(0, 4096)).unwrap();
}

#[test]
fn a_verified_workload_over_all_ways() {
    let server = Server::new();
    for (indirect, event_idx, sleep, threads) in
        [(false, true, false, 2), (true, false, true, 1), (false, false, false, 1), (true, true, true, 2)]
    {
        let options = Options { queues: 2, depth: 16, indirect, event_idx, ..Options::new(server.socket()) };
        let mut disk = Client::connect(options).unwrap();
        let workload = Workload {
            pattern: Pattern { random: true, reads: 40 },
            depth: 16,
            limit: Limit::Requests(1500),
            bytes: Some(4 << 20),
            threads,
            sleep,
            flush_every: Some(100),
            verify: true,
            ..Workload::default()
        };
        let outcome = run(&mut disk, &workload).unwrap();
        assert_eq!(outcome.failed, 0, "{:?}", outcome.first_failure);
        assert!(outcome.flushes.requests > 0);
        assert!(outcome.verified >= outcome.reads.requests && outcome.verified > 1000);
        disk.close().unwrap();
    }
}

#[test]
fn a_damaged_block_is_found() {
    let server = Server::new();
    let mut disk = Client::connect(Options::new(server.socket())).unwrap();
    let write = Workload {
        pattern: Pattern { random: false, reads: 0 },
        limit: Limit::Requests(256),
        bytes: Some(1 << 20),
        verify: true,
        ..Workload::default()
    };
    run(&mut disk, &write).unwrap();
    let mut block = vec![0; 4096];
    disk.read(8192, &mut block).unwrap();
    block[100] ^= 1;
    disk.write(8192, &block).unwrap();
    let read = Workload { pattern: Pattern { random: false, reads: 100 }, ..write };
    let wrong = run(&mut disk, &read).unwrap_err();
    assert!(matches!(wrong, Error::Wrong(_)), "{wrong}");
    assert!(wrong.to_string().contains("8192"), "{wrong}");
}

/// The daemon has no in-flight region, so the client submits all requests in flight again.
#[test]
fn the_client_goes_on_with_the_next_server() {
    let mut server = Server::new();
    // On a busy machine the workload may end before the server was killed twice, which proves nothing.
    let mut attempts = (0..5).map(|_| goes_on(&mut server));
    let mut disk = attempts.find_map(|disk| disk).expect("the server was never killed twice in time");
    drop(attempts);
    server.kill();
    assert!(matches!(disk.read(0, &mut [0; 512]), Err(Error::Gone)));
    server.restart();
    assert_eq!(disk.reconnect().unwrap(), Recovery::Resubmitted);
}

/// Kills the server several times beside a workload. Returns the client, if it has gone on with at least two other servers.
fn goes_on(server: &mut Server) -> Option<Client> {
    let (tell, told) = mpsc::channel();
    let socket = server.socket();
    let worker = std::thread::spawn(move || {
        let mut disk = Client::connect(Options { queues: 2, ..Options::new(socket) }).unwrap();
        assert!(!disk.has_inflight_region());
        let workload = Workload {
            pattern: Pattern { random: true, reads: 30 },
            limit: Limit::Time(Duration::from_secs(3)),
            bytes: Some(8 << 20),
            verify: true,
            threads: 2,
            reconnect: Some(WATCHDOG),
            ..Workload::default()
        };
        let outcome = run(&mut disk, &workload);
        tell.send(()).unwrap();
        (disk, outcome)
    });
    let mut kills = 0;
    while told.recv_timeout(Duration::from_millis(400)).is_err() && kills < 5 {
        server.kill();
        server.restart();
        kills += 1;
    }
    let (disk, outcome) = worker.join().unwrap();
    let outcome = outcome.unwrap();
    println!("{} reconnects after {kills} kills, {} blocks verified", outcome.reconnects, outcome.verified);
    assert_eq!(outcome.failed, 0, "{:?}", outcome.first_failure);
    (outcome.reconnects >= 2 && outcome.verified > 100).then_some(disk)
}

#[test]
fn the_echo_answers_everything() {
    let server = Server::new();
    let mut alone = Client::connect(Options { echo: true, ..Options::new(server.socket()) }).unwrap();
    let workload = Workload { limit: Limit::Requests(10_000), ..Workload::default() };
    let outcome = run(&mut alone, &workload).unwrap();
    assert_eq!((outcome.reads.requests, outcome.failed, outcome.kicks), (10_000, 0, 0));
}

#[test]
fn a_paused_queue_goes_on() {
    let server = Server::new();
    let mut disk = Client::connect(Options::new(server.socket())).unwrap();
    for round in 0..10u8 {
        disk.write(512 * u64::from(round), &[round; 512]).unwrap();
        disk.pause().unwrap();
    }
    for round in 0..10u8 {
        let mut block = [0xff; 512];
        disk.read(512 * u64::from(round), &mut block).unwrap();
        assert_eq!(block, [round; 512]);
    }
    assert_eq!(disk.close().unwrap(), [20]);
}

#[test]
fn written_pages_are_marked() {
    let server = Server::new();
    let mut disk = Client::connect(Options { depth: 4, ..Options::new(server.socket()) }).unwrap();
    disk.read(0, &mut [0; 4096]).unwrap();
    assert!(disk.take_dirty().is_empty());
    disk.start_log().unwrap();
    disk.write(0, &[1; 4096]).unwrap();
    // The request uses the first free slot.
    let [buffer, _, ring] = disk.pages_of(0, 0);
    let written = disk.take_dirty();
    assert!(!written.iter().any(|page| buffer.contains(page)), "the buffer was only read from");
    assert!(written.iter().any(|page| ring.contains(page)), "the used ring was written to");
    disk.read(0, &mut [0; 4096]).unwrap();
    assert!(disk.take_dirty().iter().any(|page| buffer.contains(page)));
    disk.stop_log().unwrap();
    disk.read(0, &mut [0; 4096]).unwrap();
    assert!(disk.take_dirty().is_empty());
}

#[test]
fn a_server_that_hangs_is_given_up() {
    let server = Server::new();
    let mut disk = Client::connect(Options::new(server.socket())).unwrap();
    kit::process::signal(&server.process, rustix::process::Signal::STOP);
    let patience = Duration::from_millis(500);
    for sleep in [false, true] {
        let workload = Workload { patience, sleep, ..Workload::default() };
        let hangs = run(&mut disk, &workload).unwrap_err();
        assert!(matches!(hangs, Error::TimedOut(_)), "{hangs}");
    }
    let one = disk.queue(0).call(Request::flush(), &mut [], patience).unwrap_err();
    assert!(matches!(one, Error::Invalid(_)), "there are others on their way: {one}");
}
