//! The features that a driver sets and gets (NVMe 1.4, sections 5.9 and 5.21). Most of them change nothing here, and are
//! only remembered, in the state, so that a driver does not notice that the process has changed. None can be saved.

use ginnel_layout::nvme::{Feature, Status};
use ginnel_layout::nvme_state::FEATURES;
use ginnel_nvme::State;
use ginnel_shmem::Mapping;

/// The temperature above which a driver would be warned, in kelvin. There is no thermometer.
pub(super) const WARNING_KELVIN: u16 = 343;

/// The words of the state at [`FEATURES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Word {
    Arbitration,
    Over,
    Under,
    ErrorRecovery,
    Coalescing,
    Atomicity,
    AsyncEvents,
    /// The number of queues that the driver may create; 0 if it has not asked.
    Queues,
    /// The last admin command that deleted a queue: its number.
    Deleted,
    /// Whether the namespace has changed: see [`super::events`].
    Changed,
}

impl Word {
    const ALL: [Self; 10] = [
        Self::Arbitration,
        Self::Over,
        Self::Under,
        Self::ErrorRecovery,
        Self::Coalescing,
        Self::Atomicity,
        Self::AsyncEvents,
        Self::Queues,
        Self::Deleted,
        Self::Changed,
    ];

    fn at(self) -> usize {
        FEATURES + 8 * self as usize
    }

    fn default(self) -> u64 {
        match self {
            Self::Over => WARNING_KELVIN.into(),
            _ => 0,
        }
    }

    pub fn load(self, state: &State<Mapping>) -> u64 {
        state.load(self.at())
    }

    pub fn store(self, state: &State<Mapping>, value: u64) {
        state.store(self.at(), value);
    }
}

/// Sets all words to what they are after a reset.
pub(super) fn reset(state: &State<Mapping>) {
    Word::ALL.into_iter().for_each(|word| word.store(state, word.default()));
}

/// What a Set Features asks for, beyond remembering a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Set {
    /// It is done; this is the result of the command.
    Done(u32),
    /// Turn the volatile write cache on or off.
    WriteCache(bool),
}

/// The facts that features depend on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts {
    /// The number of I/O queues.
    pub queues: u16,
    /// The number of interrupt vectors.
    pub vectors: u16,
    /// Whether there is a write cache that can be turned off.
    pub write_cache: bool,
    /// Whether it is on.
    pub is_cache_on: bool,
    /// Whether I/O queues exist.
    pub has_queues: bool,
}

/// Executes Set Features with these words 10 and 11.
pub(super) fn set(state: &State<Mapping>, facts: &Facts, word10: u32, value: u32) -> Result<Set, Status> {
    if word10 >> 31 != 0 {
        return Err(Status::NOT_SAVEABLE);
    }
    let remember = |word: Word, value: u32| {
        word.store(state, value.into());
        Ok(Set::Done(0))
    };
    match Feature(word10 as u8) {
        Feature::ARBITRATION => remember(Word::Arbitration, value),
        // There is one power state.
        Feature::POWER if value & 0x1f == 0 => Ok(Set::Done(0)),
        Feature::TEMPERATURE => remember(threshold(value)?, value & 0xffff),
        // Bit 16 asks for errors where blocks were deallocated.
        Feature::ERROR_RECOVERY if value >> 16 == 0 => remember(Word::ErrorRecovery, value),
        Feature::WRITE_CACHE if facts.write_cache => Ok(Set::WriteCache(value & 1 != 0)),
        Feature::QUEUES => {
            let (submission, completion) = (value & 0xffff, value >> 16);
            if submission == 0xffff || completion == 0xffff {
                return Err(Status::INVALID_FIELD);
            }
            if facts.has_queues {
                return Err(Status::SEQUENCE);
            }
            let most = u32::from(facts.queues) - 1;
            Word::Queues.store(state, u64::from(submission.max(completion).min(most)) + 1);
            Ok(Set::Done(submission.min(most) | completion.min(most) << 16))
        }
        Feature::COALESCING => remember(Word::Coalescing, value & 0xffff),
        Feature::VECTOR if value & 0xffff < facts.vectors.into() => Ok(Set::Done(0)),
        Feature::ATOMICITY => remember(Word::Atomicity, value & 1),
        Feature::ASYNC_EVENTS => remember(Word::AsyncEvents, value),
        _ => Err(Status::INVALID_FIELD),
    }
}

/// Executes Get Features with these words 10 and 11. Returns the result of the command.
pub(super) fn get(state: &State<Mapping>, facts: &Facts, word10: u32, word11: u32) -> Result<u32, Status> {
    let feature = Feature(word10 as u8);
    let select = word10 >> 8 & 7;
    // 0: current. 1: default. 2: saved, which is the default. 3: what can be done with the feature.
    if select > 3 {
        return Err(Status::INVALID_FIELD);
    }
    let word = |word: Word| if select == 0 { word.load(state) as u32 } else { word.default() as u32 };
    let value = match feature {
        Feature::ARBITRATION => word(Word::Arbitration),
        Feature::POWER => 0,
        Feature::TEMPERATURE => word(threshold(word11)?),
        Feature::ERROR_RECOVERY => word(Word::ErrorRecovery),
        Feature::WRITE_CACHE if facts.write_cache => (select != 0 || facts.is_cache_on).into(),
        Feature::QUEUES => {
            let most = u32::from(facts.queues);
            let number = if select == 0 { word(Word::Queues) } else { 0 };
            let number = if number == 0 { most } else { number.min(most) } - 1;
            number | number << 16
        }
        Feature::COALESCING => word(Word::Coalescing),
        Feature::VECTOR if word11 & 0xffff < facts.vectors.into() => word11 & 0xffff | 1 << 16,
        Feature::ATOMICITY => word(Word::Atomicity),
        Feature::ASYNC_EVENTS => word(Word::AsyncEvents),
        _ => return Err(Status::INVALID_FIELD),
    };
    const CHANGEABLE: u32 = 1 << 2;
    Ok(if select == 3 { CHANGEABLE } else { value })
}

/// Returns the word of a temperature threshold.
fn threshold(word11: u32) -> Result<Word, Status> {
    // The composite temperature is the only one.
    match (word11 >> 16 & 0xf, word11 >> 20 & 3) {
        (0, 0) => Ok(Word::Over),
        (0, 1) => Ok(Word::Under),
        _ => Err(Status::INVALID_FIELD),
    }
}

/// Returns the number of I/O queues that the driver may create.
pub(super) fn queues(state: &State<Mapping>, facts: &Facts) -> u16 {
    match Word::Queues.load(state) {
        // A driver that creates queues without asking gets what there is.
        0 => facts.queues,
        granted => granted.min(facts.queues.into()) as u16,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_nvme::Constants;

    fn state() -> State<Mapping> {
        let memory = Mapping::anonymous(State::<Mapping>::len(4, 16)).unwrap();
        let state =
            State::create(memory, &Constants { queues: 4, slots: 16, mapped: false, cap: 0, vs: 0 }).unwrap();
        reset(&state);
        state
    }

    const FACTS: Facts =
        Facts { queues: 4, vectors: 5, write_cache: true, is_cache_on: true, has_queues: false };

    #[test]
    fn what_is_set_is_what_is_got() {
        let state = state();
        for (feature, value) in [
            (Feature::ARBITRATION, 0x0102_0304),
            (Feature::TEMPERATURE, 300),
            (Feature::TEMPERATURE, 1 << 20 | 200),
            (Feature::ERROR_RECOVERY, 7),
            (Feature::COALESCING, 0x102),
            (Feature::ATOMICITY, 1),
            (Feature::ASYNC_EVENTS, 0x100),
        ] {
            let word10 = u32::from(feature.0);
            let before = get(&state, &FACTS, word10, value).unwrap();
            assert_eq!(set(&state, &FACTS, word10, value), Ok(Set::Done(0)));
            assert_eq!(get(&state, &FACTS, word10, value), Ok(value & !(3 << 20)), "{feature:?}");
            assert_eq!(get(&state, &FACTS, word10 | 1 << 8, value), Ok(before), "{feature:?}");
            assert_eq!(get(&state, &FACTS, word10 | 3 << 8, value), Ok(4));
            assert_eq!(set(&state, &FACTS, word10 | 1 << 31, value), Err(Status::NOT_SAVEABLE));
        }
        reset(&state);
        assert_eq!(get(&state, &FACTS, Feature::TEMPERATURE.0.into(), 0), Ok(WARNING_KELVIN.into()));
        assert_eq!(get(&state, &FACTS, Feature::ASYNC_EVENTS.0.into(), 0), Ok(0));
    }

    #[test]
    fn a_driver_gets_as_many_queues_as_there_are() {
        let state = state();
        let word10 = u32::from(Feature::QUEUES.0);
        assert_eq!(get(&state, &FACTS, word10, 0), Ok(0x3_0003));
        assert_eq!(queues(&state, &FACTS), 4);
        for (asked, granted, queues_now) in
            [(0x3f_003f, 0x3_0003, 4), (0, 0, 1), (0x1_0001, 0x1_0001, 2), (0x1_0000, 0x1_0000, 2)]
        {
            assert_eq!(set(&state, &FACTS, word10, asked), Ok(Set::Done(granted)));
            assert_eq!(queues(&state, &FACTS), queues_now);
        }
        assert_eq!(set(&state, &FACTS, word10, 0xffff), Err(Status::INVALID_FIELD));
        assert_eq!(set(&state, &FACTS, word10, 0xffff_0000), Err(Status::INVALID_FIELD));
        let late = Facts { has_queues: true, ..FACTS };
        assert_eq!(set(&state, &late, word10, 0), Err(Status::SEQUENCE));
    }

    #[test]
    fn what_there_is_not_is_refused() {
        let state = state();
        for (word10, value) in [
            (0x02, 1),
            (0x04, 1 << 16),
            (0x04, 2 << 20),
            (0x05, 1 << 16),
            (0x09, 5),
            (0x00, 0),
            (0x0c, 0),
            (0x80, 0),
            (0xff, 0),
        ] {
            assert_eq!(set(&state, &FACTS, word10, value), Err(Status::INVALID_FIELD), "{word10:#x}");
        }
        assert_eq!(get(&state, &FACTS, 0x4 << 8 | 0x01, 0), Err(Status::INVALID_FIELD));
        let uncached = Facts { write_cache: false, ..FACTS };
        assert_eq!(set(&state, &uncached, 0x06, 1), Err(Status::INVALID_FIELD));
        assert_eq!(get(&state, &uncached, 0x06, 0), Err(Status::INVALID_FIELD));
        assert_eq!(set(&state, &FACTS, 0x06, 0), Ok(Set::WriteCache(false)));
        let off = Facts { is_cache_on: false, ..FACTS };
        assert_eq!(get(&state, &off, 0x06, 0), Ok(0));
        assert_eq!(get(&state, &off, 0x106, 0), Ok(1));
    }
}
