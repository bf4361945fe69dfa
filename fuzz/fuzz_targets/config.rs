//! The configuration file: any text is either a configuration or one clear problem.
#![no_main]

use ginnel_daemon::host::config::Config;
use std::path::Path;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Ok(text) = std::str::from_utf8(input) else { return };
    if let Err(problem) = Config::parse(text, Path::new("ginneld.toml")) {
        assert!(!problem.to_string().is_empty());
    }
});
