//! The farm's library, with workers that are threads or that lie.

use ginnel::{AttachOptions, Block, BlockOptions, ChannelOptions, Endpoint, ErrorCode, MessageChannel};
use ginnel_farm::{Departure, Error, Generated, Manager, Options, Refusal, Step, Worker, count, equal};
use kit::wait::{WATCHDOG, wait_until};
use kit::world::World;
use rustix::event::{PollFd, PollFlags, poll};
use std::sync::{Arc, Barrier};
use std::thread::{JoinHandle, spawn};
use std::time::Duration;

const LEN: u64 = 1 << 20;

fn endpoint(world: &World) -> Endpoint {
    let options = AttachOptions { socket: world.socket(), ..AttachOptions::default() };
    Endpoint::attach_with("web", &options).unwrap()
}

fn manager(world: &World, options: Options) -> Manager {
    let mut manager = Manager::new(options).unwrap();
    manager.listen(&endpoint(world), "farm").unwrap();
    manager
}

fn connect(world: &World) -> MessageChannel {
    let options = ChannelOptions { patience: WATCHDOG, ..ChannelOptions::default() };
    endpoint(world).connect_with("farm", &options).unwrap()
}

/// Counts characters until the manager is gone.
fn serve(channel: MessageChannel) -> Result<(), ginnel::Error> {
    Worker::over(channel).serve(|task, result| {
        result.extend_from_slice(&count::characters(task.data).to_le_bytes());
        Ok(())
    })
}

/// A thread that serves as a worker.
fn counter(world: &World) -> JoinHandle<Result<(), ginnel::Error>> {
    let channel = connect(world);
    spawn(move || serve(channel))
}

fn number(result: &[u8]) -> Result<u64, Refusal> {
    result.try_into().map(u64::from_le_bytes).map_err(|_| Refusal::Nonsense("no number".into()))
}

#[test]
fn an_event_loop_runs_a_job_with_one_descriptor() {
    let world = World::new();
    let mut manager = manager(&world, Options::default());
    // The workers begin when the loop is about to wait for them, so that it waits at least once, however they are
    // scheduled.
    let begin = Arc::new(Barrier::new(3));
    let workers = [(); 2].map(|()| {
        let (channel, begin) = (connect(&world), begin.clone());
        spawn(move || {
            begin.wait();
            serve(channel)
        })
    });
    let (mut sum, mut waits) = (0, 0);
    let mut run = manager.start("count", equal(LEN, 10_000), Generated { seed: 1 }).unwrap();
    loop {
        let step = run.step(|_, result| {
            sum += number(result)?;
            Ok(())
        });
        match step.unwrap() {
            Step::Working => {}
            Step::Done => break,
            Step::Waiting => {
                if waits == 0 {
                    begin.wait();
                }
                waits += 1;
                let fd = run.poll_fd().unwrap();
                let timeout = rustix::event::Timespec::try_from(WATCHDOG).unwrap();
                let ready = poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)).unwrap();
                assert_eq!(ready, 1, "a wake was lost after {sum} characters");
            }
        }
    }
    assert_eq!((sum, run.done()), (LEN, (LEN.div_ceil(10_000), LEN)));
    let report = run.report();
    assert!(report.workers.iter().all(|worker| worker.departure.is_none()), "{report:?}");
    drop(run);
    drop(manager);
    for worker in workers {
        worker.join().unwrap().unwrap();
    }
}

/// Allocates the rest of a segment: first blocks, whose unit is the segment's page, and then locks, each of which takes
/// the smallest page that exists.
fn fill(endpoint: &Endpoint) -> (Vec<Block>, Vec<ginnel::sync::Mutex>) {
    let full = |error: ginnel::Error| assert_eq!(error.code(), Some(ErrorCode::NO_MEMORY), "{error}");
    let (mut blocks, mut locks) = (Vec::new(), Vec::new());
    let mut len = 1 << 30;
    while len >= 4096 {
        // A lock without a name is removed with its handle.
        match endpoint.create_block("", len, &BlockOptions::default()) {
            Ok(block) => blocks.push(block),
            Err(error) => {
                full(error);
                len /= 2;
            }
        }
    }
    loop {
        match endpoint.mutex(&format!("filler{}", locks.len())) {
            Ok(lock) => locks.push(lock),
            Err(error) => {
                full(error);
                return (blocks, locks);
            }
        }
    }
}

/// Does the same as [`counter`] as soon as the segment has room for its channel: memory that others have freed becomes
/// available over time.
fn counter_with_room(world: &World) -> JoinHandle<Result<(), ginnel::Error>> {
    let (endpoint, mut channel) = (endpoint(world), None);
    wait_until("room for a channel", || {
        let options = ChannelOptions { patience: WATCHDOG, ..ChannelOptions::default() };
        match endpoint.connect_with("farm", &options) {
            Ok(made) => channel = Some(made),
            Err(error) => assert_eq!(error.code(), Some(ErrorCode::NO_MEMORY), "{error}"),
        }
        channel.is_some()
    });
    let channel = channel.unwrap();
    spawn(move || serve(channel))
}

/// The manager needs a readiness board to wait for a worker, and the segment has no page left for it.
#[test]
fn a_worker_is_refused_if_there_is_no_room_for_a_readiness_board() {
    let world = World::new();
    let mut manager = manager(&world, Options { patience: Some(Duration::ZERO), ..Options::default() });
    let filler = endpoint(&world);
    let worker = counter(&world);
    let filling = fill(&filler);
    let count = |manager: &mut Manager| {
        let mut sum = 0;
        let done = manager.run("count", equal(LEN, 10_000), Generated { seed: 1 }, |_, result| {
            sum += number(result)?;
            Ok(())
        });
        done.map(|_| sum)
    };
    // The manager reports that once; before that, the worker has not connected yet.
    wait_until("the worker to be turned away", || {
        let said = count(&mut manager).unwrap_err().to_string();
        let turned_away = said.contains("turned away");
        assert_eq!(turned_away, said.contains("no room for a readiness board"), "{said}");
        turned_away
    });
    assert_eq!(manager.workers(), 0);
    // The worker learns of it too, and does not mistake it for the end of the work.
    wait_until("the worker to be told", || worker.is_finished());
    let told = worker.join().unwrap();
    assert!(matches!(told, Err(ginnel::Error::Aborted)), "{told:?}");
    // Waiting for workers does not report it, but the next job does.
    let worker = counter_with_room(&world);
    wait_until("the next worker to be told", || {
        assert!(!manager.wait_for_workers(1, Duration::ZERO).unwrap());
        worker.is_finished()
    });
    let said = count(&mut manager).unwrap_err().to_string();
    assert!(said.contains("no room for a readiness board"), "{said}");
    // When there is room, the next worker is accepted.
    for block in filling.0 {
        block.close().unwrap();
    }
    let worker = counter_with_room(&world);
    assert!(manager.wait_for_workers(1, WATCHDOG).unwrap());
    assert_eq!(count(&mut manager).unwrap(), LEN);
    drop(manager);
    worker.join().unwrap().unwrap();
}

#[test]
fn workers_stay_from_job_to_job_even_if_one_is_cancelled() {
    let world = World::new();
    let mut manager = manager(&world, Options { window: 3, ..Options::default() });
    let workers = [counter(&world), counter(&world)];
    assert!(manager.wait_for_workers(2, WATCHDOG).unwrap());
    for job in 0..6 {
        let mut pieces = 0;
        let done = manager.run("count", equal(LEN, 5000), Generated { seed: job }, |_, _| {
            pieces += 1;
            // At that time the other workers hold pieces whose results are not needed any more.
            if pieces == 20 { Err(std::io::Error::other("enough").into()) } else { Ok(()) }
        });
        assert!(matches!(done, Err(Error::Result { .. })), "{done:?}");
        let mut sum = 0;
        let report = manager
            .run("count", equal(LEN, 7000), Generated { seed: job }, |_, result| {
                sum += number(result)?;
                Ok(())
            })
            .unwrap();
        assert_eq!((sum, report.pieces, report.workers.len()), (LEN, LEN.div_ceil(7000), 2));
    }
    let failed = manager.run("short", equal(LEN, 5000), &b"short"[..], |_, _| Ok(()));
    assert!(matches!(failed, Err(Error::Source { .. })), "{failed:?}");
    let long = manager.run("long", equal(LEN, 1 << 19), Generated { seed: 0 }, |_, _| Ok(()));
    assert!(matches!(long, Err(Error::TooLong { .. })), "{long:?}");
    drop(manager);
    for worker in workers {
        worker.join().unwrap().unwrap();
    }
}

#[test]
fn liars_are_dismissed_and_change_nothing() {
    let world = World::new();
    let answer = |kind: u32, version: u32, piece: u64, content: &[u8]| {
        let mut message = kind.to_le_bytes().to_vec();
        message.extend_from_slice(&version.to_le_bytes());
        message.extend_from_slice(&piece.to_le_bytes());
        message.extend_from_slice(&0u64.to_le_bytes());
        message.extend_from_slice(content);
        message
    };
    let one = LEN.to_le_bytes();
    let lies = [
        (vec![], "a message without a header"),
        (b"short".to_vec(), "a message without a header"),
        (answer(3, 9, 1, &one), "version 9 of the protocol, and not 1"),
        (answer(7, 1, 1, &one), "a message of kind 7"),
        (answer(1, 1, 1, &one), "a message of kind 1"),
        (answer(3, 1, 0, &one), "it answered piece 0, which it does not hold"),
        (answer(3, 1, u64::MAX, &one), "which it does not hold"),
        (answer(4, 1, 99, b"why"), "which it does not hold"),
        (answer(3, 1, 1, b"nonsense"), "is nonsense: no count of mine"),
    ];
    for (lie, says) in lies {
        let mut manager = manager(&world, Options::default());
        let mut liar = connect(&world);
        assert!(manager.wait_for_workers(1, WATCHDOG).unwrap());
        let liar = spawn(move || {
            // The job, and a piece. The manager chooses the piece; where the script says piece 1, it means this one.
            liar.recv().unwrap();
            let piece = liar.recv().unwrap();
            let mut lie = lie;
            if lie.get(8..16) == Some(&1u64.to_le_bytes()) {
                lie[8..16].copy_from_slice(&piece[8..16]);
            }
            liar.send(&lie).unwrap();
            while liar.recv().is_ok() {}
        });
        let honest = {
            let channel = connect(&world);
            spawn(move || {
                Worker::over(channel).serve(|task, result| {
                    result.extend_from_slice(&count::characters(task.data).to_le_bytes());
                    Ok(())
                })
            })
        };
        let mut sum = 0;
        let report = manager
            .run("count", equal(10_000, 1000), Generated { seed: 1 }, |piece, result| {
                match number(result)? {
                    count if count == piece.len as u64 => sum += count,
                    _ => return Err(Refusal::Nonsense("no count of mine".into())),
                }
                Ok(())
            })
            .unwrap();
        assert_eq!((sum, report.pieces), (10_000, 10), "{says}");
        let Some(Departure::Dismissed(why)) = &report.workers[0].departure else {
            panic!("{says}: {report:?}");
        };
        assert!(why.contains(says), "{why}");
        drop(manager);
        liar.join().unwrap();
        honest.join().unwrap().unwrap();
    }
}
