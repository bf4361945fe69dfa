//! Unmodified programs with rsockets under `ginnel run --verbs`. There is no other RDMA device, so one that succeeds has gone through the
//! segment.

use kit::wait::wait_until;
use programs::stage::free_port;
use programs::verbs::{Killed, Verbs, compiled, expect_good};
use std::fs;

/// Waits until a program listens at a port of an address of this machine. Its name in the segment says so.
fn wait_until_listening(verbs: &Verbs, port: u16, server: &mut Killed) {
    let name = format!("cm.tcp.{port}.lo.");
    wait_until("a listener", || {
        let ended = server.0.as_mut().unwrap().try_wait().unwrap();
        assert!(ended.is_none(), "the server has ended: {ended:?}");
        verbs.world.good("status --json").out.contains(&name)
    });
}

/// Runs a program as server and as its client, which both must succeed. Returns the client's output.
fn pair(verbs: &Verbs, program: &str, more: &[&str]) -> String {
    let port = free_port();
    let number = port.to_string();
    let server = [&[program, "-p", &number], more].concat();
    let client = [&[program, "-p", &number, "-s", "127.0.0.1"], more].concat();
    let mut running = Killed(Some(verbs.command(&server).spawn().unwrap()));
    wait_until_listening(verbs, port, &mut running);
    let said = verbs.good(&client);
    expect_good(&server, running.0.take().unwrap());
    said
}

#[test]
fn rstream() {
    kit::require_programs!(&["rstream"]);
    let verbs = Verbs::new();
    for more in [
        // Blocking, without waiting, and with poll; each with its bytes verified.
        &["-T", "b", "-T", "v", "-S", "64", "-I", "20", "-C", "50"][..],
        &["-T", "b", "-T", "v", "-S", "100000", "-I", "5", "-C", "20"],
        &["-T", "n", "-T", "v", "-S", "64", "-I", "20", "-C", "50"],
        &["-T", "n", "-T", "v", "-S", "1000000", "-I", "3", "-C", "5"],
        &["-T", "a", "-T", "v", "-S", "64", "-I", "20", "-C", "50"],
        &["-T", "a", "-T", "b", "-S", "100000", "-I", "5", "-C", "20"],
        &["-T", "a", "-T", "n", "-S", "1000000", "-I", "3", "-C", "5"],
        // Small rings; addresses by rdma_getaddrinfo.
        &["-T", "b", "-B", "4096", "-S", "65536", "-I", "5", "-C", "10"],
        &["-T", "r", "-T", "a", "-S", "64", "-I", "20", "-C", "50"],
    ] {
        let said = pair(&verbs, "rstream", more);
        assert!(said.contains("custom"), "{more:?}: {said}");
    }
}

#[test]
fn riostream() {
    kit::require_programs!(&["riostream"]);
    let verbs = Verbs::new();
    for more in [
        &["-T", "b", "-T", "v", "-S", "64", "-I", "20", "-C", "50"][..],
        &["-T", "n", "-T", "v", "-S", "100000", "-I", "5", "-C", "20"],
        &["-T", "a", "-T", "v", "-S", "1000000", "-I", "3", "-C", "5"],
    ] {
        let said = pair(&verbs, "riostream", more);
        assert!(said.contains("custom"), "{more:?}: {said}");
    }
}

#[test]
fn rcopy() {
    kit::require_programs!(&["rcopy"]);
    let verbs = Verbs::new();
    let port = free_port();
    let number = port.to_string();
    let files = verbs.world.files();
    let (from, to) = (files.join("from"), files.join("to"));
    // No run of it is like another one.
    let bytes: Vec<u8> =
        (0..2 << 20_u32).flat_map(|n: u32| n.wrapping_mul(0x9e37_79b1).to_le_bytes()).collect();
    fs::write(&from, &bytes).unwrap();
    let mut server = Killed(Some(verbs.command(&["rcopy", "-p", &number]).spawn().unwrap()));
    wait_until_listening(&verbs, port, &mut server);
    let place = format!("127.0.0.1:{}", to.display());
    let said = verbs.good(&["rcopy", from.to_str().unwrap(), &place, "-p", &number]);
    assert!(said.contains("8388608 bytes in"), "{said}");
    // The client ends once the server has it all.
    assert!(fs::read(&to).unwrap() == bytes, "the copy differs: {said}");
}

/// What the programs do not try: ends of all kinds, polling of rsockets and others together, threads, names, and a peer that is killed.
#[test]
fn rsockets_are_like_sockets() {
    programs::require_verbs_compiler!();
    let verbs = Verbs::new();
    let program = compiled(&verbs, "rsockets", &["-lrdmacm", "-libverbs"]);
    let ports = [free_port(), free_port()].map(|port| port.to_string());
    let said = verbs.good(&[&program, &ports[0], &ports[1]]);
    assert!(said.contains("good"), "{said}");
}
