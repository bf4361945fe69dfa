//! Unmodified RDMA programs between two VMs.

use crate::stage::{FILES, Guest, Stage};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use vmtest::installation::MemoryKind;
use vmtest::{Job, TestBed};

kit::test_that_skips_are_seen!();

vmtest::test_default_memories!(programs_of_the_distribution_work_between_two_vms);

/// How long a program may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// Programs and their arguments, without the device and the server's name.
const PROGRAMS: [&str; 18] = [
    "ibv_rc_pingpong -c -n 200",
    "ibv_rc_pingpong -c -s 100000 -n 20",
    "ibv_rc_pingpong -e -n 200",
    "ibv_rc_pingpong -N -c -n 200",
    "ibv_uc_pingpong -c -n 200",
    "ibv_ud_pingpong -c -n 200 -s 2048",
    "ibv_srq_pingpong -c -n 200",
    "ib_write_lat -F -n 200",
    "ib_write_bw -F -n 200",
    "ib_write_bw -F -n 200 -b -c UC",
    "ib_read_lat -F -n 200",
    "ib_read_bw -F -n 200",
    "ib_send_lat -F -n 200",
    "ib_send_bw -F -n 200",
    "ib_send_bw -F -n 200 -e",
    "ib_send_bw -F -n 200 -c UD",
    "ib_send_bw -F -n 200 --use-srq -q 2",
    "ib_atomic_lat -F -n 200",
];

/// The programs that are tried with each kind of memory: each operation, polled and asleep.
const MAPPED: [&str; 5] =
    ["ibv_rc_pingpong", "ibv_srq_pingpong", "ib_write_lat", "ib_read_bw", "ib_atomic_lat"];

/// Port, server, client and expected output of programs that connect with librdmacm by the addresses of the VMs.
const CONNECTED: [(u16, [&str; 3]); 4] = [
    (7390, ["rping -s -V -v -C 10 -p 7390", "rping -c -V -v -C 10 -p 7390 -a SERVER", "rdma-ping-9"]),
    (7471, ["ucmatose -c 2", "ucmatose -c 2 -s SERVER", "return status 0"]),
    (
        7391,
        [
            "ib_write_lat -R -F -n 200 -p 7391",
            "ib_write_lat -R -F -n 200 -p 7391 SERVER",
            "rdma_cm QPs\t : ON",
        ],
    ),
    (7174, ["udaddy -c 2", "udaddy -c 2 -s SERVER", "return status 0"]),
];

/// Port, server, client and expected output of the client, for programs that need to be tried with only one kind of memory.
const STREAMS: [(u16, [&str; 3]); 5] = [
    (7500, ["rdma_server -p 7500", "rdma_client -s SERVER -p 7500", "end 0"]),
    (7501, ["rdma_xserver -c r -p 7501", "rdma_xclient -c r -s SERVER -p 7501", "end 0"]),
    // `-T v` makes them verify their bytes.
    (
        7502,
        [
            "rstream -p 7502 -T b -T v -S 64 -I 20 -C 50",
            "rstream -s SERVER -p 7502 -T b -T v -S 64 -I 20 -C 50",
            "custom",
        ],
    ),
    (
        7503,
        [
            "rstream -p 7503 -T a -T v -S 100000 -I 5 -C 20",
            "rstream -s SERVER -p 7503 -T a -T v -S 100000 -I 5 -C 20",
            "custom",
        ],
    ),
    (
        7504,
        [
            "riostream -p 7504 -T n -T v -S 100000 -I 5 -C 20",
            "riostream -s SERVER -p 7504 -T n -T v -S 100000 -I 5 -C 20",
            "custom",
        ],
    ),
];

/// The VM of the clients and the VM of the servers.
struct Pairing<'b> {
    client: Guest,
    server: Guest,
    stage: Stage<'b>,
}

impl<'b> Pairing<'b> {
    fn new(bed: &'b TestBed, memory: MemoryKind) -> Result<Self> {
        let stage = Stage::new(bed, memory)?;
        let [client, server] = stage.boot(["a", "b"])?;
        Ok(Self { client, server, stage })
    }

    /// Starts a command in both VMs: the server first, and the client when the server listens at the port.
    fn start(&self, pair: &Pair) -> Result<[Job; 2]> {
        let Pair { port, server, client, uses_librdmacm } = pair;
        let job = self.server.vm.spawn(&self.stage.in_guest(&format!("server.{port}"), server)?)?;
        let listens = match uses_librdmacm {
            true => {
                format!(
                    "ginnel status --json | grep -q '\"cm\\..*\\.{port}\\.{}\"'",
                    self.server.vm.address()?
                )
            }
            false => format!("netstat -ltn | grep -q :{port}"),
        };
        let listens = format!("until {listens}; do [ -d /proc/{} ] || exit 1; sleep 0.1; done", job.pid());
        let output = self.server.vm.run_within(PATIENCE, &listens)?;
        ensure!(output.code() == Some(0), "{server} does not listen: {:?}", job.said());
        let client = client.replace("SERVER", &self.server.vm.address()?.to_string());
        Ok([job, self.client.vm.spawn(&self.stage.in_guest(&format!("client.{port}"), &client)?)?])
    }

    /// Waits until both have succeeded. Returns what they printed, the server's output first.
    fn finish(pair: &Pair, [server, client]: [Job; 2]) -> Result<[String; 2]> {
        let client = client.wait(PATIENCE)?;
        if client.code() != Some(0) {
            let _ = server.kill(9);
            let said = server.said();
            client.ok().with_context(|| format!("{}; the server has said: {said:?}", pair.client))?;
            return Ok(Default::default());
        }
        let ended = server.wait(PATIENCE)?.ok().with_context(|| format!("the server of {}", pair.client))?;
        Ok([ended.stdout, client.stdout])
    }

    fn play(&self, pair: &Pair) -> Result<[String; 2]> {
        Self::finish(pair, self.start(pair)?)
    }
}

/// The commands of a server and its client, in which `SERVER` stands for the server's address.
struct Pair {
    port: u16,
    server: String,
    client: String,
    /// Whether the port is one of librdmacm instead of TCP.
    uses_librdmacm: bool,
}

impl Pair {
    /// Makes a pair of a program of ibverbs-utils or perftest with its arguments.
    fn tool(port: u16, program: &str) -> Self {
        let server = format!("{program} -d ginnel_rdma -p {port}");
        Self::new(port, &server, &format!("{server} SERVER"))
    }

    /// Makes a pair of programs that first meet by TCP.
    fn new(port: u16, server: &str, client: &str) -> Self {
        Self { port, server: server.into(), client: client.into(), uses_librdmacm: false }
    }
}

fn programs_of_the_distribution_work_between_two_vms(memory: MemoryKind) -> Result<()> {
    let missing = kit::skip::missing(&["ibv_rc_pingpong", "ib_write_lat"]);
    kit::require!(missing.is_none(), "{missing:?} is not installed: `scripts/setup test` installs it");
    let bed = TestBed::new("verbs")?;
    let pairing = Pairing::new(&bed, memory)?;
    let devices = pairing
        .client
        .vm
        .run(&pairing.stage.in_guest("devices", "ibv_devinfo -d ginnel_rdma")?)?
        .ok()?
        .stdout;
    ensure!(devices.contains("PORT_ACTIVE"), "{devices}");
    // Few programs depend on how a guest reaches the memory.
    let wanted =
        |program: &str| memory == MemoryKind::Dax || MAPPED.iter().any(|name| program.starts_with(name));
    for (port, program) in (7300..).zip(PROGRAMS).filter(|(_, program)| wanted(program)) {
        let [server, client] = pairing.play(&Pair::tool(port, program))?;
        let is_said = match program.starts_with("ibv_") {
            true => server.contains("iters in") && client.contains("iters in"),
            false => client.contains("#bytes"),
        };
        ensure!(is_said, "{program}: {server}{client}");
        println!("{program}: {}", client.lines().rev().nth(1).unwrap_or("").trim());
    }
    for (port, [server, client, words]) in CONNECTED {
        for said in pairing.play(&Pair { uses_librdmacm: true, ..Pair::new(port, server, client) })? {
            ensure!(said.contains(words), "{client}: {said}");
        }
    }
    // The rest does not depend on how a guest reaches the memory.
    if memory == MemoryKind::Dax {
        two_processes_in_each_vm(&pairing)?;
        batches(&pairing)?;
        streams(&pairing)?;
        huge_pages(&pairing)?;
        libraries(&pairing)?;
    }
    Ok(())
}

/// Runs two servers in one VM and their clients in the other one at the same time.
fn two_processes_in_each_vm(pairing: &Pairing<'_>) -> Result<()> {
    // They run for a second, so that both pairs run at the same time.
    let pairs = ["ib_send_bw -F -D 1", "ib_write_bw -F -D 1"];
    let pairs = [Pair::tool(7400, pairs[0]), Pair::tool(7401, pairs[1])];
    let jobs = [pairing.start(&pairs[0])?, pairing.start(&pairs[1])?];
    for (pair, jobs) in pairs.iter().zip(jobs) {
        let [_, client] = Pairing::finish(pair, jobs)?;
        ensure!(client.contains("#bytes"), "{}: {client}", pair.client);
    }
    Ok(())
}

/// Runs the other programs of librdmacm, and rsockets, which are streams.
fn streams(pairing: &Pairing<'_>) -> Result<()> {
    for (port, [server, client, words]) in STREAMS {
        let [_, said] = pairing.play(&Pair { uses_librdmacm: true, ..Pair::new(port, server, client) })?;
        ensure!(said.contains(words), "{client}: {said}");
    }
    copy(pairing)?;
    // Extended connections are refused, as many adapters refuse them.
    let line = format!("rdma_xclient -c x -s {}", pairing.server.vm.address()?);
    let refused = pairing.client.vm.run_within(PATIENCE, &pairing.stage.in_guest("refused", &line)?)?;
    let said = format!("{}{}", refused.stdout, refused.stderr);
    ensure!(said.contains("rdma_create_ep: Operation not supported"), "{line}: {said}");
    Ok(())
}

/// Copies a file with rcopy, whose server runs until it is killed. rcopy maps its files, and files in the test's folder
/// cannot be mapped.
fn copy(pairing: &Pairing<'_>) -> Result<()> {
    let words = (0..1 << 20_u32).map(|n: u32| n.wrapping_mul(0x9e37_79b1).to_le_bytes());
    fs::write(pairing.stage.files.join("from"), words.flatten().collect::<Vec<_>>())?;
    pairing.client.vm.run(&format!("cp /host{FILES}/from /host/tmp/from"))?.ok()?;
    let client = "rcopy /tmp/from SERVER:/tmp/to -p 7505";
    let pair = Pair { uses_librdmacm: true, ..Pair::new(7505, "rcopy -p 7505", client) };
    let [server, client] = pairing.start(&pair)?;
    let said =
        client.wait(PATIENCE)?.ok().with_context(|| format!("the server: {:?}", server.said()))?.stdout;
    ensure!(said.contains("4194304 bytes in"), "{said}");
    // The client ends when the server has the whole file.
    pairing.server.vm.run(&format!("cmp /host{FILES}/from /host/tmp/to"))?.ok()?;
    server.kill(9)?;
    Ok(())
}

/// Uses pages that cannot be moved into the segment, so the owner's process does what its peer asks for.
fn huge_pages(pairing: &Pairing<'_>) -> Result<()> {
    for vm in [&pairing.server.vm, &pairing.client.vm] {
        vm.run("echo 16 >/proc/sys/vm/nr_hugepages && [ $(cat /proc/sys/vm/nr_hugepages) = 16 ]")?.ok()?;
    }
    for (port, program) in (7450..).zip(["ib_write_lat", "ib_read_bw", "ib_send_bw", "ib_atomic_bw"]) {
        let program = format!("{program} -F -n 100 --use_hugepages");
        let [_, client] = pairing.play(&Pair::tool(port, &program))?;
        ensure!(client.contains("#bytes"), "{program}: {client}");
    }
    Ok(())
}

/// perftest uses the `ibv_wr_*` calls only on adapters that it knows, so it is told that this is one of them.
fn batches(pairing: &Pairing<'_>) -> Result<()> {
    let source =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates/faces/verbs-capi/tests/c/adapter.c");
    let mut compiler = Command::new("cc");
    compiler
        .args(["-shared", "-fPIC", "-o"])
        .arg(pairing.stage.files.join("adapter.so"))
        .arg(source)
        .arg("-ldl");
    ensure!(compiler.status()?.success(), "adapter.c cannot be compiled");
    for (port, program) in (7410..).zip(["ib_send_bw -F -n 200", "ib_atomic_lat -F -n 200"]) {
        let program = format!("env LD_PRELOAD={FILES}/adapter.so {program}");
        for said in pairing.play(&Pair::tool(port, &program))? {
            ensure!(said.contains("ibv_wr* API     : ON"), "{program}: {said}");
        }
    }
    Ok(())
}

/// A program for pyverbs that checks what it sends.
const PINGPONG: &str = include_str!("../../../programs/verbs/pingpong.py");

/// Runs UCX, qperf and pyverbs.
fn libraries(pairing: &Pairing<'_>) -> Result<()> {
    let is_there = |path: &str| {
        let is_there = Path::new(path).exists();
        if !is_there {
            kit::skip!("{path} is not installed: `scripts/setup test` installs it");
        }
        is_there
    };
    if is_there("/usr/bin/ucx_perftest") {
        let batch = "tag -t tag_bw -s 100000 -n 50 -w 10\nget -t ucp_get -s 65536 -n 50 -w 10\n";
        fs::write(pairing.stage.files.join("batch"), batch)?;
        // UCX's buffers are larger than the segment by default.
        let server = "env UCX_TLS=rc_v UCX_NET_DEVICES=ginnel_rdma:1 UCX_RC_VERBS_RX_QUEUE_LEN=256 \
                      UCX_UD_VERBS_RX_QUEUE_LEN=256 UCX_LOG_LEVEL=info ucx_perftest -f -b batch -p 7420";
        let [server, client] = pairing.play(&Pair::new(7420, server, &format!("{server} SERVER")))?;
        for words in [" tag ", " get ", "tag(rc_verbs/ginnel_rdma:1)", "rma(rc_verbs/ginnel_rdma:1)"] {
            ensure!(client.contains(words), "{words}: {server}{client}");
        }
    }
    if is_there("/usr/bin/fi_pingpong") && is_there("/usr/bin/fi_info") {
        let said =
            pairing.client.vm.run(&pairing.stage.in_guest("fi_info", "fi_info -p verbs")?)?.ok()?.stdout;
        for words in ["domain: ginnel_rdma", "FI_EP_MSG", "FI_EP_DGRAM", "provider: verbs;ofi_rxm"] {
            ensure!(said.contains(words), "{words}: {said}");
        }
        // This excludes other providers. `-c` checks the data.
        let ways = ["verbs -e dgram -S 1024", "verbs -e msg -S 4096", "'verbs;ofi_rxm' -e rdm -S 4096"];
        for (port, way) in (7460..).zip(ways) {
            let program = format!("fi_pingpong -I 50 -c -p {way}");
            let pair =
                Pair::new(port, &format!("{program} -B {port}"), &format!("{program} -P {port} SERVER"));
            for said in pairing.play(&pair)? {
                ensure!(said.contains("usec/xfer") && said.contains("=50"), "{program}: {said}");
            }
        }
    }
    if is_there("/usr/bin/qperf") {
        let client = "qperf -lp 7430 -i ginnel_rdma -v -t 1 SERVER rc_lat ver_rc_compare_swap ud_lat quit";
        let [_, client] = pairing.play(&Pair::new(7430, "qperf -lp 7430", client))?;
        ensure!(client.matches("ginnel_rdma").count() == 3, "{client}");
    }
    if is_there("/usr/lib/python3/dist-packages/pyverbs") {
        fs::write(pairing.stage.files.join("pingpong.py"), PINGPONG)?;
        let server = format!("/usr/bin/python3 {FILES}/pingpong.py ginnel_rdma 7440 20");
        for said in pairing.play(&Pair::new(7440, &server, &format!("{server} SERVER")))? {
            ensure!(said.contains("all data are right"), "{said}");
        }
    }
    Ok(())
}
