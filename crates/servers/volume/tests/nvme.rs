//! A worker that serves NVMe queues, without a VM: the driver's side of the same queues makes the requests.

mod controller;

use controller::{Controller, DATA, Doorbells, Options, QUEUE, becomes_readable, blocks, command};
use ginnel_layout::nvme::{Command, Opcode, PAGE, Range, Status};
use ginnel_shmem::SharedMemory;
use ginnel_volume::backend::{Backend, Controllers};
use ginnel_volume::disk::Disk;
use ginnel_volume::worker::{Event, Order};
use ginnel_volume_control::config::{self, BackendKind, Direct, Lock, OnError, Wait};
use ginnel_volume_control::{Limits, QueueState};
use kit::random::Random;
use kit::wait::{wait_for, wait_until};
use std::collections::BTreeSet;
use std::sync::Arc;
use zerocopy::IntoBytes;

const BYTES: u64 = 16 << 20;
const BLOCK: usize = 512;

/// All combinations in which a worker is used.
const ALL: [(Doorbells, Wait); 6] = [
    (Doorbells::Mapped, Wait::Poll),
    (Doorbells::Trapped, Wait::Poll),
    (Doorbells::Trapped, Wait::Interrupt),
    (Doorbells::Shadow, Wait::Poll),
    (Doorbells::Shadow, Wait::Adaptive),
    (Doorbells::Shadow, Wait::Interrupt),
];

/// Returns options for a file behind a cache, with faults as in `IMAGE.faults`.
fn faulty(folder: &tempfile::TempDir, faults: &str, on_error: OnError) -> Options {
    let path = folder.path().join("image");
    std::fs::write(path.with_extension("faults"), faults).unwrap();
    std::fs::rename(path.with_extension("faults"), folder.path().join("image.faults")).unwrap();
    std::fs::File::create(&path).unwrap().set_len(BYTES).unwrap();
    let spec = config::Disk {
        nvme: None,
        lun: 0,
        backend: BackendKind::Volatile,
        path: Some(path),
        size: None,
        sector: 512,
        read_only: false,
        serial: String::new(),
        direct: Direct::Off,
        write_cache: true,
        discard: true,
        on_error,
        iopoll: false,
        lock: Lock::Off,
    };
    let (backend, bytes) = Backend::open(&spec, 1, &mut Controllers::default()).unwrap();
    let disk = Disk::new(bytes, 512, false, "").holding_errors(on_error == OnError::Hold);
    Options { disk: Arc::new(disk), backend, ..Options::ram(4096, Doorbells::Shadow, Wait::Interrupt) }
}

fn dump(controller: &Controller) -> QueueState {
    controller.worker().dump().remove(0)
}

#[test]
fn data_goes_to_the_disk_and_comes_back() {
    for (doorbells, wait) in ALL {
        let mut it = Controller::start(Options::ram(BYTES, doorbells, wait));
        let mut random = Random::new(7);
        for pages in [1, 2, 3, 40, 128] {
            let data: Vec<u8> = (0..pages * PAGE).map(|_| random.below(256) as u8).collect();
            it.memory.write(Controller::at(DATA), &data);
            let (slba, count) = (random.below(1000), (pages * PAGE) as u32 / 512);
            let write = it.with_pages(blocks(Opcode::WRITE, slba, count), DATA, pages);
            assert_eq!(it.run(write), Status::SUCCESS);
            let read = it.with_pages(blocks(Opcode::READ, slba, count), DATA + 200, pages);
            assert_eq!(it.run(read), Status::SUCCESS);
            let mut back = vec![0; data.len()];
            it.memory.read(Controller::at(DATA + 200), &mut back);
            assert!(back == data, "{doorbells:?}, {wait:?}, {pages} pages");
        }
        assert_eq!(it.run(command(Opcode::FLUSH)), Status::SUCCESS);
        assert_eq!(it.run(blocks(Opcode::WRITE_ZEROES, 0, 1)), Status::SUCCESS);
        let queue = &it.counters.queue_stats()[usize::from(QUEUE)];
        assert_eq!((queue.taken, queue.done, queue.malformed), (12, 12, 0));
    }
}

#[test]
fn a_command_that_is_wrong_gets_its_status() {
    let mut it = Controller::start(Options::ram(BYTES, Doorbells::Mapped, Wait::Poll));
    for (wrong, status) in [
        (command(Opcode(0x7f)), Status::INVALID_OPCODE),
        (blocks(Opcode::COMPARE, 0, 1), Status::INVALID_OPCODE),
        (blocks(Opcode::VERIFY, 0, 1), Status::INVALID_OPCODE),
        (blocks(Opcode::READ, u64::MAX, 2), Status::LBA_RANGE),
        (Command { nsid: 2, ..blocks(Opcode::READ, 0, 1) }, Status::INVALID_NAMESPACE),
        (Command { prp1: 0x1000, ..blocks(Opcode::WRITE, 0, 1) }, Status::DATA_TRANSFER),
        (Command { prp1: 0x10_0001, ..blocks(Opcode::WRITE, 0, 1) }, Status::PRP_OFFSET),
        (blocks(Opcode::READ, 0, 1025), Status::INVALID_FIELD),
    ] {
        assert_eq!(it.run(wrong), status.for_good(), "{wrong:?}");
    }
    assert_eq!(it.run(blocks(Opcode::READ, 0, 1)), Status::SUCCESS);
}

/// The worker and the driver both sleep after each command: a wake-up that is lost would be waited for in vain.
#[test]
fn sleepers_wake_each_other() {
    for (doorbells, wait) in ALL {
        let options = Options { submissions: 3, ..Options::ram(BYTES, doorbells, wait) };
        let mut it = Controller::start(options);
        let mut random = Random::new(3);
        for _ in 0..1000 {
            let count = 1 + random.below(5) as usize;
            for _ in 0..count {
                it.submit(random.below(3) as usize, blocks(Opcode::READ, random.below(1000), 8));
            }
            it.sleep(count);
        }
    }
}

/// The driver takes completions back only when there is no room for more.
#[test]
fn a_full_completion_queue_is_waited_for() {
    for (doorbells, wait) in ALL {
        let options = Options { submissions: 2, completions: 8, ..Options::ram(BYTES, doorbells, wait) };
        let mut it = Controller::start(options);
        for round in 0..200 {
            let mut left = 0;
            for queue in 0..2 {
                for _ in 0..10 {
                    left += usize::from(it.add(queue, command(Opcode::FLUSH)).is_some());
                }
                it.ring(queue);
            }
            assert_eq!(left, 20);
            while left > 0 {
                let mut found = Vec::new();
                wait_until("all the room is used", || {
                    found.extend(it.look());
                    found.len() == left.min(7)
                });
                if round == 0 && left > 7 {
                    let state = dump(&it);
                    assert_eq!(state.state, format!("running: completion queue {QUEUE} is full"));
                }
                left -= found.len();
                it.free();
            }
        }
        assert!(it.reap().is_empty());
    }
}

#[test]
fn what_was_not_taken_stays_for_the_next_start() {
    for (doorbells, wait) in ALL {
        for suspend in [false, true] {
            let mut it = Controller::start(Options::ram(BYTES, doorbells, wait));
            it.submit(0, command(Opcode::FLUSH));
            it.sleep(1);
            it.stop_queues(suspend);
            let cids: BTreeSet<_> = (0..10).map(|_| it.submit(0, command(Opcode::FLUSH))).collect();
            // A worker without queues answers, and takes nothing.
            assert!(it.worker().dump().is_empty() && it.reap().is_empty());
            it.start_queues();
            let found = it.sleep(10).iter().map(|completion| completion.cid).collect();
            assert_eq!(cids, found);
        }
    }
}

/// A request that waits for the limits is in flight. A stop completes it, and a suspended queue keeps it.
#[test]
fn a_stop_completes_what_was_taken() {
    for suspend in [false, true] {
        let mut it = Controller::create(Options::ram(BYTES, Doorbells::Shadow, Wait::Interrupt));
        it.limiter.set(Limits { iops: 1, ..Limits::default() });
        it.start_worker();
        it.start_queues();
        for n in 0..4 {
            it.submit(0, blocks(Opcode::WRITE, n, 1));
        }
        wait_until("a command waits for the limit", || {
            dump(&it).in_flight.iter().any(|request| request.waits_for == "limit")
        });
        let waiting = dump(&it).in_flight[0].clone();
        assert_eq!((waiting.operation.as_str(), waiting.length, waiting.disk), ("write", 512, 0));
        let before = it.reap().len();
        it.stop_queues(suspend);
        let taken = it.counters.queue_stats()[usize::from(QUEUE)].taken as usize;
        let completed = before + it.reap().len();
        assert_eq!(completed, taken - usize::from(suspend));
        it.limiter.set(Limits::default());
        it.start_queues();
        it.sleep(4 - completed);
    }
}

#[test]
fn a_predecessors_commands_are_completed_once() {
    for (doorbells, wait) in ALL {
        let mut it = Controller::create(Options { submissions: 2, ..Options::ram(BYTES, doorbells, wait) });
        let mut all = BTreeSet::new();
        for n in 0..20 {
            let queue = n % 2;
            all.insert((queue as u16 + QUEUE, it.submit(queue, command(Opcode::FLUSH))));
        }
        let mut predecessor = it.group();
        let taken: Vec<_> = (0..12).map(|_| predecessor.take().unwrap().unwrap()).collect();
        for (ticket, _) in taken.into_iter().step_by(3) {
            predecessor.complete(ticket, Status::SUCCESS, 0);
        }
        // It dies before it calls the driver.
        drop(predecessor);
        it.start_worker();
        it.start_queues();
        // What it had taken is completed before the queues stop.
        it.stop_queues(false);
        let mut found = it.reap();
        assert!(found.len() >= 12, "{} completions", found.len());
        it.start_queues();
        found.extend(it.sleep(20 - found.len()));
        let found: BTreeSet<_> = found.iter().map(|completion| (completion.sqid, completion.cid)).collect();
        assert_eq!(found, all);
        it.stop_queues(false);
        assert!(it.reap().is_empty());
    }
}

#[test]
fn a_predecessor_may_die_before_its_interrupt() {
    for (doorbells, wait) in ALL {
        let mut it = Controller::create(Options::ram(BYTES, doorbells, wait));
        it.submit(0, command(Opcode::FLUSH));
        let mut predecessor = it.group();
        let (ticket, _) = predecessor.take().unwrap().unwrap();
        predecessor.complete(ticket, Status::SUCCESS, 0);
        drop(predecessor);
        it.start_worker();
        it.start_queues();
        it.sleep(1);
    }
}

#[test]
fn a_tail_outside_breaks_the_queues() {
    for (doorbells, wait) in ALL {
        let mut it = Controller::start(Options { submissions: 2, ..Options::ram(BYTES, doorbells, wait) });
        assert_eq!(it.run(command(Opcode::FLUSH)), Status::SUCCESS);
        it.write_tail(1, 64);
        assert!(becomes_readable(&it.error), "the owner of the queues is told");
        let state = dump(&it);
        assert!(state.state.starts_with("broken: ") && state.state.contains("64"), "{}", state.state);
        it.submit(0, command(Opcode::FLUSH));
        // It answers, and takes nothing.
        it.worker().dump();
        it.stop_queues(false);
        assert!(it.reap().is_empty());
    }
}

/// A guest can truncate the file of its memory. The queues and the data are gone then.
#[test]
fn memory_that_disappears_ends_nothing_but_the_queues() {
    for (doorbells, wait) in ALL {
        let mut it = Controller::start(Options::ram(BYTES, doorbells, wait));
        assert_eq!(it.run(blocks(Opcode::READ, 0, 8)), Status::SUCCESS);
        it.file.set_len(0).unwrap();
        it.write_tail(0, 5);
        assert_eq!(wait_for("the worker tells", || it.events.next()), Event::MemoryGone);
        assert!(dump(&it).state.starts_with("broken: "));
        it.stop_queues(false);
    }
}

/// Writes the ranges to the first page of data. Returns the command that deallocates them.
fn deallocate(it: &Controller, ranges: &[(u64, u32)]) -> Command {
    for (n, (slba, blocks)) in ranges.iter().enumerate() {
        let range = Range { attributes: 0, blocks: *blocks, slba: *slba };
        it.memory.write(Controller::at(DATA) + n * size_of::<Range>(), range.as_bytes());
    }
    let count = ranges.len() as u32 - 1;
    Command { cdw10: count, cdw11: Command::AD, ..command(Opcode::DATASET_MANAGEMENT) }
}

#[test]
fn all_ranges_are_deallocated() {
    for (doorbells, wait) in ALL {
        let mut it = Controller::start(Options::ram(BYTES, doorbells, wait));
        let blocks_there = (BYTES as u32) / BLOCK as u32;
        let fill = vec![0xff; 512 << 10];
        it.memory.write(Controller::at(DATA), &fill);
        for n in 0..32 {
            let write = it.with_pages(blocks(Opcode::WRITE, n * 1024, 1024), DATA, 128);
            assert_eq!(it.run(write), Status::SUCCESS);
        }
        // Every second group of 64 blocks.
        let ranges: Vec<_> = (0..256).map(|n| (n * 128, 64)).collect();
        let command = deallocate(&it, &ranges);
        assert_eq!(it.run(command), Status::SUCCESS);
        for n in 0..u64::from(blocks_there / 1024) {
            let read = it.with_pages(blocks(Opcode::READ, n * 1024, 1024), DATA, 128);
            assert_eq!(it.run(read), Status::SUCCESS);
            for block in 0..1024 {
                // The pages of a command descend.
                let page = DATA + 127 - block / 8;
                let mut back = [1; BLOCK];
                it.memory.read(Controller::at(page) + (block % 8) as usize * BLOCK, &mut back);
                let expected = if block % 128 < 64 { 0 } else { 0xff };
                assert!(back == [expected; BLOCK], "block {}", n * 1024 + block);
            }
        }
        let command = deallocate(&it, &[(0, 8), (u64::from(blocks_there), 1), (8, 8)]);
        assert_eq!(it.run(command), Status::LBA_RANGE.for_good());
        // One command is one request, however many ranges it has.
        let stats = it.counters.operation_stats();
        let discards = stats.iter().find(|stat| stat.operation == "discard").unwrap();
        assert_eq!(discards.requests, 2);
    }
}

/// A command with many long ranges delays neither a stop nor other commands for long.
#[test]
fn a_stop_does_not_wait_for_all_ranges() {
    // 40 commands with 4 million parts each.
    let disk = Arc::new(Disk::new(1 << 50, 4096, false, ""));
    let options =
        Options { disk, backend: Backend::Null, ..Options::ram(4096, Doorbells::Mapped, Wait::Poll) };
    let mut it = Controller::start(options);
    for _ in 0..40 {
        let command = deallocate(&it, &[(0, u32::MAX); 256]);
        it.submit(0, command);
    }
    assert_eq!(it.run(command(Opcode::FLUSH)), Status::SUCCESS);
    assert_eq!(dump(&it).in_flight.len(), 40);
    it.stop_queues(false);
    let found = it.reap();
    assert!(found.len() == 40 && found.iter().all(|completion| completion.status() == Status::SUCCESS));
}

#[test]
fn a_failed_command_is_never_a_success() {
    let folder = tempfile::tempdir().unwrap();
    let mut it = Controller::start(faulty(
        &folder,
        "write 4096 512 28\nread 8192 512 5\nflush 0 0 5\n",
        OnError::Report,
    ));
    assert_eq!(it.run(blocks(Opcode::WRITE, 8, 1)), Status::CAPACITY_EXCEEDED.for_good());
    assert_eq!(it.run(blocks(Opcode::READ, 16, 1)), Status::READ_ERROR.for_good());
    assert_eq!(it.run(blocks(Opcode::WRITE, 0, 1)), Status::SUCCESS);
    for _ in 0..3 {
        assert_eq!(it.run(command(Opcode::FLUSH)), Status::WRITE_FAULT.for_good(), "earlier writes are lost");
    }
    let fua = blocks(Opcode::WRITE, 0, 1);
    let fua = Command { cdw12: fua.cdw12 | Command::FUA, ..fua };
    assert_eq!(it.run(fua), Status::WRITE_FAULT.for_good());
    assert!(it.options.disk.has_lost());
}

#[test]
fn a_failed_command_can_wait_for_an_operator() {
    let folder = tempfile::tempdir().unwrap();
    let mut it = Controller::start(faulty(&folder, "write 4096 512 28\n", OnError::Hold));
    let held = it.submit(0, blocks(Opcode::WRITE, 8, 1));
    wait_until("it is held", || dump(&it).in_flight.iter().any(|request| request.waits_for == "operator"));
    assert_eq!(dump(&it).in_flight[0].head, held);
    assert_eq!(it.run(blocks(Opcode::READ, 8, 1)), Status::SUCCESS, "others go on");
    it.worker().send(Order::Resume { fail: true });
    let completion = it.sleep(1)[0];
    assert_eq!((completion.cid, completion.status()), (held, Status::CAPACITY_EXCEEDED.for_good()));
    // A suspended queue leaves it to its successor, and a stopped one does not wait for the operator.
    let held = it.submit(0, blocks(Opcode::WRITE, 8, 1));
    wait_until("it is held", || dump(&it).in_flight.iter().any(|request| request.waits_for == "operator"));
    it.stop_queues(true);
    assert!(it.reap().is_empty());
    it.start_queues();
    wait_until("it is held again", || {
        let state = dump(&it);
        state.in_flight.iter().any(|request| request.head == held && request.waits_for == "operator")
    });
    it.stop_queues(false);
    let completion = it.reap()[0];
    assert_eq!((completion.cid, completion.status()), (held, Status::CAPACITY_EXCEEDED.for_good()));
}
