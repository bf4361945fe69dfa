//! The C library in a VM: its example programs, which include only `ginnel.h`, on the host and in a guest.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use vmtest::Bed;
use vmtest::installation::{Memory, Plan};

vmtest::test_both_memories!(c_programs_talk_between_host_and_guest);

const PROMPT: Duration = Duration::from_secs(30);

fn c_programs_talk_between_host_and_guest(memory: Memory) -> Result<()> {
    let bed = Bed::new("c-library")?;
    let ginnel = Plan::new(&bed).memory(memory).vm("a").segment("web", 16, &["host", "a"]).start()?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/build-c-examples");
    let out = bed.dir().join("c");
    bed.host(&format!("{} {}", script.display(), out.display()))?.ok()?;
    let vm = ginnel
        .vm("a")?
        .library(out.join("libginnel.so.0"))
        .program(out.join("echo_server"))
        .program(out.join("echo_client"))
        .program(out.join("block_writer"))
        .program(out.join("block_reader"))
        .boot()?;
    let _daemon = ginnel.start_guest(&vm)?;

    let server = vm.spawn("exec echo_server web/echo")?;
    let client = format!("{}/echo_client web/echo greetings", out.display());
    let mut said = String::new();
    vmtest::wait_until("the server in the VM to answer", PROMPT, || {
        let result = bed.host(&ginnel.on_host(&client)?)?;
        said = format!("{result:?}");
        Ok(result.code() == Some(0))
    })
    .with_context(|| format!("the server: {:?}; the last client: {said}", server.said()))?;
    ensure!(said.contains("greetings"), "the client on the host got {said:?}");
    server.kill_process(9)?;
    server.wait(PROMPT)?;

    let server = bed.host_spawn(&ginnel.on_host(&format!("exec {}/echo_server web/back", out.display()))?)?;
    vmtest::wait_until("the server on the host to answer", PROMPT, || {
        let result = vm.run("echo_client web/back salutations")?;
        said = result.stdout.clone();
        Ok(result.code() == Some(0))
    })?;
    ensure!(said.contains("salutations"), "the client in the VM got {said:?}");
    server.kill(9)?;

    // There and back through one block each, of a size that does not divide the file's.
    let (there, back) = (bed.dir().join("there"), bed.dir().join("back"));
    let bytes: Vec<u8> = (0..8_000_001u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    std::fs::write(&there, &bytes)?;
    let command = format!("exec {}/block_writer web there {} 1000000", out.display(), there.display());
    let writer = bed.host_spawn(&ginnel.on_host(&command)?)?;
    vm.run("block_reader web there /tmp/file")?.ok()?;
    writer.wait(PROMPT)?.ok()?;
    let writer = vm.spawn("exec block_writer web back /tmp/file 1000000")?;
    bed.host(&ginnel.on_host(&format!("{}/block_reader web back {}", out.display(), back.display()))?)?
        .ok()?;
    writer.wait(PROMPT)?.ok()?;
    ensure!(std::fs::read(&back)? == bytes, "the file has changed on its way there and back");
    Ok(())
}
