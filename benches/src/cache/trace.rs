//! Requests for keys of very different popularity, the same in each run.

/// The key of a request, and the length of its value if it has to be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The number of the key.
    pub key: u64,
    /// The number of bytes of the value.
    pub len: usize,
}

/// The kind of request sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Keys by Zipf's law.
    Zipf,
    /// Keys by Zipf's law, interrupted now and then by a scan that asks once for each of many keys that nobody else wants.
    Scans,
    /// Keys by Zipf's law, whose values gradually become four times as large.
    Growing,
}

/// The number of keys that are asked for again.
pub const KEYS: u64 = 1_000_000;
const EXPONENT: f64 = 0.99;
/// The last third of this many requests is a scan.
const SCAN: u64 = 60_000;

/// An endless sequence of requests.
pub struct Trace {
    kind: Kind,
    random: u64,
    count: u64,
    total: u64,
    scanned: u64,
    zipf: Zipf,
}

impl Trace {
    /// Makes a sequence in which values do not grow any further after `total` requests.
    pub fn new(kind: Kind, total: u64) -> Self {
        Self { kind, random: 1, count: 0, total, scanned: 0, zipf: Zipf::new(KEYS, EXPONENT) }
    }
}

impl Iterator for Trace {
    type Item = Request;

    fn next(&mut self) -> Option<Request> {
        self.count += 1;
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let random = mix(self.random);
        if self.kind == Kind::Scans && self.count % SCAN >= SCAN / 3 * 2 {
            self.scanned += 1;
            let key = KEYS + self.scanned;
            return Some(Request { key, len: len_of(key) });
        }
        let key = self.zipf.rank((random >> 11) as f64 / (1_u64 << 53) as f64);
        let percent = match self.kind {
            Kind::Growing => 50 + 150 * self.count.min(self.total) / self.total,
            _ => 100,
        };
        Some(Request { key, len: len_of(key) * percent as usize / 100 })
    }
}

/// Returns the length of a key's value: 50 to 1000 bytes, half of all below 150, by approximately a log-normal distribution.
fn len_of(key: u64) -> usize {
    let random = mix(key ^ 0x5bd1_e995);
    let parts = (0..4).map(|part| f64::from((random >> (16 * part)) as u16) / 65_536.0);
    // The sum of four numbers has a standard deviation of 0.577.
    let normal = (parts.sum::<f64>() - 2.0) / 0.577;
    (150.0 * (0.8 * normal).exp()).clamp(50.0, 1000.0) as usize
}

fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// Ranks by Zipf's law, as in "Quickly generating billion-record synthetic databases" (Gray and others, 1994).
struct Zipf {
    ranks: f64,
    exponent: f64,
    zeta: f64,
    alpha: f64,
    eta: f64,
}

impl Zipf {
    fn new(ranks: u64, exponent: f64) -> Self {
        let zeta = |upto: u64| (1..=upto).map(|rank| (rank as f64).powf(-exponent)).sum::<f64>();
        let (all, ranks) = (zeta(ranks), ranks as f64);
        let eta = (1.0 - (2.0 / ranks).powf(1.0 - exponent)) / (1.0 - zeta(2) / all);
        Self { ranks, exponent, zeta: all, alpha: 1.0 / (1.0 - exponent), eta }
    }

    /// Returns a rank from 0 for a number from 0 to 1.
    fn rank(&self, random: f64) -> u64 {
        let scaled = random * self.zeta;
        if scaled < 1.0 {
            return 0;
        }
        if scaled < 1.0 + 0.5_f64.powf(self.exponent) {
            return 1;
        }
        (self.ranks * (self.eta * random - self.eta + 1.0).powf(self.alpha)) as u64
    }
}
