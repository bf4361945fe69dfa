//! NVMe volumes, with the client of `volume-bench` in the place of QEMU and the guest's driver.

mod server;

use ginnel_layout::nvme::{Command, Opcode, Status as NvmeStatus};
use ginnel_shmem::{Mapping, Protection, SharedMemory};
use ginnel_volume_bench::verify::{Ledger, Since};
use ginnel_volume_bench::workload::{Limit, Outcome, Pattern, Workload, run};
use ginnel_volume_bench::{
    Doorbells, Error, Front, NvmeClient, NvmeOptions, Operation, Request, Slot, Status,
};
use kit::wait::{WATCHDOG, wait_until};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use server::{Server, status};
use std::os::fd::AsFd;
use std::time::Instant;
use zerocopy::FromZeros;

const BYTES: u64 = 16 << 20;
const BLOCK: u64 = 4096;

/// Writes, reads and flushes; verifies all data that it reads.
fn load(client: &mut NvmeClient, sleep: bool) -> Outcome {
    let workload = Workload {
        pattern: Pattern { random: true, reads: 50 },
        depth: 32,
        limit: Limit::Requests(2000),
        threads: 2,
        flush_every: Some(50),
        verify: true,
        sleep,
        patience: WATCHDOG,
        ..Workload::default()
    };
    let outcome = run(client, &workload).unwrap();
    assert_eq!(outcome.failed, 0, "{:?}", outcome.first_failure);
    assert!(outcome.verified > 500 && outcome.flushes.requests > 0);
    outcome
}

#[test]
fn each_way_of_waiting_has_its_doorbells() {
    for (wait, trapped, expected) in [
        ("poll", false, Doorbells::Mapped),
        ("adaptive", false, Doorbells::Shadow),
        ("interrupt", false, Doorbells::Shadow),
        ("poll", true, Doorbells::Trapped),
        ("adaptive", true, Doorbells::Trapped),
    ] {
        let server =
            Server::start(BYTES, &format!("--path IMAGE --nvme --queues 2 --threads 2 --wait {wait}"));
        for interrupts in [false, true] {
            let options = NvmeOptions { queues: 2, trapped, interrupts, ..server.nvme_options() };
            let mut client = NvmeClient::connect(options).unwrap();
            assert_eq!(client.doorbells(), expected, "{wait}");
            let outcome = load(&mut client, interrupts);
            if expected == Doorbells::Mapped {
                assert_eq!(outcome.kicks, 0, "{wait}");
            }
            client.close().unwrap();
        }
        assert_eq!(server.count("failed"), 0, "{}", server.log());
    }
}

#[test]
fn all_kinds_of_requests() {
    let server = Server::start(BYTES, "--path IMAGE --nvme --serial web-1");
    let options = NvmeOptions { buffer: 512 << 10, depth: 4, ..server.nvme_options() };
    let mut client = NvmeClient::connect(options).unwrap();
    let disk = client.disk().clone();
    assert_eq!((disk.bytes, client.serial().unwrap().as_str()), (BYTES, "web-1"));
    assert!(disk.write_cache && disk.discard && disk.write_zeroes && !disk.read_only);
    // From one page to as many as a command can have.
    for pages in [1, 2, 3, 128] {
        let bytes: Vec<u8> = (0..4096 * pages).map(|at| (at / 512 + pages) as u8 | 1).collect();
        client.write(BLOCK, &bytes).unwrap();
        let mut back = vec![0; bytes.len()];
        client.read(BLOCK, &mut back).unwrap();
        assert!(back == bytes, "{pages} pages");
    }
    client.discard(2 * BLOCK, 4096).unwrap();
    client.write_zeroes(3 * BLOCK, 4096, true).unwrap();
    client.write_zeroes(4 * BLOCK, 4096, false).unwrap();
    client.flush().unwrap();
    let mut back = [1; 5 * BLOCK as usize];
    client.read(BLOCK, &mut back).unwrap();
    assert_eq!(back[4096..16384], [0; 12288]);
    assert!(back[..4096].iter().chain(&back[16384..]).all(|byte| *byte != 0));
    let beyond = status(client.read(BYTES - 4096, &mut [0; 8192]));
    assert_eq!(beyond, Status::Nvme(NvmeStatus::LBA_RANGE.for_good().0));
    let odd = client.execute(Request { operation: Operation::Other(0xc0), offset: 0, len: 0 }, &mut []);
    assert_eq!(status(odd), Status::Nvme(NvmeStatus::INVALID_OPCODE.for_good().0));
    client.close().unwrap();
}

#[test]
fn a_disk_that_is_read_only() {
    let server = Server::start(BYTES, "--path IMAGE --nvme --read-only");
    let mut client = server.connect_nvme();
    assert!(client.disk().read_only);
    client.read(0, &mut [0; 4096]).unwrap();
    match status(client.write(0, &[1; 4096])) {
        Status::Nvme(code) => assert_eq!(NvmeStatus(code).code(), NvmeStatus::WRITE_PROTECTED),
        other => panic!("{other}"),
    }
}

/// Claims all slots of the first queue.
fn all_slots(client: &mut NvmeClient) -> Vec<Slot> {
    let queue = client.queue(0);
    std::iter::from_fn(|| queue.claim()).collect()
}

#[test]
fn resets_in_the_middle_of_requests() {
    for wait in ["poll", "adaptive"] {
        let server = Server::start(BYTES, &format!("--path IMAGE --nvme --wait {wait}"));
        let mut client = server.connect_nvme();
        let slots = all_slots(&mut client);
        let mut ledger = Ledger::new(BLOCK as u32, slots.len(), 1);
        let mut block = vec![0; BLOCK as usize];
        for round in 0..30 {
            for (index, slot) in slots.iter().enumerate() {
                ledger.write(index, &mut block);
                client.queue(0).buffer(*slot).write(0, &block);
                let request = Request::write(ledger.offset(index), BLOCK as u32);
                client.queue(0).submit(*slot, request).unwrap();
            }
            client.queue(0).publish().unwrap();
            if round % 2 == 0 { client.reset() } else { client.reset_device() }.unwrap();
            let queue = client.queue(0);
            while queue.submitted() > 0 {
                let done = queue.wait_for_one(WATCHDOG).unwrap();
                assert_eq!(done.status, Status::Ok);
                let index = slots.iter().position(|slot| *slot == done.slot).unwrap();
                ledger.acknowledged(index);
            }
        }
        for (index, slot) in slots.iter().enumerate() {
            let queue = client.queue(0);
            queue.submit(*slot, Request::read(ledger.offset(index), BLOCK as u32)).unwrap();
            queue.publish().unwrap();
            let done = queue.wait_for_one(WATCHDOG).unwrap();
            queue.buffer(done.slot).read(0, &mut block);
            ledger.check(index, &block, Since::Running).unwrap();
        }
        assert_eq!(server.count("panicked"), 0, "{}", server.log());
    }
}

/// Where the tests map more memory into the device.
const ELSEWHERE: u64 = 0x7_0000_0000;

#[test]
fn memory_that_is_taken_away_is_left_alone() {
    const PAGES: usize = 64;
    let len = PAGES * 4096;
    for wait in ["poll", "adaptive"] {
        let server = Server::start(BYTES, &format!("--path IMAGE --nvme --wait {wait}"));
        let mut client = server.connect_nvme();
        client.write(0, &[7; 4096]).unwrap();
        let file = memfd_create("more", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, len as u64).unwrap();
        let memory = Mapping::of_file(&file, 0, len, Protection::ReadWrite).unwrap();
        let slots = all_slots(&mut client);
        let read = |page: usize| Command {
            prp1: ELSEWHERE + 4096 * page as u64,
            // 4096 bytes, whatever the size of a block is.
            cdw12: (4096 / 512) - 1,
            ..command(Opcode::READ)
        };
        assert_eq!(client.disk().block, 512);
        let (mut succeeded, mut failed) = (0, 0);
        for round in 0..40 {
            client.connection().map(ELSEWHERE, len as u64, true, Some((file.as_fd(), 0))).unwrap();
            for (number, slot) in slots.iter().enumerate() {
                client.queue(0).submit_command(*slot, read((round + number) % PAGES)).unwrap();
            }
            client.queue(0).publish().unwrap();
            let id = client.connection().begin_unmap(ELSEWHERE, len as u64).unwrap();
            client.connection().finish(id).unwrap();
            // From now on, nobody but this test writes there.
            memory.zero(0, len);
            while client.queue(0).submitted() > 0 {
                match client.queue(0).wait_for_one(WATCHDOG).unwrap().status {
                    Status::Ok => succeeded += 1,
                    Status::Nvme(code) if NvmeStatus(code).code() == NvmeStatus::DATA_TRANSFER => failed += 1,
                    other => panic!("{other}"),
                }
            }
            let mut bytes = vec![1; len];
            memory.read(0, &mut bytes);
            assert!(
                bytes.iter().all(|byte| *byte == 0),
                "{wait}: memory was written after it was taken away"
            );
        }
        assert_eq!(succeeded + failed, 40 * slots.len());
        slots.into_iter().for_each(|slot| client.queue(0).release(slot));
        load(&mut client, false);
        assert_eq!(server.count("panicked"), 0, "{}", server.log());
    }
}

fn command(opcode: Opcode) -> Command {
    Command { opcode, nsid: 1, ..Command::new_zeroed() }
}

#[test]
fn the_end_of_the_holder_is_the_end_of_the_device() {
    let mut server = Server::start(BYTES, "--path IMAGE --nvme");
    let mut client = server.connect_nvme();
    client.write(0, &[5; 4096]).unwrap();
    server.kill_holder();
    assert!(matches!(client.read(0, &mut [0; 4096]), Err(Error::Gone)));
    wait_until("the engine's end", || !server.is_running());
    server.launch_holder();
    server.restart();
    // As if the device were plugged again.
    client.reconnect_within(WATCHDOG).unwrap();
    wait_for_all(&mut client);
    let mut back = [0; 4096];
    client.read(0, &mut back).unwrap();
    assert_eq!(back, [5; 4096]);
}

fn wait_for_all(client: &mut NvmeClient) {
    let queue = client.queue(0);
    while queue.submitted() > 0 {
        let done = queue.wait_for_one(WATCHDOG).unwrap();
        queue.release(done.slot);
    }
}

#[test]
fn the_next_vm_finds_a_fresh_controller() {
    let server = Server::start(BYTES, "--path IMAGE --nvme --queues 2");
    for round in 0..5 {
        let options = NvmeOptions { queues: 1 + round % 2, ..server.nvme_options() };
        let mut client = NvmeClient::connect_within(options, WATCHDOG).unwrap();
        let slots = all_slots(&mut client);
        for slot in slots {
            client.queue(0).submit(slot, Request::write(BLOCK * slot.index() as u64, 4096)).unwrap();
        }
        client.queue(0).publish().unwrap();
        // It goes with requests in flight, as a VM that is killed.
    }
    assert_eq!(server.count("panicked"), 0, "{}", server.log());
}

/// Flushes on both queues at once.
fn flush_on_both(client: &mut NvmeClient) -> [Status; 2] {
    let mut statuses = [None; 2];
    for queue in client.queues() {
        let slot = queue.claim().unwrap();
        queue.submit(slot, Request::flush()).unwrap();
        queue.publish().unwrap();
    }
    let until = Instant::now() + WATCHDOG;
    while statuses.contains(&None) {
        assert!(Instant::now() < until, "no answer: {statuses:?}");
        for (queue, status) in client.queues().iter_mut().zip(&mut statuses) {
            if let Some(done) = queue.poll().unwrap() {
                *status = Some(done.status);
                queue.release(done.slot);
            }
        }
        std::thread::yield_now();
    }
    statuses.map(Option::unwrap)
}

fn failed(statuses: [Status; 2]) -> bool {
    statuses.iter().all(|status| matches!(status, Status::Nvme(_)))
}

#[test]
fn a_flush_never_lies() {
    let mut server = Server::start(BYTES, "--path IMAGE --backend volatile --nvme --queues 2 --threads 2");
    let mut client = NvmeClient::connect(NvmeOptions { queues: 2, ..server.nvme_options() }).unwrap();
    std::fs::write(server.faults(), "writeback 4096 4096 5\n").unwrap();
    for at in [0, 4096, 8192] {
        client.write(at, &[1; 4096]).unwrap();
    }
    assert!(failed(flush_on_both(&mut client)));
    // The disk works again and no longer reports the error.
    std::fs::write(server.faults(), "").unwrap();
    for _ in 0..2 {
        assert!(failed(flush_on_both(&mut client)));
    }
    // Reads still succeed, and so do writes that need not be durable.
    client.write(4096, &[2; 4096]).unwrap();
    client.read(4096, &mut [0; 4096]).unwrap();
    // A reset of the controller is not a new disk.
    client.reset().unwrap();
    assert!(failed(flush_on_both(&mut client)));
    // Nor is the next process of the volume.
    server.kill();
    server.restart();
    assert!(failed(flush_on_both(&mut client)));
    assert_eq!(server.control(r#"{"op":"reset-errors"}"#).trim(), r#"{"reset":true}"#);
    client.write(4096, &[3; 4096]).unwrap();
    assert_eq!(flush_on_both(&mut client), [Status::Ok; 2]);
    server.kill();
    server.restart();
    let mut back = [0; 4096];
    client.read(4096, &mut back).unwrap();
    assert_eq!(back, [3; 4096]);
}
