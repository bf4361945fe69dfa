//! Connections under `ginnel run` for which the segment has no room.

use kit::world::World;
use programs::stage::{PYTHON, Stage, changed};

/// Opens connections, with both ends in one process, until the segment has no room for another one, and then closes
/// some of them.
const PROGRAM: &str = include_str!("full.py");

#[test]
fn a_segment_without_room_leaves_connections_on_tcp() {
    kit::require_programs!(&[PYTHON]);
    let stage = Stage::in_world("eager", World::with("size = '4M'"));
    stage.client(&[PYTHON, "-c", PROGRAM]);
    let connections = stage.end();
    let (shared, tcp): (Vec<_>, Vec<_>) =
        connections.iter().partition(|record| record.shared_sent + record.shared_received > 0);
    assert_eq!(shared.len(), changed(&connections, "python3").len(), "{connections:#?}");
    // Both ends of five connections at least.
    assert!(tcp.len() >= 10, "{tcp:#?}");
    for record in tcp {
        assert!(!record.reason.is_empty() && record.tcp_sent > 50_000, "{record:#?}");
    }
}
