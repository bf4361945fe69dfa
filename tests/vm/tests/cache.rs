//! A cache on the host or in a VM with clients in two VMs, which read memory that they cannot write.

use anyhow::{Context, Result, bail, ensure};
use ginnel_report::Report;
use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vmtest::installation::{Installation, Plan, program};
use vmtest::{HOST_ADDRESS, HostJob, Job, TestBed, Vm};

const PROMPT: Duration = Duration::from_secs(60);
const PATIENCE: Duration = Duration::from_secs(180);
const PORT: u16 = 11_211;

/// A VM with its guest daemon.
struct Guest {
    vm: Vm,
    _daemon: Job,
}

impl Guest {
    fn new(ginnel: &Installation<'_>, vm: Vm) -> Result<Self> {
        vm.wait_ready()?;
        let daemon = ginnel.start_guest(&vm)?;
        Ok(Self { vm, _daemon: daemon })
    }

    /// Runs a command to its end and returns what it printed.
    fn good(&self, command: &str) -> Result<String> {
        Ok(self.vm.run_within(PATIENCE, command)?.ok().with_context(|| command.to_owned())?.stdout)
    }

    fn load(&self, what: &str) -> Result<Job> {
        let job = self.vm.spawn(&format!("exec cache-load {what}"))?;
        job.wait_for_line("begun", PROMPT)?;
        Ok(job)
    }
}

/// Starts an installation with two VMs that may read the segment `items`. All members change it over channels of the segment
/// `web`.
fn installation(bed: &TestBed) -> Result<Installation<'_>> {
    let plan = Plan::new(bed).vm("a").vm("b");
    plan.segment_with_readers("items", 64, &["host"], &["a", "b"])
        .segment("web", 32, &["host", "a", "b"])
        .start()
}

fn boot(ginnel: &Installation<'_>) -> Result<[Guest; 2]> {
    let start = |name| -> Result<Vm> {
        let vm = ginnel.vm(name)?.memory_mib(768).host_files().share(files(ginnel)?, "/tmp/files");
        vm.program(program("cache-load")?).library(program("libginnel_preload.so")?).start()
    };
    let (a, b) = (start("a")?, start("b")?);
    Ok([Guest::new(ginnel, a)?, Guest::new(ginnel, b)?])
}

/// Makes a folder that all VMs have.
fn files(ginnel: &Installation<'_>) -> Result<std::path::PathBuf> {
    let files = ginnel.config().parent().context("a configuration without a folder")?.join("files");
    fs::create_dir_all(&files)?;
    Ok(files)
}

fn start_cache(bed: &TestBed, ginnel: &Installation<'_>, more: &str) -> Result<Arc<HostJob>> {
    let command = format!("exec ginnel-cache --segment items --name main --memory 40M --channel web {more}");
    let job = bed.host_spawn(&ginnel.on_host(&command)?)?;
    job.wait_for_line("serving", PROMPT)?;
    Ok(job)
}

/// Waits until a load has ended well, and returns what it printed.
fn ends(job: &Job) -> Result<String> {
    let said = job.wait(PATIENCE)?.ok()?.stdout;
    println!("{}", said.lines().last().unwrap_or_default());
    Ok(said)
}

#[test]
fn clients_in_two_vms_read_memory_that_they_cannot_write() -> Result<()> {
    let bed = TestBed::new("cache")?;
    let ginnel = installation(&bed)?;
    let [a, b] = boot(&ginnel)?;
    let _cache = start_cache(&bed, &ginnel, &format!("--listen {HOST_ADDRESS}:{PORT}"))?;

    // One VM makes changes over a channel; the other VM reads, and so does the host.
    a.good("ginnel cache set items/main greeting hello")?;
    let said = b.good("ginnel cache get items/main greeting")?;
    ensure!(said.contains("hello"), "{said:?}");
    let on_host = ginnel.on_host("ginnel cache get items/main greeting")?;
    ensure!(bed.host(&on_host)?.ok()?.stdout.contains("hello"));

    // The server sleeps while both read.
    let writer = a.load("write items/main 0 3")?;
    let reader = b.load("read items/main 1 3")?;
    ends(&writer)?;
    ends(&reader)?;

    // Stores of a reader have no effect, and nobody notices them.
    let reader = a.load("read items/main 1 5")?;
    let said = b.good("cache-load scribble")?;
    ensure!(said.contains("scribbled: 1"), "{said}");
    ends(&reader)?;
    ensure!(a.good("ginnel cache get items/main greeting")?.contains("hello"));

    // An unmodified client in Python: its GETs are answered from memory, and it finds what it has stored.
    fs::write(files(&ginnel)?.join("client.py"), CLIENT)?;
    let script = format!(
        "cd /tmp/files && export HOME=/tmp GINNEL_PRELOAD=/usr/local/lib/libginnel_preload.so\n\
         exec ginnel run --report=/tmp/report -- /usr/bin/python3 client.py {HOST_ADDRESS} {PORT} 200\n"
    );
    fs::write(files(&ginnel)?.join("run"), script)?;
    let said = b.good("exec chroot /host sh /tmp/files/run")?;
    ensure!(said.contains("200 right"), "{said}");
    let report = Report::read(&b.vm.read("/tmp/report")?[..])?;
    let [connection] = &report.connections[..] else {
        bail!("there is one connection: {:?}", report.connections);
    };
    ensure!(
        connection.cache == "items/main"
            && (connection.gets_from_memory, connection.gets_passed_on) == (200, 0),
        "{connection:?}"
    );
    Ok(())
}

/// A client that makes changes and reads. What it reads must be what it has stored.
const CLIENT: &str = include_str!("cache.py");

#[test]
fn servers_killed_under_load_from_two_vms_return_no_wrong_value() -> Result<()> {
    let kills: u32 = if std::env::var_os("GINNEL_SOAK").is_some() { 500 } else { 12 };
    let bed = TestBed::new("cache-kills")?;
    let ginnel = installation(&bed)?;
    let [a, b] = boot(&ginnel)?;
    let mut cache = start_cache(&bed, &ginnel, "")?;
    let seconds = 10 + kills;
    let jobs = [
        a.load(&format!("write items/main 0 {seconds}"))?,
        b.load(&format!("write items/main 1 {seconds}"))?,
        b.load(&format!("read items/main 2 {seconds}"))?,
    ];
    let mut longest = Duration::ZERO;
    for kill in 0..kills {
        // Each kill comes at another moment.
        let pause = Duration::from_millis(200 + u64::from(kill * 37 % 300));
        std::thread::sleep(pause);
        cache.kill(9)?;
        cache.wait(PROMPT)?;
        let begun = Instant::now();
        cache = start_cache(&bed, &ginnel, "")?;
        longest = longest.max(begun.elapsed());
        // Now and then the daemon is killed as well.
        if kill % 8 == 7 {
            ginnel.kill_daemon()?;
            ginnel.start_daemon()?;
        }
    }
    for job in &jobs {
        ends(job)?;
    }
    println!("{kills} servers killed; a successor served after {} ms at most", longest.as_millis());
    Ok(())
}

#[test]
fn a_cache_in_a_vm_serves_the_host_and_another_vm() -> Result<()> {
    let bed = TestBed::new("cache-in-vm")?;
    let plan = Plan::new(&bed).vm("a").vm("b");
    let ginnel = plan
        .segment_with_readers("items", 64, &["a"], &["host", "b"])
        .segment("web", 32, &["host", "a", "b"])
        .start()?;
    let start =
        |name| ginnel.vm(name)?.program(program("cache-load")?).program(program("ginnel-cache")?).start();
    let (a, b) = (start("a")?, start("b")?);
    let (a, mut b) = (Guest::new(&ginnel, a)?, Guest::new(&ginnel, b)?);
    let serve = "exec ginnel-cache --segment items --name main --memory 40M --channel web";
    let cache = a.vm.spawn(serve)?;
    cache.wait_for_line("serving", PROMPT)?;

    let host = |what: &str| -> Result<Arc<HostJob>> {
        let job = bed.host_spawn(&ginnel.on_host(&format!("exec cache-load {what}"))?)?;
        job.wait_for_line("begun", PROMPT)?;
        Ok(job)
    };
    let (writer, reader) = (host("write items/main 0 8")?, b.load("read items/main 1 8")?);
    // Another server starts in the same VM, and one of the reading VMs is started again.
    cache.kill_process(9)?;
    cache.wait(PROMPT)?;
    let cache = a.vm.spawn(serve)?;
    cache.wait_for_line("serving", PROMPT)?;
    writer.wait(PATIENCE)?.ok()?;
    ends(&reader)?;
    drop((reader, b));
    let vm = start("b")?;
    b = Guest::new(&ginnel, vm)?;
    let (writer, reader) = (host("write items/main 1 3")?, b.load("read items/main 2 3")?);
    writer.wait(PATIENCE)?.ok()?;
    ends(&reader)?;
    Ok(())
}
