//! A program of an ordinary user does whatever the kernel allows to its descriptors, its connection and its segment, while
//! other programs work. The daemon must keep answering, and programs that share no segment with the attacker must not notice
//! anything.

use ginnel::{AttachOptions, Endpoint, MessageChannel, WaitMode};
use ginnel_daemon::packet;
use ginnel_layout::sync::SyncKind;
use ginnel_layout::wire::{self, Header, Kind, Rights};
use ginnel_shmem::SharedMemory;
use kit::daemon::*;
use kit::random::Random;
use kit::wait::{WATCHDOG, wait_for};
use rustix::event::epoll;
use rustix::fs::{FallocateFlags, FlockOperation, OFlags, SealFlags};
use rustix::net::{Shutdown, sockopt};
use rustix::process::{Pid, Signal};
use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use zerocopy::{FromZeros, IntoBytes};

/// How long the attack lasts.
const ATTACK: Duration = Duration::from_secs(4);
/// The number of attackers that run at the same time.
const ATTACKERS: u64 = 2;
/// The most steps that one attacker makes. Then it ends, and another takes its place.
const STEPS: u64 = 3000;
/// The longest time that a program usually waits for the daemon, or for a peer that is not an attacker. Any single wait may take longer
/// on a busy machine, up to the watchdog's time.
const BOUND: Duration = Duration::from_secs(2);
/// The user id of an ordinary user.
const NOBODY: u32 = 65534;

const CONFIG: &str = "
[vm.a]
[segment.open]
size = \"8M\"
members = [\"host\", \"a\"]
allow_users = [65534]
[segment.alone]
size = \"8M\"
members = [\"host\"]
allow_users = [65534]
[segment.other]
size = \"8M\"
members = [\"host\"]
";

/// The state of one attacker.
struct Attack {
    random: Random,
    attached: Option<Attached>,
    /// Descriptors that the attacker has received: memory, eventfds, doorbells.
    handed: VecDeque<OwnedFd>,
    /// Connections and epolls that the attacker leaves open.
    litter: VecDeque<OwnedFd>,
    back: Option<wire::Attach>,
    socket: std::path::PathBuf,
}

kit::program! {
    fn attacker() {
        let seed: u64 = std::env::var("TEST_ATTACK_SEED").unwrap().parse().unwrap();
        if rustix::process::geteuid().is_root() {
            use rustix::thread::{Gid, Uid, set_thread_groups, set_thread_res_gid, set_thread_res_uid};
            set_thread_groups(&[]).unwrap();
            let (user, group) = (Uid::from_raw(NOBODY), Gid::from_raw(NOBODY));
            set_thread_res_gid(group, group, group).unwrap();
            set_thread_res_uid(user, user, user).unwrap();
        }
        let mut attack = Attack {
            random: Random::new(seed),
            attached: None,
            handed: VecDeque::new(),
            litter: VecDeque::new(),
            back: None,
            socket: program_socket(),
        };
        let steps = attack.random.below(STEPS);
        for _ in 0..steps {
            attack.step();
        }
    }
}

impl Attack {
    fn step(&mut self) {
        if self.attached.is_none() {
            return self.attach();
        }
        match self.random.below(16) {
            0 => self.flags(),
            1 => self.counters(),
            2 => self.file(),
            3 => self.connection(),
            4 => self.flood(),
            5 => self.scribble(),
            6 => self.nest(),
            7 => self.fork(),
            8..12 => self.ask(),
            12 => self.leave(),
            13 => self.join(),
            14 => self.steal(),
            _ => self.connect(),
        }
        while self.handed.len() > 200 {
            self.handed.pop_front();
        }
        while self.litter.len() > 100 {
            self.litter.pop_front();
        }
    }

    fn attach(&mut self) {
        let segment = if self.random.below(2) == 0 { "open" } else { "alone" };
        let Ok(fd) = packet::connect_to(&self.socket) else { return };
        let fresh = wire::Attach { segment: name(segment), name: name("evil"), ..wire::Attach::new_zeroed() };
        let body = match self.back.filter(|_| self.random.below(2) == 0) {
            Some(back) => back,
            None => fresh,
        };
        let hello = wire::Hello { version: wire::VERSION, reserved: 0, features: 0 };
        let said = [(Kind::HELLO, hello.as_bytes()), (Kind::ATTACH, body.as_bytes())];
        for (n, (kind, body)) in said.into_iter().enumerate() {
            let header = Header { kind, flags: 0, request: n as u32 + 1 };
            let _ = packet::send::<OwnedFd>(fd.as_fd(), &[header.as_bytes(), body].concat(), &[]);
        }
        // The attacker reads the answers like any client, if they come.
        let mut answers = Vec::new();
        while answers.len() < 2 && readable(&fd, BOUND) {
            let Ok(answer) = packet::receive(fd.as_fd(), wire::MAX_PACKET, 8) else { return };
            answers.push(answer);
        }
        let Some(answer) = answers.pop() else { return };
        let Some(attached) =
            wire::split(&answer.bytes).and_then(|(_, body)| wire::body::<wire::Attached>(body))
        else {
            self.back = None;
            return;
        };
        let mut fds = answer.fds.into_iter();
        let (Some(memory), Some(event)) = (fds.next(), fds.next()) else { return };
        let len = attached.mapped_len().unwrap() as usize;
        let protection = ginnel_shmem::Protection::ReadWrite;
        let Ok(mapping) = ginnel_shmem::Mapping::of_file(&memory, attached.map_offset, len, protection)
        else {
            return;
        };
        let back = wire::Attach {
            endpoint: attached.endpoint,
            epoch: attached.epoch,
            token: attached.token,
            segment: body.segment,
            name: body.name,
        };
        self.back = Some(back);
        self.handed.push_back(memory);
        self.handed.push_back(event.try_clone().unwrap());
        self.attached = Some(Attached::of(fd, attached, mapping, event, back));
    }

    fn any(&mut self) -> Option<&OwnedFd> {
        let n = self.random.below(self.handed.len().max(1) as u64) as usize;
        self.handed.get(n)
    }

    fn flags(&mut self) {
        let all = [OFlags::empty(), OFlags::NONBLOCK, OFlags::APPEND, OFlags::DIRECT, OFlags::NOATIME];
        let flags = all[self.random.below(5) as usize];
        if let Some(fd) = self.any() {
            let _ = rustix::fs::fcntl_setfl(fd, flags);
        }
    }

    /// Fills and drains eventfds. Never blocks itself.
    fn counters(&mut self) {
        let (fill, read) = (self.random.below(2) == 0, self.random.below(2) == 0);
        let Some(fd) = self.any() else { return };
        let is_event = rustix::fs::fstat(fd).is_ok_and(|stat| stat.st_size == 0);
        if !is_event {
            return;
        }
        let _ = rustix::fs::fcntl_setfl(fd, OFlags::NONBLOCK);
        if read {
            let _ = rustix::io::read(fd, &mut [0u8; 8]);
        }
        if fill {
            let _ = rustix::io::write(fd, &(u64::MAX - 1).to_ne_bytes());
            let _ = rustix::fs::fcntl_setfl(fd, OFlags::empty());
        }
    }

    /// Does to the segment's file what an attached program can do, except that it does not truncate a file that VMs have:
    /// `allow_users` trusts programs not to do that (docs/threat-model.md).
    fn file(&mut self) {
        let alone = self.attached.as_ref().is_some_and(|a| a.back.segment == name("alone"));
        let (what, at) = (self.random.below(6), self.random.below(8 << 20) & !4095);
        let Some(fd) = self.any() else { return };
        let _ = match what {
            0 if alone => rustix::fs::ftruncate(fd, at),
            1 => rustix::fs::fallocate(fd, FallocateFlags::KEEP_SIZE | FallocateFlags::PUNCH_HOLE, at, 8192),
            2 => rustix::fs::fcntl_add_seals(fd, SealFlags::WRITE),
            3 => {
                rustix::fs::fcntl_add_seals(fd, SealFlags::SHRINK | SealFlags::FUTURE_WRITE | SealFlags::SEAL)
            }
            4 => rustix::fs::flock(fd, FlockOperation::NonBlockingLockExclusive),
            _ => rustix::fs::fallocate(fd, FallocateFlags::KEEP_SIZE, 1 << 40, 4096),
        };
    }

    fn connection(&mut self) {
        let what = self.random.below(5);
        let Some(attached) = &self.attached else { return };
        let fd = &attached.client.fd;
        let _ = match what {
            0 => rustix::net::shutdown(fd, Shutdown::Read),
            1 => rustix::net::shutdown(fd, Shutdown::Write),
            2 => sockopt::set_socket_recv_buffer_size(fd, 0),
            3 => packet::send(fd.as_fd(), &[0; 8], &[fd]), // The connection is sent over itself, so that it would hold itself open.
            _ => packet::send::<OwnedFd>(fd.as_fd(), &vec![7; wire::MAX_PACKET], &[]),
        };
    }

    /// Sends many requests and does not read the answers.
    fn flood(&mut self) {
        let Some(attached) = &mut self.attached else { return };
        let _ = rustix::io::ioctl_fionbio(&attached.client.fd, true);
        for _ in 0..200 {
            let header = Header { kind: Kind::INSPECT, flags: 0, request: 9 };
            if packet::send::<OwnedFd>(attached.client.fd.as_fd(), header.as_bytes(), &[]).is_err() {
                break;
            }
        }
        self.drop_connection();
    }

    /// Gives up the connection, which stays open and is never read.
    fn drop_connection(&mut self) {
        if let Some(mut attached) = self.attached.take() {
            self.litter.push_back(attached.take_connection());
        }
    }

    fn scribble(&mut self) {
        let Some(attached) = &self.attached else { return };
        let memory = attached.memory.clone();
        for _ in 0..2000 {
            let at = self.random.below(memory.len() as u64) as usize & !7;
            let value = match self.random.below(3) {
                0 => self.random.next(),
                1 => self.random.below(70_000),
                _ => 0,
            };
            memory.store_relaxed_u64(at, value);
        }
    }

    /// Makes nested epolls that watch the received descriptors.
    fn nest(&mut self) {
        let Ok(outer) = epoll::create(epoll::CreateFlags::CLOEXEC) else { return };
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        for _ in 0..20 {
            let Ok(inner) = epoll::create(epoll::CreateFlags::CLOEXEC) else { break };
            if let Some(fd) = self.any() {
                let _ = epoll::add(&inner, fd, epoll::EventData::new_u64(0), flags);
            }
            let _ = epoll::add(&outer, &inner, epoll::EventData::new_u64(0), flags);
            self.litter.push_back(inner);
        }
        self.litter.push_back(outer);
    }

    /// Starts a process that holds a copy of the connection for a moment.
    fn fork(&mut self) {
        let Some(attached) = &self.attached else { return };
        let inherited = attached.client.fd.try_clone().unwrap();
        let child = Command::new("sleep").arg("0.05").stdin(Stdio::from(inherited)).spawn();
        if let Ok(mut child) = child {
            self.drop_connection();
            let _ = child.wait();
        }
    }

    /// Sends one of the requests that mostly make sense.
    fn ask(&mut self) {
        let (what, nonce, number) = (self.random.below(8), self.random.below(50), self.random.below(64));
        let at = name(&format!("n{}", self.random.below(20)));
        let Some(attached) = &mut self.attached else { return };
        let channel = wire::ChannelRef { channel: number };
        let (kind, body) = match what {
            0 => {
                let body = wire::Listen { name: at, kind: 1, backlog: 0, capacity: 4096, input_capacity: 0 };
                (Kind::LISTEN, body.as_bytes().to_vec())
            }
            1 => {
                let body = wire::Connect {
                    name: at,
                    kind: 1,
                    reserved: 0,
                    capacity: 4096,
                    input_capacity: 0,
                    nonce,
                };
                (Kind::CONNECT, body.as_bytes().to_vec())
            }
            2 => (Kind::CLOSE, channel.as_bytes().to_vec()),
            3 => {
                let kind = SyncKind(1 + number as u32 % 6).0;
                let flags = wire::SyncOpen::CREATE;
                let body = wire::SyncOpen { name: at, kind, limit: 2, initial: 0, flags, nonce };
                (Kind::SYNC_OPEN, body.as_bytes().to_vec())
            }
            4 => {
                let body = wire::BlockCreate {
                    name: at,
                    size: 4096,
                    rights: Rights::READ_WRITE,
                    others: Rights::READ_WRITE,
                    nonce,
                    ..wire::BlockCreate::new_zeroed()
                };
                (Kind::BLOCK_CREATE, body.as_bytes().to_vec())
            }
            5 => {
                let body = wire::BlockOpen { name: at, rights: Rights::READ, reserved: 0, nonce };
                (Kind::BLOCK_OPEN, body.as_bytes().to_vec())
            }
            6 => (Kind::BELL, wire::BellOf { bell: number as u32, reserved: 0 }.as_bytes().to_vec()),
            _ => (Kind::ACCEPTED, channel.as_bytes().to_vec()),
        };
        let request = attached.client.try_send(kind, &body);
        let Some(request) = request else { return self.drop_connection() };
        // Wait for the answer, and keep all descriptors that arrive until then.
        let until = Instant::now() + BOUND;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let Some(attached) = &self.attached else { return };
            if left.is_zero() || !readable(&attached.client.fd, left) {
                return self.drop_connection();
            }
            let Ok(answer) = packet::receive(attached.client.fd.as_fd(), wire::MAX_PACKET, 8) else {
                self.attached = None;
                return;
            };
            let answered = wire::split(&answer.bytes).is_some_and(|(header, _)| header.request == request);
            self.handed.extend(answer.fds);
            if answered {
                return;
            }
        }
    }

    fn leave(&mut self) {
        if self.random.below(2) == 0 {
            self.attached = None; // Dropping it sends `DETACH`.
        } else if let Some(attached) = self.attached.take() {
            attached.hang_up();
        }
    }

    fn join(&mut self) {
        if let Some(attached) = &mut self.attached {
            let _ = attached.client.try_send(Kind::JOIN, b"");
        }
    }

    /// Tries to attach next time as another program's endpoint, with a token that is not of that endpoint.
    fn steal(&mut self) {
        let number = self.random.below(20) as u32;
        if let Some(back) = &mut self.back {
            back.endpoint = number;
        }
        self.drop_connection();
    }

    /// Opens connections and sends nothing over them.
    fn connect(&mut self) {
        for _ in 0..5 {
            self.litter.extend(packet::connect_to(&self.socket));
        }
    }
}

fn start_attacker(daemon: &Daemon, seed: u64) -> Child {
    daemon
        .program(attacker)
        .env("TEST_ATTACK_SEED", seed.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
fn an_ordinary_user_who_does_what_the_kernel_allows_disturbs_nobody_else() {
    let mut daemon = Daemon::prepare("", CONFIG);
    // Let any user connect.
    let all = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(daemon.dir.path(), all).unwrap();
    daemon.start();
    let options = |mode| AttachOptions { socket: daemon.socket(), mode, ..AttachOptions::default() };
    // Two programs in another segment exchange messages, and sleep between them.
    let server = Endpoint::attach_with("other", &options(WaitMode::Interrupt)).unwrap();
    let listener = server.listen::<MessageChannel>("echo").unwrap();
    let echo = std::thread::spawn(move || {
        let mut channel = listener.accept().unwrap();
        while let Ok(message) = channel.recv() {
            if channel.send(&message).is_err() {
                break;
            }
        }
        drop(server);
    });
    let client = Endpoint::attach_with("other", &options(WaitMode::Interrupt)).unwrap();
    let mut channel: MessageChannel = client.connect("echo").unwrap();
    channel.set_timeout(Some(WATCHDOG));
    // An honest program in the attackers' segment. It sends to any listener there.
    let victim = Endpoint::attach_with("open", &options(WaitMode::Interrupt)).unwrap();

    let base = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64;
    let base = std::env::var("TEST_ATTACK_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(base);
    println!("seed {base}");
    let mut seeds = 0..;
    let mut next = |daemon: &Daemon| start_attacker(daemon, base.wrapping_add(seeds.next().unwrap() * 7919));
    let mut attackers: Vec<Child> = (0..ATTACKERS).map(|_| next(&daemon)).collect();
    let (begin, mut rounds, mut killed) = (Instant::now(), 0u64, 0u64);
    let mut waits: [Vec<Duration>; 3] = Default::default();
    // On a busy machine it may take longer until there were enough attacks to prove anything.
    while begin.elapsed() < ATTACK || daemon.log().matches("name=evil").count() <= 5 {
        rounds += 1;
        let mut timed = |n: usize, run: &mut dyn FnMut()| {
            let before = Instant::now();
            run();
            waits[n].push(before.elapsed());
        };
        timed(0, &mut || {
            channel.send(&rounds.to_le_bytes()).unwrap();
            assert_eq!(channel.recv().unwrap(), rounds.to_le_bytes());
        });
        timed(1, &mut || {
            daemon.attach("other", "honest");
        });
        timed(2, &mut || {
            let name = format!("n{}", rounds % 20);
            if let Ok(mut to) = victim.connect::<MessageChannel>(&name) {
                to.set_timeout(Some(Duration::from_millis(50)));
                for _ in 0..4 {
                    let _ = to.send(b"hello");
                }
            }
        });
        for attacker in &mut attackers {
            let ended = attacker.try_wait().unwrap().is_some();
            if ended || rounds.is_multiple_of(50) {
                // Some attackers end by themselves, others are killed in the middle of an action.
                let _ = rustix::process::kill_process(Pid::from_child(attacker), Signal::KILL);
                attacker.wait().unwrap();
                *attacker = next(&daemon);
                killed += 1;
            }
        }
    }
    for mut attacker in attackers {
        attacker.kill().unwrap();
        attacker.wait().unwrap();
    }
    println!("{rounds} rounds, {killed} attackers");
    assert!(daemon.is_running());
    for (waits, what) in
        waits.iter_mut().zip(["a round trip in another segment", "an attach", "sends to an attacker"])
    {
        waits.sort_unstable();
        let (usual, longest) = (waits[waits.len() / 2], waits[waits.len() - 1]);
        println!("{what}: usually {usual:?}, at most {longest:?}");
        assert!(usual < BOUND && longest < WATCHDOG, "{what} took {usual:?}, and {longest:?} once");
    }
    drop((channel, client));
    echo.join().unwrap();
    // Nothing of the attackers may be left.
    wait_for("the end of their endpoints", || {
        let status = daemon.inspect();
        status["endpoints"].as_array()?.iter().all(|e| e["name"] != "evil").then_some(())
    });
}
