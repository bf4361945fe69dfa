//! The statistics of a volume.

use crate::Limits;
use crate::config::{BackendKind, Device, OnError, Wait};
use serde::{Deserialize, Serialize};

/// A volume's properties and counters. Counters begin at 0 when its process starts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stat {
    /// Name of the volume.
    pub volume: String,
    /// Version of the program.
    pub version: String,
    /// Its process id.
    pub pid: u32,
    /// Seconds since its start.
    pub uptime: f64,
    /// The kind of device that the VM gets.
    pub device: Device,
    /// Path of the socket for QEMU.
    pub socket: String,
    /// The VM that gets it, if its configuration names one.
    pub vm: Option<String>,
    /// The process id of the holder, which has the connection to QEMU of an nvme volume.
    pub holder: Option<u32>,
    /// The connected front end.
    pub front_end: Option<FrontEnd>,
    /// Number of front ends so far.
    pub sessions: u64,
    /// How its threads wait for requests.
    pub wait: Wait,
    /// The sandbox of the process: `landlock+seccomp`, `landlock`, `seccomp` or `none`.
    pub sandbox: String,
    /// The current limits.
    pub limits: Limits,
    /// The disks, by LUN.
    pub disks: Vec<DiskStat>,
    /// The threads, by number.
    pub threads: Vec<ThreadStat>,
    /// The queues, by number.
    pub queues: Vec<QueueStat>,
    /// The requests by kind, over all queues.
    pub operations: Vec<OperationStat>,
}

/// The connected front end, usually QEMU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct FrontEnd {
    /// Its process id; 0 if only the holder knows it.
    pub pid: u32,
    /// Seconds since it connected.
    pub since: f64,
}

/// A disk (LUN) of a volume.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DiskStat {
    /// The LUN; 0 for a device with one disk.
    pub disk: u32,
    /// Where its data is stored.
    pub backend: BackendKind,
    /// Path of the image.
    pub path: Option<String>,
    /// Size in bytes.
    pub size: u64,
    /// Size of a sector in bytes.
    pub sector: u32,
    /// Whether the disk is read-only for the guest.
    pub read_only: bool,
    /// The serial number.
    pub serial: String,
    /// Whether the kernel's page cache is bypassed.
    pub direct: bool,
    /// Whether writes may stay in a volatile cache until a flush. The guest can turn this off.
    pub write_back: bool,
    /// Whether acknowledged writes are lost, so that flushes fail until an operator accepts that.
    pub lost_writes: bool,
    /// What happens to requests that it fails.
    pub on_error: OnError,
}

/// A thread of a volume.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ThreadStat {
    /// Number of the thread.
    pub thread: usize,
    /// The CPU to which it is bound.
    pub cpu: Option<usize>,
    /// Number of loop turns in which it looked for work.
    pub turns: u64,
    /// Number of turns in which it found work.
    pub busy_turns: u64,
    /// Number of times it has slept.
    pub sleeps: u64,
    /// Duration of its longest turn, in nanoseconds, without sleep.
    pub longest_turn_ns: u64,
}

/// A queue of a volume.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct QueueStat {
    /// Number of the queue.
    pub queue: u16,
    /// The thread that owns it.
    pub thread: usize,
    /// Requests that were taken.
    pub taken: u64,
    /// Requests that were given back.
    pub done: u64,
    /// Kicks that were received from the driver.
    pub kicks: u64,
    /// Calls that were sent to the driver.
    pub calls: u64,
    /// Calls that were not sent because the driver did not want them.
    pub calls_saved: u64,
    /// Requests that had to wait for a limit.
    pub throttled: u64,
    /// Requests that are currently held because their disk was full or had failed.
    pub held: u64,
    /// Requests that the device could not interpret.
    pub malformed: u64,
}

/// Requests of one kind.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OperationStat {
    /// `read`, `write`, `flush`, `discard`, `write_zeroes`, `other`.
    pub operation: String,
    /// Number of requests, successful or failed.
    pub requests: u64,
    /// Number of bytes of data.
    pub bytes: u64,
    /// Number of failed requests.
    pub errors: u64,
    /// The time from taking a request to giving it back.
    pub latency: Latency,
}

/// A distribution of latencies in nanoseconds. Values are exact to about 6 %.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Latency {
    /// Number of latencies.
    pub count: u64,
    /// The mean.
    pub mean: u64,
    /// The median.
    pub p50: u64,
    /// The 90th percentile.
    pub p90: u64,
    /// The 99th percentile.
    pub p99: u64,
    /// The 99.9th percentile.
    pub p999: u64,
    /// The largest latency.
    pub max: u64,
    /// The sum of all latencies.
    pub sum: u64,
    /// The upper bound of each bucket that is not empty, and the number of latencies in it.
    pub buckets: Vec<(u64, u64)>,
}

impl Latency {
    /// Returns the distribution with these buckets (upper bound and number, in ascending order), sum and maximum.
    pub fn of(buckets: Vec<(u64, u64)>, sum: u64, max: u64) -> Self {
        let count = buckets.iter().map(|(_, n)| n).sum::<u64>();
        let at = |share: f64| {
            let rank = ((count as f64 * share).ceil() as u64).clamp(1, count.max(1));
            let mut seen = 0;
            let bucket = buckets.iter().find(|(_, n)| {
                seen += n;
                seen >= rank
            });
            bucket.map_or(0, |&(upper, _)| upper.min(max))
        };
        let (p50, p90, p99, p999) = (at(0.5), at(0.9), at(0.99), at(0.999));
        Self { count, mean: sum.checked_div(count).unwrap_or(0), p50, p90, p99, p999, max, sum, buckets }
    }

    /// Returns the latencies since an earlier state of the same counters.
    pub fn since(&self, earlier: &Self) -> Self {
        let before = |upper| earlier.buckets.iter().find(|b| b.0 == upper).map_or(0, |b| b.1);
        let buckets: Vec<_> = self
            .buckets
            .iter()
            .map(|&(upper, n)| (upper, n.saturating_sub(before(upper))))
            .filter(|b| b.1 > 0)
            .collect();
        let max = if self.max > earlier.max { self.max } else { buckets.last().map_or(0, |b| b.0) };
        Self::of(buckets, self.sum.saturating_sub(earlier.sum), max)
    }
}

impl Stat {
    /// Returns the changes since an earlier state of the same volume: counters are differences, and everything else has
    /// its present value. The result is meaningless if the volume was restarted meanwhile ([`Stat::is_same_process`]).
    pub fn since(&self, earlier: &Self) -> Self {
        let mut now = self.clone();
        for operation in &mut now.operations {
            if let Some(before) = earlier.operations.iter().find(|o| o.operation == operation.operation) {
                operation.requests = operation.requests.saturating_sub(before.requests);
                operation.bytes = operation.bytes.saturating_sub(before.bytes);
                operation.errors = operation.errors.saturating_sub(before.errors);
                operation.latency = operation.latency.since(&before.latency);
            }
        }
        now
    }

    /// Returns whether both are states of the same process.
    pub fn is_same_process(&self, other: &Self) -> bool {
        self.pid == other.pid && self.uptime >= other.uptime
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles() {
        let latency = Latency::of(vec![(100, 90), (200, 9), (1000, 1)], 90 * 90 + 9 * 190 + 900, 900);
        assert_eq!((latency.count, latency.mean), (100, 107));
        assert_eq!((latency.p50, latency.p90, latency.p99, latency.p999), (100, 100, 200, 900));
        assert_eq!(Latency::of(Vec::new(), 0, 0), Latency::default());
    }

    #[test]
    fn differences() {
        let earlier = Latency::of(vec![(100, 5)], 400, 90);
        let now = Latency::of(vec![(100, 5), (200, 2)], 700, 160);
        assert_eq!(now.since(&earlier), Latency::of(vec![(200, 2)], 300, 160));
        assert_eq!(now.since(&now).count, 0);
    }

    #[test]
    fn unknown_fields_of_a_later_version_are_ignored() {
        let stat: Stat = serde_json::from_str(r#"{"volume":"a","news":1}"#).unwrap();
        assert_eq!(stat.volume, "a");
    }
}
