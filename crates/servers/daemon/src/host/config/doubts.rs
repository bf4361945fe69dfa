//! Declarations that can be obeyed, and that nobody can mean. A daemon that starts obeys them and says so: VMs may need it. Whoever only
//! checks a file, or declares something at run time, is refused.

use super::{Config, Segment, Vm};
use ginnel_broker::declared::OnHang;
use ginnel_config::{Mode, Problem};

/// The bits of a mode that let a user open the file, or connect to the socket.
const OWNER: u32 = 0o600;
const OTHERS: u32 = 0o006;

impl Config {
    /// Returns the declarations of the file that nobody can mean.
    pub fn doubts(&self) -> Vec<Problem> {
        let place = |key: &str| format!("{}: {key}", self.file.display());
        let socket =
            Mode(self.socket_mode).doubt_of_socket(&place("daemon.socket_mode"), "no program can attach");
        let vms = self.vms.values().filter_map(|vm| doubt_of_vm(vm, &place(&format!("vm.{}", vm.name))));
        let segments = self.segments.values();
        let segments = segments
            .filter_map(|segment| doubt_of_segment(segment, &place(&format!("segment.{}", segment.name))));
        socket.into_iter().chain(vms).chain(segments).collect()
    }
}

/// Returns what nobody can mean about a VM.
pub fn doubt_of_vm(vm: &Vm, place: &str) -> Option<Problem> {
    if vm.on_hang == OnHang::Fence && vm.hang_after.is_none() {
        let what = "\"fence\" without hang_after: no guest ever counts as hanging, so nothing is fenced";
        return Some(Problem::new(
            format!("{place}.on_hang"),
            what,
            "write hang_after = SECONDS too, or leave on_hang out",
        ));
    }
    let place = format!("{place}.socket_mode");
    if vm.socket_mode & OTHERS != 0 {
        let what = format!("{:04o}: every user of this host could act as this VM", vm.socket_mode);
        return Some(Problem::new(place, what, "write 0660, and the user or group of its QEMU"));
    }
    Mode(vm.socket_mode).doubt_of_socket(&place, "its QEMU cannot connect, unless it is root's")
}

/// Returns what nobody can mean about a segment.
pub fn doubt_of_segment(segment: &Segment, place: &str) -> Option<Problem> {
    let (mode, place) = (segment.mode, format!("{place}.mode"));
    if mode & OTHERS != 0 {
        let what = format!("{mode:04o}: every user of this host could open the segment's file");
        return Some(Problem::new(
            place,
            what,
            "write 0660, and the user or group of QEMU; programs of the host need allow_users",
        ));
    }
    if mode & OWNER != OWNER {
        let what = format!("{mode:04o}: its owner cannot open the segment's file for reading and writing");
        return Some(Problem::new(place, what, "write 0660 or 0600"));
    }
    Mode(mode).doubt(&place)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn doubts(text: &str) -> Vec<String> {
        let config = Config::parse(text, Path::new("f")).unwrap();
        config.doubts().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn what_nobody_can_mean_is_told() {
        let segment =
            |mode: &str| format!("[segment.web]\nsize = \"4M\"\nmembers = [\"host\"]\nmode = \"{mode}\"\n");
        for (text, part) in [
            ("[vm.a]\non_hang = \"fence\"\n".to_owned(), "f: vm.a.on_hang"),
            ("[vm.a]\nsocket_mode = \"0666\"\n".to_owned(), "every user of this host could act"),
            ("[vm.a]\nsocket_mode = \"0000\"\n".to_owned(), "its QEMU cannot connect"),
            ("[vm.a]\nsocket_mode = \"0770\"\n".to_owned(), "write 0660"),
            ("[daemon]\nsocket_mode = \"0000\"\n".to_owned(), "no program can attach"),
            ("[daemon]\nsocket_mode = \"0777\"\n".to_owned(), "write 0666"),
            (segment("0777"), "every user of this host could open"),
            (segment("0000"), "its owner cannot open"),
            (segment("0440"), "its owner cannot open"),
            (segment("0670"), "write 0660"),
        ] {
            let doubts = doubts(&text);
            assert!(doubts.len() == 1 && doubts[0].contains(part), "{text}: {doubts:?}");
        }
        let good = format!("{}[vm.a]\nhang_after = 3\non_hang = \"fence\"\nhome = \"4M\"\n", segment("0600"));
        assert_eq!(doubts(&good), [] as [String; 0]);
    }
}
