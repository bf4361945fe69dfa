//! A readable summary of the tables of a segment's endpoints, for an administrator.

use crate::counters::now;
use ginnel::{Endpoint, Error, ErrorCode, Rights, SharedMemory};
use ginnel_layout::verbs::{
    self, Access, Kind, QPS, QpNumber, QpState, REGION, REGION_TABLE, REGIONS, TABLES, Waits, counters, qp,
    region,
};
use serde::Serialize;

/// An endpoint that uses a segment as an RDMA device, according to its tables.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Tables {
    /// Number of the endpoint.
    pub endpoint: u32,
    /// Epoch of that number.
    pub epoch: u32,
    /// Number of regions that peers can reach.
    pub regions: u64,
    /// Total length of these regions, in bytes.
    pub region_bytes: u64,
    /// Number of shadow regions, which the endpoint's process accesses for its peers.
    pub shadow_regions: u64,
    /// Total length of the shadow regions, in bytes.
    pub shadow_bytes: u64,
    /// Number of arenas, from which the endpoint allocates rings and registered pages.
    pub arenas: u32,
    /// The queue pairs and shared receive queues of the endpoint.
    pub queue_pairs: Vec<QueuePair>,
}

/// A queue pair, or a shared receive queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct QueuePair {
    /// Number of the queue pair.
    pub number: u32,
    /// `rc`, `uc`, `ud` or `srq`.
    pub kind: &'static str,
    /// The state, as the verbs specification names it.
    pub state: &'static str,
    /// Number of the queue pair that it is connected to.
    pub peer: Option<u32>,
    /// Number of the shared receive queue that it uses.
    pub shared: Option<u32>,
    /// Number of receives posted so far to its own receive queue; 0 if it uses a shared one.
    pub posted: u64,
    /// Number of these receives that peers have used.
    pub used: u64,
    /// Capacity of its own receive queue; 0 if it uses a shared one.
    pub entries: u32,
    /// Number of requests that it has executed since it was created: sends, writes, reads and atomic operations.
    pub executed: u64,
    /// Total length of these requests, in bytes.
    pub bytes: u64,
    /// Total time for which its requests have waited, in nanoseconds, including the current wait.
    pub waited: u64,
    /// Number of bytes that it has copied for long requests of its peer.
    pub helped: u64,
    /// The requests that wait, if there are any.
    pub waits: Option<Waiting>,
}

/// Requests that wait to be executed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Waiting {
    /// Number of requests.
    pub requests: u32,
    /// What the first of them waits for: `peer` (the peer's queue pair is not ready to receive), `receive` (the peer has posted no
    /// receive), `errand` (the peer's process has been asked to do something), `completions` (the queue pair's own completion queue is
    /// full), `stopped` (the own program has stopped it, state SQD), `ended` (the peer has ended), `copy` (the peer is copying a part)
    /// or `?`.
    pub reason: &'static str,
    /// How long it has waited, in nanoseconds. If the program runs on another machine than the caller, this is the time up to its last
    /// attempt.
    pub nanoseconds: u64,
}

/// Returns the tables of these endpoints of a segment; an endpoint without tables is left out. Attaches to the segment as an endpoint of
/// its own, and asks the daemon.
pub fn tables(segment: &str, endpoints: impl IntoIterator<Item = u32>) -> Result<Vec<Tables>, Error> {
    let own = Endpoint::attach(segment)?;
    let member = own.member();
    let mut all = Vec::new();
    for number in endpoints {
        let block = match own.open_block(&format!("verbs.{number}"), Rights::READ) {
            Ok(block) => block,
            // The endpoint has ended meanwhile, or does not use verbs.
            Err(error) if error.code() == Some(ErrorCode::NOT_FOUND) => continue,
            Err(error) => return Err(error),
        };
        if block.len() >= TABLES {
            let tables = block.memory()?;
            // Each machine has its own clock.
            let is_near = tables.load_relaxed_u32(verbs::MEMBER) == member;
            all.extend(read(&tables, is_near.then(now)));
        }
    }
    Ok(all)
}

/// Returns a summary of the tables, or `None` if they are not ready. Their owner may have written anything. `now` is the current time of
/// the owner's CLOCK_MONOTONIC in nanoseconds, if it is known.
pub fn read(tables: &impl SharedMemory, now: Option<u64>) -> Option<Tables> {
    if tables.load_acquire_u64(verbs::MAGIC) != verbs::READY {
        return None;
    }
    let endpoint = tables.load_relaxed_u32(verbs::ENDPOINT);
    let is_region =
        |at: &usize| Access(tables.load_relaxed_u64(at + region::WORD) as u32).allows(Access::VALID);
    let regions = (0..REGIONS).map(|i| REGION_TABLE + i * REGION).filter(is_region);
    let lengths = regions.map(|at| tables.load_relaxed_u64(at + region::LENGTH));
    let (regions, region_bytes) =
        lengths.fold((0, 0_u64), |(count, sum), length| (count + 1, sum.saturating_add(length)));
    Some(Tables {
        endpoint,
        epoch: tables.load_relaxed_u32(verbs::EPOCH),
        regions,
        region_bytes,
        shadow_regions: tables.load_relaxed_u64(verbs::SHADOWS),
        shadow_bytes: tables.load_relaxed_u64(verbs::SHADOW_BYTES),
        arenas: tables.load_relaxed_u32(verbs::ARENAS),
        queue_pairs: (1..QPS)
            .filter_map(|index| queue_pair(tables, QpNumber::new(endpoint, index)?, now))
            .collect(),
    })
}

fn queue_pair(tables: &impl SharedMemory, number: QpNumber, now: Option<u64>) -> Option<QueuePair> {
    let (at, counters_at) = (number.at()?, number.counters_at()?);
    let kind = match Kind(tables.load_relaxed_u32(at + qp::KIND)) {
        Kind::RC => "rc",
        Kind::UC => "uc",
        Kind::UD => "ud",
        Kind::SHARED => "srq",
        _ => return None,
    };
    let state = match QpState(tables.load_acquire_u64(at + qp::STATE) as u32) {
        QpState::RESET => "RESET",
        QpState::INIT => "INIT",
        QpState::RTR => "RTR",
        QpState::RTS => "RTS",
        QpState::SQD => "SQD",
        QpState::SQE => "SQE",
        QpState::ERR => "ERR",
        _ => "?",
    };
    let word = |offset| tables.load_relaxed_u32(at + offset);
    let is_connected = matches!(kind, "rc" | "uc") && !matches!(state, "RESET" | "INIT");
    let queue = QpNumber::new(number.endpoint(), word(qp::QUEUE) as usize);
    let shared = queue.filter(|queue| *queue != number).map(|queue| queue.0);
    let own = |offset| if shared.is_none() { tables.load_relaxed_u64(at + offset) } else { 0 };
    // A shared receive queue executes nothing. The counters are those of a queue pair that had the number before.
    let counter = |offset| if kind == "srq" { 0 } else { tables.load_relaxed_u64(counters_at + offset) };
    let waits = waiting(counter(counters::WAITS), [counters::SINCE, counters::TRIED].map(counter), now);
    Some(QueuePair {
        number: number.0,
        kind,
        state,
        peer: is_connected.then(|| word(qp::PEER)),
        shared,
        posted: own(qp::TAIL),
        used: own(qp::HEAD),
        entries: if shared.is_none() { word(qp::ENTRIES) } else { 0 },
        executed: counter(counters::EXECUTED),
        bytes: counter(counters::BYTES),
        waited: counter(counters::WAITED).saturating_add(waits.as_ref().map_or(0, |waits| waits.nanoseconds)),
        helped: counter(counters::HELPED),
        waits,
    })
}

fn waiting(word: u64, [since, tried]: [u64; 2], now: Option<u64>) -> Option<Waiting> {
    let requests = word as u32;
    if requests == 0 {
        return None;
    }
    let reason = match Waits((word >> 32) as u32) {
        Waits::PEER => "peer",
        Waits::RECEIVE => "receive",
        Waits::ERRAND => "errand",
        Waits::COMPLETIONS => "completions",
        Waits::STOPPED => "stopped",
        Waits::ENDED => "ended",
        Waits::COPY => "copy",
        _ => "?",
    };
    // A clock that shows an earlier time is not the clock of the owner.
    let until = now.filter(|now| *now >= tried).unwrap_or(tried);
    Some(Waiting { requests, reason, nanoseconds: until.saturating_sub(since) })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::counters::Counters;
    use ginnel_shmem::Mapping;

    #[test]
    fn waiting_requests_are_shown_with_their_reason() {
        let tables = Mapping::anonymous(TABLES).unwrap();
        assert_eq!(read(&tables, None), None);
        tables.store_relaxed_u64(verbs::MAGIC, verbs::READY);
        tables.store_relaxed_u32(verbs::ENDPOINT, 3);
        let number = QpNumber::new(3, 5).unwrap();
        let mut counters = Counters::new(tables.clone(), number.counters_at().unwrap());
        counters.executed(100);
        counters.waits(2, Some(Waits::RECEIVE));
        let pairs = |now| read(&tables, now).unwrap().queue_pairs;
        assert_eq!(pairs(None), []);
        tables.store_relaxed_u32(number.at().unwrap() + qp::KIND, Kind::RC.0);
        let shown = pairs(Some(now() + 1_000_000_000)).remove(0);
        assert_eq!((shown.number, shown.executed, shown.bytes), (number.0, 1, 100));
        let waits = shown.waits.unwrap();
        assert_eq!((waits.requests, waits.reason), (2, "receive"));
        assert!(waits.nanoseconds >= 1_000_000_000 && shown.waited == waits.nanoseconds);
        while now() == tables.load_relaxed_u64(number.counters_at().unwrap() + counters::TRIED) {}
        counters.idle();
        let shown = pairs(None).remove(0);
        assert!(shown.waits.is_none() && shown.waited > 0);
        // The shared receive queue that has the number now has executed nothing.
        counters.waits(1, Some(Waits::PEER));
        tables.store_relaxed_u32(number.at().unwrap() + qp::KIND, Kind::SHARED.0);
        let shown = pairs(None).remove(0);
        assert_eq!((shown.executed, shown.bytes, shown.waits), (0, 0, None));
    }

    #[test]
    fn invalid_times_give_short_waits() {
        let word = |waits: Waits| u64::from(waits.0) << 32 | 1;
        let time = |times, now| waiting(word(Waits::ERRAND), times, now).unwrap().nanoseconds;
        assert_eq!(time([100, 250], Some(400)), 300);
        assert_eq!(time([100, 250], Some(200)), 150);
        assert_eq!(time([100, 250], None), 150);
        assert_eq!(time([250, 100], None), 0);
        assert_eq!(time([u64::MAX, 0], Some(u64::MAX)), 0);
        assert_eq!(waiting(word(Waits(99)), [0, 0], None).unwrap().reason, "?");
        assert_eq!(waiting(u64::from(Waits::PEER.0) << 32, [0, 0], None), None);
    }
}
