//! Client and server with each other.

use ginnel_layout::vfio_user::{Access, Area, Command, DeviceInfo, IrqInfo, pci};
use ginnel_vfio_user::client::{Client, Error};
use ginnel_vfio_user::{Action, Errno, Gone, Irqs, Limits, Region, Request, Server};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use zerocopy::IntoBytes;

const LIMITS: Limits = Limits { fds: 16, data: 4096, maps: 64 };

fn pair() -> (Client, Server) {
    let (client, server) = UnixStream::pair().unwrap();
    (Client::new(client), Server::new(server).unwrap())
}

/// What a [`serve`]d device was asked for.
#[derive(Debug, Default, PartialEq)]
struct Seen {
    maps: Vec<(u64, u64, u64, bool, bool)>,
    unmaps: Vec<(u64, u64)>,
    vectors: Vec<(u32, u32, usize)>,
    resets: u32,
}

/// A device with 8 KiB of memory in region 0, of which the second page can be mapped.
fn serve(mut server: Server) -> JoinHandle<Seen> {
    std::thread::spawn(move || {
        let file = Arc::new(memfd_create("region", MemfdFlags::CLOEXEC).unwrap());
        ftruncate(&*file, 8192).unwrap();
        let region = Region { size: 8192, writable: true, areas: vec![Area { offset: 4096, size: 4096 }] };
        let mut memory = vec![0; 8192];
        let mut seen = Seen::default();
        loop {
            let mut polls = [PollFd::new(&server, PollFlags::IN)];
            poll(&mut polls, None).unwrap();
            let mut message = match server.receive() {
                Ok(Some(message)) => message,
                Ok(None) => continue,
                Err(Gone::Closed) => return seen,
                Err(gone) => panic!("{gone}"),
            };
            let to = message.reply_to();
            match message.request() {
                Ok(Request::Version { .. }) => server.reply(to, &LIMITS.version(), None),
                Ok(Request::Map { address, size, offset, writable, file }) => {
                    seen.maps.push((address, size, offset, writable, file.is_some()));
                    server.reply(to, &[], None);
                }
                Ok(Request::Unmap { message, first, last }) => {
                    seen.unmaps.push((first, last));
                    server.reply(to, &Request::unmapped(message), None);
                }
                Ok(Request::DeviceInfo) => {
                    let info = DeviceInfo { argsz: 16, flags: 3, num_regions: 9, num_irqs: 5 };
                    server.reply(to, info.as_bytes(), None);
                }
                Ok(Request::RegionInfo { index, argsz }) => {
                    let (body, whole) = match index {
                        0 => region.reply(index, argsz),
                        _ => Region::default().reply(index, argsz),
                    };
                    server.reply(to, &body, whole.then(|| file.clone()));
                }
                Ok(Request::IrqInfo { index }) => {
                    let info = IrqInfo { argsz: 16, flags: IrqInfo::EVENTFD, index, count: 4 };
                    server.reply(to, info.as_bytes(), None);
                }
                Ok(Request::SetIrqs { index: pci::MSIX, start, count, action: Action::Trigger, irqs }) => {
                    let fds = if let Irqs::Eventfds(fds) = irqs { fds.len() } else { usize::MAX };
                    seen.vectors.push((start, count, fds));
                    server.reply(to, &[], None);
                }
                Ok(Request::Read { access: access @ Access { region: 0, offset: 0..4096, count } }) => {
                    let data = &memory[access.offset as usize..][..count as usize];
                    server.reply(to, &[access.as_bytes(), data].concat(), None);
                }
                Ok(Request::Write { access: access @ Access { region: 0, offset: 0..4096, .. }, data }) => {
                    memory[access.offset as usize..][..data.len()].copy_from_slice(data);
                    server.reply(to, access.as_bytes(), None);
                }
                Ok(Request::Reset) => {
                    seen.resets += 1;
                    server.reply(to, &[], None);
                }
                Ok(_) => server.fail(to, Errno::INVAL),
                Err(errno) => server.fail(to, errno),
            }
            server.flush().unwrap();
        }
    })
}

#[test]
fn a_client_uses_a_device() {
    let (mut client, server) = pair();
    let device = serve(server);
    let capabilities = client.negotiate().unwrap();
    assert!(capabilities.contains("\"max_dma_maps\":64"), "{capabilities}");
    let info = client.device_info().unwrap();
    assert_eq!((info.flags, info.num_regions), (DeviceInfo::RESET | DeviceInfo::PCI, pci::REGIONS));
    let (region, file) = client.region(0).unwrap();
    assert_eq!((region.size, region.areas), (8192, vec![Area { offset: 4096, size: 4096 }]));
    assert_eq!(fstat(file.unwrap()).unwrap().st_size, 8192);
    let (nothing, no_file) = client.region(1).unwrap();
    assert!(nothing == Region::default() && no_file.is_none());
    assert_eq!(client.irqs(pci::MSIX).unwrap().count, 4);

    let eventfds: Vec<OwnedFd> = (0..4).map(|_| eventfd(0, EventfdFlags::CLOEXEC).unwrap()).collect();
    client.set_vectors(0, &eventfds).unwrap();
    client.clear_vectors(2, 1).unwrap();
    client.clear_vectors(0, 0).unwrap();
    let memory = memfd_create("memory", MemfdFlags::CLOEXEC).unwrap();
    client.map(0x10_0000, 0x4000, true, Some((memory.as_fd(), 0x1000))).unwrap();
    client.map(0x20_0000, 0x1000, false, None).unwrap();
    client.unmap(0x10_0000, 0x4000).unwrap();
    client.write(0, 8, &[1, 2, 3, 4]).unwrap();
    client.post(0, 10, &[7]).unwrap();
    let mut read = [0; 4];
    client.read(0, 8, &mut read).unwrap();
    assert_eq!(read, [1, 2, 7, 4]);
    let refused = client.read(0, 5000, &mut read).unwrap_err();
    assert!(matches!(refused, Error::Refused(Command::REGION_READ, Errno::INVAL)), "{refused}");
    client.reset().unwrap();
    drop(client);
    let seen = device.join().unwrap();
    let expected = Seen {
        maps: vec![(0x10_0000, 0x4000, 0x1000, true, true), (0x20_0000, 0x1000, 0, false, false)],
        unmaps: vec![(0x10_0000, 0x10_3fff)],
        // Without data there is no list of descriptors at all.
        vectors: vec![(0, 4, 4), (2, 1, 0), (0, 0, usize::MAX)],
        resets: 1,
    };
    assert_eq!(seen, expected);
}

#[test]
fn answers_may_come_in_another_order() {
    let (mut client, mut server) = pair();
    let ids = [0x1000, 0x2000].map(|address| client.begin_unmap(address, 0x1000).unwrap());
    let tos: Vec<_> = (0..2).map(|_| server.receive().unwrap().unwrap().reply_to()).collect();
    server.reply(tos[1], &[2], None);
    server.fail(tos[0], Errno::IO);
    server.flush().unwrap();
    assert!(matches!(client.finish(ids[0]), Err(Error::Refused(_, Errno::IO))));
    assert_eq!(client.finish(ids[1]).unwrap().body, [2]);
}

#[test]
fn who_wants_no_reply_gets_none_not_even_an_error() {
    let (mut client, mut server) = pair();
    client.post(0, 0, &[1]).unwrap();
    client.post(0, 0, &[1]).unwrap();
    for _ in 0..2 {
        let to = server.receive().unwrap().unwrap().reply_to();
        server.reply(to, &[9; 16], None);
        server.fail(to, Errno::IO);
    }
    assert!(!server.is_waiting());
    let id = client.begin(Command::DEVICE_RESET, &[], &[]).unwrap();
    let to = server.receive().unwrap().unwrap().reply_to();
    server.reply(to, &[], None);
    server.flush().unwrap();
    client.finish(id).unwrap();
}

#[test]
fn a_client_that_does_not_read_is_not_read_from() {
    let (mut client, mut server) = pair();
    let access = Access { offset: 0, region: 0, count: 4096 };
    let mut begun = Vec::new();
    let mut answered = 0;
    while server.is_receiving() {
        begun.push(client.begin(Command::REGION_READ, access.as_bytes(), &[]).unwrap());
        if let Some(message) = server.receive().unwrap() {
            server.reply(message.reply_to(), &[0; 4112], None);
            answered += 1;
        }
        server.flush().unwrap();
        assert!(begun.len() < 10_000, "the server never stops");
    }
    assert!(server.is_waiting() && server.receive().unwrap().is_none());
    // It reads at last, and everything goes on.
    for id in &begun[..answered] {
        server.flush().unwrap();
        client.finish(*id).unwrap();
    }
    assert!(server.is_receiving() && !server.is_waiting());
}
