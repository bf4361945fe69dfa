//! What the programs have in common that tests run in guests (`src/bin`).

use std::fmt;
use std::io::Write;

/// Prints a line. Does not panic when the test does not listen any more.
pub fn say(line: fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}

/// A cheap generator of pseudorandom numbers (xorshift). The seed must not be 0.
pub struct Random(pub u64);

impl Random {
    /// Returns the next number.
    #[expect(clippy::should_implement_trait)]
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}
