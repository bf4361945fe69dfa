//! The answers to operators' requests. The control thread gives them, so they come also while the session waits for a
//! disk.

use super::{Server, Shared};
use crate::backend::Backend;
use crate::control::Handler;
use crate::disk::Disk;
use crate::worker::Order;
use ginnel_volume_control::config::Device;
use ginnel_volume_control::{Answer, Controller, DiskStat, Dump, FrontEnd, QueueState, Request, Stat};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, mpsc};
use std::time::Duration;
use tracing::{info, warn};

impl Server {
    /// Returns the part that answers operators, from any thread.
    pub fn handler(&self) -> Arc<dyn Handler> {
        self.shared.clone()
    }
}

impl Handler for Shared {
    fn answer(&self, request: Request) -> Answer {
        match request {
            Request::Stat => Answer::Stat(Box::new(self.stat())),
            Request::Limit(change) => {
                let mut limits = self.limits.lock().unwrap_or_else(PoisonError::into_inner);
                *limits = change.of(*limits);
                self.limiter.set(*limits);
                // Requests that wait because of an old limit are looked at again.
                self.workers.iter().for_each(|worker| worker.send(Order::Wake));
                Answer::Limits(*limits)
            }
            Request::Resize { disk, size } => match self.resize(disk as usize, size.map(|s| s.0)) {
                Ok(bytes) => Answer::Size(bytes),
                Err(why) => Answer::Error(why),
            },
            Request::ResetErrors { disk } => match self.reset_errors(disk as usize) {
                Ok(lost) => Answer::Reset(lost),
                Err(why) => Answer::Error(why),
            },
            Request::Resume { fail } => {
                let held = self.counters.queue_stats().iter().map(|queue| queue.held).sum();
                self.workers.iter().for_each(|worker| worker.send(Order::Resume { fail }));
                Answer::Resumed(held)
            }
            Request::Dump => Answer::Dump(self.dump()),
        }
    }
}

impl Shared {
    /// Accepts the loss of earlier writes. Returns whether there was one to accept.
    fn reset_errors(&self, index: usize) -> Result<bool, String> {
        let (disk, backend) = self.disk(index)?;
        let lost = disk.has_lost();
        let accept = || backend.take_errors().map_err(|e| format!("the disk still fails: {e}"));
        disk.forget_losses(accept, || self.started.elapsed().as_nanos() as u64)?;
        if lost {
            warn!(disk = index, "an operator has accepted the loss of writes: flushes succeed again");
        }
        Ok(lost)
    }

    fn disk(&self, index: usize) -> Result<(&Disk, &Backend), String> {
        match (self.disks.get(index), self.backends.get(index)) {
            (Some(disk), Some(backend)) => Ok((disk, backend)),
            _ => Err(format!("there is no disk {index}; there are {}", self.disks.len())),
        }
    }

    fn resize(&self, index: usize, bytes: Option<u64>) -> Result<u64, String> {
        let (disk, backend) = self.disk(index)?;
        if let Some(bytes) = bytes
            && (bytes == 0 || !bytes.is_multiple_of(u64::from(disk.block_size)))
        {
            return Err(format!("{bytes} bytes are not a multiple of the sector size, {}", disk.block_size));
        }
        let resize = || backend.resize(bytes, disk.bytes());
        let bytes = self.ownership.as_owner(index, resize).unwrap_or_else(|| {
            Err("no VM runs on that image here: resize it where one does, and this volume finds its size later".into())
        })?;
        self.take_size(index, bytes);
        Ok(disk.bytes())
    }

    /// Notes the size of a disk. If it has changed, the front end is told.
    pub(super) fn take_size(&self, index: usize, bytes: u64) {
        let disk = &self.disks[index];
        let before = disk.bytes();
        disk.set_bytes(bytes);
        if disk.bytes() != before {
            self.resized[index].store(true, Ordering::Release);
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
            info!(disk = index, bytes = disk.bytes(), "the size of a disk has changed");
        }
    }

    /// Asks the main thread for the state of the controller. `None` if it does not answer within five seconds.
    fn controller(&self) -> Option<Controller> {
        let (answer, controller) = mpsc::sync_channel(1);
        self.dumps.lock().unwrap_or_else(PoisonError::into_inner).push(answer);
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        controller.recv_timeout(Duration::from_secs(5)).ok()
    }

    fn dump(&self) -> Dump {
        let front_end_info = self.front_end_info().clone();
        let mut queues: Vec<QueueState> = self.workers.iter().flat_map(|worker| worker.dump()).collect();
        for queue in 0..self.queues {
            if queues.iter().all(|state| state.queue != queue) {
                let (runs, size) = front_end_info.rings.get(usize::from(queue)).copied().unwrap_or_default();
                let state = match (runs, size) {
                    (true, _) => "its thread does not answer",
                    (false, 0) => "not set up",
                    (false, _) => "stopped",
                };
                let thread = usize::from(queue) % self.workers.len();
                queues.push(QueueState { queue, thread, state: state.into(), size, ..QueueState::default() });
            }
        }
        queues.sort_by_key(|state| state.queue);
        Dump {
            volume: self.config.name.clone(),
            features: front_end_info.features,
            protocol_features: front_end_info.protocol,
            controller: if self.config.device == Device::Nvme { self.controller() } else { None },
            queues,
        }
    }

    fn stat(&self) -> Stat {
        let front_end_info = self.front_end_info().clone();
        let config = &self.config;
        let disks =
            config.disks.iter().zip(&self.disks).zip(&self.backends).map(|((spec, disk), backend)| {
                DiskStat {
                    disk: spec.lun,
                    backend: spec.backend,
                    path: spec.path.as_ref().map(|path| path.display().to_string()),
                    size: disk.bytes(),
                    sector: disk.block_size,
                    read_only: disk.read_only,
                    serial: spec.serial.clone(),
                    direct: backend.is_direct(),
                    write_back: disk.write_back(),
                    lost_writes: disk.has_lost(),
                    on_error: spec.on_error,
                }
            });
        Stat {
            volume: config.name.clone(),
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            uptime: self.started.elapsed().as_secs_f64(),
            device: config.device,
            socket: config.socket.display().to_string(),
            vm: config.vm.clone(),
            holder: front_end_info.holder,
            front_end: front_end_info
                .front_end
                .map(|(pid, since)| FrontEnd { pid, since: since.elapsed().as_secs_f64() }),
            sessions: front_end_info.sessions,
            wait: config.wait,
            sandbox: front_end_info.sandbox,
            limits: *self.limits.lock().unwrap_or_else(PoisonError::into_inner),
            disks: disks.collect(),
            threads: self.counters.thread_stats(&config.cpus),
            queues: self.counters.queue_stats(),
            operations: self.counters.operation_stats(),
        }
    }
}
