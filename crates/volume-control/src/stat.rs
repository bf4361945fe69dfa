//! What a volume counts.

use crate::Limits;
use crate::config::{BackendKind, Device, OnError, Wait};
use serde::{Deserialize, Serialize};

/// A volume and its counters. They count from the start of its process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stat {
    /// Its name.
    pub volume: String,
    /// Version of the program.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// Seconds since its start.
    pub uptime: f64,
    /// What the VM gets.
    pub device: Device,
    /// The vhost-user socket.
    pub socket: String,
    /// The VM that it is meant for, if its configuration says so.
    pub vm: Option<String>,
    /// Who is connected.
    pub front_end: Option<FrontEnd>,
    /// Front ends so far.
    pub sessions: u64,
    /// How its threads wait.
    pub wait: Wait,
    /// What holds it: `landlock+seccomp`, `seccomp`, `none`.
    pub sandbox: String,
    /// Its limits.
    pub limits: Limits,
    /// Its disks.
    pub disks: Vec<DiskStat>,
    /// Its threads.
    pub threads: Vec<ThreadStat>,
    /// Its queues.
    pub queues: Vec<QueueStat>,
    /// Its requests by kind, over all queues.
    pub operations: Vec<OperationStat>,
}

/// The front end that is connected: QEMU as a rule.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct FrontEnd {
    /// Its process.
    pub pid: u32,
    /// Seconds since it has connected.
    pub since: f64,
}

/// A disk (LUN) of a volume.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DiskStat {
    /// Its LUN; 0 for vhost-user-blk.
    pub disk: u32,
    /// Where its bytes are.
    pub backend: BackendKind,
    /// The image.
    pub path: Option<String>,
    /// Size in bytes.
    pub size: u64,
    /// Size of a sector in bytes.
    pub sector: u32,
    /// Whether the guest cannot write.
    pub read_only: bool,
    /// Its serial number.
    pub serial: String,
    /// Whether the kernel's page cache is bypassed.
    pub direct: bool,
    /// Whether writes may wait for a flush in a volatile cache; the guest can turn that off.
    pub write_back: bool,
    /// Whether writes that had been accepted are lost, so that no flush succeeds until an operator has reset that.
    pub lost_writes: bool,
    /// What becomes of requests that it fails.
    pub on_error: OnError,
}

/// A thread of a volume.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ThreadStat {
    /// Its number.
    pub thread: usize,
    /// The processor that it is bound to.
    pub cpu: Option<usize>,
    /// How often it has looked for work.
    pub turns: u64,
    /// In how many of them there was some.
    pub busy_turns: u64,
    /// How often it has slept.
    pub sleeps: u64,
    /// Its slowest turn, in nanoseconds, without sleep.
    pub longest_turn_ns: u64,
}

/// A queue of a volume.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct QueueStat {
    /// Its number.
    pub queue: u16,
    /// The thread that owns it.
    pub thread: usize,
    /// Requests that were taken.
    pub taken: u64,
    /// Requests that were given back.
    pub done: u64,
    /// Kicks that came.
    pub kicks: u64,
    /// Calls that were made.
    pub calls: u64,
    /// Calls that were not made, because the driver did not want them.
    pub calls_saved: u64,
    /// Requests that had to wait for a limit.
    pub throttled: u64,
    /// Requests that are held at the moment, because their disk was full or had failed.
    pub held: u64,
    /// Requests that made no sense.
    pub malformed: u64,
}

/// Requests of one kind.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OperationStat {
    /// `read`, `write`, `flush`, `discard`, `write_zeroes`, `other`.
    pub operation: String,
    /// That were done, or failed.
    pub requests: u64,
    /// Bytes of data.
    pub bytes: u64,
    /// That failed.
    pub errors: u64,
    /// From taken to given back.
    pub latency: Latency,
}

/// A distribution of latencies, in nanoseconds, exact to about 6 %.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Latency {
    /// How many.
    pub count: u64,
    /// The mean.
    pub mean: u64,
    /// Half were not longer.
    pub p50: u64,
    /// 90 % were not longer.
    pub p90: u64,
    /// 99 % were not longer.
    pub p99: u64,
    /// 99.9 % were not longer.
    pub p999: u64,
    /// The longest.
    pub max: u64,
    /// All of them together.
    pub sum: u64,
    /// Upper bound of each bucket that is not empty, and how many lie in it.
    pub buckets: Vec<(u64, u64)>,
}

impl Latency {
    /// Of these buckets (upper bound, how many; in ascending order), their sum and the longest.
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

    /// What has come since an earlier look at the same counters.
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
    /// What has come since an earlier look at the same volume: counters are differences, the rest is as now. Without
    /// meaning if the volume was started anew meanwhile ([`Stat::is_same_process`]).
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

    /// Whether both are of one run of a volume.
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
    fn what_a_later_version_tells_is_no_error() {
        let stat: Stat = serde_json::from_str(r#"{"volume":"a","news":1}"#).unwrap();
        assert_eq!(stat.volume, "a");
    }
}
