//! Engines of an NVMe volume that are killed at any moment, under a verified load: 100 for each way of waiting, and 1,000
//! with `GINNEL_SOAK`. The driver sees no error.

mod server;

use ginnel_volume_bench::workload::{Limit, Pattern, Workload, run};
use ginnel_volume_bench::{Front, NvmeClient, NvmeOptions};
use kit::random::Random;
use kit::wait::WATCHDOG;
use server::Server;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const BYTES: u64 = 8 << 20;

fn kills_under_load(flags: &str, sleep: bool) {
    let kills = if std::env::var_os("GINNEL_SOAK").is_some() { 1000 } else { 100 };
    let mut server = Server::start(BYTES, &format!("--path IMAGE --nvme --queues 2 --threads 2 {flags}"));
    let options = NvmeOptions { queues: 2, interrupts: sleep, ..server.nvme_options() };
    let mut client = NvmeClient::connect(options).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let killer = scope.spawn(|| {
            let mut random = Random::new(0x5eed);
            // How many engines have attached before the one that runs.
            let mut before = 0;
            for _ in 0..kills {
                // Some engines die while they start, some while they attach, and most while they serve.
                let starts = random.below(3) == 0;
                if !starts {
                    server.wait_for_line("an engine is attached", before + 1);
                }
                std::thread::sleep(Duration::from_micros(random.below(if starts {
                    20_000
                } else {
                    100_000
                })));
                server.kill();
                before = server.count("an engine is attached");
                server.launch();
            }
            over.store(true, Ordering::Relaxed);
        });
        let (mut verified, mut flushes) = (0, 0);
        let mut is_over = false;
        while !is_over {
            is_over = over.load(Ordering::Relaxed);
            let workload = Workload {
                pattern: Pattern { random: true, reads: 40 },
                depth: 16,
                limit: Limit::Requests(1000),
                flush_every: Some(25),
                verify: true,
                sleep,
                patience: WATCHDOG,
                ..Workload::default()
            };
            let outcome = run(&mut client, &workload).unwrap();
            assert_eq!(outcome.failed, 0, "{:?}", outcome.first_failure);
            (verified, flushes) = (verified + outcome.verified, flushes + outcome.flushes.requests);
        }
        killer.join().unwrap();
        assert!(verified > 500 && flushes > 10, "{verified} blocks, {flushes} flushes");
    });
    let attached = server.count("an engine is attached");
    assert!(attached > kills / 4, "{attached} engines have served");
    client.flush().unwrap();
    client.close().unwrap();
    assert_eq!(server.count("panicked"), 0, "{}", server.log());
}

#[test]
fn with_mapped_doorbells() {
    kills_under_load("--wait poll", false);
}

#[test]
fn with_shadow_doorbells() {
    kills_under_load("--wait adaptive", false);
}

#[test]
fn with_interrupts() {
    kills_under_load("--wait interrupt", true);
}
