//! Notification by event index (2.7.10, 2.8.14).

/// Returns whether `event` is among the positions passed from `old` up to but not including `new` (2.7.7.2,
/// `vring_need_event`).
#[inline]
pub(crate) fn passed(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::passed;

    #[test]
    fn an_event_is_passed_once() {
        for start in [0u16, 1, 0x7fff, 0xfff0, 0xffff] {
            for step in [1u16, 2, 7, 32768] {
                let (old, new) = (start, start.wrapping_add(step));
                for i in 0..step.min(64) {
                    assert!(passed(old.wrapping_add(i), new, old));
                }
                assert!(!passed(new, new, old) && !passed(old.wrapping_sub(1), new, old));
            }
            assert!(!passed(start, start, start), "nothing new");
        }
    }
}
