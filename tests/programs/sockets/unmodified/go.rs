//! A server written in Go, which makes system calls without any library.

use programs::stage::{MODES, Stage, free_port};
use std::fs;

#[test]
fn go() {
    kit::require_programs!(&["caddy", "curl", "wrk"]);
    for mode in MODES {
        let mut stage = Stage::new(mode);
        let folder = stage.world.files();
        let bytes: Vec<u8> = (0..16_u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        fs::write(folder.join("large"), &bytes).unwrap();
        let port = free_port();
        let at = format!("127.0.0.1:{port}");
        stage.serve(port, &["caddy", "file-server", "--listen", &at, "--root", folder.to_str().unwrap()]);
        let log = stage.log();
        assert!(log.contains("is written in Go") && log.contains("stay on TCP"), "{mode}: {log}");
        let url = format!("http://{at}/large");
        stage.client(&["curl", "-sS", "-o", "one", &url, "-o", "two", &url]);
        for file in ["one", "two"] {
            assert!(
                fs::read(folder.join(file)).unwrap() == bytes,
                "{mode}: {file} is not what was to be sent"
            );
        }
        let out = stage.client(&["wrk", "-t", "1", "-c", "4", "-d", "1s", &url]);
        assert!(
            out.contains("requests in") && !out.contains("Socket errors") && !out.contains("Non-2xx"),
            "{mode}: {out}"
        );
        let connections = stage.end();
        // The clients' report contains the connections, with the reason why they stayed on TCP.
        assert!(connections.len() >= 5, "{mode}: {connections:#?}");
        for connection in &connections {
            let stays = connection.reason == "it ended before both its ends were reported";
            assert!(
                stays && connection.shared_sent + connection.shared_received == 0,
                "{mode}: {connection:#?}"
            );
        }
    }
}
