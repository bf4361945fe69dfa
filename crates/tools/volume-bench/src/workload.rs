//! Workloads: which requests to send to a disk, how many at a time, and the result.

use crate::error::Error;
use crate::front::Front;
use crate::queue::{Queue, sleep};
use crate::request_stream::RequestStream;
use crate::transport::Transport;
use hdrhistogram::Histogram;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// The order and the direction of the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pattern {
    /// Whether the requests use random blocks instead of consecutive ones.
    pub random: bool,
    /// Percentage of requests that read. The others write.
    pub reads: u8,
}

/// When to stop submitting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// After this time.
    Time(Duration),
    /// After this many requests of each queue.
    Requests(u64),
}

/// A workload for a disk.
#[derive(Clone, Debug)]
pub struct Workload {
    /// The pattern of the requests.
    pub pattern: Pattern,
    /// Size of each request, in bytes.
    pub block: u32,
    /// Number of requests in flight in each queue; at most the depth of the client.
    pub depth: u16,
    /// When to stop submitting.
    pub limit: Limit,
    /// Time to run before counting begins.
    pub ramp: Duration,
    /// Number of bytes of the disk to use, from its start. Default: all.
    pub bytes: Option<u64>,
    /// Number of threads over which the queues are distributed.
    pub threads: usize,
    /// The CPU of the first thread; each further thread gets the next one. `None` binds no thread.
    pub cpu: Option<usize>,
    /// Whether to sleep until there are answers, instead of polling.
    pub sleep: bool,
    /// Number of writes of a queue after which it flushes.
    pub flush_every: Option<u64>,
    /// Whether to write stamped blocks, check all blocks that are read, and read all that were written once more at the
    /// end.
    pub verify: bool,
    /// If the server ends, how long to wait for its successor. `None` fails instead.
    pub reconnect: Option<Duration>,
    /// How long a thread waits without any answer before it fails.
    pub patience: Duration,
    /// Seed of the random requests.
    pub seed: u64,
}

impl Default for Workload {
    /// A second of random reads of 4 KiB with polling, of which 32 are in flight.
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
    /// Number of requests.
    pub requests: u64,
    /// Number of bytes that they transferred.
    pub bytes: u64,
    /// Durations in nanoseconds.
    pub latency: Histogram<u64>,
}

impl Tally {
    pub(crate) fn new() -> Self {
        // From 1 ns to a minute with three digits, which are always valid bounds.
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

/// The result of a workload.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Successful reads after the ramp.
    pub reads: Tally,
    /// Successful writes after the ramp.
    pub writes: Tally,
    /// Successful flushes after the ramp.
    pub flushes: Tally,
    /// The duration, without the ramp and the check at the end.
    pub time: Duration,
    /// CPU time of this process divided by the duration; 1 is one whole CPU.
    pub cpu: f64,
    /// Number of requests that the disk answered with an error.
    pub failed: u64,
    /// The first failed request and its status.
    pub first_failure: Option<String>,
    /// Number of blocks that were read and checked.
    pub verified: u64,
    /// How often the server ended and came back.
    pub reconnects: u32,
    /// How often the server was kicked, or a write to a doorbell was trapped.
    pub kicks: u64,
}

impl Outcome {
    /// Returns the number of reads and writes per second.
    pub fn iops(&self) -> f64 {
        (self.reads.requests + self.writes.requests) as f64 / self.time.as_secs_f64()
    }

    /// Returns the latencies of reads and writes together, in nanoseconds.
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
    /// When submitting ends; `None` if each queue has a number of requests.
    pub until: Option<Instant>,
    /// Whether the server has ended, or a thread has failed.
    pub gone: AtomicBool,
}

/// Runs a workload over all queues of the client. Blocks until it is done. Requests that the disk answers with an error
/// are counted. A block with wrong contents, a server that does not come back, or a broken ring is an error.
pub fn run<F: Front>(client: &mut F, workload: &Workload) -> Result<Outcome, Error> {
    let mut streams = streams(client, workload)?;
    let kicks: u64 = client.queues().iter().map(Queue::kicks).sum();
    let begin = Instant::now();
    let count_from = begin + workload.ramp;
    let until = match workload.limit {
        Limit::Time(time) => Some(count_from + time),
        Limit::Requests(_) => None,
    };
    let job = Job { workload, count_from, until, gone: AtomicBool::new(false) };
    let cpu = cpu_time();
    let mut reconnects = go(client, &mut streams, &job)?;
    let end = streams.iter().filter_map(|stream| stream.last).max().unwrap_or(count_from);
    let cpu = cpu_time().saturating_sub(cpu).as_secs_f64() / begin.elapsed().as_secs_f64();
    let kicks = client.queues().iter().map(Queue::kicks).sum::<u64>().saturating_sub(kicks);
    if workload.verify {
        streams.iter_mut().for_each(RequestStream::check_all);
        let job = Job { workload, count_from, until: None, gone: AtomicBool::new(false) };
        reconnects += go(client, &mut streams, &job)?;
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
    for stream in streams {
        outcome.reads.merge(&stream.reads);
        outcome.writes.merge(&stream.writes);
        outcome.flushes.merge(&stream.flushes);
        outcome.failed += stream.failed;
        outcome.verified += stream.verified;
        outcome.first_failure = outcome.first_failure.or(stream.first_failure);
    }
    Ok(outcome)
}

fn streams<F: Front>(client: &mut F, workload: &Workload) -> Result<Vec<RequestStream>, Error> {
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
    // With verification, a block has one request at a time.
    if blocks < count as u64 * if verify { u64::from(depth) + 1 } else { 1 } {
        return invalid(format!("{blocks} blocks are too few for {count} queues, {depth} deep"));
    }
    let before =
        SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos() as u64;
    Ok((0..count).map(|index| RequestStream::new(workload, index, count, slots, blocks, before)).collect())
}

/// Runs the streams until they are done, over as many servers as necessary. Returns the number of reconnects.
fn go<F: Front>(client: &mut F, streams: &mut [RequestStream], job: &Job<'_>) -> Result<u32, Error> {
    let mut reconnects = 0;
    loop {
        job.gone.store(false, Ordering::Relaxed);
        spread(client, streams, job)?;
        if !job.gone.load(Ordering::Relaxed) {
            return Ok(reconnects);
        }
        let Some(limit) = job.workload.reconnect else { return Err(Error::Gone) };
        // For the streams, the requests in flight stay in flight, whether the new server continues them or the client
        // submits them again.
        client.resume(limit)?;
        reconnects += 1;
    }
}

/// Runs one thread for each share of the queues.
fn spread<F: Front>(client: &mut F, streams: &mut [RequestStream], job: &Job<'_>) -> Result<(), Error> {
    let threads = job.workload.threads.max(1);
    let mut shares: Vec<Vec<_>> = (0..threads).map(|_| Vec::new()).collect();
    for (index, pair) in client.queues().iter_mut().zip(streams).enumerate() {
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
                        // The other threads stop, too.
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

/// Drives some queues until their streams are done and no request is in flight, or until the server is gone.
fn drive<T: Transport>(
    share: &mut [(&mut Queue<T>, &mut RequestStream)],
    job: &Job<'_>,
) -> Result<(), Error> {
    for (queue, stream) in share.iter_mut() {
        stream.fill(queue, job, Instant::now())?;
        queue.publish()?;
    }
    let (mut idle, mut progress) = (0u32, Instant::now());
    while share.iter().any(|(queue, _)| queue.submitted() > 0) {
        let mut now = None;
        for (queue, stream) in share.iter_mut() {
            let mut any = false;
            while let Some(done) = queue.poll()? {
                // One reading of the clock serves all answers that came at once, as their end and as the start of the
                // next requests.
                let now = *now.get_or_insert_with(Instant::now);
                any = true;
                stream.done(queue, done, job, now)?;
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
            let mut queues: Vec<&mut Queue<T>> = share.iter_mut().map(|(queue, _)| &mut **queue).collect();
            if sleep(&mut queues, Duration::from_millis(100))? && !is_gone(share) {
                continue;
            }
        }
        idle = idle.wrapping_add(1);
        std::hint::spin_loop();
        // After some ten milliseconds of polling, check whether the server is still there.
        if idle.is_multiple_of(1 << 18) || job.workload.sleep {
            if job.gone.load(Ordering::Relaxed) {
                return Ok(());
            }
            if is_gone(share) {
                // Requests that it answered before it ended count.
                let mut answered = false;
                for (queue, stream) in share.iter_mut() {
                    while let Some(done) = queue.poll()? {
                        answered = true;
                        stream.done(queue, done, job, Instant::now())?;
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

fn is_gone<T: Transport>(share: &[(&mut Queue<T>, &mut RequestStream)]) -> bool {
    share.first().is_some_and(|(queue, _)| queue.is_server_gone())
}

/// Binds this thread to a CPU, if that CPU exists.
fn pin(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    let _ = rustix::thread::sched_setaffinity(None, &set);
}

/// Returns the CPU time of this process.
fn cpu_time() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(t.tv_sec.unsigned_abs(), t.tv_nsec as u32)
}
