//! The crates and what they use, against docs/pictures/architecture.floors.

use crate::floors::{FILE, House};
use crate::packages::Package;
use crate::{none, packages, tree};
use std::collections::BTreeMap;

#[test]
fn every_crate_has_a_room_and_every_room_a_crate() {
    none(rooms(&House::read(), &packages::read()));
}

#[test]
fn every_manifest_of_crates_is_a_crate_in_a_folder() {
    let manifests = tree::files().into_iter().filter(|path| path.ends_with("Cargo.toml"));
    let names: Vec<String> = manifests.map(|path| path.display().to_string()).collect();
    none(manifests_elsewhere(&names, &packages::read()));
}

#[test]
fn crates_lie_in_a_folder_of_their_floor() {
    none(folders(&House::read(), &packages::read()));
}

#[test]
fn dependencies_point_down() {
    none(downwards(&House::read(), &packages::read()));
}

#[test]
fn no_crate_of_the_product_uses_a_package_for_tests() {
    none(packages_for_tests(&packages::read()));
}

#[test]
fn crates_that_are_to_be_kept_apart_are_apart() {
    none(apart(&House::read(), &packages::read()));
}

/// The folder, the name, and the package of each crate of the product.
fn crates(packages: &[Package]) -> impl Iterator<Item = (&str, &str, &Package)> {
    packages.iter().filter_map(|package| package.place().map(|(folder, name)| (folder, name, package)))
}

fn rooms(house: &House, packages: &[Package]) -> Vec<String> {
    let mut faults = Vec::new();
    for (folder, name, _) in crates(packages) {
        if house.level(name).is_none() {
            faults.push(format!(
                "crates/{folder}/{name} has no room. Add `room {name}: WHAT IT IS` to a floor of the folder {folder} in {FILE}, \
                 and run scripts/pictures."
            ));
        }
    }
    for room in house.floors.iter().flat_map(|floor| &floor.rooms) {
        if !crates(packages).any(|(_, name, _)| name == room) {
            faults.push(format!(
                "{FILE} has a room {room}, but there is no crate crates/FOLDER/{room}. Remove the room."
            ));
        }
    }
    faults
}

fn manifests_elsewhere(manifests: &[String], packages: &[Package]) -> Vec<String> {
    let is_crate = |path: &str| {
        let folder = path.trim_end_matches("/Cargo.toml");
        crates(packages).any(|(_, _, package)| package.folder == folder)
    };
    let below_crates = manifests.iter().filter(|path| path.starts_with("crates/"));
    below_crates
        .filter(|path| !is_crate(path))
        .map(|path| format!("{path} is not a crate of the workspace. Move its folder to crates/FOLDER/NAME, where FOLDER is one of {FILE}."))
        .collect()
}

fn folders(house: &House, packages: &[Package]) -> Vec<String> {
    let mut faults = Vec::new();
    for (folder, name, _) in crates(packages) {
        let Some(floor) = house.level(name).map(|level| &house.floors[level]) else { continue };
        if !floor.folders.iter().any(|of_floor| of_floor == folder) {
            faults.push(format!(
                "crates/{folder}/{name} is on the floor \"{}\" of {FILE}, whose crates lie in {}. Move the crate there, or give it a \
                 room on a floor of the folder {folder}.",
                floor.title,
                floor.folders.iter().map(|folder| format!("crates/{folder}")).collect::<Vec<_>>().join(" or "),
            ));
        }
    }
    faults
}

fn downwards(house: &House, packages: &[Package]) -> Vec<String> {
    let mut faults = Vec::new();
    for (_, name, package) in crates(packages) {
        for used in package.product_uses() {
            let Some(room) = used.room() else { continue };
            let (Some(from), Some(to)) = (house.level(name), house.level(room)) else { continue };
            if to <= from {
                faults.push(format!(
                    "{}/Cargo.toml: {} (\"{}\") uses {} (\"{}\"), which is not on a floor below it in {FILE}. Move what both need to \
                     a crate below them, or make it a dev-dependency if only tests use it.",
                    package.folder, package.name, house.floors[from].title, used.name, house.floors[to].title,
                ));
            }
        }
    }
    faults
}

fn packages_for_tests(packages: &[Package]) -> Vec<String> {
    let mut faults = Vec::new();
    for (_, _, package) in crates(packages) {
        for used in package.product_uses().filter(|used| used.room().is_none()) {
            faults.push(format!(
                "{}/Cargo.toml: {} uses {} of {}, which is no part of the product. Move the line to [dev-dependencies].",
                package.folder, package.name, used.name, used.folder,
            ));
        }
    }
    faults
}

fn apart(house: &House, packages: &[Package]) -> Vec<String> {
    let by_name: BTreeMap<&str, &Package> =
        crates(packages).map(|(_, name, package)| (name, package)).collect();
    let mut faults = Vec::new();
    for pair in &house.apart {
        if let Some(way) = way(&by_name, &pair.user, &pair.used) {
            faults.push(format!(
                "{}/Cargo.toml: {} must not use {}, because {} ({FILE}), but it does: {}. Move what both need to a crate below \
                 them.",
                by_name[&*pair.user].folder, pair.user, pair.used, pair.why, way.join(" uses "),
            ));
        }
    }
    faults
}

/// Returns the crates from one to another of which each uses the next, if there are any.
fn way<'a>(crates: &BTreeMap<&str, &'a Package>, from: &'a str, to: &str) -> Option<Vec<&'a str>> {
    let mut ways = vec![vec![from]];
    let mut seen = vec![from];
    while let Some(way) = ways.pop() {
        let last = way[way.len() - 1];
        if last == to {
            return Some(way);
        }
        for next in crates.get(last)?.product_uses().filter_map(|used| used.room()) {
            if !seen.contains(&next) {
                seen.push(next);
                ways.push([&way[..], &[next]].concat());
            }
        }
    }
    None
}

mod made_up {
    use super::*;
    use crate::packages::Use;

    const LIST: &str = "floor faces tools: Top\nroom app: A\nroom tool: T\nfloor library: Library\nroom library: L\n\
                        floor ground: Ground\nroom stone: S\napart app stone: stones are heavy\n";

    /// Packages by their folders. Behind each are the folders that it uses, those for tests with a `-`.
    fn packages(packages: &[(&str, &[&str])]) -> Vec<Package> {
        let name = |folder: &str| format!("ginnel-{}", folder.rsplit('/').next().expect("a name"));
        let used = |folder: &&str| {
            let for_tests = folder.starts_with('-');
            let folder = folder.trim_start_matches('-');
            Use { name: name(folder), folder: folder.into(), for_tests }
        };
        let package = |(folder, uses): &(&str, &[&str])| Package {
            name: name(folder),
            folder: folder.to_string(),
            uses: uses.iter().map(used).collect(),
        };
        packages.iter().map(package).collect()
    }

    /// Runs all checks, and compares the faults with these, each of which is given as words that its message must contain.
    fn expect(changes: &[(&str, &[&str])], faults: &[&[&str]]) {
        let mut all: BTreeMap<&str, &[&str]> = BTreeMap::from([
            ("crates/faces/app", &["crates/library/library", "-tests/kit", "-crates/tools/tool"][..]),
            ("crates/tools/tool", &["crates/ground/stone"]),
            ("crates/library/library", &[]),
            ("crates/ground/stone", &["-crates/faces/app", "-tests/kit"]),
            ("tests/kit", &["crates/faces/app", "crates/ground/stone"]),
            ("benches", &["tests/kit", "crates/faces/app"]),
        ]);
        for (folder, uses) in changes {
            match uses {
                ["gone"] => all.remove(folder),
                _ => all.insert(folder, uses),
            };
        }
        let all = packages(&all.into_iter().collect::<Vec<_>>());
        let house = House::parse(LIST).expect("a list");
        let manifests: Vec<String> =
            all.iter().map(|package| format!("{}/Cargo.toml", package.folder)).collect();
        let found = [
            rooms(&house, &all),
            manifests_elsewhere(&manifests, &all),
            folders(&house, &all),
            downwards(&house, &all),
            packages_for_tests(&all),
            apart(&house, &all),
        ]
        .concat();
        assert_eq!(found.len(), faults.len(), "{found:#?}");
        for (found, words) in found.iter().zip(faults) {
            assert!(words.iter().all(|word| found.contains(word)), "{found} has not all of {words:?}");
        }
    }

    #[test]
    fn a_good_house_has_no_faults() {
        expect(&[], &[]);
    }

    #[test]
    fn a_crate_without_a_room_is_found() {
        expect(&[("crates/ground/new", &[])], &[&["crates/ground/new has no room", "`room new: ", FILE]]);
    }

    #[test]
    fn a_room_without_a_crate_is_found() {
        expect(&[("crates/tools/tool", &["gone"])], &[&["a room tool", "no crate", "Remove"]]);
    }

    #[test]
    fn a_crate_that_lies_in_no_folder_is_found() {
        expect(&[("crates/flat", &[])], &[&["crates/flat/Cargo.toml", "crates/FOLDER/NAME"]]);
        expect(&[("crates/a/b/deep", &[])], &[&["crates/a/b/deep/Cargo.toml", "crates/FOLDER/NAME"]]);
    }

    #[test]
    fn a_crate_in_the_folder_of_another_floor_is_found() {
        let changes: &[(&str, &[&str])] =
            &[("crates/tools/tool", &["gone"]), ("crates/ground/tool", &["crates/ground/stone"])];
        expect(changes, &[&["crates/ground/tool", "\"Top\"", "crates/faces or crates/tools", "Move"]]);
    }

    #[test]
    fn a_crate_that_uses_one_of_its_own_floor_or_a_higher_one_is_found() {
        let file = "crates/library/library/Cargo.toml";
        expect(
            &[("crates/library/library", &["crates/tools/tool"])],
            &[
                &[file, "ginnel-library (\"Library\") uses ginnel-tool (\"Top\")", "not on a floor below"],
                &["crates/faces/app/Cargo.toml", "app uses library uses tool uses stone"],
            ],
        );
        expect(
            &[("crates/tools/tool", &["crates/faces/app"])],
            &[&[
                "crates/tools/tool/Cargo.toml",
                "ginnel-tool (\"Top\") uses ginnel-app (\"Top\")",
                "dev-dependency",
            ]],
        );
    }

    #[test]
    fn a_product_that_uses_the_kit_or_a_bench_is_found() {
        expect(
            &[("crates/ground/stone", &["tests/kit", "benches"])],
            &[
                &["crates/ground/stone/Cargo.toml", "ginnel-kit of tests/kit", "[dev-dependencies]"],
                &["ginnel-benches of benches"],
            ],
        );
    }

    #[test]
    fn crates_that_are_not_apart_are_found_with_the_way_between_them() {
        expect(
            &[("crates/library/library", &["crates/ground/stone"])],
            &[&["crates/faces/app/Cargo.toml", "stones are heavy", "app uses library uses stone"]],
        );
    }
}
