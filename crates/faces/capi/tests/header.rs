//! Checks that `ginnel.h` is generated from this crate, and that everything in it is exported and documented.
//!
//! With `GINNEL_HEADER=write` in the environment the header is written instead of compared (`scripts/header-check -w`).

mod names;

use names::{header_path, public};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn generated() -> String {
    let mut config = cbindgen::Config::from_file(here().join("cbindgen.toml")).unwrap();
    let version = env!("CARGO_PKG_VERSION");
    let mut parts = version.split('.');
    let (major, minor) = (parts.next().unwrap(), parts.next().unwrap());
    config.after_includes = Some(format!(
        "\n/* The version of this header; see ginnel_version(). */\n\
         #define GINNEL_VERSION \"{version}\"\n\
         #define GINNEL_VERSION_MAJOR {major}\n\
         #define GINNEL_VERSION_MINOR {minor}"
    ));
    let mut text = Vec::new();
    cbindgen::generate_with_config(here(), config).unwrap().write(&mut text);
    String::from_utf8(text).unwrap()
}

#[test]
fn the_header_matches_the_source() {
    if std::env::var("GINNEL_HEADER").is_ok_and(|v| v == "write") {
        fs::write(header_path(), generated()).unwrap();
    }
    let (committed, generated) = (fs::read_to_string(header_path()).unwrap_or_default(), generated());
    let lines = committed.lines().zip(generated.lines()).enumerate();
    if let Some((at, (old, new))) = lines.into_iter().find(|(_, (old, new))| old != new) {
        panic!("include/ginnel.h:{}: is {old:?}, should be {new:?}; run scripts/header-check -w", at + 1);
    }
    assert!(committed == generated, "include/ginnel.h has another length; run scripts/header-check -w");
}

#[test]
fn every_function_has_a_symbol_version() {
    let map = fs::read_to_string(here().join("ginnel.map")).unwrap();
    let versioned = map.lines().filter_map(|line| line.trim().strip_suffix(';'));
    let versioned: BTreeSet<String> =
        versioned.filter(|name| name.starts_with("ginnel_")).map(Into::into).collect();
    assert_eq!(versioned, public().0);
}

#[test]
fn every_function_and_status_is_in_a_manual_page() {
    let mut pages = String::new();
    for entry in fs::read_dir(here().join("../../../docs/man")).unwrap() {
        pages.push_str(&fs::read_to_string(entry.unwrap().path()).unwrap());
    }
    let synopses: Vec<_> = pages.lines().filter(|line| line.starts_with(".B")).collect();
    let (functions, errors) = public();
    for function in functions {
        let declared = |line: &&str| [' ', '*'].iter().any(|c| line.contains(&format!("{c}{function}(")));
        assert!(synopses.iter().any(declared), "no page of docs/man declares {function}");
    }
    for (name, number) in errors {
        let entry = format!("\n.BR {name} \" (\\-{number})\"\n");
        assert!(pages.contains(&entry), "docs/man/ginnel_errors.3 lacks {name} (-{number})");
    }
}
