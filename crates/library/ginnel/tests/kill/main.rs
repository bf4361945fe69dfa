//! Programs that use the library and a live daemon are killed: at instructions throughout each call that makes, names, resizes,
//! shares or frees a block, and at random instants, also while they have locks for which others wait. Afterwards nothing has
//! leaked, nothing has been allocated twice, names are free, and waiting programs go on.
//!
//! For kills at each instruction of the locks themselves see `crates/protocol/sync/tests/kill.rs`.
//!
//!     cargo test -p ginnel --test kill -- [NAME] [--kills N]                (for each operation; default 60)

mod blocks;
mod locks;
mod meetings;
mod survivors;

use ginnel::{AttachOptions, Block, BlockOptions, Endpoint, Mapping, Rights, SharedMemory, WaitMode};
use ginnel_layout::segment;
use ginnel_shmem::Protection;
use kit::daemon::{Client, Daemon};
use kit::random::Random;
use kit::stepper::{self, KillCount, kill};
use kit::wait::spin_for;
use std::path::PathBuf;
use std::time::{Duration, Instant};

const SEGMENT: u64 = 8 << 20;
const WEB: &str = "[segment.web]\nsize = \"8M\"\npage = \"4K\"\nmembers = [\"host\"]\n";
const PAGE: usize = 4096;
/// The name of a block that exists all the time.
const OWN: &str = "own";
const OWN_SIZE: usize = 16 * PAGE;

/// A block whose memory is not zeroed, which saves time.
const RAW: BlockOptions =
    BlockOptions { align: 0, exclusive: false, others: Rights::READ_WRITE, persistent: false, zero: false };

fn attach(socket: PathBuf, name: &str) -> Endpoint {
    // A caller that has to wait must sleep and be woken.
    let options = AttachOptions { socket, name: Some(name.into()), mode: WaitMode::Interrupt };
    Endpoint::attach_with("web", &options).unwrap()
}

/// What the daemon's status shows.
#[derive(Clone, Debug, PartialEq)]
struct Seen {
    used: u64,
    /// Offset and length of each block.
    blocks: Vec<(u64, u64)>,
    locks: usize,
    endpoints: usize,
}

/// A daemon, and an endpoint that stays alive.
struct Stage {
    daemon: Daemon,
    admin: Client,
    heir: Endpoint,
    /// What the status shows when there is no victim.
    base: Seen,
    /// A page that all processes share.
    shared: Mapping,
    toll: KillCount,
    random: Random,
}

/// Offset in the shared page of a flag that the victim is at work.
const RUNNING: usize = 0;

impl Stage {
    fn new() -> Self {
        let daemon = Daemon::start_new(WEB);
        let heir = attach(daemon.socket(), "heir");
        let options = BlockOptions { persistent: true, ..RAW };
        let own = heir.create_block(OWN, OWN_SIZE, &options).unwrap();
        own.write(0, &pattern()).unwrap();
        own.close().unwrap();
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(PAGE as u64).unwrap();
        let shared = Mapping::of_file(&file, 0, PAGE, Protection::ReadWrite).unwrap();
        let base = Seen { used: 0, blocks: Vec::new(), locks: 0, endpoints: 0 };
        let admin = daemon.client();
        let mut stage = Self {
            daemon,
            admin,
            heir,
            base,
            shared,
            toll: KillCount::default(),
            random: Random::new(0x9e37_79b9_7f4a_7c15),
        };
        stage.base = stage.look();
        stage
    }

    fn look(&mut self) -> Seen {
        let json = self.admin.status();
        let count = |what: &str| json[what].as_array().unwrap().len();
        let block = |b: &serde_json::Value| (b["offset"].as_u64().unwrap(), b["span"].as_u64().unwrap());
        let mut blocks: Vec<_> = json["blocks"].as_array().unwrap().iter().map(block).collect();
        blocks.sort_unstable();
        assert!(blocks.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0), "given twice: {json:#}");
        Seen {
            used: json["segments"][0]["used"].as_u64().unwrap(),
            blocks,
            locks: count("locks"),
            endpoints: count("endpoints"),
        }
    }

    /// Waits until the daemon knows that the victim is dead.
    fn buried(&mut self) {
        let endpoints = self.base.endpoints;
        spin_for("the victim's end to be known", || (self.look().endpoints == endpoints).then_some(()));
    }

    /// Checks that nothing has leaked, nothing was allocated twice, and no name is taken.
    fn all_is_well(&mut self, whose: &str) {
        assert_eq!(self.look(), self.base, "{whose}: after the death");
        // All free memory is in one piece, and can be allocated under the victim's name.
        let rest = SEGMENT - segment::ARENA - self.base.used;
        let rest = self.heir.create_block("x", rest as usize, &RAW).unwrap();
        self.heir.unlink_block("x").unwrap();
        rest.close().unwrap();
        let own = self.heir.open_block(OWN, Rights::WRITE_EXCLUSIVE).unwrap();
        self.is_whole(&own, whose);
        own.close().unwrap();
    }

    fn is_whole(&self, own: &Block, whose: &str) {
        let mut bytes = vec![0; OWN_SIZE];
        own.read(0, &mut bytes).unwrap();
        assert!(bytes == pattern(), "{whose}: somebody has written into another's block");
    }

    /// Forks a victim that sets a flag when it is at work, and kills it at a random instant within `time` after that.
    fn kill_at_random(&mut self, time: Duration, body: impl FnOnce(&Endpoint, &Mapping)) {
        self.shared.store_relaxed_u64(RUNNING, 0);
        let (shared, socket) = (self.shared.clone(), self.daemon.socket());
        let victim = stepper::fork(|| body(&attach(socket, "victim"), &shared));
        let running = || (shared.load_acquire_u64(RUNNING) != 0).then_some(());
        spin_for("the victim to be at work", running);
        let end = Instant::now() + Duration::from_nanos(self.random.below(time.as_nanos() as u64));
        while Instant::now() < end {
            std::thread::yield_now();
        }
        kill(victim);
        self.toll.kills += 1;
    }
}

fn pattern() -> Vec<u8> {
    (0..OWN_SIZE).map(|k| (k * 7 + k / PAGE) as u8).collect()
}

/// A part of the test. The arguments are the stage, the number of kills for each operation, and which operations are wanted.
type Part = fn(&mut Stage, usize, &dyn Fn(&str) -> bool);

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let kills = args.iter().position(|a| a == "--kills").and_then(|at| args.get(at + 1)?.parse().ok());
    // `make test-quick` sets this variable.
    let kills = kills.or_else(|| std::env::var_os("GINNEL_QUICK").map(|_| 5));
    let wanted = args.first().filter(|a| !a.starts_with('-'));
    let wanted = |name: &str| wanted.is_none_or(|w| name.contains(w.as_str()));
    let mut stage = Stage::new();
    let mut total = 0;
    let parts: [(&str, Part); 4] = [
        ("while it asks for blocks and frees them, at chosen instructions", blocks::stepped),
        ("while it asks for blocks and frees them, at random instants", blocks::at_random),
        ("while others wait for its locks, at random instants", survivors::at_random::<locks::Locks>),
        (
            "while others wait for its permits and turns, and for itself, at random instants",
            survivors::at_random::<meetings::Meetings>,
        ),
    ];
    for (what, part) in parts {
        let begin = Instant::now();
        stage.toll = KillCount::default();
        part(&mut stage, kills.unwrap_or(60), &wanted);
        let (toll, seconds) = (&stage.toll, begin.elapsed().as_secs_f64());
        let places = match toll.at.len() {
            0 => String::new(),
            places => format!(", before {places} different instructions"),
        };
        println!("killed {what}: {} times{places} ({seconds:.1} s)", toll.kills);
        total += toll.kills;
    }
    assert!(kills.is_some() || !args.is_empty() || total >= 1200, "only {total} kills");
    println!("killed in all: {total} times");
}
