//! What must survive, over either kind of memory where that makes a difference: the deaths of daemons, programs, VMs and guest
//! kernels; pauses; hostile neighbours; a truncated file.

use anyhow::{Context, Result, ensure};
use kit::random::Random;
use std::time::{Duration, Instant};
use vmtest::installation::{Installation, MemoryKind, Plan, program};
use vmtest::{Exit, Job, TestBed, Vm};

vmtest::test_both_memories!(a_hostile_guest_harms_only_its_own_segments, rights_hold_in_a_guest);
vmtest::test_default_memories!(
    daemons_killed_under_load_lose_nothing,
    the_death_of_a_program_a_vm_and_a_kernel_is_reported,
);

/// The time within which a peer must be told of a death.
const TOLD: Duration = Duration::from_millis(100);
const PROMPT: Duration = Duration::from_secs(60);

/// A VM with its guest daemon.
struct Guest {
    vm: Vm,
    daemon: Job,
}

impl Guest {
    fn load(&self, what: &str) -> Result<Job> {
        self.vm.spawn(&format!("exec load {what}"))
    }
}

/// Boots VMs of an installation at the same time.
fn boot<const N: usize>(ginnel: &Installation<'_>, names: [&str; N]) -> Result<[Guest; N]> {
    let mut vms = Vec::new();
    for name in names {
        vms.push(ginnel.vm(name)?.program(program("load")?).program(program("share")?).start()?);
    }
    let mut guests = Vec::new();
    for vm in vms {
        vm.wait_ready()?;
        let daemon = ginnel.start_guest(&vm)?;
        guests.push(Guest { vm, daemon });
    }
    guests.try_into().map_err(|_| anyhow::anyhow!("as many guests as names"))
}

fn host_load(
    bed: &TestBed,
    ginnel: &Installation<'_>,
    what: &str,
) -> Result<std::sync::Arc<vmtest::HostJob>> {
    bed.host_spawn(&ginnel.on_host(&format!("exec load {what}"))?)
}

/// Measures how long a command takes there and back, which the test's own means add to what it measures.
fn round_trip(vm: &Vm) -> Result<Duration> {
    let begin = Instant::now();
    vm.run("true")?.ok()?;
    Ok(begin.elapsed())
}

fn daemons_killed_under_load_lose_nothing(memory: MemoryKind) -> Result<()> {
    let kills: u64 = if std::env::var_os("GINNEL_SOAK").is_some() { 1000 } else { 25 };
    let bed = TestBed::new("daemon-kills")?;
    let ginnel = Plan::new(&bed)
        .memory(memory)
        .vm("a")
        .vm("b")
        .vm("c")
        .segment("web", 64, &["host", "a", "b", "c"])
        .start()?;
    let [a, mut b] = boot(&ginnel, ["a", "b"])?;

    let echo = a.load("echo web echo")?;
    echo.wait_for_line("listening", PROMPT)?;
    let seconds = kills * 6 / 10;
    // One load between two VMs, one between host and VM, and an endpoint in a VM that opens channels all the time.
    let vm_to_vm = b.load(&format!("drive web echo {seconds}"))?;
    vm_to_vm.wait_for_line("connected", PROMPT)?;
    let host_to_vm = host_load(&bed, &ginnel, &format!("drive web echo {seconds}"))?;
    host_to_vm.wait_for_line("connected", PROMPT)?;
    let churn = b.load(&format!("churn web echo {seconds}"))?;
    churn.wait_for_line("churning", PROMPT)?;

    let mut random = Random::new(0x5eed);
    let mut restarts = Vec::new();
    let begin = Instant::now();
    for turn in 0..kills {
        // Each kill comes at a random moment, which is why the test sleeps here.
        std::thread::sleep(Duration::from_millis(random.below(400)));
        if turn % 2 == 0 {
            ginnel.kill_daemon()?;
            let restart = Instant::now();
            ginnel.start_daemon()?;
            bed.host(&ginnel.on_host("ginnel status --json")?)?.ok()?;
            restarts.push(restart.elapsed());
        } else {
            b.daemon.kill_process(9)?;
            b.daemon.wait(PROMPT)?;
            b.daemon = ginnel.start_guest(&b.vm)?;
        }
        for (job, what) in [(&vm_to_vm, "VM to VM"), (&churn, "churn")] {
            // On a slow machine the load may have ended before the last kills.
            ensure!(job.is_running() || job.said().0.contains("done"), "{what}: {:?}", job.said());
        }
    }
    restarts.sort_unstable();
    let (usual, slowest) = (restarts[restarts.len() / 2], restarts[restarts.len() - 1]);
    println!(
        "{kills} kills in {:?}; restart of the host daemon to its answer: {usual:?}, at most {slowest:?}",
        begin.elapsed()
    );
    ensure!(usual < Duration::from_secs(1), "a restarted daemon usually took {usual:?} to answer");
    ensure!(slowest < PROMPT, "a restarted daemon took {slowest:?} to answer");

    let rest = Duration::from_secs(seconds + 60);
    for (what, result) in [
        ("VM to VM", vm_to_vm.wait(rest)?),
        ("host to VM", host_to_vm.wait(rest)?),
        ("channels opened", churn.wait(rest)?),
    ] {
        let logs = || {
            format!(
                "host daemon: {:?}\nguest daemon: {:?}",
                ginnel.daemon().map(|d| d.said()),
                b.daemon.said()
            )
        };
        let said = result.ok().with_context(logs)?.stdout;
        ensure!(said.contains("done"), "{what}: {said}");
        println!("{what}: {}", said.lines().last().unwrap_or_default());
    }

    // A VM that boots after all of this talks to one from before.
    let [c] = boot(&ginnel, ["c"])?;
    c.vm.run("load drive web echo 1")?.ok()?;
    Ok(())
}

fn the_death_of_a_program_a_vm_and_a_kernel_is_reported(memory: MemoryKind) -> Result<()> {
    let bed = TestBed::new("deaths")?;
    let ginnel = Plan::new(&bed)
        .memory(memory)
        .vm_with("a", "hang_after = 1")
        .vm("b")
        .segment("web", 64, &["host", "a", "b"])
        .start()?;
    let [a, b] = boot(&ginnel, ["a", "b"])?;

    // A program in a VM dies.
    let echo = a.load("echo web echo")?;
    let first = echo.wait_for_line("listening", PROMPT)?;
    let at_host = host_load(&bed, &ginnel, "hold web echo")?;
    at_host.wait_for_line("holding", PROMPT)?;
    let in_vm = b.load("hold web echo")?;
    in_vm.wait_for_line("holding", PROMPT)?;
    let means = round_trip(&a.vm)?;
    let begin = Instant::now();
    echo.kill_process(9)?;
    at_host.wait_for_line("told dead", PROMPT)?;
    let told = begin.elapsed();
    in_vm.wait_for_line("told dead", PROMPT)?;
    let told_vm = begin.elapsed();
    println!("program killed: host told after {told:?}, other VM after {told_vm:?} (means: {means:?})");
    ensure!(told < TOLD + means, "the host's program was told after {told:?}");
    ensure!(told_vm < TOLD + 2 * means, "the other VM's program was told after {told_vm:?}");
    at_host.kill(9)?;
    in_vm.kill(9)?;

    // The next program takes the name, and the number with another epoch.
    let echo = a.load("echo web echo")?;
    let second = echo.wait_for_line("listening", PROMPT)?;
    ensure!(first != second, "the same number and epoch: {first}");

    // A paused VM is not dead. The status shows that it does not answer.
    let at_host = host_load(&bed, &ginnel, "hold web echo")?;
    at_host.wait_for_line("holding", PROMPT)?;
    let in_vm = b.load("hold web echo")?;
    in_vm.wait_for_line("holding", PROMPT)?;
    a.vm.pause()?;
    let daemon = ginnel.daemon()?;
    daemon.wait_for_line("the VM hangs", PROMPT)?;
    a.vm.resume()?;
    daemon.wait_for_line("answers again", PROMPT)?;
    a.vm.run("true")?.ok()?;
    ensure!(
        !at_host.said().0.contains("told") && !in_vm.said().0.contains("told"),
        "a paused VM was taken for dead"
    );

    // A guest kernel ends: the host knows it when the guest's next daemon says hello.
    a.vm.reboot_and_wait()?;
    let _daemon = ginnel.start_guest(&a.vm)?;
    at_host.wait_for_line("told dead", PROMPT)?;
    in_vm.wait_for_line("told dead", PROMPT)?;
    at_host.kill(9)?;
    in_vm.kill(9)?;

    // A whole VM dies.
    let echo = a.load("echo web echo")?;
    echo.wait_for_line("listening", PROMPT)?;
    let at_host = host_load(&bed, &ginnel, "hold web echo")?;
    at_host.wait_for_line("holding", PROMPT)?;
    let in_vm = b.load("hold web echo")?;
    in_vm.wait_for_line("holding", PROMPT)?;
    let begin = Instant::now();
    a.vm.kill_qemu()?;
    at_host.wait_for_line("told dead", PROMPT)?;
    let told = begin.elapsed();
    in_vm.wait_for_line("told dead", PROMPT)?;
    println!("QEMU killed: host told after {told:?}");
    ensure!(told < TOLD, "the host's program was told after {told:?}");
    at_host.kill(9)?;
    in_vm.kill(9)?;

    // Everything that it had must be returned.
    let deadline = Instant::now() + PROMPT;
    loop {
        let status = bed.host(&ginnel.on_host("ginnel status --json")?)?.ok()?.stdout;
        let status: serde_json::Value = serde_json::from_str(&status)?;
        let count = |what: &str| status[what].as_array().map_or(0, Vec::len);
        if count("channels") == 0 && count("endpoints") == 0 {
            break;
        }
        ensure!(Instant::now() < deadline, "left over: {status:#}");
        std::thread::sleep(Duration::from_millis(20));
    }

    // The VM starts again under its name, and can talk.
    let [a] = boot(&ginnel, ["a"])?;
    let echo = a.load("echo web echo")?;
    echo.wait_for_line("listening", PROMPT)?;
    b.vm.run("load drive web echo 1")?.ok()?;
    Ok(())
}

fn a_hostile_guest_harms_only_its_own_segments(memory: MemoryKind) -> Result<()> {
    // The code that must not trust the segment is the same for both kinds.
    let seconds = if memory == MemoryKind::Dax { 60 } else { 15 };
    let bed = TestBed::new("hostile")?;
    let ginnel = Plan::new(&bed)
        .memory(memory)
        .vm("a")
        .vm("b")
        .segment("shared", 32, &["host", "a", "b"])
        .segment("private", 32, &["host", "b"])
        .start()?;
    let [a, b] = boot(&ginnel, ["a", "b"])?;

    // Channels in the segment that `a` can write, between others and with itself; and one in a segment that it cannot write.
    let shared = host_load(&bed, &ginnel, "echo shared echo")?;
    shared.wait_for_line("listening", PROMPT)?;
    let private = host_load(&bed, &ginnel, "echo private echo")?;
    private.wait_for_line("listening", PROMPT)?;
    let untouched = b.load(&format!("drive private echo {}", seconds + 5))?;
    untouched.wait_for_line("connected", PROMPT)?;

    let scribble = a.load(&format!("scribble shared {seconds}"))?;
    scribble.wait_for_line("scribbling", PROMPT)?;
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut ends = std::collections::BTreeMap::<String, u32>::new();
    while Instant::now() < end {
        for result in [
            b.vm.run("timeout 5 load drive shared echo 1")?,
            bed.host(&ginnel.on_host("timeout 5 load drive shared echo 1")?)?,
        ] {
            // Any error is acceptable, and so is success; a panic or a signal is not.
            let panicked = result.stderr.contains("panicked") || result.stderr.contains("memory allocation");
            ensure!(!panicked, "a victim panicked: {}", result.stderr);
            // Status 15: `timeout` has ended a program that waits for a message whose header was overwritten.
            let exit = &result.exit;
            ensure!(
                matches!(exit, Exit::Code(0 | 1 | 124 | 143) | Exit::Signal(15)),
                "a victim ended with {exit:?}: {}",
                result.stderr
            );
            let what = result.stderr.lines().last().unwrap_or("ok");
            let what: String = what.chars().filter(|c| !c.is_ascii_digit()).take(40).collect();
            *ends.entry(what).or_default() += 1;
        }
        let status = bed.host(&ginnel.on_host("ginnel status --json")?)?;
        ensure!(status.code() == Some(0), "the daemon does not answer: {}", status.stderr);
    }
    println!("victims ended with: {ends:?}");
    scribble.wait(PROMPT)?.ok()?;
    ensure!(shared.is_running(), "the server in the scribbled segment ended: {:?}", shared.said());
    ensure!(
        !shared.said().1.contains("panicked"),
        "the server in the scribbled segment panicked: {:?}",
        shared.said()
    );
    let said = untouched.wait(PROMPT)?.ok()?.stdout;
    ensure!(said.contains("done"), "the channel in the other segment: {said}");
    ensure!(ginnel.daemon()?.is_running(), "the daemon ended");

    // Afterwards everybody can use the segment again.
    let fresh = host_load(&bed, &ginnel, "echo shared fresh")?;
    fresh.wait_for_line("listening", PROMPT)?;
    b.vm.run("load drive shared fresh 1")?.ok()?;
    a.vm.run("load drive shared fresh 1")?.ok()?;
    Ok(())
}

#[test]
fn a_hostile_guest_harms_only_its_own_locks_and_blocks() -> Result<()> {
    MemoryKind::of_default_run().iter().try_for_each(|memory| scribbles_over_locks_and_blocks(*memory))
}

fn scribbles_over_locks_and_blocks(memory: MemoryKind) -> Result<()> {
    const SECONDS: u64 = 10;
    let bed = TestBed::new("hostile-locks")?;
    let ginnel = Plan::new(&bed)
        .memory(memory)
        .vm("a")
        .vm("b")
        .segment("shared", 32, &["host", "a", "b"])
        .segment("private", 32, &["host", "b"])
        .start()?;
    let [a, b] = boot(&ginnel, ["a", "b"])?;
    let on_host = |what: &str| bed.host_spawn(&ginnel.on_host(&format!("exec share {what}"))?);
    let answers = || -> Result<()> {
        for what in ["status", "locks", "blocks"] {
            bed.host(&ginnel.on_host(&format!("ginnel {what} --json"))?)?.ok()?;
        }
        Ok(())
    };

    // In the segment that `a` can write, users accept errors; in the other one they do not.
    let scribble = a.vm.spawn(&format!("exec share scribble shared {SECONDS}"))?;
    scribble.wait_for_line("scribbling", PROMPT)?;
    let (shared, private) =
        (format!("use shared x {SECONDS}"), format!("use private x {} strict", SECONDS + 2));
    let host = [on_host(&shared)?, on_host(&private)?];
    let guest = [b.vm.spawn(&format!("exec share {shared}"))?, b.vm.spawn(&format!("exec share {private}"))?];
    let end = Instant::now() + Duration::from_secs(SECONDS);
    while Instant::now() < end {
        answers()?;
    }
    println!("{memory}: scribbler: {}", scribble.wait(PROMPT)?.ok()?.stdout.trim());
    for (who, result) in [
        ("shared, host", host[0].wait(PROMPT)?),
        ("shared, VM", guest[0].wait(PROMPT)?),
        ("private, host", host[1].wait(PROMPT)?),
        ("private, VM", guest[1].wait(PROMPT)?),
    ] {
        // A panic, a signal, and a call that took too long are failures of the program.
        let said = result.ok().with_context(|| who.to_owned())?.stdout;
        println!("{memory}: {who}: {}", said.lines().last().unwrap_or_default());
        ensure!(said.contains("done"), "{who}: {said}");
        ensure!(who.starts_with("private") || !said.contains("errors {}"), "{who} was not harmed: {said}");
    }
    answers()?;
    ensure!(ginnel.daemon()?.is_running(), "the daemon ended");

    // Afterwards everybody can use the segment again.
    let [host, guest] = [on_host("use shared fresh 2 strict")?, on_host("use shared fresh 2 strict")?];
    a.vm.run("share use shared fresh 2 strict")?.ok()?;
    b.vm.run("share use shared fresh 2 strict")?.ok()?;
    host.wait(PROMPT)?.ok()?;
    guest.wait(PROMPT)?.ok()?;
    Ok(())
}

fn rights_hold_in_a_guest(memory: MemoryKind) -> Result<()> {
    let bed = TestBed::new("rights")?;
    let ginnel = Plan::new(&bed).memory(memory).vm("a").segment("web", 32, &["host", "a"]).start()?;
    let [a] = boot(&ginnel, ["a"])?;
    let member = a.vm.run("share member web")?.ok()?.stdout;
    let owner = bed.host_spawn(&ginnel.on_host(&format!("exec share owner web {}", member.trim()))?)?;
    owner.wait_for_line("made", PROMPT)?;
    // A program that has not asked for a guard dies of such a store.
    let poke = a.vm.spawn("exec share poke web readable")?.wait(PROMPT)?;
    ensure!(
        poke.stdout.contains("poking") && poke.exit == Exit::Signal(11),
        "a store without the right ended with {:?}: {} {}",
        poke.exit,
        poke.stdout,
        poke.stderr
    );
    let guest = a.vm.spawn("exec share guest web")?;
    let said = guest.wait(PROMPT)?.ok().with_context(|| format!("owner: {:?}", owner.said()))?.stdout;
    ensure!(said.contains("done"), "the guest: {said}");
    let said = owner.wait(PROMPT)?.ok()?.stdout;
    ensure!(said.contains("done"), "the owner: {said}");
    Ok(())
}

#[test]
fn a_truncated_segment_is_broken_and_nothing_else() -> Result<()> {
    let bed = TestBed::new("truncated")?;
    let ginnel = Plan::new(&bed).segment("gone", 16, &["host"]).segment("kept", 16, &["host"]).start()?;
    let mut jobs = Vec::new();
    for segment in ["gone", "kept"] {
        let echo = host_load(&bed, &ginnel, &format!("echo {segment} echo"))?;
        echo.wait_for_line("listening", PROMPT)?;
        let drive = host_load(&bed, &ginnel, &format!("drive {segment} echo 5"))?;
        drive.wait_for_line("connected", PROMPT)?;
        let hold = host_load(&bed, &ginnel, &format!("hold {segment} echo"))?;
        hold.wait_for_line("holding", PROMPT)?;
        jobs.push((echo, drive, hold));
    }
    let file = std::fs::File::options().write(true).open(ginnel.segment_file("gone"))?;
    file.set_len(0)?;

    let [(gone_echo, gone_drive, gone_hold), (_kept_echo, kept_drive, kept_hold)] = &jobs[..] else {
        anyhow::bail!("two segments")
    };
    let drive = gone_drive.wait(PROMPT)?;
    ensure!(
        drive.code() == Some(1),
        "the driver of the truncated segment ended with {:?}: {}",
        drive.code(),
        drive.stderr
    );
    ensure!(drive.stderr.contains("truncated"), "it does not say why: {}", drive.stderr);
    gone_hold.wait_for_line("told broken", PROMPT)?;
    ensure!(gone_echo.is_running(), "the server died: {:?}", gone_echo.said());

    // The daemon reports it, refuses new requests for this segment, and serves the other one.
    let status = bed.host(&ginnel.on_host("ginnel status --json")?)?.ok()?.stdout;
    let status: serde_json::Value = serde_json::from_str(&status)?;
    let broken = |name: &str| {
        let segments = status["segments"].as_array().context("no segments in the status").cloned()?;
        let found =
            segments.iter().find(|s| s["name"] == name).context("the segment is not in the status")?;
        anyhow::Ok(found["broken"].as_bool().unwrap_or(false))
    };
    ensure!(broken("gone")? && !broken("kept")?, "status: {status:#}");
    let refused = host_load(&bed, &ginnel, "drive gone echo 1")?.wait(PROMPT)?;
    ensure!(refused.code() == Some(1), "a channel was opened in a broken segment");
    println!("refused: {}", refused.stderr.lines().last().unwrap_or_default());
    kept_drive.wait(PROMPT)?.ok()?;
    ensure!(!kept_hold.said().0.contains("told"), "the other segment was touched: {:?}", kept_hold.said());
    ensure!(ginnel.daemon()?.is_running(), "the daemon ended");
    Ok(())
}

#[test]
fn streams_half_close_between_vms_and_host() -> Result<()> {
    MemoryKind::of_default_run().iter().try_for_each(|memory| streams_half_close(*memory))
}

fn streams_half_close(memory: MemoryKind) -> Result<()> {
    let bed = TestBed::new("streams")?;
    let ginnel =
        Plan::new(&bed).memory(memory).vm("a").vm("b").segment("web", 64, &["host", "a", "b"]).start()?;
    let [a, b] = boot(&ginnel, ["a", "b"])?;
    let server = a.load("stream-in web bytes")?;
    server.wait_for_line("listening", PROMPT)?;
    b.vm.run("load stream-out web bytes 32")?.ok()?;
    server.wait(PROMPT)?.ok()?;

    let server = host_load(&bed, &ginnel, "stream-in web bytes")?;
    server.wait_for_line("listening", PROMPT)?;
    a.vm.run("load stream-out web bytes 32")?.ok()?;
    server.wait(PROMPT)?.ok()?;

    let server = b.load("stream-in web bytes")?;
    server.wait_for_line("listening", PROMPT)?;
    host_load(&bed, &ginnel, "stream-out web bytes 32")?.wait(PROMPT)?.ok()?;
    server.wait(PROMPT)?.ok()?;
    Ok(())
}
