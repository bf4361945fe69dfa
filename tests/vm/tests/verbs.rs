//! Unmodified programs of RDMA verbs in two VMs: a segment that the VMs share is their RDMA device, and the only one that they have.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use vmtest::installation::{Installation, Memory, Plan, program, verbs_libraries};
use vmtest::{Bed, Job, Vm};

vmtest::test_both_memories!(programs_of_the_distribution_between_two_vms);

/// How long a program may take.
const PATIENCE: Duration = Duration::from_secs(120);
/// Where both VMs have the test's folder.
const FILES: &str = "/tmp/files";

/// Programs and their arguments, beside the device and the server's name.
const PROGRAMS: [&str; 16] = [
    "ibv_rc_pingpong -c -n 200",
    "ibv_rc_pingpong -c -s 100000 -n 20",
    "ibv_rc_pingpong -e -n 200",
    "ibv_uc_pingpong -c -n 200",
    "ibv_ud_pingpong -c -n 200 -s 2048",
    "ibv_srq_pingpong -c -n 200",
    "ib_write_lat -F -n 200",
    "ib_write_bw -F -n 200",
    "ib_read_lat -F -n 200",
    "ib_read_bw -F -n 200",
    "ib_send_lat -F -n 200",
    "ib_send_bw -F -n 200",
    "ib_send_bw -F -n 200 -e",
    "ib_send_bw -F -n 200 -c UD",
    "ib_send_bw -F -n 200 --use-srq -q 2",
    "ib_atomic_lat -F -n 200",
];

/// Servers and clients that connect with librdmacm, by the addresses of the VMs, and what both say. In place of `{}`, the server's
/// address.
const CONNECTED: [[&str; 3]; 4] = [
    ["rping -s -V -v -C 10 -p 7390", "rping -c -V -v -C 10 -p 7390 -a {}", "rdma-ping-9"],
    ["ucmatose -c 2", "ucmatose -c 2 -s {}", "return status 0"],
    ["ib_write_lat -R -F -n 200 -p 7391", "ib_write_lat -R -F -n 200 -p 7391 {}", "rdma_cm QPs\t : ON"],
    ["udaddy -c 2", "udaddy -c 2 -s {}", "return status 0"],
];

/// Two VMs whose programs are the host's.
struct Stage<'b> {
    client: Vm,
    server: Vm,
    files: PathBuf,
    _daemons: [Job; 2],
    _ginnel: Installation<'b>,
}

impl<'b> Stage<'b> {
    fn new(bed: &'b Bed, memory: Memory) -> Result<Self> {
        let plan =
            Plan::new(bed).vm("a").vm("b").memory(memory).segment("rdma", 128, &["a", "b"]).with_verbs();
        let ginnel = plan.start()?;
        let files = bed.dir().join("files");
        verbs_libraries(&files.join("verbs"))?;
        let start = |name| {
            let vm = ginnel.vm(name)?.memory_mib(512).host_files().share(&files, FILES);
            vm.library(program("libginnel_preload.so")?).start()
        };
        let (client, server) = (start("a")?, start("b")?);
        client.wait_ready()?;
        server.wait_ready()?;
        let daemons = [ginnel.start_guest(&client)?, ginnel.start_guest(&server)?];
        Ok(Self { client, server, files, _daemons: daemons, _ginnel: ginnel })
    }

    /// What runs a program of the host's on the segment's device.
    fn line(&self, name: &str, program: &str) -> Result<String> {
        let (program, arguments) = program.split_once(' ').unwrap_or((program, ""));
        self.script(name, &format!("{program} -d ginnel_rdma {arguments}"))
    }

    /// What runs a program of the host's over the segment.
    fn script(&self, name: &str, program: &str) -> Result<String> {
        let script = format!(
            "cd {FILES} && export HOME=/tmp GINNEL_PRELOAD=/usr/local/lib/libginnel_preload.so GINNEL_VERBS={FILES}/verbs\n\
             exec ginnel run --verbs --mode off -- {program}\n"
        );
        fs::write(self.files.join(name), script)?;
        Ok(format!("exec chroot /host sh {FILES}/{name}"))
    }

    /// Runs a program in both VMs; what the two have said, the server first.
    fn play(&self, port: u16, program: &str) -> Result<[String; 2]> {
        let program = format!("{program} -p {port}");
        let server = self.line("server", &program)?;
        let client = self.line("client", &format!("{program} {}", self.server.address()?))?;
        self.both(&program, &server, &client, &format!("netstat -ltn | grep -q :{port}"))
    }

    /// Runs a server and its client, which connect with librdmacm.
    fn connect(&self, server: &str, client: &str) -> Result<[String; 2]> {
        let address = self.server.address()?.to_string();
        let client = self.script("client", &client.replace("{}", &address))?;
        let listens = format!("ginnel status --json | grep -q '\"cm\\..*\\.{address}\"'");
        self.both(server, &self.script("server", server)?, &client, &listens)
    }

    /// Runs a server, and its client once a command says that the server listens.
    fn both(&self, program: &str, server: &str, client: &str, listens: &str) -> Result<[String; 2]> {
        let server = self.server.spawn(server)?;
        let listens = format!("until {listens}; do [ -d /proc/{} ] || exit 1; sleep 0.1; done", server.pid());
        let output = self.server.run_within(PATIENCE, &listens)?;
        ensure!(output.code() == Some(0), "{program} does not listen: {:?}", server.said());
        let client = self.client.run_within(PATIENCE, client)?;
        if client.code() != Some(0) {
            let _ = server.kill(9);
            let said = server.said();
            client.ok().with_context(|| format!("{program}; the server has said: {said:?}"))?;
            return Ok(Default::default());
        }
        let ended = server.wait(PATIENCE)?.ok().with_context(|| format!("the server of {program}"))?;
        Ok([ended.stdout, client.stdout])
    }
}

fn programs_of_the_distribution_between_two_vms(memory: Memory) -> Result<()> {
    let is_there = |name: &str| Path::new("/usr/bin").join(name).exists();
    if let Some(missing) = ["ibv_rc_pingpong", "ib_write_lat"].iter().find(|name| !is_there(name)) {
        println!("SKIPPED {missing} is not installed: `scripts/setup test` installs it");
        return Ok(());
    }
    let bed = Bed::new("verbs")?;
    let stage = Stage::new(&bed, memory)?;
    let devices = stage.client.run(&stage.line("devices", "ibv_devinfo")?)?.ok()?.stdout;
    ensure!(devices.contains("PORT_ACTIVE"), "{devices}");
    for (port, program) in (7300..).zip(PROGRAMS) {
        let [server, client] = stage.play(port, program)?;
        let is_said = match program.starts_with("ibv_") {
            true => server.contains("iters in") && client.contains("iters in"),
            false => client.contains("#bytes"),
        };
        ensure!(is_said, "{program}: {server}{client}");
        println!("{program}: {}", client.lines().rev().nth(1).unwrap_or("").trim());
    }
    for [server, client, words] in CONNECTED {
        for said in stage.connect(server, client)? {
            ensure!(said.contains(words), "{client}: {said}");
        }
    }
    Ok(())
}
