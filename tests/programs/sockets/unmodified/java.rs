//! Java's channels, selectors and streams.

use programs::stage::{MODES, Stage, changed, free_port};

/// `java` compiles this source itself.
const ECHO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/sockets/unmodified/Echo.java");

#[test]
fn java() {
    kit::require_programs!(&["java"]);
    for mode in MODES {
        let mut stage = Stage::new(mode);
        let port = free_port();
        let at = port.to_string();
        let java = ["java", "-Xshare:auto", "-XX:TieredStopAtLevel=1", ECHO];
        stage.serve(port, &[&java[..], &["serve", "127.0.0.1", &at]].concat());
        stage.client(&[&java[..], &["talk", "127.0.0.1", &at]].concat());
        let connections = stage.end();
        // Both ends of eight connections.
        assert_eq!(changed(&connections, "java").len(), 16, "{mode}: {connections:#?}");
    }
}
