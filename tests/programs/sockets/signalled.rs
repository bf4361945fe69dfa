//! Programs under `ginnel run` that ask for a signal (SIGIO) when data has arrived.

use crate::epoll::PAIRS;
use crate::passing::COMMON;
use programs::stage::{MODES, PYTHON, Stage, changed, free_port};

const SIGNALS: &str = r#"
import fcntl, signal, struct, termios
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGIO, signal.SIGUSR1])
def ask_for_signals(c, how):
    fcntl.fcntl(c, fcntl.F_SETOWN, os.getpid())
    if how == 'ioctl':
        fcntl.ioctl(c, termios.FIOASYNC, struct.pack('i', 1))
    else:
        fcntl.fcntl(c, fcntl.F_SETFL, fcntl.fcntl(c, fcntl.F_GETFL) | os.O_ASYNC)
def signals():
    return signal.sigtimedwait([signal.SIGIO], 20) is not None
def ping(one, other):
    # Earlier signals do not count.
    while signal.sigtimedwait([signal.SIGIO], 0):
        pass
    other.sendall(b'.')
    assert signals(), 'no signal'
    assert receive(one, 1) == b'.'
    one.sendall(b'!')
    assert receive(other, 1) == b'!'
"#;

#[test]
fn a_connection_that_has_changed_over_goes_back_for_signals() {
    kit::require_programs!(&[PYTHON]);
    let stage = Stage::new("eager");
    let program = r#"
for how in ('fcntl', 'ioctl'):
    a, b = pair()
    b.sendall(b'before')
    ask_for_signals(a, how)
    assert receive(a, 6) == b'before'
    for turn in range(100):
        ping(a, b)
    b.close()
    assert signals() and a.recv(1) == b''
"#;
    stage.client(&[PYTHON, "-c", &format!("{PAIRS}{SIGNALS}{program}")]);
    let connections = stage.end();
    assert_eq!(changed(&connections, "python3").len(), 4, "{connections:#?}");
    assert!(connections.iter().all(|end| end.returned == 2), "{connections:#?}");
}

#[test]
fn a_connection_whose_program_has_asked_for_signals_stays_on_tcp() {
    kit::require_programs!(&[PYTHON]);
    for mode in MODES {
        let stage = Stage::new(mode);
        let program = r#"
expected = 0
for when in ('before connect', 'before accept', 'after'):
    if when == 'before accept':
        ask_for_signals(listener, 'fcntl')
    a = socket.socket()
    if when == 'before connect':
        ask_for_signals(a, 'ioctl')
    a.connect(listener.getsockname())
    b, _ = listener.accept()
    if when != 'before connect':
        ask_for_signals(a, 'fcntl')
    for turn in range(200):
        ping(a, b)
    # When the daemon would take the connection.
    expected += 1
    while open(os.environ['GINNEL_SOCKETS_REPORT']).read().count('O_ASYNC') < expected:
        ping(a, b)
"#;
        stage.client(&[PYTHON, "-c", &format!("{PAIRS}{SIGNALS}{program}")]);
        let connections = stage.end();
        assert_eq!(changed(&connections, "python3").len(), 0, "{mode} {connections:#?}");
        let asked = connections.iter().filter(|end| end.reason.contains("O_ASYNC"));
        assert_eq!(asked.count(), 3, "{mode} {connections:#?}");
    }
}

/// A server that asks for signals while its client makes no call for a while.
const BUSY: &str = r#"
port = int(sys.argv[2])
if sys.argv[1] == 'serve':
    s = socket.create_server(('127.0.0.1', port))
    b, _ = s.accept()
    ask_until_changed(b, False)
    client = int(receive(b, 10))
    while 'sigtimedwait' not in open('/proc/%d/wchan' % client).read():
        time.sleep(0.001)
    begun = time.monotonic()
    ask_for_signals(b, 'fcntl')
    assert 0.9 < time.monotonic() - begun < 30
    os.kill(client, signal.SIGUSR1)
    b.setblocking(False)
    for turn in range(100):
        got = b''
        while len(got) < 10:
            assert signals(), (turn, got)
            try:
                while part := b.recv(7):
                    got += part
            except BlockingIOError:
                pass
        assert got == b'%10d' % turn
        b.sendall(b'.')
else:
    a = socket.create_connection(('127.0.0.1', port))
    ask_until_changed(a, True)
    a.sendall(b'%10d' % os.getpid())
    assert signal.sigtimedwait([signal.SIGUSR1], 50)
    for turn in range(100):
        a.sendall(b'%10d' % turn)
        assert receive(a, 1) == b'.'
"#;

#[test]
fn a_peer_that_makes_no_call_for_a_while_goes_back_later() {
    kit::require_programs!(&[PYTHON]);
    let mut stage = Stage::new("eager");
    let port = free_port();
    let at = port.to_string();
    let program = format!("{COMMON}{SIGNALS}{BUSY}");
    stage.serve(port, &[PYTHON, "-c", &program, "serve", &at]);
    stage.client(&[PYTHON, "-c", &program, "talk", &at]);
    let log = stage.log();
    let connections = stage.end();
    assert!(!log.contains("Traceback"), "{log}");
    let changed = changed(&connections, "python3");
    assert_eq!(changed.len(), 2, "{connections:#?}");
    assert!(changed.iter().all(|end| end.returned == 2), "{changed:#?}");
}
