//! memcached with libmemcached's tools, and with a client in Python.

use programs::stage::{MODES, PYTHON, Stage, changed, free_port};
use std::fs;

/// Sets and gets values until the connection has changed over, and then some more.
const PYMEMCACHE: &str = include_str!("values.py");

#[test]
fn memcached() {
    kit::require_programs!(&[
        "memcached",
        "memccapable",
        "memccp",
        "memccat",
        "memcslap",
        "memcaslap",
        PYTHON
    ]);
    for mode in MODES {
        let mut stage = Stage::new(mode);
        let port = free_port();
        let at = port.to_string();
        let server = format!("127.0.0.1:{at}");
        stage.serve(port, &["memcached", "-u", "root", "-l", "127.0.0.1", "-p", &at, "-U", "0", "-t", "2"]);
        // Tests all commands of both protocols, and prints for each whether the server behaves correctly.
        let memccapable = ["memccapable", "-h", "127.0.0.1", "-p", &at];
        let out = stage.client_until_changed(&memccapable, 2, "memcached");
        assert!(out.contains("All tests passed"), "{mode}: {out}");
        // Each of several threads has a connection.
        let memcslap = ["memcslap", "-s", &server, "-t", "get", "-c", "3", "-e", "3000"];
        stage.client_until_changed(&memcslap, 3, "memcached");
        // The tool checks each value that it gets.
        let memcaslap = ["memcaslap", "-s", &server, "-t", "1s", "-T", "2", "-c", "8", "-v", "1"];
        let out = stage.client_until_changed(&memcaslap, 8, "memcached");
        assert!(out.contains("get_misses: 0") && out.contains("verify_failed: 0"), "{mode}: {out}");
        // One connection for one value. It may stay on TCP or change over, depending on timing.
        let folder = stage.world.files();
        let value: String = (0..900_000_u32)
            .map(|i| char::from(b'a' + (i.wrapping_mul(2_654_435_761) >> 28) as u8))
            .collect();
        fs::write(folder.join("value"), &value).unwrap();
        stage.client(&["memccp", "-s", &server, "value"]);
        stage.client(&["memccat", "-s", &server, "--file=back", "value"]);
        let back = fs::read_to_string(folder.join("back")).unwrap();
        assert!(back.trim_end() == value, "{mode}: {} bytes come back", back.len());
        stage.client(&[PYTHON, "-c", PYMEMCACHE, "127.0.0.1", &at]);
        let connections = stage.end();
        assert_eq!(changed(&connections, "python3").len(), 1, "{mode}: {connections:#?}");
    }
}
