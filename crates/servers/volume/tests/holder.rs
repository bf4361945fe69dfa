//! The holder of an NVMe volume: a real process between a client, which stands for QEMU, and engines that only pretend to serve.

mod holding;

use ginnel_layout::nvme::{DOORBELLS, cc, csts, register};
use ginnel_layout::nvme_attach::Reason;
use ginnel_layout::nvme_state::{ASQ, BUS_MASTER, CC, CSTS, RESET_GENERATION};
use ginnel_layout::vfio_user::{Command, DeviceInfo, pci};
use ginnel_shmem::{Mapping, Protection, SharedMemory};
use ginnel_vfio_user::Errno;
use ginnel_vfio_user::client::{Client, Error};
use ginnel_volume::attach::{FromHolder, Gone};
use ginnel_volume::holder::pci::{DEVICE, VENDOR};
use holding::{Engine, Holder, eventfds, is_readable, memory};
use kit::wait::{WATCHDOG, takes_less_than, wait_until};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Guest memory of the tests: where it begins, and its size.
const GUEST: u64 = 0x10_0000;
const SIZE: u64 = 1 << 20;

fn register(client: &mut Client, at: usize) -> u32 {
    let mut bytes = [0; 4];
    client.read(pci::BAR0, at as u64, &mut bytes).unwrap();
    u32::from_le_bytes(bytes)
}

fn set(client: &mut Client, at: usize, value: u32) {
    client.write(pci::BAR0, at as u64, &value.to_le_bytes()).unwrap();
}

/// Switches memory accesses of the device on or off.
fn master(client: &mut Client, on: bool) {
    client.write(pci::CONFIG, 4, &[if on { 6 } else { 2 }, 0]).unwrap();
}

#[test]
fn a_client_finds_a_controller() {
    for (flags, stride, areas) in [("", 4, 0), ("--wait poll", 4096, 1)] {
        let holder = Holder::start(&format!("--queues 3 --queue-size 64 {flags}"));
        let mut client = holder.connect();
        let info = client.device_info().unwrap();
        assert_eq!(info.flags, DeviceInfo::RESET | DeviceInfo::PCI);
        assert_eq!((info.num_regions, info.num_irqs), (pci::REGIONS, pci::IRQS));
        let (bar, file) = client.region(pci::BAR0).unwrap();
        assert_eq!((bar.areas.len(), file.is_some()), (areas, areas == 1));
        for kind in [pci::INTX, 1, pci::MSIX, 4] {
            assert_eq!(client.irqs(kind).unwrap().count, if kind == pci::MSIX { 4 } else { 0 });
        }
        assert!(client.irqs(pci::ERR).is_err() && client.irqs(pci::IRQS).is_err());
        let mut ids = [0; 12];
        client.read(pci::CONFIG, 0, &mut ids).unwrap();
        assert_eq!(ids[..4], [VENDOR.to_le_bytes(), DEVICE.to_le_bytes()].concat());
        assert_eq!(ids[9..], [0x02, 0x08, 0x01]);
        let cap = u64::from(register(&mut client, register::CAP))
            | u64::from(register(&mut client, register::CAP + 4)) << 32;
        assert_eq!((cap & 0xffff, 4 << (cap >> 32 & 15)), (63, stride));
        if let Some(file) = file {
            // The doorbells of the I/O queues lie where QEMU maps them.
            let area = bar.areas[0];
            assert_eq!((area.offset, area.size), (0x3000, 6 * 4096));
            let map = |file| {
                Mapping::of_file(file, area.offset, area.size as usize, Protection::ReadWrite).unwrap()
            };
            let mine = map(file.as_fd());
            mine.store_release_u32(0x1000, 5);
            let mut engine = holder.attach(3);
            assert_eq!(engine.doorbell(0x4000), 5);
            // One that is trapped nevertheless reaches the same word.
            set(&mut client, 0x3000, 9);
            assert_eq!(mine.load_acquire_u32(0), 9);
            engine.wait_for_kick(1);
        }
    }
}

#[test]
fn an_engine_gets_everything_and_enables_the_controller() {
    let holder = Holder::start("--queues 2");
    let mut client = holder.connect();
    let (file, vectors) = (memory(SIZE), eventfds(3));
    client.map(GUEST, SIZE, true, Some((file.as_fd(), 0))).unwrap();
    client.map(GUEST + SIZE, 0x1000, false, Some((file.as_fd(), 0x1000))).unwrap();
    client.map(0xf000_0000, 0x1000, false, None).unwrap();
    client.set_vectors(0, &vectors).unwrap();
    client.clear_vectors(1, 1).unwrap();
    master(&mut client, true);
    set(&mut client, register::ASQ, 0x10_0000);
    set(&mut client, register::CC, cc::enable());
    assert_eq!(register(&mut client, register::CSTS), 0, "there is no engine");
    holder.wait_for_line("no engine is there", 1);

    let mut engine = holder.attach(2);
    assert_eq!(engine.ranges, [(GUEST, SIZE, 0, true), (GUEST + SIZE, 0x1000, 0x1000, false)]);
    let vectors: Vec<bool> = engine.vectors.iter().map(Option::is_some).collect();
    assert_eq!(vectors, [true, false, true]);
    assert_eq!(
        (engine.load(CC), engine.load(ASQ), engine.load(BUS_MASTER)),
        (cc::enable().into(), 0x10_0000, 1)
    );
    engine.store(CSTS, csts::RDY.into());
    assert_eq!(register(&mut client, register::CSTS), csts::RDY);

    // What is new comes as it is said.
    client.map(0x8000_0000, 0x2000, true, Some((file.as_fd(), 0))).unwrap();
    assert!(matches!(engine.next(), FromHolder::Map { range, .. } if range.iova == 0x8000_0000));
    client.set_vectors(1, &eventfds(1)).unwrap();
    assert!(matches!(engine.next(), FromHolder::Vector { number: 1, eventfd: Some(_) }));
    set(&mut client, register::CC, 0);
    assert!(matches!(engine.next(), FromHolder::Control { id: 0 }));
    assert_eq!((engine.load(CC), engine.load(RESET_GENERATION)), (0, 1));
    // A guest that switches memory accesses off relies on that there are none any more.
    std::thread::scope(|scope| {
        let off = scope.spawn(|| master(&mut client, false));
        let FromHolder::Control { id } = engine.next() else { panic!("no change") };
        assert_eq!(engine.load(BUS_MASTER), 0);
        assert!(id != 0 && !off.is_finished());
        engine.end.done(id).unwrap();
        off.join().unwrap();
    });
}

#[test]
fn doorbells_wake_the_engine() {
    let holder = Holder::start("--queues 2");
    let mut client = holder.connect();
    // One that nobody is there for is kept.
    set(&mut client, DOORBELLS, 7);
    let mut engine = holder.attach(2);
    assert_eq!(engine.doorbell(DOORBELLS), 7);
    for doorbell in 0..6 {
        set(&mut client, DOORBELLS + 4 * doorbell, 40 + doorbell as u32);
        engine.wait_for_kick(doorbell / 2);
        assert_eq!(engine.doorbell(DOORBELLS + 4 * doorbell), 40 + doorbell as u32);
    }
    client.post(pci::BAR0, DOORBELLS as u64, &1u32.to_le_bytes()).unwrap();
    engine.wait_for_kick(0);
    // Behind the last one, and too wide.
    set(&mut client, DOORBELLS + 24, 1);
    client.write(pci::BAR0, DOORBELLS as u64, &[0xff; 8]).unwrap();
    assert_eq!(engine.doorbell(DOORBELLS), 1);
    assert!((0..3).all(|queue| !is_readable(&engine.kicks[queue])));
    holder.wait_for_line("there is no such doorbell", 1);
}

#[test]
fn an_unmap_waits_for_the_engine() {
    let holder = Holder::start("--queues 1");
    let mut client = holder.connect();
    let file = memory(SIZE);
    for n in 0..3 {
        client.map(GUEST + n * SIZE, SIZE, true, Some((file.as_fd(), 0))).unwrap();
    }
    client.map(0x9000_0000, 0x1000, false, None).unwrap();
    let mut engine = holder.attach(1);
    // Nobody uses what nobody could see.
    client.unmap(0x9000_0000, 0x1000).unwrap();
    let begun = client.begin_unmap(GUEST, 2 * SIZE).unwrap();
    assert!(matches!(engine.next(), FromHolder::Unmap { id: 0, iova: GUEST, len: SIZE }));
    let FromHolder::Unmap { id, iova, .. } = engine.next() else { panic!("no second range") };
    assert!(id > 0 && iova == GUEST + SIZE);
    // Registers go on meanwhile, and so does a change of the map.
    register(&mut client, register::CC);
    client.map(GUEST, SIZE, true, Some((file.as_fd(), 0))).unwrap();
    assert!(matches!(engine.next(), FromHolder::Map { .. }));
    let also = client.begin_unmap(GUEST + 2 * SIZE, 0u64.wrapping_sub(GUEST + 2 * SIZE)).unwrap();
    let FromHolder::Unmap { id: later, .. } = engine.next() else { panic!("no third range") };
    assert!(!is_readable(client.as_fd()), "it is answered only when the engine is done");
    engine.end.done(id).unwrap();
    client.finish(begun).unwrap();
    assert!(!is_readable(client.as_fd()));
    engine.end.done(later).unwrap();
    client.finish(also).unwrap();
    let refused = client.unmap(GUEST, 0x1000).unwrap_err();
    assert!(matches!(refused, Error::Refused(Command::DMA_UNMAP, Errno::INVAL)), "{refused}");
}

#[test]
fn a_reset_waits_for_the_engine() {
    let holder = Holder::start("--queues 1");
    let mut client = holder.connect();
    client.reset().unwrap();
    let mut engine = holder.attach(1);
    master(&mut client, true);
    set(&mut client, register::CC, cc::enable());
    for _ in 0..2 {
        assert!(matches!(engine.next(), FromHolder::Control { id: 0 }));
    }
    let begun = client.begin(Command::DEVICE_RESET, &[], &[]).unwrap();
    let FromHolder::Control { id: id @ 1.. } = engine.next() else { panic!("no reset") };
    assert_eq!((engine.load(CC), engine.load(BUS_MASTER), engine.load(RESET_GENERATION)), (0, 0, 2));
    assert!(!is_readable(client.as_fd()));
    engine.end.done(id).unwrap();
    client.finish(begun).unwrap();
}

#[test]
fn an_engine_is_killed_while_an_unmap_waits() {
    let holder = Holder::start("--queues 1");
    let mut client = holder.connect();
    let file = memory(SIZE);
    let begin = |client: &mut Client, engine: &mut Engine| {
        let begun = client.begin_unmap(GUEST, SIZE).unwrap();
        assert!(matches!(engine.next(), FromHolder::Unmap { .. }));
        begun
    };
    let map = |client: &mut Client| client.map(GUEST, SIZE, true, Some((file.as_fd(), 0))).unwrap();
    // The kernel has nothing to do any more.
    map(&mut client);
    let mut engine = holder.attach(1);
    let begun = begin(&mut client, &mut engine);
    drop(engine);
    client.finish(begun).unwrap();

    // The kernel still works on requests, as a copy of the locked file shows.
    map(&mut client);
    let mut engine = holder.attach(1);
    let begun = begin(&mut client, &mut engine);
    let kernel = engine.turn.try_clone().unwrap();
    drop(engine);
    holder.wait_for_line("the engine has gone", 2);
    register(&mut client, register::CC);
    assert!(!is_readable(client.as_fd()));
    drop(kernel);
    client.finish(begun).unwrap();

    // The next engine has waited for the kernel itself; its first answer is enough.
    map(&mut client);
    let mut engine = holder.attach(1);
    let begun = begin(&mut client, &mut engine);
    let kernel = engine.turn.try_clone().unwrap();
    drop(engine);
    let next = holder.attach_with_turn(1, kernel);
    assert_eq!(next.ranges, []);
    client.finish(begun).unwrap();
}

#[test]
fn a_vm_goes_and_another_comes() {
    let holder = Holder::start("--queues 1");
    let mut engine = holder.attach(1);
    let file = memory(SIZE);
    for round in 1..=3 {
        let mut client = holder.connect();
        client.map(GUEST, SIZE, true, Some((file.as_fd(), 0))).unwrap();
        client.set_vectors(1, &eventfds(1)).unwrap();
        master(&mut client, true);
        set(&mut client, register::CC, cc::enable());
        assert!(matches!(engine.next(), FromHolder::Map { .. }));
        assert!(matches!(engine.next(), FromHolder::Vector { number: 1, eventfd: Some(_) }));
        assert!(matches!(engine.next(), FromHolder::Control { id: 0 }));
        if round < 3 {
            assert!(matches!(engine.next(), FromHolder::Control { id: 0 }));
        }
        drop(client);
        let next = Client::new(UnixStream::connect(holder.socket()).unwrap());
        if round == 3 {
            // Its successor must do it. The holder looks at the registers first.
            holder.wait_for_line("the VM has gone", 3);
            let kernel = engine.turn.try_clone().unwrap();
            drop(engine);
            let engine = holder.attach_with_turn(1, kernel);
            assert!(engine.ranges.is_empty() && engine.vectors.iter().all(Option::is_none));
            assert_eq!((engine.load(CC), engine.load(BUS_MASTER)), (0, 0));
            let mut next = next;
            next.negotiate().unwrap();
            return;
        }
        assert!(matches!(engine.next(), FromHolder::Vector { number: 1, eventfd: None }));
        assert!(matches!(engine.next(), FromHolder::Unmap { id: 0, iova: GUEST, .. }));
        let FromHolder::Control { id: id @ 1.. } = engine.next() else { panic!("no reset") };
        assert_eq!((engine.load(CC), engine.load(BUS_MASTER)), (0, 0));
        assert!(!is_readable(next.as_fd()), "the next VM waits");
        engine.end.done(id).unwrap();
        drop(next);
    }
}

#[test]
fn a_second_vm_and_a_second_engine_are_refused() {
    let holder = Holder::start("--queues 1");
    let mut client = holder.connect();
    let engine = holder.attach(1);
    let second = Client::connect(&holder.socket()).unwrap_err();
    assert!(matches!(second, Error::Io(_)), "{second}");
    holder.wait_for_line("a second VM is refused", 1);
    let refused = Engine::try_attach(&holder.socket(), 1, memory(0).into());
    assert!(matches!(refused, Err(Some((Reason::BUSY, 0)))), "{refused:?}");
    drop(engine);
    let refused = Engine::try_attach(&holder.socket(), 3, memory(0).into());
    assert!(matches!(refused, Err(Some((Reason::QUEUES, 1)))), "{refused:?}");
    holder.wait_for_line("it has 3 queues, this holder 1", 1);
    holder.attach(1);
    register(&mut client, register::CC);
}

#[test]
fn a_thousand_engines_attach() {
    let holder = Holder::start("--queues 4");
    let mut client = holder.connect();
    let file = memory(SIZE);
    for n in 0..300 {
        client.map(GUEST + n * SIZE, SIZE, true, Some((file.as_fd(), 0))).unwrap();
    }
    client.set_vectors(0, &eventfds(5)).unwrap();
    let before = holder.descriptors();
    for _ in 0..1000 {
        let engine = holder.attach(4);
        assert_eq!((engine.ranges.len(), engine.vectors.iter().flatten().count()), (300, 5));
    }
    register(&mut client, register::CC);
    wait_until("the last engine's descriptors to be closed", || holder.descriptors() <= before + 1);
}

#[test]
fn an_engine_that_does_not_read_stops_no_register() {
    let holder = Holder::start("--queues 1");
    let mut client = holder.connect();
    let engine = holder.attach(1);
    // The holder stops listening after so many messages for the engine. Nobody is told about all of them.
    for round in 0..600 {
        set(&mut client, register::CC, if round % 2 == 0 { cc::enable() } else { 0 });
        client.set_vectors(0, &eventfds(1)).unwrap();
    }
    drop(engine);
    let mut engine = holder.attach(1);
    set(&mut client, register::CC, cc::enable());
    assert!(matches!(engine.next(), FromHolder::Control { .. }));
}

#[test]
fn strangers_neither_stop_it_nor_fill_it() {
    let holder = Holder::start("--queues 1");
    let before = holder.descriptors();
    for round in 0..100u32 {
        let mut stranger = UnixStream::connect(holder.socket()).unwrap();
        let bytes: Vec<u8> = (0..200).map(|n| (round * 7 + n) as u8).collect();
        let _ = stranger.write_all(&bytes[..round as usize * 2]);
    }
    for _ in 0..20 {
        // Whoever only looks whether the socket is served.
        drop(UnixStream::connect(holder.socket()).unwrap());
        drop(Engine::connect(&holder.socket()));
    }
    let mut client = holder.connect();
    for command in 0..30 {
        let _ = client.call(Command(if command == 1 { 0 } else { command }), &[0xff; 64], &[]);
    }
    for region in 0..12 {
        for (offset, len) in [(0, 4), (0, 4096), (4095, 2), (u64::MAX, 1), (1 << 40, 4)] {
            let _ = client.read(region, offset, &mut vec![0; len]);
            let _ = client.write(region, offset, &vec![0xff; len]);
        }
    }
    // A guest writes registers as fast as it likes; the log says so once in a while.
    for _ in 0..5000 {
        set(&mut client, register::CSTS, 0xffff_ffff);
    }
    assert!(holder.log().lines().count() < 60, "{}", holder.log());
    drop(client);
    wait_until("the strangers' descriptors to be closed", || holder.descriptors() <= before);
    let again = Client::connect(&holder.socket());
    assert!(again.is_ok(), "{again:?}");
}

#[test]
fn it_never_makes_the_client_wait_for_others() {
    let holder = Holder::start("--queues 1");
    let mut client = holder.connect();
    // Somebody connects as an engine, and says nothing.
    let _silent = Engine::connect(&holder.socket()).unwrap();
    takes_less_than(Duration::from_millis(200), || {
        let begin = Instant::now();
        for _ in 0..100 {
            register(&mut client, register::CSTS);
        }
        begin.elapsed()
    });
}

#[test]
fn it_ends_when_it_is_asked_to() {
    let mut holder = Holder::start("--queues 1");
    let mut client = holder.connect();
    let engine = holder.attach(1);
    assert!(holder.terminate().success());
    holder.wait_for_line("the VM loses the device", 1);
    assert!(matches!(engine.end.receive(true), Err(Gone::Closed)));
    assert!(client.reset().is_err());
    // It cannot remove names, and the next one takes them over.
    let refused = UnixStream::connect(holder.socket()).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    holder.restart("--queues 1");
    holder.connect();
}

#[test]
fn a_holder_that_nobody_uses_ends_if_it_is_to() {
    let mut holder = Holder::start("--queues 1 --transient");
    let client = holder.connect();
    let begin = Instant::now();
    drop(client);
    assert!(holder.wait().success());
    assert!(begin.elapsed() >= Duration::from_secs(9), "{:?}", begin.elapsed());
    assert!(begin.elapsed() < WATCHDOG);
}

#[test]
fn only_one_holder_runs() {
    let holder = Holder::start("--queues 1");
    let said = holder.another();
    assert!(said.contains("has not ended") || said.contains("listens there already"), "{said}");
    holder.connect();
    let said =
        holding::refuses(&["x", "--socket", "/tmp/x.sock", "--backend", "ram", "--size", "1M", "--holder"]);
    assert!(said.contains("--holder: a volume with device = \"blk\" has no holder"), "{said}");
}

#[test]
fn one_without_descriptors_rests_and_goes_on() {
    let holder = Holder::start("--queues 1");
    let client = holder.connect();
    holder.limit_descriptors(true);
    let waits = Engine::connect(&holder.socket()).unwrap();
    holder.wait_for_line("an engine cannot be accepted", 1);
    // It does not try all the time. (One that did would use a whole processor, if it got one.)
    let before = holder.processor_time();
    std::thread::sleep(Duration::from_secs(1));
    let used = holder.processor_time() - before;
    assert!(used < 20, "{used} hundredths of a second");
    holder.limit_descriptors(false);
    drop(waits);
    drop(holder.attach(1));
    drop(client);
}
