//! Tests of the harness itself: what it promises to the other tests.

use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, Read};
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};
use vmtest::{Accel, Exit, HOST_ADDRESS, TestBed, Vm, wait_until};

kit::test_that_skips_are_seen!();

const LONG: Duration = Duration::from_secs(60);

fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|meta| std::os::unix::fs::MetadataExt::uid(&meta) == 0)
}

/// Two VMs that talk to each other. Because a boot costs seconds, one test goes through everything that they can be asked to
/// do.
#[test]
fn two_vms_do_what_they_are_asked() -> Result<()> {
    kit::require!(is_root(), "a bridge and taps need root");
    let bed = TestBed::new("two")?;
    let begun = Instant::now();
    let a = bed.vm("a").network().memory_mib(512).start()?;
    let b = bed.vm("b").network().memory_mib(512).start()?;
    a.wait_ready()?;
    b.wait_ready()?;
    eprintln!("two guests booted in {:.2?}", begun.elapsed());
    assert_ne!(a.boot_id()?, b.boot_id()?);

    commands_bring_back_status_and_streams(&a)?;
    jobs_run_beside_each_other_and_can_be_killed(&a)?;
    output_is_there_while_the_job_runs(&a)?;
    a_child_left_behind_does_not_hold_up_its_job(&a)?;
    guests_and_host_reach_each_other(&bed, &a, &b)?;
    files_go_there_and_back(&bed, &a)?;
    a_pause_holds_the_guest_still(&a)?;
    a_reboot_is_another_boot_in_the_same_qemu(&a, &b)?;

    a.shutdown()?;
    assert!(!a.is_running());
    b.kill_qemu()?;
    let error = b.run("true").unwrap_err().to_string();
    assert!(error.contains("QEMU ended with signal 9"), "{error}");

    let again = bed.vm("a").network().boot()?;
    assert_eq!(again.address()?, a.address()?, "a name keeps its address");
    again.run(&format!("ping -c 1 -W 5 {HOST_ADDRESS}"))?.ok()?;
    Ok(())
}

fn commands_bring_back_status_and_streams(a: &Vm) -> Result<()> {
    let out = a.run("echo out; echo err >&2; exit 3")?;
    assert_eq!((out.code(), out.stdout.as_str(), out.stderr.as_str()), (Some(3), "out\n", "err\n"));
    let error = out.ok().unwrap_err().to_string();
    assert!(error.contains("exit status 3") && error.contains("err"), "{error}");
    assert_eq!(a.run("kill -TERM $$")?.exit, Exit::Signal(15));
    assert_eq!(a.run("hostname")?.ok()?.stdout, "a\n");
    let big = a.run("dd if=/dev/zero bs=1M count=3 status=none | tr '\\0' x")?.ok()?.stdout;
    assert_eq!((big.len(), big.trim_matches('x')), (3 << 20, ""), "no byte of a long output is lost");
    let error = a.run_within(Duration::from_millis(300), "sleep 1000").unwrap_err().to_string();
    assert!(error.contains("has not ended within 300ms"), "{error}");
    Ok(())
}

fn jobs_run_beside_each_other_and_can_be_killed(a: &Vm) -> Result<()> {
    let jobs = [a.spawn("sleep 1000 & wait")?, a.spawn("exec sleep 1000")?, a.spawn("exec sleep 1000")?];
    for job in &jobs {
        assert!(job.is_running());
        a.run(&format!("test -d /proc/{}", job.pid()))?.ok()?;
    }
    assert_eq!(jobs.iter().map(|job| job.pid()).collect::<BTreeSet<_>>().len(), 3);
    for (job, signal) in jobs.iter().zip([9, 15, 2]) {
        job.kill(signal)?;
        assert_eq!(job.wait(LONG)?.exit, Exit::Signal(signal));
    }
    assert_eq!(a.run("pidof sleep")?.stdout, "", "children are killed with their group");
    assert!(jobs[0].kill(9).is_ok(), "a job that has ended takes no signal");
    assert!(jobs[0].kill(4711).is_err(), "no such signal");
    Ok(())
}

fn output_is_there_while_the_job_runs(a: &Vm) -> Result<()> {
    a.run("mkfifo /tmp/go")?.ok()?; // The job cannot go on before something is written here.
    let job = a.spawn("echo listening on 7; read x < /tmp/go; echo went $x >&2; exec sleep 1000")?;
    assert_eq!(job.wait_for_line("listening", LONG)?, "listening on 7");
    assert!(job.is_running() && !job.said().1.contains("went"));
    a.run("echo far > /tmp/go")?.ok()?;
    assert_eq!(job.wait_for_line("went", LONG)?, "went far");
    job.kill(9)?;
    let error = job.wait_for_line("home", LONG).unwrap_err().to_string();
    assert!(error.contains("signal 9") && error.contains("went far"), "{error}");
    Ok(())
}

fn a_child_left_behind_does_not_hold_up_its_job(a: &Vm) -> Result<()> {
    let begun = Instant::now();
    let job = a.spawn("(read x < /tmp/go; echo late) & echo early")?;
    let out = job.wait(LONG)?.ok()?;
    assert_eq!(out.stdout, "early\n");
    ensure!(begun.elapsed() < LONG, "the job waited for its child");
    a.run("echo x > /tmp/go")?.ok()?;
    wait_until("what the child said is heard", LONG, || Ok(job.said().0 == "early\nlate\n"))?;
    Ok(())
}

fn guests_and_host_reach_each_other(bed: &TestBed, a: &Vm, b: &Vm) -> Result<()> {
    a.run(&format!("ping -c 1 -W 5 {}", b.address()?))?.ok()?;
    b.run("ping -c 1 -W 5 host")?.ok()?;
    bed.host_in_net(&format!("exec busybox ping -c 1 -W 5 {}", a.address()?))?.ok()?;

    // A socket of this process in the network of the test bed.
    let listener = bed.in_net(|| TcpListener::bind((HOST_ADDRESS, 0)))??;
    let port = listener.local_addr()?.port();
    let job = b.spawn(&format!("echo hello | nc {HOST_ADDRESS} {port}"))?;
    let (mut stream, peer) = listener.accept()?;
    assert_eq!(peer.ip(), b.address()?);
    stream.set_read_timeout(Some(LONG))?;
    let mut said = [0; 6];
    stream.read_exact(&mut said)?;
    assert_eq!(&said, b"hello\n");
    drop(stream);
    job.wait(LONG)?;

    // A command on the host, while it runs.
    let server = bed.host_spawn("echo ready; exec busybox nc -l -p 99")?;
    server.wait_for_line("ready", LONG)?;
    a.run(&format!("until echo from a | nc {HOST_ADDRESS} 99; do usleep 10000; done"))?.ok()?;
    assert_eq!(server.wait(LONG)?.ok()?.stdout, "ready\nfrom a\n");
    assert_eq!(a.address()?, Ipv4Addr::new(10, 213, 0, 10));
    Ok(())
}

fn files_go_there_and_back(bed: &TestBed, a: &Vm) -> Result<()> {
    let (there, back) = (bed.dir().join("there"), bed.dir().join("back"));
    let mut x = 1u64;
    let bytes: Vec<u8> = std::iter::repeat_with(|| {
        x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        x.to_le_bytes()
    })
    .take((16 << 20) / 8 + 1)
    .flatten()
    .collect();
    fs::write(&there, &bytes)?;
    let begun = Instant::now();
    a.push(&there, "/tmp/new/folder/file")?;
    let pushed = begun.elapsed();
    let sum = bed.host("sha256sum < there")?.ok()?.stdout;
    assert_eq!(a.run("sha256sum < /tmp/new/folder/file")?.ok()?.stdout, sum);
    let begun = Instant::now();
    a.pull("/tmp/new/folder/file", &back)?;
    eprintln!("16 MiB pushed in {pushed:.2?}, pulled in {:.2?}", begun.elapsed());
    assert!(fs::read(&back)? == bytes);

    a.write("/tmp/script", 0o755, "#!/bin/sh\necho scripted $1\n")?;
    assert_eq!(a.run("/tmp/script twice")?.ok()?.stdout, "scripted twice\n");
    a.write("/tmp/empty", 0o600, "")?;
    assert_eq!(a.read("/tmp/empty")?, b"");
    let error = a.read("/no/such").unwrap_err().to_string();
    assert!(error.contains("cannot read /no/such"), "{error}");
    let error = a.write("/proc/nothing/here", 0o600, "x").unwrap_err().to_string();
    assert!(error.contains("cannot write /proc/nothing/here"), "{error}");
    let error = a.push(&there, "/dev/full").unwrap_err().to_string();
    assert!(error.contains("No space left"), "{error}");
    assert_eq!(a.run("echo fine")?.ok()?.stdout, "fine\n", "a failed transfer harms nobody else");
    Ok(())
}

fn a_pause_holds_the_guest_still(a: &Vm) -> Result<()> {
    a.pause()?;
    assert_eq!(a.qmp(r#"{"execute": "query-status"}"#)?["status"], "paused");
    a.wait_event("STOP", LONG)?;
    let error = a.run_within(Duration::from_millis(300), "true").unwrap_err().to_string();
    assert!(error.contains("was not started"), "{error}");
    a.resume()?;
    a.wait_event("RESUME", LONG)?;
    assert_eq!(a.run("echo awake")?.ok()?.stdout, "awake\n");
    let error = a.qmp(r#"{"execute": "no-such-command"}"#).unwrap_err().to_string();
    assert!(error.contains("no-such-command"), "{error}");
    Ok(())
}

fn a_reboot_is_another_boot_in_the_same_qemu(a: &Vm, b: &Vm) -> Result<()> {
    let (boot, pid) = (a.boot_id()?, a.qemu_pid());
    a.run("touch /tmp/gone")?.ok()?;
    let job = a.spawn("exec sleep 1000")?;
    let begun = Instant::now();
    a.reboot_and_wait()?;
    eprintln!("rebooted in {:.2?}", begun.elapsed());
    assert_ne!(a.boot_id()?, boot);
    assert_eq!(a.qemu_pid(), pid);
    let error = job.wait(LONG).unwrap_err().to_string();
    assert!(error.contains("was lost"), "{error}");
    assert_eq!(a.run("test -e /tmp/gone")?.code(), Some(1));
    b.run(&format!("ping -c 1 -W 5 {}", a.address()?))?.ok()?;

    // An orderly reboot, caused from inside the guest.
    let boot = a.boot_id()?;
    a.spawn("reboot")?;
    a.wait_reboot(&boot)?;
    assert_ne!(a.boot_id()?, boot);
    Ok(())
}

#[test]
fn a_guest_has_the_devices_and_files_that_were_asked_for() -> Result<()> {
    let bed = TestBed::new("devices")?;
    let share = bed.dir().join("share");
    fs::create_dir(&share)?;
    fs::write(share.join("greeting"), "from the host")?;
    let (pmem, disk, lib) = (bed.dir().join("pmem"), bed.dir().join("disk"), bed.dir().join("libtinfo.so.6"));
    fs::File::create(&pmem)?.set_len(64 << 20)?;
    fs::File::create(&disk)?.set_len(8 << 20)?;
    let bash = Path::new("/bin/bash");
    let tinfo = bed.host("ldd /bin/bash | awk '/libtinfo/ { print $3 }'")?.ok()?.stdout;
    fs::copy(tinfo.trim(), &lib).with_context(|| format!("bash's library '{}'", tinfo.trim()))?;

    let vm = bed
        .vm("all")
        .memory_mib(512)
        .device_memory_mib(2048)
        .iommu()
        .dax()
        .module("nvme")
        .share(&share, "/mnt/share")
        .program(bash)
        .library(&lib)
        .file(std::env::current_exe()?, "/opt/harness")
        .content("/etc/motd", 0o644, "hello")
        .kernel_arg("ginnel.test=1")
        .qemu_args(&format!("-object memory-backend-file,id=p,share=on,mem-path={},size=64M", pmem.display()))
        .qemu_args("-device virtio-pmem-pci,memdev=p -device nvme,serial=1,drive=d")
        .qemu_args("-object memory-backend-ram,id=s,share=on,size=1M -device ivshmem-plain,memdev=s")
        .qemu_arg("-drive")
        .qemu_arg(&format!("if=none,id=d,format=raw,file={}", disk.display()))
        .boot()?;

    assert_eq!(vm.run("uname -r")?.ok()?.stdout.trim(), bed.kernel().release);
    vm.run("grep -q ginnel.test=1 /proc/cmdline")?.ok()?;
    assert_eq!(vm.run("cat /mnt/share/greeting /etc/motd")?.ok()?.stdout, "from the hosthello");
    vm.run("echo back > /mnt/share/answer")?.ok()?;
    assert_eq!(fs::read_to_string(share.join("answer"))?, "back\n");
    vm.run("test -b /dev/nvme0n1")?.ok()?;
    vm.run("test -b /dev/pmem0")?.ok()?;
    vm.run("modprobe vfio-pci && test -c /dev/vfio/vfio && test -n \"$(ls /sys/kernel/iommu_groups)\"")?
        .ok()?;

    // VFIO can take a device, so a program can get interrupts.
    let shmem = vm.run("cd /sys/bus/pci/devices; grep -l 0x1af4 */vendor | while read f; do d=${f%/*}; grep -q 0x1110 $d/device && echo $d; done")?;
    let shmem = shmem.ok()?.stdout.trim().to_owned();
    vm.run(&format!(
        "cd /sys/bus/pci/devices/{shmem}; echo vfio-pci > driver_override; echo {shmem} > ../../drivers_probe"
    ))?;
    vm.run(&format!("echo {shmem} > /sys/bus/pci/drivers_probe; ls /dev/vfio | grep -x '[0-9]*'"))?.ok()?;

    let loaded = vm.run("LD_TRACE_LOADED_OBJECTS=1 bash")?.ok()?.stdout;
    assert!(loaded.contains("/usr/local/lib/libtinfo.so.6"), "{loaded}");
    assert_eq!(vm.run("bash -c 'x=(a b); echo ${x[1]}'")?.ok()?.stdout, "b\n");
    let tests = vm.run("/opt/harness --list")?.ok()?.stdout;
    assert!(tests.contains("a_guest_has_the_devices"), "{tests}");
    assert_eq!(vm.accel(), bed.accel()?);
    Ok(())
}

#[test]
fn a_vm_that_cannot_boot_says_why() -> Result<()> {
    let bed = TestBed::new("broken")?;
    let error = bed.vm("a").qemu_args("-device no-such-thing").start().map(drop).unwrap_err();
    assert!(format!("{error:#}").contains("'no-such-thing' is not a valid device model name"), "{error:#}");

    let begun = Instant::now();
    let error = bed.vm("a").kernel_arg("rdinit=/no/such").kernel_arg("panic=0").boot().map(drop).unwrap_err();
    let error = format!("{error:#}");
    assert!(error.contains("kernel panicked") && error.contains("Unable to mount root fs"), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(100), "a panic is seen before the time is up");

    let error = bed.vm("a").module("no_such_module").start().map(drop).unwrap_err();
    assert!(format!("{error:#}").contains("no module no_such_module"), "{error:#}");
    let error = bed.vm("a").program("/no/such/program").start().map(drop).unwrap_err();
    assert!(format!("{error:#}").contains("/no/such/program"), "{error:#}");
    let error = bed.vm("a/b").start().map(drop).unwrap_err();
    assert!(format!("{error:#}").contains("letters, digits"), "{error:#}");
    let error = TestBed::new("second").map(drop).unwrap_err();
    assert!(format!("{error:#}").contains("has a test bed already"), "{error:#}");

    let _running = bed.vm("a").accel(Accel::Tcg).start()?;
    let error = bed.vm("a").start().map(drop).unwrap_err();
    assert!(format!("{error:#}").contains("running in this test bed already"), "{error:#}");
    Ok(())
}

/// What a test bed uses on the host.
struct Traces {
    qemu: u32,
    job: u32,
    dir: PathBuf,
    /// The network namespace in the kernel's notation: `net:[inode]`.
    namespace: PathBuf,
}

impl Traces {
    fn of(bed: &TestBed, vm: &Vm) -> Result<Traces> {
        let job = bed.host_spawn("sleep 1000 & wait")?;
        let namespace = fs::read_link(format!("/proc/{}/ns/net", vm.qemu_pid()))?;
        assert_ne!(namespace, fs::read_link("/proc/self/ns/net")?);
        Ok(Traces { qemu: vm.qemu_pid(), job: job.pid(), dir: bed.dir().to_owned(), namespace })
    }

    fn are_gone(&self) -> Result<()> {
        wait_until("nothing is left behind", LONG, || Ok(self.left().is_empty()))
            .with_context(|| format!("left behind: {:?}", self.left()))
    }

    fn left(&self) -> Vec<String> {
        let mut left = Vec::new();
        let alive = |pid: u32| Path::new(&format!("/proc/{pid}")).exists();
        for (what, there) in
            [("QEMU", alive(self.qemu)), ("job", alive(self.job)), ("folder", self.dir.exists())]
        {
            if there {
                left.push(what.to_owned());
            }
        }
        // A namespace lives as long as a task is in it, or a file descriptor of a task refers to it.
        let tasks = fs::read_dir("/proc").into_iter().flatten().flatten();
        for task in tasks.filter(|entry| entry.file_name().to_string_lossy().parse::<u32>().is_ok()) {
            let threads = fs::read_dir(task.path().join("task")).into_iter().flatten().flatten();
            let inside = threads.map(|thread| thread.path().join("ns/net"));
            let fds =
                fs::read_dir(task.path().join("fd")).into_iter().flatten().flatten().map(|fd| fd.path());
            if inside.chain(fds).any(|link| fs::read_link(link).is_ok_and(|target| target == self.namespace))
            {
                left.push(format!("namespace, held by process {}", task.file_name().to_string_lossy()));
            }
        }
        left
    }
}

#[test]
fn a_dropped_test_bed_leaves_nothing() -> Result<()> {
    kit::require!(is_root(), "a bridge and taps need root");
    let bed = TestBed::new("dropped")?;
    let vm = bed.vm("a").network().start()?;
    let traces = Traces::of(&bed, &vm)?;
    assert!(traces.left().len() > 3, "QEMU, job, folder and processes in the namespace: {:?}", traces.left());
    drop(vm);
    assert!(!Path::new(&format!("/proc/{}", traces.qemu)).exists(), "a dropped VM is gone at once");
    drop(bed);
    traces.are_gone()
}

#[test]
fn a_test_that_panics_leaves_nothing() -> Result<()> {
    kit::require!(is_root(), "a bridge and taps need root");
    let (tell, told) = std::sync::mpsc::channel();
    let panicked = std::thread::spawn(move || {
        let bed = TestBed::new("panics").unwrap();
        let vm = bed.vm("a").network().start().unwrap();
        tell.send(Traces::of(&bed, &vm).unwrap()).unwrap();
        panic!("as tests do");
    });
    assert!(panicked.join().is_err());
    told.recv()?.are_gone()
}

#[test]
fn a_test_run_that_is_killed_leaves_nothing() -> Result<()> {
    kit::require!(is_root(), "a bridge and taps need root");
    let mut child = kit::program::command(boots_and_waits_to_be_killed).stdout(Stdio::piped()).spawn()?;
    let mut lines = std::io::BufReader::new(child.stdout.take().context("no pipe")?).lines();
    let words = loop {
        let Some(line) = lines.next() else { bail!("the child has ended: {:?}", child.wait()) };
        if let Some((_, words)) = line?.split_once("TRACES ") {
            break words.split(' ').map(str::to_owned).collect::<Vec<_>>();
        }
    };
    let [qemu, job, dir, namespace] = &words[..] else { bail!("{words:?}") };
    let traces =
        Traces { qemu: qemu.parse()?, job: job.parse()?, dir: dir.into(), namespace: namespace.into() };
    assert!(!traces.left().is_empty());
    child.kill()?;
    child.wait()?;
    drop(TestBed::new("sweeper")?); // The next test bed removes the folder; the kernel has removed everything else.
    traces.are_gone()
}

kit::program! {
    fn boots_and_waits_to_be_killed() {
        let run = || -> Result<()> {
            let bed = TestBed::new("killed")?;
            let vm = bed.vm("a").network().start()?;
            let Traces { qemu, job, dir, namespace } = Traces::of(&bed, &vm)?;
            println!("TRACES {qemu} {job} {} {}", dir.display(), namespace.display());
            vm.wait_event("NEVER", Duration::from_secs(600)).map(drop)
        };
        run().unwrap();
    }
}
