//! `ginnel volume` with real volumes, and the poll-mode client as their VM.

use ginnel_volume_control::Stat;
use kit::build;
use kit::wait::{retry, wait_until};
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::Duration;
use tempfile::TempDir;

/// The client.
fn bench() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        build::program("ginnel-volume");
        build::program("ginnel-volume-bench")
    })
}

/// Folders of volumes, and the command with them.
struct Volumes {
    folder: TempDir,
    running: Vec<Child>,
}

impl Volumes {
    fn new() -> Self {
        bench();
        // On the disk and not in memory, so that direct I/O is really used.
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        for part in ["c", "s"] {
            fs::create_dir(folder.path().join(part)).unwrap();
        }
        Self { folder, running: Vec::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn configure(&self, name: &str, text: &str) {
        let text = text.replace("IMAGE", self.path("image").to_str().unwrap());
        fs::write(self.path("c").join(format!("{name}.toml")), text).unwrap();
    }

    fn command(&self, line: &str) -> Command {
        let mut command = Command::new(build::program("ginnel"));
        command
            .args(line.split_whitespace())
            .env("GINNEL_VOLUME_SOCKETS", self.path("s"))
            .env("GINNEL_VOLUME_CONFIGS", self.path("c"))
            .env("GINNEL_SOCKET", self.path("no-daemon"))
            .stdin(Stdio::null());
        command
    }

    /// Starts a volume with this name and these options, and waits until it serves.
    fn serve(&mut self, line: &str) {
        let name = line.split(' ').next().unwrap();
        let log = fs::File::create(self.path(&format!("{name}.log"))).unwrap();
        let mut child = self.command(&format!("volume serve {line}")).stderr(log).spawn().unwrap();
        wait_until("the volume", || {
            let ended = child.try_wait().unwrap();
            assert!(ended.is_none(), "{ended:?}: {}", self.log(name));
            self.command(&format!("volume stat {name}")).output().unwrap().status.success()
        });
        self.running.push(child);
    }

    fn log(&self, name: &str) -> String {
        fs::read_to_string(self.path(&format!("{name}.log"))).unwrap()
    }

    fn expect(&self, status: i32, line: &str) -> (String, String) {
        let Output { status: got, stdout, stderr } = self.command(line).output().unwrap();
        let said = (String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap());
        assert_eq!(got.code(), Some(status), "ginnel {line}: {said:?}");
        said
    }

    fn good(&self, line: &str) -> String {
        self.expect(0, line).0
    }

    fn stat(&self, name: &str) -> Stat {
        serde_json::from_str(&self.good(&format!("volume stat --json {name}"))).unwrap()
    }

    /// Starts a VM that reads as fast as it can.
    fn load(&self, name: &str, more: &str) -> Child {
        Command::new(bench())
            .arg("--socket")
            .arg(self.path("s").join(format!("{name}.sock")))
            .args(more.split_whitespace())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    }
}

impl Drop for Volumes {
    fn drop(&mut self) {
        for child in &mut self.running {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[test]
fn a_volume_is_served_listed_counted_and_resized_and_its_end_is_noticed() {
    let mut volumes = Volumes::new();
    let root = rustix::process::geteuid().is_root();
    if root {
        volumes.configure("root", "sandbox = 'require'\n[[disk]]\nbackend = 'ram'\nsize = '1M'");
        assert!(volumes.expect(1, "volume serve root").1.contains("started as root"));
        fs::remove_file(volumes.path("c/root.toml")).unwrap();
    } else {
        kit::skip!("whether a volume refuses to be served by root: only root can see that");
    }
    let user = if root { "user = 65534\ngroup = 65534\n" } else { "" };
    volumes.configure(
        "web",
        &format!("{user}vm = 'a'\nqueues = 2\nsandbox = 'require'\n[[disk]]\npath = 'IMAGE'\nsize = '64M'"),
    );
    assert!(volumes.good("volume list").contains("not running"));
    assert!(volumes.expect(1, "volume stat web").1.contains("ginnel volume serve web"));

    volumes.serve("web --create");
    let list = volumes.good("volume list");
    assert!(list.contains("waiting") && list.contains("64 MiB"), "{list}");
    assert_eq!(volumes.stat("web").sandbox, "landlock+seccomp");

    // Each request of the client is counted, by kind and by queue.
    let mut load =
        volumes.load("web", "--rw randrw --bs 8k --queues 2 --qd 4 --requests 500 --verify --ramp 0");
    assert!(load.wait().unwrap().success(), "{}", volumes.log("web"));
    let stat = volumes.stat("web");
    let count = |kind: &str| stat.operations.iter().find(|o| o.operation == kind).unwrap();
    let (read, write) = (count("read"), count("write"));
    assert!(read.requests + write.requests >= 1000, "{stat:?}");
    assert_eq!(read.requests, read.latency.count);
    assert!(
        read.bytes > 0 && read.errors == 0 && read.latency.p50 > 0 && read.latency.p50 <= read.latency.max
    );
    assert_eq!(
        stat.queues.iter().map(|q| q.done).sum::<u64>(),
        stat.operations.iter().map(|o| o.requests).sum::<u64>()
    );
    let text = volumes.good("volume stat --prometheus");
    let line = format!("ginnel_volume_requests_total{{volume=\"web\",operation=\"read\"}} {}", read.requests);
    assert!(text.lines().any(|l| l == line), "{line} is missing in\n{text}");
    assert!(volumes.good("volume stat web").contains("no front end is connected"));
    assert!(volumes.good("volume dump web").contains("volume web: features"));

    assert!(volumes.good("volume resize web 128M").contains("134217728 bytes"));
    assert_eq!(volumes.stat("web").disks[0].size, 128 << 20);
    assert_eq!(fs::metadata(volumes.path("image")).unwrap().len(), 128 << 20);
    assert!(volumes.expect(1, "volume resize web 128M --disk 7").1.contains("not resized"));
    assert!(volumes.good("volume reset-errors web").contains("no writes were lost"));
    assert!(volumes.expect(1, "volume reset-errors web --disk 7").1.contains("no disk 7"));

    assert!(volumes.good("volume resume web").contains("0 requests were held"));

    volumes.running[0].kill().unwrap();
    assert_eq!(volumes.running[0].wait().unwrap().signal(), Some(9));
    assert!(volumes.good("volume list").contains("not running"));
    // Files that a killed volume has left do not prevent a new one.
    volumes.serve("web");
}

#[test]
fn limits_hold_and_are_fair_and_can_be_changed() {
    const RATE: u64 = 3000;
    let mut volumes = Volumes::new();
    volumes.configure("web", "queues = 2\n[[disk]]\nbackend = 'ram'\nsize = '16M'");
    volumes.serve("web");
    assert!(volumes.good("volume limit web").contains("no limits"));
    // A burst that covers the time for which the test machine may suspend a thread.
    let said = volumes.good(&format!("volume limit web --iops {RATE} --burst 500ms"));
    assert!(said.contains("3000 requests/s, burst 500ms"), "{said}");

    let mut load = volumes.load("web", "--rw randread --queues 2 --threads 1 --qd 16 --seconds 600");
    wait_until("load", || volumes.stat("web").queues.iter().all(|q| q.done > 1500));
    let after = retry(|| {
        let before = volumes.stat("web");
        std::thread::sleep(Duration::from_secs(2));
        let after = volumes.stat("web");
        let done = |stat: &Stat, queue: usize| stat.queues[queue].done;
        let (first, second) = (done(&after, 0) - done(&before, 0), done(&after, 1) - done(&before, 1));
        let time = after.uptime - before.uptime;
        // The guaranteed bound: the rate, the burst, one quantum for each queue, and the requests that were admitted but
        // not completed yet.
        let most = RATE as f64 * (time + 0.5) + 2.0 * 2.0 + 32.0;
        let sum = (first + second) as f64;
        assert!(sum <= most, "{sum} requests in {time} s are more than {most}");
        // A busy machine may not get to as many, or to those of one queue for a while.
        if sum < 0.9 * RATE as f64 * time || first.abs_diff(second) > (first + second) / 20 {
            return Err(format!("{first} and {second} requests in {time} s"));
        }
        Ok(after)
    });
    assert!(after.queues.iter().all(|q| q.throttled > 0), "{after:?}");

    // While queues wait for a limit, the limit is changed.
    volumes.good("volume limit web --iops 1");
    let before = volumes.stat("web").operations[0].requests;
    volumes.good("volume limit web --off");
    wait_until("work without limits", || volumes.stat("web").operations[0].requests > before + 10_000);
    load.kill().unwrap();
    load.wait().unwrap();
}

#[test]
fn the_printed_qemu_options_are_those_that_are_checked() {
    let volumes = Volumes::new();
    volumes.configure("data", "vm = 'a'\nqueues = 4\n[[disk]]\npath = 'IMAGE'");
    volumes.configure("many", "vm = 'a'\ndevice = 'scsi'\n[[disk]]\nbackend = 'ram'\nsize = '1M'");
    let (printed, hints) = volumes.expect(0, "qemu-args a --memory 512M");
    assert!(hints.contains("only volumes"), "{hints}");
    let line = format!("qemu-system-x86_64 {}", printed.split_whitespace().collect::<Vec<_>>().join(" "));
    let check = |line: &str| volumes.command("qemu-args a --check").arg(line).output().unwrap();
    let good = check(&line);
    assert!(good.status.success(), "{good:?}");
    let bad = check(&line.replace("share=on", "share=off"));
    assert!(!bad.status.success() && String::from_utf8_lossy(&bad.stderr).contains("share=on"), "{bad:?}");
    let xml = volumes.good("libvirt-xml a");
    assert!(xml.contains("<disk type='vhostuser'") && xml.contains("vhost-user-scsi-pci"), "{xml}");
    // An unknown VM, and no daemon.
    volumes.expect(1, "qemu-args b");
}

#[test]
fn an_nvme_volume_takes_a_new_qemu_and_keeps_its_vm_here() {
    let volumes = Volumes::new();
    volumes.configure("fast", "vm = 'a'\ndevice = 'nvme'\n[[disk]]\npath = 'IMAGE'");
    let (_, said) = volumes.expect(1, "qemu-args a --memory 512M --qemu-version 10.0");
    assert!(said.contains("volume fast is an nvme device, which takes QEMU 10.1 or later"), "{said}");
    let (printed, hints) = volumes.expect(0, "qemu-args a --memory 512M --qemu-version 10.1");
    assert!(hints.contains("cannot migrate live") && hints.contains("cannot be unplugged"), "{hints}");
    let check = |line: &str| {
        let words =
            format!("qemu-system-x86_64 -M q35 {line}").split_whitespace().collect::<Vec<_>>().join(" ");
        volumes.command("qemu-args a --qemu-version 11.1 --check").arg(words).output().unwrap()
    };
    let good = check(&printed);
    assert!(good.status.success(), "{good:?}");
    let migrates = check(&printed.replace("-device ivshmem-plain", "-device x"));
    let said = String::from_utf8_lossy(&migrates.stderr).into_owned();
    assert!(!migrates.status.success() && said.contains("could migrate live"), "{said}");
    assert!(volumes.good("libvirt-xml a").contains(r#"{"driver":"vfio-user-pci","#));
    assert!(volumes.good("volume list").contains("nvme"));
}

/// Returns whether this machine's QEMU accepts these arguments: it starts, does nothing, and is told to end.
fn qemu_takes(arguments: &[&str]) -> Output {
    use std::io::Write;
    let mut qemu = Command::new(format!("qemu-system-{}", std::env::consts::ARCH))
        .args(["-M", "none", "-nodefaults", "-display", "none", "-qmp", "stdio"])
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("QEMU is part of the tests' set-up (scripts/setup)");
    // It may have ended already if it has rejected the arguments.
    let _ = qemu.stdin.take().unwrap().write_all(b"{'execute':'qmp_capabilities'}{'execute':'quit'}\n");
    qemu.wait_with_output().unwrap()
}

#[test]
fn each_qemu_version_gets_options_that_it_accepts() {
    use std::os::unix::fs::PermissionsExt;
    let volumes = Volumes::new();
    volumes.configure("data", "vm = 'a'\n[[disk]]\npath = 'IMAGE'");
    let chardev = |flags: &str| {
        let (printed, _) = volumes.expect(0, &format!("qemu-args a {flags}"));
        let line = printed.lines().find_map(|line| line.strip_prefix("-chardev "));
        line.unwrap_or_else(|| panic!("{printed}")).to_owned()
    };
    // This machine's QEMU.
    let printed = chardev("");
    let output = qemu_takes(&["-chardev", &printed]);
    assert!(output.status.success(), "{printed}: {output:?}");
    // Other versions, simulated by their answers.
    let qemu = volumes.path("qemu");
    for (answer, wanted) in [
        ("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7)", "reconnect=1"),
        ("QEMU emulator version 9.2.0 (qemu-kvm-9.2.0-1.el9)", "reconnect-ms=1000"),
        ("QEMU emulator version 11.0.1 (Debian 1:11.0.1+ds-1~bpo12+1)", "reconnect-ms=1000"),
    ] {
        fs::write(&qemu, format!("#!/bin/sh\n[ \"$*\" = -version ] && echo '{answer}'\n")).unwrap();
        fs::set_permissions(&qemu, fs::Permissions::from_mode(0o755)).unwrap();
        let printed = chardev(&format!("--qemu {}", qemu.display()));
        assert!(printed.ends_with(&format!(",{wanted}")), "{answer}: {printed}");
    }
    assert!(chardev("--qemu-version 10.2").ends_with(",reconnect-ms=1000"));
    // A program that is not QEMU, and a program that does not exist.
    for flags in ["--qemu /bin/true", "--qemu /no/qemu", "--qemu-version new"] {
        let status = if flags.contains("new") { 2 } else { 1 };
        let (_, said) = volumes.expect(status, &format!("qemu-args a {flags}"));
        assert!(said.contains("version"), "{said}");
    }
}
