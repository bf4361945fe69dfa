//! Logs of both roles, to standard error: text for people, or JSON, one event a line.

use tracing_subscriber::EnvFilter;

/// Starts logging at `level` (`error`, `warn`, `info`, `debug`, `trace`), or as the environment's `GINNEL_LOG` says.
/// `json` may be asked for too. A second call changes nothing.
pub fn start(level: &str, json: bool) {
    let filter = EnvFilter::try_from_env("GINNEL_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    let builder =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false);
    // Refused only if somebody has started it already.
    let _ = if json {
        builder.json().try_init()
    } else {
        // The journal of systemd adds its own time.
        let builder = builder.with_ansi(false);
        match std::env::var_os("JOURNAL_STREAM") {
            Some(_) => builder.without_time().try_init(),
            None => builder.try_init(),
        }
    };
}
