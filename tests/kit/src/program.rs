//! Programs in a test's executable: what a test starts as a process of its own.
//!
//! Such a program lies beside the test that starts it and can use all that the test can, private items included. It is not a test: the
//! test runner does not know it, because it runs before the runner does, when the environment names it.
//!
//! ```
//! kit::program! {
//!     /// Says what it was told.
//!     fn parrot() {
//!         println!("{}", std::env::var("SAY").unwrap());
//!     }
//! }
//!
//! let output = kit::program::command(parrot).env("SAY", "hello").output().unwrap();
//! assert_eq!(output.stdout, b"hello\n");
//! ```
#![allow(unsafe_code)] // Ignores a signal, as the start of a Rust program does.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::{Command, exit};

/// The variable that names the program to run.
const NAME: &str = "KIT_PROGRAM";

/// Makes a function that [`command`] starts as a program. The program ends with status 0 when the function returns, and with status 101
/// when it panics.
#[macro_export]
macro_rules! program {
    ($(#[$meta:meta])* fn $name:ident() $body:block) => {
        $(#[$meta])*
        fn $name() $body

        const _: () = {
            extern "C" fn start() {
                $crate::program::run_if_named($name);
            }
            // The dynamic loader calls the functions of this section before `main`.
            #[allow(unsafe_code)] // The section holds pointers to functions, of which this static is one.
            #[used]
            #[unsafe(link_section = ".init_array")]
            static START: extern "C" fn() = start;
        };
    };
}

/// Returns the command that runs a program of this executable.
pub fn command<F: Fn()>(program: F) -> Command {
    let mut command = Command::new(executable());
    command.env(NAME, std::any::type_name_of_val(&program));
    command
}

/// Makes a command that runs another one, as `env` does, run a program of this executable.
pub fn run_by<F: Fn()>(command: &mut Command, program: F) -> &mut Command {
    command.arg(executable()).env(NAME, std::any::type_name_of_val(&program))
}

fn executable() -> PathBuf {
    std::env::current_exe().expect("this executable has a path")
}

#[doc(hidden)]
pub fn run_if_named<F: Fn()>(program: F) {
    let name = std::any::type_name_of_val(&program);
    if std::env::var_os(NAME).is_none_or(|named| named != name) {
        return;
    }
    // SAFETY: the process has one thread, and the disposition is a constant. Rust does the same before `main`.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    // What this program starts is not this program.
    // SAFETY: the process has one thread, so nobody else reads the environment.
    unsafe { std::env::remove_var(NAME) };
    let ended = catch_unwind(AssertUnwindSafe(program));
    exit(if ended.is_ok() { 0 } else { 101 });
}

#[cfg(test)]
mod tests {
    use super::{command, run_by};
    use std::process::Command;

    crate::program! {
        /// Says hello, and whether it knows its name, which its children must not.
        fn says_hello() {
            println!("hello {:?}", std::env::var_os(super::NAME));
        }
    }

    crate::program! {
        fn panics() {
            panic!("on purpose");
        }
    }

    #[test]
    fn a_program_runs_alone_and_ends_as_its_function_does() {
        let output = command(says_hello).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        assert_eq!(output.stdout, b"hello None\n");
        let output = run_by(&mut Command::new("env"), says_hello).output().unwrap();
        assert_eq!(output.stdout, b"hello None\n");
        let output = command(panics).output().unwrap();
        assert_eq!(output.status.code(), Some(101));
        assert!(String::from_utf8_lossy(&output.stderr).contains("on purpose"), "{output:?}");
        assert!(output.stdout.is_empty(), "the test runner ran too: {output:?}");
    }
}
