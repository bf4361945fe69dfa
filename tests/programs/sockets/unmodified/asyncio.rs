//! Python's asyncio with many connections at once.

use kit::world::World;
use programs::stage::{MODES, PYTHON, Stage, changed, free_port};

const CONNECTIONS: usize = 1000;

const ECHO: &str = include_str!("echo.py");

#[test]
fn asyncio() {
    kit::require_programs!(&[PYTHON]);
    for mode in MODES {
        // Two rings for each connection.
        let mut stage = Stage::in_world(mode, World::with("size = '640M'"));
        let port = free_port();
        let (at, connections) = (port.to_string(), CONNECTIONS.to_string());
        stage.serve(port, &[PYTHON, "-c", ECHO, "serve", "127.0.0.1", &at, &connections]);
        stage.client(&[PYTHON, "-c", ECHO, "talk", "127.0.0.1", &at, &connections]);
        let connections = stage.end();
        // Both ends of each connection.
        assert_eq!(changed(&connections, "python3").len(), 2 * CONNECTIONS, "{mode}");
    }
}
