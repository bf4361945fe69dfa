//! A hostile member writes random words into the rings of connections under `ginnel run`.
//!
//! The words may be anything, so the programs may receive anything. But each call returns, with bytes, the end or an
//! error; no program dies; and later connections are not affected.

use crate::epoll::PAIRS;
use kit::random::Random;
use programs::lie::lie;
use programs::life::PATIENCE;
use programs::stage::{PYTHON, Stage, changed};
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::{Duration, Instant};

/// Size of a page, and of the words in front of a ring's data, in bytes.
const PAGE: usize = 4096;
const HEADER: usize = 512;

/// Returns the pages of the segment that are not empty.
fn used_pages(segment: &File) -> Vec<usize> {
    let mut page = [0; PAGE];
    let pages = segment.metadata().unwrap().len() as usize / PAGE;
    let is_used = |n: &usize| {
        segment.read_exact_at(&mut page, (n * PAGE) as u64).unwrap();
        page.iter().any(|byte| *byte != 0)
    };
    (0..pages).filter(is_used).collect()
}

/// Writes for this long, and until a program has detected something wrong, which may take long on a busy machine. Returns how many
/// words it has written.
fn scribble(segment: &File, seed: u64, time: Duration, is_found: impl Fn() -> bool) -> u64 {
    let mut random = Random::new(seed);
    let (mut words, begin) = (0, Instant::now());
    while begin.elapsed() < time || (!is_found() && begin.elapsed() < 5 * PATIENCE) {
        let pages = used_pages(segment);
        if pages.is_empty() {
            thread::sleep(Duration::from_millis(1));
        }
        for _ in 0..2000.min(100 * pages.len()) {
            let page = pages[random.index(pages.len())];
            // Rings begin at multiples of 512 bytes. Most of the writes go to the words in front of their data.
            let within = match random.index(4) {
                0 => random.index(PAGE / 8),
                _ => random.index(PAGE / HEADER) * HEADER / 8 + random.index(HEADER / 8),
            };
            let at = (page * PAGE + 8 * within) as u64;
            let mut word = [0; 8];
            segment.read_exact_at(&mut word, at).unwrap();
            let lie = lie(&mut random, u64::from_ne_bytes(word)).to_ne_bytes();
            let len = if random.index(2) == 0 { 4 } else { 8 };
            segment.write_all_at(&lie[..len], at).unwrap();
            words += 1;
        }
    }
    words
}

#[test]
fn a_member_that_corrupts_rings_harms_only_connections_in_its_segment() {
    kit::require_programs!(&[PYTHON]);
    let (seconds, seeds) = if std::env::var_os("GINNEL_SOAK").is_some() { (30, 20) } else { (3, 2) };
    for seed in 0..seeds {
        let stage = Stage::new("eager");
        let segment = OpenOptions::new()
            .read(true)
            .write(true)
            .open(stage.world.path().join("shm/ginnel/web"))
            .unwrap();
        let [flag, reset] = ["stop", "reset"].map(|name| stage.world.files().join(name));
        fs::write(stage.world.files().join("pairs.py"), PAIRS).unwrap();
        let program =
            [PYTHON, "-c", VICTIM, &seed.to_string(), flag.to_str().unwrap(), reset.to_str().unwrap()];
        let (said, words) = thread::scope(|scope| {
            let scribbler = scope.spawn(|| {
                let words = scribble(&segment, seed, Duration::from_secs(seconds), || reset.exists());
                fs::write(&flag, "").unwrap();
                words
            });
            (stage.client(&program), scribbler.join().unwrap())
        });
        let resets: u64 = said.trim().parse().unwrap();
        assert!(resets > 0, "{words} words were written, and no connection was reset");
        let connections = stage.end();
        assert!(changed(&connections, "python3").len() >= 2, "{connections:#?}");
    }
}

/// Ends of connections that make the usual calls, and only expect each call to return. Prints how many connections were
/// reset.
const VICTIM: &str = include_str!("hostile.py");
