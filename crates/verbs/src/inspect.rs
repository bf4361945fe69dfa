//! What stands in the tables of a segment's endpoints, for people who look after them.

use ginnel::{Endpoint, Error, ErrorCode, Memory, Rights};
use ginnel_layout::verbs::{
    self, Access, Kind, QPS, QpNumber, QpState, REGION, REGION_TABLE, REGIONS, TABLES, qp, region,
};
use serde::Serialize;

/// An endpoint that uses a segment as an RDMA device, as its tables say.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Tables {
    /// Number of the endpoint.
    pub endpoint: u32,
    /// Epoch of that number.
    pub epoch: u32,
    /// Regions that peers may reach.
    pub regions: u64,
    /// Their bytes.
    pub region_bytes: u64,
    /// Arenas, of which it takes memory for rings and registered pages.
    pub arenas: u32,
    /// Its queue pairs and shared receive queues.
    pub queue_pairs: Vec<QueuePair>,
}

/// A queue pair, or a shared receive queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct QueuePair {
    /// Its number.
    pub number: u32,
    /// `rc`, `uc`, `ud` or `srq`.
    pub kind: &'static str,
    /// Its state, in verbs' words.
    pub state: &'static str,
    /// What it is connected to.
    pub peer: Option<u32>,
    /// The shared receive queue that it receives from.
    pub shared: Option<u32>,
    /// Receives ever posted. It says so of its own queue.
    pub posted: u64,
    /// Of these, those that peers have used.
    pub used: u64,
    /// Receives that its queue holds.
    pub entries: u32,
}

/// The tables of these endpoints of a segment; one that has none is left out. Asks the daemon, as an endpoint of its own.
pub fn tables(segment: &str, endpoints: impl IntoIterator<Item = u32>) -> Result<Vec<Tables>, Error> {
    let own = Endpoint::attach(segment)?;
    let mut all = Vec::new();
    for number in endpoints {
        let block = match own.open_block(&format!("verbs.{number}"), Rights::READ) {
            Ok(block) => block,
            // It has ended meanwhile, or does something else.
            Err(error) if error.code() == Some(ErrorCode::NOT_FOUND) => continue,
            Err(error) => return Err(error),
        };
        if block.len() >= TABLES {
            all.extend(read(&block.memory()?));
        }
    }
    Ok(all)
}

/// What stands in tables, if anything does. Their owner may have written anything.
pub fn read(tables: &impl Memory) -> Option<Tables> {
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
        arenas: tables.load_relaxed_u32(verbs::ARENAS),
        queue_pairs: (1..QPS)
            .filter_map(|index| queue_pair(tables, QpNumber::new(endpoint, index)?))
            .collect(),
    })
}

fn queue_pair(tables: &impl Memory, number: QpNumber) -> Option<QueuePair> {
    let at = number.at()?;
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
    Some(QueuePair {
        number: number.0,
        kind,
        state,
        peer: is_connected.then(|| word(qp::PEER)),
        shared,
        posted: own(qp::TAIL),
        used: own(qp::HEAD),
        entries: if shared.is_none() { word(qp::ENTRIES) } else { 0 },
    })
}
