//! Workloads: what to ask a disk for, how much of it at a time, and what came of it.

use crate::client::Client;
use crate::error::Error;
use crate::lane::Lane;
use crate::queue::{Queue, sleep};
use hdrhistogram::Histogram;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// In which order, and in which direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pattern {
    /// Anywhere; or one block after the other.
    pub random: bool,
    /// Of a hundred requests, how many read. The others write.
    pub reads: u8,
}

/// When to stop submitting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// After this time.
    Time(Duration),
    /// After so many requests of each queue.
    Requests(u64),
}

/// What to do with a disk.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Which requests.
    pub pattern: Pattern,
    /// Bytes of each.
    pub block: u32,
    /// Requests on their way in each queue; at most the client's depth.
    pub depth: u16,
    /// How long.
    pub limit: Limit,
    /// First run so long without counting.
    pub ramp: Duration,
    /// Bytes of the disk to use, from its start; none: all.
    pub bytes: Option<u64>,
    /// Threads that the queues are dealt out to.
    pub threads: usize,
    /// The first thread's CPU; the next has the next. None: any.
    pub cpu: Option<usize>,
    /// Sleep until there is something, instead of looking all the time.
    pub sleep: bool,
    /// A flush after so many writes of a queue.
    pub flush_every: Option<u64>,
    /// Write blocks that know themselves, check all that is read, and read all that was written once more at the end.
    pub verify: bool,
    /// When the server goes, wait so long for its successor and go on.
    pub reconnect: Option<Duration>,
    /// How long a thread waits without a single answer before it gives up.
    pub patience: Duration,
    /// Other numbers make other random requests.
    pub seed: u64,
}

impl Default for Workload {
    /// A second of random reads of 4 KiB, 32 deep, polling.
    fn default() -> Self {
        Self {
            pattern: Pattern { random: true, reads: 100 },
            block: 4096,
            depth: 32,
            limit: Limit::Time(Duration::from_secs(1)),
            ramp: Duration::ZERO,
            bytes: None,
            threads: 1,
            cpu: None,
            sleep: false,
            flush_every: None,
            verify: false,
            reconnect: None,
            patience: Duration::from_secs(60),
            seed: 1,
        }
    }
}

/// Requests of one kind.
#[derive(Clone, Debug)]
pub struct Tally {
    /// How many.
    pub requests: u64,
    /// What they moved.
    pub bytes: u64,
    /// How long each took, in nanoseconds.
    pub latency: Histogram<u64>,
}

impl Tally {
    pub(crate) fn new() -> Self {
        // From 1 ns to a minute with three digits: always a valid histogram.
        let latency = Histogram::new_with_bounds(1, 60_000_000_000, 3);
        Self { requests: 0, bytes: 0, latency: latency.unwrap_or_else(|_| unreachable!("valid bounds")) }
    }

    #[inline]
    pub(crate) fn add(&mut self, bytes: u32, took: Duration) {
        self.requests += 1;
        self.bytes += u64::from(bytes);
        self.latency.saturating_record(took.as_nanos() as u64);
    }

    fn merge(&mut self, other: &Self) {
        self.requests += other.requests;
        self.bytes += other.bytes;
        // Both have the same bounds.
        let _ = self.latency.add(&other.latency);
    }
}

/// What came of a workload.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Reads, writes and flushes that went well, after the ramp.
    pub reads: Tally,
    /// Writes.
    pub writes: Tally,
    /// Flushes.
    pub flushes: Tally,
    /// How long it ran, without the ramp and the check at the end.
    pub time: Duration,
    /// CPU time of this process over time; 1 is one CPU.
    pub cpu: f64,
    /// Requests that the disk answered with an error.
    pub failed: u64,
    /// The first of them.
    pub first_failure: Option<String>,
    /// Blocks that were read and checked.
    pub verified: u64,
    /// How often the server was gone and came back.
    pub reconnects: u32,
    /// How often the server was woken.
    pub kicks: u64,
}

impl Outcome {
    /// Reads and writes a second.
    pub fn iops(&self) -> f64 {
        (self.reads.requests + self.writes.requests) as f64 / self.time.as_secs_f64()
    }

    /// Reads and writes together: the latency's histogram, in nanoseconds.
    pub fn latency(&self) -> Histogram<u64> {
        let mut both = self.reads.clone();
        both.merge(&self.writes);
        both.latency
    }
}

/// What the threads of one run share.
pub(crate) struct Job<'w> {
    pub workload: &'w Workload,
    /// When counting begins.
    pub count_from: Instant,
    /// When submitting ends; none: when each queue has done its part.
    pub until: Option<Instant>,
    /// The server is gone.
    pub gone: AtomicBool,
}

/// Runs a workload over all queues of the client. Blocks until it is done. Requests that the disk answers with an error are
/// counted; a block that does not hold what it must, a server that is gone for good, or a broken ring is an error.
pub fn run(client: &mut Client, workload: &Workload) -> Result<Outcome, Error> {
    let mut lanes = lanes(client, workload)?;
    let kicks: u64 = client.queues().iter().map(Queue::kicks).sum();
    let begin = Instant::now();
    let count_from = begin + workload.ramp;
    let until = match workload.limit {
        Limit::Time(time) => Some(count_from + time),
        Limit::Requests(_) => None,
    };
    let job = Job { workload, count_from, until, gone: AtomicBool::new(false) };
    let cpu = cpu_time();
    let mut reconnects = go(client, &mut lanes, &job)?;
    let end = lanes.iter().filter_map(|lane| lane.last).max().unwrap_or(count_from);
    let cpu = cpu_time().saturating_sub(cpu).as_secs_f64() / begin.elapsed().as_secs_f64();
    let kicks = client.queues().iter().map(Queue::kicks).sum::<u64>().saturating_sub(kicks);
    if workload.verify {
        lanes.iter_mut().for_each(Lane::check_all);
        let job = Job { workload, count_from, until: None, gone: AtomicBool::new(false) };
        reconnects += go(client, &mut lanes, &job)?;
    }
    let mut outcome = Outcome {
        reads: Tally::new(),
        writes: Tally::new(),
        flushes: Tally::new(),
        time: end.saturating_duration_since(count_from),
        cpu,
        failed: 0,
        first_failure: None,
        verified: 0,
        reconnects,
        kicks,
    };
    for lane in lanes {
        outcome.reads.merge(&lane.reads);
        outcome.writes.merge(&lane.writes);
        outcome.flushes.merge(&lane.flushes);
        outcome.failed += lane.failed;
        outcome.verified += lane.verified;
        outcome.first_failure = outcome.first_failure.or(lane.first_failure);
    }
    Ok(outcome)
}

fn lanes(client: &mut Client, workload: &Workload) -> Result<Vec<Lane>, Error> {
    let disk = client.disk().clone();
    let invalid = |what: String| Err(Error::Invalid(what));
    let Workload { block, depth, verify, .. } = *workload;
    if block == 0 || !block.is_multiple_of(disk.block) {
        return invalid(format!("requests of {block} bytes: the disk has blocks of {}", disk.block));
    }
    if disk.read_only && workload.pattern.reads < 100 {
        return invalid("the disk is read-only".into());
    }
    let blocks = workload.bytes.unwrap_or(disk.bytes).min(disk.bytes) / u64::from(block);
    let queues = client.queues();
    let (count, slots) = (queues.len(), queues.first().map_or(0, Queue::slots));
    if depth == 0 || usize::from(depth) > slots {
        return invalid(format!("{depth} requests on their way: the client has room for {slots}"));
    }
    if queues.first().is_some_and(|queue| block as usize > queue.buffer_len()) {
        return invalid(format!("requests of {block} bytes: the client's buffers are smaller"));
    }
    // In verify mode a block has one request at a time.
    if blocks < count as u64 * if verify { u64::from(depth) + 1 } else { 1 } {
        return invalid(format!("{blocks} blocks are too few for {count} queues, {depth} deep"));
    }
    let before =
        SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos() as u64;
    Ok((0..count).map(|index| Lane::new(workload, index, count, slots, blocks, before)).collect())
}

/// Runs the lanes until they are done, over as many servers as it takes. Returns how often there was a new one.
fn go(client: &mut Client, lanes: &mut [Lane], job: &Job<'_>) -> Result<u32, Error> {
    let mut reconnects = 0;
    loop {
        job.gone.store(false, Ordering::Relaxed);
        spread(client, lanes, job)?;
        if !job.gone.load(Ordering::Relaxed) {
            return Ok(reconnects);
        }
        let Some(limit) = job.workload.reconnect else { return Err(Error::Gone) };
        // Whoever carries them over: what was on its way is still, for the lanes.
        client.reconnect_within(limit)?;
        reconnects += 1;
    }
}

/// One thread for each share of the queues; with one, this thread does it.
fn spread(client: &mut Client, lanes: &mut [Lane], job: &Job<'_>) -> Result<(), Error> {
    let threads = job.workload.threads.max(1);
    let mut shares: Vec<Vec<_>> = (0..threads).map(|_| Vec::new()).collect();
    for (index, pair) in client.queues().iter_mut().zip(lanes).enumerate() {
        shares[index % threads].push(pair);
    }
    std::thread::scope(|scope| {
        let running: Vec<_> = shares
            .into_iter()
            .enumerate()
            .filter(|(_, share)| !share.is_empty())
            .map(|(index, mut share)| {
                scope.spawn(move || {
                    if let Some(first) = job.workload.cpu {
                        pin(first + index);
                    }
                    let result = drive(&mut share, job);
                    if result.is_err() {
                        // The others stop too.
                        job.gone.store(true, Ordering::Relaxed);
                    }
                    result
                })
            })
            .collect();
        let mut result = Ok(());
        for thread in running {
            let ended = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            result = result.and(ended);
        }
        result
    })
}

/// Drives some queues until their lanes are done and nothing is on its way, or the server is gone.
fn drive(share: &mut [(&mut Queue, &mut Lane)], job: &Job<'_>) -> Result<(), Error> {
    for (queue, lane) in share.iter_mut() {
        lane.fill(queue, job, Instant::now())?;
        queue.publish()?;
    }
    let (mut idle, mut progress) = (0u32, Instant::now());
    while share.iter().any(|(queue, _)| queue.submitted() > 0) {
        let mut now = None;
        for (queue, lane) in share.iter_mut() {
            let mut any = false;
            while let Some(done) = queue.poll()? {
                // One look at the clock serves all that came at once, as the end of these and the start of the next.
                let now = *now.get_or_insert_with(Instant::now);
                any = true;
                lane.done(queue, done, job, now)?;
            }
            if any {
                queue.publish()?;
            }
        }
        if let Some(now) = now {
            (idle, progress) = (0, now);
            continue;
        }
        if job.workload.sleep {
            let mut queues: Vec<&mut Queue> = share.iter_mut().map(|(queue, _)| &mut **queue).collect();
            if sleep(&mut queues, Duration::from_millis(100))? && !is_gone(share) {
                continue;
            }
        }
        idle = idle.wrapping_add(1);
        std::hint::spin_loop();
        // Some ten milliseconds of looking: time to ask whether there is anybody.
        if idle.is_multiple_of(1 << 18) || job.workload.sleep {
            if job.gone.load(Ordering::Relaxed) {
                return Ok(());
            }
            if is_gone(share) {
                // What it answered before it went counts.
                let mut answered = false;
                for (queue, lane) in share.iter_mut() {
                    while let Some(done) = queue.poll()? {
                        answered = true;
                        lane.done(queue, done, job, Instant::now())?;
                    }
                }
                if !answered {
                    job.gone.store(true, Ordering::Relaxed);
                    return Ok(());
                }
            }
            if progress.elapsed() > job.workload.patience {
                return Err(Error::TimedOut(job.workload.patience));
            }
            if let Some((queue, _)) = share.iter().find(|(queue, _)| queue.is_given_up()) {
                let what = "the server has given the queue up; its log says why".into();
                return Err(Error::Corrupt { queue: queue.index(), what });
            }
        }
    }
    Ok(())
}

fn is_gone(share: &[(&mut Queue, &mut Lane)]) -> bool {
    share.first().is_some_and(|(queue, _)| queue.is_server_gone())
}

/// Keeps this thread on one CPU. A wish: there may be no such one.
fn pin(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    let _ = rustix::thread::sched_setaffinity(None, &set);
}

/// CPU time of this process.
fn cpu_time() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(t.tv_sec.unsigned_abs(), t.tv_nsec as u32)
}
