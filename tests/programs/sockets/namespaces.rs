//! Connections under `ginnel run` between network namespaces, as containers have them. They must not be mistaken for
//! others.

use ginnel_report::Record;
use kit::skip::missing;
use programs::stage::{PYTHON, Stage, changed};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

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
const END: &str = r#"
import os, socket, sys, threading, time
name, role, address, seconds = sys.argv[1], sys.argv[2], ('10.77.0.2', int(sys.argv[3])), float(sys.argv[4])
end = time.monotonic() + seconds
def serve(listener):
    c, _ = listener.accept()
    while True:
        line = c.recv(100)
        if not line:
            break
        assert line == name.encode(), (name, line)
        c.sendall(name.encode())
def connect():
    while True:
        try:
            return socket.create_connection(address, source_address=('10.77.0.1', 33000 + address[1]))
        except ConnectionRefusedError:
            assert time.monotonic() < end + 30
            time.sleep(0.01)
def call():
    c = connect()
    while time.monotonic() < end:
        for n in range(20):
            c.sendall(name.encode())
            line = c.recv(100)
            assert line == name.encode(), (name, line)
    c.close()
def fail(problem):
    sys.__excepthook__(problem.exc_type, problem.exc_value, problem.exc_traceback)
    sys.stderr.flush()
    os._exit(1)
threading.excepthook = fail
threads = []
if role in ('server', 'both'):
    listener = socket.create_server(('', address[1]))
    threads.append(threading.Thread(target=serve, args=(listener,)))
if role in ('client', 'both'):
    threads.append(threading.Thread(target=call))
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"#;

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
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            let ends: Vec<_> = self.children.iter_mut().map(|child| child.try_wait().unwrap()).collect();
            let succeeds = |end: &Option<ExitStatus>| end.is_some_and(|status| status.success());
            if ends.iter().all(succeeds) {
                return;
            }
            if ends.iter().any(|end| end.is_some() && !succeeds(end)) || Instant::now() > end {
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
const KEEPALIVE: &str = r#"
import subprocess
def probes():
    names, values = [line.split() for line in open('/proc/net/netstat') if line.startswith('TcpExt:')]
    return int(values[names.index('TCPKeepAlive')])
def by_recv(c):
    return c.recv(1)
def by_timeout(c):
    c.settimeout(100)
    return c.recv(1)
def by_looks(c):
    c.setblocking(False)
    while True:
        try:
            return c.recv(1)
        except BlockingIOError:
            time.sleep(0.001)
def by_poll(c):
    poll = select.poll()
    poll.register(c, select.POLLIN)
    [(_, events)] = poll.poll(100000)
    assert events & select.POLLERR and events & select.POLLIN, events
    return c.recv(1)
def by_epoll(c):
    with select.epoll() as epoll:
        epoll.register(c, select.EPOLLIN)
        while not (events := epoll.poll(100)):
            pass
    assert events[0][1] & select.EPOLLERR and events[0][1] & select.EPOLLIN, events
    error = c.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    assert c.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
    raise OSError(error, 'by SO_ERROR')
def by_send(c):
    try:
        by_poll(c)
    except OSError:
        pass
    fails(errno.EPIPE, c.send, b'x')
    raise OSError(errno.ETIMEDOUT, 'told before')
waits = [by_recv, by_timeout, by_looks, by_poll, by_epoll, by_send]
ends = [pair() for wait in waits * 2]
for n, (a, b) in enumerate(ends):
    a.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 2)):
        a.setsockopt(socket.IPPROTO_TCP, option, value)
    if n >= len(waits):
        a.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1500)
# Longer than connections to a dead peer would live.
enough = probes() + 4 * len(ends)
while probes() < enough:
    for a, b in ends:
        for one, other in ((a, b), (b, a)):
            one.sendall(b'.')
            assert receive(other, 1) == b'.'
    time.sleep(0.01)
told = {}
def wait_for_the_end(n):
    a, b = ends[n]
    try:
        told[n] = waits[n % len(waits)](a)
    except OSError as error:
        told[n] = error.errno
    assert a.recv(1) == b'', 'the end comes after the error'
threads = [threading.Thread(target=wait_for_the_end, args=(n,)) for n in range(len(ends))]
for thread in threads:
    thread.start()
subprocess.run(['ip', 'link', 'set', 'lo', 'down'], check=True)
for thread in threads:
    thread.join()
assert told == {n: errno.ETIMEDOUT for n in range(len(ends))}, told
"#;

#[test]
fn keepalive_ends_connections_whose_network_is_gone_and_no_others() {
    kit::require_programs!(&[PYTHON, "ip", "unshare"]);
    kit::require!(shell("unshare --net ip link set lo up"), "network namespaces take root");
    let stage = Stage::new("eager");
    let network = ["unshare", "--net", "sh", "-ec", "ip link set lo up; exec \"$@\"", "sh"];
    let program = format!("{}{KEEPALIVE}", crate::epoll::PAIRS);
    stage.client(&[&network[..], &[PYTHON, "-c", &program]].concat());
    assert_eq!(changed(&stage.end(), "python3").len(), 24);
}

/// Connections with a timeout for data that is not acknowledged. One of them has sent nothing when the network goes.
const USER_TIMEOUT: &str = r#"
import subprocess
def by_recv(c):
    c.sendall(b'request')
    return c.recv(1)
def by_poll(c):
    c.sendall(b'request')
    poll = select.poll()
    poll.register(c, select.POLLIN)
    [(_, events)] = poll.poll(100000)
    assert events & select.POLLERR, events
    return c.recv(1)
# The last connection is not checked any more when it sends.
waiting = {}
def by_epoll(c):
    if c not in waiting:
        waiting[c] = select.epoll()
        waiting[c].register(c, select.EPOLLIN)
    c.sendall(b'request')
    while not (events := waiting[c].poll(100)):
        pass
    assert events[0][1] & select.EPOLLERR, events
    return c.recv(1)
waits = [by_recv, by_poll, by_epoll, by_epoll]
ends = [pair() for _ in range(len(waits) + 1)]
for a, b in ends:
    a.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1500)
cold = ends[len(waits) - 1][0]
waiting[cold] = select.epoll()
waiting[cold].register(cold, select.EPOLLIN)
for turn in range(1000):
    assert waiting[cold].poll(0) == []
subprocess.run(['ip', 'link', 'set', 'lo', 'down'], check=True)
told = {}
def wait_for_the_end(n):
    try:
        told[n] = waits[n](ends[n][0])
    except OSError as error:
        told[n] = error.errno
threads = [threading.Thread(target=wait_for_the_end, args=(n,)) for n in range(len(waits))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert told == {n: errno.ETIMEDOUT for n in range(len(waits))}, told
subprocess.run(['ip', 'link', 'set', 'lo', 'up'], check=True)
a, b = ends[-1]
for one, other in ((a, b), (b, a)):
    one.sendall(b'.')
    assert receive(other, 1) == b'.'
"#;

#[test]
fn a_connection_ends_if_its_peer_does_not_acknowledge_data() {
    kit::require_programs!(&[PYTHON, "ip", "unshare"]);
    kit::require!(shell("unshare --net ip link set lo up"), "network namespaces take root");
    let stage = Stage::new("eager");
    let network = ["unshare", "--net", "sh", "-ec", "ip link set lo up; exec \"$@\"", "sh"];
    let program = format!("{}{USER_TIMEOUT}", crate::epoll::PAIRS);
    stage.client(&[&network[..], &[PYTHON, "-c", &program]].concat());
    assert_eq!(changed(&stage.end(), "python3").len(), 10);
}

/// A server that is killed where its kernel cannot report it, and a client that detects that.
const KILLED: &str = r#"
import errno, select
how, role = sys.argv[1:]
if role == 'serve':
    s = socket.create_server(('10.77.0.2', 7000))
    c, _ = s.accept()
    ask_until_changed(c, False)
    c.sendall(b'%10d' % os.getpid())
    c.recv(1)
    assert False, 'the server lives'
while True:
    try:
        c = socket.create_connection(('10.77.0.2', 7000))
        break
    except ConnectionRefusedError:
        time.sleep(0.01)
ask_until_changed(c, True)
server = int(receive(c, 10))
c.setblocking(False)
if how == 'poll':
    poll = select.poll()
    poll.register(c, select.POLLIN)
elif how != 'looks':
    poll = select.epoll()
    poll.register(c, select.EPOLLIN | (select.EPOLLET if how == 'edge' else 0))
subprocess.run(['ip', 'link', 'set', 'eth0', 'down'], check=True)
os.kill(server, signal.SIGKILL)
longest, calls = 0, 0
while True:
    if how != 'looks':
        while not poll.poll(30000):
            pass
    begun = time.monotonic()
    try:
        assert c.recv(1) == b'', 'bytes from nowhere'
        assert False, 'an end in order'
    except BlockingIOError:
        calls += 1
    except ConnectionResetError:
        break
    finally:
        longest = max(longest, time.monotonic() - begun)
assert how == 'looks' or calls == 0, 'nothing to receive although poll said so %d times' % calls
assert c.recv(1) == b''
print('longest', int(longest * 1000))
"#;

#[test]
fn a_nonblocking_call_does_not_wait_for_the_end_of_a_dead_peer() {
    for how in ["looks", "poll", "epoll", "edge"] {
        let mut longest = Vec::new();
        // A busy machine may withhold the CPU for that long.
        for _ in 0..3 {
            let Some(cable) = Cable::new() else { return };
            let stage = Stage::new("eager");
            let program = format!("{}{KILLED}", crate::passing::COMMON);
            let at = |end: usize| {
                cable.at(end).into_iter().chain([PYTHON, "-c", &program, how].map(str::to_owned))
            };
            let line: Vec<String> = at(1).chain(["serve".to_owned()]).collect();
            let mut server =
                stage.command(&line.iter().map(String::as_str).collect::<Vec<_>>()).spawn().unwrap();
            let line: Vec<String> = at(0).chain(["talk".to_owned()]).collect();
            let said = stage.client(&line.iter().map(String::as_str).collect::<Vec<_>>());
            let _ = server.wait();
            longest.push(said.trim().rsplit(' ').next().unwrap().parse::<u32>().unwrap());
            if longest[longest.len() - 1] < 250 {
                break;
            }
        }
        assert!(longest.iter().any(|milliseconds| *milliseconds < 250), "{how}: {longest:?} ms");
    }
}
