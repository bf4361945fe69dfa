//! A server is killed at random instructions, again and again, while a reader reads all items. For each key, its successor
//! and the readers must find the value that was stored last, or the value that was being stored, or nothing. A deleted
//! item must not return, and neither must an item that was missing once.
//!
//! The server is a process of its own. It performs some operations, stops before one of its stores to the cache, is
//! single-stepped for a while (ptrace), and is killed. Other servers are killed while they run, at a random time.
//!
//!     cargo test -p ginnel-cache-store --test kill -- [--kills N]           (default 300; 2,000 with GINNEL_SOAK)
#![allow(unsafe_code)] // fork, ptrace, kill.

#[cfg(not(loom))]
mod common;

#[cfg(loom)]
fn main() {}

#[cfg(not(loom))]
fn main() {
    test::main();
}

#[cfg(not(loom))]
mod test {
    use super::common::{create, key, value, which};
    use ginnel_cache_store::reader::{Found, Reader};
    use ginnel_cache_store::store::Store;
    use ginnel_layout::cache::marks;
    use ginnel_shmem::{Mapping, Protection, SharedMemory};
    use kit::mortal::Mortal;
    use kit::random::Random;
    use kit::stepper::{Stepper, fork, reap, start};
    use std::collections::{HashMap, HashSet};
    use std::time::{Duration, Instant};

    const LEN: usize = 48 << 10;
    const KEYS: u16 = 120;
    /// The number of operations of one server, some of which it performs before it is killed.
    const OPS: u64 = 40;

    /// The offsets of words that the processes share besides the cache: the server's progress (twice the number of operations
    /// that it has performed, plus 1 in the middle of one), the request that the reader stop, and the reader's number of hits.
    const PROGRESS: usize = 0;
    const STOP: usize = 8;
    const HITS: usize = 16;
    const WORDS: usize = 4096;

    #[derive(Clone, Copy, Debug)]
    enum Op {
        Set(u16, u64, usize, u8),
        Delete(u16),
        Renew(u16),
        Mark(u16),
        Touch(u16),
        Use(u16),
        Limit(usize),
        Tidy,
        Flush,
    }

    impl Op {
        fn random(random: &mut Random, which: u64) -> Self {
            let number = random.below(KEYS.into()) as u16;
            match random.below(100) {
                0..50 => {
                    let len = 20 + random.below(if which.is_multiple_of(2) { 40 } else { 900 }) as usize;
                    Self::Set(number, which, len, [0, marks::BINARY_KEY][which as usize / 2 % 2])
                }
                50..60 => Self::Delete(number),
                60..66 => Self::Renew(number),
                66..72 => Self::Mark(number),
                72..78 => Self::Touch(number),
                78..92 => Self::Use(number),
                92..95 => Self::Limit(4 + random.below(10) as usize),
                95..99 => Self::Tidy,
                _ => Self::Flush,
            }
        }

        fn run<M: SharedMemory>(self, store: &mut Store<M>) {
            match self {
                Self::Set(number, which, len, marks) => {
                    store.set_marked(&key(number), &[&value(number, which, len)], 0, 0, marks).unwrap();
                }
                Self::Delete(number) => drop(store.delete(&key(number))),
                Self::Renew(number) => drop(store.renew(&key(number), marks::STALE, None)),
                Self::Mark(number) => drop(store.mark(&key(number), marks::WON)),
                Self::Touch(number) => drop(store.touch(&key(number), u32::MAX)),
                Self::Use(number) => store.used_by_reader(store.hash(&key(number))),
                Self::Limit(segments) => store.set_limit(segments),
                Self::Tidy => drop(store.tidy()),
                Self::Flush => store.flush(),
            }
        }
    }

    /// The values that each key may have. A key may also have no value.
    #[derive(Default)]
    struct Model(HashMap<u16, HashSet<u64>>);

    impl Model {
        /// Records an operation that has been performed, or may have been performed.
        fn apply(&mut self, op: Op, is_done: bool) {
            let mut changed = |number, which: Option<u64>| {
                let values = self.0.entry(number).or_default();
                if is_done {
                    values.clear();
                }
                values.extend(which);
            };
            match op {
                Op::Set(number, which, ..) => changed(number, Some(which)),
                Op::Delete(number) => changed(number, None),
                Op::Flush => (0..KEYS).for_each(|number| changed(number, None)),
                _ => {}
            }
        }

        fn check(&self, number: u16, found: Option<u64>, who: &str) {
            let values = self.0.get(&number);
            let is_right = found.is_none_or(|which| values.is_some_and(|values| values.contains(&which)));
            assert!(
                is_right,
                "the {who} finds value {found:?} of key {number}, which has had {values:?} last"
            );
        }

        /// Records that the key has this value, so no other value may return.
        fn found(&mut self, number: u16, found: Option<u64>) {
            self.0.insert(number, found.into_iter().collect());
        }
    }

    struct SharedState {
        memory: Mapping,
        words: Mapping,
    }

    impl SharedState {
        fn new() -> Self {
            let map = |len: usize| {
                let file = tempfile::tempfile_in("/dev/shm").unwrap();
                file.set_len(len as u64).unwrap();
                Mapping::of_file(&file, 0, len, Protection::ReadWrite).unwrap()
            };
            Self { memory: map(LEN), words: map(WORDS) }
        }

        /// Looks all keys up until the process is told to stop. Checks that values are not torn, and that no older value returns.
        fn read(&self) {
            let reader = Reader::new(self.memory.clone()).unwrap();
            let mut seen = HashMap::new();
            let mut bytes = Vec::new();
            while self.words.load_relaxed_u64(STOP) == 0 {
                for number in 0..KEYS {
                    bytes.clear();
                    if let Found::Hit(meta) = reader.get(&key(number), &mut bytes) {
                        let which = which(number, &bytes);
                        let (version, before) =
                            seen.insert(number, (meta.version, which)).unwrap_or_default();
                        assert!(meta.version >= version && which >= before, "an older value came back");
                        assert!(meta.version != version || which == before, "one version has two values");
                        self.words.fetch_add_u64(HITS, 1);
                    }
                }
            }
        }

        /// Runs a server that performs these operations.
        fn serve<M: SharedMemory>(&self, memory: M, ops: &[Op]) {
            let mut store = Store::open(memory, 0).unwrap();
            for (n, op) in ops.iter().enumerate() {
                self.words.store_release_u64(PROGRESS, 2 * n as u64 + 1);
                op.run(&mut store);
                self.words.store_release_u64(PROGRESS, 2 * n as u64 + 2);
            }
        }

        /// Updates the model with the operations that a dead server has performed, and checks all items that are there.
        fn inquire(&self, model: &mut Model, ops: &[Op]) {
            let progress = self.words.load_acquire_u64(PROGRESS) as usize;
            ops[..progress / 2].iter().for_each(|op| model.apply(*op, true));
            if progress % 2 == 1 {
                model.apply(ops[progress / 2], false);
            }
            let reader = Reader::new(self.memory.clone()).unwrap();
            let mut bytes = Vec::new();
            for number in 0..KEYS {
                bytes.clear();
                if let Found::Hit(_) = reader.get(&key(number), &mut bytes) {
                    model.check(number, Some(which(number, &bytes)), "reader");
                }
            }
            let mut successor = Store::open(self.memory.clone(), 0).unwrap();
            for number in 0..KEYS {
                bytes.clear();
                let found = successor.get(&key(number), &mut bytes).map(|_| which(number, &bytes));
                model.check(number, found, "successor");
                model.found(number, found);
            }
            let (used, limit) = successor.segments();
            assert!(used <= limit.max(successor.shape().segments));
        }
    }

    /// Kills a server that is stopped before an instruction, or that is running. Returns false if it had ended before.
    fn kill_one(shared: &SharedState, ops: &[Op], random: &mut Random) -> bool {
        shared.words.store_release_u64(PROGRESS, 0);
        if random.below(4) == 0 {
            let pid = fork(|| shared.serve(shared.memory.clone(), ops));
            std::thread::sleep(Duration::from_micros(random.below(1500)));
            // SAFETY: the process is a child of this one and has not been reaped.
            unsafe { libc::kill(pid, libc::SIGKILL) };
            return libc::WIFSIGNALED(reap(pid));
        }
        let stores = random.below(OPS * 12);
        let mut victim = Stepper::fork(|| {
            shared.serve(Mortal::interrupted(&shared.memory, stores, start), ops);
            // The server performed fewer stores than that, so it starts stepping here.
            start();
        });
        let steps = random.below(600);
        let _ = (0..steps).all(|_| victim.step());
        victim.kill()
    }

    pub fn main() {
        let args: Vec<String> = std::env::args().skip(1).collect();
        let kills = args.iter().position(|a| a == "--kills").and_then(|at| args.get(at + 1)?.parse().ok());
        let is_set = |name| std::env::var_os(name).is_some();
        let usual = if is_set("GINNEL_SOAK") { 2000 } else { 300 };
        let wanted = kills.unwrap_or(if is_set("GINNEL_QUICK") { 50 } else { usual });

        let shared = SharedState::new();
        create(shared.memory.clone(), LEN);
        let reader = fork(|| shared.read());
        let (mut random, mut model) = (Random::new(1), Model::default());
        let (begin, mut killed, mut rounds, mut in_the_middle) = (Instant::now(), 0, 0, 0);
        while killed < wanted {
            rounds += 1;
            let ops: Vec<Op> = (0..OPS).map(|n| Op::random(&mut random, rounds * OPS + n)).collect();
            killed += usize::from(kill_one(&shared, &ops, &mut random));
            in_the_middle += shared.words.load_acquire_u64(PROGRESS) % 2;
            shared.inquire(&mut model, &ops);
        }
        let hits = shared.words.load_relaxed_u64(HITS);
        shared.words.store_relaxed_u64(STOP, 1);
        assert_eq!(reap(reader), 0, "the reader has failed");
        assert!(hits > 0, "the reader has found nothing");
        println!(
            "test kills ... ok: {killed} kills in {rounds} rounds, {in_the_middle} in the middle of an operation; a reader has found {hits} values ({:.1} s)",
            begin.elapsed().as_secs_f64()
        );
    }
}
