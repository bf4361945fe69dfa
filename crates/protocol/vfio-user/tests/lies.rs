//! What a client can say that is not right. A command that is wrong in itself is answered with an error, and the connection goes on.

use ginnel_fdpass::{self as fdpass, SendFlags};
use ginnel_layout::vfio_user::{
    Access, Command, DeviceInfo, DmaMap, DmaUnmap, Header, IrqInfo, IrqSet, RegionInfo,
};
use ginnel_vfio_user::{Errno, Gone, MAX_BODY, MAX_DATA, MAX_FDS, Request, Server};
use proptest::prelude::*;
use rustix::event::{EventfdFlags, eventfd};
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use zerocopy::IntoBytes;

fn pair() -> (UnixStream, Server) {
    let (client, server) = UnixStream::pair().unwrap();
    (client, Server::new(server).unwrap())
}

fn header(command: Command, len: usize) -> Header {
    Header { id: 1, command, size: (size_of::<Header>() + len) as u32, flags: 0, error: 0 }
}

fn bytes(command: Command, body: &[u8]) -> Vec<u8> {
    [header(command, body.len()).as_bytes(), body].concat()
}

fn eventfds(count: usize) -> Vec<OwnedFd> {
    (0..count).map(|_| eventfd(0, EventfdFlags::CLOEXEC).unwrap()).collect()
}

/// Sends a message with so many descriptors, and returns what the server makes of it: a description, or an error.
fn of(command: Command, body: &[u8], fds: usize) -> Result<String, Errno> {
    let (client, mut server) = pair();
    let fds = eventfds(fds);
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    fdpass::send_all(client.as_fd(), &bytes(command, body), &fds, SendFlags::empty()).unwrap();
    (&client).write_all(&bytes(Command::DEVICE_RESET, &[])).unwrap();
    let mut message = server.receive().unwrap().expect("a message");
    assert_eq!(message.command(), command);
    let result = message.request().map(|request| format!("{request:?}"));
    let mut next = server.receive().unwrap().expect("the next message");
    assert!(matches!(next.request(), Ok(Request::Reset)), "the next message is found");
    result
}

fn invalid(command: Command, body: &[u8], fds: usize) {
    let result = of(command, body, fds);
    assert_eq!(result, Err(Errno::INVAL), "{command:?} {body:?} with {fds} descriptors");
}

#[test]
fn bodies_of_another_length() {
    let whole = [
        (Command::VERSION, 4),
        (Command::DMA_MAP, 32),
        (Command::DMA_UNMAP, 24),
        (Command::DEVICE_GET_INFO, 16),
        (Command::DEVICE_GET_REGION_INFO, 32),
        (Command::DEVICE_GET_IRQ_INFO, 16),
        (Command::DEVICE_SET_IRQS, 20),
        (Command::REGION_READ, 16),
        (Command::REGION_WRITE, 16),
    ];
    for (command, len) in whole {
        for wrong in [0, 1, len - 1] {
            invalid(command, &vec![0; wrong], 0);
        }
        if command != Command::VERSION {
            invalid(command, &vec![1; len + 1], 0);
        }
    }
    invalid(Command::DEVICE_RESET, &[0], 0);
}

#[test]
fn structures_that_the_client_has_no_room_for() {
    let info = DeviceInfo { argsz: 15, flags: 0, num_regions: 0, num_irqs: 0 };
    invalid(Command::DEVICE_GET_INFO, info.as_bytes(), 0);
    of(Command::DEVICE_GET_INFO, DeviceInfo { argsz: 16, ..info }.as_bytes(), 0).unwrap();
    of(Command::DEVICE_GET_INFO, DeviceInfo { argsz: u32::MAX, ..info }.as_bytes(), 0).unwrap();
    let info = RegionInfo { argsz: 31, flags: 0, index: 0, cap_offset: 0, size: 0, offset: 0 };
    invalid(Command::DEVICE_GET_REGION_INFO, info.as_bytes(), 0);
    let info = IrqInfo { argsz: 0, flags: 0, index: 0, count: 0 };
    invalid(Command::DEVICE_GET_IRQ_INFO, info.as_bytes(), 0);
}

#[test]
fn other_versions() {
    let [theirs, none] = [[1, 0, 0, 0], [0, 0, 0, 0]];
    assert_eq!(of(Command::VERSION, &theirs, 0), Err(Errno::PROTONOSUPPORT));
    of(Command::VERSION, &none, 0).unwrap();
    of(Command::VERSION, &[&none[..], b"{}\0"].concat(), 0).unwrap();
    invalid(Command::VERSION, &[&none[..], b"{}"].concat(), 0);
}

const MAP: DmaMap = DmaMap { argsz: 32, flags: 3, offset: 0x1000, address: 0x10_0000, size: 0x2000 };

#[test]
fn ranges_that_cannot_be() {
    let map = |map: DmaMap, fds| of(Command::DMA_MAP, map.as_bytes(), fds);
    map(MAP, 1).unwrap();
    map(MAP, 0).unwrap();
    let top = DmaMap { address: 0xffff_ffff_ffff_0000, size: 0x1_0000, ..MAP };
    map(top, 1).unwrap();
    for wrong in [
        DmaMap { argsz: 31, ..MAP },
        DmaMap { size: 0, ..MAP },
        DmaMap { flags: 0, ..MAP },
        DmaMap { flags: DmaMap::WRITE, ..MAP },
        DmaMap { flags: 7, ..MAP },
        DmaMap { size: 0x1_1000, ..top },
        DmaMap { size: u64::MAX - 0xfff, offset: 0x2000, ..MAP },
        DmaMap { offset: u64::MAX - 0xfff, ..MAP },
        DmaMap { address: 0x10_0800, ..MAP },
        DmaMap { size: 0x1234, ..MAP },
        DmaMap { offset: 8, ..MAP },
    ] {
        assert_eq!(map(wrong, 1), Err(Errno::INVAL), "{wrong:?}");
    }
    assert_eq!(map(MAP, 2), Err(Errno::INVAL));
}

#[test]
fn an_unmap_may_reach_to_the_end_and_beyond() {
    let unmap = DmaUnmap { argsz: 24, flags: 0, address: 0xfef0_0000, size: 0xffff_ffff_0110_0000 };
    for (size, last) in
        [(0x1000, 0xfef0_0fff), (unmap.size, u64::MAX), (unmap.size + 1, u64::MAX), (u64::MAX, u64::MAX)]
    {
        let (client, mut server) = pair();
        let unmap = DmaUnmap { size, ..unmap };
        (&client).write_all(&bytes(Command::DMA_UNMAP, unmap.as_bytes())).unwrap();
        let mut message = server.receive().unwrap().unwrap();
        let Ok(Request::Unmap { first, last: found, .. }) = message.request() else { panic!("an unmap") };
        assert_eq!((first, found), (0xfef0_0000, last));
    }
    invalid(Command::DMA_UNMAP, DmaUnmap { size: 0, ..unmap }.as_bytes(), 0);
    invalid(Command::DMA_UNMAP, DmaUnmap { flags: 1, ..unmap }.as_bytes(), 0);
    invalid(Command::DMA_UNMAP, DmaUnmap { argsz: 0, ..unmap }.as_bytes(), 0);
    let all = DmaUnmap { flags: DmaUnmap::ALL, address: 0, size: 0, ..unmap };
    let all = of(Command::DMA_UNMAP, all.as_bytes(), 0).unwrap();
    assert!(all.contains(&format!("first: 0, last: {}", u64::MAX)), "{all}");
}

#[test]
fn interrupts_that_contradict_themselves() {
    let set =
        IrqSet { argsz: 20, flags: IrqSet::DATA_NONE | IrqSet::ACTION_TRIGGER, index: 2, start: 0, count: 0 };
    let with = |flags, count| IrqSet { flags, count, ..set };
    let (trigger, eventfd, bool) = (IrqSet::ACTION_TRIGGER, IrqSet::DATA_EVENTFD, IrqSet::DATA_BOOL);
    of(Command::DEVICE_SET_IRQS, set.as_bytes(), 0).unwrap();
    of(Command::DEVICE_SET_IRQS, with(trigger | eventfd, 3).as_bytes(), 3).unwrap();
    of(Command::DEVICE_SET_IRQS, with(trigger | eventfd, 3).as_bytes(), 0).unwrap();
    of(Command::DEVICE_SET_IRQS, &[with(trigger | bool, 3).as_bytes(), &[1; 3]].concat(), 0).unwrap();
    for (wrong, fds) in [
        (IrqSet { argsz: 19, ..set }, 0),
        (IrqSet { start: u32::MAX, count: 1, ..set }, 0),
        (with(trigger | eventfd, 3), 2),
        (with(trigger | eventfd, 2), 3),
        (with(trigger | bool, 3), 0),
        (with(trigger | IrqSet::DATA_NONE, 1), 1),
        (with(trigger | IrqSet::DATA_NONE | eventfd, 1), 1),
        (with(trigger, 1), 0),
        (with(eventfd, 1), 1),
        (with(trigger | IrqSet::ACTION_MASK | eventfd, 1), 1),
        (with(trigger | eventfd | 1 << 6, 1), 1),
    ] {
        invalid(Command::DEVICE_SET_IRQS, wrong.as_bytes(), fds);
    }
    let data = [with(trigger | eventfd, 1).as_bytes(), &[0; 4]].concat();
    invalid(Command::DEVICE_SET_IRQS, &data, 1);
}

#[test]
fn accesses_that_are_too_long() {
    let access = |count| Access { offset: 0, region: 0, count };
    of(Command::REGION_READ, access(MAX_DATA as u32).as_bytes(), 0).unwrap();
    for count in [0, MAX_DATA as u32 + 1, u32::MAX] {
        invalid(Command::REGION_READ, access(count).as_bytes(), 0);
    }
    let far = Access { offset: u64::MAX, ..access(1) };
    invalid(Command::REGION_READ, far.as_bytes(), 0);
    of(Command::REGION_WRITE, &[access(3).as_bytes(), &[0; 3]].concat(), 0).unwrap();
    for data in [0, 2, 4] {
        invalid(Command::REGION_WRITE, &[access(3).as_bytes(), &vec![0; data]].concat(), 0);
    }
}

#[test]
fn unknown_commands_are_answered_and_their_bodies_are_skipped() {
    for command in [0, 6, 11, 12, 14, 15, 16, 17, 18, 19, 1000, u16::MAX].map(Command) {
        for len in [0, 1, 100, MAX_BODY] {
            assert_eq!(of(command, &vec![7; len], 0), Err(Errno::OPNOTSUPP));
        }
    }
}

#[test]
fn descriptors_where_none_belong() {
    invalid(Command::DEVICE_RESET, &[], 1);
    invalid(Command::VERSION, &[0; 4], 1);
    assert_eq!(of(Command::DMA_MAP, MAP.as_bytes(), MAX_FDS + 1), Err(Errno::MFILE));
    assert_eq!(of(Command(99), &[0; 100], MAX_FDS + 1), Err(Errno::MFILE));
}

#[test]
fn a_body_that_is_too_long_is_skipped_and_costs_no_memory() {
    let (client, mut server) = pair();
    let len = MAX_BODY + 300_000;
    let sender = std::thread::spawn(move || {
        let fds = eventfds(1);
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        let long = bytes(Command::REGION_WRITE, &vec![1; len]);
        fdpass::send_all(client.as_fd(), &long, &fds, SendFlags::empty()).unwrap();
        (&client).write_all(&bytes(Command::DEVICE_RESET, &[])).unwrap();
        client
    });
    let mut next = || kit::wait::wait_for("a message", || server.receive().unwrap());
    assert_eq!(next().request().err(), Some(Errno::MSGSIZE));
    assert!(matches!(next().request(), Ok(Request::Reset)));
    sender.join().unwrap();
}

#[test]
fn headers_behind_which_nothing_can_be_found_end_the_connection() {
    let good = header(Command::DEVICE_RESET, 0);
    for wrong in [
        Header { size: 0, ..good },
        Header { size: 15, ..good },
        Header { flags: Header::REPLY, ..good },
        Header { flags: 2, ..good },
        Header { flags: 0xf, ..good },
    ] {
        let (client, mut server) = pair();
        (&client).write_all(wrong.as_bytes()).unwrap();
        assert!(matches!(server.receive(), Err(Gone::Refused(_))), "{wrong:?}");
    }
    let (client, mut server) = pair();
    (&client).write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    // Whatever it is taken for, the connection ends when the client does.
    let _ = server.receive();
    drop(client);
    let end = (0..10).find_map(|_| server.receive().err());
    assert!(end.is_some());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// However the bytes are cut, the same messages come out, each with its own descriptor.
    #[test]
    fn messages_come_whole_however_they_are_cut(
        lens in prop::collection::vec((0usize..200, any::<bool>()), 1..8),
        cuts in prop::collection::vec(1usize..64, 1..20),
    ) {
        let (client, mut server) = pair();
        let file = eventfds(1);
        let mut cuts = cuts.iter().cycle();
        let mut seen = Vec::new();
        for (len, with) in &lens {
            let message = bytes(Command::DMA_MAP, &vec![0xee; *len]);
            let mut rest = &message[..];
            let mut fds = if *with { vec![file[0].as_fd()] } else { Vec::new() };
            while !rest.is_empty() {
                let cut = rest.len().min(*cuts.next().unwrap());
                fdpass::send_all(client.as_fd(), &rest[..cut], &fds, SendFlags::empty()).unwrap();
                fds.clear();
                rest = &rest[cut..];
                seen.extend(server.receive().unwrap());
            }
        }
        prop_assert_eq!(seen.len(), lens.len());
        prop_assert!(server.receive().unwrap().is_none());
    }

    /// Nothing that a client sends is a panic.
    #[test]
    fn any_body_of_any_command(command in 0u16..20, body in prop::collection::vec(any::<u8>(), 0..64), fds in 0usize..3) {
        let _ = of(Command(command), &body, fds);
    }
}
