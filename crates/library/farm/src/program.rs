//! Work that an external program does: it reads a piece from its standard input, and writes the result to its standard
//! output.

use ginnel::{Mapping, SharedSlice};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};

/// The number of bytes of the program's standard error that are kept for an error message.
const LAST_WORDS: u64 = 512;

/// Runs a program once, and waits until it ends. The kernel copies `data` from the ring to the program's standard input.
/// The program's standard output is appended to `result`. The program need not read all of its input.
///
/// Returns an error, as a text for the manager, if the program does not start, exits with a status other than 0, or
/// writes more than `longest` bytes.
pub fn run_program(
    command: &mut Command,
    data: SharedSlice<'_, Mapping>,
    result: &mut Vec<u8>,
    longest: usize,
) -> Result<(), String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let failed = |what: &str, error: io::Error| format!("{name}: {what}: {error}");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| failed("cannot start", error))?;
    let (input, output, complaints) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    // All three pipes are served at the same time. Otherwise the program could block on a full pipe while this thread
    // waits for another one.
    let (said, written, complained) = std::thread::scope(|scope| {
        let said = scope.spawn(|| read(output, longest as u64 + 1));
        let complained = scope.spawn(|| {
            let mut complaints = complaints;
            let first = read(complaints.as_mut(), LAST_WORDS);
            let _ = complaints.map(|mut rest| io::copy(&mut rest, &mut io::sink()));
            first
        });
        let written = input.map_or(Ok(()), |input| write(data, input.as_fd()));
        (said.join(), written, complained.join())
    });
    if !matches!(&said, Ok(Ok(bytes)) if bytes.len() <= longest) {
        // Its output is no longer read, so the program could block for ever on a full pipe.
        let _ = child.kill();
    }
    let status = child.wait().map_err(|error| failed("cannot wait for it", error))?;
    let said = said
        .map_err(|_| format!("{name}: a thread panicked"))?
        .map_err(|error| failed("its output", error))?;
    if said.len() > longest {
        return Err(format!(
            "{name}: its output has more than {longest} bytes, which is what the channel takes"
        ));
    }
    if !status.success() {
        let complained = complained.ok().and_then(Result::ok).unwrap_or_default();
        let words = String::from_utf8_lossy(&complained);
        return Err(format!("{name}: {status}: {}", words.trim()));
    }
    written.map_err(|error| failed("its input", error))?;
    result.extend_from_slice(&said);
    Ok(())
}

fn read(pipe: Option<impl Read>, longest: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe {
        pipe.take(longest).read_to_end(&mut bytes)?;
    }
    Ok(bytes)
}

fn write(data: SharedSlice<'_, Mapping>, pipe: std::os::fd::BorrowedFd<'_>) -> io::Result<()> {
    let mut written = 0;
    while written < data.len() {
        match data.skip(written).write_to(pipe) {
            Ok(n) => written += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // The program has closed its standard input, because it needs no more of it.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(script: &str, bytes: &[u8], longest: usize) -> Result<Vec<u8>, String> {
        let memory = Mapping::anonymous(1 << 20).unwrap();
        let slice = SharedSlice::new(&memory, 0, bytes.len());
        slice.write(0, bytes);
        let mut result = Vec::new();
        run_program(Command::new("/bin/sh").args(["-c", script]), slice, &mut result, longest)
            .map(|()| result)
    }

    #[test]
    fn a_program_gets_the_piece_and_gives_the_result() {
        // Both the input and the output are larger than a pipe's buffer.
        let bytes: Vec<u8> = (0..300_000u32).map(|n| (n * 7) as u8).collect();
        assert_eq!(run("cat", &bytes, 1 << 20).unwrap(), bytes);
        assert_eq!(run("head -c 3", &bytes, 1 << 20).unwrap(), &bytes[..3], "it need not read all");
        assert_eq!(run("wc -c", &[], 100).unwrap().trim_ascii(), b"0");
    }

    #[test]
    fn errors_are_reported() {
        let bytes = [0; 1000];
        assert!(run("echo broken >&2; exit 3", &bytes, 10).unwrap_err().contains("3: broken"));
        assert!(run("cat", &bytes, 999).unwrap_err().contains("more than 999 bytes"));
        assert!(run("cat; cat /dev/zero", &bytes, 2000).unwrap_err().contains("more than 2000 bytes"));
        assert!(run("kill -9 $$", &bytes, 10).unwrap_err().contains("signal: 9"));
        let memory = Mapping::anonymous(4096).unwrap();
        let slice = SharedSlice::new(&memory, 0, 8);
        let error = run_program(&mut Command::new("/no/such"), slice, &mut Vec::new(), 1).unwrap_err();
        assert!(error.contains("/no/such: cannot start"), "{error}");
    }
}
