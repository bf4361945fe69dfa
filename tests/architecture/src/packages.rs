//! The packages of the workspace, as cargo sees them.

use crate::tree;
use std::path::Path;
use std::process::Command;

/// A package of the workspace.
#[derive(Debug)]
pub struct Package {
    pub name: String,
    /// Its folder, from the repository's.
    pub folder: String,
    /// The packages of this repository that it uses in any way.
    pub uses: Vec<Use>,
}

/// That a package uses another one.
#[derive(Debug)]
pub struct Use {
    pub name: String,
    pub folder: String,
    /// Whether only tests, examples and benches use it.
    pub for_tests: bool,
}

impl Package {
    /// Returns the folder of `crates` and the name in it, if the package is a crate of the product.
    pub fn place(&self) -> Option<(&str, &str)> {
        place(&self.folder)
    }

    /// Returns what the product, or what builds it, uses.
    pub fn product_uses(&self) -> impl Iterator<Item = &Use> {
        self.uses.iter().filter(|used| !used.for_tests)
    }
}

impl Use {
    /// Returns the name of the crate's room, if it is a crate of the product.
    pub fn room(&self) -> Option<&str> {
        place(&self.folder).map(|(_, name)| name)
    }
}

fn place(folder: &str) -> Option<(&str, &str)> {
    let (folder, name) = folder.strip_prefix("crates/")?.split_once('/')?;
    (!name.contains('/')).then_some((folder, name))
}

/// Asks cargo for the packages of this workspace.
pub fn read() -> Vec<Package> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--format-version", "1", "--offline"])
        .current_dir(tree::root())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("cargo prints JSON");
    let text = |value: &serde_json::Value| value.as_str().map(String::from);
    let folder = |path: &str| {
        let path = Path::new(path).strip_prefix(tree::root()).expect("packages lie in the repository");
        path.to_str().expect("a name").to_string()
    };
    let list = |value: &serde_json::Value| value.as_array().expect("a list").clone();
    let uses = |package: &serde_json::Value| {
        let of_ours = |used: &serde_json::Value| {
            Some(Use {
                folder: folder(used["path"].as_str()?),
                name: text(&used["name"]).expect("a name"),
                for_tests: used["kind"] == "dev",
            })
        };
        list(&package["dependencies"]).iter().filter_map(of_ours).collect()
    };
    list(&metadata["packages"])
        .iter()
        .map(|package| Package {
            name: text(&package["name"]).expect("a name"),
            folder: folder(text(&package["manifest_path"]).expect("a path").trim_end_matches("/Cargo.toml")),
            uses: uses(package),
        })
        .collect()
}
