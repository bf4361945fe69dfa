//! Hostile NVMe drivers: whatever a guest writes into registers, doorbells, queues and commands, the volume keeps running, every
//! command is completed, and after a reset the disk works.

mod server;

use ginnel_layout::nvme::{Aqa, Command, Opcode, Status as NvmeStatus, cc, csts, register};
use ginnel_layout::vfio_user::pci;
use ginnel_vfio_user::client::Client;
use ginnel_volume_bench::workload::{Limit, Pattern, Workload, run};
use ginnel_volume_bench::{Error, NvmeClient, NvmeOptions, Slot};
use kit::random::Random;
use kit::wait::{WATCHDOG, wait_until};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use server::Server;
use std::os::fd::AsFd;
use zerocopy::FromZeros;

const BYTES: u64 = 16 << 20;

/// Both kinds of doorbells.
const WAYS: [&str; 2] = ["poll", "adaptive"];

fn start(wait: &str) -> Server {
    Server::start(BYTES, &format!("--path IMAGE --nvme --queues 2 --threads 2 --wait {wait}"))
}

fn connect(server: &Server) -> NvmeClient {
    NvmeClient::connect(NvmeOptions { queues: 2, ..server.nvme_options() }).unwrap()
}

/// Checks that the volume is well and the disk works.
fn works(server: &mut Server, client: &mut NvmeClient) {
    let workload = Workload {
        depth: client.queue(0).slots().min(16) as u16,
        pattern: Pattern { random: true, reads: 50 },
        limit: Limit::Requests(200),
        flush_every: Some(20),
        verify: true,
        patience: WATCHDOG,
        ..Workload::default()
    };
    let outcome = run(client, &workload).unwrap();
    assert_eq!(outcome.failed, 0, "{:?}", outcome.first_failure);
    assert!(server.is_running(), "{}", server.log());
    assert_eq!(server.count("panicked"), 0, "{}", server.log());
}

fn command(opcode: Opcode) -> Command {
    Command { opcode, nsid: 1, ..Command::new_zeroed() }
}

/// Makes commands of every opcode, of which each field is often nearly right.
struct Commands {
    random: Random,
    /// A page that belongs to nothing else.
    page: u64,
}

impl Commands {
    fn of(&mut self, opcode: u8) -> Command {
        let one_of = |random: &mut Random, words: &[u64]| words[random.below(words.len() as u64) as usize];
        let random = &mut self.random;
        let any = random.next();
        let addresses =
            [self.page, self.page + 4, self.page + 1, self.page + 4088, 0, any, u64::MAX - 7, any & !4095];
        let mut small = || one_of(random, &[0, 0, 1, 7, 0xffff, any >> 32, any & 0xff]) as u32;
        Command {
            flags: if any.is_multiple_of(4) { (any >> 8) as u8 } else { 0 },
            nsid: [1, 1, 0, 2, u32::MAX, any as u32][(any >> 16) as usize % 6],
            cdw2: small(),
            mptr: any.rotate_left(7),
            cdw10: small(),
            cdw11: small(),
            cdw12: small(),
            cdw13: small(),
            cdw14: small(),
            prp1: one_of(&mut self.random, &addresses),
            prp2: one_of(&mut self.random, &addresses),
            ..command(Opcode(opcode))
        }
    }
}

/// Claims all slots of the first queue.
fn all_slots(client: &mut NvmeClient) -> Vec<Slot> {
    let queue = client.queue(0);
    std::iter::from_fn(|| queue.claim()).collect()
}

#[test]
fn commands_of_every_opcode() {
    for wait in WAYS {
        let mut server = start(wait);
        let mut client = connect(&server);
        let slots = all_slots(&mut client);
        let page = client.queue(0).guest_address(slots[0]);
        let mut commands = Commands { random: Random::new(0xbad), page };
        let mut opcodes = (0..=u8::MAX).cycle().take(256 * 12);
        let mut completed = 0;
        // The first slot has the page.
        let mut free = slots[1..].to_vec();
        loop {
            while let Some(slot) = free.pop() {
                let Some(opcode) = opcodes.next() else { break };
                let command = commands.of(opcode);
                client.queue(0).submit_command(slot, command).unwrap();
            }
            client.queue(0).publish().unwrap();
            if client.queue(0).submitted() == 0 {
                break;
            }
            let done = client.queue(0).wait_for_one(WATCHDOG).unwrap();
            completed += 1;
            free.push(done.slot);
        }
        assert_eq!(completed, 256 * 12);
        slots.into_iter().for_each(|slot| client.queue(0).release(slot));
        works(&mut server, &mut client);
    }
}

#[test]
fn admin_commands_of_every_opcode() {
    for wait in WAYS {
        let mut server = start(wait);
        let mut client = connect(&server);
        let slot = client.queue(0).claim().unwrap();
        let page = client.queue(0).guest_address(slot);
        let mut commands = Commands { random: Random::new(0xad), page };
        for opcode in (0..=u8::MAX).cycle().take(256 * 6) {
            // An Asynchronous Event Request stays.
            if Opcode(opcode) != Opcode::ASYNC_EVENT {
                client.admin(commands.of(opcode)).unwrap();
            }
        }
        client.queue(0).release(slot);
        client.reset().unwrap();
        works(&mut server, &mut client);
    }
}

#[test]
fn queues_that_cannot_be() {
    let mut server = start("adaptive");
    let mut client = connect(&server);
    let slot = client.queue(0).claim().unwrap();
    let page = client.queue(0).guest_address(slot);
    let outside = !4095;
    let create = |opcode, id: u32, size: u32, base, how: u32| Command {
        nsid: 0,
        prp1: base,
        cdw10: id | (size - 1) << 16,
        cdw11: how | 1,
        ..command(opcode)
    };
    let (cq, sq) = (Opcode::CREATE_COMPLETION, Opcode::CREATE_SUBMISSION);
    let nvme = [
        (create(cq, 0, 8, page, 0), NvmeStatus::INVALID_QUEUE_ID),
        (create(cq, 1, 8, page, 0), NvmeStatus::INVALID_QUEUE_ID),
        (create(cq, 3, 8, page, 0), NvmeStatus::INVALID_QUEUE_ID),
        (create(cq, 0xffff, 8, page, 0), NvmeStatus::INVALID_QUEUE_ID),
        (create(sq, 0, 8, page, 1 << 16), NvmeStatus::INVALID_QUEUE_ID),
        (create(sq, 1, 8, page, 1 << 16), NvmeStatus::INVALID_QUEUE_ID),
        (create(sq, 3, 8, page, 1 << 16), NvmeStatus::INVALID_QUEUE_ID),
        (Command { cdw10: 0, ..command(Opcode::DELETE_SUBMISSION) }, NvmeStatus::INVALID_QUEUE_ID),
        (Command { cdw10: 9, ..command(Opcode::DELETE_SUBMISSION) }, NvmeStatus::INVALID_QUEUE_ID),
        (Command { cdw10: 9, ..command(Opcode::DELETE_COMPLETION) }, NvmeStatus::INVALID_QUEUE_ID),
        (Command { cdw10: 1, ..command(Opcode::DELETE_COMPLETION) }, NvmeStatus::INVALID_QUEUE_DELETION),
    ];
    let told = |client: &mut NvmeClient, command| client.admin(command).unwrap().status().code();
    for (command, expected) in nvme {
        assert_eq!(told(&mut client, command), expected, "{command:?}");
    }
    // From here on, queue 2 does not exist.
    for opcode in [Opcode::DELETE_SUBMISSION, Opcode::DELETE_COMPLETION] {
        assert_eq!(
            told(&mut client, Command { cdw10: 2, ..command(opcode) }),
            NvmeStatus::SUCCESS,
            "{opcode:?}"
        );
    }
    for command in [
        create(cq, 2, 1, page, 0),
        create(cq, 2, 65536, page, 0),
        create(cq, 2, 8, page, 77 << 16 | 2),
        create(cq, 2, 8, page + 8, 0),
        create(cq, 2, 8, outside, 0),
        // Not contiguous.
        Command { cdw11: 0, ..create(cq, 2, 8, page, 0) },
        create(sq, 2, 8, page, 2 << 16),
        create(sq, 2, 8, page, 0),
        create(sq, 2, 8, page, 0xffff << 16),
    ] {
        assert_ne!(told(&mut client, command), NvmeStatus::SUCCESS, "{command:?}");
    }
    client.queue(0).release(slot);
    client.reset().unwrap();
    works(&mut server, &mut client);
}

#[test]
fn event_requests_beyond_the_limit() {
    let mut server = start("adaptive");
    let mut client = connect(&server);
    let cids: Vec<_> = (0..10).map(|_| client.submit_admin(command(Opcode::ASYNC_EVENT)).unwrap()).collect();
    let mut refused = 0;
    wait_until("the refusals", || {
        while let Some(completion) = client.poll_admin().unwrap() {
            assert!(cids.contains(&completion.cid));
            assert_eq!(completion.status().code(), NvmeStatus::ASYNC_EVENT_LIMIT);
            refused += 1;
        }
        refused == cids.len() - usize::from(ginnel_nvme::identify::ASYNC_EVENTS)
    });
    // They stay with the next process, which does not forget them or take more.
    server.kill();
    server.restart();
    let one_more = client.submit_admin(command(Opcode::ASYNC_EVENT)).unwrap();
    let mut completion = None;
    wait_until("the refusal", || {
        completion = client.poll_admin().unwrap();
        completion.is_some()
    });
    assert_eq!(completion.unwrap().cid, one_more);
    works(&mut server, &mut client);
}

#[test]
fn lists_that_loop() {
    let mut server = start("adaptive");
    let mut client =
        NvmeClient::connect(NvmeOptions { queues: 2, buffer: 512 << 10, depth: 4, ..server.nvme_options() })
            .unwrap();
    let (list, slot) = (client.queue(0).claim().unwrap(), client.queue(0).claim().unwrap());
    let page = client.queue(0).guest_address(list);
    for (entries, begin) in [
        // Every entry names the list itself.
        (vec![page; 512], 0),
        // The list begins at its last entry, which names the list.
        (vec![page; 512], 511),
        // The last entry names itself.
        (vec![page + 8 * 511; 512], 511),
        (vec![u64::MAX; 512], 0),
        (vec![page + 1; 512], 0),
        (vec![0; 512], 0),
    ] {
        let bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.to_le_bytes()).collect();
        client.queue(0).buffer(list).write(0, &bytes);
        for blocks in [1024, 1016, 17, 9] {
            let write =
                Command { prp1: page, prp2: page + 8 * begin, cdw12: blocks - 1, ..command(Opcode::WRITE) };
            client.queue(0).submit_command(slot, write).unwrap();
            client.queue(0).publish().unwrap();
            client.queue(0).wait_for_one(WATCHDOG).unwrap();
        }
    }
    [list, slot].into_iter().for_each(|slot| client.queue(0).release(slot));
    works(&mut server, &mut client);
}

/// Waits until the controller says that it has failed.
fn wait_for_failure(client: &NvmeClient) {
    wait_until("CSTS.CFS", || {
        let mut csts = [0; 4];
        client.connection().read(pci::BAR0, register::CSTS as u64, &mut csts).unwrap();
        u32::from_le_bytes(csts) & csts::CFS != 0
    });
}

#[test]
fn doorbells_beyond_the_queue() {
    for wait in WAYS {
        let mut server = start(wait);
        let mut client =
            NvmeClient::connect(NvmeOptions { queues: 2, trapped: true, ..server.nvme_options() }).unwrap();
        // A mapped controller has a page for each doorbell.
        let stride = if wait == "poll" { 4096 } else { 4 };
        // Tails are looked at when they are written; heads of completion queues, when room is needed.
        for (doorbell, value, fails) in [
            (2, 128, true),
            (2, u32::MAX, true),
            (4, 60_000, true),
            (0, 32, true),
            (3, 128, false),
            (3, 5, false),
            (1, 999, false),
        ] {
            let at = 0x1000 + doorbell * stride;
            client.connection().write(pci::BAR0, at, &value.to_le_bytes()).unwrap();
            if fails {
                wait_for_failure(&client);
            }
            client.reset().unwrap();
            works(&mut server, &mut client);
        }
        // Those of queues that do not exist, and writes that are not words.
        for at in [0x1000 + 6 * stride, 0x1000 + 7 * stride, 0x1001, 0x1002] {
            client.connection().post(pci::BAR0, at, &7u32.to_le_bytes()).unwrap();
            client.connection().post(pci::BAR0, at, &[7; 2]).unwrap();
            client.connection().post(pci::BAR0, at, &[7; 8]).unwrap();
        }
        works(&mut server, &mut client);
    }
}

#[test]
fn registers_with_any_value() {
    let mut random = Random::new(0x4e9);
    for wait in WAYS {
        let mut server = start(wait);
        let mut client = connect(&server);
        for _ in 0..20 {
            for _ in 0..50 {
                let at = random.below(0x40);
                let len = 1 << random.below(4);
                client.connection().post(pci::BAR0, at, &random.next().to_le_bytes()[..len]).unwrap();
                let mut bytes = [0; 4];
                client.connection().read(pci::BAR0, random.below(0x1000 - 4), &mut bytes).unwrap();
            }
            client.reset_device().unwrap();
        }
        works(&mut server, &mut client);
    }
}

#[test]
fn queues_whose_memory_goes() {
    for wait in WAYS {
        let mut server = start(wait);
        let mut client = connect(&server);
        let slots = all_slots(&mut client);
        for slot in &slots {
            client.queue(0).submit(*slot, ginnel_volume_bench::Request::read(0, 4096)).unwrap();
        }
        client.queue(0).publish().unwrap();
        // The range of all that the client has: see its module `memory`.
        client.connection().unmap(0, u64::MAX).unwrap();
        client.submit_admin(command(Opcode::IDENTIFY)).unwrap();
        drop(client);
        let mut client =
            NvmeClient::connect_within(NvmeOptions { queues: 2, ..server.nvme_options() }, WATCHDOG).unwrap();
        works(&mut server, &mut client);
    }
}

/// QEMU with private memory sends a file too, but the guest's writes are not in it.
#[test]
fn memory_that_is_not_shared() {
    let server = start("adaptive");
    let mut client = Client::connect(&server.socket()).unwrap();
    client.set_patience(Some(WATCHDOG)).unwrap();
    let file = memfd_create("private", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, 1 << 20).unwrap();
    fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    client.map(0, 1 << 20, true, Some((file.as_fd(), 0))).unwrap();
    client.write(pci::CONFIG, 4, &[6, 4]).unwrap();
    client.write(pci::BAR0, register::AQA as u64, &Aqa::new(32, 32).0.to_le_bytes()).unwrap();
    client.write(pci::BAR0, register::ASQ as u64, &0x1000u64.to_le_bytes()).unwrap();
    client.write(pci::BAR0, register::ACQ as u64, &0x2000u64.to_le_bytes()).unwrap();
    client.write(pci::BAR0, register::CC as u64, &cc::enable().to_le_bytes()).unwrap();
    let mut read = || {
        let mut csts = [0; 4];
        client.read(pci::BAR0, register::CSTS as u64, &mut csts).unwrap();
        u32::from_le_bytes(csts)
    };
    wait_until("CSTS.RDY", || read() & csts::RDY != 0);
    // The driver has written a command into its own copy.
    client.write(pci::BAR0, 0x1000, &1u32.to_le_bytes()).unwrap();
    server.wait_for_line("not shared", 1);
    wait_until("CSTS.CFS", || {
        let mut csts = [0; 4];
        client.read(pci::BAR0, register::CSTS as u64, &mut csts).unwrap();
        u32::from_le_bytes(csts) & csts::CFS != 0
    });
    assert_eq!(server.count("memory-backend-memfd,share=on"), 1, "{}", server.log());
}

/// A client that goes in the middle of anything leaves nothing behind.
#[test]
fn drivers_that_go() {
    for wait in WAYS {
        let mut server = start(wait);
        for round in 0..20 {
            let mut client =
                NvmeClient::connect_within(NvmeOptions { queues: 2, ..server.nvme_options() }, WATCHDOG)
                    .unwrap();
            let slots = all_slots(&mut client);
            for slot in slots.iter().take(round) {
                client.queue(0).submit(*slot, ginnel_volume_bench::Request::read(0, 4096)).unwrap();
            }
            match client.queue(0).publish() {
                Ok(()) | Err(Error::Gone) => {}
                Err(error) => panic!("{error}"),
            }
        }
        let mut client =
            NvmeClient::connect_within(NvmeOptions { queues: 2, ..server.nvme_options() }, WATCHDOG).unwrap();
        works(&mut server, &mut client);
    }
}
