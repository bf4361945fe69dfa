//! `ginnel farm`: the manager and its workers as separate processes.

use kit::process::signal;
use kit::random::Random;
use kit::wait::wait_until;
use kit::world::{Said, World};
use rustix::process::Signal;
use std::fs;
use std::process::{Child, Stdio};

/// A text with long and short words and lines, and characters of several bytes.
fn text(len: usize) -> String {
    let (mut text, mut random) = (String::new(), Random::new(1));
    while text.len() < len {
        match random.below(20) {
            0 => text.push('\n'),
            1..4 => text.push(' '),
            4..6 => text.push_str("ü€"),
            _ => text.push((b'a' + random.below(26) as u8) as char),
        }
    }
    text
}

/// A manager or worker in the background.
fn start(world: &World, line: &str) -> Child {
    world.command(line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn ended(child: Child) -> (Option<i32>, Said) {
    let output = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), Said { out: text(output.stdout), err: text(output.stderr) })
}

fn result(child: Child) -> serde_json::Value {
    let (status, said) = ended(child);
    assert_eq!(status, Some(0), "{said:?}");
    said.json()
}

/// Waits until this many channels are open in the daemon's books.
fn wait_for_channels(world: &World, count: usize) {
    wait_until("channels of the workers", || {
        world.good("status --json").json()["channels"].as_array().is_some_and(|c| c.len() >= count)
    });
}

#[test]
fn counts_do_not_depend_on_the_size_of_pieces() {
    let world = World::new();
    let text = text(300_000);
    fs::write(world.files().join("text"), &text).unwrap();
    let (chars, words) = (text.chars().count(), text.split_ascii_whitespace().count());
    for (job, count) in [("count-chars", chars), ("count-words", words)] {
        for more in [
            "",
            "--piece 1000",
            "--piece 7K --window 1 --mode interrupt",
            "--piece 4099 --lines --window 5 --mode poll",
        ] {
            let json = world
                .good(&format!("farm run {job} web --file text --spawn 3 --workers 2 --json {more}"))
                .json();
            assert_eq!(
                (&json["count"], &json["bytes"]),
                (&count.into(), &text.len().into()),
                "{more}: {json}"
            );
            assert_eq!((&json["reassigned"], &json["deaths"]), (&0.into(), &0.into()), "{more}: {json}");
            let pieces = json["workers"].as_array().unwrap().iter().map(|w| w["pieces"].as_u64().unwrap());
            assert_eq!(pieces.sum::<u64>(), json["pieces"].as_u64().unwrap(), "{json}");
        }
    }
    // An empty input needs no worker.
    fs::write(world.files().join("empty"), "").unwrap();
    assert_eq!(
        world.good("farm run count-chars web --file empty --workers 0").out,
        "managing at web/farm\n0\n"
    );
    // The same made-up text gives the same count.
    let made =
        |more: &str| world.good(&format!("farm run count-words web --generate 1M --spawn 2 -q {more}")).out;
    assert_eq!(made("--seed 5"), made("--seed 5 --piece 10000"));
    assert_ne!(made("--seed 5"), made("--seed 6"));
    assert_eq!(world.good("status --json").json()["channels"].as_array().unwrap().len(), 0);
}

#[test]
fn programs_can_be_workers() {
    let world = World::new();
    let text = text(100_000);
    fs::write(world.files().join("text"), &text).unwrap();
    let worker = start(&world, "farm work web -- wc -w");
    let json = result(start(&world, "farm run count-words web --file text --piece 30000 --lines --json"));
    assert_eq!(json["count"], text.split_ascii_whitespace().count());
    let (status, said_by_worker) = ended(worker);
    assert_eq!(status, Some(0), "{said_by_worker:?}");
    assert!(said_by_worker.out.starts_with("working at web/farm\n4 pieces, 9"), "{said_by_worker:?}");

    // The output of the workers' programs comes in the order of the input.
    let workers =
        [start(&world, "farm work web -- tr a-z A-Z"), start(&world, "farm work web -- tr a-z A-Z")];
    let out = world.good("farm run filter web --file text --piece 1000 --workers 2 -q").out;
    assert_eq!(out, text.to_ascii_uppercase());
    for worker in workers {
        assert_eq!(ended(worker).0, Some(0));
    }
}

#[test]
fn a_late_worker_replaces_one_that_was_killed() {
    let world = World::new();
    // Slow work, so that the test can act in the middle: the program sets the flag and then sleeps.
    let flag = world.files().join("flag");
    let slow = "farm work web -- sh ./slow.sh";
    fs::write(world.files().join("slow.sh"), "touch flag; exec sleep 100").unwrap();
    let victim = start(&world, slow);
    let manager = start(&world, "farm run count-chars web --generate 4M --seed 3 --piece 100000 --json");
    wait_until("a piece in the victim's hands", || flag.exists());
    let mut victim = victim;
    victim.kill().unwrap();
    victim.wait().unwrap();
    // All workers are dead now, and the manager waits for another one.
    let late = start(&world, "farm work web");
    let json = result(manager);
    assert_eq!(json["count"], 4 << 20, "{json}");
    let workers = json["workers"].as_array().unwrap();
    assert_eq!((workers.len(), &json["deaths"], &json["reassigned"]), (2, &1.into(), &2.into()), "{json}");
    assert_eq!(
        (&workers[0]["departure"], &workers[0]["pieces"], &workers[0]["lost"]),
        (&"died".into(), &0.into(), &2.into())
    );
    assert!(workers[1]["joined"].as_f64().unwrap() > 0.0 && workers[1]["departure"].is_null(), "{json}");
    assert_eq!(ended(late).0, Some(0));
}

#[test]
fn workers_killed_at_random_instants_change_no_count() {
    let world = World::new();
    let mut random = Random::new(2);
    let manager =
        start(&world, "farm run count-words web --generate 100M --seed 9 --piece 20000 --json --window 3");
    let line = "farm work web --mode interrupt --patience 10";
    let mut workers: Vec<_> = (0..3).map(|_| start(&world, line)).collect();
    wait_for_channels(&world, 1);
    let mut kills = 0;
    let mut manager = manager;
    while kills < 12 && manager.try_wait().unwrap().is_none() {
        std::thread::sleep(std::time::Duration::from_millis(random.below(60)));
        let victim = &mut workers[random.index(3)];
        victim.kill().unwrap();
        victim.wait().unwrap();
        *victim = start(&world, line);
        kills += 1;
    }
    let json = result(manager);
    let mut expected = 0u64;
    let (mut outside, mut buffer, mut at) = (true, vec![0; 1 << 20], 0);
    while at < 100 << 20 {
        ginnel_farm::Generated { seed: 9 }.read(at, &mut buffer);
        for byte in &buffer {
            expected += u64::from(outside && *byte != b' ');
            outside = *byte == b' ';
        }
        at += buffer.len() as u64;
    }
    assert_eq!(
        (&json["count"], &json["bytes"]),
        (&expected.into(), &(100u64 << 20).into()),
        "{kills} kills: {json}"
    );
    assert!(json["deaths"].as_u64().unwrap() > 0, "{kills} kills: {json}");
    for worker in workers {
        // A worker that came too late for the job found no manager.
        ended(worker);
    }
}

#[test]
fn failures_are_reported_with_their_reason() {
    let world = World::new();
    // No worker comes; all workers die; a piece kills each worker; a program fails; a program hangs.
    let err = |line: &str| {
        let said = world.expect(1, line);
        assert_eq!(said.err.lines().count(), 1, "{said:?}");
        said.err
    };
    let nobody = err("farm run count-chars web --generate 1M --patience 0.1");
    assert!(
        nobody.contains("0 of 1 workers came within 100ms") && nobody.contains("ginnel farm work web/farm"),
        "{nobody}"
    );
    let none = err("farm run count-chars web --generate 1M --patience 0.1 --workers 0");
    assert!(none.contains("no worker for 100ms, and all is left to do"), "{none}");
    let alone = err("farm work web --patience 0.05");
    assert!(alone.contains("the manager runs `ginnel farm run JOB web/farm`"), "{alone}");

    for (program, piece_timeout, says) in [
        ("false", "", "the last worker said: false: exit status: 1"),
        ("/no/such", "", "the last worker said: /no/such: cannot start"),
        ("cat", "", "is nonsense"),
        ("echo many", "", "\"many\" is not a count"),
        ("sleep 100", "--piece-timeout 0.2", "has not answered a piece for 200ms"),
    ] {
        let mut workers: Vec<_> =
            (0..5).map(|_| start(&world, &format!("farm work web -- {program}"))).collect();
        // All workers must come in that time. Where the manager waits in vain for another one, the test waits too.
        let patience = if says.contains("said") { 60 } else { 5 };
        let said = err(&format!(
            "farm run count-chars web --generate 100K --piece 10K --workers 5 --patience {patience} {piece_timeout}"
        ));
        // A worker that fails may try another piece; a dismissed one may not, and then there is no worker.
        let end = if says.contains("said") { "was tried 5 times" } else { "no worker for 5s" };
        assert!(said.contains(end) && said.contains(says), "{program}: {said}");
        for worker in &mut workers {
            let _ = worker.kill();
            worker.wait().unwrap();
        }
    }
    // A worker without a program does not know this job.
    let worker = start(&world, "farm work web");
    let said = err("farm run filter web --generate 100K");
    assert!(said.contains("start it with `-- PROGRAM`"), "{said}");
    drop(worker.wait_with_output());

    // The manager dies, and its workers report that.
    let mut manager = start(&world, "farm run count-chars web --generate 1M --workers 9");
    let worker = start(&world, "farm work web");
    wait_for_channels(&world, 1);
    signal(&manager, Signal::KILL);
    manager.wait().unwrap();
    let (status, said) = ended(worker);
    assert!(status == Some(1) && said.err.contains("the manager has died"), "{said:?}");

    err("farm run count-chars web --file nowhere");
    err("farm run count-chars web --file .");
    err("farm run count-chars nowhere --generate 1M");
    err("farm work nowhere");
    let big = err("farm run count-chars web --generate 1M --piece 1G");
    assert!(big.contains("cannot listen at web/farm"), "{big}");
    for line in [
        "farm run count-chars web",
        "farm run count-chars --generate 1M",
        "farm run count-chars web --generate 1M --file x",
        "farm run count-chars web --generate 1M --lines",
        "farm run count-chars web --generate 1M --piece 0",
        "farm run filter web --generate 1M --json",
        "farm run count a/b/c --generate 1M",
        "farm work",
        "farm",
    ] {
        world.expect(2, line);
    }
}
