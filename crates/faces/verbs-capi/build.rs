//! Generates the entry points of `libibverbs.so.1` from the two tables. For each name in each node, there are a few instructions that
//! jump to a function of this crate or to the real library, as the table says.

mod table;

use std::fmt::Write;
use std::path::Path;
use std::{env, fs};
use table::{Line, What};

fn main() {
    println!("cargo::rerun-if-changed=table.rs");
    let mut text = String::new();
    for (library, name) in ["libibverbs", "librdmacm"].into_iter().enumerate() {
        let file = format!("{name}.map");
        println!("cargo::rerun-if-changed={file}");
        let lines = table::parse(&fs::read_to_string(&file).expect("the table of names"));
        for (index, line) in lines.iter().enumerate() {
            let last = lines[index + 1..].iter().all(|later| later.name != line.name);
            entry(&mut text, library, index, line, last);
        }
    }
    let folder = env::var_os("OUT_DIR").expect("cargo says where");
    fs::write(Path::new(&folder).join("entries.s"), text).expect("the folder can be written");
}

/// Appends the macro call of `entry_points.rs` for a line of a table, and gives the entry point its versioned name.
fn entry(text: &mut String, library: usize, index: usize, line: &Line, last: bool) {
    let Line { name, node, what, missing } = line;
    let label = format!("ginnel_entry_{library}_{index}");
    // This crate itself uses only the newest version of a name.
    let real = if last { format!("ginnel_real_{name}") } else { format!("{label}_real") };
    let mut put = |line: String| writeln!(text, "{line}").expect("a string grows");
    match what {
        What::Object => put(format!("ginnel_object {label}")),
        What::Ours | What::Forward => {
            put(format!("ginnel_forward {real}, {name}, {node}, {missing}, {library}"));
        }
    }
    let target = match what {
        What::Object => label,
        What::Ours => {
            put(format!("ginnel_ours {label}, ginnel_{name}"));
            label
        }
        What::Forward => real,
    };
    if library == 0 {
        put(format!(".symver {target}, {name}{}{node}", if last { "@@" } else { "@" }));
    } else {
        put(format!("ginnel_ours ginnel_cm_{name}, {target}"));
    }
}
