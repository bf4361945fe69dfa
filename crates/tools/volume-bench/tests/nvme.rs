//! The NVMe client with a small controller, which also fails and goes away.

mod controller;

use controller::{BLOCKS, Manner, serve};
use ginnel_layout::nvme::{Opcode, Status as NvmeStatus};
use ginnel_volume_bench::workload::{Limit, Outcome, Pattern, Workload, run};
use ginnel_volume_bench::{Doorbells, Error, Front, NvmeClient, NvmeOptions, Operation, Request, Status};
use kit::wait::WATCHDOG;
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::Duration;
use tempfile::TempDir;

struct Test {
    _dir: TempDir,
    socket: PathBuf,
    controller: JoinHandle<Vec<u8>>,
}

fn start(manners: &[Manner]) -> Test {
    let dir = TempDir::new().unwrap();
    let socket = dir.path().join("socket");
    let controller = serve(&socket, manners);
    Test { _dir: dir, socket, controller }
}

fn verified(client: &mut NvmeClient, requests: u64, sleep: bool) -> Outcome {
    let workload = Workload {
        pattern: Pattern { random: true, reads: 50 },
        block: 4096,
        depth: 16,
        limit: Limit::Requests(requests),
        flush_every: Some(20),
        verify: true,
        sleep,
        reconnect: Some(WATCHDOG),
        patience: WATCHDOG,
        ..Workload::default()
    };
    let outcome = run(client, &workload).unwrap();
    assert_eq!(outcome.failed, 0, "{:?}", outcome.first_failure);
    assert!(outcome.verified > requests / 4 && outcome.flushes.requests > 0);
    outcome
}

#[test]
fn all_kinds_of_doorbells_and_requests() {
    for (manner, trapped, expected) in [
        (Manner::MAPPED, false, Doorbells::Mapped),
        (Manner::SHADOW, false, Doorbells::Shadow),
        (Manner::MAPPED, true, Doorbells::Trapped),
        (Manner::SHADOW, true, Doorbells::Trapped),
    ] {
        let test = start(&[manner]);
        let options = NvmeOptions { queues: 2, depth: 16, trapped, ..NvmeOptions::new(&test.socket) };
        let mut client = NvmeClient::connect(options).unwrap();
        assert_eq!(client.doorbells(), expected);
        let disk = client.disk().clone();
        assert_eq!((disk.bytes, disk.block, disk.queues), (BLOCKS * 512, 512, 4));
        assert!(disk.write_cache && disk.discard && disk.write_zeroes && !disk.read_only);
        assert_eq!(client.serial().unwrap(), "small");
        let outcome = verified(&mut client, 1000, false);
        match expected {
            Doorbells::Mapped => assert_eq!(outcome.kicks, 0),
            _ => assert!(outcome.kicks > 0),
        }
        // Buffers of one, two, and more pages.
        for pages in [1, 2, 3, 16] {
            let bytes: Vec<u8> = (0..4096 * pages).map(|at| (at / 512 + pages) as u8).collect();
            client.write(512, &bytes).unwrap();
            let mut back = vec![0; bytes.len()];
            client.read(512, &mut back).unwrap();
            assert_eq!(back, bytes);
        }
        client.discard(1024, 512).unwrap();
        client.write_zeroes(2048, 512, true).unwrap();
        let mut back = [1; 2048];
        client.read(1024, &mut back).unwrap();
        assert_eq!((&back[..512], &back[1024..1536]), (&[0; 512][..], &[0; 512][..]));
        assert!(back[512..1024].iter().all(|byte| *byte != 0));
        client.close().unwrap();
        test.controller.join().unwrap();
    }
}

#[test]
fn a_client_sleeps_until_an_interrupt_comes() {
    for manner in [Manner::MAPPED, Manner::SHADOW] {
        let test = start(&[manner]);
        let options = NvmeOptions { interrupts: true, ..NvmeOptions::new(&test.socket) };
        let mut client = NvmeClient::connect(options).unwrap();
        verified(&mut client, 300, true);
    }
}

#[test]
fn requests_in_flight_survive_a_reset_and_the_loss_of_the_device() {
    let short = Manner { ends_after: 777, ..Manner::SHADOW };
    let test = start(&[short, Manner { ends_after: 500, ..Manner::MAPPED }, Manner::SHADOW]);
    let mut client = NvmeClient::connect(NvmeOptions::new(&test.socket)).unwrap();
    let outcome = verified(&mut client, 2000, false);
    assert_eq!(outcome.reconnects, 2);
    for by_register in [true, false] {
        let queue = client.queue(0);
        let slots: Vec<_> = (0..8).map(|_| queue.claim().unwrap()).collect();
        for slot in &slots {
            queue.buffer(*slot).write(0, &[slot.index() as u8; 512]);
            queue.submit(*slot, Request::write(512 * slot.index() as u64, 512)).unwrap();
        }
        queue.publish().unwrap();
        if by_register { client.reset() } else { client.reset_device() }.unwrap();
        let queue = client.queue(0);
        assert_eq!(queue.submitted(), 8);
        while queue.submitted() > 0 {
            let done = queue.wait_for_one(WATCHDOG).unwrap();
            assert_eq!(done.status, Status::Ok);
            queue.release(done.slot);
        }
    }
    verified(&mut client, 200, false);
    client.close().unwrap();
    test.controller.join().unwrap();
}

#[test]
fn failures_are_told() {
    let nowhere = NvmeClient::connect(NvmeOptions::new("/nowhere/socket")).err().unwrap();
    assert!(matches!(nowhere, Error::Connect { .. }), "{nowhere}");
    let fails = |admin, opcode, status| Manner { fails: Some((admin, opcode, status)), ..Manner::MAPPED };
    let test = start(&[
        fails(true, Opcode::IDENTIFY, NvmeStatus::INTERNAL),
        fails(true, Opcode::CREATE_SUBMISSION, NvmeStatus::INVALID_QUEUE_SIZE),
        fails(false, Opcode::WRITE, NvmeStatus::WRITE_FAULT),
    ]);
    let options = NvmeOptions { patience: Duration::from_secs(10), ..NvmeOptions::new(&test.socket) };
    for status in ["0x6", "0x102"] {
        let error = NvmeClient::connect(options.clone()).err().unwrap();
        assert!(error.to_string().contains(status), "{error}");
    }
    let mut client = NvmeClient::connect(options).unwrap();
    let error = client.write(0, &[1; 512]).unwrap_err();
    assert!(matches!(error, Error::Failed { status: Status::Nvme(0x280), .. }), "{error}");
    let beyond = client.read(BLOCKS * 512, &mut [0; 512]).unwrap_err();
    assert!(beyond.to_string().contains("status type 0, code 0x80"), "{beyond}");
    let odd = client.execute(Request { operation: Operation::Other(0x7f), offset: 0, len: 0 }, &mut []);
    assert!(odd.unwrap_err().to_string().contains("code 0x01"));
    client.read(0, &mut [0; 100]).unwrap_err();
    client.close().unwrap();
    test.controller.join().unwrap();
}

#[test]
fn options_that_are_impossible() {
    let plain = || NvmeOptions::new("/nowhere");
    for options in [
        NvmeOptions { queues: 0, ..plain() },
        NvmeOptions { queues: 65, ..plain() },
        NvmeOptions { depth: 0, ..plain() },
        NvmeOptions { depth: 64, entries: Some(64), ..plain() },
        NvmeOptions { buffer: 3 << 20, ..plain() },
    ] {
        assert!(matches!(NvmeClient::connect(options), Err(Error::Invalid(_))));
    }
    for options in [
        NvmeOptions { queues: 5, ..plain() },
        NvmeOptions { depth: 300, ..plain() },
        NvmeOptions { buffer: 256 << 10, ..plain() },
    ] {
        let test = start(&[Manner::SHADOW]);
        let error = NvmeClient::connect(NvmeOptions { socket: test.socket.clone(), ..options });
        assert!(matches!(error, Err(Error::Unsupported(_))));
    }
}
