//! Tests of the whole daemon on devices that are made of files, with the test as the host's daemon at the other end of the link.
//! Real devices and interrupts are tested in VMs (`tests/vm/tests/guest_daemon.rs`).

use super::memory_device::tests::{add, header};
use super::pci::tests::Tree;
use super::*;
use crate::closer::Closer;
use crate::control_link::{Event, HostLink};
use crate::packet::{self, Packet, PacketSocket};
use crate::pidwatch;
use ginnel_layout::relay::{self, MappingKind, RelayKind};
use ginnel_layout::wire::{self, ErrorCode, Fds, Header, Kind};
use ginnel_layout::{Name, control as format};
use ginnel_shmem::{Mapping, Protection, SharedMemory};
use kit::wait::{WATCHDOG, wait_for};
use rustix::net::SocketType;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::thread::JoinHandle;
use std::time::Instant;
use zerocopy::{FromZeros, IntoBytes};

const SIZE: u64 = 4 << 20;

/// A VM that consists of files, with its daemon in a thread. The test has the host's end of the control link.
struct TestVm {
    tree: Tree,
    dir: tempfile::TempDir,
    memory: Mapping,
    most: Most,
    excluded: Vec<String>,
    stop: UnixStream,
    daemon: Option<JoinHandle<Result<()>>>,
}

kit::program! {
    fn a_helper() {
        crate::strangers::helper::run(crate::strangers::helper::Args { user: 0 }).unwrap();
    }
}

impl TestVm {
    /// Starts the daemon; nobody is at the host's end yet.
    fn new() -> Self {
        Self::with(Most { all: 64, per_user: 64 })
    }

    fn with(most: Most) -> Self {
        Self::made(most, Vec::new())
    }

    /// Starts a daemon that excludes this program from leaving TCP.
    fn without(excluded: &str) -> Self {
        Self::made(Most { all: 64, per_user: 64 }, vec![excluded.to_owned()])
    }

    fn made(most: Most, excluded: Vec<String>) -> Self {
        let tree = Tree::new();
        let bars = [(0, 0xfebd_5000, 4096), (1, 0xfebd_4000, 4096), (2, 0x7_0000_0000, format::SIZE as u64)];
        let file = tree.ivshmem("0000:00:03.0", &bars).join("resource2");
        let file = File::options().read(true).write(true).open(file).unwrap();
        let memory = Mapping::of_file(&file, 0, format::SIZE, Protection::ReadWrite).unwrap();
        add(&tree, "0000:00:05.0", SIZE, header(5));
        let dir = tempfile::tempdir().unwrap();
        let stop = UnixStream::pair().unwrap().0;
        let mut vm = Self { tree, dir, memory, most, excluded, stop, daemon: None };
        vm.host(); // This writes the header of the control memory.
        vm.start();
        vm
    }

    fn start(&mut self) {
        let (read, write) = UnixStream::pair().unwrap();
        self.stop = write;
        let path = self.socket();
        let sysfs = self.tree.path().to_owned();
        let listener =
            packet::listen_at_with(&path, SocketType::SEQPACKET, |socket, _| packet::ask_for_senders(socket))
                .unwrap();
        let control = Control::find(&sysfs).unwrap();
        let kernel = self.tree.kernel();
        let (most, excluded) = (self.most, self.excluded.clone().into());
        self.daemon = Some(std::thread::spawn(move || {
            let segments = Segments::new(kernel);
            let mut daemon = Daemon::new(
                listener,
                most,
                excluded,
                &read,
                control,
                None,
                None,
                Namer::default(),
                [7; 16],
                segments,
                Closer::start()?,
            )?;
            daemon.strangers.start_by(|_| kit::program::command(a_helper));
            daemon.run(&Hangup::register()?)
        }));
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("ginnel.sock")
    }

    fn host(&self) -> HostLink {
        HostLink::new(self.memory.clone(), 3, 8, Name::new("vm-a").unwrap())
    }

    /// Returns the host's end of the link, with a session.
    fn session(&self) -> HostLink {
        let mut host = self.host();
        assert!(matches!(next(&mut host), Event::Up(info) if info.boot_id == [7; 16] && !info.interrupts));
        host
    }

    /// Returns a program that is attached as this endpoint, and its number at the host.
    fn attached_program(&self, host: &mut HostLink, endpoint: u32) -> (Program, u32) {
        let program = self.program();
        program.say(Kind::ATTACH, 2, attach("web").as_bytes());
        let (_, client, _) = next_message(host);
        next_message(host);
        host.send(RelayKind::DATA, client, &attached_as(endpoint, 2)).unwrap();
        assert_eq!(program.receive().unwrap().fds.len(), 2);
        (program, client)
    }

    /// Returns a program that has sent `HELLO`.
    fn program(&self) -> Program {
        let program = Program::connect(self);
        let hello = wire::Hello { version: wire::VERSION, reserved: 0, features: 0 };
        program.say(Kind::HELLO, 1, hello.as_bytes());
        let (header, body) = program.hears();
        assert_eq!((header.kind, header.request), (Kind::HELLO_OK, 1));
        let ok: wire::HelloOk = wire::body(&body).unwrap();
        assert_eq!((ok.version, ok.member, ok.name.as_str()), (wire::VERSION, 3, "vm-a"));
        program
    }
}

impl Drop for TestVm {
    fn drop(&mut self) {
        drop(std::mem::replace(&mut self.stop, UnixStream::pair().unwrap().0));
        let result = self.daemon.take().unwrap().join();
        if !std::thread::panicking() {
            result.unwrap().unwrap();
        }
    }
}

/// Returns the next event that is not `Idle`.
fn next(host: &mut HostLink) -> Event {
    wait_for("an event from the guest", || match host.step() {
        Event::Idle => None,
        event => Some(event),
    })
}

fn next_message(host: &mut HostLink) -> (RelayKind, u32, Vec<u8>) {
    match next(host) {
        Event::Message { kind, client, body } => (kind, client, body),
        other => panic!("{other:?}"),
    }
}

struct Program(OwnedFd);

impl Program {
    fn connect(vm: &TestVm) -> Self {
        Self(packet::connect_to(&vm.socket()).unwrap())
    }

    fn say(&self, kind: Kind, request: u32, body: &[u8]) {
        let bytes = [Header { kind, flags: 0, request }.as_bytes(), body].concat();
        packet::send::<OwnedFd>(self.0.as_fd(), &bytes, &[]).unwrap();
    }

    fn receive(&self) -> Result<Packet, packet::Gone> {
        let timeout = rustix::event::Timespec::try_from(WATCHDOG).unwrap();
        let mut polled = [rustix::event::PollFd::new(&self.0, rustix::event::PollFlags::IN)];
        assert_ne!(rustix::event::poll(&mut polled, Some(&timeout)), Ok(0), "the daemon says nothing");
        packet::receive(self.0.as_fd(), wire::MAX_PACKET, 4)
    }

    fn hears(&self) -> (Header, Vec<u8>) {
        let packet = self.receive().unwrap();
        let (header, body) = wire::split(&packet.bytes).unwrap();
        (header, body.to_vec())
    }

    fn is_refused(&self, request: u32) -> (ErrorCode, String) {
        let (header, body) = self.hears();
        assert_eq!((header.kind, header.request), (Kind::ERROR, request));
        let (error, text) = <wire::Error as zerocopy::FromBytes>::read_from_prefix(&body).unwrap();
        (error.code, String::from_utf8(text.to_vec()).unwrap())
    }

    /// Returns whether an answer, or the end of the connection, is there now.
    fn has_something(&self) -> bool {
        let mut polled = [rustix::event::PollFd::new(&self.0, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut polled, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(1)
    }

    fn is_closed(&self) -> bool {
        matches!(self.receive(), Err(packet::Gone::Closed))
    }
}

fn segment(name: &str, uuid: u8) -> relay::Segment {
    relay::Segment {
        name: Name::new(name).unwrap(),
        uuid: [uuid; 16],
        size: SIZE,
        kind: MappingKind::BAR,
        page: 4096,
        access: relay::Access::READ_WRITE,
        reserved: 0,
    }
}

fn attach(segment: &str) -> wire::Attach {
    let mut attach = wire::Attach::new_zeroed();
    attach.segment = Name::new(segment).unwrap();
    attach
}

/// Lets the host send a list with a segment that exists and one that does not, and takes what the guest answers about them.
fn tell_segments(host: &mut HostLink) {
    host.send(RelayKind::SEGMENTS, 0, [segment("web", 5), segment("gone", 6)].as_bytes()).unwrap();
    let told: Vec<relay::Mapped> = (0..2)
        .map(|_| <relay::Mapped as zerocopy::FromBytes>::read_from_bytes(&next_message(host).2).unwrap())
        .collect();
    assert_eq!((told[0].name.as_str(), told[0].kind), ("gone", MappingKind::NONE));
    assert_eq!((told[1].name.as_str(), told[1].kind), ("web", MappingKind::BAR));
    assert!(told[1].read_mb_s > 0 && told[1].write_mb_s > 0);
}

#[test]
fn a_mode_that_nobody_can_mean_is_told() {
    for (mode, part) in [("0777", "write 0666"), ("0000", "only root's programs"), ("0666", "")] {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            args: Args,
        }
        let line = <Line as clap::Parser>::parse_from(["ginneld", "--socket-mode", mode]);
        let doubt = line.args.doubt().map(|doubt| doubt.to_string()).unwrap_or_default();
        assert!(doubt.contains(part) && doubt.is_empty() == part.is_empty(), "{mode}: {doubt}");
    }
}

#[test]
fn hup_does_not_end_it() {
    let vm = TestVm::new();
    let _host = vm.session();
    // Its handler is there as soon as it serves.
    vm.program();
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::HUP).unwrap();
    vm.program();
}

#[test]
fn a_program_and_the_host_exchange_messages() {
    let vm = TestVm::new();
    let mut host = vm.session();
    let program = vm.program();
    program.say(Kind::LISTEN, 2, b"anything");
    let (kind, client, body) = next_message(&mut host);
    let open: relay::Open = wire::body(&body).unwrap();
    let me = pidwatch::process(std::process::id()).unwrap();
    assert_eq!((kind, open.pid, open.started), (RelayKind::OPEN, me.pid, me.started));
    assert_eq!(open.uid, rustix::process::getuid().as_raw());
    let (kind, data_client, body) = next_message(&mut host);
    assert_eq!((kind, data_client), (RelayKind::DATA, client));
    let (header, content) = wire::split(&body).unwrap();
    assert_eq!((header.kind, header.request, content), (Kind::LISTEN, 2, &b"anything"[..]));

    let answer = [Header { kind: Kind::OK, flags: 0, request: 2 }.as_bytes(), b"fine"].concat();
    host.send(RelayKind::DATA, client, &answer).unwrap();
    let (header, body) = program.hears();
    assert_eq!((header.kind, header.request, body.as_slice()), (Kind::OK, 2, &b"fine"[..]));

    drop(program);
    assert_eq!(next_message(&mut host), (RelayKind::CLOSE, client, vec![]));
    host.send(RelayKind::DATA, client, &answer).unwrap(); // Nobody receives this.
    vm.program();
}

#[test]
fn the_host_can_end_a_connection() {
    let vm = TestVm::new();
    let mut host = vm.session();
    let program = vm.program();
    program.say(Kind::INSPECT, 2, &[]);
    let (_, client, _) = next_message(&mut host);
    host.send(RelayKind::CLOSE, client, &[]).unwrap();
    assert!(program.is_closed());
}

#[test]
fn an_answer_to_attach_gets_the_guests_descriptors() {
    let vm = TestVm::new();
    let mut host = vm.session();
    tell_segments(&mut host);
    let program = vm.program();
    program.say(Kind::ATTACH, 2, attach("web").as_bytes());
    let (_, client, _) = next_message(&mut host);
    next_message(&mut host);
    let mut attached = wire::Attached::new_zeroed();
    (attached.member, attached.vector, attached.uuid, attached.segment_len) = (3, 2, [5; 16], SIZE);
    (attached.map_offset, attached.fds) = (99, Fds(0xff)); // The guest's daemon must replace these.
    attached.kind = MappingKind::FILE;
    let answer =
        [Header { kind: Kind::ATTACHED, flags: 0, request: 2 }.as_bytes(), attached.as_bytes()].concat();
    host.send(RelayKind::DATA, client, &answer).unwrap();

    let packet = program.receive().unwrap();
    let (header, body) = wire::split(&packet.bytes).unwrap();
    let attached: wire::Attached = wire::body(body).unwrap();
    assert_eq!((header.kind, header.request, attached.member), (Kind::ATTACHED, 2, 3));
    assert_eq!(
        (attached.kind, attached.fds),
        (MappingKind::BAR, Fds(Fds::MEMORY | Fds::REGISTERS)),
        "no interrupts here"
    );
    let len = attached.mapped_len().unwrap() as usize;
    let memory = Mapping::of_file(&packet.fds[0], attached.map_offset, len, Protection::ReadWrite).unwrap();
    assert_eq!(memory.load_relaxed_u64(0), ginnel_layout::segment::MAGIC);
    assert_eq!(packet.fds.len(), 2);
}

#[test]
fn the_refusal_for_a_segment_without_device_says_how_to_fix_it() {
    let vm = TestVm::new();
    let mut host = vm.session();
    tell_segments(&mut host);
    let program = vm.program();
    program.say(Kind::ATTACH, 2, attach("gone").as_bytes());
    let (code, text) = program.is_refused(2);
    assert_eq!(code, ErrorCode::NO_SEGMENT);
    assert!(text.contains("segment gone") && text.contains("ginnel qemu-args"), "{text}");
    // The host is told, because it may be able to repair the reason.
    let (kind, _, body) = next_message(&mut host);
    let told: relay::Mapped = wire::body(&body).unwrap();
    assert_eq!((kind, told.name.as_str(), told.kind), (RelayKind::MAPPED, "gone", MappingKind::NONE));
    // The host itself refuses a segment of which the guest has never heard.
    program.say(Kind::ATTACH, 3, attach("never").as_bytes());
    assert_eq!(next_message(&mut host).0, RelayKind::OPEN);
}

#[test]
fn requests_without_a_host_are_refused_as_temporary() {
    let vm = TestVm::new();
    let program = vm.program();
    program.say(Kind::INSPECT, 2, &[]);
    assert_eq!(program.is_refused(2).0, ErrorCode::UNAVAILABLE);
    let mut host = vm.session();
    program.say(Kind::INSPECT, 3, &[]);
    assert_eq!(next_message(&mut host).0, RelayKind::OPEN);
}

#[test]
fn a_new_host_daemon_finds_no_clients_of_the_old() {
    let vm = TestVm::new();
    let mut host = vm.session();
    let (idle, busy) = (vm.program(), vm.program());
    busy.say(Kind::INSPECT, 2, &[]);
    next_message(&mut host);
    drop(host);
    let mut host = vm.session();
    assert!(busy.is_closed());
    idle.say(Kind::INSPECT, 2, &[]);
    assert_eq!(
        next_message(&mut host).0,
        RelayKind::OPEN,
        "a program without a pending request stays connected"
    );
}

#[test]
fn a_daemon_that_stops_closes_the_link_and_its_successor_continues() {
    let mut vm = TestVm::new();
    let mut host = vm.session();
    let program = vm.program();
    drop(std::mem::replace(&mut vm.stop, UnixStream::pair().unwrap().0));
    vm.daemon.take().unwrap().join().unwrap().unwrap();
    assert_eq!(next(&mut host), Event::Down);
    assert!(program.is_closed());
    vm.start();
    assert!(matches!(next(&mut host), Event::Up(_)));
    vm.program().say(Kind::INSPECT, 1, &[]);
    assert_eq!(next_message(&mut host).0, RelayKind::OPEN);
}

#[test]
fn endpoints_of_dead_processes_are_reported_at_once_and_others_when_they_die() {
    let vm = TestVm::new();
    let mut host = vm.session();
    let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let process = pidwatch::process(child.id()).unwrap();
    let endpoint =
        |endpoint, started| relay::Endpoint { endpoint, epoch: 1, pid: process.pid, reserved: 0, started };
    let (alive, reused) = (endpoint(4, process.started), endpoint(5, process.started + 1));
    host.send(RelayKind::ENDPOINTS, 0, [alive, reused].as_bytes()).unwrap();
    assert_eq!(next_message(&mut host), (RelayKind::GONE, 0, reused.as_bytes().to_vec()));
    assert_eq!(host.step(), Event::Idle);
    child.kill().unwrap();
    assert_eq!(next_message(&mut host), (RelayKind::GONE, 0, alive.as_bytes().to_vec()));
    child.wait().unwrap();
}

const SOCKET: &str = "GINNEL_TEST_SOCKET";

kit::program! {
    fn program_with_a_child() {
        let program = Program(packet::connect_to(std::env::var(SOCKET).unwrap().as_ref()).unwrap());
        let hello = wire::Hello { version: wire::VERSION, reserved: 0, features: 0 };
        program.say(Kind::HELLO, 1, hello.as_bytes());
        program.hears();
        program.say(Kind::ATTACH, 2, attach("web").as_bytes());
        program.hears();
        // The child inherits the socket, joins the endpoint, and ends when the test closes the pipe that is its standard input.
        let mut child = std::process::Command::new("sh")
            .args(["-c", "printf '\\027\\0\\0\\0\\0\\0\\0\\0' >&2; read nothing"])
            .stderr(program.0)
            .spawn()
            .unwrap();
        // The test kills this process long before its child ends.
        child.wait().unwrap();
    }
}

#[test]
fn the_host_is_told_of_processes_and_of_connections_one_by_one() {
    let vm = TestVm::new();
    let mut host = vm.session();
    tell_segments(&mut host);
    let mut program = kit::program::command(program_with_a_child);
    // The child lives until the test closes this pipe.
    program.env(SOCKET, vm.socket()).stdin(std::process::Stdio::piped());
    let mut program = program.spawn().unwrap();
    let pipe = program.stdin.take();
    let (_, client, body) = next_message(&mut host);
    let parent = wire::body::<relay::Open>(&body).unwrap();
    assert_eq!(parent.pid, program.id());
    assert_eq!(next_message(&mut host).0, RelayKind::DATA);
    host.send(RelayKind::DATA, client, &attached(2)).unwrap();
    let (kind, _, body) = next_message(&mut host);
    let child: relay::Endpoint = wire::body(&body).unwrap();
    assert_eq!((kind, child.endpoint, child.epoch), (RelayKind::JOIN, 4, 9));
    assert_ne!(child.pid, program.id());
    program.kill().unwrap();
    program.wait().unwrap();
    let gone = relay::Endpoint { pid: parent.pid, started: parent.started, ..child };
    assert_eq!(next_message(&mut host), (RelayKind::GONE, 0, gone.as_bytes().to_vec()));
    assert_eq!(host.step(), Event::Idle, "its child has the connection");
    drop(pipe);
    // The end of the child and the end of the connection are two events.
    let mut ends = [next_message(&mut host), next_message(&mut host)];
    ends.sort_by_key(|(kind, ..)| kind.0);
    assert_eq!(ends[0], (RelayKind::CLOSE, client, vec![]));
    assert_eq!(ends[1], (RelayKind::GONE, 0, child.as_bytes().to_vec()));
}

kit::program! {
    fn program_that_executes_itself() {
        use std::os::unix::process::CommandExt;
        const AGAIN: &str = "GINNEL_TEST_AGAIN";
        let program = Program(packet::connect_to(std::env::var(SOCKET).unwrap().as_ref()).unwrap());
        let hello = wire::Hello { version: wire::VERSION, reserved: 0, features: 0 };
        program.say(Kind::HELLO, 1, hello.as_bytes());
        program.hears();
        if std::env::var_os(AGAIN).is_none() {
            program.say(Kind::ATTACH, 2, attach("web").as_bytes());
            program.hears();
            program.say(Kind::HOLD, 3, wire::Hold { token: [8; 16], millis: 9, reserved: 0 }.as_bytes());
            program.hears();
            panic!("{}", kit::program::command(program_that_executes_itself).env(AGAIN, "1").exec());
        }
        program.say(
            Kind::ATTACH,
            4,
            wire::Attach { endpoint: 4, epoch: 9, token: [8; 16], ..attach("web") }.as_bytes(),
        );
        program.hears();
        program.say(Kind::RESUME, 5, wire::ChannelSide { channel: 7, initiator: 1, reserved: 0 }.as_bytes());
        // The test kills this process.
        while let Ok(packet) = program.receive() {
            drop(packet);
        }
    }
}

#[test]
fn a_program_that_executes_itself_adopts_its_endpoint() {
    let vm = TestVm::new();
    let mut host = vm.session();
    tell_segments(&mut host);
    let mut program = kit::program::command(program_that_executes_itself);
    let mut program = program.env(SOCKET, vm.socket()).spawn().unwrap();
    let asks = |host: &mut HostLink, expected: Kind| loop {
        let (kind, client, body) = next_message(host);
        let header = wire::split(&body).map(|(header, _)| header);
        match (kind, header) {
            (RelayKind::DATA, Some(header)) => {
                assert_eq!(header.kind, expected);
                return (client, header.request, body);
            }
            other => {
                assert!(matches!(other.0, RelayKind::OPEN | RelayKind::CLOSE | RelayKind::GONE), "{other:?}")
            }
        }
    };
    let (first, request, _) = asks(&mut host, Kind::ATTACH);
    host.send(RelayKind::DATA, first, &attached(request)).unwrap();
    let (_, request, body) = asks(&mut host, Kind::HOLD);
    let hold: wire::Hold = wire::body(wire::split(&body).unwrap().1).unwrap();
    assert_eq!((hold.token, hold.millis), ([8; 16], 9));
    let ok = Header { kind: Kind::OK, flags: 0, request };
    host.send(RelayKind::DATA, first, ok.as_bytes()).unwrap();
    // Until it adopts the endpoint, it may count as ended, because it runs another program; afterwards it must not.
    let (second, request, body) = asks(&mut host, Kind::ATTACH);
    let adopt: wire::Attach = wire::body(wire::split(&body).unwrap().1).unwrap();
    assert_eq!((adopt.endpoint, adopt.epoch, adopt.token), (4, 9, [8; 16]));
    assert_ne!(second, first);
    host.send(RelayKind::DATA, second, &attached(request)).unwrap();
    let mut rest = Vec::new();
    loop {
        let (kind, client, body) = next_message(&mut host);
        if kind == RelayKind::DATA {
            assert_eq!((client, wire::split(&body).unwrap().0.kind), (second, Kind::RESUME));
            program.kill().unwrap();
            program.wait().unwrap();
        }
        let ends = (kind, client) == (RelayKind::CLOSE, second) || kind == RelayKind::GONE;
        rest.extend(ends.then_some(kind));
        if rest.len() == 2 {
            break;
        }
        assert!(ends || kind == RelayKind::DATA || (kind, client) == (RelayKind::CLOSE, first), "{kind:?}");
    }
    rest.sort_by_key(|kind| kind.0);
    assert_eq!(rest, [RelayKind::CLOSE, RelayKind::GONE]);
    assert!(program.try_wait().unwrap().is_some(), "it counts as ended when it has ended, and not before");
}

/// Returns the host's answer to a request to attach: endpoint 4 of epoch 9.
fn attached(request: u32) -> Vec<u8> {
    attached_as(4, request)
}

fn attached_as(endpoint: u32, request: u32) -> Vec<u8> {
    let mut attached = wire::Attached::new_zeroed();
    (attached.member, attached.endpoint, attached.epoch) = (3, endpoint, 9);
    (attached.vector, attached.uuid, attached.segment_len) = (2, [5; 16], SIZE);
    [Header { kind: Kind::ATTACHED, flags: 0, request }.as_bytes(), attached.as_bytes()].concat()
}

#[test]
fn a_full_ring_delays_programs_and_loses_nothing() {
    let vm = TestVm::new();
    let mut host = vm.session();
    let program = vm.program();
    let many = 200u32; // This is eight times what the ring holds.
    let sender = std::thread::spawn(move || {
        for request in 0..many {
            program.say(Kind::INSPECT, request, &[request as u8; 4000]);
        }
        program
    });
    let (_, client, _) = next_message(&mut host);
    for request in 0..many {
        let (kind, from, body) = next_message(&mut host);
        let (header, content) = wire::split(&body).unwrap();
        assert_eq!((kind, from, header.request), (RelayKind::DATA, client, request));
        assert_eq!(content, [request as u8; 4000]);
    }
    drop(sender.join().unwrap());
    assert_eq!(next_message(&mut host), (RelayKind::CLOSE, client, vec![]));
}

#[test]
fn a_program_that_keeps_the_ring_full_does_not_starve_others() {
    let vm = TestVm::new();
    let mut host = vm.session();
    let (greedy, modest) = (vm.program(), vm.program());
    rustix::io::ioctl_fionbio(&greedy.0, true).unwrap();
    let bytes = [Header { kind: Kind::INSPECT, flags: 0, request: 2 }.as_bytes(), &[0; 4000]].concat();
    let sends = || packet::send::<OwnedFd>(greedy.0.as_fd(), &bytes, &[]).is_ok();
    // The socket is full, and stays so.
    while sends() {}
    modest.say(Kind::INSPECT, 2, &[]);
    let modest = PacketSocket::new(modest.0, 0);
    let mut others = 0;
    while modest.has_unread() {
        // The turn that had begun may be completed, but no other may follow.
        assert!(others <= 2 * 64, "the other program was read {others} times meanwhile");
        let read = (0..1000).any(|_| {
            std::thread::yield_now();
            sends()
        });
        match read {
            true => others += 1,
            // The ring is full: there is room for one request, of either program.
            false => drop(host.step()),
        }
    }
}

#[test]
fn requests_of_a_program_that_ends_are_passed_on_and_others_are_served() {
    let vm = TestVm::new();
    let mut host = vm.session();
    let (dying, living) = (vm.program(), vm.program());
    let many = 100u32; // The ring becomes full in between.
    let sender = std::thread::spawn(move || {
        (0..many).for_each(|request| dying.say(Kind::INSPECT, request, &[0; 4000]));
    });
    let (_, client, _) = next_message(&mut host);
    for request in 0..many {
        let (kind, from, body) = next_message(&mut host);
        assert_eq!((kind, from, wire::split(&body).unwrap().0.request), (RelayKind::DATA, client, request));
        // At some time the client has gone and does not receive this.
        let answer = Header { kind: Kind::OK, flags: 0, request };
        let _ = host.send(RelayKind::DATA, client, answer.as_bytes());
    }
    sender.join().unwrap();
    assert_eq!(next_message(&mut host), (RelayKind::CLOSE, client, vec![]));
    living.say(Kind::INSPECT, 2, &[]);
    let (_, client, _) = next_message(&mut host);
    next_message(&mut host);
    let answer = Header { kind: Kind::OK, flags: 0, request: 2 };
    host.send(RelayKind::DATA, client, answer.as_bytes()).unwrap();
    assert_eq!(living.hears().0.request, 2);
}

#[test]
fn a_program_that_breaks_the_protocol_gets_an_error_and_is_disconnected() {
    let vm = TestVm::new();
    let _host = vm.session();
    let hello = |version| wire::Hello { version, reserved: 0, features: 0 };

    let program = Program::connect(&vm);
    program.say(Kind::ATTACH, 9, attach("web").as_bytes());
    let (code, text) = program.is_refused(9);
    assert!(code == ErrorCode::PROTOCOL && text.contains("begins with HELLO") && program.is_closed());

    let program = Program::connect(&vm);
    program.say(Kind::HELLO, 1, hello(99).as_bytes());
    assert_eq!(program.is_refused(1).0, ErrorCode::VERSION);
    assert!(program.is_closed());

    let program = Program::connect(&vm);
    program.say(Kind::HELLO, 1, b"short");
    assert_eq!(program.is_refused(1).0, ErrorCode::PROTOCOL);

    let program = vm.program();
    packet::send::<OwnedFd>(program.0.as_fd(), b"tiny", &[]).unwrap();
    assert_eq!(program.is_refused(0).0, ErrorCode::PROTOCOL);
    assert!(program.is_closed());

    let program = vm.program();
    packet::send::<OwnedFd>(program.0.as_fd(), &[0; wire::MAX_PACKET + 1], &[]).unwrap();
    assert_eq!(program.is_refused(0).0, ErrorCode::PROTOCOL);

    let program = vm.program();
    packet::send(program.0.as_fd(), &[0; 20], &[File::open("/dev/null").unwrap()]).unwrap();
    assert_eq!(program.is_refused(0).0, ErrorCode::PROTOCOL);
    vm.program();
}

/// Returns the two ends of a TCP connection, the connector's first.
fn connection() -> [std::net::TcpStream; 2] {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    ginnel_tcp::save_syn(&listener).unwrap();
    let connector = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    [connector, listener.accept().unwrap().0]
}

fn report(key: u64, role: wire::SocketRole) -> wire::SocketReport {
    wire::SocketReport { key, before: 5, after: 6, role, reserved: 0 }
}

impl Program {
    fn reports(&self, report: wire::SocketReport, sockets: &[impl AsFd]) {
        self.gives(Kind::SOCK_REPORT, report.as_bytes(), sockets);
    }

    fn gives(&self, kind: Kind, body: &[u8], fds: &[impl AsFd]) {
        let bytes = [Header { kind, flags: 0, request: 0 }.as_bytes(), body].concat();
        packet::send(self.0.as_fd(), &bytes, fds).unwrap();
    }

    fn hears_stays(&self) -> (u64, wire::StaysReason) {
        let (header, body) = self.hears();
        assert_eq!((header.kind, header.request), (Kind::SOCK_STAYS, 0));
        let stays: wire::SocketStays = wire::body(&body).unwrap();
        (stays.key, stays.reason)
    }
}

/// Returns the facts that the host receives for a report.
fn next_facts(host: &mut HostLink, client: u32) -> wire::SocketFacts {
    let (kind, from, body) = next_message(host);
    assert_eq!((kind, from), (RelayKind::DATA, client));
    let (header, body) = wire::split(&body).unwrap();
    assert_eq!(header.kind, Kind::SOCK_REPORT);
    wire::body(body).unwrap()
}

#[test]
fn excluded_programs_stay_on_tcp() {
    let comm = std::fs::read_to_string("/proc/self/comm").unwrap();
    for (excluded, is_left_out) in [("another", false), (comm.trim_end(), true)] {
        let vm = TestVm::without(excluded);
        let mut host = vm.session();
        let program = vm.program();
        // Both ends stay open, because a daemon that looked at the socket after the acceptor had closed would not report it.
        let [connector, _acceptor] = connection();
        program.reports(report(1, wire::SocketRole::CONNECTOR), &[&connector]);
        match is_left_out {
            true => assert_eq!(program.hears_stays(), (1, wire::StaysReason::EXCLUDED)),
            false => assert_eq!(next_message(&mut host).0, RelayKind::OPEN),
        }
    }
    let names = |args| parsed(args).unwrap().exclude;
    assert_eq!(names(&[]), ["sshd", "sshd-session"]);
    assert_eq!(names(&["--exclude", "a,b"]), ["a", "b"]);
}

#[test]
fn a_reported_socket_is_passed_on_as_facts_and_events_come_back() {
    let vm = TestVm::new();
    let mut host = vm.session();
    let program = vm.program();
    let [connector, acceptor] = connection();
    program.reports(report(1, wire::SocketRole::CONNECTOR), &[&connector]);
    let (kind, client, _) = next_message(&mut host);
    assert_eq!(kind, RelayKind::OPEN);
    let one = next_facts(&mut host, client);
    program.reports(report(2, wire::SocketRole::ACCEPTOR), &[&acceptor]);
    let two = next_facts(&mut host, client);

    assert_eq!(one.report.as_bytes(), report(1, wire::SocketRole::CONNECTOR).as_bytes());
    assert_eq!(two.report.key, 2);
    let address = |address: std::net::SocketAddr| match address.ip() {
        std::net::IpAddr::V4(v4) => (v4.to_ipv6_mapped().octets(), address.port()),
        std::net::IpAddr::V6(v6) => (v6.octets(), address.port()),
    };
    assert_eq!((one.local, one.local_port), address(connector.local_addr().unwrap()));
    assert_eq!((one.remote, one.remote_port), address(connector.peer_addr().unwrap()));
    assert_eq!((two.local, two.local_port), (one.remote, one.remote_port));
    assert_eq!((two.remote, two.remote_port), (one.local, one.local_port));
    let identity = ginnel_tcp::Identity::of(&connector).unwrap();
    assert_eq!((one.cookie, one.namespace), (identity.cookie, identity.namespace));
    assert!(one.namespace == two.namespace && one.cookie != two.cookie);
    // This depends on this machine's kernel: either both have timestamps or none has.
    let has_clock = ginnel_tcp::Clock::of(&connector).unwrap().is_some();
    assert_eq!(one.flags & wire::SocketFacts::CLOCK != 0, has_clock);
    assert_eq!(two.flags & wire::SocketFacts::SYN != 0, has_clock);
    assert!(!has_clock || (one.clock_before > 0 && one.clock_before <= one.clock_after));
    // The kernel reports a SYN only once; the daemon remembers it.
    assert_eq!(ginnel_tcp::SynTime::of(&acceptor).unwrap(), None);
    program.reports(report(3, wire::SocketRole::ACCEPTOR), &[&acceptor]);
    let again = next_facts(&mut host, client);
    assert_eq!((again.report.key, again.syn, again.flags), (3, two.syn, two.flags));

    let name = |name| Name::new(name).unwrap();
    let matched = wire::SocketMatched { key: 1, segment: name("web"), listener: name("secret") };
    let stays = wire::SocketStays { key: 2, reason: wire::StaysReason::AMBIGUOUS, reserved: 0 };
    for (kind, body) in [(Kind::SOCK_MATCHED, matched.as_bytes()), (Kind::SOCK_STAYS, stays.as_bytes())] {
        let event = [Header { kind, flags: 0, request: 0 }.as_bytes(), body].concat();
        host.send(RelayKind::DATA, client, &event).unwrap();
        assert_eq!(program.receive().unwrap().bytes, event);
    }

    program.say(Kind::SOCK_WITHDRAW, 0, wire::SocketKey { key: 3 }.as_bytes());
    let (_, from, body) = next_message(&mut host);
    let (header, body) = wire::split(&body).unwrap();
    assert_eq!(
        (from, header.kind, wire::body::<wire::SocketKey>(body).unwrap().key),
        (client, Kind::SOCK_WITHDRAW, 3)
    );

    // A lent socket is the same socket. Once the daemon has closed it, it closes the socket in which it was lent.
    let (own, lent_in) = UnixStream::pair().unwrap();
    ginnel_fdpass::send(own.as_fd(), &[0], &[&connector], ginnel_fdpass::SendFlags::empty()).unwrap();
    program.reports(report(4, wire::SocketRole::CONNECTOR), &[lent_in]);
    let lent = next_facts(&mut host, client);
    assert_eq!((lent.report.key, lent.cookie), (4, identity.cookie));
    assert_eq!(std::io::Read::read(&mut &own, &mut [0]).unwrap(), 0);

    // The daemon has kept none of the descriptors: the other end sees the connection end.
    drop(connector);
    assert_eq!(std::io::Read::read(&mut &acceptor, &mut [0]).unwrap(), 0);
}

#[test]
fn a_socket_that_is_not_a_tcp_connection_stays_as_it_is() {
    let vm = TestVm::new();
    let mut host = vm.session();
    let program = vm.program();
    program.reports(report(7, wire::SocketRole::CONNECTOR), &[UnixStream::pair().unwrap().0]);
    assert_eq!(program.hears_stays(), (7, wire::StaysReason::NOT_TCP));
    program.reports(report(8, wire::SocketRole::ACCEPTOR), &[File::open("/dev/null").unwrap()]);
    assert_eq!(program.hears_stays(), (8, wire::StaysReason::NOT_TCP));
    assert_eq!(host.step(), Event::Idle, "the host hears nothing of it");
}

#[test]
fn only_a_report_carries_a_descriptor_and_only_the_daemon_states_facts() {
    let vm = TestVm::new();
    let mut host = vm.session();
    let [connector, acceptor] = connection();
    let is_refused = |program: Program| {
        let (header, _) = program.hears();
        assert_eq!(header.kind, Kind::ERROR);
        assert!(program.is_closed());
    };
    let give = |kind, body: &[u8], fds: &[&std::net::TcpStream]| {
        let program = vm.program();
        program.gives(kind, body, fds);
        is_refused(program);
    };
    let good = report(1, wire::SocketRole::CONNECTOR);
    give(Kind::SOCK_WITHDRAW, wire::SocketKey { key: 1 }.as_bytes(), &[&connector]);
    give(Kind::INSPECT, &[], &[&connector]);
    give(Kind::SOCK_REPORT, good.as_bytes(), &[]);
    give(Kind::SOCK_REPORT, good.as_bytes(), &[&connector, &acceptor]);
    give(Kind::SOCK_REPORT, &good.as_bytes()[1..], &[&connector]);
    let forged = wire::SocketFacts::new_zeroed();
    give(Kind::SOCK_REPORT, forged.as_bytes(), &[]);
    give(Kind::SOCK_REPORT, forged.as_bytes(), &[&connector]);
    assert_eq!(host.step(), Event::Idle, "the host hears nothing of them");
}

#[test]
fn only_features_of_both_daemons_are_offered() {
    let vm = TestVm::new();
    let hello = wire::Hello { version: wire::VERSION, reserved: 0, features: u64::MAX };
    let features = |program: &Program| {
        let (header, body) = program.hears();
        assert_eq!((header.kind, header.request), (Kind::HELLO_OK, 1));
        let ok: wire::HelloOk = wire::body(&body).unwrap();
        assert_eq!((ok.version, ok.member, ok.name.as_str()), (wire::VERSION, 3, "vm-a"));
        ok.features
    };
    let program = Program::connect(&vm);
    program.say(Kind::HELLO, 1, hello.as_bytes());
    assert_eq!(features(&program), 0, "there is no host");
    let [connector, _acceptor] = connection();
    program.reports(report(4, wire::SocketRole::CONNECTOR), &[&connector]);
    assert_eq!(program.hears_stays(), (4, wire::StaysReason::DISABLED));

    let mut host = vm.session();
    for (theirs, both) in [(0, 0), (u64::MAX, wire::features::SOCKETS)] {
        let program = Program::connect(&vm);
        program.say(Kind::HELLO, 1, hello.as_bytes());
        let (_, client, _) = next_message(&mut host);
        let (_, _, asked) = next_message(&mut host);
        let (header, body) = wire::split(&asked).unwrap();
        assert_eq!((header.kind, body), (Kind::HELLO, hello.as_bytes()));
        let ok = wire::HelloOk {
            version: wire::VERSION,
            member: 9,
            features: theirs,
            name: Name::new("other").unwrap(),
        };
        let answer =
            [Header { kind: Kind::HELLO_OK, flags: 0, request: 1 }.as_bytes(), ok.as_bytes()].concat();
        host.send(RelayKind::DATA, client, &answer).unwrap();
        assert_eq!(features(&program), both);
        drop(program);
        assert_eq!(next_message(&mut host).0, RelayKind::CLOSE);
    }
}

#[test]
fn a_program_that_never_reads_is_disconnected_and_others_are_served() {
    let vm = TestVm::new();
    let mut host = vm.session();
    let deaf = vm.program();
    deaf.say(Kind::INSPECT, 2, &[]);
    let (_, client, _) = next_message(&mut host);
    next_message(&mut host);
    let long = [Header { kind: Kind::TEXT, flags: 1, request: 2 }.as_bytes(), &[b'x'; 8000][..]].concat();
    let deadline = Instant::now() + WATCHDOG;
    loop {
        assert!(Instant::now() < deadline, "its connection is never ended");
        let _ = host.send(RelayKind::DATA, client, &long);
        match host.step() {
            Event::Message { kind: RelayKind::CLOSE, client: closed, .. } if closed == client => break,
            Event::Idle => {}
            other => panic!("{other:?}"),
        }
    }
    vm.program();
}

#[test]
fn invalid_messages_from_the_host_are_survived() {
    let vm = TestVm::new();
    let mut host = vm.session();
    let program = vm.program();
    program.say(Kind::INSPECT, 2, &[]);
    let (_, client, _) = next_message(&mut host);
    next_message(&mut host);
    for (kind, client, body) in [
        (RelayKind(77), 0, &b"?"[..]),
        (RelayKind::SEGMENTS, 0, &[1; 95]),
        (RelayKind::ENDPOINTS, 0, &[1; 23]),
        (RelayKind::DATA, 999, &[1; 100]),
        (RelayKind::CLOSE, 999, &[]),
        (RelayKind::DATA, client, &[1; 3]),
    ] {
        host.send(kind, client, body).unwrap();
    }
    assert!(program.is_closed());
    assert_eq!(next_message(&mut host), (RelayKind::CLOSE, client, vec![]));
    vm.program();
}

#[test]
fn a_uuid_is_32_digits() {
    let uuid = parse_uuid("0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9").unwrap();
    assert_eq!((uuid[0], uuid[15]), (0x0a, 0xf9));
    assert!(parse_uuid("").is_none() && parse_uuid("1-2").is_none() && parse_uuid(&"x".repeat(32)).is_none());
}

#[test]
fn only_one_daemon_runs_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let _lock = lock(dir.path(), "ginneld.lock", true).unwrap();
    let refused = Problem::from(lock(dir.path(), "ginneld.lock", true).unwrap_err());
    assert!(refused.to_string().contains("another ginneld"), "{refused}");
}

/// Floods the daemon with connections that send nothing, or only `HELLO`.
#[test]
fn connections_that_attach_to_nothing_do_not_keep_others_out() {
    let vm = TestVm::new();
    let mut host = vm.session();
    tell_segments(&mut host);
    let (attached_first, client) = vm.attached_program(&mut host, 4);
    let flood = vm.most.all + 476;
    let held: Vec<Program> =
        (0..flood).map(|n| if n % 100 == 0 { vm.program() } else { Program::connect(&vm) }).collect();
    // The oldest connections have made room for the later ones, and for one more.
    let newcomer = vm.program();
    let expected = flood + 2 - vm.most.all;
    // Connections are closed in any order.
    assert!(held[..expected].iter().all(Program::is_closed));
    let ended = held.iter().take_while(|program| program.has_something()).count();
    assert_eq!(ended, expected);
    assert!(!held[flood - 1].has_something());
    // Attached programs are not among them.
    for (n, program) in [attached_first, newcomer].iter().enumerate() {
        program.say(Kind::INSPECT, 7, wire::Inspect::FIRST.as_bytes());
        let (mut kind, mut id, mut body) = next_message(&mut host);
        while n == 1 && kind != RelayKind::DATA {
            (kind, id, body) = next_message(&mut host);
        }
        assert_eq!((kind, id == client), (RelayKind::DATA, n == 0));
        assert_eq!(wire::split(&body).unwrap().0.kind, Kind::INSPECT);
    }
}

/// Attaches as many programs as a guest's daemon accepts by default.
#[test]
fn thousands_of_programs_are_attached_at_once_and_one_more_is_refused() {
    let most = default_args().most();
    assert_eq!((most.all, most.per_user), (4096, 4096));
    // In this test each program has a descriptor in this process, too.
    let needed = 3 * most.all as u64 + 2 * FDS_OWN;
    let limit = keeper::provide_open_files(needed);
    assert!(
        limit >= needed,
        "this test takes {needed} open files, and {limit} are allowed: raise ulimit -Hn"
    );
    let vm = TestVm::with(most);
    let mut host = vm.session();
    tell_segments(&mut host);
    let programs: Vec<_> = (1..=most.all as u32).map(|n| vm.attached_program(&mut host, n)).collect();
    for _ in 0..2 {
        let one_more = Program::connect(&vm);
        let (code, text) = one_more.is_refused(0);
        assert_eq!(code, ErrorCode::LIMIT);
        assert!(text.contains("4096 connections") && text.contains("--max-clients"), "{text}");
        assert!(one_more.is_closed());
    }
    // All of them are still served, and when one ends, there is room for another.
    for (n, (program, client)) in programs.iter().enumerate() {
        program.say(Kind::INSPECT, n as u32, wire::Inspect::FIRST.as_bytes());
        let (kind, from, body) = next_message(&mut host);
        assert_eq!((kind, from), (RelayKind::DATA, *client));
        host.send(RelayKind::DATA, from, &body).unwrap();
        let (header, _) = program.hears();
        assert_eq!((header.kind, header.request), (Kind::INSPECT, n as u32));
    }
    let mut programs = programs.into_iter();
    drop(programs.next());
    assert_eq!(next_message(&mut host).0, RelayKind::CLOSE);
    vm.attached_program(&mut host, most.all as u32 + 1);
}

fn default_args() -> Args {
    parsed(&[]).unwrap()
}

fn parsed(args: &[&str]) -> Result<Args, String> {
    use clap::{Args as _, FromArgMatches};
    let command = Args::augment_args(clap::Command::new("guest"));
    let matches = command.try_get_matches_from([&["guest"], args].concat()).map_err(|e| e.to_string())?;
    Args::from_arg_matches(&matches).map_err(|e| e.to_string())
}

#[test]
fn the_command_line_sets_the_number_of_programs() {
    let most = parsed(&["--max-clients", "100"]).unwrap().most();
    assert_eq!((most.all, most.per_user), (100, 100));
    let most = parsed(&["--max-clients", "65536", "--clients-per-user", "5"]).unwrap().most();
    assert_eq!((most.all, most.per_user), (65536, 5));
    for (option, value) in
        [("--max-clients", "0"), ("--max-clients", "65537"), ("--clients-per-user", "many")]
    {
        let error = parsed(&[option, value]).unwrap_err();
        assert!(error.contains(option) && error.contains(value), "{error}");
    }
}

#[test]
fn a_daemon_answers_a_ping() {
    let vm = TestVm::new();
    let mut host = vm.session();
    host.send(RelayKind::PING, 0, &[]).unwrap();
    assert_eq!(next_message(&mut host), (RelayKind::PONG, 0, vec![]));
}
