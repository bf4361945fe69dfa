//! UCX, a communication library that MPI libraries use.

use kit::wait::wait_until;
use programs::stage::{free_port, listens};
use programs::verbs::{DEVICE, Killed, Verbs, expect_good};
use std::fs;

/// Each test of ucx_perftest registers UCX's buffer pools again, at other addresses.
const SIZE: &str = "2G";

/// Tests of UCX's protocols.
const OF_PROTOCOLS: &[&str] = &[
    "tag_lat -s 8 -n 200",
    "tag_lat -s 65536 -n 20",
    "tag_bw -s 1024 -n 500",
    "tag_bw -s 1048576 -n 20",
    "ucp_put_lat -s 8 -n 200",
    "ucp_put_bw -s 65536 -n 200",
    "ucp_get -s 8 -n 200",
    "ucp_get -s 65536 -n 20",
    "ucp_am_lat -s 100 -n 200",
    "ucp_add -s 8 -n 200",
    "ucp_fadd -s 8 -n 200",
    "ucp_swap -s 8 -n 200",
    "ucp_cswap -s 8 -n 200",
];

/// Tests of UCX's transports, where each operation is a verbs request.
const OF_CONNECTED: &[&str] = &[
    "am_lat -s 8 -n 200",
    "am_bw -D zcopy -s 4096 -n 500",
    "put_lat -s 8 -n 200",
    "put_bw -D zcopy -s 65536 -n 200",
    "get -D zcopy -s 4096 -n 200",
    "add_lat -s 8 -n 200",
    "fadd -s 8 -n 200",
    "cswap -s 8 -n 200",
];

const OF_DATAGRAMS: &[&str] = &["am_lat -s 8 -n 200", "am_bw -D zcopy -s 4000 -n 500"];

/// Returns the command that runs a UCX program over these transports and devices only. UCX prints which transport it uses for each peer.
fn line<'a>(settings: &'a [String], program: &[&'a str]) -> Vec<&'a str> {
    let settings = settings.iter().map(String::as_str);
    // Otherwise UCX would use free huge pages of the machine for its buffers, which cannot be registered.
    ["env", "UCX_LOG_LEVEL=info", "UCX_IB_ALLOC=thp,md,mmap,heap"]
        .into_iter()
        .chain(settings)
        .chain(program.iter().copied())
        .collect()
}

fn only(transports: &str, devices: &str) -> Vec<String> {
    vec![format!("UCX_TLS={transports}"), format!("UCX_NET_DEVICES={devices}")]
}

#[test]
fn the_device_is_found() {
    kit::require_programs!(&["ucx_info"]);
    let said = Verbs::new().good(&["ucx_info", "-d"]);
    let (_, ours) = said.split_once(&format!("Memory domain: {DEVICE}")).expect(&said);
    let (ours, _) = ours.split_once("Memory domain:").unwrap_or((ours, ""));
    for (transport, has_atomics) in [("rc_verbs", true), ("ud_verbs", false)] {
        let (_, of_it) = ours.split_once(&format!("Transport: {transport}")).expect(&said);
        let (of_it, _) = of_it.split_once("Transport:").unwrap_or((of_it, ""));
        assert!(of_it.contains(&format!("Device: {DEVICE}:1")), "{transport}: {said}");
        for words in ["atomic_fadd: 64 bit", "atomic_cswap: 64 bit"] {
            assert_eq!(of_it.contains(words), has_atomics, "{transport}, {words}: {said}");
        }
    }
    assert!(!said.contains("WARN") && !said.contains("ERROR"), "{said}");
}

/// Runs tests of ucx_perftest, one process after the other. Each test has new connections.
fn perftest(verbs: &Verbs, settings: &[String], tests: &[&str], more: &[&str]) -> [String; 2] {
    let batch = verbs.world.files().join("batch");
    let lines = tests.iter().enumerate().map(|(i, test)| format!("test{i} -t {test} -w 10\n"));
    fs::write(&batch, lines.collect::<String>()).unwrap();
    let program = ["ucx_perftest", "-f", "-b", batch.to_str().unwrap()];
    let both = verbs.pair(&line(settings, &[&program, more].concat()));
    for (i, test) in tests.iter().enumerate() {
        let result = both[1].lines().find(|line| line.trim_start().starts_with(&format!("test{i} ")));
        println!("{settings:?} {test}: {}", result.unwrap_or_else(|| panic!("{test}: {}", both.concat())));
    }
    for said in &both {
        assert!(!said.contains("WARN") && !said.contains("ERROR"), "{said}");
    }
    both
}

#[test]
fn protocols() {
    kit::require_programs!(&["ucx_perftest"]);
    let verbs = Verbs::sized(SIZE);
    for (transports, kind) in [("rc_v", "rc_verbs"), ("ud_v", "ud_verbs")] {
        let both = perftest(&verbs, &only(transports, &format!("{DEVICE}:1")), OF_PROTOCOLS, &[]);
        for said in both {
            let way = format!("({kind}/{DEVICE}:1)");
            assert!(said.contains(&way), "{way}: {said}");
        }
    }
}

#[test]
fn transports() {
    kit::require_programs!(&["ucx_perftest"]);
    let verbs = Verbs::sized(SIZE);
    for (kind, tests) in [("rc_verbs", OF_CONNECTED), ("ud_verbs", OF_DATAGRAMS)] {
        perftest(&verbs, &[], tests, &["-x", kind, "-d", &format!("{DEVICE}:1")]);
    }
}

/// The demonstration program of UCX checks all data that it reads and writes. It connects over TCP. UCX 1.13 then sends over verbs what
/// it has prepared for TCP, without checking whether it is too long: active messages (`-A`) are lost, and so are tagged messages that
/// are short, but not inline.
#[test]
fn ucx_demo_reads_and_writes_the_right_data() {
    kit::require_programs!(&["io_demo"]);
    let verbs = Verbs::sized(SIZE);
    let mut settings = only("rc_v,tcp", &format!("{DEVICE}:1,lo"));
    settings.extend(["UCX_SOCKADDR_TLS_PRIORITY=tcp", "UCX_RC_VERBS_TX_MIN_INLINE=512"].map(str::to_owned));
    let port = free_port().to_string();
    let options = ["io_demo", "-q", "-o", "read,write", "-d", "10000:300000", "-p", &port];
    let server = line(&settings, &options);
    let server = Killed(Some(verbs.command(&server).spawn().unwrap()));
    wait_until("a server", || listens(port.parse().unwrap()));
    let client = line(&settings, &[&options[..], &["-i", "300", "127.0.0.1"]].concat());
    let said = expect_good(&client, verbs.command(&client).spawn().unwrap());
    drop(server);
    let way = format!("tag(rc_verbs/{DEVICE}:1)");
    let is_good = said.contains("Client exit with status 'OK'") && !said.contains("ERROR");
    assert!(said.contains(&way) && is_good, "{said}");
}

/// A program that looks for the file of a device, as UCX does, finds one. Nothing else changes.
#[test]
fn programs_find_a_file_for_the_device() {
    const SCRIPT: &str = include_str!("device_file.py");
    let python = programs::stage::PYTHON;
    kit::require_programs!(&["python3"]);
    Verbs::new().good(&[python, "-c", SCRIPT, DEVICE]);
}

/// The library that provides that file does not replace any other library.
#[test]
fn all_preloaded_libraries_are_loaded() {
    let verbs = Verbs::new();
    let command = ["printenv", "LD_PRELOAD"];
    let said = expect_good(&command, verbs.command(&command).env("LD_PRELOAD", "libc.so.6").spawn().unwrap());
    let names: Vec<_> = said.trim().split(':').map(|path| path.rsplit('/').next().unwrap()).collect();
    assert_eq!(names, ["device-files.so", "libginnel_preload.so", "libc.so.6"]);
}
