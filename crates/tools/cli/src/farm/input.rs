//! The input of a job.

use anyhow::{Context, Result};
use ginnel::{Mapping, SharedSlice};
use ginnel_farm::{Generated, Source};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// A file, or generated text.
pub enum Input {
    File { file: File, len: u64 },
    Generated { text: Generated, len: u64 },
}

impl Input {
    /// Opens the file if one is named; otherwise the input is generated text.
    pub fn open(file: Option<&Path>, generate: Option<u64>, seed: u64) -> Result<Self> {
        let Some(path) = file else {
            return Ok(Self::Generated { text: Generated { seed }, len: generate.unwrap_or(0) });
        };
        let file = File::open(path).with_context(|| path.display().to_string())?;
        let meta = file.metadata().with_context(|| path.display().to_string())?;
        anyhow::ensure!(
            meta.is_file(),
            "{}: not a regular file, but a piece whose worker dies must be read again",
            path.display()
        );
        Ok(Self::File { file, len: meta.len() })
    }

    pub fn len(&self) -> u64 {
        let (Self::File { len, .. } | Self::Generated { len, .. }) = self;
        *len
    }

    /// Reads some bytes of the input.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        match self {
            Self::File { file, .. } => file.read_exact_at(into, offset),
            Self::Generated { text, .. } => {
                text.read(offset, into);
                Ok(())
            }
        }
    }

    /// Splits the input into pieces of at most `size` bytes. With `lines`, each piece ends where a line does, unless
    /// the line is longer than a piece.
    pub fn pieces(&self, size: usize, lines: bool) -> impl Iterator<Item = Range<u64>> {
        let (len, mut at) = (self.len(), 0);
        std::iter::from_fn(move || {
            if at == len {
                return None;
            }
            let mut end = len.min(at + size as u64);
            if lines && end < len {
                // If the input cannot be read, that is reported when the piece is sent.
                end = self.line_end(at, end).ok().flatten().unwrap_or(end);
            }
            let piece = at..end;
            at = end;
            Some(piece)
        })
    }

    /// Returns the end of the last line that ends in this range.
    fn line_end(&self, from: u64, to: u64) -> io::Result<Option<u64>> {
        let mut buffer = [0; 4096];
        let mut end = to;
        while end > from {
            let begin = end.saturating_sub(buffer.len() as u64).max(from);
            let part = &mut buffer[..(end - begin) as usize];
            self.read(begin, part)?;
            if let Some(at) = part.iter().rposition(|byte| *byte == b'\n') {
                return Ok(Some(begin + at as u64 + 1));
            }
            end = begin;
        }
        Ok(None)
    }
}

impl Source for &Input {
    fn fill(&mut self, offset: u64, room: SharedSlice<'_, Mapping>) -> io::Result<()> {
        match self {
            Input::File { file, .. } => { file }.fill(offset, room),
            Input::Generated { text, .. } => { *text }.fill(offset, room),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_end_where_lines_do() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text");
        let mut text = String::new();
        for n in 0..3000usize {
            text += &"x".repeat(n * 7 % 90);
            text += "\n";
        }
        text += &"long".repeat(10_000);
        std::fs::write(&path, &text).unwrap();
        let input = Input::open(Some(&path), None, 0).unwrap();
        for size in [10, 100, 5000, 1 << 20] {
            let mut at = 0;
            for piece in input.pieces(size, true) {
                assert_eq!(piece.start, at);
                assert!(!piece.is_empty() && piece.end - piece.start <= size as u64);
                let part = &text.as_bytes()[piece.start as usize..piece.end as usize];
                let whole = part.last() == Some(&b'\n') || piece.end == input.len();
                assert!(whole || (part.len() == size && !part.contains(&b'\n')), "{piece:?}");
                at = piece.end;
            }
            assert_eq!(at, input.len());
        }
    }
}
