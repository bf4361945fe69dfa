//! Connections between two VMs have changed over to shared memory; then programs, daemons and a VM are killed.

use anyhow::{Result, ensure};
use std::time::{Duration, Instant};
use vmtest::installation::{Installation, Plan, program};
use vmtest::{Job, TestBed, Vm};

const PROMPT: Duration = Duration::from_secs(60);
const LIBRARY: &str = "/usr/local/lib/libginnel_preload.so";
/// How often daemons are killed, the two in turn.
const KILLS: u32 = 6;

fn start(vm: &Vm, what: &str, report: &str) -> Result<Job> {
    let set = format!("LD_PRELOAD={LIBRARY} GINNEL_SOCKETS_REPORT=/tmp/{report}");
    vm.spawn(&format!("exec env {set} stream {what}"))
}

fn serve(vm: &Vm, port: u16, report: &str) -> Result<Job> {
    let job = start(vm, &format!("serve {}:{port}", vm.address()?), report)?;
    job.wait_for_line("listening", PROMPT)?;
    Ok(job)
}

/// Starts a connection and waits until it has changed over in both directions. The file that ends it has the name `name` and is
/// in the VM `from`.
fn drive(from: &Vm, to: &Vm, port: u16, name: &str) -> Result<Job> {
    drive_as("drive", from, to, port, name)
}

fn drive_as(role: &str, from: &Vm, to: &Vm, port: u16, name: &str) -> Result<Job> {
    let job = start(from, &format!("{role} {}:{port} /tmp/stop-{name}", to.address()?), name)?;
    job.wait_for_line("driving", PROMPT)?;
    let look = format!("grep -c 'sent_after_us.*received_after_us' /tmp/{name}");
    let end = Instant::now() + PROMPT;
    while from.run(&look)?.code() != Some(0) {
        let report = || from.run(&format!("cat /tmp/{name}")).map(|output| output.stdout);
        ensure!(job.is_running(), "{name} ended: {:?}", job.said());
        ensure!(Instant::now() < end, "{name} does not change over: {:?}", report());
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(job)
}

/// Ends a connection in order, and checks that everything that was sent has come back.
fn finish(vm: &Vm, job: &Job, name: &str) -> Result<()> {
    vm.run(&format!("touch /tmp/stop-{name}"))?.ok()?;
    let said = job.wait(PROMPT)?.ok()?.stdout;
    ensure!(said.contains("done after"), "{name}: {said}");
    Ok(())
}

/// Boots both VMs with their guest daemons.
fn boot(ginnel: &Installation<'_>) -> Result<(Vm, Vm)> {
    let start = |name| {
        let vm = ginnel.vm(name)?.network().memory_mib(512);
        vm.program(program("stream")?).library(program("libginnel_preload.so")?).start()
    };
    let (a, b) = (start("a")?, start("b")?);
    a.wait_ready()?;
    b.wait_ready()?;
    // If its first SYN is lost because nobody knows yet where the other VM is, a connection takes too long to connect to be
    // proven.
    a.run_within(PROMPT, &format!("until ping -c 1 -W 1 {}; do :; done", b.address()?))?.ok()?;
    Ok((a, b))
}

#[test]
fn connections_that_have_changed_over_survive_kills_or_end() -> Result<()> {
    let bed = TestBed::new("preload-kills")?;
    let ginnel = Plan::new(&bed).vm("a").vm("b").segment("web", 64, &["a", "b"]).start()?;
    let (a, b) = boot(&ginnel)?;
    let (mut daemon, _daemon_b) = (ginnel.start_guest(&a)?, ginnel.start_guest(&b)?);

    // Kill the program that connects.
    let server = serve(&b, 7200, "server-1")?;
    let client = drive(&a, &b, 7200, "killed-client")?;
    client.kill_process(9)?;
    println!("client killed: the server's connection {}", server.wait_for_line("ended after", PROMPT)?);

    // Kill the program that accepts.
    let client = drive(&a, &b, 7200, "killed-server")?;
    server.kill_process(9)?;
    let line = client.wait_for_line("ended after", PROMPT)?;
    println!("server killed: the client's connection {line}");
    client.wait(PROMPT)?.ok()?;
    ensure!(!server.said().0.contains("FAILED"), "{:?}", server.said());

    // Kill daemons while bytes flow.
    let server = serve(&b, 7201, "server-2")?;
    let client = drive(&a, &b, 7201, "daemons")?;
    for turn in 0..KILLS {
        if turn % 2 == 0 {
            ginnel.kill_daemon()?;
            ginnel.start_daemon()?;
        } else {
            daemon.kill_process(9)?;
            daemon.wait(PROMPT)?;
            daemon = ginnel.start_guest(&a)?;
        }
        ensure!(client.is_running(), "the client ended: {:?}", client.said());
    }
    // New connections change over again, and no byte was lost.
    let after = drive(&a, &b, 7201, "after")?;
    finish(&a, &client, "daemons")?;
    finish(&a, &after, "after")?;
    ensure!(!server.said().0.contains("FAILED"), "{:?}", server.said());
    Ok(())
}

/// The kernel of a killed VM sends nothing more, so the receiver must not take the bytes that have arrived for all of the
/// stream.
#[test]
fn a_vm_that_is_killed_resets_its_connections() -> Result<()> {
    let bed = TestBed::new("preload-vm-kill")?;
    let ginnel = Plan::new(&bed).vm("a").vm("b").segment("web", 64, &["a", "b"]).start()?;
    let (a, b) = boot(&ginnel)?;
    let _daemons = (ginnel.start_guest(&a)?, ginnel.start_guest(&b)?);

    // All of these connections use shared memory when the VM is killed. In the surviving VM, one end has accepted and the
    // others have connected. Some of the ends never wait for long.
    let server = serve(&b, 7210, "server-b")?;
    let _server = serve(&a, 7211, "server-a")?;
    let _client = drive_as("brief", &a, &b, 7210, "accepted")?;
    let restless = drive_as("restless", &b, &a, 7211, "restless")?;
    let polls = drive_as("poll", &b, &a, 7211, "polls")?;
    // This end may be in a call without a timeout. It waits at its process's doorbell, which the daemon rings.
    let sleeper = drive_as("brief", &b, &a, 7211, "sleeper")?;
    a.kill_qemu()?;
    for (name, job) in
        [("restless", &restless), ("polls", &polls), ("sleeper", &sleeper), ("server", &server)]
    {
        let line = job.wait_for_line("ended after", PROMPT)?;
        ensure!(line.contains("ConnectionReset"), "{name}: {line}");
    }
    Ok(())
}
