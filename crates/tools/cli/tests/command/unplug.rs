//! A real QEMU with the printed arguments lets go of each device that it can let go of at all.

use kit::world::World;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// A QEMU that runs no guest, with its control connection.
struct Qemu {
    process: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Qemu {
    fn start(machine: &str, arguments: &str) -> Self {
        let mut process = Command::new("qemu-system-x86_64")
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-accel", "tcg", "-S"])
            .args(["-M", machine, "-qmp", "stdio"])
            .args(arguments.split_whitespace())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (to, from) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        let mut qemu = Self { process, to, from: BufReader::new(from) };
        qemu.ask(json!({"execute": "qmp_capabilities"})).unwrap();
        qemu
    }

    /// Returns the answer to a command: what it returns, or the description of its error.
    fn ask(&mut self, command: Value) -> Result<Value, String> {
        writeln!(self.to, "{command}").unwrap();
        loop {
            let mut line = String::new();
            assert!(self.from.read_line(&mut line).unwrap() > 0, "QEMU ended");
            let said: Value = serde_json::from_str(&line).unwrap();
            if let Some(error) = said.get("error") {
                return Err(error["desc"].as_str().unwrap().into());
            } else if let Some(value) = said.get("return") {
                return Ok(value.clone());
            }
        }
    }

    /// Asks for each device without a name to be unplugged. Returns their models and the answers, in the order of the models.
    fn unplug_all(&mut self) -> Vec<(String, Result<(), String>)> {
        const FOLDER: &str = "/machine/peripheral-anon";
        let list = self.ask(json!({"execute": "qom-list", "arguments": {"path": FOLDER}})).unwrap();
        let mut answers = Vec::new();
        for entry in list.as_array().unwrap() {
            let kind = entry["type"].as_str().unwrap();
            let Some(model) = kind.strip_prefix("child<") else { continue };
            let id = format!("{FOLDER}/{}", entry["name"].as_str().unwrap());
            let answer = self.ask(json!({"execute": "device_del", "arguments": {"id": id}}));
            answers.push((model.trim_end_matches('>').to_owned(), answer.map(drop)));
        }
        answers.sort();
        answers
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn a_qemu_with_the_printed_arguments_can_unplug_each_device() {
    kit::require_programs!(&["qemu-system-x86_64"]);
    let bars = "[segment.old]\nsize = '4M'\nmemory = 'bar'\nmembers = ['host', 'vm-a']\n\
                [segment.news]\nsize = '8M'\nmemory = 'bar'\nmembers = ['host']\nreaders = ['vm-a']\n";
    let world = World::configured("size = '64M'", bars);
    // The last case is the reason for the ports.
    for (printed_for, machine, works) in [("q35", "q35", true), ("pc", "pc", true), ("pc", "q35", false)] {
        let line = format!("qemu-args vm-a --quiet --memory 64M --machine {printed_for}");
        let mut qemu = Qemu::start(machine, &world.good(&line).out);
        let answers = qemu.unplug_all();
        let models: Vec<&str> = answers.iter().map(|(model, _)| model.as_str()).collect();
        assert_eq!(models, ["ivshmem-doorbell", "ivshmem-plain", "ivshmem-plain", "virtio-pmem-pci"]);
        for (model, answer) in answers {
            let told = format!("{model} on {machine}, printed for {printed_for}: {answer:?}");
            let refused = answer.as_ref().is_err_and(|error| error.contains("does not support hotplugging"));
            assert_eq!(refused, !works, "{told}");
            // QEMU never lets go of DAX, wherever the device is.
            assert_eq!(answer.is_ok(), works && model.starts_with("ivshmem"), "{told}");
        }
    }
}
