//! Models of a lane of a readiness board: a sleeper, and two peers that have something for it.

use super::{Parker, explore, must_fail};
use ginnel_layout::board::{ARMED, BITS, LANE, SUMMARY};
use ginnel_ring::board::{Lane, Poster};
use ginnel_ring::wait::{WaitMode, Waitable, wait};
use ginnel_shmem::{LoomMemory, Order, SharedMemory};
use loom::thread;

/// Words behind the lane with the number of things that there are for each slot.
const DATA: usize = LANE;

/// A lane with the words of two slots.
fn lane(slots: [usize; 2]) -> LoomMemory {
    let bits = slots.map(|slot| BITS + slot / 64 * 8);
    let data = [DATA, DATA + 8];
    LoomMemory::new(LANE + 16, [ARMED, SUMMARY].into_iter().chain(bits).chain(data))
}

struct Sleep(Lane<LoomMemory>);

impl Waitable for Sleep {
    fn ready(&mut self) -> bool {
        self.0.has_any()
    }
    fn arm(&mut self) {
        self.0.arm();
    }
    fn disarm(&mut self) {
        self.0.disarm();
    }
}

/// Each of two peers has something for its own slot. The sleeper must find all of it.
fn both_arrive(slots: [usize; 2], times: u64, posters: &LoomMemory, sleeper: LoomMemory) {
    let mut parker = Parker::new();
    let peers: Vec<_> = slots
        .into_iter()
        .enumerate()
        .map(|(i, slot)| {
            let (lane, bell) = (posters.clone(), parker.clone());
            thread::spawn(move || {
                let mut poster = Poster::default();
                for time in 1..=if i == 0 { times } else { 1 } {
                    lane.store_relaxed_u64(DATA + i * 8, time);
                    bell.ring_if(poster.post(&lane, slot));
                }
            })
        })
        .collect();
    let mut sleep = Sleep(Lane::new(sleeper.clone()));
    let mut seen = [0; 2];
    while seen != [times, 1] {
        assert!(wait(&mut sleep, WaitMode::Interrupt, &mut parker, None).unwrap());
        sleep.0.take(|taken| {
            for (i, slot) in slots.iter().enumerate() {
                if *slot == taken {
                    let data = sleeper.load_relaxed_u64(DATA + i * 8);
                    assert!(data > 0, "old: the slot was taken before what it stands for");
                    seen[i] = data;
                }
            }
        });
    }
    for peer in peers {
        peer.join().unwrap();
    }
}

#[test]
fn slots_of_one_word_arrive() {
    explore(2, || {
        let lane = lane([0, 1]);
        both_arrive([0, 1], 1, &lane, lane.clone());
    });
}

#[test]
fn slots_of_two_words_arrive() {
    explore(2, || {
        let lane = lane([0, 64]);
        both_arrive([0, 64], 1, &lane, lane.clone());
    });
}

/// Something that comes for a slot while the slot is being taken is found afterwards.
#[test]
fn a_slot_that_is_set_again_arrives_again() {
    explore(2, || {
        let lane = lane([0, 64]);
        both_arrive([0, 64], 2, &lane, lane.clone());
    });
}

#[test]
fn without_a_fence_a_wake_up_is_lost() {
    must_fail(super::ASLEEP, || {
        let lane = lane([0, 1]);
        both_arrive([0, 1], 1, &lane.without(Order::Fence), lane.clone());
    });
    must_fail(super::ASLEEP, || {
        let lane = lane([0, 1]);
        both_arrive([0, 1], 1, &lane, lane.without(Order::Fence));
    });
}

#[test]
fn without_release_or_acquire_a_slot_is_taken_too_early() {
    must_fail(&["old"], || {
        let lane = lane([0, 1]);
        both_arrive([0, 1], 1, &lane.without(Order::Release), lane.clone());
    });
    must_fail(&["old"], || {
        let lane = lane([0, 1]);
        both_arrive([0, 1], 1, &lane, lane.without(Order::Acquire));
    });
}
