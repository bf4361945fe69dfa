//! Unmodified programs of librdmacm under `ginnel run --verbs`. Only segments are RDMA devices here, so a connection that is established
//! goes through one.

use ginnel::{AttachOptions, Endpoint, Error, MessageChannel};
use ginnel_verbs::cm::message::{Message, Parameters, Request};
use ginnel_verbs::cm::names::PortSpace;
use kit::wait::wait_until;
use programs::life::PATIENCE;
use programs::stage::free_port;
use programs::verbs::{Killed, Verbs, expect_good, text};
use std::path::Path;
use std::process::{Child, Command};

/// Somebody listens at a port in the segment.
fn is_heard(verbs: &Verbs, space: &str, port: u16) -> bool {
    verbs.world.good("status --json").out.contains(&format!("\"cm.{space}.{port}.lo."))
}

/// Starts a server, and waits until it listens.
fn serve(verbs: &Verbs, server: &[&str], space: &str, port: u16) -> Killed {
    let mut child = Killed(Some(verbs.command(server).spawn().unwrap()));
    wait_until("a server", || {
        if child.0.as_mut().unwrap().try_wait().unwrap().is_some() {
            let output = child.0.take().unwrap().wait_with_output().unwrap();
            panic!("{server:?} has ended: {}", text(&output));
        }
        is_heard(verbs, space, port)
    });
    child
}

/// Runs a server and its client, which both must succeed, and returns their output.
fn pair(verbs: &Verbs, server: &[&str], client: &[&str], space: &str, port: u16) -> [String; 2] {
    let mut served = serve(verbs, server, space, port);
    let said = verbs.good(client);
    [expect_good(server, served.0.take().unwrap()), said]
}

/// Waits for a program that must fail, and returns its output.
fn expect_bad(mut child: Child) -> String {
    wait_until("its end", || child.try_wait().unwrap().is_some());
    let output = child.wait_with_output().unwrap();
    assert!(!output.status.success(), "{}", text(&output));
    text(&output)
}

#[test]
fn rping() {
    kit::require_programs!(&["rping"]);
    let verbs = Verbs::new();
    for more in [&["-S", "100", "-v"][..], &["-S", "60000"], &["-q", "-v"]] {
        let port = free_port();
        let number = port.to_string();
        let common = [&["-V", "-C", "20", "-p", &number], more].concat();
        let server = [&["rping", "-s"], &common[..]].concat();
        let client = [&["rping", "-c", "-a", "127.0.0.1"], &common[..]].concat();
        let [server, client] = pair(&verbs, &server, &client, "tcp", port);
        for said in [server, client] {
            let shown = if more.contains(&"-v") { 20 } else { 0 };
            assert_eq!(said.matches("rdma-ping-").count(), shown, "{more:?}: {said}");
        }
    }
}

#[test]
fn ucmatose_and_udaddy() {
    kit::require_programs!(&["ucmatose", "udaddy"]);
    let verbs = Verbs::new();
    // Their own port: nobody else has a name in this test's segment.
    for (program, space, port, more) in [
        ("ucmatose", "tcp", 7471, &["-c", "5", "-C", "20", "-S", "2000"][..]),
        ("ucmatose", "tcp", 7471, &["-m", "-b", "127.0.0.1"]),
        ("udaddy", "udp", 7174, &["-c", "5", "-C", "20"]),
    ] {
        let server = [&[program], more].concat();
        let client = [&server[..], &["-s", "127.0.0.1"]].concat();
        for said in pair(&verbs, &server, &client, space, port) {
            let is_good = said.contains("test complete") && said.contains("return status 0");
            assert!(is_good && said.contains("data transfers complete"), "{program} {more:?}: {said}");
        }
    }
}

#[test]
fn rdma_server_and_its_relatives() {
    kit::require_programs!(&["rdma_server", "rdma_client", "rdma_xserver", "rdma_xclient"]);
    let verbs = Verbs::new();
    let address = ["-s", "127.0.0.1"];
    for (server, client, more) in
        [("rdma_server", "rdma_client", &[][..]), ("rdma_xserver", "rdma_xclient", &["-c", "r"])]
    {
        let port = free_port();
        let number = port.to_string();
        let port_option = ["-p", &number];
        let server = [&[server], more, &port_option[..]].concat();
        let client = [&[client], more, &port_option[..], &address[..]].concat();
        for said in pair(&verbs, &server, &client, "tcp", port) {
            assert!(said.contains("end 0"), "{said}");
        }
    }
    // Extended connections are not offered, as with many adapters.
    let line = [&["rdma_xclient", "-c", "x"], &address[..]].concat();
    let said = expect_bad(verbs.command(&line).spawn().unwrap());
    assert!(said.contains("rdma_create_ep: Operation not supported"), "{said}");
}

#[test]
fn perftest_connects_by_rdma_cm() {
    kit::require_programs!(&["ib_write_lat", "ib_send_bw", "ib_send_lat"]);
    let verbs = Verbs::new();
    for line in [&["ib_write_lat"][..], &["ib_send_bw", "-q", "2"], &["ib_send_lat", "-c", "UD"]] {
        let port = free_port();
        let number = port.to_string();
        let server = [line, &["-R", "-F", "-n", "1000", "-p", &number]].concat();
        let client = [&server[..], &["127.0.0.1"]].concat();
        for said in pair(&verbs, &server, &client, "tcp", port) {
            assert!(said.contains("rdma_cm QPs\t : ON") && said.contains("ginnel_web"), "{line:?}: {said}");
        }
    }
}

#[test]
fn the_death_of_a_process_disconnects_its_peers() {
    kit::require_programs!(&["rping"]);
    let verbs = Verbs::new();
    for victim in 0..2 {
        let port = free_port();
        let number = port.to_string();
        let line = ["-V", "-p", &number];
        let server = serve(&verbs, &[&["rping", "-s"], &line[..]].concat(), "tcp", port);
        let client = [&["rping", "-c", "-v", "-a", "127.0.0.1"], &line[..]].concat();
        let client = Killed(Some(verbs.command(&client).spawn().unwrap()));
        wait_until("a connection", || {
            verbs.world.good("verbs web").out.lines().filter(|line| line.contains(" RTS ")).count() >= 2
        });
        let mut both = [server, client];
        let survivor = both[1 - victim].0.take().unwrap();
        drop(both);
        // The client of a dead server fails in the middle of its work; a server has served.
        let end = std::thread::spawn(move || survivor.wait_with_output().unwrap());
        wait_until("the end of the survivor", || end.is_finished());
        let said = text(&end.join().unwrap());
        assert!(said.contains("DISCONNECT EVENT") || said.contains("completion"), "{victim}: {said}");
    }
}

/// A member that does not keep to the messages of a connection is not heard, and those who do are.
#[test]
fn invalid_messages_are_ignored() {
    kit::require_programs!(&["rping"]);
    let verbs = Verbs::new();
    let port = free_port();
    let number = port.to_string();
    let line = ["-V", "-C", "3", "-p", &number];
    let mut server = serve(&verbs, &[&["rping", "-s"], &line[..]].concat(), "tcp", port);
    let status = verbs.world.good("status --json").out;
    let name = status.split('"').find(|word| word.starts_with(&format!("cm.tcp.{port}.lo."))).unwrap();
    let options = AttachOptions { socket: verbs.world.socket(), ..AttachOptions::default() };
    let endpoint = Endpoint::attach_with("web", &options).unwrap();
    let address = (std::net::Ipv4Addr::LOCALHOST, port).into();
    let request = |space, queue_pair| {
        let parameters = Parameters { queue_pair, ..Parameters::default() };
        Message::Request(Request { space, from: address, to: address, parameters, private: vec![] }).encode()
    };
    let own = endpoint.number().0 << 12 | 1;
    for message in [
        vec![],
        vec![9; 100],
        Message::Ready.encode(),
        Message::Disconnect.encode(),
        // The listener is not for datagrams.
        request(PortSpace::Udp, own),
        // The queue pair belongs to another endpoint.
        request(PortSpace::Tcp, (endpoint.number().0 + 1) << 12 | 1),
        request(PortSpace::Tcp, u32::MAX),
    ] {
        let mut channel = endpoint.connect::<MessageChannel>(name).unwrap();
        channel.set_timeout(Some(PATIENCE));
        channel.send(&message).unwrap();
        let heard = channel.recv();
        assert!(matches!(heard, Err(Error::Closed | Error::Finished)), "{message:?}: {heard:?}");
    }
    // Those who say nothing at all make room.
    let silent: Vec<_> =
        std::iter::repeat_with(|| endpoint.connect::<MessageChannel>(name)).take(100).flatten().collect();
    assert!(silent.len() > 50);
    verbs.good(&[&["rping", "-c", "-a", "127.0.0.1"], &line[..]].concat());
    expect_good(&["rping"], server.0.take().unwrap());
}

/// Tests cases that no program of the distribution tries: refusals, names that are taken, and events that the program does
/// not fetch.
#[test]
fn connections_end_in_every_way() {
    programs::require_verbs_compiler!();
    let verbs = Verbs::new();
    let program = verbs.world.files().join("connects");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("verbs/connects.c");
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"]).arg(&program).arg(source);
    assert!(compiler.args(["-lrdmacm", "-libverbs"]).status().unwrap().success());
    let said = verbs.good(&[program.to_str().unwrap(), &free_port().to_string()]);
    assert!(said.contains("good"), "{said}");
    // No listener is left.
    assert!(!verbs.world.good("status --json").out.contains("\"cm."), "{said}");
}
