//! Queue pairs between VMs and the host when programs, VMs, guest kernels and daemons die, or VMs pause.

use crate::stage::{DEVICE, FILES, Stage};
use anyhow::{Context, Result, ensure};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fs, thread};
use vmtest::installation::MemoryKind;
use vmtest::{HostJob, Job, TestBed, Vm};

/// How long anything may take that has no limit of its own.
const PROMPT: Duration = Duration::from_secs(60);
/// The timeout of queue pairs: 4.3 s, with eight tries. This is longer than a pause of a VM.
const TIMEOUT: &str = "20";

/// The place where a program runs.
#[derive(Clone, Copy)]
enum Place<'v> {
    Host,
    Guest(&'v Vm),
}

enum Running {
    Host(Arc<HostJob>),
    Guest(Job),
}

/// One of two ends of queue pairs. It prints its address and is told the address of the other end (`ends.h`).
struct End<'s> {
    place: Place<'s>,
    running: Running,
    /// The FIFO that is its standard input.
    input: String,
    /// The number of lines that were read.
    read: usize,
}

impl<'s> End<'s> {
    fn start(stage: &Stage<'_>, place: Place<'s>, name: &str, command: &str) -> Result<Self> {
        // A FIFO that is open for reading and writing never reports its end.
        let (running, input) = match place {
            Place::Host => {
                let input = format!("{}/{name}.in", stage.files.display());
                stage.bed.host(&format!("rm -f {input}; mkfifo {input}"))?.ok()?;
                let line = stage.on_host(&format!("./{command} <>{input}"))?;
                (Running::Host(stage.bed.host_spawn(&line)?), input)
            }
            Place::Guest(vm) => {
                let input = format!("/tmp/{name}.in");
                vm.run(&format!("rm -f {input}; mkfifo {input}"))?.ok()?;
                let line = stage.in_guest(name, &format!("{FILES}/{command} <>{input}"))?;
                (Running::Guest(vm.spawn(&line)?), input)
            }
        };
        Ok(Self { place, running, input, read: 0 })
    }

    fn said(&self) -> (String, String) {
        match &self.running {
            Running::Host(job) => job.said(),
            Running::Guest(job) => job.said(),
        }
    }

    fn is_running(&self) -> bool {
        match &self.running {
            Running::Host(job) => job.is_running(),
            Running::Guest(job) => job.is_running(),
        }
    }

    /// Returns its next line, and waits this long for it.
    fn line(&mut self, patience: Duration) -> Result<String> {
        let deadline = Instant::now() + patience;
        loop {
            let running = self.is_running();
            let (output, errors) = self.said();
            let mut lines = output.split_inclusive('\n').filter(|line| line.ends_with('\n'));
            if let Some(line) = lines.nth(self.read) {
                self.read += 1;
                return Ok(line.trim_end().to_owned());
            }
            ensure!(running, "it has ended: {output}{errors}");
            ensure!(Instant::now() < deadline, "it says nothing for {patience:?}: {output}{errors}");
            thread::sleep(Duration::from_millis(2));
        }
    }

    fn tell(&self, line: &str) -> Result<()> {
        match self.place {
            Place::Host => fs::write(&self.input, format!("{line}\n"))?,
            Place::Guest(vm) => drop(vm.run(&format!("echo '{line}' >{}", self.input))?.ok()?),
        }
        Ok(())
    }

    /// Tells both ends the address of the other one.
    fn connect(&mut self, other: &mut End<'_>) -> Result<()> {
        let (here, there) = (self.line(PROMPT)?, other.line(PROMPT)?);
        self.tell(&there)?;
        other.tell(&here)
    }

    /// Tells the end to finish, which must succeed.
    fn finish(self) -> Result<()> {
        self.tell(".")?;
        let output = match &self.running {
            Running::Host(job) => job.wait(PROMPT)?,
            Running::Guest(job) => job.wait(PROMPT)?,
        };
        output.ok().map(drop)
    }
}

/// Returns how many bytes of the segment are in use.
fn used(stage: &Stage<'_>) -> Result<u64> {
    let status = stage.ginnel("status")?;
    status["segments"][0]["used"].as_u64().with_context(|| format!("no bytes used: {status:#}"))
}

/// Returns how many requests the segment's queue pairs have executed.
fn executed(stage: &Stage<'_>) -> Result<u64> {
    let devices = stage.ginnel("verbs")?;
    let endpoints = devices[0]["endpoints"].as_array().context("no endpoints")?.iter();
    let pairs = endpoints.flat_map(|endpoint| endpoint["queue_pairs"].as_array().into_iter().flatten());
    Ok(pairs.filter_map(|pair| pair["executed"].as_u64()).sum())
}

/// Waits until a condition holds.
fn wait_until(what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + PROMPT;
    while !is_so()? {
        ensure!(Instant::now() < deadline, "{what}: not within {PROMPT:?}");
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Returns how often the two VMs are disturbed while they exchange messages. Each of the four kinds happens once in a round.
fn disturbances() -> u32 {
    if std::env::var_os("GINNEL_SOAK").is_some() { 400 } else { 8 }
}

#[test]
fn messages_outlast_pauses_and_the_death_of_daemons() -> Result<()> {
    let bed = TestBed::new("verbs-pauses")?;
    let stage = Stage::new(&bed, MemoryKind::Dax)?;
    stage.compile("soak")?;
    let [mut a, mut b] = stage.boot(["a", "b"])?;
    let before = used(&stage)?;
    let (mut turn, mut pairs) = (0, 0);
    while turn < disturbances() {
        // Each message must arrive once, in order and unchanged.
        let command = format!("soak {DEVICE} 0 shared any free 60000 60");
        let mut first = End::start(&stage, Place::Guest(&a.vm), "first", &command)?;
        let mut second =
            End::start(&stage, Place::Guest(&b.vm), "second", &command.replacen(" 0 ", " 1 ", 1))?;
        first.connect(&mut second)?;
        pairs += 1;
        let is_done = |first: &End<'_>, second: &End<'_>| {
            first.said().0.contains("good") && second.said().0.contains("good")
        };
        while turn < disturbances() && !is_done(&first, &second) {
            let so_far = executed(&stage)?;
            match turn % 4 {
                0 => {
                    stage.ginnel.kill_daemon()?;
                    stage.ginnel.start_daemon()?;
                }
                1 => {
                    let daemon = stage.ginnel.daemon()?;
                    let hangs = daemon.said().1.matches("the VM hangs").count();
                    a.vm.pause()?;
                    wait_until("the daemon notices", || {
                        Ok(daemon.said().1.matches("the VM hangs").count() > hangs)
                    })?;
                    a.vm.resume()?;
                }
                2 => restart(&stage, &a.vm, &mut a.daemon)?,
                _ => restart(&stage, &b.vm, &mut b.daemon)?,
            }
            turn += 1;
            wait_until("messages go on", || {
                for end in [&first, &second] {
                    ensure!(end.is_running(), "turn {turn}: it has ended: {:?}", end.said());
                }
                Ok(is_done(&first, &second) || executed(&stage)? > so_far + 100)
            })?;
        }
        for end in [&mut first, &mut second] {
            let line = end.line(PROMPT)?;
            ensure!(line.starts_with("good"), "{line}");
            println!("{turn} disturbances so far: {line}");
        }
        first.finish()?;
        second.finish()?;
    }
    println!("{turn} disturbances in {pairs} runs");
    wait_until("the return of all memory", || Ok(used(&stage)? == before))
}

/// Kills a guest daemon, and starts the next one.
fn restart(stage: &Stage<'_>, vm: &Vm, daemon: &mut Job) -> Result<()> {
    daemon.kill_process(9)?;
    daemon.wait(PROMPT)?;
    *daemon = stage.ginnel.start_guest(vm)?;
    Ok(())
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Death {
    Program,
    Kernel,
    Vm,
}

/// When only a program or a VM has died, the survivors must not have a request left after this time. 100 ms are promised on a
/// machine that has nothing else to do.
const BOUND: Duration = Duration::from_secs(5);

#[test]
fn requests_end_when_a_program_a_kernel_or_a_vm_dies() -> Result<()> {
    let bed = TestBed::new("verbs-deaths")?;
    let stage = Stage::new(&bed, MemoryKind::Dax)?;
    stage.compile("kills")?;
    stage.compile("bystander")?;
    let [mut a, b] = stage.boot(["a", "b"])?;
    let before = used(&stage)?;

    // A program that has nothing to do with the others gets the pages that the dead leave.
    let line = stage.on_host(&format!(
        "sh -c 'while [ ! -e stop ]; do ./bystander {DEVICE} 16 300 || exit; done; echo nothing has changed'"
    ))?;
    let bystander = bed.host_spawn(&line)?;

    let mut survivors = [
        End::start(&stage, Place::Guest(&b.vm), "in-b", &format!("kills {DEVICE} 0 own none 0 {TIMEOUT}"))?,
        End::start(&stage, Place::Host, "on-host", &format!("kills {DEVICE} 0 shared none 0 {TIMEOUT}"))?,
    ];
    let deaths = [Death::Program, Death::Kernel, Death::Program, Death::Vm, Death::Program];
    for (turn, death) in deaths.into_iter().enumerate() {
        let mut victims = Vec::new();
        for (survivor, receives) in survivors.iter_mut().zip(["own", "shared"]) {
            let command = format!("kills {DEVICE} 1 {receives} none {turn} {TIMEOUT}");
            let mut victim =
                End::start(&stage, Place::Guest(&a.vm), &format!("victim-{receives}"), &command)?;
            survivor.connect(&mut victim)?;
            let line = victim.line(PROMPT)?;
            ensure!(line == "at work", "{death:?}: {line}");
            victims.push(victim.running);
        }
        let begun = Instant::now();
        match death {
            Death::Program => {
                for victim in &victims {
                    let Running::Guest(job) = victim else { continue };
                    job.kill_process(9)?;
                }
            }
            // Only its next daemon reports that a kernel has started again.
            Death::Kernel => {
                let old = a.vm.boot_id()?;
                a.vm.qmp(r#"{"execute": "system_reset"}"#)?;
                a.vm.wait_reboot(&old)?;
                a.daemon = stage.ginnel.start_guest(&a.vm)?;
            }
            Death::Vm => a.vm.kill_qemu()?,
        }
        for survivor in &mut survivors {
            let line = survivor.line(PROMPT).with_context(|| format!("{death:?}"))?;
            ensure!(line.starts_with("over after "), "{death:?}: {line}");
        }
        let took = begun.elapsed();
        println!("{death:?}: all requests had ended after {took:?}");
        ensure!(death == Death::Kernel || took < BOUND, "{death:?}: {took:?}");
        drop(victims);
        if death == Death::Vm {
            [a] = stage.boot(["a"])?;
        }
        ensure!(bystander.is_running(), "somebody has changed others' memory: {:?}", bystander.said());
    }

    for mut survivor in survivors {
        // The survivor prints where it waits for the next one.
        survivor.line(PROMPT)?;
        survivor.finish()?;
    }
    fs::write(stage.files.join("stop"), "")?;
    let said = bystander.wait(PROMPT)?.ok()?.stdout;
    ensure!(said.contains("nothing has changed"), "{said}");
    wait_until("the return of all memory", || Ok(used(&stage)? == before))
}
