//! Two VMs that run the host's programs: a server in one VM, its clients in the other one. Their reports show what became of
//! the connections.

use anyhow::{Context, Result, ensure};
use ginnel_report::{Record, Report};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use vmtest::installation::{Installation, Plan, program};
use vmtest::{Job, Output, TestBed, Vm};

/// How long a program may take.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// The modes of the library with which programs are tried.
pub const MODES: [&str; 2] = ["auto", "eager"];
/// The distribution's Python, even if another one is in the path.
pub const PYTHON: &str = "/usr/bin/python3";
/// The stage's folder as both VMs see it. Reports are not in it: each VM has its own.
pub const FILES: &str = "/tmp/files";

/// The VMs.
pub struct Stage<'b> {
    clients: Vm,
    servers: Vm,
    files: PathBuf,
    /// The number of runs so far. Each run of a program has its own report, and each server its own port.
    runs: u32,
    ports: u16,
    _daemons: [Job; 2],
    _ginnel: Installation<'b>,
}

impl<'b> Stage<'b> {
    pub fn new(bed: &'b TestBed) -> Result<Self> {
        let ginnel = Plan::new(bed).vm("a").vm("b").segment("web", 128, &["a", "b"]).start()?;
        let files = bed.dir().join("files");
        fs::create_dir(&files)?;
        let start = |name| {
            let vm = ginnel.vm(name)?.memory_mib(1024).host_files().share(&files, FILES);
            vm.library(program("libginnel_preload.so")?).start()
        };
        let (clients, servers) = (start("a")?, start("b")?);
        clients.wait_ready()?;
        servers.wait_ready()?;
        // Without this option, connections of sshd stay on TCP.
        let start_guest = |vm| ginnel.start_guest_with(vm, "--exclude ''");
        let daemons = [start_guest(&clients)?, start_guest(&servers)?];
        // Not only root may attach, because PostgreSQL refuses to run as root.
        servers.run("chmod 666 /run/ginnel/ginnel.sock")?.ok()?;
        Ok(Self { clients, servers, files, runs: 0, ports: 7100, _daemons: daemons, _ginnel: ginnel })
    }

    /// Runs a server and its clients.
    pub fn play(&mut self, mode: &'static str, play: fn(&mut Play<'_, '_>) -> Result<()>) -> Result<()> {
        let mut scene = Play { stage: self, mode, server: None, clients: Vec::new() };
        let result = play(&mut scene);
        let Play { server, .. } = scene;
        // After an error the server still runs.
        if let Some((job, _)) = server {
            let _ = job.kill(9);
            if result.is_err() {
                println!("the server has said: {:?}", job.said());
            }
        }
        result
    }
}

/// A server and its clients.
pub struct Play<'s, 'b> {
    stage: &'s mut Stage<'b>,
    pub mode: &'static str,
    server: Option<(Job, u32)>,
    /// The numbers of the clients' runs.
    clients: Vec<u32>,
}

impl Play<'_, '_> {
    /// Returns the folder that VMs have as [`FILES`].
    pub fn files(&self) -> &Path {
        &self.stage.files
    }

    /// Returns the server's address.
    pub fn host(&self) -> String {
        self.stage.servers.address().map(|address| address.to_string()).unwrap_or_default()
    }

    /// Returns the number of the next run, and the command line that runs a shell command in the stage's folder.
    fn run(&mut self, command: &str) -> Result<(u32, String)> {
        self.stage.runs += 1;
        let n = self.stage.runs;
        let script = format!(
            "cd {FILES} && > /tmp/report.{n} && chmod 666 /tmp/report.{n} || exit\n\
             export HOME=/tmp GINNEL_PRELOAD=/usr/local/lib/libginnel_preload.so\n\
             exec ginnel run --mode {} --report=/tmp/report.{n} -- {command}\n",
            self.mode
        );
        fs::write(self.files().join(format!("run.{n}")), script)?;
        Ok((n, format!("exec chroot /host sh {FILES}/run.{n}")))
    }

    /// Starts a server and waits until it listens at this port.
    pub fn serve(&mut self, port: u16, command: &str) -> Result<()> {
        let (n, line) = self.run(command)?;
        let job = self.stage.servers.spawn(&line)?;
        self.server = Some((job, n));
        let listens = format!(
            "until netstat -ltn | grep -q :{port}; do [ -d /proc/{} ] || exit 1; sleep 0.1; done",
            self.job()?.pid()
        );
        let output = self.stage.servers.run_within(PATIENCE, &listens)?;
        ensure!(output.code() == Some(0), "{command} does not listen: {:?}", self.job()?.said());
        Ok(())
    }

    /// Returns a port that no server had before.
    pub fn port(&mut self) -> u16 {
        self.stage.ports += 1;
        self.stage.ports
    }

    fn job(&self) -> Result<&Job> {
        Ok(&self.server.as_ref().context("there is no server")?.0)
    }

    /// Returns what the server has printed.
    pub fn said(&self) -> Result<String> {
        let (out, err) = self.job()?.said();
        Ok(out + &err)
    }

    /// Runs a command in the server's VM that prepares something.
    pub fn on_server(&self, command: &str) -> Result<()> {
        self.stage.servers.run_within(PATIENCE, command)?.ok().map(drop)
    }

    /// Runs a client to its end.
    pub fn client(&mut self, command: &str) -> Result<Output> {
        let (n, line) = self.run(command)?;
        self.clients.push(n);
        let output = self.stage.clients.run_within(PATIENCE, &line)?;
        output.ok().with_context(|| command.to_owned())
    }

    /// Does the same as [`Self::client`] for a client that ends after a time. How far its connections come until then depends
    /// on the machine, so the client runs again until this many connections of one run have changed over, and as many of the
    /// server's.
    pub fn client_until_changed(
        &mut self,
        command: &str,
        name: &str,
        least: usize,
        server: &str,
    ) -> Result<Output> {
        let before = changed(&self.of_server()?, server).len();
        let end = Instant::now() + PATIENCE;
        loop {
            let out = self.client(command)?;
            let own = self.of_last_client()?;
            let servers = self.of_server()?;
            let (n, m) = (changed(&own, name).len(), changed(&servers, server).len() - before);
            if n >= least && m >= least {
                return Ok(out);
            }
            ensure!(
                Instant::now() < end,
                "{n} of {name} and {m} of {server} have changed over: {own:#?} {servers:#?}"
            );
        }
    }

    fn report(&self, vm: &Vm, n: u32) -> Result<Vec<Record<'static>>> {
        Ok(Report::read(&vm.read(&format!("/tmp/report.{n}"))?[..])?.connections)
    }

    /// Returns what is known at this moment of the server's connections.
    pub fn of_server(&self) -> Result<Vec<Record<'static>>> {
        let n = self.server.as_ref().context("there is no server")?.1;
        self.report(&self.stage.servers, n)
    }

    /// Returns what is known at this moment of the connections of the client that ran last.
    pub fn of_last_client(&self) -> Result<Vec<Record<'static>>> {
        self.report(&self.stage.clients, *self.clients.last().context("there is no client")?)
    }

    /// Returns what is known at this moment of the clients' connections.
    pub fn of_clients(&self) -> Result<Vec<Record<'static>>> {
        let mut all = Vec::new();
        for n in &self.clients {
            all.extend(self.report(&self.stage.clients, *n)?);
        }
        Ok(all)
    }

    /// Ends the server and waits for its end. Then its report is complete.
    pub fn end(&mut self) -> Result<()> {
        let job = self.job()?;
        job.kill_process(15)?;
        job.wait(PATIENCE).map(drop)
    }
}

/// Returns the connections of a program that have changed over in both directions.
pub fn changed<'a>(connections: &'a [Record<'static>], program: &str) -> Vec<&'a Record<'static>> {
    connections.iter().filter(|record| record.program == program && record.has_changed_over()).collect()
}

/// Checks that at least this many connections of a program have changed over.
pub fn ensure_changed(connections: &[Record<'static>], program: &str, least: usize) -> Result<()> {
    let n = changed(connections, program).len();
    ensure!(n >= least, "{n} of {program} have changed over: {connections:#?}");
    Ok(())
}
