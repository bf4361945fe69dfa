//! Modes of sockets that nobody can mean.

use ginnel_config::Problem;

/// The bits that let a user connect to a socket.
const WRITE: u32 = 0o222;

/// Returns what nobody can mean about the mode of a socket. If nobody may write to it, there is this `consequence`.
pub fn doubt_of_socket(mode: u32, place: &str, consequence: &str) -> Option<Problem> {
    if mode & WRITE == 0 {
        let what = format!("{mode:04o}: {consequence}, because nobody may write to the socket");
        return Some(Problem::new(place, what, "write 0660, for example"));
    }
    executable(mode, place)
}

/// Returns what nobody can mean about a mode that has more than rights to read and write.
pub fn executable(mode: u32, place: &str) -> Option<Problem> {
    (mode & !0o666 != 0).then(|| {
        let what = format!("{mode:04o}: nobody executes it, and it has no other special bits");
        Problem::new(place, what, format!("write {:04o}", mode & 0o666))
    })
}
