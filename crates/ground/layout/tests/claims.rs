//! What the documentation of this crate claims, checked in its sources: each structure is in a `layout!`, and each offset in a `words!`.

use std::path::Path;

/// Constants in modules of offsets that are sizes or numbers.
const SIZES: &[&str] =
    &["copy::MOST", "receive::ELEMENT", "receive::MOST", "completion::INLINE", "completion::ENTRY"];

#[test]
fn every_structure_is_asserted() {
    none(sources().iter().flat_map(|(file, text)| structures_without(file, text)).collect());
}

#[test]
fn every_offset_is_asserted() {
    none(sources().iter().flat_map(|(file, text)| offsets_without(file, text)).collect());
}

fn none(faults: Vec<String>) {
    assert!(faults.is_empty(), "\n{}\n", faults.join("\n"));
}

/// Returns the path and the text of each source file of this crate.
fn sources() -> Vec<(String, String)> {
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    let mut sources = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in folder.read_dir().expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else {
                sources.push((path.display().to_string(), std::fs::read_to_string(&path).expect("a source")));
            }
        }
    }
    assert!(sources.len() > 20, "the sources of this crate are not here");
    sources
}

/// Returns a line for each `repr(C)` type that no `layout!` of its file names.
fn structures_without(file: &str, text: &str) -> Vec<String> {
    let asserted: Vec<&str> =
        text.lines().filter_map(|line| line.trim().strip_prefix("layout!(")?.split(',').next()).collect();
    let mut faults = Vec::new();
    let mut is_c = false;
    for line in text.lines().map(str::trim) {
        is_c |= line.starts_with("#[repr(C");
        let name = ["struct ", "union ", "enum "].iter().find_map(|word| declared(line, word));
        if let (true, Some(name)) = (is_c, name) {
            is_c = false;
            if !asserted.contains(&name) {
                faults.push(format!(
                    "{file}: {name} is repr(C), but it has no `layout!({name}, SIZE {{ .. }})`."
                ));
            }
        }
    }
    faults
}

/// Returns the name that a line declares with this keyword.
fn declared<'a>(line: &'a str, keyword: &str) -> Option<&'a str> {
    let line = line.strip_prefix("pub(crate) ").or(line.strip_prefix("pub ")).unwrap_or(line);
    line.strip_prefix(keyword)?.split(|c: char| !c.is_alphanumeric() && c != '_').next()
}

/// Returns a line for each constant that is an offset, and neither taken from a structure nor named in a `words!` of its file. A
/// constant is an offset if its comment says so, or that of its module.
fn offsets_without(file: &str, text: &str) -> Vec<String> {
    let asserted: Vec<&str> = text.split("words!(").skip(1).flat_map(names).collect();
    let mut faults = Vec::new();
    let (mut comment, mut module) = ("", None);
    for line in text.lines() {
        let code = line.trim_start();
        if let Some(text) = code.strip_prefix("/// ") {
            comment = if comment.is_empty() { text } else { comment };
            continue;
        }
        if let Some(name) = declared(line, "mod ").filter(|_| line.ends_with('{')) {
            module = Some((name, comment.starts_with("Offsets ")));
        } else if line == "}" {
            module = None;
        } else if let Some((name, _)) = declared(code, "const ").zip(code.split_once(": usize = ")) {
            let path = module.map_or(name.into(), |(module, _)| format!("{module}::{name}"));
            let in_offsets = module.is_some_and(|(_, of_offsets)| of_offsets);
            let is_size = SIZES.contains(&&*path)
                || ["Bytes in front of the entries.", "Bytes of an entry."].contains(&comment);
            let is_offset =
                comment.starts_with("Offset") || in_offsets && code.starts_with("pub ") && !is_size;
            if is_offset && !code.contains("offset_of!") && !asserted.contains(&&*path) {
                faults.push(format!("{file}: {path} is an offset, but no `words!` of this file names it."));
            }
        }
        comment = "";
    }
    faults
}

/// Returns the constants in a `words!`: the end of the area, and the offsets in it. The text begins behind the opening bracket.
fn names(text: &str) -> impl Iterator<Item = &str> {
    let mut depth = 1;
    let closes = |c: char| {
        depth += i32::from(c == '(') - i32::from(c == ')');
        depth == 0
    };
    let (end, groups) = text.split(closes).next().unwrap_or_default().split_once(';').unwrap_or_default();
    groups.split(['{', '}', ',']).filter_map(|word| Some(word.trim().split_once(": ")?.0)).chain([end])
}

#[test]
fn a_structure_without_an_assertion_is_found() {
    let good = "#[repr(C)]\n#[derive(Clone)]\npub struct A {\n    a: u8,\n}\nlayout!(A, 1 { a: 0 });\n\
                #[repr(transparent)]\npub struct B(u32);\n";
    let bad = "#[repr(C, packed)]\n/// C.\nstruct C {\n    a: u8,\n}\n";
    assert_eq!(structures_without("f", good), [""; 0]);
    let found = structures_without("f", &[good, bad].concat());
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].starts_with("f: C is repr(C)"), "{found:?}");
}

#[test]
fn an_offset_without_an_assertion_is_found() {
    let good = "/// Offset of a.\npub const A: usize = 0;\n/// Bytes.\npub const LEN: usize = 8;\n/// Offset of b.\n\
                pub const B: usize = offset_of!(S, b);\nwords!(LEN; one { A: u32, m::C: [u8; f(4)] });\n\
                /// Offsets in m.\npub mod m {\n    /// C.\n    pub const C: usize = 4;\n}\n";
    let bad = "/// Offset of d,\n/// and more.\npub const D: usize = 0;\n\
               /// Offsets in n.\npub mod n {\n    /// A.\n    pub const A: usize = 4;\n}\n";
    assert_eq!(offsets_without("f", good), [""; 0]);
    assert_eq!(
        offsets_without("f", "/// Offset of a.\npub const A: usize = 8;\nwords!(A; one { B: u32 });\n"),
        [""; 0]
    );
    let found = offsets_without("f", &[good, bad].concat());
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(
        found[0].starts_with("f: D is an offset") && found[1].starts_with("f: n::A is an offset"),
        "{found:?}"
    );
}
