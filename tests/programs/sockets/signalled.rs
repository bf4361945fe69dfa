//! Programs under `ginnel run` that ask for a signal (SIGIO) when data has arrived.

use crate::epoll::PAIRS;
use crate::passing::COMMON;
use programs::stage::{MODES, PYTHON, Stage, changed, free_port};
use std::fs;

/// The module `signals`, which the programs have in common.
const SIGNALS: &str = include_str!("signalled/signals.py");

#[test]
fn a_connection_that_has_changed_over_goes_back_for_signals() {
    kit::require_programs!(&[PYTHON]);
    let stage = Stage::new("eager");
    let program = include_str!("signalled/goes_back.py");
    fs::write(stage.world.files().join("pairs.py"), PAIRS).unwrap();
    fs::write(stage.world.files().join("signals.py"), SIGNALS).unwrap();
    stage.client(&[PYTHON, "-c", program]);
    let connections = stage.end();
    assert_eq!(changed(&connections, "python3").len(), 4, "{connections:#?}");
    assert!(connections.iter().all(|end| end.returned == 2), "{connections:#?}");
}

#[test]
fn a_connection_whose_program_has_asked_for_signals_stays_on_tcp() {
    kit::require_programs!(&[PYTHON]);
    for mode in MODES {
        let stage = Stage::new(mode);
        let program = include_str!("signalled/stays.py");
        fs::write(stage.world.files().join("pairs.py"), PAIRS).unwrap();
        fs::write(stage.world.files().join("signals.py"), SIGNALS).unwrap();
        stage.client(&[PYTHON, "-c", program]);
        let connections = stage.end();
        assert_eq!(changed(&connections, "python3").len(), 0, "{mode} {connections:#?}");
        let asked = connections.iter().filter(|end| end.reason.contains("O_ASYNC"));
        assert_eq!(asked.count(), 3, "{mode} {connections:#?}");
    }
}

/// A server that asks for signals while its client makes no call for a while.
const BUSY: &str = include_str!("signalled/busy.py");

#[test]
fn a_peer_that_makes_no_call_for_a_while_goes_back_later() {
    kit::require_programs!(&[PYTHON]);
    let mut stage = Stage::new("eager");
    let port = free_port();
    let at = port.to_string();
    fs::write(stage.world.files().join("common.py"), COMMON).unwrap();
    fs::write(stage.world.files().join("signals.py"), SIGNALS).unwrap();
    stage.serve(port, &[PYTHON, "-c", BUSY, "serve", &at]);
    stage.client(&[PYTHON, "-c", BUSY, "talk", &at]);
    let log = stage.log();
    let connections = stage.end();
    assert!(!log.contains("Traceback"), "{log}");
    let changed = changed(&connections, "python3");
    assert_eq!(changed.len(), 2, "{connections:#?}");
    assert!(changed.iter().all(|end| end.returned == 2), "{changed:#?}");
}
