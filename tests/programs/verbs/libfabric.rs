//! Programs of libfabric, over its provider `verbs`, which uses libibverbs and librdmacm.

use kit::wait::wait_until;
use programs::stage::{free_port, listens};
use programs::verbs::{Killed, Verbs, expect_good};

#[test]
fn fi_info_finds_the_device() {
    kit::require_programs!(&["fi_info"]);
    let said = Verbs::new().good(&["fi_info", "-p", "verbs"]);
    for words in ["domain: ginnel_web", "FI_EP_MSG", "FI_EP_DGRAM", "provider: verbs;ofi_rxm"] {
        assert!(said.contains(words), "{words}: {said}");
    }
}

#[test]
fn fi_pingpong() {
    kit::require_programs!(&["fi_pingpong"]);
    let verbs = Verbs::new();
    // No other provider is asked, so the data of both directions goes through the segment. `-c` checks the data.
    for (more, times) in [
        (&["-p", "verbs", "-e", "msg", "-S", "4096"][..], 2),
        (&["-p", "verbs", "-e", "dgram", "-S", "1024"], 2),
        // Beside the data, its two ends exchange how much they may send. Its last message and the end of the other side come together.
        (&["-p", "verbs;ofi_rxm", "-e", "rdm"], 5),
    ] {
        for _ in 0..times {
            let port = free_port();
            let number = port.to_string();
            let common = [&["fi_pingpong", "-I", "50", "-c"], more].concat();
            let line = [&common[..], &["-B", &number]].concat();
            let mut server = Killed(Some(verbs.command(&line).spawn().unwrap()));
            wait_until("a server", || listens(port));
            let client = verbs.good(&[&common[..], &["-P", &number, "127.0.0.1"]].concat());
            let server = expect_good(&line, server.0.take().unwrap());
            for said in [server, client] {
                assert!(said.contains("usec/xfer") && said.contains("=50"), "{more:?}: {said}");
            }
        }
    }
}
