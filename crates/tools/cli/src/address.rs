//! Addresses of the form `SEGMENT/NAME`.

use crate::Usage;
use anyhow::Result;
use ginnel_layout::Name;

/// Splits an address into its segment and its name, and checks both.
pub fn split(address: &str) -> Result<(&str, &str)> {
    let bad = |why: String| {
        Usage(format!("{address:?} is not an address: {why}; write SEGMENT/NAME, such as web/echo"))
    };
    let (segment, name) = address.split_once('/').ok_or_else(|| bad("a slash is missing".into()))?;
    for name in [segment, name] {
        Name::new(name).map_err(|reason| bad(reason.to_string()))?;
    }
    Ok((segment, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_names() {
        assert_eq!(split("web/cp@vm-a").unwrap(), ("web", "cp@vm-a"));
        for bad in ["web", "/x", "web/", "a/b/c", "a b/c"] {
            assert!(split(bad).unwrap_err().is::<Usage>(), "{bad}");
        }
    }
}
