//! The status of a cache, from its memory and from its server.

use anyhow::{Context, Result};
use ginnel_cache_client::{Cache, Error, Part};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A clock that has not moved for this long has stopped.
const STANDS: Duration = Duration::from_millis(2500);

/// The status of one cache.
#[derive(Debug, Default, Serialize)]
pub struct Stat {
    pub cache: String,
    /// The identifier of this instance of the cache.
    pub id: String,
    pub items: u64,
    /// Size of its block, in bytes.
    pub block_bytes: u64,
    /// Number of bytes that the server may use for items.
    pub limit_bytes: u64,
    /// Size of one log segment, in bytes. The log segments are counted by their use.
    pub segment_bytes: u64,
    pub free: Queue,
    pub small: Queue,
    pub main: Queue,
    /// Number of places for items in the index.
    pub slots: u64,
    /// Number of servers so far.
    pub servers: u64,
    /// Time since the cache was created during which it had a server.
    pub clock_seconds: f64,
    /// Whether that clock has stopped.
    pub clock_stands: bool,
    /// Whether the server is short of memory.
    pub pressed: bool,
    /// The addresses that the server has written into the cache.
    pub contact: Vec<String>,
    /// The reason why the server has not answered.
    pub no_server: Option<String>,
    /// The server's answer to `stats`.
    pub server: BTreeMap<String, String>,
}

/// Log segments with the same use.
#[derive(Debug, Default, Serialize)]
pub struct Queue {
    pub segments: u64,
    pub bytes: u64,
}

impl From<Part> for Queue {
    fn from(part: Part) -> Self {
        Self { segments: part.segments as u64, bytes: part.bytes }
    }
}

impl Stat {
    /// Reads the cache's memory, and asks the server.
    pub fn of(cache: &Cache) -> Result<Self> {
        let began = Instant::now();
        let removed = || format!("cache {} has been removed", cache.address());
        let survey = cache.survey().with_context(removed)?;
        let [first, second] = cache.id().with_context(removed)?;
        let mut stat = Self {
            cache: cache.address().into(),
            id: format!("{first:016x}{second:016x}"),
            items: survey.items,
            block_bytes: survey.shape.len() as u64,
            limit_bytes: survey.limit.min(survey.shape.segments as u64) * survey.shape.segment as u64,
            segment_bytes: survey.shape.segment as u64,
            free: survey.free.into(),
            small: survey.small.into(),
            main: survey.main.into(),
            slots: survey.shape.buckets as u64 * 8,
            servers: survey.servers,
            clock_seconds: survey.clock as f64 / 1000.0,
            clock_stands: false,
            pressed: survey.is_pressed,
            contact: contact(&cache.contact()),
            no_server: None,
            server: BTreeMap::new(),
        };
        match cache.stats("") {
            Ok(stats) => stat.server = stats.into_iter().collect(),
            Err(error @ (Error::NoServer { .. } | Error::Lost { .. })) => {
                stat.no_server = Some(error.to_string());
                // The server may hang, and the request may have taken a long time.
                while cache.survey().is_some_and(|now| now.clock == survey.clock) {
                    if began.elapsed() > STANDS {
                        stat.clock_stands = true;
                        break;
                    }
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
            Err(error) => return Err(error.into()),
        }
        Ok(stat)
    }

    /// Returns a number from the server's answer.
    pub fn counter(&self, name: &str) -> Option<u64> {
        self.server.get(name)?.parse().ok()
    }

    /// Returns the share of hits among the gets that the server has executed.
    pub fn hit_rate(&self) -> Option<f64> {
        let (hits, misses) = (self.counter("get_hits")?, self.counter("get_misses")?);
        let all = hits.saturating_add(misses);
        (all > 0).then(|| hits as f64 / all as f64)
    }
}

/// Returns the lines of a text that any program may have written, with special characters escaped.
fn contact(text: &str) -> Vec<String> {
    text.lines().map(|line| line.escape_debug().to_string()).collect()
}
