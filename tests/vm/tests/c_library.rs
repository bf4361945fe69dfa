//! The C library in VMs: its example programs, which include only `ginnel.h`, run on the host and in two guests.

use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::time::Duration;
use vmtest::installation::{MemoryKind, Plan};
use vmtest::{Output, TestBed, Vm, VmBuilder};

vmtest::test_both_memories!(c_programs_talk_between_host_and_guests);

const PROMPT: Duration = Duration::from_secs(60);

/// The place where a program runs.
#[derive(Clone, Copy)]
enum Place<'a> {
    Host,
    Vm(&'a Vm),
}

fn c_programs_talk_between_host_and_guests(memory: MemoryKind) -> Result<()> {
    let bed = TestBed::new("c-library")?;
    let plan = Plan::new(&bed).memory(memory).vm("a").vm("b");
    let ginnel = plan.segment("web", 16, &["host", "a", "b"]).start()?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/build-c-examples");
    let out = bed.dir().join("c");
    bed.host(&format!("{} {}", script.display(), out.display()))?.ok()?;
    let describe = |name: &str| -> Result<VmBuilder> {
        let vm = ginnel.vm(name)?.library(out.join("libginnel.so.0"));
        let programs = ["echo_server", "echo_client", "block_writer", "block_reader"];
        Ok(programs.iter().fold(vm, |vm, program| vm.program(out.join(program))))
    };
    let (a, b) = (describe("a")?.start()?, describe("b")?.start()?);
    a.wait_ready()?;
    b.wait_ready()?;
    let _daemons = (ginnel.start_guest(&a)?, ginnel.start_guest(&b)?);
    let on_host = |command: &str| ginnel.on_host(&format!("export PATH={}:$PATH; {command}", out.display()));

    let server = a.spawn("exec echo_server web/echo")?;
    let mut said = String::new();
    vmtest::wait_until("the server in the VM to answer", PROMPT, || {
        let result = bed.host(&on_host("echo_client web/echo greetings")?)?;
        said = format!("{result:?}");
        Ok(result.code() == Some(0))
    })
    .with_context(|| format!("the server: {:?}; the last client: {said}", server.said()))?;
    ensure!(said.contains("greetings"), "the client on the host got {said:?}");
    server.kill_process(9)?;
    server.wait(PROMPT)?;

    let server = bed.host_spawn(&on_host("exec echo_server web/back")?)?;
    vmtest::wait_until("the server on the host to answer", PROMPT, || {
        let result = a.run("echo_client web/back salutations")?;
        said = result.stdout.clone();
        Ok(result.code() == Some(0))
    })?;
    ensure!(said.contains("salutations"), "the client in the VM got {said:?}");
    server.kill(9)?;

    // A file is sent from the host to a guest, from there to the other guest, and from there to the host. Each transfer uses
    // one block, whose size does not divide the file's, and a path of its own.
    let path = |name: &str| bed.dir().join(name).display().to_string();
    let bytes: Vec<u8> = (0..8_000_001u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    std::fs::write(path("first"), &bytes)?;
    let (host, a, b) = (Place::Host, Place::Vm(&a), Place::Vm(&b));
    let ways = [
        (host, path("first"), a, "/tmp/second".into()),
        (a, "/tmp/second".into(), b, "/tmp/third".into()),
        (b, "/tmp/third".into(), host, path("last")),
    ];
    type End<'a> = Box<dyn FnOnce() -> Result<Output> + 'a>;
    let start = |place: Place<'_>, command: &str| -> Result<End<'_>> {
        let command = format!("exec {command}");
        Ok(match place {
            Place::Host => {
                let job = bed.host_spawn(&on_host(&command)?)?;
                Box::new(move || job.wait(PROMPT))
            }
            Place::Vm(vm) => {
                let job = vm.spawn(&command)?;
                Box::new(move || job.wait(PROMPT))
            }
        })
    };
    for (way, (writer, from, reader, to)) in ways.iter().enumerate() {
        let writer = start(*writer, &format!("block_writer web way{way} {from} 1000000"))?;
        let reader = start(*reader, &format!("block_reader web way{way} {to}"))?;
        reader()?.ok()?;
        writer()?.ok()?;
    }
    ensure!(std::fs::read(path("last"))? == bytes, "the file has changed on its way");
    Ok(())
}
