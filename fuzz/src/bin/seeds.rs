//! Writes the seeds of the broker, ring, board, carrier, verbs, wire, farm, virtqueue, nvme, vhost_user and vfio_user targets into the
//! folder that is given as an argument. `scripts/fuzz seeds` runs it.

use ginnel_fuzz::{ModelInput, WordsInput};
use ginnel_layout::{Name, relay, wire};
use ginnel_shmem::{Mapping, SharedMemory};
use ginnel_virtqueue::{Chain, DeviceQueue, Segment};
use kit::models::Op;
use kit::models::virtqueue::rig::Rig;
use std::path::Path;
use std::{fs, io};
use zerocopy::{FromZeros, Immutable, IntoBytes};

fn main() -> io::Result<()> {
    let Some(folder) = std::env::args_os().nth(1) else {
        return Err(io::Error::other("usage: seeds FOLDER"));
    };
    let folder = Path::new(&folder);
    for (target, name, bytes) in rings()
        .chain(brokers())
        .chain(boards())
        .chain(carriers())
        .chain(verbs())
        .chain(messages())
        .chain(packets())
        .chain(farms())
        .chain(virtqueues())
        .chain(guests())
        .chain(nvme())
        .chain(sessions())
        .chain(clients())
    {
        let folder = folder.join(target);
        fs::create_dir_all(&folder)?;
        fs::write(folder.join(name), bytes)?;
    }
    Ok(())
}

type Seed = (&'static str, String, Vec<u8>);

/// Returns the messages of an RDMA connection.
fn messages() -> impl Iterator<Item = Seed> {
    use ginnel_verbs::cm::message::{Message, Parameters, Reject, Reply, Request};
    let (from, to) = (([10, 0, 0, 1], 7).into(), ([0xfd00, 0, 0, 0, 0, 0, 0, 1], 7471).into());
    let parameters =
        Parameters { queue_pair: 0x1001, responder_resources: 1, retry_count: 7, ..Parameters::default() };
    let space = ginnel_verbs::cm::names::PortSpace::Tcp;
    [
        ("req", Message::Request(Request { space, from, to, parameters, private: b"hello".to_vec() })),
        ("rep", Message::Reply(Reply { parameters, private: vec![] })),
        ("rej", Message::Reject(Reject { reason: 28, private: b"no".to_vec() })),
        ("rtu", Message::Ready),
        ("dreq", Message::Disconnect),
        ("drep", Message::Disconnected),
    ]
    .into_iter()
    .map(|(name, message)| ("verbs_message", name.to_owned(), message.encode()))
}

/// Returns lists of operations that reach what random ones seldom reach: the wrap around the end, padding, sleep, the end.
fn rings() -> impl Iterator<Item = Seed> {
    let op = |code: u8, a: u16, b: u16| Op { code, a, b };
    // Sizes: 1 is the greatest, 4 * n is n.
    let wrap: Vec<Op> =
        (0..12).flat_map(|i| [op(0, 1, 0), op(8, 0, 0), op(2, 4 * i, 1), op(6, 0, 0)]).collect();
    let padding: Vec<Op> =
        (0..20).flat_map(|i| [op(0, 1, 0), op(3, 4 * 70, 1 + i), op(10, 1, 1), op(9, 0, 0)]).collect();
    let batch: Vec<Op> =
        (0..8).map(|i| op(2, 4 * 8 * i, 1)).chain([op(6, 0, 0)]).chain((0..8).map(|_| op(8, 0, 0))).collect();
    let sleep: Vec<Op> = (0..6)
        .flat_map(|_| {
            [op(12, 0, 0), op(0, 1, 0), op(13, 0, 0), op(14, 0, 0), op(0, 1, 0), op(8, 0, 0), op(15, 2, 0)]
        })
        .collect();
    let end =
        vec![op(0, 40, 0), op(2, 40, 1), op(15, 0, 0), op(8, 0, 0), op(8, 0, 0), op(8, 0, 0), op(15, 1, 0)];
    let stream: Vec<Op> = (0..12)
        .flat_map(|i| {
            [
                op(0, 1, 0),
                op(10, 0, 0),
                op(4, 4 * i + 3, 0),
                op(8, 0, 0),
                op(3, 1, 1),
                op(7, 0, 1),
                op(11, 2, 0),
            ]
        })
        .collect();
    // Lies between honest operations: heads, tails, states, tokens, and headers that fit their place.
    let lies: Vec<Op> = (0..10u16)
        .flat_map(|i| {
            [op(0, 200, 7), op(6, 1, 0), op(0x80 | i as u8, 16 * i, i), op(4, 1, i), op(5, 3, i), op(8, 0, 0)]
        })
        .collect();
    let lists = [
        ("wrap", 0u8, wrap),
        ("padding", 0, padding),
        ("batch", 0, batch),
        ("sleep", 0, sleep),
        ("end", 1, end),
        ("stream", 0x80, stream),
        ("lies", 0, lies.clone()),
        ("stream_lies", 0x80, lies),
    ];
    lists.into_iter().flat_map(|(name, choice, ops)| {
        ["ring_model", "ring_scribble", "ring_scribble_beside"]
            .map(|target| (target, name.to_owned(), ModelInput::bytes(choice, &ops)))
    })
}

/// The broker: what well-behaved programs do with objects of each kind, on the host and in VMs, and what hostile ones do.
fn brokers() -> impl Iterator<Item = Seed> {
    use ginnel_broker::broker::model::{Do, Step};
    let step = |what: Do, who: u8, a: u8, b: u8, n: u32| Step { what, who, a, b, n };
    // Two programs of the host and one of the first VM, attached to the same segment. Index 0 to 2 is the order in which they came.
    let programs = [
        step(Do::Session, 0, 1, 0, 0),
        step(Do::Connect, 0, 0, 1, 0),
        step(Do::Connect, 0, 0, 1, 0),
        step(Do::Open, 0, 0, 1, 0),
        step(Do::Attach, 0, 0, 0, 0),
        step(Do::Attach, 1, 0, 1, 0),
        step(Do::Attach, 2, 0, 2, 0),
    ];
    let channels = [
        step(Do::Listen, 0, 0, 1, 16),
        step(Do::Channel, 1, 0, 1, 0x100),
        step(Do::Channel, 2, 0, 1, 0x200),
        step(Do::Board, 0, 1, 0, 0),
        step(Do::Accepted, 0, 0, 0, 0),
        step(Do::Resume, 1, 0, 1, 0),
        step(Do::Close, 1, 0, 0, 0),
        step(Do::Close, 0, 0, 0, 0),
        step(Do::Channel, 1, 0, 1, 0x300),
        step(Do::Unlisten, 0, 0, 0, 0),
    ];
    let locks = [
        step(Do::SyncOpen, 0, 1, 1, 0x101),
        step(Do::SyncOpen, 1, 1, 1, 0x100),
        step(Do::SyncOpen, 2, 1, 1, 0x100),
        step(Do::SyncOpen, 2, 5, 4, 0x205),
        step(Do::SyncClose, 1, 0, 0, 0),
        step(Do::SyncUnlink, 0, 1, 0, 0),
        step(Do::Bell, 1, 1, 1, 0),
    ];
    let size = 5 << 11;
    let blocks = [
        step(Do::BlockCreate, 0, 0, 0b11010, size | 0x100),
        step(Do::BlockCreate, 0, 1, 0b01010, size | 0x200),
        step(Do::BlockOpen, 1, 0, 1, 0x100),
        step(Do::BlockOpen, 2, 0, 2, 0x100),
        step(Do::BlockGrant, 0, 0, 1, 2),
        step(Do::BlockAck, 1, 0, 0, 0),
        step(Do::BlockResize, 0, 0, 0, size | 0x300),
        step(Do::BlockLink, 0, 1, 1, 0),
        step(Do::BlockUnlink, 0, 0, 0, 0),
        step(Do::BlockClose, 0, 0, 0, 0),
    ];
    let owners = [
        step(Do::Join, 0, 0, 1, 0),
        step(Do::Hold, 0, 1, 2, 0),
        step(Do::Detach, 0, 0, 0, 0),
        step(Do::End, 0, 0, 0, 0),
        step(Do::Connect, 0, 0, 1, 0),
        step(Do::Return, 2, 0, 3, 0),
        step(Do::Time, 0, 0, 0, 0),
        step(Do::Owner, 0, 2, 3, 1),
        step(Do::HangUp, 0, 0, 0, 0),
        step(Do::End, 0, 0, 0, 0),
    ];
    let ends = [
        step(Do::Vm, 0, 0, 0, 0),
        step(Do::Restart, 0, 0, 0, 0),
        step(Do::Vm, 0, 1, 0, 0),
        step(Do::Truncate, 0, 2, 0, 0),
        step(Do::Declare, 0, 0, 0, 0),
        step(Do::Restart, 0, 3, 0, 0),
    ];
    let lies = [
        // Another VM's daemon says that the program's process has ended, and a VM attaches to a segment in which it has no share.
        step(Do::Owner, 1, 2, 1, 0),
        step(Do::Open, 0, 1, 2, 0),
        step(Do::Attach, 3, 5, 0, 0),
        step(Do::Change, 0, 255, 0, 5),
        step(Do::Listen, 0, 0, 1, 16),
        step(Do::Change, 0, 8, 0xff, 0),
        step(Do::Hold, 1, 1, 2, 0),
        step(Do::Open, 0, 0, 1, 0),
        step(Do::Open, 0, 3, 255, 7),
        // These three take the bytes of the next steps.
        step(Do::Say, 0, 4, 4, 9),
        step(Do::Work, 0, 0, 0, 0),
        step(Do::Raw, 0, 14, 16, 1),
        step(Do::Work, 0, 0, 0, 0),
        step(Do::Work, 0, 0, 0, 0),
        step(Do::Raw, 0, 1, 2, 3),
        step(Do::Work, 0, 0, 0, 0),
        step(Do::Socket, 2, 1, 1, 7),
        step(Do::Inspect, 0, 0, 0, 0),
        step(Do::Return, 2, 0, 0, 0),
    ];
    let limits = [
        step(Do::BlockCreate, 0, 1, 0, size | 0x100),
        step(Do::BlockCreate, 0, 1, 0, size | 0x200),
        step(Do::BlockCreate, 0, 1, 0, size | 0x300),
        step(Do::BlockCreate, 0, 1, 0, size | 0x400),
        step(Do::Listen, 1, 0, 1, 16),
        step(Do::Channel, 0, 0, 1, 0x100),
        step(Do::Channel, 0, 0, 1, 0x200),
        step(Do::Channel, 0, 0, 1, 0x300),
    ];
    let disk = [
        step(Do::Disk, 0, 2, 0, 0),
        step(Do::Listen, 0, 0, 1, 16),
        step(Do::Channel, 1, 0, 1, 0x100),
        step(Do::Disk, 0, 0, 0, 0),
        step(Do::Disk, 0, 1, 0, 0),
        step(Do::Channel, 1, 0, 1, 0x200),
        step(Do::Restart, 0, 0, 0, 0),
    ];
    let everything = [&channels[..], &locks, &blocks, &owners, &lies, &limits, &disk].concat();
    let lists = [
        ("channels", channels.to_vec()),
        ("locks", locks.to_vec()),
        ("blocks", blocks.to_vec()),
        ("owners", owners.to_vec()),
        ("lies", lies.to_vec()),
        ("limits", limits.to_vec()),
        ("disk", disk.to_vec()),
        ("all", everything),
    ];
    lists.into_iter().map(move |(name, steps)| {
        // Everything is given back at once in one half of the seeds, and bit by bit in the other.
        let first = (name.len() % 2) as u8;
        let steps = programs.iter().chain(&steps).chain(&ends).flat_map(|step| step.bytes());
        ("broker", name.to_owned(), std::iter::once(first).chain(steps).collect())
    })
}

/// Boards: a run without scribbles, in which everybody sleeps in between; and each kind of scribble between a rest and a
/// message.
fn boards() -> impl Iterator<Item = Seed> {
    let op = |code: u8, a: u16, b: u16| Op { code, a, b };
    let well: Vec<Op> =
        (0..24).flat_map(|n| [op(2, n, 0), op(5, 0, 0), op(0, n, 0), op(5, 0, 1), op(4, 0, 0)]).collect();
    let lies: Vec<Op> = (0..48)
        .flat_map(|n| {
            let scribble = op(0x80 | n as u8 % 8, n, n.wrapping_mul(0x9e37));
            [op(2, n, 0), op(5, 0, 0), scribble, op(0, n, 0), op(4, 0, 0), op(3, n, 0)]
        })
        .collect();
    [("well", well), ("lies", lies)]
        .into_iter()
        .map(|(name, ops)| ("board_scribble", name.to_owned(), ModelInput::bytes(0, &ops)))
}

/// Verbs: all operations on all kinds of queue pairs, polled and with events; and each kind of scribble between a receive and
/// its message.
fn verbs() -> impl Iterator<Item = Seed> {
    let op = |what: u8, side: u8, a: u16, b: u16| Op { code: what << 1 | side, a, b };
    let exchange = move |n: u16, lie: Option<Op>| {
        let (pair, operation) = (n % 4, (n / 4 % 5) as u8);
        // Atomics need eight bytes; sends and writes sometimes carry an immediate value or inline data.
        let (length, flags) = if operation >= 3 { (2, 0) } else { (n % 8, n % 8 << 8) };
        let receive = op(5, 1, pair | 1 << 2 | 6 << 4, 64 * n);
        let send = op(operation, 0, pair | 1 << 2 | length << 4 | flags, 16 * n);
        [op(13, 1, n, 0), receive].into_iter().chain(lie).chain([
            send,
            op(12, 1, 0, 0),
            op(8, 0, 0, 0),
            op(8, 1, 0, 0),
        ])
    };
    let well: Vec<Op> = (0..60)
        .flat_map(|n| {
            let again = [op(14, (n % 2) as u8, n % 4, n / 4), op(14, 1 - (n % 2) as u8, n % 4, 0)];
            let register = op(15, 1, 0, 0);
            exchange(n, None).chain(again.into_iter().filter(move |_| n % 8 == 7)).chain([register])
        })
        .collect();
    let lies: Vec<Op> = (0..120)
        .flat_map(|n| {
            let (kind, side) = ((n % 6) as u8, (n / 6 % 2) as u8);
            let word = n % 6 | n / 3 % 32 << 3 | n % 16 << 8;
            let lie = Op { code: 0x80 | kind << 1 | side, a: word, b: n.wrapping_mul(0x9e37) };
            exchange(n, Some(lie)).chain([op(14, side, n % 4, 0)])
        })
        .collect();
    [("well", well), ("lies", lies)]
        .into_iter()
        .map(|(name, ops)| ("verbs_scribble", name.to_owned(), ModelInput::bytes(0, &ops)))
}

/// Change-overs: a run without scribbles, with bytes and wakes before and after the change; and each kind of scribble at each
/// step.
fn carriers() -> impl Iterator<Item = Seed> {
    let op = |code: u8, a: u16, b: u16| Op { code, a, b };
    let well = [op(0, 400, 0), op(1, 80, 0), op(2, 0, 0), op(0, 404, 0), op(3, 0, 0), op(4, 0, 0)]
        .into_iter()
        .chain((0..20).flat_map(|n| [op(0, 40 * n, 0), op(1, 60, 0), op(4, 0, 0), op(1, 404, 0)]))
        // The stream goes back to the kernel and into the next ring, while bytes are in flight.
        .chain((0..4).flat_map(|n| {
            [op(4, 0, 0), op(5, n, 0), op(0, 80, 0), op(6, 40, 0), op(1, 404, 0), op(1, 404, 0)]
        }))
        .chain([op(1, 404, 0), op(2, 0, 0), op(0, 80, 0), op(3, 0, 0), op(0, 400, 0), op(1, 404, 0)]);
    let lies = (0..64u16).flat_map(|n| {
        let scribble = op(0x80 | n as u8 % 6, n, n);
        [op(0, 80, 0), op(n as u8 % 7, 40, 0), scribble, op(1, 8, 0), op(1, 400, 0)]
    });
    [("well", well.collect::<Vec<_>>()), ("lies", lies.collect())]
        .into_iter()
        .map(|(name, ops)| ("carrier_scribble", name.to_owned(), ModelInput::bytes(0, &ops)))
}

/// Front ends of all kinds: a whole session for each kind and each disturbance.
fn sessions() -> impl Iterator<Item = Seed> {
    use ginnel_fuzz::vhost_user::session;
    const DISTURBANCES: [&str; 5] = ["nothing", "log", "memory_and_size", "truncate", "reset"];
    [("split", false, 0u8), ("packed", true, 0), ("scsi", false, 1)].into_iter().flat_map(
        move |(kind, packed, choice)| {
            DISTURBANCES.iter().enumerate().map(move |(number, name)| {
                let bytes = [vec![choice], session(packed, choice == 1, number as u8)].concat();
                ("vhost_user", format!("{kind}_{name}"), bytes)
            })
        },
    )
}

/// Clients of a vfio-user server: a whole session with each disturbance.
fn clients() -> impl Iterator<Item = Seed> {
    use ginnel_fuzz::vfio_user::{CUT, DEAF, NO_REPLY, WRONG_SIZE, session};
    [("well", 0), ("no_reply", NO_REPLY), ("wrong_size", WRONG_SIZE), ("deaf", DEAF), ("cut", CUT)]
        .into_iter()
        .map(|(name, flags)| ("vfio_user", name.to_owned(), session(flags)))
}

/// Farms: a run without mistakes; answers to pieces that were never given, given twice, or given to another worker; messages of
/// every kind and of unknown kinds.
fn farms() -> impl Iterator<Item = Seed> {
    use ginnel_fuzz::farm::bytes;
    let (give, back, say, raw, scribble, hear) = (0, 41, 45, 80, 86, 100);
    let event = |what, who, kind, small, number| bytes(what, who, kind, small, number);
    let well = (1..=40u64).flat_map(|n| {
        let who = (n % 2) as u8;
        [event(give, who, 0, 0, 0), event(say, who, 3 + (n % 7 == 0) as u8, 32, n), event(hear, who, 0, 0, 0)]
    });
    let lies = (1..=40u64).flat_map(|n| {
        [
            event(give, 0, 0, 0, 0),
            event(say, (n % 2) as u8, 3, 32, n),
            event(say, 0, 3, 1000, n / 2),
            event(hear, (n % 2) as u8, 0, 0, 0),
            event(back, 0, 0, 0, 0),
            event(hear, 0, 0, 0, 0),
        ]
    });
    let kinds = (0..=255u8).flat_map(|kind| {
        [
            event(give, 1, 0, 0, 0),
            event(say, 1, kind, u16::from(kind), 1),
            event(hear, 1, 0, 0, 0),
            event(raw, 1, 0, u16::from(kind), u64::from(kind)),
            event(hear, 1, 0, 0, 0),
        ]
    });
    let scribbles = (0..80u16).flat_map(|at| {
        [
            event(give, 0, 0, 0, 0),
            event(say, 0, 3, 24 + at, 1 + u64::from(at)),
            event(scribble, 0, 0, at, u64::from(at) << 32),
            event(hear, 0, 0, 0, 0),
        ]
    });
    let seeds: [(_, Vec<u8>); 4] = [
        ("well", well.flatten().collect()),
        ("lies", lies.flatten().collect()),
        ("kinds", kinds.flatten().collect()),
        ("scribbles", scribbles.flatten().collect()),
    ];
    seeds.into_iter().map(|(name, bytes)| ("farm", name.to_owned(), bytes))
}

/// One packet of each kind, as a program, a daemon or a guest would send it.
fn packets() -> impl Iterator<Item = Seed> {
    let name = |text| Name::new(text).unwrap_or(Name::NONE);
    let packet = |kind: wire::Kind, body: &[u8]| {
        let header = wire::Header { kind, flags: 0, request: 1 };
        [&[0], header.as_bytes(), body].concat()
    };
    let relayed = |kind, body: &[u8]| {
        let envelope = relay::Envelope { kind, client: 3 };
        [&[1], envelope.as_bytes(), body].concat()
    };
    fn zeros<T: FromZeros + IntoBytes + Immutable>(set: impl FnOnce(&mut T)) -> Vec<u8> {
        let mut value = T::new_zeroed();
        set(&mut value);
        value.as_bytes().to_vec()
    }
    let hello = packet(wire::Kind::HELLO, &zeros(|b: &mut wire::Hello| b.version = wire::VERSION));
    [
        (
            "attach",
            packet(
                wire::Kind::ATTACH,
                &zeros(|b: &mut wire::Attach| (b.segment, b.name) = (name("web"), name("a-1"))),
            ),
        ),
        ("attached", packet(wire::Kind::ATTACHED, &zeros(|b: &mut wire::Attached| b.segment_len = 4 << 20))),
        ("hello_ok", packet(wire::Kind::HELLO_OK, &zeros(|b: &mut wire::HelloOk| b.name = name("vm-a")))),
        ("listen", packet(wire::Kind::LISTEN, &zeros(|b: &mut wire::Listen| b.name = name("cp@vm-a")))),
        (
            "connect",
            packet(
                wire::Kind::CONNECT,
                &zeros(|b: &mut wire::Connect| (b.name, b.capacity) = (name("echo"), 65536)),
            ),
        ),
        ("channel", packet(wire::Kind::CHANNEL, &zeros(|b: &mut wire::Channel| b.peer_name = name("b")))),
        (
            "hold",
            packet(wire::Kind::HOLD, &zeros(|b: &mut wire::Hold| (b.token, b.millis) = ([7; 16], 5000))),
        ),
        (
            "resume",
            packet(wire::Kind::RESUME, &zeros(|b: &mut wire::ChannelSide| (b.channel, b.initiator) = (9, 1))),
        ),
        ("close", packet(wire::Kind::CLOSE, &zeros(|b: &mut wire::ChannelRef| b.channel = 9))),
        ("error", packet(wire::Kind::ERROR, &zeros(|b: &mut wire::Error| b.code = wire::ErrorCode::DENIED))),
        ("relay_data", relayed(relay::RelayKind::DATA, &hello[1..])),
        ("relay_open", relayed(relay::RelayKind::OPEN, &zeros(|b: &mut relay::Open| b.pid = 77))),
        (
            "relay_segments",
            relayed(
                relay::RelayKind::SEGMENTS,
                &zeros(|b: &mut [relay::Segment; 2]| b[0].name = name("web")),
            ),
        ),
        (
            "relay_endpoints",
            relayed(relay::RelayKind::ENDPOINTS, &zeros(|b: &mut [relay::Endpoint; 2]| b[1].pid = 5)),
        ),
        (
            "relay_mapped",
            relayed(relay::RelayKind::MAPPED, &zeros(|b: &mut relay::Mapped| b.name = name("web"))),
        ),
        ("record", [&[2][..], &[8, 0, 0, 0x10, 0, 0, 0, 0x80], &[0x40, 0, 0, 0, 0, 0, 0, 0]].concat()),
        (
            "control",
            [&[3][..], &zeros(|b: &mut ginnel_layout::control::ControlHeader| b.name = name("vm-a"))]
                .concat(),
        ),
        (
            "segment",
            [&[3][..], &zeros(|b: &mut ginnel_layout::segment::SegmentHeader| b.name = name("web"))].concat(),
        ),
        ("name", [&[3][..], name("x.y_z@0").as_bytes()].concat()),
        ("hello", hello),
    ]
    .into_iter()
    .map(|(name, bytes)| ("wire", name.to_owned(), bytes))
}

/// Lists of operations for a driver and a device: around the ring, asleep, completed out of order, with a successor, and with
/// lies.
fn virtqueues() -> impl Iterator<Item = Seed> {
    let op = |code: u8, a: u16, b: u16| Op { code, a, b };
    let round = |i: u16| [op(0, 2 + 5, i), op(2, 0, 0), op(3, 0, 0), op(5, 0, 9), op(6, 0, 0), op(7, 0, 0)];
    let around: Vec<Op> = (0..12).flat_map(round).collect();
    let tables: Vec<Op> =
        around.iter().map(|o| Op { code: if o.code == 0 { 1 } else { o.code }, ..*o }).collect();
    let asleep: Vec<Op> =
        (0..8).flat_map(|i| [op(8, 0, 0), op(8, 1, 0)].into_iter().chain(round(i))).collect();
    let disorder: Vec<Op> = (0..4)
        .flat_map(|_| {
            let adds = (0..3).map(|i| op(1, i, 40 * i));
            let takes = (0..3).map(|_| op(3, 0, 0));
            let gives = (0..3).flat_map(|i| [op(5, 2 - i, 3), op(6, 0, 0)]);
            let polls = (0..3).map(|_| op(7, 0, 0));
            adds.chain([op(2, 0, 0)]).chain(takes).chain(gives).chain(polls).collect::<Vec<_>>()
        })
        .collect();
    let successor: Vec<Op> = (0..6)
        .flat_map(|i| {
            [
                op(1, 2, i),
                op(0, 1, i),
                op(2, 0, 0),
                op(3, 0, 0),
                op(8, 5, 0),
                op(3, 0, 0),
                op(5, 0, 1),
                op(6, 0, 0),
                op(7, 0, 0),
            ]
        })
        .collect();
    let lies: Vec<Op> =
        (0..14u16).flat_map(|i| [op(0x80 | i as u8 % 8, 5 * i, 3 * i)].into_iter().chain(round(i))).collect();
    let lists = [
        ("around", around),
        ("tables", tables),
        ("asleep", asleep),
        ("disorder", disorder),
        ("successor", successor),
        ("lies", lies),
    ];
    lists.into_iter().flat_map(|(name, ops)| {
        // Both kinds, with event index, a queue of 4 or 5, and an in-flight region.
        [("split", 0x1a), ("packed", 0x1b)].map(|(kind, choice)| {
            ("virtqueue_driver", format!("{name}_{kind}"), ModelInput::bytes(choice, &ops))
        })
    })
}

/// The memory of guests with honest drivers, and of one whose device has died: all words that are not zero.
fn guests() -> impl Iterator<Item = Seed> {
    let words = |memory: &Mapping, from: usize| -> Vec<(usize, u64, bool)> {
        let word = |at: usize| (from + at / 8, memory.load_relaxed_u64(at), false);
        (0..memory.len()).step_by(8).map(word).filter(|(_, value, _)| *value != 0).collect()
    };
    let mut seeds = Vec::new();
    for (kind, choice) in [("split", 0x1eu8), ("packed", 0x1f)] {
        for (name, indirect, die) in
            [("direct", false, false), ("indirect", true, false), ("dead", false, true)]
        {
            let rig = Rig::choose(choice);
            let (memory, region) = (rig.memory(), rig.inflight_memory());
            let mut driver = rig.driver(&memory);
            for i in 0..4 {
                let segment =
                    |n: usize, writable| Segment { address: rig.data(512 * i + 64 * n), len: 16, writable };
                if driver.add(&[segment(0, false), segment(1, true), segment(2, true)], indirect).is_ok() {
                    let _ = driver.publish();
                }
            }
            if die && let Ok(mut device) = DeviceQueue::new(rig.setup(&memory, rig.base(), Some(&region))) {
                for _ in 0..2 {
                    let _ = device.pop(&rig.guest(&memory), &mut Chain::new());
                }
            }
            let mut all = words(&memory, 0);
            all.extend(words(&region, memory.len() / 8));
            if let Some(last) = all.last_mut() {
                last.2 = true;
            }
            seeds.push(("virtqueue_device", format!("{name}_{kind}"), WordsInput::bytes(choice, all)));
        }
    }
    seeds.into_iter()
}

/// NVMe queues: what a driver writes, with lists of PRPs, and operations of both sides.
fn nvme() -> impl Iterator<Item = Seed> {
    use ginnel_layout::nvme::{Command, Opcode};
    use kit::models::nvme::rig::Rig;
    let op = |code: u8, a: u16, b: u16| Op { code, a, b };
    let round =
        |i: u16| [op(0, i, 0), op(3, i, 0), op(5, 0, 0), op(7, 0, i), op(8, 0, 0), op(9, 0, 0), op(10, 0, 0)];
    let around: Vec<Op> = (0..12).flat_map(round).collect();
    let asleep: Vec<Op> =
        (0..8).flat_map(|i| [op(11, 0, 0), op(11, 1, 0)].into_iter().chain(round(i))).collect();
    let full: Vec<Op> = (0..6)
        .flat_map(|i| [op(0, 0, 0), op(3, 0, 0), op(5, 0, 0), op(7, i, 0), op(11, 0, 0), op(9, 0, 0)])
        .collect();
    let successor: Vec<Op> = (0..6)
        .flat_map(|i| {
            [op(0, i, 0), op(0, i, 0), op(3, i, 0), op(5, 0, 0), op(11, 4, 0), op(5, 0, 0), op(7, i, 0)]
        })
        .collect();
    let lies: Vec<Op> =
        (0..16u16).flat_map(|i| [op(0x80 | i as u8 % 8, 5 * i, 3 * i)].into_iter().chain(round(i))).collect();
    let lists =
        [("around", around), ("asleep", asleep), ("full", full), ("successor", successor), ("lies", lies)];
    let mut seeds = Vec::new();
    for (mode, choice) in [("mapped", 0x14u8), ("trapped", 0x29), ("shadow", 0x1a)] {
        for (name, ops) in &lists {
            seeds.push(("nvme_driver", format!("{name}_{mode}"), ModelInput::bytes(choice, ops)));
        }
        let rig = Rig::choose(choice);
        let (memory, doorbells) = (rig.memory(), rig.doorbells());
        let mut driver = rig.driver(&memory, &doorbells, 4);
        let pages: Vec<u64> = (0..5).map(|page| rig.data(4096 * (2 * page + 1))).collect();
        let prps =
            ginnel_nvme::prp::describe(&rig.guest(&memory), &pages, &[rig.data(0), rig.data(8192)], 509);
        let (prp1, prp2) = prps.unwrap_or_default();
        for queue in 0..usize::from(rig.submissions) {
            for len in [20480, 4096] {
                let read = Command { opcode: Opcode::READ, prp1, prp2, cdw12: len, ..Command::new_zeroed() };
                driver.submit(queue, read);
            }
            driver.ring(queue);
        }
        let mut words: Vec<(usize, u64, bool)> = Vec::new();
        for (memory, at, from) in [(&doorbells, 4096, 0), (&memory, 0, 512)] {
            let word = |at: usize, i: usize| (from + i / 8, memory.load_relaxed_u64(at + i), false);
            let all = (0..memory.len() - at).step_by(8).map(|i| word(at, i));
            words.extend(all.filter(|(_, value, _)| *value != 0));
        }
        if let Some(last) = words.last_mut() {
            last.2 = true;
        }
        seeds.push(("nvme_device", mode.to_owned(), WordsInput::bytes(choice, words)));
    }
    seeds.into_iter()
}
