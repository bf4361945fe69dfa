//! The state of one job, without any transport: which worker holds which piece.

use crate::report::{Departure, Report, WorkerReport};
use std::collections::VecDeque;
use std::iter::Peekable;
use std::ops::Range;
use std::time::{Duration, Instant};

/// A piece of the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The piece's number. Its manager never uses it again.
    pub number: u64,
    /// The piece's offset in the input.
    pub offset: u64,
    /// The piece's length in bytes.
    pub len: usize,
    /// How often the piece has been given to a worker.
    pub tries: u32,
}

/// The state of one job: which pieces remain, which worker holds which piece, and which results count.
///
/// It works with any transport. At any time a piece is in exactly one state: not yet cut, waiting for another attempt, held
/// by one living worker, or done. So its result counts once.
pub struct JobState<I: Iterator<Item = Range<u64>>> {
    pieces: Peekable<I>,
    again: VecDeque<Piece>,
    workers: Vec<Worker>,
    /// The number of the next piece.
    next: u64,
    begun: Instant,
    ended: Option<Duration>,
    pieces_done: u64,
    bytes_done: u64,
    reassigned: u64,
    /// Pieces that living workers hold.
    held: usize,
}

struct Worker {
    report: WorkerReport,
    /// The pieces that the worker holds, in the order in which they were given.
    holds: VecDeque<Held>,
}

struct Held {
    piece: Piece,
    since: Instant,
}

impl<I: Iterator<Item = Range<u64>>> JobState<I> {
    /// Makes the state of a job with these pieces, the first of which gets the number `first`.
    pub fn new(pieces: I, first: u64) -> Self {
        Self {
            pieces: pieces.peekable(),
            again: VecDeque::new(),
            workers: Vec::new(),
            next: first,
            begun: Instant::now(),
            ended: None,
            pieces_done: 0,
            bytes_done: 0,
            reassigned: 0,
            held: 0,
        }
    }

    /// Adds a worker, and returns its number, counted from 0. `late` says that the job has begun without it.
    pub fn join(&mut self, name: String, late: bool) -> usize {
        let joined = if late { self.begun.elapsed() } else { Duration::ZERO };
        let report = WorkerReport {
            name,
            joined,
            last: joined,
            pieces: 0,
            bytes: 0,
            failed: 0,
            lost: 0,
            departure: None,
        };
        self.workers.push(Worker { report, holds: VecDeque::new() });
        self.workers.len() - 1
    }

    /// Gives this worker a piece, if one is left. The worker holds the piece until it answers or departs.
    pub fn give(&mut self, worker: usize) -> Option<Piece> {
        let worker = self.workers.get_mut(worker).filter(|worker| worker.report.departure.is_none())?;
        let mut piece = match self.again.pop_front() {
            Some(piece) => piece,
            None => {
                let range = self.pieces.next()?;
                let len = range.end.saturating_sub(range.start);
                let number = self.next;
                self.next += 1;
                Piece {
                    number,
                    offset: range.start,
                    len: usize::try_from(len).unwrap_or(usize::MAX),
                    tries: 0,
                }
            }
        };
        piece.tries += 1;
        worker.holds.push_back(Held { piece, since: Instant::now() });
        self.held += 1;
        Some(piece)
    }

    /// Takes back the piece that was given last, because the worker never got it. The attempt does not count.
    pub fn take_back(&mut self, worker: usize) {
        let Some(Held { mut piece, .. }) = self.workers.get_mut(worker).and_then(|w| w.holds.pop_back())
        else {
            return;
        };
        piece.tries -= 1;
        self.held -= 1;
        self.again.push_front(piece);
    }

    /// Returns the piece of this number, if the worker holds it.
    pub fn held(&self, worker: usize, number: u64) -> Option<Piece> {
        let holds = &self.workers.get(worker)?.holds;
        holds.iter().find(|held| held.piece.number == number).map(|held| held.piece)
    }

    /// Records that the worker has answered a piece. Returns the piece if the worker holds it; only then the answer counts.
    pub fn answered(&mut self, worker: usize, number: u64) -> Option<Piece> {
        let piece = self.release(worker, number)?;
        let now = self.begun.elapsed();
        let report = &mut self.workers.get_mut(worker)?.report;
        report.pieces += 1;
        report.bytes += piece.len as u64;
        report.last = now;
        self.pieces_done += 1;
        self.bytes_done += piece.len as u64;
        if self.is_done() {
            self.ended = Some(now);
        }
        Some(piece)
    }

    /// Records that the worker has failed at a piece, which then waits for another attempt. Returns the piece if the worker
    /// holds it.
    pub fn failed(&mut self, worker: usize, number: u64) -> Option<Piece> {
        let piece = self.release(worker, number)?;
        self.workers.get_mut(worker)?.report.failed += 1;
        self.reassigned += 1;
        self.again.push_back(piece);
        Some(piece)
    }

    fn release(&mut self, worker: usize, number: u64) -> Option<Piece> {
        let holds = &mut self.workers.get_mut(worker)?.holds;
        let at = holds.iter().position(|held| held.piece.number == number)?;
        let piece = holds.remove(at)?.piece;
        self.held -= 1;
        Some(piece)
    }

    /// Removes a worker. The pieces that it holds wait for another one. Returns the piece with the most attempts among them.
    pub fn depart(&mut self, worker: usize, departure: Departure) -> Option<Piece> {
        let worker = self.workers.get_mut(worker)?;
        worker.report.departure.get_or_insert(departure);
        let mut worst: Option<Piece> = None;
        // The worker can only have worked on the oldest piece. The others waited behind it, so this was no attempt at them.
        for (n, Held { mut piece, .. }) in worker.holds.drain(..).enumerate() {
            if n > 0 {
                piece.tries -= 1;
            }
            if worst.is_none_or(|worst| worst.tries < piece.tries) {
                worst = Some(piece);
            }
            worker.report.lost += 1;
            self.reassigned += 1;
            self.held -= 1;
            self.again.push_back(piece);
        }
        worst
    }

    /// Returns the number of pieces that a worker holds.
    pub fn holds(&self, worker: usize) -> usize {
        self.workers.get(worker).map_or(0, |worker| worker.holds.len())
    }

    /// Returns the numbers of the pieces that a worker holds.
    pub fn held_by(&self, worker: usize) -> impl Iterator<Item = u64> {
        self.workers
            .get(worker)
            .into_iter()
            .flat_map(|worker| worker.holds.iter().map(|held| held.piece.number))
    }

    /// Returns since when a worker has owed an answer: when it answered last or was given the piece, whichever came later.
    pub fn waiting_since(&self, worker: usize) -> Option<Instant> {
        let worker = self.workers.get(worker)?;
        let last = self.begun + worker.report.last;
        worker.holds.front().map(|held| held.since.max(last))
    }

    /// Returns whether there is a piece to give.
    pub fn has_more(&mut self) -> bool {
        !self.again.is_empty() || self.pieces.peek().is_some()
    }

    /// Returns whether every piece has been answered.
    pub fn is_done(&mut self) -> bool {
        self.held == 0 && !self.has_more()
    }

    /// Returns the number for the first piece of the next job.
    pub fn next_number(&self) -> u64 {
        self.next
    }

    /// Returns the number of pieces that have been answered so far, and of their bytes.
    pub fn done(&self) -> (u64, u64) {
        (self.pieces_done, self.bytes_done)
    }

    /// Returns the name that a worker gives itself.
    pub fn name(&self, worker: usize) -> &str {
        self.workers.get(worker).map_or("", |worker| &worker.report.name)
    }

    /// Returns a report of the job so far.
    pub fn report(&self) -> Report {
        Report {
            time: self.ended.unwrap_or_else(|| self.begun.elapsed()),
            pieces: self.pieces_done,
            bytes: self.bytes_done,
            reassigned: self.reassigned,
            workers: self.workers.iter().map(|worker| worker.report.clone()).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::equal;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[test]
    fn a_dead_workers_pieces_go_to_others_and_count_once() {
        let mut state = JobState::new(equal(30, 10), 5);
        let (a, b) = (state.join("a".into(), false), state.join("b".into(), true));
        let (one, two) = (state.give(a).unwrap(), state.give(a).unwrap());
        assert_eq!((one.number, one.offset, one.len, one.tries), (5, 0, 10, 1));
        let worst = state.depart(a, Departure::Died).unwrap();
        assert_eq!((worst.number, worst.tries), (one.number, 1), "the oldest was being worked on");
        assert!(state.give(a).is_none() && state.answered(a, one.number).is_none());
        assert!(state.answered(b, one.number).is_none(), "it does not hold it yet");
        let again = [state.give(b).unwrap(), state.give(b).unwrap()];
        assert_eq!(again.map(|piece| (piece.number, piece.tries)), [(one.number, 2), (two.number, 1)]);
        for piece in again {
            assert_eq!(state.answered(b, piece.number), Some(piece));
            assert!(state.answered(b, piece.number).is_none(), "it counts once");
        }
        let last = state.give(b).unwrap();
        assert!(state.give(b).is_none() && !state.is_done());
        state.answered(b, last.number).unwrap();
        assert!(state.is_done());
        let report = state.report();
        assert_eq!((report.pieces, report.bytes, report.reassigned, report.deaths()), (3, 30, 2, 1));
        assert_eq!((report.workers[0].lost, report.workers[1].pieces, state.next_number()), (2, 3, 8));
    }

    #[test]
    fn a_piece_that_was_never_sent_counts_as_untried() {
        let mut state = JobState::new([0..5, 5..5, Range { start: 9, end: 7 }].into_iter(), 1);
        let a = state.join("a".into(), false);
        let piece = state.give(a).unwrap();
        state.take_back(a);
        state.take_back(a);
        assert_eq!(state.give(a), Some(piece));
        assert_eq!(
            [state.give(a).unwrap().len, state.give(a).unwrap().len],
            [0, 0],
            "empty, or turned round"
        );
        assert_eq!(state.failed(a, piece.number), Some(piece));
        assert_eq!(state.give(a).unwrap().tries, 2);
        assert_eq!((state.report().reassigned, state.holds(a), state.held_by(a).count()), (1, 3, 3));
    }

    #[derive(Clone, Debug)]
    enum Event {
        Join,
        Give(usize),
        TakeBack(usize),
        /// The worker answers the nth piece that it holds.
        Answer(usize, usize),
        Fail(usize, usize),
        /// The worker answers the piece with this number, whether it holds that piece or not.
        Lie(usize, u64),
        Die(usize),
    }

    fn event() -> impl Strategy<Value = Event> {
        let w = 0..8usize;
        prop_oneof![
            1 => Just(Event::Join),
            6 => w.clone().prop_map(Event::Give),
            1 => w.clone().prop_map(Event::TakeBack),
            5 => (w.clone(), 0..4usize).prop_map(|(w, n)| Event::Answer(w, n)),
            1 => (w.clone(), 0..4usize).prop_map(|(w, n)| Event::Fail(w, n)),
            1 => (w.clone(), 0..60u64).prop_map(|(w, n)| Event::Lie(w, n)),
            1 => w.prop_map(Event::Die),
        ]
    }

    proptest! {
        /// Whatever happens, each piece counts exactly once, for a worker that held it and lived.
        #[test]
        fn each_piece_counts_once(
            lengths in prop::collection::vec(0..100u64, 0..40),
            events in prop::collection::vec(event(), 0..300),
        ) {
            let mut at = 0;
            let pieces: Vec<_> = lengths.iter().map(|len| { at += len; at - len..at }).collect();
            let mut state = JobState::new(pieces.iter().cloned(), 1);
            // `holds` has the pieces that each living worker holds; `counted`, the pieces whose results have counted.
            let mut holds: Vec<Option<Vec<u64>>> = vec![Some(vec![])];
            state.join("first".into(), false);
            let mut counted = BTreeMap::new();
            let mut count = |piece: Piece| assert!(counted.insert(piece.number, piece).is_none(), "twice: {piece:?}");
            for event in events {
                match event {
                    Event::Join => {
                        assert_eq!(state.join("late".into(), true), holds.len());
                        holds.push(Some(vec![]));
                    }
                    Event::Give(w) => {
                        let more = state.has_more();
                        let given = state.give(w);
                        let living = holds.get_mut(w).and_then(Option::as_mut);
                        prop_assert_eq!(given.is_some(), more && living.is_some());
                        if let (Some(piece), Some(held)) = (given, living) { held.push(piece.number); }
                    }
                    Event::TakeBack(w) => {
                        state.take_back(w);
                        if let Some(Some(held)) = holds.get_mut(w) { held.pop(); }
                    }
                    Event::Answer(w, n) | Event::Fail(w, n) => {
                        let Some(Some(held)) = holds.get_mut(w) else { continue };
                        if n >= held.len() { continue }
                        let number = held.remove(n);
                        match event {
                            Event::Answer(..) => count(state.answered(w, number).unwrap()),
                            _ => prop_assert_eq!(state.failed(w, number).unwrap().number, number),
                        }
                    }
                    Event::Lie(w, number) => {
                        let held = holds.get_mut(w).and_then(Option::as_mut);
                        let at = held.as_ref().and_then(|held| held.iter().position(|n| *n == number));
                        let known = state.answered(w, number);
                        prop_assert_eq!(known.is_some(), at.is_some());
                        if let (Some(piece), Some(at), Some(held)) = (known, at, held) { held.remove(at); count(piece); }
                    }
                    Event::Die(w) => {
                        let held = holds.get_mut(w).and_then(Option::take).unwrap_or_default();
                        prop_assert_eq!(state.depart(w, Departure::Died).is_some(), !held.is_empty());
                    }
                }
            }
            // One last worker does the rest, when no other worker holds a piece.
            for w in 0..holds.len() { state.depart(w, Departure::Left); }
            let last = state.join("last".into(), true);
            while let Some(piece) = state.give(last) { count(state.answered(last, piece.number).unwrap()); }
            prop_assert!(state.is_done());
            let mut ranges: Vec<_> = counted.values().map(|p| p.offset..p.offset + p.len as u64).collect();
            ranges.sort_by_key(|range| (range.start, range.end));
            prop_assert_eq!(&ranges, &pieces);
            let report = state.report();
            prop_assert_eq!((report.pieces, report.bytes), (lengths.len() as u64, at));
            prop_assert_eq!(report.workers.iter().map(|w| w.pieces).sum::<u64>(), report.pieces);
        }
    }
}
