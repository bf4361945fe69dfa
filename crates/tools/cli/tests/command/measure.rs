//! `ginnel ping` and `ginnel perf`.

use kit::wait::wait_until;
use kit::world::World;
use std::collections::BTreeSet;
use std::process::Stdio;

#[test]
fn pings_are_answered_and_counted() {
    let world = World::new();
    let server = world.server("ping --serve web/ping");
    assert_eq!(server.first, "answering pings at web/ping\n");
    let said = world.good("ping web/ping -c 3 -i 0 -s 100");
    let lines: Vec<_> = said.out.lines().collect();
    assert_eq!(lines.len(), 7, "{said:?}");
    assert!(lines[1].starts_with("100 bytes from host: seq=1 time="), "{said:?}");
    assert!(lines[5].starts_with("3 sent, 3 answered, 0% lost"), "{said:?}");
    let json = world.good("ping web/ping -c 5 -i 0 --json --mode interrupt").json();
    assert_eq!((&json["sent"], &json["received"]), (&5.into(), &5.into()));
    let rtt = |key: &str| json["rtt_ns"][key].as_f64().unwrap();
    assert!(0.0 < rtt("min") && rtt("min") <= rtt("avg") && rtt("avg") <= rtt("max"), "{json}");

    let said = world.expect(1, "ping web/nobody -c 1");
    assert!(said.err.contains("ginnel ping --serve web/nobody") && said.err.lines().count() == 1, "{said:?}");
    world.expect(1, "ping nowhere/ping -c 1");
    world.expect(2, "ping web");
    world.expect(2, "ping web/ping -s 1000000");
    world.expect(2, "ping web/ping -i never");
}

#[test]
fn a_server_that_dies_is_noticed_at_once() {
    let world = World::new();
    let mut server = world.server("ping --serve web/ping");
    let ping =
        world.command("ping web/ping -i 0.01").stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    wait_until("a channel", || {
        world.good("status --json").json()["channels"].as_array().is_some_and(|c| !c.is_empty())
    });
    server.end();
    let output = ping.wait_with_output().unwrap();
    let err = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(err.contains("web/ping: the peer has "), "{err}");
}

#[test]
fn perf_measures_everything_that_is_requested() {
    let world = World::new();
    let server = world.server("perf --serve web/perf");
    assert_eq!(server.first, "measuring at web/perf\n");
    let json = world.good("perf web/perf --json --duration 0.01 --size 8,4K").json();
    assert_eq!((&json["transport"], &json["address"]), (&"ginnel".into(), &"web/perf".into()));
    assert!(json["clock_ns"].as_f64().unwrap() > 0.0);
    let results = json["results"].as_array().unwrap();
    let mut seen = BTreeSet::new();
    for result in results {
        let text = |key: &str| result[key].as_str().unwrap();
        seen.insert((text("test"), text("kind"), text("mode"), result["size"].as_u64().unwrap()));
        assert!(result["error"].is_null() && result["capacity"].as_u64().unwrap() > 0, "{result}");
        let number = |value: &serde_json::Value| value.as_f64().unwrap();
        if text("test") == "latency" {
            let rtt = |key: &str| number(&result["rtt_ns"][key]);
            let order = ["min", "p50", "p90", "p99", "p999", "max"].map(rtt);
            assert!(order[0] > 0.0 && order.is_sorted(), "{result}");
            assert_eq!(number(&result["one_way_ns"]), rtt("p50") / 2.0);
            assert!(number(&result["round_trips"]) >= number(&result["batch"]));
        } else {
            let size = result["size"].as_u64().unwrap();
            let operations = result["operations"].as_u64().unwrap();
            assert!(operations > 0 && result["bytes"].as_u64().unwrap() == operations * size, "{result}");
            let speed = number(&result["bytes"]) / number(&result["seconds"]);
            assert!((number(&result["bytes_per_s"]) / speed - 1.0).abs() < 1e-6, "{result}");
        }
    }
    // 2 kinds x 3 modes x 2 sizes, and 4 kinds x 3 modes x 2 sizes.
    assert_eq!((results.len(), seen.len()), (36, 36));
}

#[test]
fn perf_measures_only_what_is_selected() {
    let world = World::new();
    let _server = world.server("perf --serve web/perf");
    let line = "perf web/perf --json --duration 0.01 --test bandwidth --kind stream,message-zero-copy --mode adaptive --size 64K --capacity 512K";
    for reverse in [false, true] {
        let json = world.good(&format!("{line}{}", if reverse { " --reverse" } else { "" })).json();
        let results = json["results"].as_array().unwrap();
        assert_eq!(results.len(), 2);
        for result in results {
            assert_eq!(
                (&result["reverse"], &result["capacity"]),
                (&reverse.into(), &(512 << 10).into()),
                "{result}"
            );
            assert!(result["bytes"].as_u64().unwrap() > 0);
        }
    }
    let table = world.good("perf web/perf --duration 0.01 --size 8 --mode poll --kind message").out;
    assert!(table.contains("LATENCY") && table.contains("BANDWIDTH"), "{table}");
    // Messages longer than the largest ring permits are reported, and the rest is measured.
    let said = world.expect(
        1,
        "perf web/perf --duration 0.01 --size 8M,8 --mode poll --kind message --test bandwidth --json",
    );
    let json = said.json();
    assert!(json["results"][0]["error"].is_string() && json["results"][1]["bytes"].is_u64(), "{json}");
    world.expect(1, "perf web/nobody --duration 0.01");
    world.expect(2, "perf");
    world.expect(2, "perf web/perf --size 0");
}

#[test]
fn perf_measures_tcp_in_the_same_way() {
    let world = World::new();
    let server = world.server("perf --serve --tcp 127.0.0.1:0");
    let at = server.first.trim_end().strip_prefix("measuring at ").unwrap();
    let json = world.good(&format!("perf --tcp {at} --json --duration 0.01 --size 8,64K")).json();
    assert_eq!((&json["transport"], &json["address"]), (&"tcp".into(), &at.into()));
    let results = json["results"].as_array().unwrap();
    assert_eq!(results.len(), 4);
    for result in results {
        assert!(result["mode"].is_null() && result["kind"] == "stream", "{result}");
        assert!(result["one_way_ns"].is_f64() || result["bytes_per_s"].is_f64(), "{result}");
    }
    world.expect(1, "perf --tcp 127.0.0.1:1 --duration 0.01 --size 8");
}

#[test]
fn perf_measures_the_mapping_of_a_segment() {
    let world = World::new();
    let json = world.good("perf --mapping web --json --duration 0.02").json();
    assert_eq!(
        (&json["segment"], &json["kind"], &json["member"]),
        (&"web".into(), &"file".into(), &0.into())
    );
    assert_eq!((&json["read_only"], &json["mapped"]), (&false.into(), &(62 << 20).into()));
    let emulated = json["emulated"].as_bool().unwrap();
    assert_eq!(json["cached"].is_null(), emulated, "{json}");
    let results = json["results"].as_array().unwrap();
    let tests: Vec<_> =
        results.iter().map(|r| (r["test"].as_str().unwrap(), r["unit"].as_str().unwrap())).collect();
    assert_eq!(tests, [("load", "ns"), ("load", "ns"), ("store", "ns"), ("read", "MB/s"), ("write", "MB/s")]);
    for result in results {
        assert!(
            result["mapping"].as_f64().unwrap() > 0.0 && result["private"].as_f64().unwrap() > 0.0,
            "{result}"
        );
    }
    let page = world.good("perf --mapping web --duration 0.02").out;
    for part in [
        "segment web in member 0: the file itself, on the host, 62 MiB mapped",
        "TIMES SLOWER",
        "load",
        "60 KiB",
    ] {
        assert!(page.contains(part), "{part:?} is missing in\n{page}");
    }
    world.expect(1, "perf --mapping nowhere");
    world.expect(2, "perf --mapping web --serve");
    world.expect(2, "perf web/x --mapping web");
}
