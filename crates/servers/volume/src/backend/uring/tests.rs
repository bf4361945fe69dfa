use super::*;
use ginnel_guest_memory::Region;
use ginnel_volume_control::config::{BackendKind, Direct, Disk, Lock, OnError};
use kit::wait::wait_until;
use rustix::event::{EventfdFlags, eventfd};
use std::ops::{Deref, DerefMut};

const BYTES: u64 = 1 << 20;

fn image(folder: &tempfile::TempDir, name: &str, iopoll: bool) -> Arc<Image> {
    let disk = Disk {
        nvme: None,
        lun: 0,
        backend: BackendKind::File,
        path: Some(folder.path().join(name)),
        size: Some(BYTES),
        sector: 512,
        read_only: false,
        serial: String::new(),
        direct: Direct::Auto,
        write_cache: true,
        discard: true,
        on_error: OnError::Report,
        iopoll,
        lock: Lock::Off,
    };
    std::fs::File::create_new(folder.path().join(name)).unwrap().set_len(BYTES).unwrap();
    Arc::new(Image::open(&disk, 1).unwrap())
}

/// Rings, with the eventfd to which the kernel writes.
struct Rig {
    uring: Uring,
    bell: Arc<OwnedFd>,
}

impl Deref for Rig {
    type Target = Uring;

    fn deref(&self) -> &Uring {
        &self.uring
    }
}

impl DerefMut for Rig {
    fn deref_mut(&mut self) -> &mut Uring {
        &mut self.uring
    }
}

fn bell() -> Arc<OwnedFd> {
    Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap())
}

/// Enables the rings for this thread.
fn enabled(files: Vec<Option<Arc<Image>>>) -> io::Result<Rig> {
    let bell = bell();
    let uring = Uring::new(files, 0, None, bell.clone())?;
    uring.enable()?;
    Ok(Rig { uring, bell })
}

/// Two regions of 64 KiB each.
fn memory() -> Arc<GuestMemory<Mapping>> {
    let region =
        |n: u64| Region { guest: n << 32, user: n << 32, memory: Mapping::anonymous(64 << 10).unwrap() };
    Arc::new(GuestMemory::new(vec![region(0), region(1)]).unwrap())
}

fn buffer(region: u16, at: usize, len: u32) -> Buffer {
    Buffer { region, at, len }
}

/// Waits until all requests have ended. Sleeps if the rings allow that.
fn finish(uring: &mut Rig) -> Vec<(u32, Result<(), Failure>)> {
    let mut ended = Vec::new();
    while uring.pending() > 0 {
        uring.submit().unwrap();
        let before = ended.len();
        uring.reap(|id, result| ended.push((id, result)));
        if ended.len() == before && !uring.must_poll() && !uring.arm() {
            use rustix::event::{PollFd, PollFlags, poll};
            let mut bell = [PollFd::new(&uring.bell, PollFlags::IN)];
            let within = rustix::event::Timespec { tv_sec: 30, tv_nsec: 0 };
            assert_eq!(
                poll(&mut bell, Some(&within)),
                Ok(1),
                "nothing ends: {} are on their way",
                uring.pending
            );
            let mut count = [0; 8];
            rustix::io::read(&uring.bell, &mut count).unwrap();
        }
        uring.disarm();
    }
    ended
}

fn all_well(uring: &mut Rig, count: usize) {
    let ended = finish(uring);
    assert_eq!(ended.len(), count);
    assert!(ended.iter().all(|(_, result)| result.is_ok()), "{ended:?}");
}

#[test]
fn a_disk_that_is_polled_beside_one_that_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let mut uring =
        enabled(vec![Some(image(&folder, "a", true)), None, Some(image(&folder, "b", false))]).unwrap();
    assert!(uring.polled.is_some());
    let memory = memory();
    let at = 8192;
    for (disk, byte) in [(0, 7), (2, 8)] {
        memory.write(&[buffer(0, usize::from(disk) * 4096, 4096)], 0, &[byte; 4096]);
        uring.start(
            u32::from(disk),
            disk,
            Op::Write { at, through: false },
            &[buffer(0, usize::from(disk) * 4096, 4096)],
            &memory,
        );
    }
    all_well(&mut uring, 2);
    // All kinds of requests at once: each must be sent to a ring that supports it.
    let zeros = Op::WriteZeroes { at: 65536, len: 4096, unmap: true, through: true };
    uring.start(1, 0, Op::Flush, &[], &memory);
    uring.start(2, 0, Op::Read { at }, &[buffer(1, 0, 4096)], &memory);
    uring.start(3, 0, Op::Discard { at: 131072, len: 4096 }, &[], &memory);
    uring.start(
        4,
        0,
        Op::Write { at: 16384, through: true },
        &[buffer(0, 0, 512), buffer(0, 4096, 512)],
        &memory,
    );
    uring.start(5, 0, zeros, &[], &memory);
    uring.start(6, 2, Op::Read { at }, &[buffer(1, 4096, 4096)], &memory);
    uring.start(7, 2, zeros, &[], &memory);
    all_well(&mut uring, 7);
    assert!(!uring.must_poll());
    let mut back = [0; 8192];
    memory.read(&[buffer(1, 0, 8192)], 0, &mut back);
    assert_eq!((&back[..4096], &back[4096..]), (&[7; 4096][..], &[8; 4096][..]));
}

#[test]
fn without_queues_to_poll_requests_are_not_polled() {
    // tmpfs never has queues to poll.
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut uring = enabled(vec![Some(image(&folder, "a", true))]).unwrap();
    let memory = memory();
    for id in 0..3 {
        uring.start(id, 0, Op::Read { at: 4096 * u64::from(id) }, &[buffer(0, 0, 4096)], &memory);
    }
    all_well(&mut uring, 3);
    assert_eq!(uring.polls, [false]);
    uring.start(0, 0, Op::Write { at: 0, through: false }, &[buffer(0, 0, 4096)], &memory);
    assert!(!uring.must_poll());
    all_well(&mut uring, 1);
}

#[test]
fn memory_is_pinned_and_let_go() {
    let pinned_now = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("VmPin")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    };
    let folder = tempfile::tempdir().unwrap();
    let mut uring = enabled(vec![Some(image(&folder, "a", false)), Some(image(&folder, "b", true))]).unwrap();
    let (one, two) = (memory(), memory());
    let before = pinned_now();
    for memory in [&one, &two, &two] {
        uring.pin(Some(memory));
        assert!(uring.pinned.as_ref().unwrap().is(memory));
        assert!(pinned_now() >= before + 128, "{} of {before} kB", pinned_now());
    }
    // Buffers in the pinned memory, in other memory, in several pieces, and unaligned.
    for (turn, memory) in [&two, &one].into_iter().enumerate() {
        for (disk, data) in [
            vec![buffer(1, 4096, 8192)],
            vec![buffer(0, 0, 4096), buffer(1, 0, 4096)],
            vec![buffer(0, 24, 8192)],
        ]
        .iter()
        .enumerate()
        .flat_map(|(n, data)| [(0, n, data), (1, n, data)])
        .map(|(disk, n, data)| (disk, (n, data)))
        {
            let (n, data) = data;
            let at = 16384 * (n as u64 + 1);
            let bytes = [turn as u8 + 10 * n as u8 + disk as u8 + 1; 8192];
            memory.write(data, 0, &bytes);
            uring.start(0, disk, Op::Write { at, through: n == 1 }, data, memory);
            all_well(&mut uring, 1);
            memory.write(data, 0, &[0; 8192]);
            uring.start(0, disk, Op::Read { at }, data, memory);
            all_well(&mut uring, 1);
            let mut back = [0; 8192];
            memory.read(data, 0, &mut back);
            assert_eq!(back, bytes);
        }
    }
    uring.pin(None);
    assert!(uring.pinned.is_none());
    assert!(pinned_now() < before + 128);
    uring.start(0, 0, Op::Read { at: 0 }, &[buffer(0, 0, 4096)], &two);
    all_well(&mut uring, 1);
}

#[test]
fn a_ring_holds_what_a_successor_waits_for() {
    use rustix::fs::{FlockOperation, flock};
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lock");
    let file = File::create_new(&path).unwrap();
    flock(&file, FlockOperation::NonBlockingLockExclusive).unwrap();
    let uring = Uring::new(vec![Some(image(&folder, "a", false))], 0, Some(file.as_fd()), bell()).unwrap();
    drop(file);
    let successor = File::open(&path).unwrap();
    flock(&successor, FlockOperation::NonBlockingLockExclusive).unwrap_err();
    drop(uring);
    // The kernel takes a while to tear a ring down.
    wait_until("the lock", || flock(&successor, FlockOperation::NonBlockingLockExclusive).is_ok());
}

#[test]
fn requests_that_are_copied_wait_for_each_other_and_none_is_lost() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(&folder, "a", false);
    kit::require!(image.is_direct(), "no direct I/O in {}", folder.path().display());
    let mut uring = enabled(vec![Some(image)]).unwrap();
    let memory = memory();
    // Each buffer is off by one byte, at a different place in the guest's memory and on the disk.
    let count = 2 * copies::COPIES + 10;
    let piece = |n: usize| buffer((n % 2) as u16, 1 + n / 2 * 512, 512);
    for n in 0..count {
        memory.write(&[piece(n)], 0, &[n as u8; 512]);
        let through = n % 3 == 0;
        uring.start(n as u32, 0, Op::Write { at: 512 * n as u64, through }, &[piece(n)], &memory);
    }
    assert_eq!(uring.flights.iter().filter(|flight| flight.needs_copy()).count(), count - copies::COPIES);
    all_well(&mut uring, count);
    for n in 0..count {
        memory.write(&[piece(n)], 0, &[0; 512]);
        uring.start(n as u32, 0, Op::Read { at: 512 * n as u64 }, &[piece(n)], &memory);
    }
    all_well(&mut uring, count);
    for n in 0..count {
        let mut back = [0; 512];
        memory.read(&[piece(n)], 0, &mut back);
        assert_eq!(back, [n as u8; 512], "{n}");
    }
}
