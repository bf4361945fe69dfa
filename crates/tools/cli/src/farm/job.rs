//! The jobs of `ginnel farm`, for the manager and the workers. Results are text, so that a program such as `wc` can be
//! a worker.

use super::input::Input;
use clap::ValueEnum;
use ginnel_farm::{Piece, Refusal, Task, count};
use std::collections::BTreeMap;
use std::io::Write;

/// What to do with the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Job {
    /// Count the characters (UTF-8), like `wc -m`.
    CountChars,
    /// Count the words, like `wc -w`.
    CountWords,
    /// Whatever the workers' programs do. Their output is printed in the order of the input.
    Filter,
}

impl Job {
    /// Returns the name that workers are told.
    pub fn name(self) -> &'static str {
        match self {
            Self::CountChars => "count-chars",
            Self::CountWords => "count-words",
            Self::Filter => "filter",
        }
    }
}

/// Executes a task in a worker that has no program.
pub fn work(task: &Task<'_>, result: &mut Vec<u8>) -> Result<(), String> {
    let count = match task.job {
        "count-chars" => count::characters(task.data),
        "count-words" => count::words(task.data),
        job => {
            return Err(format!(
                "this worker knows count-chars and count-words, not {job:?}; start it with `-- PROGRAM`"
            ));
        }
    };
    result.extend_from_slice(count.to_string().as_bytes());
    Ok(())
}

/// Combines the results of pieces.
pub struct Consolidation<'i, W: Write> {
    job: Job,
    input: &'i Input,
    count: u64,
    /// Results that wait for earlier ones, by the offsets of their pieces, with the ends of these pieces.
    waiting: BTreeMap<u64, (u64, Vec<u8>)>,
    printed_to: u64,
    output: W,
}

impl<'i, W: Write> Consolidation<'i, W> {
    pub fn new(job: Job, input: &'i Input, output: W) -> Self {
        Self { job, input, count: 0, waiting: BTreeMap::new(), printed_to: 0, output }
    }

    /// Takes a result.
    pub fn add(&mut self, piece: &Piece, result: &[u8]) -> Result<(), Refusal> {
        match self.job {
            Job::CountChars => self.count += number(piece, result)?,
            Job::CountWords => {
                self.count += number(piece, result)?;
                // A word across the boundary in front of this piece was counted twice.
                let mut around = [0; 2];
                if piece.offset > 0 && piece.len > 0 {
                    self.input.read(piece.offset - 1, &mut around)?;
                    let inside = !around.iter().copied().any(count::is_space);
                    self.count = self.count.saturating_sub(inside.into());
                }
            }
            Job::Filter => {
                let end = piece.offset + piece.len as u64;
                self.waiting.insert(piece.offset, (end, result.to_vec()));
                while let Some(next) = self.waiting.first_entry().filter(|e| *e.key() == self.printed_to) {
                    let (end, text) = next.remove();
                    self.output.write_all(&text)?;
                    self.printed_to = end;
                }
            }
        }
        Ok(())
    }

    /// Returns the count, if the job counts something.
    pub fn finish(mut self) -> std::io::Result<Option<u64>> {
        self.output.flush()?;
        Ok((self.job != Job::Filter).then_some(self.count))
    }
}

/// Parses a count. A worker is not trusted: the count cannot exceed the number of bytes.
fn number(piece: &Piece, result: &[u8]) -> Result<u64, Refusal> {
    let text = String::from_utf8_lossy(result);
    match text.trim().parse() {
        Ok(number) if number <= piece.len as u64 => Ok(number),
        _ => Err(Refusal::Nonsense(format!("{:.40?} is not a count", text.trim()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(offset: u64, len: usize) -> Piece {
        Piece { number: 1, offset, len, tries: 1 }
    }

    #[test]
    fn words_across_cuts_count_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text");
        let text = "one two  three\nfour";
        std::fs::write(&path, text).unwrap();
        let input = Input::open(Some(&path), None, 0).unwrap();
        for cut in 1..text.len() {
            let mut sum = Consolidation::new(Job::CountWords, &input, std::io::sink());
            for (at, part) in [(0, &text[..cut]), (cut, &text[cut..])] {
                let words = part.split_whitespace().count().to_string() + "\n";
                sum.add(&piece(at as u64, part.len()), words.as_bytes()).unwrap();
            }
            assert_eq!(sum.finish().unwrap(), Some(4), "{cut}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let input = Input::open(None, Some(10), 0).unwrap();
        let mut sum = Consolidation::new(Job::CountChars, &input, std::io::sink());
        for bad in [&b"11"[..], b"-1", b"", b"many", b"\xff", b"99999999999999999999"] {
            assert!(matches!(sum.add(&piece(0, 10), bad), Err(Refusal::Nonsense(_))), "{bad:?}");
        }
        sum.add(&piece(0, 10), b" 10\n").unwrap();
        assert_eq!(sum.finish().unwrap(), Some(10));
    }

    #[test]
    fn filtered_text_comes_in_order() {
        let input = Input::open(None, Some(30), 0).unwrap();
        let mut out = Vec::new();
        let mut sum = Consolidation::new(Job::Filter, &input, &mut out);
        for (at, text) in [(20, "c"), (0, "a"), (10, "b")] {
            sum.add(&piece(at, 10), text.as_bytes()).unwrap();
        }
        assert_eq!(sum.finish().unwrap(), None);
        assert_eq!(out, b"abc");
    }
}
