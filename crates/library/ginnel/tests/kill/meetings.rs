//! Death with a permit of a semaphore, in a turn of a once, or as a party of a barrier, while others wait for it.

use crate::survivors::{Act, Party, Shared};
use ginnel::sync::{Barrier, Once, Semaphore};
use ginnel::{Endpoint, Error};
use kit::wait::WATCHDOG;
use std::time::{Duration, Instant};

// Offset in the shared page.
const ONCE_PAIR: usize = 64;

/// A process that uses these objects.
pub struct Meetings {
    shared: Shared,
    semaphore: Semaphore,
    once: Once,
    barrier: Barrier,
}

impl Meetings {
    /// There is one permit. A process that dies with it loses it; [`help`](Party::help) makes another.
    fn take_and_give(&mut self) {
        let begin = Instant::now();
        self.semaphore.acquire().unwrap();
        self.shared.note(begin, false);
        (0..500).for_each(|_| std::hint::spin_loop());
        self.give();
    }

    fn give(&mut self) {
        match self.semaphore.release(1) {
            // The permit only seemed lost and was replaced, so there is one already.
            Ok(()) | Err(Error::Overflow { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }

    /// Takes the turn of the once and drops it, so that the next process gets it.
    fn have_a_turn(&mut self) {
        let begin = Instant::now();
        let Some(turn) = self.once.begin().unwrap() else {
            assert!(self.shared.is_over(), "nobody has said that it is done");
            return;
        };
        self.shared.note(begin, false);
        if turn.is_again() {
            self.shared.repair(ONCE_PAIR);
        }
        self.shared.work(ONCE_PAIR);
    }

    /// Any two processes meet. A death breaks the barrier, either for a process that waits or for the next one that arrives.
    fn meet(&mut self) {
        let begin = Instant::now();
        loop {
            match self.barrier.wait() {
                Ok(_) => return,
                Err(Error::BarrierBroken) => match self.barrier.reset() {
                    Ok(()) => self.shared.note(begin, true),
                    // The other process has to notice the break first.
                    Err(Error::WouldBlock) => std::thread::yield_now(),
                    Err(error) => panic!("{error}"),
                },
                Err(Error::TimedOut) if self.shared.is_over() => return,
                Err(Error::TimedOut) => {}
                Err(error) => panic!("{error}"),
            }
        }
    }
}

impl Party for Meetings {
    const ACTS: &[(&str, Act<Self>)] = &[
        ("semaphore, others waiting", Self::take_and_give),
        ("once, others waiting", Self::have_a_turn),
        ("barrier, others waiting", Self::meet),
    ];
    /// Every victim is a party of the barrier, wherever it dies.
    const ALL_ARE_TOLD: bool = true;

    fn new(endpoint: &Endpoint, shared: &Shared) -> Self {
        let mut party = Self {
            shared: shared.clone(),
            semaphore: endpoint.semaphore("s", 1, 1).unwrap(),
            once: endpoint.once("o").unwrap(),
            barrier: endpoint.barrier("b", 2).unwrap(),
        };
        party.semaphore.set_timeout(Some(WATCHDOG));
        party.once.set_timeout(Some(WATCHDOG));
        // A party that waits again after a timeout is counted only once.
        party.barrier.set_timeout(Some(Duration::from_millis(100)));
        party
    }

    fn round(&mut self) {
        self.take_and_give();
        self.have_a_turn();
        self.meet();
    }

    fn leave(mut self) {
        if let Some(turn) = self.once.begin().unwrap() {
            turn.complete().unwrap();
        }
        assert!(self.once.is_done());
    }

    fn help(&mut self) {
        if self.semaphore.permits().unwrap() == 0 {
            self.give();
        }
    }
}
