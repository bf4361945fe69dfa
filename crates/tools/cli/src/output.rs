//! The command's output: lines on stdout, notes on stderr, and tables.

use anyhow::Result;
use serde::Serialize;
use std::io::{ErrorKind, Write};

/// Prints a line on stdout, and flushes it.
pub fn line(text: impl AsRef<str>) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", text.as_ref())?;
    out.flush()?;
    Ok(())
}

/// Prints the line by which a server says that it is ready. Ignores errors, because the server continues without a
/// reader.
pub fn ready(text: impl AsRef<str>) {
    let _ = line(text);
}

/// Prints a value as JSON.
pub fn json(value: &impl Serialize) -> Result<()> {
    line(serde_json::to_string_pretty(value)?)
}

/// Prints a note on stderr. Ignores errors, because a closed stderr has no reader.
pub fn note(text: impl AsRef<str>) {
    let _ = writeln!(std::io::stderr(), "{}", text.as_ref());
}

/// Returns whether an error only says that the reader of the output has gone, which is not a failure.
pub fn is_reader_gone(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe)
}

/// A table whose columns are as wide as their contents.
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Returns a table with these titles and no rows.
    pub fn new(titles: &[&str]) -> Self {
        Self { rows: vec![titles.iter().map(|t| (*t).to_owned()).collect()] }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: impl Into<Vec<String>>) {
        self.rows.push(cells.into());
    }

    /// Returns whether the table has no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.len() < 2
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |c: usize| {
            self.rows.iter().filter_map(|r| r.get(c)).map(|t| t.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<_> = (0..columns).map(width).collect();
        for (i, row) in self.rows.iter().enumerate() {
            let cells: Vec<_> = row.iter().zip(&widths).map(|(cell, &w)| format!("{cell:w$}")).collect();
            let end = if i + 1 < self.rows.len() { "\n" } else { "" };
            write!(f, "{}{end}", cells.join("  ").trim_end())?;
        }
        Ok(())
    }
}

/// Returns a number of bytes as a short text with a binary unit.
pub fn bytes(n: u64) -> String {
    let (mut value, mut unit) = (n as f64, "B");
    for next in ["KiB", "MiB", "GiB", "TiB"] {
        if value < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, next);
    }
    if value.fract() == 0.0 { format!("{value:.0} {unit}") } else { format!("{value:.1} {unit}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_line_up() {
        let mut table = Table::new(&["A", "LONG"]);
        table.row(["value".into(), "x".into()]);
        assert_eq!(table.to_string(), "A      LONG\nvalue  x");
    }

    #[test]
    fn sizes_are_short() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(256 << 20), "256 MiB");
        assert_eq!(bytes(1536), "1.5 KiB");
    }
}
