//! Calls that a layer between a program and the C library forgets, under `ginnel run`.

use crate::epoll::PAIRS;
use crate::stage::{PYTHON, Stage, changed, have};

#[test]
fn trap_9_bytes_of_preadv2_and_pwritev2_are_in_the_stream() {
    if !have(&[PYTHON]) {
        return;
    }
    let stage = Stage::new("eager");
    let program = r#"
a, b = pair()
assert os.pwritev(a.fileno(), [b'first ', b'second'], -1) == 12
a.sendall(b' third')
assert receive(b, 6) == b'first '
rooms = [bytearray(3), bytearray(9)]
got = os.preadv(b.fileno(), rooms, -1)
assert b''.join(rooms)[:got] == b'second third', rooms
# It does not wait, and on a socket there is no offset.
fails(errno.EAGAIN, os.preadv, b.fileno(), rooms, -1, os.RWF_NOWAIT)
fails(errno.ESPIPE, os.preadv, b.fileno(), rooms, 0)
fails(errno.ESPIPE, os.pwritev, a.fileno(), [b'x'], 0)
fails(errno.EOPNOTSUPP, os.pwritev, a.fileno(), [b'x'], -1, 1 << 30)
b.sendall(b'end')
assert receive(a, 3) == b'end'
"#;
    stage.client(&[PYTHON, "-c", &format!("{PAIRS}{program}")]);
    assert_eq!(changed(&stage.end(), "python3").len(), 2);
}
