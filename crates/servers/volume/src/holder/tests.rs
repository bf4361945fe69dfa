//! What takes too long: with clocks of its own, since nobody waits a minute for a test.

use super::*;
use crate::attach::{self, EngineEnd, FromHolder};
use crate::holder::link::Item;
use ginnel_layout::nvme_attach::Reason;
use ginnel_layout::vfio_user::Command;
use ginnel_vfio_user::{Request, Server, client};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::FlockOperation;
use std::fs::File;
use std::os::unix::net::UnixStream;
use tempfile::TempDir;

const SHAPE: Shape = Shape { queues: 2, slots: 64, mapped: false };

/// A holder without a loop, its client, and the socket for engines.
struct Stage {
    holder: Holder,
    client: client::Client,
    folder: TempDir,
    listener: OwnedFd,
    now: Instant,
}

impl Stage {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = attach::listen(&folder.path().join("engine"), None).unwrap();
        let mut holder = Holder::new(SHAPE).unwrap();
        let (theirs, ours) = UnixStream::pair().unwrap();
        let (server, now) = (Server::new(ours).unwrap(), Instant::now());
        holder.client = Some(Client { server, pid: 1 });
        Self { holder, client: client::Client::new(theirs), folder, listener, now }
    }

    fn connect(&mut self) -> EngineEnd {
        let engine = EngineEnd::connect(&self.folder.path().join("engine")).unwrap();
        self.holder.link.accept(self.listener.as_fd(), self.now).unwrap();
        engine
    }

    /// Attaches an engine with so many queues, whose eventfds have these flags.
    fn hello(&mut self, queues: usize, flags: EventfdFlags) -> (EngineEnd, File, bool) {
        let engine = self.connect();
        let lock = self.folder.path().join("lock");
        let turn = File::create(&lock).unwrap();
        rustix::fs::flock(&turn, FlockOperation::NonBlockingLockExclusive).unwrap();
        let kicks: Vec<_> = (0..=queues).map(|_| eventfd(0, flags).unwrap()).collect();
        engine.hello(File::open(&lock).unwrap().as_fd(), &kicks).unwrap();
        let attached = self.holder.link.hear_newcomer(self.now);
        (engine, turn, attached)
    }

    fn attach(&mut self) -> (EngineEnd, File) {
        let (engine, turn, attached) = self.hello(2, EventfdFlags::NONBLOCK);
        assert!(attached);
        self.holder.device.introduce(&mut self.holder.link);
        self.holder.link.flush(self.now, false);
        assert!(matches!(engine.receive(false).unwrap(), Some(FromHolder::Welcome { .. })));
        (engine, turn)
    }

    fn serve(&mut self) {
        let Holder { device, link, client, waiting, .. } = &mut self.holder;
        serve(client.as_mut().unwrap(), device, link, waiting, self.now).unwrap();
    }

    /// Lets time pass, as the loop of the holder sees it.
    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.holder.link.hear();
        self.holder.link.look();
        self.holder.settle(self.now);
        self.holder.link.flush(self.now, true);
        if let Some(client) = &mut self.holder.client {
            client.server.flush().unwrap();
        }
    }

    /// Maps a range, and begins to unmap it.
    fn begin_unmap(&mut self) -> u16 {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 4096).unwrap();
        let range = crate::attach::Range { iova: 0x1000, len: 0x1000, offset: 0, writable: true };
        let request = Request::Map {
            address: range.iova,
            size: range.len,
            offset: 0,
            writable: true,
            file: Some(file),
        };
        self.holder.device.handle(request, &mut self.holder.link);
        let begun = self.client.begin_unmap(0x1000, 0x1000).unwrap();
        self.serve();
        begun
    }
}

#[test]
fn a_client_does_not_wait_for_ever() {
    let mut stage = Stage::new();
    let _engine = stage.attach();
    let begun = stage.begin_unmap();
    stage.pass(PATIENCE - TICK);
    assert_eq!(stage.holder.waiting.len(), 1);
    stage.pass(TICK);
    let refused = stage.client.finish(begun).unwrap_err();
    assert!(matches!(refused, client::Error::Refused(Command::DMA_UNMAP, Errno::TIMEDOUT)), "{refused}");
}

#[test]
fn the_next_vm_waits_as_long_as_it_takes() {
    let mut stage = Stage::new();
    let (engine, turn) = stage.attach();
    stage.begin_unmap();
    stage.holder.lose_client(&Gone::Closed, stage.now);
    drop(engine);
    for _ in 0..5 {
        stage.pass(PATIENCE);
        assert!(stage.holder.leaving.is_some(), "the kernel still uses the memory");
    }
    let mut next = stranger(&mut stage);
    let begun = begin_version(&mut next, 0);
    stage.holder.greet(stage.now);
    assert!(stage.holder.client.is_none());
    drop(turn);
    stage.pass(PATIENCE);
    assert!(stage.holder.leaving.is_none());
    stage.holder.greet(stage.now);
    next.finish(begun).unwrap();
}

/// Puts a stranger in front of the door.
fn stranger(stage: &mut Stage) -> client::Client {
    let (theirs, ours) = UnixStream::pair().unwrap();
    stage.holder.door.add(Server::new(ours).unwrap(), stage.now);
    client::Client::new(theirs)
}

fn begin_version(client: &mut client::Client, major: u8) -> u16 {
    client.begin(Command::VERSION, &[major, 0, 0, 0], &[]).unwrap()
}

#[test]
fn the_first_that_negotiates_has_the_device() {
    let mut stage = Stage::new();
    stage.holder.client = None;
    let [silent, mut other, mut first, mut second, gone] = std::array::from_fn(|_| stranger(&mut stage));
    drop(gone);
    let refused = begin_version(&mut other, 7);
    let (one, two) = (begin_version(&mut first, 0), begin_version(&mut second, 0));
    stage.holder.greet(stage.now);
    first.finish(one).unwrap();
    assert!(second.finish(two).is_err(), "its connection is closed");
    assert!(matches!(other.finish(refused), Err(client::Error::Refused(_, Errno::PROTONOSUPPORT))));
    assert_eq!(stage.holder.door.fds().count(), 2);
    // The one that may try another version, and the one that says nothing.
    stage.holder.greet(stage.now + Duration::from_secs(10));
    assert_eq!(stage.holder.door.fds().count(), 0);
    drop(silent);
}

#[test]
fn a_client_must_say_its_version_first_and_once() {
    let mut stage = Stage::new();
    stage.holder.client = None;
    let mut rude = stranger(&mut stage);
    let begun = rude.begin(Command::DEVICE_RESET, &[], &[]).unwrap();
    stage.holder.greet(stage.now);
    assert!(rude.finish(begun).is_err() && stage.holder.client.is_none());
    let mut polite = stranger(&mut stage);
    let begun = begin_version(&mut polite, 0);
    stage.holder.greet(stage.now);
    polite.finish(begun).unwrap();
    let again = begin_version(&mut polite, 0);
    stage.serve();
    stage.pass(LOOK);
    assert!(matches!(polite.finish(again), Err(client::Error::Refused(_, Errno::INVAL))));
}

#[test]
fn an_engine_must_say_hello() {
    let mut stage = Stage::new();
    let silent = stage.connect();
    assert!(!stage.holder.link.hear_newcomer(stage.now) && stage.holder.link.is_used());
    assert!(!stage.holder.link.hear_newcomer(stage.now + Duration::from_secs(10)));
    assert!(!stage.holder.link.is_used() && silent.receive(true).is_err());
    stage.attach();
}

#[test]
fn an_engine_must_read_its_messages() {
    let mut stage = Stage::new();
    let (_engine, turn) = stage.attach();
    while !stage.holder.link.is_full() {
        stage.holder.link.tell(Item::Vector(0, None));
        stage.holder.link.flush(stage.now, false);
    }
    stage.pass(Duration::from_secs(59));
    assert!(stage.holder.link.is_attached() && stage.holder.link.must_look(), "it is given some time");
    stage.pass(Duration::from_secs(1));
    assert!(!stage.holder.link.is_attached());
    // What it has under way may still use the memory.
    let number = stage.holder.link.ask(Item::Control);
    stage.pass(LOOK);
    assert!(!stage.holder.link.is_settled(number));
    drop(turn);
    stage.pass(LOOK);
    assert!(stage.holder.link.is_settled(number));
}

#[test]
fn an_engine_must_answer_what_it_was_asked() {
    let mut stage = Stage::new();
    let (engine, _turn) = stage.attach();
    let number = stage.holder.link.ask(Item::Control);
    engine.done(number + 1).unwrap();
    stage.pass(LOOK);
    assert!(!stage.holder.link.is_attached() && !stage.holder.link.is_settled(number));
}

#[test]
fn words_that_change_often_are_told_once() {
    let mut stage = Stage::new();
    let (engine, _turn) = stage.attach();
    stage.pass(LOOK);
    while engine.receive(false).unwrap().is_some() {}
    (0..100).for_each(|_| stage.holder.link.tell(Item::Control));
    let number = stage.holder.link.ask(Item::Control);
    stage.holder.link.flush(stage.now, false);
    assert!(matches!(engine.receive(false).unwrap(), Some(FromHolder::Control { id: 0 })));
    assert!(matches!(engine.receive(false).unwrap(), Some(FromHolder::Control { id }) if id == number));
    assert!(engine.receive(false).unwrap().is_none());
}

#[test]
fn engines_that_do_not_fit_are_refused() {
    let mut stage = Stage::new();
    let (engine, _turn, attached) = stage.hello(3, EventfdFlags::NONBLOCK);
    assert!(!attached);
    assert!(matches!(
        engine.receive(false).unwrap(),
        Some(FromHolder::Refused { reason: Reason::QUEUES, have: 2 })
    ));
    // The holder would block if the counter of one of these were full.
    let mut stage = Stage::new();
    let (engine, _turn, attached) = stage.hello(2, EventfdFlags::empty());
    assert!(!attached && engine.receive(false).is_err());
}
