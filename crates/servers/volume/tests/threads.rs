//! All threads of a volume, its front ends and its operators in one process: workers, the session, changing limits and
//! sizes, statistics and dumps, front ends that connect and disconnect. All data that is read is verified.
//!
//! `scripts/sanitize` runs this under AddressSanitizer. ThreadSanitizer needs a standard library that is built for it:
//! otherwise it reports races for data behind a contended mutex and for memory that channels and `Arc` free, because
//! these synchronise in precompiled code or by fences. The test has its own `main` nevertheless, for systems with such
//! a library.

use ginnel_config::Bytes;
use ginnel_volume::backend::{Backend, Controllers, Stores};
use ginnel_volume::control::Handler;
use ginnel_volume::ownership::Ownership;
use ginnel_volume::server::{Server, Signals};
use ginnel_volume_bench::workload::{Limit, Pattern, Workload, run};
use ginnel_volume_bench::{Client, Device, Options, Ring};
use ginnel_volume_control::config::Spec;
use ginnel_volume_control::{Answer, LimitChange, Request, VolumePaths};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const TESTS: [(&str, &str); 3] = [
    ("memory", "queues = 3\nthreads = 2\n[[disk]]\nbackend = 'ram'\nsize = '8M'\n"),
    ("image", "queues = 3\nthreads = 2\nwait = 'interrupt'\n[[disk]]\npath = 'IMAGE'\n"),
    ("targets", "device = 'scsi'\nqueues = 3\nthreads = 2\n[[disk]]\npath = 'IMAGE'\n"),
];

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    for (name, config) in TESTS {
        if wanted.is_empty() || wanted.iter().any(|w| name.contains(w.as_str())) {
            let start = Instant::now();
            serve(config);
            println!("test {name} ... ok ({:.1} s)", start.elapsed().as_secs_f64());
        }
    }
}

const BYTES: u64 = 8 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

/// Serves a volume of this configuration, and does everything to it that can be done at the same time.
fn serve(text: &str) {
    // The folder is on a disk, not in memory, because direct I/O behaves differently there.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let image = folder.path().join("image");
    std::fs::File::create(&image).unwrap().set_len(BYTES).unwrap();
    let text = text.replace("IMAGE", image.to_str().unwrap());
    let paths = VolumePaths { sockets: folder.path().into(), configurations: folder.path().into() };
    let spec = Spec::parse(&text, Path::new("test")).unwrap();
    let config = spec.check("v", &paths, "test").unwrap();
    let opened: Vec<_> = config
        .disks
        .iter()
        .map(|disk| Backend::open(disk, config.threads, &mut Controllers::default()).unwrap())
        .collect();
    let disks = config.disks.iter().zip(opened.iter().map(|(backend, _)| backend));
    let ownership = Ownership::new(disks, Duration::ZERO).unwrap();
    let backends: Vec<_> = opened.iter().map(|(backend, _)| backend.clone()).collect();
    let stores = (0..config.threads).map(|worker| Stores::new(&backends, worker, None).unwrap()).collect();
    let server = Server::new(config, opened, stores, ownership).unwrap();
    let handler = server.handler();
    let listener = UnixListener::bind(paths.socket("v")).unwrap();
    let (stop, stopper) = UnixStream::pair().unwrap();
    let volume = thread::spawn(move || {
        let (hangup, _other_end) = UnixStream::pair().unwrap();
        server.run(&listener, Signals { stop: stop.as_fd(), hangup: &hangup }).unwrap();
    });
    let over = Arc::new(AtomicBool::new(false));
    let turns = Arc::new(AtomicU64::new(0));
    let operator = {
        // A SCSI disk reports a new size in the answer to a command, and the driver then has to repeat that command.
        let (over, turns, sizes) = (over.clone(), turns.clone(), !text.contains("scsi"));
        thread::spawn(move || operate(&*handler, sizes, &over, &turns))
    };
    let device =
        if text.contains("scsi") { Device::Scsi { target: 0, lun: 0, wide: false } } else { Device::Blk };
    for ring in [Ring::Split, Ring::Packed] {
        let socket = paths.socket("v");
        let options =
            Options { queues: 3, depth: 8, ring, device, patience: PATIENCE, ..Options::new(socket) };
        let mut client = Client::connect_within(options, PATIENCE).unwrap();
        let workload = Workload {
            pattern: Pattern { random: true, reads: 50 },
            depth: 8,
            limit: Limit::Requests(300),
            bytes: Some(BYTES / 2),
            threads: 2,
            flush_every: Some(20),
            sleep: ring == Ring::Packed,
            verify: true,
            ..Workload::default()
        };
        let enough = turns.load(Ordering::Relaxed) + 10;
        while turns.load(Ordering::Relaxed) < enough {
            let outcome = run(&mut client, &workload).unwrap();
            assert!(outcome.failed == 0 && outcome.verified > 0, "{:?}", outcome.first_failure);
            assert!(!operator.is_finished(), "the operator has failed");
        }
        client.close().unwrap();
    }
    over.store(true, Ordering::Release);
    operator.join().unwrap();
    drop(stopper);
    volume.join().unwrap();
}

/// Sends all queries and changes again and again; counts the rounds in `done`.
fn operate(handler: &dyn Handler, sizes: bool, over: &AtomicBool, done: &AtomicU64) {
    while !over.load(Ordering::Acquire) {
        let turns = done.load(Ordering::Relaxed);
        let limited = if turns.is_multiple_of(2) { 20_000 } else { 0 };
        let change = LimitChange { iops: Some(limited), ..LimitChange::default() };
        let bytes = Bytes(BYTES - 4096 * (turns % 3));
        let size = sizes.then_some(Request::Resize { disk: 0, size: Some(bytes) });
        for request in [Request::Stat, Request::Dump, Request::Limit(change)].into_iter().chain(size) {
            match handler.answer(request) {
                Answer::Error(why) => panic!("{why}"),
                Answer::Stat(stat) => assert_eq!(stat.threads.len(), 2),
                _ => {}
            }
        }
        done.store(turns + 1, Ordering::Relaxed);
        thread::sleep(Duration::from_millis(2));
    }
}
