//! NetPIPE over TCP.

use programs::stage::{MODES, Stage, changed, free_port};
use std::process::Stdio;

/// Sends messages of 1 byte to 3 MB back and forth, and compares each with what was sent.
#[test]
fn netpipe() {
    kit::require_programs!(&["NPtcp"]);
    for mode in MODES {
        let mut stage = Stage::new(mode);
        let port = free_port();
        let at = port.to_string();
        let options = ["-i", "-n", "40", "-u", "3000000", "-P", &at];
        stage.serve(port, &[&["NPtcp", "-o", "/dev/null"][..], &options].concat());
        let client = [&["NPtcp", "-h", "127.0.0.1", "-o", "out"][..], &options].concat();
        let (good, out, err) = stage.client_with(&client, Stdio::null());
        // It ends with an error at the first message that differs. It prints one line for each size.
        let sizes = err.matches("Integrity check passed").count();
        assert!(good && sizes >= 35, "{mode}: {sizes} sizes: {out}{err}");
        let connections = stage.end();
        assert_eq!(changed(&connections, "NPtcp").len(), 2, "{mode}: {connections:#?}");
    }
}
