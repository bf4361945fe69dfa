//! Task management of a SCSI target. After the answer, the driver considers all of its commands complete and reuses
//! their memory. So no command may still be executing, wherever it was.

mod front;
mod server;

use front::Guest;
use ginnel_layout::virtio_scsi::{
    Address, CDB_LEN, CONTROL_QUEUE, CommandHeader, CommandResponse, ControlKind, FIRST_COMMAND_QUEUE,
    TaskFunction, TaskManagement,
};
use ginnel_shmem::SharedMemory;
use ginnel_virtqueue::{Kind, Segment};
use kit::wait::WATCHDOG;
use server::Server;
use std::os::unix::fs::FileExt;
use std::time::Instant;
use zerocopy::IntoBytes;

const CONTROL: usize = CONTROL_QUEUE as usize;
const COMMANDS: usize = FIRST_COMMAND_QUEUE as usize;
const BLOCK: usize = 4096;
/// Number of commands in a queue when the abort arrives.
const EACH: usize = 12;

/// Writes a block with the data at that block's position in the guest's data area.
fn write(guest: &mut Guest, queue: usize, n: usize, block: usize) {
    let mut cdb = [0; CDB_LEN];
    cdb[0] = 0x2a;
    cdb[2..6].copy_from_slice(&((block * BLOCK / 512) as u32).to_be_bytes());
    cdb[8] = (BLOCK / 512) as u8;
    let header =
        CommandHeader { lun: Address::bytes(0, 0), tag: 7, task_attribute: 0, priority: 0, crn: 0, cdb };
    let data =
        [Segment { address: guest.data() + (block * BLOCK) as u64, len: BLOCK as u32, writable: false }];
    guest.add(queue, n, header.as_bytes(), &data, size_of::<CommandResponse>() as u32, false);
}

fn manage(guest: &mut Guest, function: TaskFunction) {
    let task =
        TaskManagement { kind: ControlKind::TASK_MANAGEMENT, function, lun: Address::bytes(0, 0), tag: 7 };
    guest.add(CONTROL, 0, task.as_bytes(), &[], 1, false);
    guest.kick(CONTROL);
}

/// The data of a block in a round.
fn stamp(round: usize, block: usize) -> Vec<u8> {
    [round as u8 + 1, block as u8].repeat(BLOCK / 2)
}

/// Checks that all commands of two queues are complete, and that the driver can see that, before the abort is answered.
/// This includes commands that the limits hold back, and those behind them in the queues.
fn nothing_is_left(kind: Kind, threads: usize) {
    let flags = "--device scsi --path IMAGE --direct off --queues 2 --iops 200";
    let server = Server::start(1 << 20, &format!("{flags} --threads {threads}"));
    let mut guest = Guest::connect_with(&server.socket(), COMMANDS + 2, kind);
    let data = (guest.data() - front::GUEST) as usize;
    let image = std::fs::File::open(server.image()).unwrap();
    let functions = [
        TaskFunction::ABORT_TASK,
        TaskFunction::ABORT_TASK_SET,
        TaskFunction::CLEAR_TASK_SET,
        TaskFunction::LOGICAL_UNIT_RESET,
        TaskFunction::I_T_NEXUS_RESET,
    ];
    for (round, function) in functions.into_iter().enumerate() {
        for block in 0..2 * EACH {
            guest.memory.write(data + block * BLOCK, &stamp(round, block));
            write(&mut guest, COMMANDS + block / EACH, block % EACH, block);
        }
        guest.kick(COMMANDS);
        guest.kick(COMMANDS + 1);
        manage(&mut guest, function);
        let mut done = 0;
        while guest.wait().0 != CONTROL {
            done += 1;
        }
        for queue in [COMMANDS, COMMANDS + 1] {
            while guest.poll(queue).is_some() {
                done += 1;
            }
        }
        assert_eq!(done, 2 * EACH, "{kind:?}, {function:?}: done when the driver heard that all is");
        // The driver reuses the memory.
        guest.memory.write(data, &[0xee; 2 * EACH * BLOCK]);
        let mut found = vec![0; BLOCK];
        for block in 0..2 * EACH {
            image.read_exact_at(&mut found, (block * BLOCK) as u64).unwrap();
            assert!(found == stamp(round, block), "{kind:?}, {function:?}: block {block}");
        }
    }
}

#[test]
fn nothing_is_left_of_commands_in_split_queues() {
    nothing_is_left(Kind::Split, 1);
    nothing_is_left(Kind::Split, 2);
}

#[test]
fn nothing_is_left_of_commands_in_packed_queues() {
    nothing_is_left(Kind::Packed, 1);
    nothing_is_left(Kind::Packed, 2);
}

/// The abort does not wait for commands that arrive after it, however many there are.
#[test]
fn later_commands_do_not_delay_an_abort() {
    const DEPTH: usize = 64;
    for kind in [Kind::Split, Kind::Packed] {
        let server = Server::start(0, "--device scsi --backend ram --size 1M --threads 1");
        let mut guest = Guest::connect_with(&server.socket(), COMMANDS + 1, kind);
        (0..DEPTH).for_each(|n| write(&mut guest, COMMANDS, n, n));
        guest.kick(COMMANDS);
        manage(&mut guest, TaskFunction::LOGICAL_UNIT_RESET);
        let until = Instant::now() + WATCHDOG;
        let mut more = 0;
        while guest.poll(CONTROL).is_none() {
            assert!(Instant::now() < until, "{kind:?}: no answer, with {more} commands behind the abort");
            // Each completed command is replaced by a new one before the volume looks again.
            while guest.poll(COMMANDS).is_some() {
                write(&mut guest, COMMANDS, more % DEPTH, more % DEPTH);
                guest.kick(COMMANDS);
                more += 1;
            }
        }
        println!("{kind:?}: answered, with {more} commands behind the abort");
    }
}

/// The abort also waits for commands in a stopped queue. The queue can start again with all of them.
#[test]
fn an_abort_waits_for_a_queue_that_is_to_start_again() {
    const QUEUES: usize = COMMANDS + 2;
    for (kind, threads) in [(Kind::Split, 1), (Kind::Split, 2), (Kind::Packed, 1), (Kind::Packed, 2)] {
        let flags = format!("--device scsi --backend ram --size 1M --queues 2 --threads {threads}");
        let server = Server::start(0, &flags);
        let mut guest = Guest::connect_with(&server.socket(), QUEUES, kind);
        (0..QUEUES).for_each(|queue| _ = guest.stop(queue));
        (0..EACH).for_each(|n| write(&mut guest, COMMANDS + 1, n, n));
        guest.kick(COMMANDS + 1);
        manage(&mut guest, TaskFunction::LOGICAL_UNIT_RESET);
        // QEMU does this when a VM is resumed.
        for queue in 0..QUEUES - 1 {
            guest.start(queue);
            // A thread answers control requests between its turns. So by the second answer, each thread has looked at
            // its queues.
            (0..2).for_each(|_| _ = server.control(r#"{"op":"dump"}"#));
            assert!(guest.poll(CONTROL).is_none(), "{kind:?}, {threads} threads, after queue {queue}");
        }
        guest.start(QUEUES - 1);
        let mut done = 0;
        while guest.wait().0 != CONTROL {
            done += 1;
        }
        done += std::iter::from_fn(|| guest.poll(COMMANDS + 1)).count();
        assert_eq!(done, EACH, "{kind:?}, {threads} threads");
    }
}

/// This also holds while the front end changes the queues' resources at any moment.
#[test]
fn an_abort_waits_for_a_queue_that_is_being_changed() {
    const ROUNDS: usize = 200;
    let server = Server::start(0, "--device scsi --backend ram --size 1M --queues 2 --threads 2");
    let mut guest = Guest::connect(&server.socket(), COMMANDS + 2);
    for round in 0..ROUNDS {
        // The commands are published, but the volume is not notified of them.
        (0..EACH).for_each(|n| write(&mut guest, COMMANDS + 1, n, n));
        let _ = guest.queues[COMMANDS + 1].publish();
        guest.change(COMMANDS + 1);
        manage(&mut guest, TaskFunction::ABORT_TASK_SET);
        guest.change(COMMANDS + 1);
        let until = Instant::now() + WATCHDOG;
        while guest.poll(CONTROL).is_none() {
            assert!(Instant::now() < until, "no answer");
            std::thread::yield_now();
        }
        let done = std::iter::from_fn(|| guest.poll(COMMANDS + 1)).count();
        assert_eq!(done, EACH, "round {round}");
    }
}

/// If an abort waits for the commands of a queue, stopping the queue completes them first. Otherwise they would run
/// when the queue starts again, long after the driver has reused their memory.
#[test]
fn stopping_a_queue_first_completes_commands_that_an_abort_waits_for() {
    // All of the commands together would take a day.
    let server = Server::start(0, "--device scsi --backend ram --size 1M --threads 1 --bandwidth 512");
    let mut guest = Guest::connect(&server.socket(), COMMANDS + 1);
    (0..EACH).for_each(|n| write(&mut guest, COMMANDS, n, n));
    guest.kick(COMMANDS);
    server.wait_for_taken(1);
    manage(&mut guest, TaskFunction::ABORT_TASK_SET);
    server.wait_for_taken(2);
    // The thread answers control requests between its turns, so by now it knows about the abort.
    server.control(r#"{"op":"dump"}"#);
    let base = guest.front.stop_queue(COMMANDS as u32);
    assert_eq!(base as usize, EACH, "all of its commands");
    let done: Vec<_> = (0..=EACH).map(|_| guest.wait().0).collect();
    assert_eq!(done.iter().filter(|queue| **queue == CONTROL).count(), 1, "{done:?}");
}
