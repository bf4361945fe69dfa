//! The stream of requests in one queue: chooses the next request, and records the answers.

use crate::error::Error;
use crate::queue::Queue;
use crate::request::{Operation, Request, Status};
use crate::slots::{Done, Slot};
use crate::transport::Transport;
use crate::verify::{Ledger, Since};
use crate::workload::{Job, Limit, Tally, Workload};
use std::time::Instant;

/// The state of one queue's stream. It outlives the connection.
pub(crate) struct RequestStream {
    pub reads: Tally,
    pub writes: Tally,
    pub flushes: Tally,
    pub failed: u64,
    pub first_failure: Option<String>,
    pub verified: u64,
    /// When the last request was answered.
    pub last: Option<Instant>,
    block: u32,
    /// The number of blocks to choose from, the first of them, and the step from one to the next.
    blocks: u64,
    first: u64,
    step: u64,
    /// The next block of a sequential stream.
    position: u64,
    random: u64,
    submitted: u64,
    since_flush: u64,
    flushing: bool,
    /// For each slot, when its request was submitted, and the block.
    slots: Vec<(Instant, u64)>,
    check: Option<Check>,
}

/// What is known about the contents of the stream's blocks.
struct Check {
    ledger: Ledger,
    busy: Vec<bool>,
    buffer: Vec<u8>,
    /// The next block to check, once everything that was written is read back.
    reading_back: Option<usize>,
}

impl RequestStream {
    /// Returns the stream of queue `index` of `count`, on a disk with this many blocks.
    pub fn new(
        workload: &Workload,
        index: usize,
        count: usize,
        slots: usize,
        all_blocks: u64,
        before: u64,
    ) -> Self {
        let (index, count) = (index as u64, count as u64);
        // Random requests may use any block. In sequential order, each stream has a range of its own. With
        // verification, no two streams share a block.
        let (blocks, first, step) = match (workload.verify, workload.pattern.random) {
            (true, _) => ((all_blocks - index).div_ceil(count), index, count),
            (false, true) => (all_blocks, 0, 1),
            (false, false) => (all_blocks / count, index * (all_blocks / count), 1),
        };
        let check = workload.verify.then(|| Check {
            ledger: Ledger::new(workload.block, blocks as usize, before).every(first as usize, step as usize),
            busy: vec![false; blocks as usize],
            buffer: vec![0; workload.block as usize],
            reading_back: None,
        });
        Self {
            reads: Tally::new(),
            writes: Tally::new(),
            flushes: Tally::new(),
            failed: 0,
            first_failure: None,
            verified: 0,
            last: None,
            block: workload.block,
            blocks,
            first,
            step,
            position: 0,
            random: workload.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)
                ^ index.wrapping_mul(0xd134_2543_de82_ef95),
            submitted: 0,
            since_flush: 0,
            flushing: false,
            slots: vec![(Instant::now(), 0); slots],
            check,
        }
    }

    /// From now on, reads back everything that was written.
    pub fn check_all(&mut self) {
        if let Some(check) = &mut self.check {
            check.reading_back = Some(0);
        }
    }

    /// Submits requests until the queue has as many as it should.
    pub fn fill<T: Transport>(
        &mut self,
        queue: &mut Queue<T>,
        job: &Job<'_>,
        now: Instant,
    ) -> Result<(), Error> {
        while queue.submitted() < job.workload.depth.into() {
            let Some(slot) = queue.claim() else { break };
            if !self.submit(queue, slot, job, now)? {
                break;
            }
        }
        Ok(())
    }

    /// Records an answer. Submits the next request in its slot, if there is one.
    #[inline]
    pub fn done<T: Transport>(
        &mut self,
        queue: &mut Queue<T>,
        done: Done,
        job: &Job<'_>,
        now: Instant,
    ) -> Result<(), Error> {
        let (since, block) = self.slots[done.slot.index()];
        let took = now.saturating_duration_since(since);
        let counts = now >= job.count_from;
        match (done.status, done.request.operation) {
            (Status::Ok, _) if !counts => {}
            (Status::Ok, Operation::Read) => self.reads.add(self.block, took),
            (Status::Ok, Operation::Write) => self.writes.add(self.block, took),
            (Status::Ok, _) => self.flushes.add(0, took),
            (status, _) => self.fail(&done.request, status),
        }
        self.last = Some(now);
        if self.check.is_some() {
            self.verify(queue, &done, block)?;
        }
        if done.request.operation == Operation::Flush {
            self.flushing = false;
        }
        self.submit(queue, done.slot, job, now).map(drop)
    }

    #[cold]
    fn fail(&mut self, request: &Request, status: Status) {
        self.failed += 1;
        self.first_failure.get_or_insert_with(|| format!("{request}: {status}"));
    }

    /// Updates or checks the ledger after an answer.
    fn verify<T: Transport>(&mut self, queue: &Queue<T>, done: &Done, block: u64) -> Result<(), Error> {
        let Some(check) = &mut self.check else { return Ok(()) };
        let (ok, block) = (done.status == Status::Ok, block as usize);
        match done.request.operation {
            Operation::Flush if ok => check.ledger.flushed(),
            Operation::Write if ok => check.ledger.acknowledged(block),
            Operation::Read if ok => {
                queue.buffer(done.slot).read(0, &mut check.buffer);
                check.ledger.check(block, &check.buffer, Since::Running)?;
                self.verified += 1;
            }
            _ => {}
        }
        if done.request.operation != Operation::Flush {
            check.busy[block] = false;
        }
        Ok(())
    }

    /// Submits the next request. If there is none, releases the slot and returns false.
    #[inline]
    fn submit<T: Transport>(
        &mut self,
        queue: &mut Queue<T>,
        slot: Slot,
        job: &Job<'_>,
        now: Instant,
    ) -> Result<bool, Error> {
        let Some((operation, block)) = self.next(job, now) else {
            queue.release(slot);
            return Ok(false);
        };
        if let Some(check) = &mut self.check {
            match operation {
                Operation::Write => {
                    check.ledger.write(block as usize, &mut check.buffer);
                    queue.buffer(slot).write(0, &check.buffer);
                    check.busy[block as usize] = true;
                }
                Operation::Read => check.busy[block as usize] = true,
                _ => check.ledger.flush(),
            }
        }
        let request = match operation {
            Operation::Flush => Request::flush(),
            _ => Request {
                operation,
                offset: (self.first + block * self.step) * u64::from(self.block),
                len: self.block,
            },
        };
        self.slots[slot.index()] = (now, block);
        self.submitted += 1;
        queue.submit(slot, request)?;
        Ok(true)
    }

    /// Returns the next operation and its block, or `None` if there is nothing more to do. Always inlined, since it is called for
    /// every kind of queue, and the compiler would share it.
    #[inline(always)]
    fn next(&mut self, job: &Job<'_>, now: Instant) -> Option<(Operation, u64)> {
        if let Some(Check { ledger, reading_back: Some(at), .. }) = &mut self.check {
            while *at < ledger.blocks() {
                *at += 1;
                if ledger.is_written(*at - 1) {
                    return Some((Operation::Read, *at as u64 - 1));
                }
            }
            return None;
        }
        let workload = job.workload;
        match (workload.limit, job.until) {
            (Limit::Requests(count), _) if self.submitted >= count => return None,
            (_, Some(until)) if now >= until => return None,
            _ => {}
        }
        if let Some(every) = workload.flush_every {
            // Only one flush is in flight at a time.
            if self.since_flush >= every && !self.flushing {
                (self.since_flush, self.flushing) = (0, true);
                return Some((Operation::Flush, 0));
            }
        }
        let reads = workload.pattern.reads;
        let read = match reads {
            100 => true,
            0 => false,
            _ => self.dice(100) < u64::from(reads),
        };
        let block = self.block(workload.pattern.random);
        if read {
            return Some((Operation::Read, block));
        }
        self.since_flush += 1;
        Some((Operation::Write, block))
    }

    /// Returns the next block. With verification, it is one without a request in flight; there are more blocks than
    /// slots.
    #[inline]
    fn block(&mut self, random: bool) -> u64 {
        let mut block = if random {
            self.dice(self.blocks)
        } else {
            let block = self.position;
            self.position = if block + 1 < self.blocks { block + 1 } else { 0 };
            block
        };
        if let Some(check) = &self.check {
            while check.busy[block as usize] {
                block = if block + 1 < self.blocks { block + 1 } else { 0 };
            }
            self.position = if block + 1 < self.blocks { block + 1 } else { 0 };
        }
        block
    }

    /// Returns a random number below `n`.
    #[inline]
    fn dice(&mut self, n: u64) -> u64 {
        // The Wyrand generator.
        self.random = self.random.wrapping_add(0xa076_1d64_78bd_642f);
        let product = u128::from(self.random) * u128::from(self.random ^ 0xe703_7ed1_a0b4_28db);
        let word = (product >> 64) as u64 ^ product as u64;
        ((u128::from(word) * u128::from(n)) >> 64) as u64
    }
}
