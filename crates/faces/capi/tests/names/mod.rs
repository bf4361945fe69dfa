//! The names that `ginnel.h` declares.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

/// Returns the path of the committed header.
pub fn header_path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("include/ginnel.h")
}

/// Returns the functions, and the errors with their numbers without the sign.
pub fn public() -> (BTreeSet<String>, Vec<(String, String)>) {
    let header = fs::read_to_string(header_path()).unwrap();
    let mut functions = BTreeSet::new();
    let mut errors = Vec::new();
    for line in header.lines().map(str::trim).filter(|line| !line.starts_with("//") && !line.starts_with('*'))
    {
        if let Some((declaration, _)) = line.split_once('(') {
            let name = declaration.rsplit([' ', '*']).next().unwrap_or_default();
            if name.starts_with("ginnel_") {
                functions.insert(name.to_owned());
            }
        }
        if let Some((name, number)) = line.trim_end_matches(',').split_once(" = -") {
            errors.push((name.to_owned(), number.to_owned()));
        }
    }
    assert!(functions.len() > 30 && errors.len() > 20, "{functions:?} {errors:?}");
    (functions, errors)
}
