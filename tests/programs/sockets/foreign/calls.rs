//! gRPC for Python: calls of all kinds, many at a time.

use super::{duration, folder};
use programs::stage::{MODES, PYTHON, Stage, changed, free_port};
use std::fs;

#[test]
fn grpc_calls_get_their_answers() {
    kit::require_programs!(&[PYTHON]);
    let Some(library) = folder("grpc") else { return };
    for mode in MODES {
        let mut stage = Stage::new(mode);
        stage.set("PYTHONPATH", library.to_str().unwrap());
        fs::write(stage.world.files().join("calls.py"), include_str!("calls.py")).unwrap();
        let port = free_port().to_string();
        stage.serve(port.parse().unwrap(), &[PYTHON, "calls.py", "serve", &port]);
        let seconds = duration().as_secs().to_string();
        let said = stage.client(&[PYTHON, "calls.py", "talk", &port, &seconds]);
        let connections = stage.end();
        let changed = changed(&connections, "python3").len();
        println!("gRPC, {mode}: {}; {changed} of {} ends changed over", said.trim(), connections.len());
        // Both ends of each connection of a round, which live long enough.
        assert!(changed >= 2, "{mode}: {connections:#?}");
    }
}
