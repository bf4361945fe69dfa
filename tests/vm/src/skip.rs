//! Lets a test that cannot run on this machine say so in a line that can be counted.

use std::io::Write;
use std::path::Path;

/// Ends the test, which must return a `Result`, unless the condition holds.
///
/// Prints `SKIPPED test: reason` on standard error, which the test runner does not capture. With `GINNEL_NO_SKIP=1` in the
/// environment, a skipped test fails instead.
///
/// ```
/// fn counts_numa_nodes() -> anyhow::Result<()> {
///     vmtest::require!(std::path::Path::new("/sys/devices/system/node").exists(), "no NUMA nodes in {}", "/sys");
///     Ok(())
/// }
/// ```
#[macro_export]
macro_rules! require {
    ($condition:expr, $($reason:tt)+) => {
        if !$condition {
            fn here() {}
            $crate::skip::skipped(std::any::type_name_of_val(&here), &format!($($reason)+));
            return Ok(());
        }
    };
}

/// Returns the first of these programs that the host does not have, for tests whose VMs run the host's programs
/// ([`crate::VmBuilder::host_files`]).
pub fn missing<'a>(programs: &[&'a str]) -> Option<&'a str> {
    let is_there = |name: &str| ["/usr/bin", "/usr/sbin"].iter().any(|at| Path::new(at).join(name).exists());
    programs.iter().copied().find(|name| !is_there(name))
}

#[doc(hidden)]
pub fn skipped(here: &str, reason: &str) {
    let line = line(here, reason);
    assert!(std::env::var_os("GINNEL_NO_SKIP").is_none_or(|value| value != "1"), "{line} (GINNEL_NO_SKIP=1)");
    // Not eprintln, because the test runner hides its output when a test passes.
    let _ = writeln!(std::io::stderr(), "{line}");
}

fn line(here: &str, reason: &str) -> String {
    let test = here.trim_end_matches("::here").trim_end_matches("::{{closure}}");
    format!("SKIPPED {test}: {reason}")
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    #[test]
    fn a_requirement_that_is_met_skips_nothing() {
        fn test() -> Result<(), String> {
            crate::require!(1 + 1 == 2, "arithmetic of {}", 2);
            Err("went on".into())
        }
        assert_eq!(test(), Err("went on".into()));
    }

    #[test]
    fn a_skipped_test_passes_and_is_seen_or_fails_on_demand() {
        let run = |no_skip: &str| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "skip::tests::requires_the_impossible", "--ignored"])
                .env("GINNEL_NO_SKIP", no_skip)
                .output()
                .unwrap()
        };
        let skipped = run("0");
        let line = "SKIPPED vmtest::skip::tests::requires_the_impossible: no 3 wishes\n";
        assert!(skipped.status.success());
        assert_eq!(String::from_utf8_lossy(&skipped.stderr), line);
        assert!(!run("1").status.success());
    }

    #[test]
    #[ignore = "a part of a_skipped_test_passes_and_is_seen_or_fails_on_demand, which starts it"]
    fn requires_the_impossible() -> Result<(), String> {
        crate::require!(std::path::Path::new("/no/such/lamp").exists(), "no {} wishes", 3);
        Err("went on".into())
    }
}
