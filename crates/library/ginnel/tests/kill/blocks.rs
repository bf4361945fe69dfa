//! Death in calls about blocks, in calls that make and open locks, and while the endpoint is held.

use crate::{OWN, PAGE, RAW, RUNNING, Stage, attach};
use ginnel::{BlockOptions, Endpoint, ErrorCode, Rights, SharedMemory};
use kit::stepper::{Stepper, Trace, leave, start};
use kit::wait::WATCHDOG;
use std::time::{Duration, Instant};

const SIZE: usize = PAGE;

/// A call during which a program is killed.
struct Case {
    name: &'static str,
    /// Makes the call after [`start`].
    victim: fn(&Endpoint),
    /// What another program does while the victim stands before the call.
    meanwhile: fn(&Endpoint),
    /// What another program does after the death.
    after: fn(&Endpoint),
    /// Whether `after` runs already before the daemon knows of the death.
    waits: bool,
}

fn nothing(_: &Endpoint) {}

/// Another program that waits for the block gets it.
fn have_own(heir: &Endpoint) {
    heir.open_block_within(OWN, Rights::WRITE_EXCLUSIVE, WATCHDOG).unwrap().close().unwrap();
}

const CASES: [Case; 15] = [
    Case {
        name: "hold the endpoint, and release it",
        victim: |endpoint| {
            start();
            let token = endpoint.hold(Duration::from_millis(20)).unwrap();
            endpoint.release(&token);
        },
        meanwhile: nothing,
        after: nothing,
        waits: false,
    },
    Case {
        name: "make a block of zeros with a name",
        victim: |endpoint| {
            start();
            std::mem::forget(endpoint.create_block("x", SIZE, &BlockOptions::default()).unwrap());
        },
        meanwhile: nothing,
        after: nothing,
        waits: false,
    },
    Case {
        name: "make a block without a name, as it is",
        victim: |endpoint| {
            start();
            std::mem::forget(endpoint.create_block("", SIZE, &RAW).unwrap());
        },
        meanwhile: nothing,
        after: nothing,
        waits: false,
    },
    Case {
        name: "make a persistent block",
        victim: |endpoint| {
            start();
            let options = BlockOptions { persistent: true, ..RAW };
            std::mem::forget(endpoint.create_block("x", SIZE, &options).unwrap());
        },
        meanwhile: nothing,
        // The block outlives the program that has made it. If it exists, it is complete.
        after: |heir| match heir.open_block("x", Rights::WRITE_EXCLUSIVE) {
            Ok(block) => {
                assert_eq!(block.len(), SIZE);
                heir.unlink_block("x").unwrap();
                block.close().unwrap();
            }
            Err(error) => assert_eq!(error.code(), Some(ErrorCode::NOT_FOUND), "{error}"),
        },
        waits: false,
    },
    Case {
        name: "free a block by closing it",
        victim: |endpoint| {
            let block = endpoint.create_block("", SIZE, &RAW).unwrap();
            start();
            block.close().unwrap();
        },
        meanwhile: nothing,
        after: nothing,
        waits: false,
    },
    Case {
        name: "free a block that is mapped by dropping it",
        victim: |endpoint| {
            let block = endpoint.create_block("", SIZE, &BlockOptions::default()).unwrap();
            start();
            drop(block);
        },
        meanwhile: nothing,
        after: nothing,
        waits: false,
    },
    Case {
        name: "free a block by unlinking it",
        victim: |endpoint| {
            let options = BlockOptions { persistent: true, ..RAW };
            endpoint.create_block("x", SIZE, &options).unwrap().close().unwrap();
            start();
            endpoint.unlink_block("x").unwrap();
        },
        meanwhile: nothing,
        after: |heir| {
            let gone = heir.unlink_block("x").err().is_none_or(|e| e.code() == Some(ErrorCode::NOT_FOUND));
            assert!(gone, "neither there nor gone");
        },
        waits: false,
    },
    Case {
        name: "name a block",
        victim: |endpoint| {
            let block = endpoint.create_block("", SIZE, &RAW).unwrap();
            start();
            block.link("x").unwrap();
            std::mem::forget(block);
        },
        meanwhile: nothing,
        after: nothing,
        waits: false,
    },
    Case {
        name: "make a block longer",
        victim: |endpoint| {
            let mut block = endpoint.create_block("x", SIZE, &RAW).unwrap();
            start();
            block.resize(5 * PAGE).unwrap();
            std::mem::forget(block);
        },
        meanwhile: nothing,
        after: nothing,
        waits: false,
    },
    Case {
        name: "make a block shorter",
        victim: |endpoint| {
            let mut block = endpoint.create_block("x", 5 * PAGE, &RAW).unwrap();
            start();
            block.resize(SIZE).unwrap();
            std::mem::forget(block);
        },
        meanwhile: nothing,
        after: nothing,
        waits: false,
    },
    Case {
        name: "open a block for which somebody waits",
        victim: |endpoint| {
            start();
            std::mem::forget(endpoint.open_block(OWN, Rights::READ_WRITE).unwrap());
        },
        meanwhile: nothing,
        after: have_own,
        waits: true,
    },
    Case {
        name: "close a block for which somebody waits",
        victim: |endpoint| {
            let block = endpoint.open_block(OWN, Rights::READ_WRITE).unwrap();
            block.read(0, &mut [0; 8]).unwrap();
            start();
            block.close().unwrap();
        },
        meanwhile: nothing,
        after: have_own,
        waits: true,
    },
    Case {
        name: "hear that a right is taken away",
        victim: |endpoint| {
            let block = endpoint.open_block(OWN, Rights::READ_WRITE).unwrap();
            block.read(0, &mut [0; 8]).unwrap();
            start();
            endpoint.process_events();
            std::mem::forget(block);
        },
        // A program that waits for exclusive access must learn either that the victim's mapping is gone, or that the victim is
        // dead.
        meanwhile: |heir| {
            let own = heir.open_block(OWN, Rights::READ).unwrap();
            own.grant(0, 0, Rights::NONE).unwrap();
            own.grant(0, 0, Rights::READ_WRITE).unwrap();
            own.close().unwrap();
        },
        after: have_own,
        waits: true,
    },
    Case {
        name: "make a lock",
        victim: |endpoint| {
            start();
            std::mem::forget(endpoint.mutex("x").unwrap());
        },
        meanwhile: nothing,
        // A lock whose last user has died can be used by the next program.
        after: |heir| {
            let _ = heir.mutex("x").unwrap().lock().unwrap();
        },
        waits: false,
    },
    Case {
        name: "close a lock that is held",
        victim: |endpoint| {
            let mut mutex = endpoint.mutex("x").unwrap();
            std::mem::forget(mutex.lock().unwrap());
            start();
            drop(mutex);
        },
        meanwhile: nothing,
        after: |heir| {
            let mut mutex = heir.mutex("x").unwrap();
            mutex.set_timeout(Some(WATCHDOG));
            let mut guard = mutex.lock().unwrap();
            if guard.owner_died() {
                guard.make_consistent().unwrap();
            }
        },
        waits: false,
    },
];

/// Starts a victim that stops before its call.
fn open(stage: &mut Stage, case: &Case) -> Stepper {
    let socket = stage.daemon.socket();
    let victim = Stepper::fork(|| {
        let endpoint = attach(socket, "victim");
        (case.victim)(&endpoint);
        leave(0);
    });
    (case.meanwhile)(&stage.heir);
    victim
}

/// Kills the victim, and checks what must hold afterwards.
fn close(stage: &mut Stage, case: &Case, victim: &mut Stepper) {
    // Nothing is allocated twice while the victim lives.
    stage.look();
    let at = victim.at();
    if victim.kill() {
        stage.toll.kills += 1;
        stage.toll.at.insert(at);
    }
    assert!(
        matches!(victim.ended, Some(0 | libc::SIGKILL)),
        "{}: the victim has failed by itself",
        case.name
    );
    // These cases start to wait before the death is known.
    if case.waits {
        (case.after)(&stage.heir);
    }
    stage.buried();
    if !case.waits {
        (case.after)(&stage.heir);
    }
    stage.all_is_well(case.name);
}

/// Kills at each instruction next to a system call, and at others throughout the call.
pub fn stepped(stage: &mut Stage, kills: usize, wanted: &dyn Fn(&str) -> bool) {
    for case in CASES.iter().filter(|case| wanted(case.name)) {
        let (begin, before) = (Instant::now(), stage.toll.kills);
        let mut victim = open(stage, case);
        let way = Trace::of(&mut victim, || ());
        close(stage, case, &mut victim);
        for k in way.choose(kills) {
            let mut victim = open(stage, case);
            victim.go_to(&way, k);
            close(stage, case, &mut victim);
        }
        println!(
            "test {} ... ok: {} instructions, {} beside system calls; {} kills ({:.1} s)",
            case.name,
            way.instructions(),
            way.matters.len(),
            stage.toll.kills - before,
            begin.elapsed().as_secs_f64()
        );
    }
}

/// Kills a program that makes and frees blocks all the time.
pub fn at_random(stage: &mut Stage, kills: usize, wanted: &dyn Fn(&str) -> bool) {
    let name = "blocks come and go";
    if !wanted(name) {
        return;
    }
    for _ in 0..3 * kills {
        stage.kill_at_random(Duration::from_millis(2), |endpoint, shared| {
            loop {
                let zeros = endpoint.create_block("x", SIZE, &BlockOptions::default()).unwrap();
                let mut block = endpoint.create_block("", SIZE, &RAW).unwrap();
                shared.store_release_u64(RUNNING, 1);
                block.resize(4 * PAGE).unwrap();
                block.link("y").unwrap();
                drop(zeros);
                block.resize(2 * PAGE).unwrap();
                endpoint.unlink_block("x").unwrap();
                endpoint.unlink_block("y").unwrap();
                block.close().unwrap();
            }
        });
        stage.buried();
        stage.all_is_well(name);
    }
}
