//! Requests that are in flight when a queue is stopped: either the old volume or the next one completes each of them,
//! exactly once.

mod front;
mod server;

use front::Guest;
use ginnel_layout::vhost_user::protocol::GET_VRING_BASE_INFLIGHT;
use ginnel_layout::virtio_blk::{RequestHeader, RequestKind};
use ginnel_layout::virtio_scsi::{
    Address, CDB_LEN, CONTROL_QUEUE, CommandHeader, CommandResponse, ControlKind, FIRST_COMMAND_QUEUE,
    TaskFunction, TaskManagement,
};
use ginnel_shmem::SharedMemory;
use ginnel_virtqueue::{Chain, Kind, Segment};
use server::Server;
use std::os::unix::fs::FileExt;
use zerocopy::IntoBytes;

const BLOCK: usize = 4096;
const KINDS: [Kind; 2] = [Kind::Split, Kind::Packed];
/// Flags of a volume whose limit lets one block pass every four minutes. So only requests that are meant to pass do.
const SLOW: &str = "--path IMAGE --direct off --bandwidth 16";
const FAST: &str = "--path IMAGE --direct off";

fn stamp(block: usize) -> [u8; BLOCK] {
    [block as u8 + 1; BLOCK]
}

/// Fills the guest's buffer for a block with that block's stamp, and returns the buffer.
fn data(guest: &Guest, block: usize) -> [Segment; 1] {
    let address = guest.data() + (block * BLOCK) as u64;
    guest.memory.write((address - front::GUEST) as usize, &stamp(block));
    [Segment { address, len: BLOCK as u32, writable: false }]
}

fn write(guest: &mut Guest, block: usize) {
    let sector = (block * BLOCK / 512) as u64;
    let header = RequestHeader { kind: RequestKind::OUT, reserved: 0, sector };
    let data = data(guest, block);
    guest.add(0, block, header.as_bytes(), &data, 1, false);
    guest.kick(0);
}

/// Leaves this number of requests of queue 0 in flight, as a volume does that is killed.
fn predecessor(guest: &Guest, requests: usize) {
    let (mut device, memory) = guest.device(0);
    let mut chain = Chain::new();
    for _ in 0..requests {
        let _ = device.pop(&memory, &mut chain).unwrap().unwrap();
    }
}

/// Returns which of the first blocks of an image hold their stamps.
fn written(server: &Server, blocks: usize) -> Vec<usize> {
    let image = std::fs::File::open(server.image()).unwrap();
    let mut bytes = [0; BLOCK];
    let mut is_written = |block: &usize| {
        image.read_exact_at(&mut bytes, (block * BLOCK) as u64).unwrap();
        bytes == stamp(*block)
    };
    (0..blocks).filter(|block| is_written(block)).collect()
}

fn done(guest: &mut Guest, queue: usize) -> usize {
    std::iter::from_fn(|| guest.poll(queue)).count()
}

/// A queue's base does not mention requests that a killed volume has left in flight. A migrated or saved VM carries
/// only the base, so these requests must be complete when the base is returned.
#[test]
fn requests_left_by_a_killed_volume_are_done_before_the_queue_stops() {
    const LEFT: usize = 8;
    for kind in KINDS {
        let server = Server::start(1 << 20, SLOW);
        let mut guest = Guest::connect_without_queues(&server.socket(), 1, kind, 0);
        guest.open_inflight_region();
        (0..LEFT).for_each(|block| write(&mut guest, block));
        predecessor(&guest, LEFT);
        guest.run(0, None);
        server.wait_for_taken(1);
        guest.stop(0);
        assert_eq!(done(&mut guest, 0), LEFT, "{kind:?}");
        assert_eq!(written(&server, LEFT), Vec::from_iter(0..LEFT), "{kind:?}");
    }
}

/// If the front end hands requests in flight over to the next volume, stopping a queue does not wait for requests that
/// have not been begun, and none of them is executed twice.
#[test]
fn requests_not_begun_are_handed_over() {
    const LEFT: usize = 4;
    const ALL: usize = 10;
    // QEMU disables a queue before it stops it.
    for (kind, disable) in KINDS.into_iter().flat_map(|kind| [(kind, false), (kind, true)]) {
        let stop = |guest: &mut Guest| {
            if disable {
                guest.front.enable_queue(0, false);
            }
            guest.stop(0)
        };
        let (source, destination) = (Server::start(1 << 20, SLOW), Server::start(1 << 20, FAST));
        let mut guest = Guest::connect_without_queues(&source.socket(), 1, kind, GET_VRING_BASE_INFLIGHT);
        guest.open_inflight_region();
        (0..ALL).for_each(|block| write(&mut guest, block));
        predecessor(&guest, LEFT);
        guest.run(0, None);
        source.wait_for_taken(1);
        let base = stop(&mut guest);
        assert_eq!(done(&mut guest, 0), 0, "{kind:?}: nothing has passed the limit");
        // The guest returns to the source for a moment, as after a failed migration.
        guest.start(0);
        source.wait_for_taken(2);
        assert_eq!(stop(&mut guest), base, "{kind:?}");
        guest.move_to(&destination.socket(), GET_VRING_BASE_INFLIGHT);
        guest.run(0, Some(base));
        for _ in 0..ALL {
            assert_eq!(guest.wait().0, 0);
        }
        assert_eq!(done(&mut guest, 0), 0, "{kind:?}: each once");
        assert_eq!(written(&source, ALL), [0; 0], "{kind:?}");
        assert_eq!(written(&destination, ALL), Vec::from_iter(0..ALL), "{kind:?}");
        // The queue continues working.
        guest.stop(0);
        guest.start(0);
        write(&mut guest, 0);
        guest.wait();
    }
}

/// An abort that waits for commands is handed over with them, and is answered after them.
#[test]
fn an_abort_is_handed_over_with_the_commands_it_waits_for() {
    const CONTROL: usize = CONTROL_QUEUE as usize;
    const COMMANDS: usize = FIRST_COMMAND_QUEUE as usize;
    const EACH: usize = 5;
    let lun = Address::bytes(0, 0);
    let scsi = |flags| Server::start(1 << 20, &format!("--device scsi --threads 2 --queues 2 {flags}"));
    for kind in KINDS {
        let (source, destination) = (scsi(SLOW), scsi(FAST));
        let mut guest =
            Guest::connect_without_queues(&source.socket(), COMMANDS + 2, kind, GET_VRING_BASE_INFLIGHT);
        guest.open_inflight_region();
        (0..COMMANDS + 2).for_each(|queue| guest.run(queue, None));
        for block in 0..2 * EACH {
            let mut cdb = [0; CDB_LEN];
            cdb[0] = 0x2a;
            cdb[5] = (block * BLOCK / 512) as u8;
            cdb[8] = (BLOCK / 512) as u8;
            let command = CommandHeader { lun, tag: 7, task_attribute: 0, priority: 0, crn: 0, cdb };
            let (queue, data) = (COMMANDS + block / EACH, data(&guest, block));
            let room = size_of::<CommandResponse>() as u32;
            guest.add(queue, block % EACH, command.as_bytes(), &data, room, false);
            guest.kick(queue);
        }
        // The limits hold one command of each queue.
        source.wait_for_taken(2);
        let function = TaskFunction::LOGICAL_UNIT_RESET;
        let task = TaskManagement { kind: ControlKind::TASK_MANAGEMENT, function, lun, tag: 0 };
        guest.add(CONTROL, 0, task.as_bytes(), &[], 1, false);
        guest.kick(CONTROL);
        source.wait_for_taken(3);
        let bases: Vec<_> = (0..COMMANDS + 2).map(|queue| guest.stop(queue)).collect();
        for queue in 0..COMMANDS + 2 {
            assert_eq!(done(&mut guest, queue), 0, "{kind:?}: queue {queue}");
        }
        assert_eq!(written(&source, 2 * EACH), [0; 0], "{kind:?}");
        guest.move_to(&destination.socket(), GET_VRING_BASE_INFLIGHT);
        // The abort's queue starts last, so that all commands that it waits for are there.
        for (queue, base) in bases.into_iter().enumerate().rev() {
            guest.run(queue, Some(base));
        }
        let mut all = 0;
        while guest.wait().0 != CONTROL {
            all += 1;
        }
        let all = all + done(&mut guest, COMMANDS) + done(&mut guest, COMMANDS + 1);
        assert_eq!(all, 2 * EACH, "{kind:?}: done before the answer");
        assert_eq!(written(&destination, 2 * EACH), Vec::from_iter(0..2 * EACH), "{kind:?}");
    }
}
