//! Node.js.

use programs::stage::{MODES, Stage, changed, free_port};

const ECHO: &str = include_str!("echo.js");

#[test]
fn node() {
    kit::require_programs!(&["node"]);
    for mode in MODES {
        let mut stage = Stage::new(mode);
        let port = free_port();
        let at = port.to_string();
        stage.serve(port, &["node", "-e", ECHO, "serve", "127.0.0.1", &at]);
        let out = stage.client(&["node", "-e", ECHO, "talk", "127.0.0.1", &at]);
        assert_eq!(out.trim(), "good", "{mode}");
        let connections = stage.end();
        // Both ends of four connections.
        assert_eq!(changed(&connections, "node").len(), 8, "{mode}: {connections:#?}");
    }
}
