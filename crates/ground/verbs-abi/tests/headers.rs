//! Compares the declarations of this crate with the installed headers.

use ginnel_verbs_abi as abi;
use ginnel_verbs_abi::{Growth, Structure};
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

/// Appends C code that compiles only if the size and the offsets of a structure are as declared here. Newer headers may have more, where
/// the structure says so.
fn assert_structure(text: &mut String, structure: &Structure) {
    let Structure { name, size, growth, fields } = structure;
    let relation = if *growth == Growth::None { "==" } else { ">=" };
    writeln!(text, "_Static_assert(sizeof(struct {name}) {relation} {size}, \"size of {name}\");").unwrap();
    for (field, at) in *fields {
        let field = field.strip_prefix("r#").unwrap_or(field);
        let is = match growth {
            Growth::InFront => {
                format!("sizeof(struct {name}) - offsetof(struct {name}, {field}) == {}", size - at)
            }
            Growth::None | Growth::Behind => format!("offsetof(struct {name}, {field}) == {at}"),
        };
        writeln!(text, "_Static_assert({is}, \"offset of {name}.{field}\");").unwrap();
    }
}

kit::test_that_skips_are_seen!();

#[test]
fn declarations_agree_with_the_headers() {
    kit::require!(cfg!(target_arch = "x86_64"), "sizes and offsets are those of x86-64");
    for header in ["/usr/include/infiniband/verbs.h", "/usr/include/rdma/rdma_cma.h"] {
        kit::require!(Path::new(header).exists(), "no {header}: `scripts/setup test` installs it");
    }
    let mut text = String::from(
        "#include <stddef.h>\n#include <stdint.h>\n#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>\n",
    );
    for structure in abi::STRUCTURES.iter().chain(abi::rdmacm::STRUCTURES) {
        assert_structure(&mut text, structure);
    }
    for (field, at) in abi::SEND_WR_PARTS {
        writeln!(text, "_Static_assert(offsetof(struct ibv_send_wr, {field}) == {at}, \"{field}\");")
            .unwrap();
    }
    for (name, value) in abi::CONSTANTS.iter().chain(abi::rdmacm::CONSTANTS) {
        writeln!(text, "_Static_assert((long long)({name}) == {value}, \"{name}\");").unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("headers.c");
    std::fs::write(&source, text).unwrap();
    let output =
        Command::new("cc").args(["-std=gnu11", "-fsyntax-only"]).arg(&source).output().expect("a C compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn everything_is_compared() {
    assert!(abi::STRUCTURES.len() > 50 && abi::rdmacm::STRUCTURES.len() == 10);
    assert!(abi::CONSTANTS.len() > 300);
}
