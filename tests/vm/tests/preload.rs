//! Unmodified programs in two VMs: their TCP connections change over to a segment that the VMs share.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use vmtest::installation::{Plan, program};
use vmtest::{Bed, Vm};

const PROMPT: Duration = Duration::from_secs(120);
const LIBRARY: &str = "/usr/local/lib/libginnel_preload.so";
const REPORT: &str = "/tmp/report";

/// What became of the connections of a program in a VM: the last line of each.
fn connections(vm: &Vm, of: &str) -> Result<Vec<Value>> {
    let text = vm.run(&format!("cat {REPORT}"))?.ok()?.stdout;
    let mut last: Vec<Value> = Vec::new();
    for line in text.lines() {
        let line: Value = serde_json::from_str(line).with_context(|| line.to_owned())?;
        if line["event"] == "process" || line["program"] != of {
            continue;
        }
        let name = |line: &Value| (line["pid"].clone(), line["connection"].clone());
        match last.iter_mut().find(|other| name(other) == name(&line)) {
            Some(other) => *other = line,
            None => last.push(line),
        }
    }
    Ok(last)
}

/// Connections that have changed over both ways, and the bytes that went through shared memory.
fn changed(connections: &[Value]) -> (usize, u64) {
    let changed =
        connections.iter().filter(|c| c["sent_after_us"].is_u64() && c["received_after_us"].is_u64());
    let bytes =
        |c: &Value| c["shared_sent"].as_u64().unwrap_or(0) + c["shared_received"].as_u64().unwrap_or(0);
    changed.fold((0, 0), |(n, sum), c| (n + 1, sum + bytes(c)))
}

#[test]
fn programs_of_the_distribution_between_two_vms() -> Result<()> {
    let tools =
        ["iperf3", "sockperf", "redis-server", "redis-benchmark"].map(|tool| format!("/usr/bin/{tool}"));
    if let Some(missing) = tools.iter().find(|tool| !std::path::Path::new(*tool).exists()) {
        println!("SKIPPED {missing} is not installed: `scripts/setup test` installs it");
        return Ok(());
    }
    let bed = Bed::new("preload")?;
    let ginnel = Plan::new(&bed).vm("a").vm("b").segment("web", 64, &["a", "b"]).start()?;
    let library = program("libginnel_preload.so")?;
    let vm = |name| {
        let vm = ginnel.vm(name)?.network().memory_mib(768).library(&library);
        tools.iter().fold(vm, |vm, tool| vm.program(tool)).start()
    };
    let (a, b) = (vm("a")?, vm("b")?);
    let mut daemons = Vec::new();
    for vm in [&a, &b] {
        vm.wait_ready()?;
        daemons.push(ginnel.start_guest(vm)?);
    }
    let at = b.address()?;
    let runs = [
        (
            "iperf3",
            "iperf3",
            format!("iperf3 -s -1 -B {at} -p"),
            format!("iperf3 -c {at} -t 3 -p"),
            "receiver",
        ),
        (
            "sockperf",
            "sockperf",
            format!("sockperf sr --tcp -i {at} -p"),
            format!("sockperf pp --tcp -i {at} -t 2 -p"),
            "percentile 50",
        ),
        // It asks the kernel for no huge pages, of which the segment's memory is made.
        (
            "redis-benchmark",
            "redis-server",
            format!("redis-server --save '' --appendonly no --protected-mode no --bind {at} --port"),
            format!("redis-benchmark --csv -t get -c 5 -n 20000 -h {at} -p"),
            "GET",
        ),
    ];
    for (i, (name, of_server, server, client, figure)) in runs.iter().enumerate() {
        // First over TCP, to see what shared memory is worth.
        for (j, prefix) in
            ["", &format!("LD_PRELOAD={LIBRARY} GINNEL_SOCKETS_REPORT={REPORT}")].iter().enumerate()
        {
            let port = 7100 + 2 * i + j;
            let serving = b.spawn(&format!("exec env {prefix} {server} {port}"))?;
            let listens = format!("until netstat -ltn | grep -q :{port}; do sleep 0.1; done");
            b.run_within(PROMPT, &listens)?.ok()?;
            let said = a.run_within(PROMPT, &format!("env {prefix} {client} {port}"))?.ok()?.stdout;
            let line = said.lines().rfind(|line| line.contains(figure)).unwrap_or_default();
            println!("{}: {line}", if j == 0 { "TCP" } else { "shared memory" });
            serving.kill(15)?;
            serving.wait(PROMPT)?;
        }
        for (vm, name) in [(&a, name), (&b, of_server)] {
            let connections = connections(vm, name)?;
            let (n, bytes) = changed(&connections);
            ensure!(
                n >= 1 && bytes > 10_000,
                "{name}: {n} have changed over, with {bytes} bytes: {connections:#?}"
            );
        }
    }
    Ok(())
}
