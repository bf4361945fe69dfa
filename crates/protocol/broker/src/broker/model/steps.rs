//! What the daemon's neighbours do: a step is a request, a lie, or an event.

use super::server::{Disk, Known, SEGMENTS, Server, VMS, name};
use super::{Do, STEP, Step};
use crate::broker::ClientId;
use crate::process::Process;
use crate::record::Record;
use crate::reply;
use crate::text::Text;
use ginnel_layout::relay::{self, RelayKind};
use ginnel_layout::wire::{self, Kind, Rights, SocketRole};
use ginnel_layout::{HOST_MEMBER, Name};
use zerocopy::{FromZeros, Immutable, IntoBytes};

/// The names of objects. Some belong to a member, and one to sockets.
const NAMES: [&str; 6] = ["a", "b", "c@vm-a", "c@host", "tcp.0", "d"];
/// The users of the host.
const USERS: [u32; 4] = [0, 1000, 1001, 1002];

/// Returns the item at an index, or one near it. `None` if there are no items.
fn pick<T: Copy>(all: &[T], index: u8) -> Option<T> {
    (!all.is_empty()).then(|| all[usize::from(index) % all.len()])
}

/// Returns a number of something that exists, or any number.
fn number(all: impl IntoIterator<Item = u64>, step: &Step) -> u64 {
    match step.a {
        255 => step.n.into(),
        a => pick(&all.into_iter().collect::<Vec<_>>(), a).unwrap_or(step.n.into()),
    }
}

fn object(index: u8) -> Name {
    name(NAMES[usize::from(index) % NAMES.len()])
}

/// Returns a size: most are small, and some are out of range.
fn size(n: u32) -> u64 {
    match n % 16 {
        0 => 0,
        1 => u64::MAX - u64::from(n),
        2 => u64::from(n) << 20,
        3 => u64::from(n >> 4) % 100_000,
        _ => u64::from(n >> 4) % 12_000,
    }
}

/// Takes the bytes of the following steps, for a packet that is anything.
fn bytes<'s>(steps: &mut impl Iterator<Item = &'s [u8; STEP]>, len: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = steps.take(len.div_ceil(STEP)).flatten().copied().collect();
    bytes.truncate(len);
    bytes
}

impl Server {
    /// Performs a step, and then what the daemon does in the background.
    pub fn step<'s>(&mut self, step: Step, rest: &mut impl Iterator<Item = &'s [u8; STEP]>) {
        match step.what {
            Do::Connect => self.connect_program(&step),
            Do::Open => self.open_program(&step),
            Do::Raw => {
                let Some(client) = self.client(&step) else { return };
                let body = bytes(rest, usize::from(step.b) % 160);
                let packet = match step.a & 0x80 {
                    0 => reply::packet(Kind(u16::from(step.a % 32)), step.n, &body),
                    _ => body,
                };
                self.hear(client, None, &packet);
            }
            Do::Change => self.change = Some((step.a, step.b, step.n)),
            Do::HangUp => {
                let Some(client) = self.client(&step) else { return };
                match self.programs.place(client) {
                    Some((vm, number)) => self.hear_relayed(vm, RelayKind::CLOSE, number, &[]),
                    None => {
                        self.hang_up(client);
                        self.run_effects(None);
                    }
                }
            }
            Do::End => {
                if let Some(process) = pick(&self.processes, step.a) {
                    self.process_ends(process);
                }
            }
            Do::Say => {
                let body = bytes(rest, usize::from(step.b) % 160);
                self.hear_relayed(vm(&step), RelayKind(u32::from(step.a % 12)), step.n % 8, &body);
            }
            Do::Owner => self.owner(&step),
            Do::Session => self.session(vm(&step), step.a % 2, step.b & 1 == 0),
            Do::Vm => match step.a & 1 {
                0 => self.vm_starts(vm(&step), step.b & 1 == 0),
                _ => self.vm_ends(vm(&step)),
            },
            Do::Time => {
                if let Some(key) = pick(&self.timers.keys().copied().collect::<Vec<_>>(), step.a) {
                    self.time_is_over(key);
                }
            }
            Do::Watch => self.can_watch = step.a & 1 == 0,
            Do::Disk => self.set_disk([Disk::Good, Disk::Full, Disk::Fails][usize::from(step.a % 3)]),
            Do::Restart => self.restart(step.a % 4 == 3),
            Do::Truncate => self.truncate(&step),
            Do::Declare => self.declare_again(&step),
            Do::Work => {
                self.broker.relay_rings();
                self.run_effects(None);
                self.work();
            }
            _ => self.request(&step),
        }
        self.work_at_once();
    }

    /// Returns one of the connections.
    fn client(&self, step: &Step) -> Option<ClientId> {
        pick(&self.broker.clients.keys().copied().collect::<Vec<_>>(), step.who)
    }

    /// A program of the host connects: a new one, or one that exists, or one that cannot be told from others.
    fn connect_program(&mut self, step: &Step) {
        let old = pick(&self.processes, step.b / 4).filter(|_| step.b.is_multiple_of(4));
        let process = match step.b {
            255 => Process { pid: 0, started: 0 },
            _ => old.unwrap_or_else(|| self.new_process()),
        };
        let uid = USERS[usize::from(step.a) % USERS.len()];
        let groups = if step.n & 1 == 0 { vec![uid] } else { vec![77] };
        self.accept(process, uid, groups);
        if step.n % 8 != 7
            && let Some(client) = self.broker.clients.keys().next_back().copied()
        {
            let hello = wire::Hello { version: wire::VERSION, reserved: 0, features: u64::MAX };
            self.ask(client, Kind::HELLO, &hello);
        }
    }

    /// A VM's daemon opens a connection, perhaps under a number that is open.
    fn open_program(&mut self, step: &Step) {
        let pid = u32::from(step.b % 8);
        let open =
            relay::Open { pid, uid: step.n % 4, gid: 0, reserved: 0, started: u64::from(step.b / 8 % 2) };
        let len = if step.b == 255 { step.n as usize % 24 } else { size_of::<relay::Open>() };
        self.hear_relayed(vm(step), RelayKind::OPEN, u32::from(step.a % 8), &open.as_bytes()[..len]);
    }

    fn ask(&mut self, client: ClientId, kind: Kind, body: &(impl IntoBytes + Immutable + ?Sized)) {
        self.ask_as(client, None, kind, body);
    }

    /// Sends a request, unless it is to be changed first.
    fn ask_as(
        &mut self,
        client: ClientId,
        sender: Option<Process>,
        kind: Kind,
        body: &(impl IntoBytes + Immutable + ?Sized),
    ) {
        let mut packet = reply::packet(kind, self.new_request(), body.as_bytes());
        match self.change.take() {
            Some((255, _, n)) => packet.truncate(n as usize % (packet.len() + 1)),
            Some((254, b, n)) => packet.resize(packet.len() + n as usize % 64, b),
            Some((a, b, _)) => {
                let at = usize::from(a) % packet.len();
                packet[at] ^= b;
            }
            None => {}
        }
        self.hear(client, sender, &packet);
    }

    /// A program sends a request that is well formed. Most of its numbers are those of something that exists.
    fn request(&mut self, step: &Step) {
        let Some(client) = self.client(step) else { return };
        let &Step { what, a, b, n, .. } = step;
        let books = self.broker.books();
        let endpoint = self.broker.clients[&client].endpoint;
        // Requests concern what the program has itself, or anything.
        let own = endpoint.and_then(|number| books.endpoints.get(&number)).filter(|_| n & 1 == 0);
        let channels = || match own {
            Some(own) => own.channels.iter().copied().collect(),
            None => books.channels.keys().copied().collect::<Vec<_>>(),
        };
        let handles = || match own {
            Some(own) => own.handles.values().copied().collect(),
            None => books.handles.keys().copied().collect::<Vec<_>>(),
        };
        let nonce = u64::from(n >> 8 & 7);
        match what {
            Do::Hello => {
                let hello = wire::Hello { version: u32::from(a % 3), reserved: 0, features: n.into() };
                self.ask(client, Kind::HELLO, &hello);
            }
            Do::Attach => {
                let segment = match a % 8 {
                    0..=3 => SEGMENTS[0].0,
                    4 => SEGMENTS[1].0,
                    5 | 6 => SEGMENTS[2].0,
                    _ => "nothing",
                };
                let segment = name(segment);
                let body = wire::Attach { segment, name: object(b), ..wire::Attach::new_zeroed() };
                self.ask(client, Kind::ATTACH, &body);
            }
            Do::Return => self.come_back(client, step),
            Do::Listen => {
                let (kind, backlog, capacity) = (u32::from(b % 4), n % 4, size(n.rotate_right(11)));
                let body = wire::Listen { name: object(a), kind, backlog, capacity, input_capacity: 0 };
                self.ask(client, Kind::LISTEN, &body);
            }
            Do::Unlisten => {
                let listener = match own {
                    Some(own) => number(own.listeners.iter().map(|&n| n.into()), step),
                    None => number(books.listeners.keys().map(|&n| n.into()), step),
                };
                let body = wire::Listening { listener: listener as u32, reserved: 0 };
                self.ask(client, Kind::UNLISTEN, &body);
            }
            Do::Channel => {
                let capacity = size(n.rotate_right(11));
                let input_capacity = if n & 2 == 0 { 0 } else { 8192 };
                // Most go where somebody listens.
                let all: Vec<(Name, u32)> = books.listeners.values().map(|l| (l.name, l.kind.0)).collect();
                let there = pick(&all, a).filter(|_| b % 8 != 7);
                let (name, kind) = there.unwrap_or((object(a), u32::from(b / 8 % 4)));
                let body = wire::Connect { name, kind, reserved: 0, capacity, input_capacity, nonce };
                self.ask(client, Kind::CONNECT, &body);
            }
            Do::Accepted | Do::Close => {
                let channel = number(channels(), step);
                let kind = if what == Do::Close { Kind::CLOSE } else { Kind::ACCEPTED };
                self.ask(client, kind, &wire::ChannelRef { channel });
            }
            Do::Resume => {
                let channel = number(channels(), step);
                let body = wire::ChannelSide { channel, initiator: u32::from(b % 3), reserved: 0 };
                self.ask(client, Kind::RESUME, &body);
            }
            Do::SyncOpen => {
                let (kind, flags) = (u32::from(b % 8), n & 7);
                let (limit, initial) = if kind == 4 { (3, n >> 4 & 3) } else { (n >> 12 & 1, 0) };
                let body = wire::SyncOpen { name: object(a), kind, limit, initial, flags, nonce };
                self.ask(client, Kind::SYNC_OPEN, &body);
            }
            Do::SyncClose => {
                let slots = books.syncs.values().flat_map(|s| s.users.iter().map(|user| (s.number, *user)));
                let slots = slots.filter(|(_, user)| own.is_none_or(|own| own.number == user.endpoint));
                let Some((object, user)) = pick(&slots.collect::<Vec<_>>(), a) else { return };
                let epoch = u32::from(user.epoch) + u32::from(b == 255);
                self.ask(client, Kind::SYNC_CLOSE, &wire::SyncRef { object, slot: user.slot, epoch });
            }
            Do::SyncUnlink => self.ask(client, Kind::SYNC_UNLINK, &wire::ByName { name: object(a) }),
            Do::BlockCreate => {
                let body = wire::BlockCreate {
                    name: if a & 1 == 0 { object(a / 2) } else { Name::NONE },
                    size: size(n.rotate_right(11)),
                    align: if b == 255 { n.into() } else { 0 },
                    rights: Rights([2, 2, 3, 0][usize::from(b & 3)]),
                    others: Rights(u32::from(b >> 2 & 3)),
                    flags: u32::from(b >> 4 & 1),
                    reserved: 0,
                    nonce,
                };
                self.ask(client, Kind::BLOCK_CREATE, &body);
            }
            Do::BlockOpen => {
                let rights = Rights(u32::from(b % 5));
                let all: Vec<Name> = books.block_names.keys().map(|(_, name)| *name).collect();
                let name = pick(&all, a).filter(|_| b < 240).unwrap_or(object(a));
                let body = wire::BlockOpen { name, rights, reserved: 0, nonce };
                self.ask(client, Kind::BLOCK_OPEN, &body);
            }
            Do::BlockResize => {
                let body =
                    wire::BlockResize { handle: number(handles(), step), size: size(n.rotate_right(11)) };
                self.ask(client, Kind::BLOCK_RESIZE, &body);
            }
            Do::BlockLink => {
                let block = number(books.blocks.keys().copied(), step);
                self.ask(client, Kind::BLOCK_LINK, &wire::BlockLink { block, name: object(b) });
            }
            Do::BlockUnlink => self.ask(client, Kind::BLOCK_UNLINK, &wire::ByName { name: object(a) }),
            Do::BlockClose | Do::BlockAck => {
                let handle = number(handles(), step);
                let block = books.handles.get(&handle).map(|block| &books.blocks[block]);
                let left = block.and_then(|block| block.handles.get(handle)?.left);
                let rights = Rights(if b == 255 { n % 4 } else { left.unwrap_or(0) });
                let kind = if what == Do::BlockClose { Kind::BLOCK_CLOSE } else { Kind::BLOCK_ACK };
                self.ask(client, kind, &wire::BlockRights { handle, rights, reserved: 0 });
            }
            Do::BlockGrant => {
                let all: Vec<(u32, u32)> = books.endpoints.values().map(|e| (e.member, e.number)).collect();
                let Some((member, endpoint)) = pick(&all, b) else { return };
                let block = match own {
                    Some(own) => number(own.blocks.iter().copied(), step),
                    None => number(books.blocks.keys().copied(), step),
                };
                let body = wire::BlockGrant {
                    block,
                    member,
                    endpoint: if n & 2 == 0 { endpoint } else { 0 },
                    rights: Rights([0, 0, 1, 2][n as usize >> 4 & 3]),
                    reserved: 0,
                };
                self.ask(client, Kind::BLOCK_GRANT, &body);
            }
            Do::Board => self.ask(client, Kind::BOARD_OPEN, &wire::BoardOpen { nonce: u64::from(a % 12) }),
            Do::Detach | Do::Join => {
                let kind = if what == Do::Detach { Kind::DETACH } else { Kind::JOIN };
                // A child that has inherited the connection may send it.
                let child = (b & 1 == 1 && self.programs.place(client).is_none()).then(|| {
                    pick(&self.processes, b / 4).filter(|_| b & 2 == 0).unwrap_or_else(|| self.new_process())
                });
                self.ask_as(client, child, kind, &[0u8; 0]);
            }
            Do::Hold => {
                let millis = [0, 100, 5000, 5001][usize::from(b % 4)];
                self.ask(client, Kind::HOLD, &wire::Hold { token: [a % 4; 16], millis, reserved: 0 });
            }
            Do::Bell => {
                let bells = books.segments.values().flat_map(|segment| &segment.vectors);
                let bells = bells.flat_map(|(member, vectors)| vectors.iter().map(|v| *member << 16 | *v));
                let bell = pick(&bells.collect::<Vec<_>>(), a).filter(|_| b < 200).unwrap_or(n);
                self.ask(client, Kind::BELL, &wire::BellOf { bell, reserved: 0 });
            }
            Do::Socket => self.socket(client, step),
            Do::Inspect => match a & 1 {
                0 => self.ask(client, Kind::INSPECT, &wire::Inspect { section: n, ..wire::Inspect::FIRST }),
                _ => self.ask(client, Kind::ADMIN, &[b, b'}']),
            },
            _ => unreachable!("no request"),
        }
    }

    /// A program attaches to an endpoint that was there once, with its token or with that of a hold. It may have the token of an
    /// endpoint of another member or user.
    fn come_back(&mut self, client: ClientId, step: &Step) {
        let Some(Known { segment, attached }) = pick(&self.known, step.a) else { return };
        let wire::Attached { endpoint, epoch, token, .. } = attached;
        let token = if step.b & 1 == 0 { token } else { [step.b / 2 % 4; 16] };
        let body = wire::Attach { segment, name: object(0), endpoint, epoch, token };
        self.ask(client, Kind::ATTACH, &body);
    }

    /// A program reports a socket, or withdraws its report.
    fn socket(&mut self, client: ClientId, step: &Step) {
        let key = u64::from(step.a % 4);
        if step.b & 0x80 != 0 {
            return self.ask(client, Kind::SOCK_WITHDRAW, &wire::SocketKey { key });
        }
        // There are two connections between two addresses; the ends of each agree about most.
        let role = SocketRole(u32::from(step.b % 4));
        let (one, other) = (1, 2 + u16::from(step.b >> 2 & 1));
        let (local, remote) = if role == SocketRole::CONNECTOR { (one, other) } else { (other, one) };
        let address = |port: u16| [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, port as u8];
        let second = 1_000_000_000;
        let report =
            wire::SocketReport { key, before: second, after: second, role, ..FromZeros::new_zeroed() };
        let facts = wire::SocketFacts {
            report,
            local: address(local),
            remote: address(remote),
            local_port: local,
            remote_port: remote,
            flags: if step.b & 0x40 == 0 { 3 } else { step.n % 8 },
            cookie: u64::from(local) + u64::from(step.b >> 3 & 3) * 16,
            namespace: 1 + u64::from(step.b >> 5 & 1),
            clock: step.n % 2,
            syn: step.n % 2,
            clock_before: second,
            clock_after: second,
        };
        self.ask(client, Kind::SOCK_REPORT, &facts);
    }

    /// A VM's daemon says that a process owns an endpoint, or has ended. The endpoint may be another VM's.
    fn owner(&mut self, step: &Step) {
        let Some(Known { attached, .. }) = pick(&self.known, step.a) else { return };
        let wire::Attached { endpoint, epoch, .. } = attached;
        let (pid, started) = (u32::from(step.b % 8), u64::from(step.b / 8 % 2));
        let body = relay::Endpoint { endpoint, epoch, pid, reserved: 0, started };
        let kind = if step.n & 1 == 0 { RelayKind::GONE } else { RelayKind::JOIN };
        self.hear_relayed(vm(step), kind, 0, body.as_bytes());
    }

    /// The file of a segment is truncated or whole again, or it was truncated for a moment.
    fn truncate(&mut self, step: &Step) {
        let segment = name(SEGMENTS[usize::from(step.who) % SEGMENTS.len()].0);
        if !self.broker.books().segments.contains_key(&segment) {
            return;
        }
        match step.a % 3 {
            0 => drop(self.facts.broken.insert(segment)),
            1 => {
                self.facts.broken.remove(&segment);
                self.note(Record::SegmentCut { name: Text(segment), cut: false });
            }
            _ => {
                self.note(Record::SegmentCut { name: Text(segment), cut: true });
                self.broker.segment_cut(&segment);
                self.run_effects(None);
            }
        }
    }

    /// A segment is removed and declared again, or a member has no share in it any more, or may only read.
    fn declare_again(&mut self, step: &Step) {
        let (text, members, readers, pages, page) = SEGMENTS[usize::from(step.who) % SEGMENTS.len()];
        let segment = name(text);
        if step.a & 1 == 0 {
            self.remove_segment(&segment);
            return self.declare(text, members, readers, pages, page);
        }
        let vm = vm(step);
        if !members.contains(&vm) {
            return;
        }
        if self.broker.books().segments.contains_key(&segment) {
            let process = Process { pid: u32::from(step.b), started: 1 };
            let processes = (!step.b.is_multiple_of(4)).then(|| vec![(Text(segment), process)]);
            self.note(Record::SegmentFormer { name: Text(segment), processes });
        }
        let but: Vec<u32> = members.iter().copied().filter(|member| *member != vm).collect();
        // The endpoints of those who lose a right end.
        let loses = |member| member == vm || (step.a & 2 == 0 && member == HOST_MEMBER);
        let strangers = self.broker.books().endpoints.values();
        let strangers = strangers.filter(|e| e.segment == segment && loses(e.member));
        for (endpoint, epoch) in strangers.map(|e| (e.number, e.epoch)).collect::<Vec<_>>() {
            self.broker.endpoint_ends(endpoint, epoch);
        }
        self.run_effects(None);
        match step.a & 2 {
            0 => self.declare(text, &but, &[HOST_MEMBER], pages, page),
            _ => self.declare(text, members, &[vm], pages, page),
        }
    }
}

fn vm(step: &Step) -> u32 {
    VMS[usize::from(step.who) % VMS.len()]
}
