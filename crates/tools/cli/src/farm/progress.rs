//! The progress of a job, shown on a terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;

/// A progress bar on stderr, if that is a terminal.
pub struct Progress(ProgressBar);

impl Progress {
    pub fn new(total: u64, quiet: bool) -> Self {
        let bar = if quiet || !std::io::stderr().is_terminal() {
            ProgressBar::hidden()
        } else {
            ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr())
        };
        let line = "{wide_msg} {binary_bytes:>11} {bar:20} {percent:>3}% {binary_bytes_per_sec:>13} {eta:>4}";
        if let Ok(style) = ProgressStyle::with_template(line) {
            bar.set_style(style.progress_chars("=> "));
        }
        Self(bar)
    }

    /// Adds bytes that are done.
    pub fn done(&self, bytes: u64) {
        self.0.inc(bytes);
    }

    /// Shows what is being done.
    pub fn say(&self, what: String) {
        if !self.0.is_hidden() {
            self.0.set_message(what);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
