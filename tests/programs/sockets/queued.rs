//! The number of waiting bytes of a connection that `ioctl` returns.

use programs::stage::{PYTHON, Stage};

/// Each pair has changed over when `pair` returns. Conditions that become true later are polled until the test's time
/// limit.
const QUEUED: &str = include_str!("queued.py");

#[test]
fn nothing_is_queued_when_everything_has_been_received() {
    kit::require_programs!(&[PYTHON]);
    for (mode, ends) in [("off", 0), ("eager", 2)] {
        let stage = Stage::new(mode).settling();
        stage.client(&[PYTHON, "-c", QUEUED]);
        let connections = stage.end();
        let over = connections.iter().filter(|one| one.sent_after_us.is_some()).count();
        assert_eq!(over, ends, "{mode}: {connections:#?}");
    }
}
