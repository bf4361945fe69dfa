//! The server's counters, under the names that memcached has for them.

use ginnel_cache_protocol::VERSION;
use ginnel_cache_store::store::{Counters, Store};
use ginnel_shmem::SharedMemory;

type To<'a> = &'a mut dyn FnMut(&str, &[u8]);

/// The settings that were chosen when the server was started, or later.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The address of the cache, `SEGMENT/NAME`.
    pub place: String,
    /// The most bytes of an item, as memcached counts them.
    pub item_size: usize,
    /// The most clients at the same time.
    pub connections: usize,
    /// The log level.
    pub verbosity: u32,
    /// The addresses at which the server listens.
    pub listens: Vec<String>,
    /// The path of the Unix socket, if there is one.
    pub unix: Option<String>,
}

impl Settings {
    /// Answers `stats settings`.
    pub(crate) fn list<M: SharedMemory>(&self, store: &Store<M>, to: To<'_>) {
        let port = self.listens.first().and_then(|at| at.rsplit_once(':')).map_or("0", |(_, port)| port);
        let inter = self.listens.first().and_then(|at| at.rsplit_once(':')).map_or("NULL", |(at, _)| at);
        let text = [
            ("maxbytes", limit(store).to_string()),
            ("maxconns", self.connections.to_string()),
            ("tcpport", port.into()),
            ("udpport", "0".into()),
            ("inter", inter.into()),
            ("verbosity", self.verbosity.to_string()),
            ("evictions", "on".into()),
            ("domain_socket", self.unix.clone().unwrap_or("NULL".into())),
            ("shutdown_command", "no".into()),
            ("num_threads", "1".into()),
            ("stat_key_prefix", ":".into()),
            ("detail_enabled", "no".into()),
            ("cas_enabled", "yes".into()),
            ("binding_protocol", "auto-negotiate".into()),
            ("auth_enabled_sasl", "no".into()),
            ("auth_enabled_ascii", "no".into()),
            ("item_size_max", self.item_size.to_string()),
            ("flush_enabled", "yes".into()),
            ("dump_enabled", "no".into()),
            ("hash_algorithm", "siphash13".into()),
            ("eviction_algorithm", "s3-fifo".into()),
            ("segment_size", store.shape().segment.to_string()),
            ("ssl_enabled", "no".into()),
        ];
        text.iter().for_each(|(name, value)| to(name, value.as_bytes()));
    }
}

/// Returns the most bytes that all items together may have.
fn limit<M: SharedMemory>(store: &Store<M>) -> usize {
    store.segments().1 * store.shape().segment
}

/// The counters.
#[derive(Clone, Debug, Default)]
pub(crate) struct Numbers {
    began: i64,
    pub connections: usize,
    pub channels: usize,
    pub total_connections: u64,
    pub rejected_connections: u64,
    pub cmd_get: u64,
    pub cmd_set: u64,
    pub cmd_flush: u64,
    pub cmd_touch: u64,
    pub cmd_meta: u64,
    pub get_hits: u64,
    pub get_misses: u64,
    pub touch_hits: u64,
    pub touch_misses: u64,
    pub delete_hits: u64,
    pub delete_misses: u64,
    pub incr_hits: u64,
    pub incr_misses: u64,
    pub decr_hits: u64,
    pub decr_misses: u64,
    pub cas_hits: u64,
    pub cas_misses: u64,
    pub cas_badval: u64,
    pub store_too_large: u64,
    pub bytes_read: u64,
    pub bytes_written: u64,
    pub reader_hits: u64,
    /// The store's counters when all counters were last set to 0.
    evictions: u64,
    unused: u64,
    collisions: u64,
    moves: u64,
}

impl Numbers {
    pub fn new(unix: i64) -> Self {
        Self { began: unix, ..Self::default() }
    }

    /// Sets all counters to 0, for `stats reset`.
    pub fn reset(&mut self, store: Counters) {
        let Self { began, connections, channels, .. } = *self;
        let Counters { evictions, unused, collisions, moves } = store;
        *self =
            Self { began, connections, channels, evictions, unused, collisions, moves, ..Self::default() };
    }

    #[inline]
    pub fn got(&mut self, is_hit: bool, touches: bool) {
        let number = match (touches, is_hit) {
            (false, true) => &mut self.get_hits,
            (false, false) => &mut self.get_misses,
            (true, true) => &mut self.touch_hits,
            (true, false) => &mut self.touch_misses,
        };
        *number += 1;
        *(if touches { &mut self.cmd_touch } else { &mut self.cmd_get }) += 1;
    }

    pub fn counted(&mut self, up: bool) {
        *(if up { &mut self.incr_hits } else { &mut self.decr_hits }) += 1;
    }

    pub fn count_missed(&mut self, up: bool) {
        *(if up { &mut self.incr_misses } else { &mut self.decr_misses }) += 1;
    }

    /// Answers `stats`.
    pub fn general<M: SharedMemory>(&self, settings: &Settings, store: &Store<M>, unix: i64, to: To<'_>) {
        let usage = usage();
        let store_counters = store.counters();
        let (used, all) = store.segments();
        let text = [
            ("pid", std::process::id().to_string()),
            ("uptime", (unix - self.began).max(0).to_string()),
            ("time", unix.to_string()),
            ("version", VERSION.into()),
            ("libevent", "none".into()),
            ("pointer_size", "64".into()),
            ("rusage_user", usage.0),
            ("rusage_system", usage.1),
        ];
        text.iter().for_each(|(name, value)| to(name, value.as_bytes()));
        let numbers = [
            ("max_connections", settings.connections as u64),
            ("curr_connections", self.connections as u64),
            ("total_connections", self.total_connections),
            ("rejected_connections", self.rejected_connections),
            ("cmd_get", self.cmd_get),
            ("cmd_set", self.cmd_set),
            ("cmd_flush", self.cmd_flush),
            ("cmd_touch", self.cmd_touch),
            ("cmd_meta", self.cmd_meta),
            ("get_hits", self.get_hits),
            ("get_misses", self.get_misses),
            ("delete_misses", self.delete_misses),
            ("delete_hits", self.delete_hits),
            ("incr_misses", self.incr_misses),
            ("incr_hits", self.incr_hits),
            ("decr_misses", self.decr_misses),
            ("decr_hits", self.decr_hits),
            ("cas_misses", self.cas_misses),
            ("cas_hits", self.cas_hits),
            ("cas_badval", self.cas_badval),
            ("touch_hits", self.touch_hits),
            ("touch_misses", self.touch_misses),
            ("store_too_large", self.store_too_large),
            ("store_no_memory", 0),
            ("auth_cmds", 0),
            ("auth_errors", 0),
            ("bytes_read", self.bytes_read),
            ("bytes_written", self.bytes_written),
            ("limit_maxbytes", limit(store) as u64),
            ("accepting_conns", u64::from(self.connections < settings.connections)),
            ("threads", 1),
            ("hash_bytes", (store.shape().buckets * ginnel_layout::cache::BUCKET) as u64),
            ("bytes", store.live_bytes() as u64),
            ("curr_items", store.len() as u64),
            ("total_items", self.cmd_set),
            ("evicted_unfetched", store_counters.unused.saturating_sub(self.unused)),
            ("evictions", store_counters.evictions.saturating_sub(self.evictions)),
            ("ginnel_collisions", store_counters.collisions.saturating_sub(self.collisions)),
            ("ginnel_moves", store_counters.moves.saturating_sub(self.moves)),
            ("ginnel_segments", used as u64),
            ("ginnel_segments_limit", all as u64),
            ("ginnel_channels", self.channels as u64),
            ("ginnel_reader_hits", self.reader_hits),
            ("ginnel_server", store.server()),
        ];
        numbers.iter().for_each(|(name, value)| to(name, value.to_string().as_bytes()));
    }

    /// Answers `stats items`: all items are of one class.
    pub fn items<M: SharedMemory>(&self, store: &Store<M>, to: To<'_>) {
        if store.is_empty() {
            return;
        }
        let counters = store.counters();
        let numbers = [
            ("number", store.len() as u64),
            ("mem_requested", store.live_bytes() as u64),
            ("evicted", counters.evictions.saturating_sub(self.evictions)),
            ("evicted_unfetched", counters.unused.saturating_sub(self.unused)),
            ("outofmemory", 0),
        ];
        numbers.iter().for_each(|(name, value)| to(&format!("items:1:{name}"), value.to_string().as_bytes()));
    }

    /// Answers `stats slabs`: a log segment is a page, and all are of one class.
    pub fn slabs<M: SharedMemory>(&self, store: &Store<M>, to: To<'_>) {
        let (used, all) = store.segments();
        let segment = store.shape().segment;
        let numbers = [
            ("1:chunk_size", 8),
            ("1:chunks_per_page", segment as u64 / 8),
            ("1:total_pages", used as u64),
            ("1:total_chunks", (used * segment / 8) as u64),
            ("1:used_chunks", (store.live_bytes() / 8) as u64),
            ("1:get_hits", self.get_hits),
            ("1:cmd_set", self.cmd_set),
            ("1:delete_hits", self.delete_hits),
            ("1:incr_hits", self.incr_hits),
            ("1:decr_hits", self.decr_hits),
            ("1:cas_hits", self.cas_hits),
            ("1:cas_badval", self.cas_badval),
            ("1:touch_hits", self.touch_hits),
            ("active_slabs", u64::from(used > 0)),
            ("total_malloced", (all * segment) as u64),
        ];
        numbers.iter().for_each(|(name, value)| to(name, value.to_string().as_bytes()));
    }

    /// Answers `stats conns`.
    pub fn conns(&self, to: To<'_>) {
        to("conns", self.connections.to_string().as_bytes());
        to("channels", self.channels.to_string().as_bytes());
    }
}

/// Linux reports CPU time in hundredths of a second.
const TICKS: f64 = 100.0;

/// Returns the seconds of CPU time, in user mode and in the kernel.
fn usage() -> (String, String) {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The fields begin behind the name, which may contain any bytes.
    let fields: Vec<_> = text.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let field = |at: usize| fields.get(at).and_then(|field| field.parse::<f64>().ok()).unwrap_or(0.0) / TICKS;
    (format!("{:.6}", field(11)), format!("{:.6}", field(12)))
}
