//! valgrind runs a program on a processor of its own, and maps no vDSO for it.

use programs::stage::{Stage, changed, free_port};

/// The client sends messages back and forth, and compares each with what was sent. Its peer runs without valgrind.
#[test]
fn valgrind() {
    kit::require_programs!(&["valgrind", "NPtcp"]);
    let mut stage = Stage::new("eager");
    let port = free_port();
    let at = port.to_string();
    let options = ["-i", "-n", "40", "-u", "20000", "-P", &at];
    stage.serve(port, &[&["NPtcp", "-o", "/dev/null"][..], &options].concat());
    let valgrind = ["valgrind", "--error-exitcode=7", "NPtcp", "-h", "127.0.0.1", "-o", "out"];
    stage.client(&[&valgrind[..], &options].concat());
    let connections = stage.end();
    assert_eq!(changed(&connections, "NPtcp").len(), 2, "{connections:#?}");
}
