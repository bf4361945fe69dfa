//! What is said of a folder for which a process has waited in vain. Nobody can see who holds its lock, or whether anybody does.

/// Says that this folder does not answer, and why that may be.
pub fn no_answer(folder: &str) -> String {
    format!("{folder} does not answer: a program may hold its lock, or the machine is very busy")
}

/// What to do about it.
pub const FIX: &str = "if it goes on, end the programs of other users that use this file system, or give the folder a file system of its own";
