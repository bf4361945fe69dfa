//! `ginnel volume dump`.

use super::connect;
use super::show::time;
use crate::output::{self, Table};
use anyhow::{Result, bail};
use ginnel_volume_control::{Answer, Controller, Dump, Request, VolumePaths};

/// Shows the state of a volume's queues and of the requests in flight, for example when a guest is stuck.
#[derive(clap::Args)]
pub struct Args {
    /// Name of the volume.
    volume: String,
    /// Print the state as JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(paths: &VolumePaths, args: &Args) -> Result<()> {
    let Answer::Dump(dump) = connect(paths, &args.volume)?.ask(&Request::Dump)? else {
        bail!("the volume's answer is not understood: use the `ginnel` of its version");
    };
    if args.json { output::json(&dump) } else { output::line(page(&dump)) }
}

fn page(dump: &Dump) -> String {
    let is_nvme = dump.controller.is_some();
    let mut queues = Table::new(&[
        "QUEUE",
        "THREAD",
        "STATE",
        "FORMAT",
        "SIZE",
        "DRIVER AT",
        "TAKEN",
        "USED",
        "IN FLIGHT",
        "ARMED",
        "KICKS",
        "CALLS",
        "WAITS FOR LIMIT",
    ]);
    let mut requests = Table::new(&[
        "QUEUE",
        if is_nvme { "COMMAND" } else { "HEAD" },
        "REQUEST",
        "DISK",
        "OFFSET",
        "LENGTH",
        "AGE",
        "WAITS FOR",
    ]);
    let yes = |value| if value { "yes" } else { "no" }.to_owned();
    for q in &dump.queues {
        queues.row([
            q.queue.to_string(),
            q.thread.to_string(),
            q.state.clone(),
            q.format.clone(),
            q.size.to_string(),
            q.driver_index.to_string(),
            q.taken_index.to_string(),
            if is_nvme { "-".into() } else { q.used_index.to_string() },
            q.in_flight.len().to_string(),
            yes(q.armed),
            q.kicks.to_string(),
            q.calls.to_string(),
            if q.throttled_ns > 0 { time(q.throttled_ns) } else { "-".into() },
        ]);
        for request in &q.in_flight {
            requests.row([
                q.queue.to_string(),
                request.head.to_string(),
                request.operation.clone(),
                request.disk.to_string(),
                request.offset.to_string(),
                request.length.to_string(),
                time(request.age_ns),
                match request.error.as_str() {
                    "" => request.waits_for.clone(),
                    error => format!("{}: {error}", request.waits_for),
                },
            ]);
        }
    }
    let head = match &dump.controller {
        Some(controller) => format!("volume {}: {}", dump.volume, registers(controller)),
        None => format!(
            "volume {}: features {:#x}, protocol features {:#x}",
            dump.volume, dump.features, dump.protocol_features
        ),
    };
    let mut parts = vec![head, queues.to_string()];
    parts.extend(
        dump.controller
            .as_ref()
            .map(completion_queues)
            .filter(|table| !table.is_empty())
            .map(|t| t.to_string()),
    );
    if !requests.is_empty() {
        parts.push(requests.to_string());
    }
    parts.join("\n\n")
}

/// Returns the controller's registers, in hexadecimal and in words.
fn registers(controller: &Controller) -> String {
    format!(
        "controller {} (CC {:#x}, CSTS {:#x}); doorbells: {}; event requests: {}",
        controller.condition(),
        controller.cc,
        controller.csts,
        controller.doorbells,
        controller.event_requests
    )
}

fn completion_queues(controller: &Controller) -> Table {
    let mut table =
        Table::new(&["COMPLETION QUEUE", "OF", "SIZE", "TAIL", "DRIVER AT", "POSTED", "ROOM", "VECTOR"]);
    for q in &controller.completion_queues {
        let of: Vec<_> = q.submission_queues.iter().map(u16::to_string).collect();
        table.row([
            q.queue.to_string(),
            of.join(","),
            q.size.to_string(),
            q.tail.to_string(),
            q.driver_head.to_string(),
            q.posted.to_string(),
            q.room.to_string(),
            q.vector.map_or_else(|| "-".into(), |vector| vector.to_string()),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_volume_control::{CompletionQueue, InFlight, QueueState};

    #[test]
    fn a_controller_and_its_completion_queues_are_shown() {
        let completions = CompletionQueue {
            queue: 1,
            submission_queues: vec![1, 2],
            size: 64,
            posted: 4711,
            vector: Some(1),
            ..Default::default()
        };
        let controller = Controller {
            cc: 1,
            csts: 1,
            doorbells: "shadow".into(),
            completion_queues: vec![completions],
            ..Default::default()
        };
        let queue = QueueState { queue: 1, format: "nvme".into(), ..Default::default() };
        let dump = Dump {
            volume: "v".into(),
            controller: Some(controller),
            queues: vec![queue],
            ..Default::default()
        };
        let page = page(&dump);
        assert!(
            page.starts_with("volume v: controller ready (CC 0x1, CSTS 0x1); doorbells: shadow"),
            "{page}"
        );
        let line = page.lines().find(|line| line.contains("4711")).unwrap();
        assert_eq!(
            line.split_whitespace().collect::<Vec<_>>(),
            ["1", "1,2", "64", "0", "0", "4711", "0", "1"]
        );
        assert!(!page.contains("features"), "{page}");
    }

    #[test]
    fn requests_in_flight_are_shown() {
        let request =
            InFlight { head: 3, operation: "write".into(), age_ns: 5_000_000_000, ..Default::default() };
        let held = InFlight {
            operation: "discard".into(),
            waits_for: "operator".into(),
            error: "No space left on device (os error 28)".into(),
            ..Default::default()
        };
        let in_flight = vec![InFlight { waits_for: "disk".into(), ..request }, held];
        let queue = QueueState { state: "running".into(), in_flight, ..Default::default() };
        let page = page(&Dump { volume: "v".into(), queues: vec![queue], ..Default::default() });
        assert!(page.contains("running") && page.contains("5.00 s"), "{page}");
        let line = |operation| page.lines().find(|line| line.contains(operation)).unwrap();
        assert!(line("write").trim_end().ends_with("disk"), "{page}");
        assert!(line("discard").contains("operator: No space left on device"), "{page}");
    }
}
