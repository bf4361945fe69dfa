//! The survivors use the objects all the time, and sleep when they have to wait. Victims come, take part in one operation, and
//! are killed.
//!
//! The objects guard pairs of words that are equal unless a process is at work on them. It is a failure if a process finds them
//! unequal without having been told of a death, or if a wait does not end.

use crate::{RUNNING, Stage, attach};
use ginnel::{Endpoint, Mapping, SharedMemory};
use kit::stepper::{fork, reap};
use kit::wait::spin_for;
use std::time::{Duration, Instant};

// Offsets in the shared page.
const STOP: usize = 8;
/// Counters of each survivor: rounds, deaths of which it was told, its longest wait in microseconds.
const ROUNDS: usize = 256;
const TOLD: usize = 8;
const LONGEST: usize = 16;
const SURVIVORS: usize = 2;

/// What a victim does, again and again.
pub type Act<P> = fn(&mut P);

/// The handles of one process, survivor or victim.
pub trait Party: Sized + 'static {
    /// The names and functions of what victims do.
    const ACTS: &[(&str, Act<Self>)];
    /// Whether some survivor is told of each death.
    const ALL_ARE_TOLD: bool = false;

    fn new(endpoint: &Endpoint, shared: &Shared) -> Self;

    /// Does everything once, as a survivor does.
    fn round(&mut self);

    /// Ends a survivor's part, so that no other process has to wait for it.
    fn leave(self);

    /// Called by the test when the survivors have made no round for some time.
    fn help(&mut self) {}
}

/// The shared page, and the place of this survivor's counters in it (`None` for a victim).
#[derive(Clone)]
pub struct Shared {
    pub page: Mapping,
    own: Option<usize>,
}

impl Shared {
    pub fn is_over(&self) -> bool {
        self.page.load_relaxed_u64(STOP) != 0
    }

    /// Notes that a wait that began at `begin` has ended, and whether it reported a death.
    pub fn note(&self, begin: Instant, told: bool) {
        let Some(own) = self.own else { return };
        let waited = begin.elapsed().as_micros() as u64;
        let page = &self.page;
        page.store_relaxed_u64(own + LONGEST, waited.max(page.load_relaxed_u64(own + LONGEST)));
        page.store_relaxed_u64(own + TOLD, page.load_relaxed_u64(own + TOLD) + u64::from(told));
    }

    pub fn is_whole(&self, pair: usize) -> bool {
        self.page.load_relaxed_u64(pair) == self.page.load_relaxed_u64(pair + 8)
    }

    pub fn repair(&self, pair: usize) {
        self.page.store_relaxed_u64(pair + 8, self.page.load_relaxed_u64(pair));
    }

    /// Changes one word of the pair, and after a while the other.
    pub fn work(&self, pair: usize) {
        assert!(self.is_whole(pair), "half-written, and nobody was told to have died");
        let next = self.page.load_relaxed_u64(pair) + 1;
        self.page.store_relaxed_u64(pair, next);
        (0..500).for_each(|_| std::hint::spin_loop());
        assert_eq!(self.page.load_relaxed_u64(pair), next, "somebody else is at work");
        self.page.store_relaxed_u64(pair + 8, next);
    }
}

fn survive<P: Party>(endpoint: &Endpoint, page: &Mapping, own: usize) {
    let shared = Shared { page: page.clone(), own: Some(own) };
    let mut party = P::new(endpoint, &shared);
    while !shared.is_over() {
        party.round();
        page.store_relaxed_u64(own, page.load_relaxed_u64(own) + 1);
    }
    party.leave();
}

pub fn at_random<P: Party>(stage: &mut Stage, kills: usize, wanted: &dyn Fn(&str) -> bool) {
    /// The survivors may need help when they have made no round for this long.
    const STUCK: Duration = Duration::from_millis(20);

    let page = stage.shared.clone();
    page.write(STOP, &[0; 512]);
    let places: [usize; SURVIVORS] = std::array::from_fn(|k| ROUNDS + 64 * k);
    let survivors = places.map(|own| {
        let (socket, page) = (stage.daemon.socket(), &page);
        fork(move || survive::<P>(&attach(socket, "survivor"), page, own))
    });
    let numbers = |at: usize| places.map(|own| page.load_relaxed_u64(own + at));
    let mut helper = P::new(&stage.heir, &Shared { page: page.clone(), own: None });
    let mut wait_for = |what: &str, done: &dyn Fn() -> bool| {
        let mut last = (numbers(0), Instant::now());
        spin_for(what, || {
            let now = numbers(0);
            if now != last.0 {
                last = (now, Instant::now());
            } else if last.1.elapsed() > STUCK {
                helper.help();
            }
            done().then_some(())
        });
    };
    let all_have_gone_on =
        |before: [u64; SURVIVORS]| before.iter().zip(numbers(0)).all(|(old, new)| new > *old);
    wait_for("the survivors to begin", &|| all_have_gone_on([0; SURVIVORS]));
    let now = stage.look();
    let base = std::mem::replace(&mut stage.base, now);
    for (name, act) in P::ACTS.iter().filter(|(name, _)| wanted(name)) {
        let begin = Instant::now();
        for _ in 0..2 * kills {
            let told = numbers(TOLD);
            stage.kill_at_random(Duration::from_millis(2), |endpoint, page| {
                let mut party = P::new(endpoint, &Shared { page: page.clone(), own: None });
                page.store_release_u64(RUNNING, 1);
                loop {
                    act(&mut party);
                }
            });
            let before = numbers(0);
            wait_for("the survivors to go on", &|| all_have_gone_on(before));
            stage.buried();
            assert_eq!(stage.look(), stage.base, "{name}: after the death");
            wait_for("a survivor to be told", &|| !P::ALL_ARE_TOLD || numbers(TOLD) != told);
        }
        println!("test {name} ... ok: {} kills ({:.1} s)", 2 * kills, begin.elapsed().as_secs_f64());
    }
    page.store_relaxed_u64(STOP, 1);
    for survivor in survivors {
        assert_eq!(reap(survivor), 0, "a survivor has failed");
    }
    let (rounds, told): (u64, u64) = (numbers(0).iter().sum(), numbers(TOLD).iter().sum());
    let longest = numbers(LONGEST).into_iter().max().unwrap_or(0);
    println!("survivors: {rounds} rounds, told of {told} deaths, longest wait {longest} us");
    assert!(told > 0 || stage.toll.kills < 100, "nobody has died with a lock: this test has tested nothing");
    drop(helper);
    stage.base = base;
    stage.buried();
    stage.all_is_well("survivors");
}
