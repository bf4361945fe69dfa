//! The logs of both roles, on standard error: text for people, or JSON with one event per line.

use tracing_subscriber::EnvFilter;

/// Starts logging at `level` (`error`, `warn`, `info`, `debug`, `trace`), or as the environment variable `GINNEL_LOG` says.
/// With `json` the log is JSON. A second call changes nothing.
pub fn start(level: &str, json: bool) {
    let filter = EnvFilter::try_from_env("GINNEL_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    let builder =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false);
    // This fails only if logging has been started already.
    let _ = if json {
        builder.json().try_init()
    } else {
        // systemd's journal adds its own time.
        let builder = builder.with_ansi(false);
        match std::env::var_os("JOURNAL_STREAM") {
            Some(_) => builder.without_time().try_init(),
            None => builder.try_init(),
        }
    };
}
