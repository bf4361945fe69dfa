//! A front end that sends anything to a volume, in messages with descriptors over a real socket, and whose guest writes
//! anything into its queues. A session never panics and never hangs, and what it keeps for its front end stays bounded.
#![no_main]

use ginnel_fdpass::{self as fdpass, RecvFlags, SendFlags};
use ginnel_fuzz::vhost_user::{ACK, MEMORY, RESIZE, RUN, SCRIBBLE, Step, TRUNCATE, fd};
use ginnel_layout::vhost_user::Header;
use ginnel_shmem::Mapping;
use ginnel_virtqueue::Chain;
use ginnel_volume::backend::{Backend, Stores};
use ginnel_volume::device::blk::Blk;
use ginnel_volume::device::scsi::Scsi;
use ginnel_volume::device::{Begin, Device, Request};
use ginnel_volume::disk::Disk;
use ginnel_volume::session::message::{Connection, Gone};
use ginnel_volume::session::{Limits, Outcome, Queues, Session};
use ginnel_volume::worker::{Requests, Start};
use libfuzzer_sys::fuzz_target;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, Mode, OFlags, ftruncate, memfd_create};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use zerocopy::{FromBytes, IntoBytes};

const DISK: u64 = 64 << 10;
/// The most requests of one turn of a queue.
const BATCH: usize = 32;

fuzz_target!(|input: &[u8]| {
    let [choice, rest @ ..] = input else { return };
    let mut rest = rest;
    let disk = Arc::new(Disk::new(DISK, 512, choice & 4 != 0, "serial"));
    let device: Arc<dyn Device> = match choice & 1 {
        0 => Arc::new(Blk::new(disk.clone(), 2, 16, true)),
        _ => Arc::new(Scsi::new([(disk.clone(), true)], 2, 16)),
    };
    let limits = Limits { queue_size: 256, segments: 16, packed: choice & 2 == 0 };
    let mut session = Session::new(device.clone(), limits);
    let mut workers = Workers::new(device);
    let (front, back) = UnixStream::pair().unwrap();
    front.set_nonblocking(true).unwrap();
    let mut connection = Connection::new(back).unwrap();
    let mut world = World::new(front);
    let mut steps = 0;
    while let Ok((step, after)) = Step::read_from_prefix(rest)
        && steps < 200
    {
        steps += 1;
        let (body, after) = after.split_at(usize::from(u16::from_le_bytes(step.len)).min(after.len()));
        rest = after;
        let end = match (step.code, body) {
            (RUN, _) => {
                workers.run_all();
                session.is_broken()
            }
            (SCRIBBLE, [low, high, bytes @ ..]) => {
                let at = u64::from(u16::from_le_bytes([*low, *high]));
                let bytes = &bytes[..bytes.len().min((MEMORY - at) as usize)];
                world.memory.write_all_at(bytes, at).unwrap();
                false
            }
            (TRUNCATE, [pages, ..]) => {
                ftruncate(&world.memory, u64::from(*pages % 17) * 4096).unwrap();
                false
            }
            (RESIZE, [sectors, ..]) => {
                disk.set_bytes(512 * u64::from(*sectors % 128 + 1));
                session.config_changed();
                false
            }
            (SCRIBBLE | TRUNCATE | RESIZE, _) => false,
            _ => !world.say(step, body) || serve(&mut connection, &mut session, &mut workers).is_err(),
        };
        if end {
            break;
        }
        world.hear();
    }
    let _ = session.stop_all(&mut workers);
    assert!(workers.running.iter().all(Option::is_none), "all queues are given back");
});

/// Handles what has arrived, as a volume does.
fn serve(connection: &mut Connection, session: &mut Session, workers: &mut Workers) -> Result<(), Gone> {
    while let Some(message) = connection.receive()? {
        let request = message.request;
        if let Outcome::Reply(body, fd) = session.handle(message, workers)? {
            connection.reply(request, &body, fd.as_ref().map(OwnedFd::as_fd))?;
        }
    }
    Ok(())
}

/// The state of the front end.
struct World {
    front: UnixStream,
    memory: File,
    files: [OwnedFd; 6],
    /// Kept open, so that bytes written to the other end do not fail.
    _far_end: OwnedFd,
    answered: Option<OwnedFd>,
}

impl World {
    fn new(front: UnixStream) -> Self {
        let open = |path, flags| rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let memory = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&memory, MEMORY).unwrap();
        let (socket, far_end) = UnixStream::pair().unwrap();
        let (_, pipe) = rustix::pipe::pipe().unwrap();
        let read_only = open("/proc/self/exe", OFlags::RDONLY);
        let files = [
            eventfd(0, EventfdFlags::CLOEXEC).unwrap(),
            socket.into(),
            pipe,
            open("/dev/null", OFlags::RDWR),
            open("/", OFlags::RDONLY),
            read_only,
        ];
        Self { front, memory: memory.into(), files, _far_end: far_end.into(), answered: None }
    }

    fn file(&self, choice: u8) -> Option<BorrowedFd<'_>> {
        match choice {
            fd::NONE => None,
            fd::MEMORY => Some(self.memory.as_fd()),
            fd::ANSWERED => self.answered.as_ref().map(OwnedFd::as_fd),
            other => self.files.get(usize::from(other - fd::EVENT)).map(OwnedFd::as_fd),
        }
    }

    /// Sends a message. Returns `false` if the volume must notice that the message is incomplete.
    fn say(&mut self, step: Step, body: &[u8]) -> bool {
        let mut fds: Vec<_> = self.file(step.flags & 15).into_iter().collect();
        if step.flags & 1 << 5 != 0 {
            fds.push(self.memory.as_fd());
        }
        let wrong = u32::from(step.flags >> 7) * 3;
        let ack = if step.flags & ACK != 0 { Header::NEED_REPLY } else { 0 };
        let header = Header {
            request: step.code.into(),
            flags: Header::VERSION | ack,
            size: (body.len() as u32).wrapping_sub(wrong),
        };
        let bytes = [header.as_bytes(), body].concat();
        let cut = if step.flags & 1 << 6 != 0 { bytes.len().div_ceil(2) } else { bytes.len() };
        let sent = fdpass::send(self.front.as_fd(), &bytes[..cut], &fds, SendFlags::empty());
        sent.is_ok() && (&self.front).write_all(&bytes[cut..]).is_ok()
    }

    /// Receives the answers, and the descriptor that came with one of them.
    fn hear(&mut self) {
        let mut bytes = [0; 4096];
        if let Ok(mut got) = fdpass::receive(self.front.as_fd(), &mut bytes, 1, RecvFlags::empty())
            && let Some(fd) = got.fds.pop()
        {
            self.answered = Some(fd);
        }
        while (&self.front).read(&mut bytes).is_ok_and(|n| n > 0) {}
    }
}

/// One worker that works when it is told to, on a disk in memory.
struct Workers {
    device: Arc<dyn Device>,
    stores: Stores,
    running: [Option<Start>; 8],
    chain: Chain,
    request: Request,
}

impl Workers {
    fn new(device: Arc<dyn Device>) -> Self {
        let backend = Backend::Ram(Mapping::anonymous(DISK as usize).unwrap());
        let stores = Stores::new(&[backend], 0, None).unwrap();
        Self { device, stores, running: Default::default(), chain: Chain::new(), request: Request::default() }
    }

    fn run_all(&mut self) {
        for index in 0..self.running.len() {
            self.run(index);
        }
    }

    fn run(&mut self, index: usize) {
        let Some(Some(start)) = self.running.get_mut(index) else { return };
        let Start { memory, index, requests: Requests::Virtqueue(queue), .. } = start else { return };
        for _ in 0..BATCH {
            // A broken ring is not used any further.
            let Ok(Some(ticket)) = queue.ring.pop(memory, &mut self.chain) else { break };
            let written = match self.device.begin(*index, memory, &self.chain, &mut self.request) {
                Begin::Done(written) => written,
                Begin::Barrier => self.device.finish(memory, &self.request, Ok(())),
                Begin::Do { disk, op } => {
                    let result = self.stores.start(0, disk, op, &self.request.data, memory);
                    let result = result.expect("memory is done at once");
                    self.device.finish(memory, &self.request, result)
                }
            };
            if let Some(log) = &queue.log {
                log.mark_buffers(memory, self.chain.writable(), written.into());
            }
            queue.ring.push(ticket, written);
        }
        let _ = queue.ring.publish();
        let _ = queue.ring.arm();
        queue.ring.disarm();
    }
}

impl Queues for Workers {
    fn start(&mut self, start: Start) -> Result<(), String> {
        let index = usize::from(start.index);
        assert!(self.running[index].is_none(), "queue {index} runs already");
        self.running[index] = Some(start);
        // A queue is served once without a kick.
        self.run(index);
        Ok(())
    }

    fn vm_left(&mut self) {
        assert!(self.running.iter().all(Option::is_none), "a queue runs still");
    }

    fn vm_stayed(&mut self) {
        self.vm_left();
    }

    fn sync(&mut self) -> Result<(), String> {
        Ok(())
    }

    fn stop(&mut self, index: u16, suspend: bool) -> Result<u32, String> {
        if !suspend {
            self.run(index.into());
        }
        let start = self.running[usize::from(index)].take().expect("it runs");
        let Start { memory, requests: Requests::Virtqueue(mut queue), .. } = start else { return Ok(0) };
        if suspend {
            // Some requests are in flight and stay so: the next user of the queue finds them in the region.
            for _ in 0..BATCH / 2 {
                let Ok(Some(_)) = queue.ring.pop(&memory, &mut self.chain) else { break };
            }
        }
        Ok(queue.ring.base())
    }

    fn set_call(&mut self, index: u16, call: Option<Arc<OwnedFd>>) {
        self.running[usize::from(index)].as_mut().expect("it runs").call = call;
    }
}
