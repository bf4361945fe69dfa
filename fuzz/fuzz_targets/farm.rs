//! A farm whose other side sends anything, in messages and by scribbling on the ring. The manager parses the messages of a
//! worker and enters them into the state of the job: each piece counts once, for the worker that held it, and an honest worker can always
//! do the rest. A worker parses the messages of a manager. A run depends only on its input.
#![no_main]

use ginnel_farm::message::{Answer, Order};
use ginnel_farm::{Departure, JobState, equal};
use ginnel_fuzz::farm::{CAPACITY, Event, events};
use ginnel_layout::ring::footprint;
use ginnel_ring::RecvError;
use ginnel_ring::message::{Consumer, Producer};
use ginnel_shmem::{Mapping, SharedMemory};
use std::collections::HashSet;

const INPUT: u64 = 1000;
const PIECE: usize = 7;

/// One side that sends anything, and the ring that it uses.
struct Talker {
    memory: Mapping,
    says: Producer<Mapping>,
    hears: Consumer<Mapping>,
    /// The number of this worker in the job's state.
    worker: usize,
}

impl Talker {
    fn new(worker: usize) -> Option<Self> {
        let memory = Mapping::anonymous(footprint(CAPACITY)).ok()?;
        let says = Producer::new(memory.clone(), CAPACITY);
        Some(Self { hears: Consumer::new(memory.clone(), CAPACITY), says, memory, worker })
    }
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let mut state = JobState::new(equal(INPUT, PIECE), 1);
    let mut talkers = Vec::new();
    for name in ["a", "b"] {
        let Some(talker) = Talker::new(state.join(name.into(), false)) else { return };
        talkers.push(talker);
    }
    let (mut counted, mut bytes, mut content) = (HashSet::new(), 0, Vec::new());
    for (who, event) in events(input) {
        let talker = &mut talkers[who];
        let worker = talker.worker;
        let departure = match event {
            Event::Give => {
                state.give(worker);
                None
            }
            Event::TakeBack => {
                state.take_back(worker);
                None
            }
            Event::Say(bytes) => {
                let _ = talker.says.send(&bytes);
                None
            }
            Event::Scribble(at, word) => {
                talker.memory.store_relaxed_u64(at, word);
                None
            }
            // As the manager receives messages.
            Event::Hear => match talker.hears.peek() {
                Err(RecvError::Empty) => None,
                Err(_) => Some(Departure::Died),
                Ok(message) => {
                    // A worker would parse the same bytes.
                    if let Ok(Order::Piece(_, data)) = Order::read(message.slice()) {
                        assert!(data.len() <= message.len());
                        ginnel_farm::count::characters(data);
                    }
                    let answer = Answer::read(message.slice(), &mut content);
                    let _ = message.release();
                    match answer {
                        Err(why) => Some(Departure::Dismissed(why)),
                        Ok(Answer::Result(number)) => match state.answered(worker, number) {
                            Some(piece) => {
                                assert!(counted.insert(piece.number), "piece {number} counts twice");
                                bytes += piece.len as u64;
                                None
                            }
                            None => Some(Departure::Dismissed("it does not hold it".into())),
                        },
                        Ok(Answer::Failed(number)) => match state.failed(worker, number) {
                            Some(_) => None,
                            None => Some(Departure::Dismissed("it does not hold it".into())),
                        },
                    }
                }
            },
        };
        if let Some(departure) = departure {
            state.depart(worker, departure);
            assert_eq!(state.holds(worker), 0);
            let Some(another) = Talker::new(state.join("another".into(), true)) else { return };
            talkers[who] = another;
        }
    }
    for Talker { worker, .. } in talkers {
        state.depart(worker, Departure::Left);
    }
    let honest = state.join("honest".into(), true);
    while let Some(piece) = state.give(honest) {
        assert!(state.answered(honest, piece.number).is_some() && counted.insert(piece.number));
        bytes += piece.len as u64;
    }
    assert!(state.is_done() && bytes == INPUT && state.report().bytes == INPUT);
});
