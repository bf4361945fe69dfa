//! The logs of both roles, on standard error: text for people, or JSON with one event per line.
//!
//! Most lines say what a program, a guest or a kernel has done. Each of these could do it very often, so each kind of line (each
//! place in the source) is limited: 100 lines at once, and then one a second. The log says how many were left out.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tracing::callsite::Identifier;
use tracing::{Event, Level, Subscriber, warn};
use tracing_subscriber::layer::{Context, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer, Registry, fmt, registry, reload};

/// The lines of one kind that are logged at once.
const BURST: u32 = 100;
/// The time after which one more line of a kind is logged.
const INTERVAL: Duration = Duration::from_secs(1);

/// The lines that were left out of this process's log.
static LEFT_OUT: LeftOut = LeftOut::new();

/// The filter of this process's log, for changes.
static FILTER: OnceLock<reload::Handle<EnvFilter, Registry>> = OnceLock::new();

/// The environment variable that takes precedence over a level.
const VARIABLE: &str = "GINNEL_LOG";

/// Starts logging at `level` (`error`, `warn`, `info`, `debug`, `trace`), or as the environment variable `GINNEL_LOG` says.
/// With `json` the log is JSON. A second call changes nothing.
pub fn start(level: &str, json: bool) {
    let filter = EnvFilter::try_from_env(VARIABLE).unwrap_or_else(|_| EnvFilter::new(level));
    let (filter, handle) = reload::Layer::new(filter);
    let _ = FILTER.set(handle);
    let limited = registry().with(filter).with(Limit::new(&LEFT_OUT));
    let lines = fmt::layer().with_writer(std::io::stderr).with_target(false);
    // This fails only if logging has been started already.
    let _ = if json {
        limited.with(lines.json()).try_init()
    } else {
        // systemd's journal adds its own time.
        let lines = lines.with_ansi(false);
        match std::env::var_os("JOURNAL_STREAM") {
            Some(_) => limited.with(lines.without_time()).try_init(),
            None => limited.with(lines).try_init(),
        }
    };
}

/// Logs at another level from now on. Returns false if the environment variable says at which one.
pub fn set_level(level: &str) -> bool {
    let by_variable = EnvFilter::try_from_env(VARIABLE).is_ok();
    !by_variable && FILTER.get().is_some_and(|filter| filter.reload(EnvFilter::new(level)).is_ok())
}

/// Logs how many lines were left out since it was last said, at most once a second.
pub fn tell_left_out() {
    LEFT_OUT.tell();
}

/// Lines that were left out.
#[derive(Debug)]
struct LeftOut {
    /// Those that were not counted in the log yet.
    lines: AtomicU64,
    said: Mutex<Option<Instant>>,
}

impl LeftOut {
    const fn new() -> Self {
        Self { lines: AtomicU64::new(0), said: Mutex::new(None) }
    }

    fn tell(&self) {
        if self.lines.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if said.is_none_or(|said| now.saturating_duration_since(said) >= INTERVAL) {
            *said = Some(now);
            let lines = self.lines.swap(0, Ordering::Relaxed);
            warn!(lines, "there were too many lines of the same kind, and these were left out");
        }
    }
}

/// Leaves out lines of which there are too many. Lines that only developers ask for are not limited.
struct Limit {
    kinds: Mutex<HashMap<Identifier, Bucket>>,
    left_out: &'static LeftOut,
}

impl Limit {
    fn new(left_out: &'static LeftOut) -> Self {
        Self { kinds: Mutex::default(), left_out }
    }
}

/// How many more lines of one kind may be logged.
struct Bucket {
    left: u32,
    filled: Instant,
}

impl Bucket {
    fn new(now: Instant) -> Self {
        Self { left: BURST, filled: now }
    }

    fn take(&mut self, now: Instant) -> bool {
        let intervals = now.saturating_duration_since(self.filled).as_nanos() / INTERVAL.as_nanos();
        if let Ok(more) = u32::try_from(intervals)
            && more < BURST
        {
            self.left = (self.left + more).min(BURST);
            self.filled += INTERVAL * more;
        } else {
            *self = Self::new(now);
        }
        let may = self.left > 0;
        self.left -= u32::from(may);
        may
    }
}

impl<S: Subscriber> Layer<S> for Limit {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        let metadata = event.metadata();
        if *metadata.level() > Level::INFO {
            return true;
        }
        let now = Instant::now();
        let mut kinds = self.kinds.lock().unwrap_or_else(PoisonError::into_inner);
        let may = kinds.entry(metadata.callsite()).or_insert_with(|| Bucket::new(now)).take(now);
        if !may {
            self.left_out.lines.fetch_add(1, Ordering::Relaxed);
        }
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use tracing::{info, subscriber};

    #[test]
    fn there_are_some_lines_of_a_kind_at_once_and_then_one_a_second() {
        let begin = Instant::now();
        let mut bucket = Bucket::new(begin);
        let mut taken = |at: Duration| (0..1000).filter(|_| bucket.take(begin + at)).count();
        assert_eq!(taken(Duration::ZERO), BURST as usize);
        assert_eq!(taken(Duration::from_millis(999)), 0);
        assert_eq!(taken(Duration::from_millis(1001)), 1);
        assert_eq!(taken(Duration::from_millis(4999)), 3);
        assert_eq!(taken(Duration::from_secs(86_400)), BURST as usize);
    }

    #[test]
    fn one_kind_does_not_keep_out_another_and_what_is_left_out_is_counted() {
        struct Count(Arc<AtomicU64>);
        impl<S: Subscriber> Layer<S> for Count {
            fn on_event(&self, _: &Event<'_>, _: Context<'_, S>) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        let lines = Arc::new(AtomicU64::new(0));
        let left_out: &LeftOut = Box::leak(Box::new(LeftOut::new()));
        let logs = registry().with(Limit::new(left_out)).with(Count(lines.clone()));
        subscriber::with_default(logs, || {
            for _ in 0..1000 {
                info!("one kind");
            }
            warn!("another");
            // A slow machine may have had a second for one more.
            let logged = lines.load(Ordering::Relaxed);
            assert!((u64::from(BURST) + 1..u64::from(BURST) + 60).contains(&logged), "{logged}");
            assert!(left_out.lines.load(Ordering::Relaxed) >= 800);
            left_out.tell();
            left_out.tell();
            assert_eq!(lines.load(Ordering::Relaxed), logged + 1);
        });
    }
}
