//! Where the preload library is, and how the dynamic loader is told.

use anyhow::{Context, Result, bail};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Of the dynamic loader, ld.so(8).
pub const VARIABLE: &str = "LD_PRELOAD";

/// Where the library is, if it is not beside this command.
const PLACE: &str = "GINNEL_PRELOAD";

/// Seen from the folder of this command: as cargo builds it, and as it is installed.
const PLACES: [&str; 3] =
    ["libginnel_preload.so", "../lib/ginnel/libginnel-preload.so", "../lib/libginnel-preload.so"];

/// Finds the library: where the user says, or beside this command.
pub fn find() -> Result<PathBuf> {
    if let Some(place) = std::env::var_os(PLACE).filter(|place| !place.is_empty()) {
        let place = PathBuf::from(place);
        if !place.is_file() {
            bail!("{PLACE} names {}, which is no file", place.display());
        }
        return whole(&place);
    }
    let command = std::env::current_exe().context("cannot tell where this command is")?;
    let folder = command.parent().unwrap_or(Path::new("/"));
    let places = PLACES.map(|place| folder.join(place));
    match places.iter().find(|place| place.is_file()) {
        Some(place) => whole(place),
        None => bail!(
            "the library that takes connections to shared memory is missing: there is no {}; install it (`make \
             install`), or say where it is: {PLACE}=FILE",
            places.map(|place| place.display().to_string()).join(", no ")
        ),
    }
}

fn whole(place: &Path) -> Result<PathBuf> {
    place.canonicalize().with_context(|| format!("cannot tell where {} is", place.display()))
}

/// The variable with the library as the first one, before those that it names already.
pub fn first(library: &Path, others: Option<OsString>) -> Result<OsString> {
    let between = |byte: &u8| matches!(byte, b' ' | b':');
    if library.as_os_str().as_bytes().iter().any(between) {
        bail!(
            "{VARIABLE} cannot name {}, because spaces and colons separate its entries; copy the library to another \
             place, and name that in {PLACE}",
            library.display()
        );
    }
    let library = library.as_os_str().as_bytes();
    let others = others.unwrap_or_default();
    let rest = others.as_bytes().split(between).filter(|entry| !entry.is_empty() && *entry != library);
    let all: Vec<_> = std::iter::once(library).chain(rest).collect();
    Ok(OsStr::from_bytes(&all.join(&b':')).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_the_first_and_others_stay() {
        let first = |others: Option<&str>| {
            first(Path::new("/l/x.so"), others.map(OsString::from)).unwrap().into_string().unwrap()
        };
        assert_eq!(first(None), "/l/x.so");
        assert_eq!(first(Some("")), "/l/x.so");
        assert_eq!(first(Some("libjemalloc.so /a/b.so:c.so ")), "/l/x.so:libjemalloc.so:/a/b.so:c.so");
        assert_eq!(first(Some("a.so:/l/x.so")), "/l/x.so:a.so");
    }

    #[test]
    fn a_place_that_the_loader_cannot_be_told_is_an_error() {
        for place in ["/a b/x.so", "/a:b/x.so"] {
            let error = first(Path::new(place), None).unwrap_err().to_string();
            assert!(error.contains(place) && error.contains(PLACE), "{error}");
        }
    }
}
