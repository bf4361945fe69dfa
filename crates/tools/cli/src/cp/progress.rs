//! The progress of a copy, shown on a terminal.

use crate::output;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::time::Instant;

/// Counts what a copy has done, and shows it.
pub struct Progress {
    bar: ProgressBar,
    begun: Instant,
    /// Whether to print what is refused.
    loud: bool,
    files: u64,
    refused: u64,
    bytes: u64,
    resumed: u64,
}

impl Progress {
    /// Returns a progress that only counts.
    pub fn silent() -> Self {
        let bar = ProgressBar::hidden();
        Self { bar, begun: Instant::now(), loud: false, files: 0, refused: 0, bytes: 0, resumed: 0 }
    }

    /// Returns a progress that names refused files on stderr and, if that is a terminal, draws a bar for the current
    /// file.
    pub fn on_stderr() -> Self {
        let mut progress = Self { loud: true, ..Self::silent() };
        if std::io::stderr().is_terminal() {
            progress.bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
            let line =
                "{wide_msg} {binary_bytes:>11} {bar:20} {percent:>3}% {binary_bytes_per_sec:>13} {eta:>4}";
            if let Ok(style) = ProgressStyle::with_template(line) {
                progress.bar.set_style(style.progress_chars("=> "));
            }
        }
        progress
    }

    /// Begins the next file.
    pub fn file(&mut self, name: &str, size: u64) {
        if !self.bar.is_hidden() {
            self.bar.set_length(size);
            self.bar.set_position(0);
            self.bar.reset_eta();
            self.bar.set_message(name.to_owned());
        }
    }

    /// Counts bytes that existed already.
    pub fn resumed(&mut self, bytes: u64) {
        self.resumed += bytes;
        self.bar.inc(bytes);
    }

    /// Counts bytes that were transferred.
    pub fn moved(&mut self, bytes: u64) {
        self.bytes += bytes;
        self.bar.inc(bytes);
    }

    /// Counts a complete file or link.
    pub fn done(&mut self) {
        self.files += 1;
    }

    /// Counts something that is not copied, and prints why.
    pub fn refused(&mut self, why: &str) {
        self.refused += 1;
        if self.loud {
            self.bar.suspend(|| output::note(format!("ginnel: {why}")));
        }
    }

    /// Removes the bar, and returns the counts.
    pub fn end(self) -> Summary {
        self.bar.finish_and_clear();
        let seconds = self.begun.elapsed().as_secs_f64();
        Summary {
            files: self.files,
            refused: self.refused,
            bytes: self.bytes,
            resumed: self.resumed,
            seconds,
            bytes_per_s: self.bytes as f64 / seconds.max(1e-9),
        }
    }
}

/// The result of a copy.
#[derive(serde::Serialize)]
pub struct Summary {
    /// Number of files and symbolic links.
    pub files: u64,
    pub refused: u64,
    /// Bytes that were transferred.
    pub bytes: u64,
    /// Bytes that existed already.
    pub resumed: u64,
    pub seconds: f64,
    pub bytes_per_s: f64,
}

impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let plural = if self.files == 1 { "" } else { "s" };
        let (bytes, speed) = (output::bytes(self.bytes), output::bytes(self.bytes_per_s as u64));
        write!(f, "{} file{plural}, {bytes} in {:.2} s, {speed}/s", self.files, self.seconds)?;
        if self.resumed > 0 {
            write!(f, "; {} were there already", output::bytes(self.resumed))?;
        }
        if self.refused > 0 {
            write!(f, "; {} not copied", self.refused)?;
        }
        Ok(())
    }
}
