//! A front end that is not ours: the crate `virtio-driver`, on which libblkio's vhost-user transport is built.
//!
//! It shares rings and buffers of any size, each as a memory region of its own, instead of a VM's whole memory.
#![allow(unsafe_code)] // The crate takes pointers to buffers in memory that is shared with the volume.

mod server;

use kit::wait::WATCHDOG;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use server::Server;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Instant;
use virtio_driver::{
    EventFd, QueueNotifier, VhostUser, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkTransport,
    VirtioFeatureFlags,
};

const BYTES: u64 = 1 << 20;

/// Size of the shared buffer in bytes: a multiple neither of the page size nor of the word size.
const SHARED: usize = 2 * 4096 + 1003;

struct Queue<'a> {
    queue: VirtioBlkQueue<'a, usize>,
    kick: Box<dyn QueueNotifier>,
    call: Arc<EventFd>,
}

impl Queue<'_> {
    /// Waits for the one request in flight.
    fn finish(&mut self) {
        self.queue.set_used_notif_enabled(true);
        let until = Instant::now() + WATCHDOG;
        self.kick.notify().unwrap();
        loop {
            if let Some(done) = self.queue.completions().next() {
                assert_eq!(done.ret, 0, "request {}", done.context);
                return;
            }
            assert!(Instant::now() < until, "no answer");
            // SAFETY: the descriptor is open as long as `self.call` exists.
            let call = unsafe { BorrowedFd::borrow_raw(self.call.as_raw_fd()) };
            let patience = Timespec { tv_sec: WATCHDOG.as_secs().cast_signed(), tv_nsec: 0 };
            assert_eq!(poll(&mut [PollFd::new(&call, PollFlags::IN)], Some(&patience)), Ok(1), "no call");
            let _ = self.call.read();
        }
    }
}

#[test]
fn libblkios_transport_reads_writes_and_flushes() {
    let (event_idx, packed) = (VirtioFeatureFlags::RING_EVENT_IDX, VirtioFeatureFlags::RING_PACKED);
    // For packed rings the crate sends 0 as the base, without the wrap counters.
    for ring in [event_idx, VirtioFeatureFlags::empty(), packed, packed | event_idx] {
        let server = Server::start(BYTES, "--path IMAGE --queues 2 --threads 2");
        let features = VirtioFeatureFlags::VERSION_1 | ring;
        let blk = VirtioBlkFeatureFlags::FLUSH | VirtioBlkFeatureFlags::MQ;
        let wanted = features.bits() | blk.bits();
        let mut transport: Box<VirtioBlkTransport> =
            Box::new(VhostUser::new(server.socket().to_str().unwrap(), wanted).unwrap());
        assert_eq!(transport.get_features() & wanted, wanted);

        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(SHARED as u64).unwrap();
        // SAFETY: nobody truncates the file.
        let mut shared = unsafe { memmap2::MmapOptions::new().len(SHARED).map_mut(&file) }.unwrap();
        let start = shared.as_mut_ptr();
        transport.map_mem_region(start as usize, SHARED, file.as_raw_fd(), 0).unwrap();

        let queues = VirtioBlkQueue::<usize>::setup_queues(&mut *transport, 2, 16).unwrap();
        let image = std::fs::File::open(server.image()).unwrap();
        for (number, queue) in queues.into_iter().enumerate() {
            let kick = transport.get_submission_notifier(number);
            let call = transport.get_completion_fd(number);
            let mut queue = Queue { queue, kick, call };
            // Writes from the last bytes of the region, and reads into the first ones.
            let (byte, at) = (7 + number as u8, 65536 * (1 + number as u64));
            let (from, to) = (SHARED - 1024, 0);
            // SAFETY: all of it is inside the mapping, which outlives the queues, and no request is in flight here.
            unsafe {
                start.add(from).write_bytes(byte, 1024);
                start.add(to).write_bytes(0, 1024);
                queue.queue.write_raw(at, start.add(from), 1024, 1).unwrap();
            }
            queue.finish();
            queue.queue.flush(2).unwrap();
            queue.finish();
            let mut there = [0; 1024];
            image.read_exact_at(&mut there, at).unwrap();
            assert_eq!(there, [byte; 1024]);
            // SAFETY: all 1024 bytes are inside the mapping, which outlives the queues, and nothing uses them while the
            // request is in flight.
            unsafe { queue.queue.read_raw(at, start.add(to), 1024, 3) }.unwrap();
            queue.finish();
            assert_eq!(shared[to..to + 1024], [byte; 1024]);
        }
    }
}
