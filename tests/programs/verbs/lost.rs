//! A device that is lost for good.

use super::ends::{End, compiled};
use programs::verbs::{DEVICE, Verbs};
use std::fs;

#[test]
fn programs_are_told_that_their_device_is_lost() {
    programs::require_verbs_compiler!();
    let mut verbs = Verbs::new();
    let program = compiled(&verbs, "lost");
    let start = |verbs: &Verbs, ways: &[&str]| {
        let mut ends: Vec<_> = ways.iter().map(|way| End::named(verbs, &[&program, DEVICE, way])).collect();
        ends.iter_mut().for_each(|end| assert_eq!(end.line(), "ready\n"));
        ends
    };
    let is_told = |mut ends: Vec<End>| {
        for end in &mut ends {
            assert_eq!(end.line(), "lost\n");
        }
        for end in &mut ends {
            let (status, said) = end.ended();
            assert!(status.success(), "{said}");
        }
    };

    // The next daemon still knows the segment, so the device is not lost. Then its file is truncated, and a program that accesses the
    // memory notices.
    let ends = start(&verbs, &["polls"]);
    verbs.world.replace_daemon();
    let file = verbs.world.path().join("shm/ginnel/web");
    fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(0).unwrap();
    is_told(ends);

    // The next daemon does not know the segment any more.
    let mut verbs = Verbs::new();
    let ends = start(&verbs, &["waits", "polls"]);
    verbs.world.reconfigure(|text| text.replace("[segment.web]", "[segment.other]"));
    is_told(ends);
    let devices = verbs.good(&["ibv_devices"]);
    assert!(!devices.contains(DEVICE) && devices.contains("ginnel_other"), "{devices}");
}
