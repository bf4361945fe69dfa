//! Lets a test that cannot run on this machine say so where the summary of a run counts it.
//!
//! A skip is a line `SKIPPED program::test: reason`. It goes to standard error, past the test runner, which would swallow it, and into the
//! file that `GINNEL_SKIPS` names, which `scripts/test` counts. With `GINNEL_NO_SKIP=1` in the environment, the test fails instead.
//!
//! This is the only way to skip a test: `tests/architecture` fails if other code prints such a line.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;

/// Ends the test unless the condition holds. The test returns nothing, or a `Result<(), _>`.
///
/// ```
/// fn counts_numa_nodes() -> Result<(), std::io::Error> {
///     kit::require!(std::path::Path::new("/sys/devices/system/node").exists(), "no NUMA nodes in {}", "/sys");
///     Ok(())
/// }
/// ```
#[macro_export]
macro_rules! require {
    ($condition:expr, $($reason:tt)+) => {
        if !$condition {
            $crate::skip!($($reason)+);
            return $crate::skip::Passed::passed();
        }
    };
}

/// Ends the test unless these programs are installed. The test returns nothing, or a `Result<(), _>`.
///
/// ```
/// kit::require_programs!(&["sh", "true"]);
/// ```
#[macro_export]
macro_rules! require_programs {
    ($programs:expr) => {
        if let Some(missing) = $crate::skip::missing($programs) {
            $crate::skip!("{missing} is not installed: `scripts/setup test` installs it");
            return $crate::skip::Passed::passed();
        }
    };
}

/// Records that the test is skipped, or that it leaves out a part. For functions that return to the test what is missing; a test itself
/// uses [`require!`].
#[macro_export]
macro_rules! skip {
    ($($reason:tt)+) => {{
        fn here() {}
        $crate::skip::record(std::any::type_name_of_val(&here), &format!($($reason)+));
    }};
}

/// Makes two tests of the test program in which it stands: that a skip in it is recorded, and that it fails with `GINNEL_NO_SKIP=1`.
/// Each test program that can skip a test calls this once, in its root module or in a module of its own.
#[macro_export]
macro_rules! test_that_skips_are_seen {
    () => {
        mod skips {
            #[test]
            fn requires_the_impossible_on_demand() {
                $crate::require!(std::env::var_os("KIT_IMPOSSIBLE").is_none(), "no {} wishes", 3);
            }

            #[test]
            fn are_seen() {
                fn here() {}
                let module = std::any::type_name_of_val(&here).trim_end_matches("::are_seen::here");
                $crate::skip::check(&format!("{module}::requires_the_impossible_on_demand"));
            }
        }
    };
}

/// What a skipped test returns.
pub trait Passed {
    /// Returns the value of a test that passes.
    fn passed() -> Self;
}

impl Passed for () {
    fn passed() {}
}

impl<E> Passed for Result<(), E> {
    fn passed() -> Self {
        Ok(())
    }
}

/// Returns the first of these programs that is not installed, for tests of unmodified programs. It is looked for in the folders of the
/// `PATH`, and in those of programs for root, which are not in the `PATH` of other users.
pub fn missing<'a>(programs: &[&'a str]) -> Option<&'a str> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders: Vec<_> =
        std::env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from)).collect();
    programs.iter().copied().find(|name| !folders.iter().any(|at| at.join(name).exists()))
}

/// Returns the name of the test program, without the hash that cargo appends.
fn this_program() -> String {
    let path = std::env::current_exe().expect("this executable has a path");
    let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    name.rsplit_once('-').map_or(name.clone(), |(name, _)| name.to_owned())
}

#[doc(hidden)]
pub fn record(here: &str, reason: &str) {
    // The test runner names the thread of a test after the test, unless it runs one test at a time.
    let thread = std::thread::current();
    let test = match thread.name() {
        Some(name) if name != "main" => name,
        _ => here.trim_end_matches("::here").trim_end_matches("::{{closure}}"),
    };
    // Several programs may have a test of this name.
    let line = format!("SKIPPED {}::{test}: {}\n", this_program(), reason.trim().replace('\n', " "));
    if let Some(file) = std::env::var_os("GINNEL_SKIPS") {
        // One write, because several processes append.
        let appended = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&file)
            .and_then(|mut to| to.write_all(line.as_bytes()));
        appended.unwrap_or_else(|error| panic!("GINNEL_SKIPS={}: {error}: {line}", file.display()));
    }
    // Not eprint, because the test runner hides its output when a test passes.
    let _ = std::io::stderr().write_all(line.as_bytes());
    // Last, because somebody may swallow this panic, and the summary then fails because of the line.
    let forbidden = std::env::var_os("GINNEL_NO_SKIP").is_some_and(|value| value == "1");
    assert!(!forbidden, "{} (GINNEL_NO_SKIP=1)", line.trim());
}

/// Runs a test of this program that skips itself when `KIT_IMPOSSIBLE` is set. Panics if the skip cannot be seen, or does not fail on
/// demand.
#[doc(hidden)]
pub fn check(test: &str) {
    // The name of a test is its path without the crate.
    let (_, test) = test.split_once("::").expect("a path");
    let file =
        std::env::temp_dir().join(format!("kit-skips-{}-{}", std::process::id(), test.replace("::", "-")));
    let run = |no_skip: &str| {
        std::process::Command::new(std::env::current_exe().expect("a test program"))
            .args(["--exact", test, "--test-threads=2"])
            .env("KIT_IMPOSSIBLE", "1")
            .env("GINNEL_SKIPS", &file)
            .env("GINNEL_NO_SKIP", no_skip)
            .output()
            .expect("the test program runs")
    };
    let skipped = run("0");
    let recorded = std::fs::read_to_string(&file).unwrap_or_default();
    let _ = std::fs::remove_file(&file);
    let line = format!("SKIPPED {}::{test}: no 3 wishes\n", this_program());
    assert!(skipped.status.success(), "{skipped:?}");
    assert!(String::from_utf8_lossy(&skipped.stdout).contains("1 passed"), "{skipped:?}");
    assert_eq!(String::from_utf8_lossy(&skipped.stderr), line);
    assert_eq!(recorded, line);
    let failed = run("1");
    assert!(!failed.status.success(), "a skipped test passes with GINNEL_NO_SKIP=1: {failed:?}");
    assert!(String::from_utf8_lossy(&failed.stdout).contains("1 failed"), "{failed:?}");
    assert!(std::fs::remove_file(&file).is_ok(), "whoever swallows the failure hides the skip");
}

#[cfg(test)]
mod tests {
    crate::test_that_skips_are_seen!();

    #[test]
    fn a_requirement_that_is_met_skips_nothing() {
        fn test() -> Result<(), String> {
            crate::require!(1 + 1 == 2, "arithmetic of {}", 2);
            Err("went on".into())
        }
        assert_eq!(test(), Err("went on".into()));
    }

    #[test]
    fn a_program_that_no_one_has_is_missing() {
        assert_eq!(super::missing(&["/bin/sh", "/bin/no-such-program"]), Some("/bin/no-such-program"));
        assert_eq!(super::missing(&["sh", "no-such-program", "nor-this"]), Some("no-such-program"));
        assert_eq!(super::missing(&["sh"]), None);
    }
}
