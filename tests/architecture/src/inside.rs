//! What the files of a crate with floors of its own use, against docs/pictures/architecture.floors.

use crate::floors::{FILE, House, Inside};
use crate::packages::Package;
use crate::uses::{self, File, Path};
use crate::{none, packages};

#[test]
fn files_use_only_files_below_them() {
    let (house, packages) = (House::read(), packages::read());
    for inside in &house.inside {
        let of_it = |package: &&Package| package.place().is_some_and(|(_, name)| name == inside.name);
        let package = packages.iter().find(of_it).expect("a crate for each room, which another test checks");
        none(faults(inside, &uses::read(&package.folder)));
    }
}

fn faults(inside: &Inside, files: &[File]) -> Vec<String> {
    let level = |name: &String| inside.modules.iter().position(|module| module == name);
    let mut faults = Vec::new();
    for file in files {
        let Some(own) = level(&file.module[0]) else {
            faults.push(format!("{FILE}: the line `inside {}` lacks {}", inside.name, file.module[0]));
            continue;
        };
        for Path { names, line } in uses::paths(file) {
            let Some(name) = names.first() else { continue };
            let Some(other) = level(name) else { continue };
            if other < own {
                faults.push(format!(
                    "{}.rs:{line}: {} lies above {}. Move what is used down, or let what lies above be told by a trait.",
                    file.module.join("/"),
                    names.join("::"),
                    file.module[0],
                ));
            }
        }
    }
    let uses = uses::uses(files);
    for module in uses.keys() {
        // A circle begins at the file of it that comes first, so each is found once.
        if let Some(circle) = uses::circle(&uses, module, |next| next > module.as_slice()) {
            faults.push(format!("a circle: {}", circle.join(" uses ")));
        }
    }
    faults
}

mod made_up {
    use super::*;

    fn file(module: &str, text: &str) -> File {
        File { module: module.split("::").map(String::from).collect(), text: text.into() }
    }

    fn house() -> Inside {
        Inside { name: "x".into(), modules: ["top", "low"].map(String::from).into() }
    }

    #[test]
    fn a_file_that_uses_a_higher_floor_is_found() {
        let files = [file("top", "use crate::low::f;"), file("low", "fn f() {\n    crate::top::g();\n}")];
        let found = faults(&house(), &files);
        assert!(found[0].starts_with("low.rs:2: top::g lies above low"), "{found:?}");
    }

    #[test]
    fn a_circle_of_files_is_found_once() {
        let files = [
            file("low::a", "use crate::low::b::f;"),
            file("low::b", "use super::c;"),
            file("low::c", "use crate::low::{a, c};"),
            file("low", "pub mod a;\nuse crate::low::a::f;"),
        ];
        let found = faults(&house(), &files);
        assert_eq!(found, ["a circle: low::a uses low::b uses low::c uses low::a"]);
    }

    #[test]
    fn a_module_that_is_on_no_floor_is_found() {
        let found = faults(&house(), &[file("other::a", "")]);
        assert!(found[0].contains("lacks other"), "{found:?}");
    }
}
