//! Waits for conditions of which nobody sends a notification.

use anyhow::{Result, bail};
use std::thread;
use std::time::{Duration, Instant};

/// Checks the condition again and again until it holds. Fails if the condition returns an error or does not hold in time.
pub fn wait_until(what: &str, timeout: Duration, mut condition: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + timeout;
    while !condition()? {
        if Instant::now() > deadline {
            bail!("not within {timeout:?}: {what}");
        }
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_until_ends_with_the_condition_the_timeout_or_an_error() {
        let mut looks = 0;
        let third = || {
            looks += 1;
            Ok(looks == 3)
        };
        wait_until("third look", Duration::from_secs(20), third).unwrap();
        assert_eq!(looks, 3);
        let error = wait_until("a miracle", Duration::from_millis(1), || Ok(false)).unwrap_err().to_string();
        assert!(error.contains("a miracle"), "{error}");
        assert!(wait_until("luck", Duration::from_secs(20), || bail!("broken")).is_err());
    }
}
