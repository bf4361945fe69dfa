//! `ginnel status`.

use crate::inspect::{Holder, Inspect, Mapping, Member, Segment};
use crate::output::{self, Table};
use crate::qemu_args::IOMMU;
use anyhow::{Context, Result};
use ginnel::Daemon;
use std::time::{Duration, Instant};

/// The speed below which a mapping seems to be uncached. A cached mapping copies at several GB/s, and an emulated
/// processor at some hundred MB/s; uncached memory is slower.
const UNCACHED_MB_S: u64 = 300;
/// How long the daemon may look for the processes that have segments, and how often it is asked meanwhile.
const PATIENCE: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(20);

/// Shows the daemon, members, segments, programs and channels.
///
/// On the host, root and the admin group see everything, and other users see the segments to which they may attach. In
/// a VM, this shows the VM's segments and their members.
///
/// Root and the admin group are also warned of processes that have a segment in their memory and are no members: a QEMU whose VM was
/// removed from `members`, for example. If `host` is a member, any program may have the segment, and only QEMUs are shown.
#[derive(clap::Args)]
pub struct Args {
    /// Print the daemon's answer as JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<()> {
    let mut daemon = Daemon::connect()?;
    let text = ask(&mut daemon)?;
    if args.json {
        let value: serde_json::Value =
            serde_json::from_str(&text).context("the daemon's status is not JSON")?;
        return output::json(&value);
    }
    output::line(page(&crate::inspect::parse(&text)?, daemon.member_name()))
}

/// Returns the daemon's answer. An administrator's request makes the daemon look for the processes that have segments, which takes it a
/// moment. Its answer shows what it has seen last, so this asks again when it has looked.
fn ask(daemon: &mut Daemon) -> Result<String> {
    let until = Instant::now() + PATIENCE;
    loop {
        let text = daemon.inspect().context("asking the daemon for its status")?;
        // An answer that is not understood here is shown or refused elsewhere.
        let looks = crate::inspect::parse(&text).is_ok_and(|inspect| inspect.daemon.is_looking);
        if !looks || Instant::now() >= until {
            return Ok(text);
        }
        std::thread::sleep(PAUSE);
    }
}

/// Returns the whole page.
fn page(inspect: &Inspect, member: &str) -> String {
    let d = &inspect.daemon;
    let mut parts = vec![format!(
        "ginneld {} ({}), process {}, up {}, start {}; this is member {member}",
        d.version,
        d.role,
        d.pid,
        period(d.uptime),
        d.generation
    )];
    for table in [
        members(inspect),
        segments(inspect),
        mappings(inspect),
        endpoints(inspect),
        listeners(inspect),
        channels(inspect),
        reports(inspect),
    ] {
        if !table.is_empty() {
            parts.push(table.to_string());
        }
    }
    let sockets = crate::sockets::channels(inspect, None).count();
    if sockets > 0 {
        parts.push(format!("TCP connections over shared memory: {sockets} (`ginnel sockets` shows them)"));
    }
    let warnings: Vec<_> = warnings(inspect).iter().map(|text| format!("warning: {text}")).collect();
    if !warnings.is_empty() {
        parts.push(warnings.join("\n"));
    }
    parts.join("\n\n")
}

fn members(inspect: &Inspect) -> Table {
    let mut table = Table::new(&["MEMBER", "NAME", "STATE", "WAITS BY", "PROGRAMS", "CHANNELS", "IN USE"]);
    for member in &inspect.members {
        let waits = match member.interrupts {
            Some(true) => "interrupts",
            Some(false) => "polling",
            None => "-",
        };
        table.row([
            member.number.to_string(),
            member.name.clone(),
            state(member),
            waits.into(),
            member.endpoints.to_string(),
            member.channels.to_string(),
            output::bytes(member.bytes),
        ]);
    }
    table
}

fn state(member: &Member) -> String {
    if member.number == ginnel_layout::HOST_MEMBER {
        return "host".into();
    }
    let qemu = member.qemu_pid.map(|pid| format!(" (QEMU {pid})")).unwrap_or_default();
    match (member.connected, member.session) {
        (false, _) => "not running".into(),
        _ if member.fenced => format!("fenced{qemu}"),
        (true, false) => format!("no guest daemon{qemu}"),
        (true, true) if member.hangs => format!("hangs{qemu}"),
        (true, true) => format!("up{qemu}"),
    }
}

fn segments(inspect: &Inspect) -> Table {
    let mut table = Table::new(&["SEGMENT", "KIND", "PAGE", "SIZE", "IN USE", "MEMBERS", "READERS", "STATE"]);
    for segment in &inspect.segments {
        table.row([
            segment.name.clone(),
            segment.memory.to_string(),
            output::bytes(segment.page),
            output::bytes(segment.size),
            output::bytes(segment.used),
            segment.members.join(","),
            if segment.readers.is_empty() { "-".into() } else { segment.readers.join(",") },
            state_of(segment),
        ]);
    }
    table
}

fn state_of(segment: &Segment) -> String {
    if segment.broken {
        return "BROKEN".into();
    }
    let mut state = String::from("good");
    if !trusting(segment).is_empty() {
        state += ", demands trust at boot";
    }
    for (what, times) in [("info block", segment.info_block_repairs), ("header", segment.header_repairs)] {
        if times > 0 {
            state += &format!(", {what} repaired {times} x");
        }
    }
    state
}

fn mappings(inspect: &Inspect) -> Table {
    let mut table = Table::new(&["SEGMENT", "IN VM", "MAPPED AS", "PAGE", "MAY", "READS", "WRITES"]);
    for segment in &inspect.segments {
        for mapping in &segment.mappings {
            let kind = match mapping.kind.as_str() {
                "bar" => "BAR (ivshmem-plain)",
                "dax" => "DAX (virtio-pmem)",
                "none" => "not found",
                other => other,
            };
            table.row([
                segment.name.clone(),
                mapping.member.clone(),
                kind.into(),
                output::bytes(segment.page),
                if segment.is_reader(&mapping.member) { "read" } else { "write" }.into(),
                speed(mapping.read_mb_s),
                speed(mapping.write_mb_s),
            ]);
        }
    }
    table
}

/// Returns a speed, or a dash for 0: speeds are not measured where nothing is mapped, nor is writing where only reading
/// is allowed.
fn speed(mb_s: u64) -> String {
    if mb_s == 0 { "-".into() } else { format!("{mb_s} MB/s") }
}

fn endpoints(inspect: &Inspect) -> Table {
    let mut table = Table::new(&[
        "PROGRAM", "NAME", "MEMBER", "PROCESS", "SEGMENT", "VECTOR", "CHANNELS", "IN USE", "STATE",
    ]);
    for endpoint in &inspect.endpoints {
        table.row([
            endpoint.number.to_string(),
            endpoint.name.clone(),
            endpoint.member.clone(),
            endpoint.pid.map_or_else(|| "-".into(), |pid| pid.to_string()),
            endpoint.segment.clone(),
            endpoint.vector.to_string(),
            endpoint.channels.to_string(),
            output::bytes(endpoint.bytes),
            match (endpoint.attached, endpoint.held) {
                (true, _) => "attached",
                (false, true) => "held",
                (false, false) => "detached",
            }
            .into(),
        ]);
    }
    table
}

fn listeners(inspect: &Inspect) -> Table {
    let mut table = Table::new(&["LISTENER", "KIND", "PROGRAM", "WAITING"]);
    for listener in &inspect.listeners {
        table.row([
            format!("{}/{}", listener.segment, listener.name),
            listener.kind.clone(),
            listener.endpoint.to_string(),
            listener.waiting.to_string(),
        ]);
    }
    table
}

fn channels(inspect: &Inspect) -> Table {
    let mut table = Table::new(&["CHANNEL", "SEGMENT", "KIND", "RINGS", "STATE", "FROM", "TO"]);
    for channel in &inspect.channels {
        let side = |side: &crate::inspect::Side| format!("{} ({})", side.endpoint, side.member);
        // The ring to the acceptor, and the one back. An older daemon, whose channels have two rings of equal size,
        // reports only the first.
        let rings = match (channel.capacity, channel.acceptor_capacity) {
            (there, back) if there == back || back == 0 => output::bytes(there),
            (there, back) => format!("{}, {}", output::bytes(there), output::bytes(back)),
        };
        table.row([
            channel.id.to_string(),
            channel.segment.clone(),
            channel.kind.clone(),
            rings,
            channel.state.clone(),
            side(&channel.initiator),
            side(&channel.acceptor),
        ]);
    }
    table
}

/// TCP connections under `ginnel run` of which only one end has reported to the daemon.
fn reports(inspect: &Inspect) -> Table {
    let mut table = Table::new(&["TCP CONNECTION", "TO", "PROCESS", "WAITS FOR"]);
    for report in &inspect.reports {
        let other = if report.role == "connector" { "acceptor" } else { "connector" };
        table.row([
            report.local.clone(),
            report.remote.clone(),
            format!("{} ({})", report.pid, report.member),
            format!("the {other}'s report"),
        ]);
    }
    table
}

/// Returns warnings about problems, each with its remedy.
fn warnings(inspect: &Inspect) -> Vec<String> {
    let mut warnings = Vec::new();
    if let Some(mistake) = &inspect.daemon.config_mistake {
        warnings.push(format!(
            "the configuration has a mistake, so the one that was accepted last is in effect: {mistake}; then reload ginneld"
        ));
    }
    for member in inspect.members.iter().filter(|m| m.number != ginnel_layout::HOST_MEMBER && m.connected) {
        let name = &member.name;
        if member.fenced {
            warnings.push(format!(
                "VM {name} hung and is stopped: reset it, or let it continue, with the commands of its QEMU or of libvirt"
            ));
        } else if !member.session {
            warnings.push(format!("VM {name} runs without a guest daemon: start `ginneld guest` in it"));
        } else if member.hangs {
            warnings.push(format!(
                "VM {name} gives no sign of life: it hangs, is paused, or its ginneld is not running"
            ));
        } else if member.interrupts == Some(false) {
            warnings.push(format!(
                "VM {name} has no interrupts, so its programs poll: give it an IOMMU ({IOMMU}, and intel_iommu=on on \
                 its kernel's command line)"
            ));
        }
    }
    for segment in &inspect.segments {
        let name = &segment.name;
        if let Some(why) = &segment.broken_why {
            warnings.push(format!("segment {name} is out of service: {why}"));
        } else if segment.broken {
            warnings.push(format!(
                "segment {name} is broken: its file was truncated or replaced; stop its programs and VMs, remove the \
                 file, and restart the daemon"
            ));
        }
        if !segment.strangers.is_empty() {
            let who: Vec<String> = segment.strangers.iter().map(stranger).collect();
            warnings.push(format!(
                "segment {name} is in the memory of processes that are no members of it: {}; end them, or take the segment out of \
                 their command lines",
                who.join(", ")
            ));
        }
        if segment.info_block_repairs + segment.header_repairs > 0 {
            warnings.push(format!(
                "somebody who controls a member's kernel damages the front of segment {name} (ndctl and daxctl do this); \
                 it was written again, and a VM that started meanwhile may lack its device: restart it"
            ));
        }
        let trusting = trusting(segment);
        if !trusting.is_empty() {
            warnings.push(format!(
                "segment {name}: the kernel of VM {vms} trusts the other members while it boots, because its module \
                 nd_pmem is loaded: each of them could take that VM over. If they are not all of one owner, hold the \
                 module back there (ginneld(8) says how), or give the segment memory = \"bar\"",
                vms = trusting.join(", ")
            ));
        }
        warnings.extend(segment.mappings.iter().filter_map(|mapping| mapping_warning(name, mapping)));
    }
    warnings
}

fn stranger(holder: &Holder) -> String {
    let Holder { vm, pid, command } = holder;
    match vm {
        Some(vm) => format!("VM {vm} (process {pid})"),
        None => format!("process {pid} ({command})"),
    }
}

/// Returns the VMs whose kernels trust, at boot, data that other members can write into the segment.
fn trusting(segment: &Segment) -> Vec<&str> {
    let believes = |mapping: &&Mapping| {
        mapping.trusts_members && segment.members.iter().any(|writer| *writer != mapping.member)
    };
    segment.mappings.iter().filter(believes).map(|mapping| mapping.member.as_str()).collect()
}

fn mapping_warning(name: &str, mapping: &Mapping) -> Option<String> {
    let vm = &mapping.member;
    if mapping.kind == "none" {
        return Some(format!(
            "VM {vm} has no device for segment {name}: add what `ginnel qemu-args {vm}` prints to its QEMU; if it has \
             that, the log of its guest daemon says what its kernel lacks"
        ));
    }
    // Zero means that the speed was not measured: a reader does not write.
    let slowest = [mapping.read_mb_s, mapping.write_mb_s].into_iter().filter(|&speed| speed > 0).min()?;
    (slowest < UNCACHED_MB_S).then(|| {
        let remedy = match mapping.kind.as_str() {
            "bar" => "KVM on AMD processors does not cache BARs; give it memory = \"dax\"",
            _ => "check this machine for other load",
        };
        format!(
            "segment {name} is slow in VM {vm} ({slowest} MB/s), as if its mapping were not cached: {remedy} (`ginnel \
             perf --mapping {name}` there measures it)"
        )
    })
}

/// Returns a time in seconds as a short text.
pub fn period(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, _) => format!("{minutes} min"),
        (0, _, _) => format!("{hours} h {} min", minutes % 60),
        _ => format!("{days} d {} h", hours % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWER: &str = r#"{
        "daemon": {"version": "0.1.0", "role": "host", "pid": 7, "generation": 2, "uptime": 3700, "connections": 1, "config_mistake": "ginneld.toml:3: no"},
        "members": [
            {"number": 0, "name": "host", "connected": true, "qemu_pid": null, "session": true, "interrupts": true},
            {"number": 1, "name": "vm-a", "connected": true, "qemu_pid": 42, "session": true, "interrupts": false},
            {"number": 2, "name": "vm-b", "connected": true, "qemu_pid": 43, "session": false, "interrupts": null},
            {"number": 3, "name": "vm-c", "connected": false, "interrupts": null}],
        "segments": [
            {"name": "web", "size": 268435456, "path": "/dev/shm/ginnel/web", "members": ["host", "vm-a"], "used": 4096,
             "memory": "bar", "page": 4096,
             "strangers": [{"vm": "vm-b", "pid": 43, "command": "qemu-system-x86"}, {"vm": null, "pid": 9, "command": "cat"}],
             "broken": true, "mappings": [{"member": "vm-a", "kind": "bar", "read_mb_s": 90, "write_mb_s": 900}]},
            {"name": "db", "size": 4194304, "path": null, "members": ["vm-a"], "memory": "dax", "page": 2097152,
             "mappings": [{"member": "vm-a", "kind": "none", "read_mb_s": 0, "write_mb_s": 0}]},
            {"name": "news", "size": 4194304, "members": ["host"], "readers": ["vm-a"], "memory": "dax", "page": 2097152,
             "info_block_repairs": 2, "header_repairs": 1,
             "mappings": [{"member": "vm-a", "kind": "dax", "trusts_members": true, "read_mb_s": 9000, "write_mb_s": 0}]}],
        "reports": [{"member": "vm-a", "pid": 77, "local": "10.0.0.2:40000", "remote": "10.0.0.1:6379", "role": "connector"}],
        "channels": [{"id": 1, "segment": "web", "kind": "message", "capacity": 262144, "state": "open",
             "initiator": {"endpoint": 1, "epoch": 1, "member": "host", "closed": false},
             "acceptor": {"endpoint": 2, "epoch": 2, "member": "vm-a", "closed": false}},
            {"id": 2, "segment": "web", "kind": "stream", "capacity": 4096, "acceptor_capacity": 1048576, "state": "open",
             "initiator": {"endpoint": 1, "epoch": 1, "member": "host", "closed": false},
             "acceptor": {"endpoint": 2, "epoch": 2, "member": "vm-a", "closed": false}},
            {"id": 3, "segment": "web", "kind": "socket", "capacity": 4096, "acceptor_capacity": 4096, "state": "open"}]
    }"#;

    #[test]
    fn the_page_says_what_is_and_what_is_wrong() {
        let page = page(&crate::inspect::parse(ANSWER).unwrap(), "host");
        assert!(
            page.starts_with("ginneld 0.1.0 (host), process 7, up 1 h 1 min, start 2; this is member host"),
            "{page}"
        );
        for line in [
            "1       vm-a  up (QEMU 42)               polling     0         0         0 B",
            "3       vm-c  not running                -           0         0         0 B",
            "web      bar   4 KiB  256 MiB  4 KiB   host,vm-a  -        BROKEN",
            "db       dax   2 MiB  4 MiB    0 B     vm-a       -        good",
            "news     dax   2 MiB  4 MiB    0 B     host       vm-a     good, demands trust at boot, info block repaired 2 x, header repaired 1 x",
            "web      vm-a   BAR (ivshmem-plain)  4 KiB  write  90 MB/s    900 MB/s",
            "news     vm-a   DAX (virtio-pmem)    2 MiB  read   9000 MB/s  -",
            "1        web      message  256 KiB       open   1 (host)  2 (vm-a)",
            "2        web      stream   4 KiB, 1 MiB  open   1 (host)  2 (vm-a)",
            "10.0.0.2:40000  10.0.0.1:6379  77 (vm-a)  the acceptor's report",
            "TCP connections over shared memory: 1 (`ginnel sockets` shows them)",
        ] {
            assert!(page.lines().any(|l| l == line), "{line:?} is missing in\n{page}");
        }
        for warning in [
            "the one that was accepted last is in effect: ginneld.toml:3: no;",
            "vm-a has no interrupts",
            "vm-b runs without a guest daemon",
            "web is broken",
            "web is in the memory of processes that are no members of it: VM vm-b (process 43), process 9 (cat);",
            "web is slow in VM vm-a (90 MB/s)",
            "vm-a has no device for segment db",
            "news: the kernel of VM vm-a trusts the other members",
            "damages the front of segment news",
        ] {
            assert!(page.contains(warning), "{warning:?} is missing in\n{page}");
        }
        assert_eq!(page.matches("warning:").count(), 9, "{page}");
    }

    #[test]
    fn an_empty_answer_is_a_short_page() {
        let page = page(&crate::inspect::parse("{}").unwrap(), "host");
        assert_eq!(page.lines().count(), 1, "{page}");
    }

    #[test]
    fn times_are_short() {
        assert_eq!([59, 60, 3660, 90_000].map(period), ["59 s", "1 min", "1 h 1 min", "1 d 1 h"]);
    }
}
