//! A guest that hangs while it has a lock is fenced before the lock is handed on, over either kind of memory; then it is
//! resumed.

use anyhow::{Result, ensure};
use std::time::{Duration, Instant};
use vmtest::TestBed;
use vmtest::installation::{MemoryKind, Plan, program};

vmtest::test_default_memories!(a_guest_that_hangs_is_fenced);

const PROMPT: Duration = Duration::from_secs(60);
/// A peer must be told within this time.
const TOLD: Duration = Duration::from_millis(100);
const STOP: i32 = 19;
const CONT: i32 = 18;

fn a_guest_that_hangs_is_fenced(memory: MemoryKind) -> Result<()> {
    let bed = TestBed::new("fence")?;
    let qmp = bed.dir().join("a.qmp");
    let ginnel = Plan::new(&bed)
        .memory(memory)
        .vm_with("a", &format!("hang_after = 2\non_hang = \"fence\"\nqmp = {qmp:?}"))
        .vm("b")
        .segment("web", 64, &["host", "a", "b"])
        .start()?;
    let a = ginnel.vm("a")?.program(program("load")?).start()?;
    let b = ginnel.vm("b")?.program(program("load")?).start()?;
    let host_load = |what: &str| bed.host_spawn(&ginnel.on_host(&format!("exec load {what}"))?);
    a.wait_ready()?;
    let guest_daemon = ginnel.start_guest(&a)?;
    b.wait_ready()?;
    let _other = ginnel.start_guest(&b)?;
    let daemon = ginnel.daemon()?;

    let echo = host_load("echo web echo")?;
    echo.wait_for_line("listening", PROMPT)?;
    let undisturbed = b.spawn("exec load drive web echo 15")?;
    undisturbed.wait_for_line("connected", PROMPT)?;
    let owner = a.spawn("exec load own web m")?;
    owner.wait_for_line("owns", PROMPT)?;
    let heir = host_load("inherit web m")?;
    heir.wait_for_line("waiting", PROMPT)?;

    // From now on its daemon is silent, and its program continues to store.
    let begin = Instant::now();
    guest_daemon.kill_process(STOP)?;
    let inherited = heir.wait_for_line("inherited", PROMPT)?;
    println!("{inherited}, {:?} after the guest's daemon fell silent", begin.elapsed());
    ensure!(inherited.contains("owner died: true"), "{inherited}");
    let state = a.qmp(r#"{"execute": "query-status"}"#)?;
    ensure!(state["status"] == "paused", "the lock was handed on while the VM runs: {state}");
    heir.wait_for_line("silence after", PROMPT)?;
    ensure!(!heir.said().0.contains("stores after"), "the fenced VM stores on: {:?}", heir.said());
    let status = bed.host(&ginnel.on_host("ginnel status")?)?.ok()?.stdout;
    ensure!(status.contains("fenced"), "{status}");
    if memory == MemoryKind::Bar {
        daemon.wait_for_line("is to be unplugged", PROMPT)?;
    }

    // Somebody resumes the VM. Its program does not use the library, and so does not notice.
    a.resume()?;
    daemon.wait_for_line("the fenced VM continues", PROMPT)?;
    match memory {
        MemoryKind::Dax => drop(heir.wait_for_line("stores after", PROMPT)?),
        MemoryKind::Bar => {
            let gone = a.wait_event("DEVICE_DELETED", PROMPT)?;
            println!(
                "unplugged {:?} after the guest's daemon fell silent: {}",
                begin.elapsed(),
                gone["data"]
            );
            // The word must keep the value that it had.
            let said = heir.said().0.lines().count();
            let deadline = Instant::now() + PROMPT;
            while !heir.said().0.lines().skip(said + 1).any(|line| line.contains("silence")) {
                ensure!(Instant::now() < deadline, "stores without a device: {:?}", heir.said());
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }
    guest_daemon.kill_process(CONT)?;
    daemon.wait_for_line("answers again", PROMPT)?;
    let said = undisturbed.wait(PROMPT)?.ok()?.stdout;
    ensure!(said.contains("done"), "the other VM's channel: {said}");
    println!("the other VM: {}", said.lines().last().unwrap_or_default());
    heir.kill(9)?;
    if memory == MemoryKind::Bar {
        let refused = a.run("load echo web again")?;
        ensure!(refused.code() == Some(1), "it attaches to a segment whose device is gone: {refused:?}");
        println!("without the device: {}", refused.stderr.lines().last().unwrap_or_default());
        return Ok(());
    }

    // The VM's programs attach again. When the VM is reset, their peers hear of it at once, not only when its next daemon
    // starts.
    owner.kill_process(9)?;
    let again = a.spawn("exec load echo web again")?;
    again.wait_for_line("listening", PROMPT)?;
    let peer = host_load("hold web again")?;
    peer.wait_for_line("holding", PROMPT)?;
    a.qmp(r#"{"execute": "system_reset"}"#)?;
    a.wait_event("RESET", PROMPT)?;
    let begin = Instant::now();
    peer.wait_for_line("told dead", PROMPT)?;
    println!("the host's program was told {:?} after QEMU had said that the VM is reset", begin.elapsed());
    ensure!(begin.elapsed() < TOLD, "told after {:?}", begin.elapsed());
    Ok(())
}
