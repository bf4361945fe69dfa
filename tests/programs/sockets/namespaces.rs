//! Connections under `ginnel run` between network namespaces, as containers have them. They must not be mistaken for
//! others.

use ginnel_report::Record;
use kit::skip::missing;
use kit::wait::takes_less_than;
use programs::life::Life;
use programs::stage::{PYTHON, Stage, changed};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use std::{fs, iter};

/// Runs a line of shell as root.
fn shell(line: &str) -> bool {
    let output = Command::new("sh").args(["-ec", line]).stdin(Stdio::null()).output().unwrap();
    let is_done = output.status.success();
    if !is_done {
        println!("{line}: {}", String::from_utf8_lossy(&output.stderr));
    }
    is_done
}

/// Two network namespaces joined by a cable: 10.77.0.1 and 10.77.0.2.
struct Cable {
    names: [String; 2],
}

impl Cable {
    /// Returns `None`, and records why, if this user may not create namespaces or a program is missing.
    fn new() -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let names = ["a", "b"].map(|end| format!("gt{}-{n}{end}", std::process::id()));
        let cable = Self { names: names.clone() };
        let [a, b] = &names;
        let is_there = missing(&[PYTHON, "ip", "nsenter"]).is_none()
            && shell(&format!(
                "ip netns add {a}; ip netns add {b}; ip -n {a} link add eth0 type veth peer name eth0 netns {b}\n\
                 ip -n {a} address add 10.77.0.1/24 dev eth0; ip -n {b} address add 10.77.0.2/24 dev eth0\n\
                 for end in {a} {b}; do ip -n $end link set lo up; ip -n $end link set eth0 up; done"
            ));
        if !is_there {
            kit::skip!("network namespaces take ip, nsenter, {PYTHON}, root and a kernel that has veth");
        }
        is_there.then_some(cable)
    }

    /// Returns a command that runs in the first or in the second namespace.
    fn at(&self, end: usize) -> Vec<String> {
        vec!["nsenter".into(), format!("--net=/run/netns/{}", self.names[end])]
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        let [a, b] = &self.names;
        shell(&format!("ip netns del {a} || true; ip netns del {b}"));
    }
}

/// Two addresses in one namespace that belongs to a user namespace, where any user may create it.
fn at_a_look_alike() -> Vec<String> {
    let line = "ip link set lo up; ip address add 10.77.0.1/24 dev lo; ip address add 10.77.0.2/24 dev lo; exec \"$@\"";
    ["unshare", "--user", "--map-root-user", "--net", "sh", "-ec", line, "sh"].map(str::to_owned).to_vec()
}

/// One or both ends of a connection. An end sends its own name for each byte that it receives, and counts the names
/// that it receives.
const END: &str = include_str!("namespaces/end.py");

/// The number of programs that run at a time.
struct Cast<'a> {
    stage: &'a Stage,
    children: Vec<Child>,
}

impl Cast<'_> {
    /// Starts `END` with these arguments in that namespace.
    fn add(&mut self, place: &[String], arguments: &[&str]) {
        let place = place.iter().map(String::as_str);
        let line: Vec<&str> = place.chain([PYTHON, "-c", END]).chain(arguments.iter().copied()).collect();
        self.children.push(self.stage.command(&line).spawn().unwrap());
    }

    fn finish(mut self) {
        let mut lives: Vec<_> = self.children.iter().map(|child| Life::of(child.id())).collect();
        loop {
            let ends: Vec<_> = self.children.iter_mut().map(|child| child.try_wait().unwrap()).collect();
            let succeeds = |end: &Option<ExitStatus>| end.is_some_and(|status| status.success());
            if ends.iter().all(succeeds) {
                return;
            }
            let hangs = iter::zip(&ends, &mut lives).any(|(end, life)| end.is_none() && life.hangs());
            if hangs || ends.iter().any(|end| end.is_some() && !succeeds(end)) {
                let mut text = String::new();
                for mut child in self.children {
                    let _ = child.kill();
                    let output = child.wait_with_output().unwrap();
                    text += &String::from_utf8_lossy(&output.stderr);
                }
                panic!("{text}");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Runs a server and a client at the ends of a cable. Returns the reports of both.
fn between(cable: &Cable, server: &[&str], client: &[&str]) -> Vec<Record<'static>> {
    let stage = Stage::new("eager");
    let mut cast = Cast { stage: &stage, children: Vec::new() };
    cast.add(&cable.at(1), server);
    cast.add(&cable.at(0), client);
    cast.finish();
    stage.end()
}

const SERVER: [&str; 4] = ["x", "server", "7000", "1"];
const CLIENT: [&str; 4] = ["x", "client", "7000", "1"];

/// Returns why connections of Python have stayed on TCP.
fn reasons<'a>(connections: &'a [Record<'static>]) -> Vec<&'a str> {
    assert!(changed(connections, "python3").is_empty(), "{connections:#?}");
    connections.iter().filter(|record| record.program == "python3").map(|record| &*record.reason).collect()
}

#[test]
fn containers_with_network_namespaces_of_their_own() {
    let Some(cable) = Cable::new() else { return };
    let connections = between(&cable, &SERVER, &CLIENT);
    assert_eq!(changed(&connections, "python3").len(), 2, "{connections:#?}");
}

#[test]
fn a_connection_of_a_syn_cookie_stays_on_tcp() {
    let Some(cable) = Cable::new() else { return };
    // 2 means that SYN cookies are always used. The kernel keeps no SYN then.
    let server = &cable.names[1];
    assert!(shell(&format!("ip netns exec {server} sh -c 'echo 2 > /proc/sys/net/ipv4/tcp_syncookies'")));
    let reasons = reasons(&between(&cable, &SERVER, &CLIENT)).join("; ");
    assert!(!reasons.is_empty(), "no reason");
    println!("{reasons}");
}

#[test]
fn a_connection_through_nat_stays_on_tcp() {
    kit::require_programs!(&["nft"]);
    let Some(cable) = Cable::new() else { return };
    assert!(shell(&format!(
        "ip netns exec {} nft 'add table ip n; add chain ip n c {{ type nat hook prerouting priority 0; }}; \
         add rule ip n c tcp dport 7001 redirect to :7000'",
        cable.names[1]
    )));
    let mut client = CLIENT;
    client[2] = "7001";
    let reasons = reasons(&between(&cable, &SERVER, &client)).join("; ");
    assert!(!reasons.is_empty(), "no reason");
    println!("{reasons}");
}

#[test]
fn networks_with_the_same_addresses_are_never_mixed_up() {
    let Some(one) = Cable::new() else { return };
    let Some(other) = Cable::new() else { return };
    let cables = [one, other];
    let mut both = 0;
    for turn in 0..5 {
        let stage = Stage::new("eager");
        let mut cast = Cast { stage: &stage, children: Vec::new() };
        // The same addresses and ports are used at the same time. (Those of the last round are in TIME_WAIT.)
        let port = (7000 + turn).to_string();
        for (cable, name) in cables.iter().zip(["first", "second"]) {
            let arguments = |role| [name, role, port.as_str(), "0.6"];
            cast.add(&cable.at(1), &arguments("server"));
            cast.add(&cable.at(0), &arguments("client"));
        }
        cast.finish();
        let connections = stage.end();
        let ends = changed(&connections, "python3").len();
        assert!(ends.is_multiple_of(2), "turn {turn}: {connections:#?}");
        both += usize::from(ends == 4);
    }
    println!("both connections changed over in {both} of 5 turns");
    assert!(both > 0, "no turn in which there was something to mix up");
}

#[test]
fn look_alikes_in_user_namespaces_get_no_data() {
    kit::require!(
        shell("unshare --user --map-root-user --net true"),
        "this kernel has no user namespaces, or allows none"
    );
    let Some(cable) = Cable::new() else { return };
    let mut joined = 0;
    for turn in 0..5 {
        let stage = Stage::new("eager");
        let mut cast = Cast { stage: &stage, children: Vec::new() };
        // The ports of the last round are in TIME_WAIT.
        let port = (7000 + turn).to_string();
        for n in 0..2 {
            cast.add(&at_a_look_alike(), &[&format!("liar {n}"), "both", &port, "1.5"]);
        }
        cast.add(&cable.at(1), &["honest", "server", &port, "1.5"]);
        cast.add(&cable.at(0), &["honest", "client", &port, "1.5"]);
        cast.finish();
        let connections = stage.end();
        let mut honest = 0;
        for end in changed(&connections, "python3") {
            // A look-alike is a separate connection in its own namespace: a connection that changes over has both ends
            // in one process there.
            let twins =
                connections.iter().filter(|other| other.pid == end.pid && other.has_changed_over()).count();
            honest += usize::from(twins == 1);
            assert!(twins <= 2, "turn {turn}: {connections:#?}");
        }
        assert!(honest == 0 || honest == 2, "turn {turn}: {connections:#?}");
        joined += honest / 2;
    }
    println!("the honest connection changed over in {joined} of 5 turns");
    assert!(joined > 0, "look-alikes keep others on TCP");
}

/// Connections with keepalive for which the kernel carries nothing. Prints what a program is told when the network is
/// gone.
const KEEPALIVE: &str = include_str!("namespaces/keepalive.py");

#[test]
fn keepalive_ends_connections_whose_network_is_gone_and_no_others() {
    kit::require_programs!(&[PYTHON, "ip", "unshare"]);
    kit::require!(shell("unshare --net ip link set lo up"), "network namespaces take root");
    let stage = Stage::new("eager");
    let network = ["unshare", "--net", "sh", "-ec", "ip link set lo up; exec \"$@\"", "sh"];
    fs::write(stage.world.files().join("pairs.py"), crate::epoll::PAIRS).unwrap();
    stage.client(&[&network[..], &[PYTHON, "-c", KEEPALIVE]].concat());
    assert_eq!(changed(&stage.end(), "python3").len(), 24);
}

/// Connections with a timeout for data that is not acknowledged. One of them has sent nothing when the network goes.
const USER_TIMEOUT: &str = include_str!("namespaces/user_timeout.py");

#[test]
fn a_connection_ends_if_its_peer_does_not_acknowledge_data() {
    kit::require_programs!(&[PYTHON, "ip", "unshare"]);
    kit::require!(shell("unshare --net ip link set lo up"), "network namespaces take root");
    let stage = Stage::new("eager");
    let network = ["unshare", "--net", "sh", "-ec", "ip link set lo up; exec \"$@\"", "sh"];
    fs::write(stage.world.files().join("pairs.py"), crate::epoll::PAIRS).unwrap();
    stage.client(&[&network[..], &[PYTHON, "-c", USER_TIMEOUT]].concat());
    assert_eq!(changed(&stage.end(), "python3").len(), 10);
}

/// A server that is killed where its kernel cannot report it, and a client that detects that.
const KILLED: &str = include_str!("namespaces/killed.py");

#[test]
fn a_nonblocking_call_does_not_wait_for_the_end_of_a_dead_peer() {
    for how in ["looks", "poll", "epoll", "edge"] {
        let Some(cable) = Cable::new() else { return };
        drop(cable);
        takes_less_than(Duration::from_millis(250), || {
            let cable = Cable::new().unwrap();
            let stage = Stage::new("eager");
            fs::write(stage.world.files().join("common.py"), crate::passing::COMMON).unwrap();
            let at =
                |end: usize| cable.at(end).into_iter().chain([PYTHON, "-c", KILLED, how].map(str::to_owned));
            let line: Vec<String> = at(1).chain(["serve".to_owned()]).collect();
            let mut server =
                stage.command(&line.iter().map(String::as_str).collect::<Vec<_>>()).spawn().unwrap();
            let line: Vec<String> = at(0).chain(["talk".to_owned()]).collect();
            let said = stage.client(&line.iter().map(String::as_str).collect::<Vec<_>>());
            let _ = server.wait();
            Duration::from_millis(said.trim().rsplit(' ').next().unwrap().parse().unwrap())
        });
    }
}
