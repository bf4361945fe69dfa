//! Runs operations of a driver and a device on a completion queue and its submission queues, and compares them with simple records. With
//! scribbles, the results are not compared, but each call must return, and stay within the memory.

pub mod rig;

use super::Op;
use ginnel_layout::nvme::{Command, Opcode, Status};
use ginnel_nvme::{QueueGroup, Ticket};
use ginnel_shmem::{Mapping, SharedMemory};
use rig::{COMPLETION, Driver, Mode, Rig};
use std::collections::VecDeque;
use zerocopy::FromZeros;

/// Commands that a queue can have outstanding: more than some queues have entries.
const COMMANDS: u16 = 12;

struct Taken {
    queue: usize,
    cid: u16,
    tag: u32,
    ticket: Ticket,
    parked: bool,
}

struct World {
    rig: Rig,
    memory: Mapping,
    doorbells: Mapping,
    state: Mapping,
    driver: Driver<Mapping>,
    group: QueueGroup<Mapping>,
    /// Commands of each queue, by identifier and tag: submitted; shown.
    submitted: Vec<VecDeque<(u16, u32)>>,
    shown: Vec<VecDeque<(u16, u32)>>,
    taken: Vec<Taken>,
    /// Completions that are posted, and those that are reaped but not released.
    posted: VecDeque<(usize, u16, Status, u32)>,
    reaped: usize,
    tags: u32,
    /// Whether the device sleeps and has not been woken, and whether it waits for room.
    sleeps: bool,
    waits_for_room: bool,
    /// Whether completions were posted since the last publish.
    unpublished: bool,
}

/// Runs the operations. Each result must agree with the records.
pub fn run(choice: u8, ops: impl IntoIterator<Item = Op>) {
    let mut world = World::new(choice);
    for op in ops {
        world.step(op);
    }
}

/// Runs the operations and the scribbles among them. The results are not compared.
pub fn scribble(choice: u8, ops: impl IntoIterator<Item = Op>) {
    let mut world = World::new(choice);
    for op in ops {
        world.spoil(op);
    }
}

impl World {
    fn new(choice: u8) -> Self {
        let rig = Rig::choose(choice);
        let (memory, doorbells, state) = (rig.memory(), rig.doorbells(), rig.state_memory());
        rig.create(&memory, &doorbells, &state);
        let driver = rig.driver(&memory, &doorbells, COMMANDS);
        let mut group = rig.group(&memory, &doorbells, &state).unwrap();
        assert!(group.publish(), "a predecessor may owe an interrupt");
        Self {
            memory,
            doorbells,
            state,
            driver,
            group,
            submitted: vec![VecDeque::new(); rig.submissions.into()],
            shown: vec![VecDeque::new(); rig.submissions.into()],
            taken: Vec::new(),
            posted: VecDeque::new(),
            reaped: 0,
            tags: 0,
            sleeps: false,
            waits_for_room: false,
            unpublished: false,
            rig,
        }
    }

    /// Returns a command whose unused words are not zero.
    fn command(&mut self) -> Command {
        self.tags += 1;
        Command {
            opcode: Opcode::READ,
            cdw2: !0,
            mptr: !0,
            cdw10: self.tags,
            cdw15: !self.tags,
            ..Command::new_zeroed()
        }
    }

    /// Returns the number of commands that can be taken before completions are released.
    fn room(&self) -> usize {
        let parked = self.taken.iter().filter(|taken| taken.parked).count();
        (usize::from(self.rig.completions) - 1)
            .saturating_sub(self.posted.len() + self.reaped + self.taken.len() - parked)
    }

    fn there(&self) -> usize {
        self.shown.iter().map(VecDeque::len).sum()
    }

    /// Returns how many slots of a queue are free.
    fn slots(&self, queue: usize) -> usize {
        usize::from(self.rig.slots) - self.taken.iter().filter(|taken| taken.queue == queue).count()
    }

    fn can_take(&self) -> bool {
        self.room() > 0 && (0..self.shown.len()).any(|i| !self.shown[i].is_empty() && self.slots(i) > 0)
    }

    fn step(&mut self, Op { code, a, b }: Op) {
        let queue = usize::from(a) % usize::from(self.rig.submissions);
        match code % 12 {
            0..=2 => {
                let command = self.command();
                let room = self.driver.submissions[queue].room();
                let cid = self.driver.submit(queue, command);
                assert_eq!(cid.is_some(), room > 0);
                if let Some(cid) = cid {
                    self.submitted[queue].push_back((cid, self.tags));
                }
            }
            3 | 4 => {
                let new = !self.submitted[queue].is_empty();
                let kick = self.driver.ring(queue);
                assert!(!kick || new, "a kick for nothing");
                assert!(kick || !(new && self.sleeps && !self.waits_for_room), "the device sleeps on");
                self.sleeps &= !kick;
                let mut submitted = std::mem::take(&mut self.submitted[queue]);
                self.shown[queue].append(&mut submitted);
            }
            5 | 6 => self.take(),
            7 => {
                let unparked: Vec<_> = (0..self.taken.len()).filter(|i| !self.taken[*i].parked).collect();
                if unparked.is_empty() {
                    return;
                }
                let taken = self.taken.swap_remove(unparked[usize::from(a) % unparked.len()]);
                let (status, result) = (Status(b & 0x7fff), u32::from(b) << 8);
                assert_eq!(taken.ticket.cid(), taken.cid);
                assert_eq!(usize::from(self.group.queue_of(&taken.ticket)), taken.queue + 1);
                self.group.complete(taken.ticket, status, result);
                self.posted.push_back((taken.queue, taken.cid, status, result));
                self.unpublished = true;
            }
            8 => {
                assert_eq!(self.group.publish(), std::mem::take(&mut self.unpublished));
            }
            9 => {
                let found = self.driver.reap().unwrap();
                let found = found.map(|(queue, c)| (queue, c.cid, c.status(), c.result));
                assert_eq!(found, self.posted.pop_front());
                self.reaped += usize::from(found.is_some());
            }
            10 => {
                let kick = self.driver.release();
                assert!(!kick || self.reaped > 0, "a kick for nothing");
                let must = self.reaped > 0 && self.sleeps && self.waits_for_room;
                assert!(kick || !must, "the device waits for room and sleeps on");
                self.sleeps &= !kick;
                self.reaped = 0;
            }
            _ => self.seldom(a, b),
        }
        let outstanding = self.taken.len() as u32;
        assert_eq!(self.group.outstanding(), outstanding);
        let can_take = self.can_take();
        assert_eq!(self.group.is_empty(), !can_take);
        assert_eq!(self.group.visible() > 0, can_take);
    }

    fn seldom(&mut self, a: u16, b: u16) {
        match a % 5 {
            // Mapped doorbells are for devices that never sleep.
            0 if self.rig.mode != Mode::Mapped => {
                let work = self.group.arm();
                assert_eq!(work, self.can_take());
                // A device without free slots has commands outstanding, and does not sleep before it looks again.
                self.sleeps = !work && (self.room() == 0 || self.there() == 0);
                self.waits_for_room = self.room() == 0;
            }
            1 => {
                self.group.disarm();
                self.sleeps = false;
            }
            2 => {
                let Some(taken) = self.taken.iter_mut().find(|taken| !taken.parked) else { return };
                taken.parked = true;
                self.group.park(&taken.ticket);
                self.sleeps = false;
            }
            3 => {
                let room = self.room();
                let Some(taken) = self.taken.iter_mut().find(|taken| taken.parked) else { return };
                let unparked = self.group.unpark(&taken.ticket).unwrap();
                assert_eq!(unparked, room > 0);
                taken.parked = !unparked;
            }
            _ if b.is_multiple_of(4) => self.succeed(),
            _ => {
                let (completion, submissions) = self.group.states();
                assert_eq!((completion.id, completion.size), (COMPLETION, self.rig.completions));
                let taken: u32 = submissions.iter().map(|queue| queue.outstanding).sum();
                assert_eq!(taken, self.group.outstanding());
            }
        }
    }

    fn take(&mut self) {
        let can_take = self.can_take();
        let found = self.group.take().unwrap();
        assert_eq!(found.is_some(), can_take);
        if let Some((ticket, command)) = found {
            let queue = usize::from(self.group.queue_of(&ticket)) - 1;
            let (cid, tag) = self.shown[queue].pop_front().expect("one is shown");
            assert_eq!((ticket.cid(), command.cid, command.cdw10, command.cdw15), (cid, cid, tag, !tag));
            assert_eq!((command.cdw2, command.cdw3, command.mptr), (0, 0, 0));
            self.taken.push(Taken { queue, cid, tag, ticket, parked: false });
        }
    }

    /// Replaces the device. The commands that the old one had taken come again, those of each queue in their order.
    fn succeed(&mut self) {
        if self.room() == 0 && self.taken.iter().any(|taken| taken.parked) {
            // They come again only when there is room for their completions.
            return;
        }
        self.group = self.rig.group(&self.memory, &self.doorbells, &self.state).unwrap();
        assert!(self.group.publish(), "the old device may owe an interrupt");
        self.unpublished = false;
        self.group.disarm();
        self.sleeps = false;
        let mut lost = std::mem::take(&mut self.taken);
        let mut last = vec![0; self.shown.len()];
        assert!(self.group.visible() >= lost.len() as u64);
        while !lost.is_empty() {
            let (ticket, command) = self.group.take().unwrap().expect("it was in flight");
            let queue = usize::from(self.group.queue_of(&ticket)) - 1;
            let at = lost
                .iter()
                .position(|old| (old.queue, old.cid) == (queue, command.cid))
                .expect("it was taken");
            let old = lost.swap_remove(at);
            assert_eq!((command.cdw10, command.cdw15, command.mptr), (old.tag, !old.tag, 0));
            assert!(last[queue] < old.tag, "commands of a queue come in their order");
            last[queue] = old.tag;
            if old.parked {
                self.group.park(&ticket);
            }
            self.taken.push(Taken { ticket, ..old });
        }
    }

    /// Runs one operation on queues whose memory may contain anything.
    fn spoil(&mut self, Op { code, a, b }: Op) {
        if code & 0x80 != 0 {
            return self.write_nonsense(code, a, b);
        }
        let queue = usize::from(a) % usize::from(self.rig.submissions);
        match code % 12 {
            0..=2 => {
                let command = self.command();
                _ = self.driver.submit(queue, command);
            }
            3 | 4 => _ = self.driver.ring(queue),
            5 | 6 => {
                if let Ok(Some((ticket, command))) = self.group.take() {
                    assert_eq!(ticket.cid(), command.cid);
                    let queue = usize::from(self.group.queue_of(&ticket)) - 1;
                    self.taken.push(Taken { queue, cid: command.cid, tag: 0, ticket, parked: false });
                    let most = usize::from(self.rig.slots) * usize::from(self.rig.submissions);
                    assert!(self.taken.len() <= most, "more than there are slots");
                }
            }
            7 => {
                if !self.taken.is_empty() {
                    let taken = self.taken.swap_remove(usize::from(a) % self.taken.len());
                    self.group.complete(taken.ticket, Status(b), b.into());
                }
            }
            8 => _ = self.group.publish(),
            9 => _ = self.driver.reap(),
            10 => _ = self.driver.release(),
            _ => match a % 5 {
                0 => _ = self.group.arm(),
                1 => self.group.disarm(),
                2 => _ = (self.group.is_empty(), self.group.visible(), self.group.outstanding()),
                3 => _ = self.group.states(),
                _ => {
                    if let Ok(group) = self.rig.group(&self.memory, &self.doorbells, &self.state) {
                        self.group = group;
                        self.taken.clear();
                    }
                }
            },
        }
    }

    /// Writes values that usually mean something at their place.
    fn write_nonsense(&self, code: u8, a: u16, b: u16) {
        let word = match b % 6 {
            0 => b / 6,
            1 => self.rig.size,
            2 => self.rig.completions - 1,
            3 => 1 << (b / 6 % 16),
            4 => 0xffff,
            _ => 0,
        };
        let doorbell = match a % (self.rig.submissions + 1) {
            0 => self.rig.doorbell_at(None),
            index => self.rig.doorbell_at(Some(index - 1)),
        };
        match code & 7 {
            0 | 1 => self.doorbells.store_relaxed_u32(doorbell, u32::from(word) | u32::from(a >> 15) << 20),
            2 | 3 => {
                let at = self.rig.shadow_at() + doorbell - 4096 + usize::from(b & 1) * 4096;
                self.memory.store_relaxed_u32(at, word.into());
            }
            4 | 5 => {
                let at = usize::from(a) % (self.rig.shadow_at() / 2) * 2;
                self.memory.store_relaxed_u16(at, word);
            }
            _ => {
                // The records of the queues, and the slots; not the numbers of both.
                let at = 64 + usize::from(a) * 8 % (self.state.len() - 64);
                let word = if b & 8 == 0 { word.into() } else { u64::MAX << (b >> 10) };
                self.state.store_relaxed_u64(at, word);
            }
        }
    }
}
