//! That no files of a crate use each other in a circle, except those that docs/pictures/architecture.floors lists. That list may only get
//! shorter: a file that does not lie in its circle any more leaves it.

use crate::floors::{Circle, FILE, House};
use crate::packages::Package;
use crate::uses::{self, File, Path, Uses};
use crate::{none, packages};
use std::collections::BTreeSet;

#[test]
fn only_listed_files_use_each_other_in_a_circle() {
    let (house, packages) = (House::read(), packages::read());
    let names: BTreeSet<&String> = house.circles.iter().map(|circle| &circle.name).collect();
    for name in names {
        let of_it = |package: &&Package| package.place().is_some_and(|(_, place)| place == *name);
        let package = packages.iter().find(of_it).expect("a crate for each room, which another test checks");
        let circles: Vec<&Circle> = house.circles.iter().filter(|circle| circle.name == *name).collect();
        none(faults(name, &circles, &uses::read(&package.folder)));
    }
}

fn faults(name: &str, allowed: &[&Circle], files: &[File]) -> Vec<String> {
    let mut faults = by_the_root(name, files);
    let uses = uses::uses(files);
    let mut found = BTreeSet::new();
    for module in uses.keys() {
        let circle = circle_of(&uses, module);
        let is_allowed = |line: &&&Circle| circle.is_subset(&line.files.iter().cloned().collect());
        if circle.is_empty() || allowed.iter().any(|line| is_allowed(&line)) {
            found.extend(circle);
            continue;
        }
        let way = uses::circle(&uses, module, |_| true).unwrap_or_default().join(" uses ");
        faults.push(format!(
            "{name}: a circle of files that no line `circle {name}` of {FILE} allows: {way}. Move what they share down."
        ));
    }
    for file in allowed.iter().flat_map(|line| &line.files).filter(|file| !found.contains(*file)) {
        faults.push(format!(
            "{FILE}: {file} does not lie in a circle any more. Take it out of the line `circle {name}`."
        ));
    }
    faults
}

/// Returns the files that a file uses and that use it, also through others. Nothing, if it lies in no circle.
fn circle_of(uses: &Uses, file: &[String]) -> BTreeSet<String> {
    let back = |other: &&[String]| uses::reach(uses, other).contains(file);
    uses::reach(uses, file).into_iter().filter(back).map(|names| names.join("::")).collect()
}

/// A name that the crate's root passes on does not say which file it comes from, so files of the crate do not use it.
fn by_the_root(name: &str, files: &[File]) -> Vec<String> {
    let top: BTreeSet<&String> = files.iter().map(|file| &file.module[0]).collect();
    let mut faults = Vec::new();
    for file in files {
        for Path { names, line } in uses::paths(file) {
            if names.first().is_some_and(|first| !top.contains(first)) {
                let (place, path) = (file.module.join("/"), names.join("::"));
                faults.push(format!(
                    "{name}: {place}.rs:{line}: crate::{path} comes from another file. Name that."
                ));
            }
        }
    }
    faults
}

mod made_up {
    use super::*;

    fn files(files: &[(&str, &str)]) -> Vec<File> {
        let file = |(module, text): &(&str, &str)| File {
            module: module.split("::").map(String::from).collect(),
            text: (*text).into(),
        };
        files.iter().map(file).collect()
    }

    fn line(files: &[&str]) -> Circle {
        Circle { name: "x".into(), files: files.iter().map(|file| file.to_string()).collect() }
    }

    fn two_circles() -> Vec<File> {
        files(&[
            ("a", "use crate::b::f;"),
            ("b", "use crate::a::f; use crate::c::d::f;"),
            ("c::d", "fn f() { crate::e::f() }"),
            ("e", "use crate::c::d;"),
            ("low", "fn f() {}"),
        ])
    }

    #[test]
    fn a_circle_that_is_not_listed_is_found() {
        let found = faults("x", &[&line(&["c::d", "e"])], &two_circles());
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("allows: a uses b uses a."), "{found:?}");
        assert!(faults("x", &[&line(&["c::d", "e"]), &line(&["a", "b"])], &two_circles()).is_empty());
    }

    #[test]
    fn a_circle_must_not_grow_by_another_one() {
        let mut files = two_circles();
        files[3].text.push_str("use crate::a::f;");
        let found = faults("x", &[&line(&["c::d", "e"]), &line(&["a", "b"])], &files);
        assert_eq!(found.len(), 4 + 4, "{found:?}");
    }

    #[test]
    fn a_listed_file_that_is_in_no_circle_is_found() {
        let found = faults("x", &[&line(&["c::d", "e", "low"]), &line(&["a", "b"])], &two_circles());
        assert!(found.len() == 1 && found[0].contains("low does not lie in a circle"), "{found:?}");
    }

    #[test]
    fn a_name_of_the_root_is_found() {
        let found =
            faults("x", &[], &files(&[("a", "fn f() {}\nuse crate::Name;"), ("b", "use crate::a::f;")]));
        assert_eq!(found, ["x: a.rs:2: crate::Name comes from another file. Name that."]);
    }
}
