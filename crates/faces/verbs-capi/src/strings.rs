//! Names of states and errors, and conversions of rates: tables without state.

use ginnel_verbs_abi::*;
use std::ffi::{CStr, c_char, c_int};

const UNKNOWN: &CStr = c"unknown";

fn word(words: &[&'static CStr], value: u32) -> *const c_char {
    words.get(value as usize).unwrap_or(&UNKNOWN).as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn ginnel_ibv_wc_status_str(status: ibv_wc_status) -> *const c_char {
    const WORDS: [&CStr; 24] = [
        c"success",
        c"local length error",
        c"local QP operation error",
        c"local EE context operation error",
        c"local protection error",
        c"Work Request Flushed Error",
        c"memory management operation error",
        c"bad response error",
        c"local access error",
        c"remote invalid request error",
        c"remote access error",
        c"remote operation error",
        c"transport retry counter exceeded",
        c"RNR retry counter exceeded",
        c"local RDD violation error",
        c"remote invalid RD request",
        c"aborted error",
        c"invalid EE context number",
        c"invalid EE context state",
        c"fatal error",
        c"response timeout error",
        c"general error",
        c"TM error",
        c"TM software rendezvous",
    ];
    word(&WORDS, status)
}

#[unsafe(no_mangle)]
extern "C" fn ginnel_ibv_event_type_str(event: ibv_event_type) -> *const c_char {
    const WORDS: [&CStr; 20] = [
        c"CQ error",
        c"local work queue catastrophic error",
        c"invalid request local work queue error",
        c"local access violation work queue error",
        c"communication established",
        c"send queue drained",
        c"path migrated",
        c"path migration request error",
        c"local catastrophic error",
        c"port active",
        c"port error",
        c"LID change",
        c"P_Key change",
        c"SM change",
        c"SRQ catastrophic error",
        c"SRQ limit reached",
        c"last WQE reached",
        c"client reregistration",
        c"GID table change",
        c"WQ fatal",
    ];
    word(&WORDS, event)
}

#[unsafe(no_mangle)]
extern "C" fn ginnel_ibv_node_type_str(node_type: ibv_node_type) -> *const c_char {
    const WORDS: [&CStr; 8] = [
        UNKNOWN,
        c"InfiniBand channel adapter",
        c"InfiniBand switch",
        c"InfiniBand router",
        c"iWARP NIC",
        c"usNIC",
        c"usNIC UDP",
        c"unspecified",
    ];
    word(&WORDS, node_type.cast_unsigned())
}

#[unsafe(no_mangle)]
extern "C" fn ginnel_ibv_port_state_str(state: ibv_port_state) -> *const c_char {
    const WORDS: [&CStr; 6] =
        [c"no state change (NOP)", c"down", c"init", c"armed", c"active", c"active defer"];
    word(&WORDS, state)
}

/// Rates: the multiple of 2.5 Gbit/s, if the real library gives one, and the rate in Mbit/s.
const RATES: [(ibv_rate, Option<c_int>, c_int); 23] = [
    (IBV_RATE_2_5_GBPS, Some(1), 2_500),
    (IBV_RATE_5_GBPS, Some(2), 5_000),
    (IBV_RATE_10_GBPS, Some(4), 10_000),
    (IBV_RATE_14_GBPS, None, 14_062),
    (IBV_RATE_20_GBPS, Some(8), 20_000),
    (IBV_RATE_25_GBPS, None, 25_781),
    (IBV_RATE_28_GBPS, Some(11), 28_125),
    (IBV_RATE_30_GBPS, Some(12), 30_000),
    (IBV_RATE_40_GBPS, Some(16), 40_000),
    (IBV_RATE_50_GBPS, Some(20), 53_125),
    (IBV_RATE_56_GBPS, None, 56_250),
    (IBV_RATE_60_GBPS, Some(24), 60_000),
    (IBV_RATE_80_GBPS, Some(32), 80_000),
    (IBV_RATE_100_GBPS, None, 103_125),
    (IBV_RATE_112_GBPS, None, 112_500),
    (IBV_RATE_120_GBPS, Some(48), 120_000),
    (IBV_RATE_168_GBPS, None, 168_750),
    (IBV_RATE_200_GBPS, None, 206_250),
    (IBV_RATE_300_GBPS, None, 309_375),
    (IBV_RATE_400_GBPS, Some(160), 425_000),
    (IBV_RATE_600_GBPS, Some(240), 637_500),
    (IBV_RATE_800_GBPS, Some(320), 850_000),
    (IBV_RATE_1200_GBPS, Some(480), 1_275_000),
];

#[unsafe(no_mangle)]
extern "C" fn ginnel_ibv_rate_to_mult(rate: ibv_rate) -> c_int {
    RATES.iter().find(|entry| entry.0 == rate).and_then(|entry| entry.1).unwrap_or(-1)
}

#[unsafe(no_mangle)]
extern "C" fn ginnel_mult_to_ibv_rate(mult: c_int) -> ibv_rate {
    RATES.iter().find(|entry| entry.1 == Some(mult)).map_or(IBV_RATE_MAX, |entry| entry.0)
}

#[unsafe(no_mangle)]
extern "C" fn ginnel_ibv_rate_to_mbps(rate: ibv_rate) -> c_int {
    RATES.iter().find(|entry| entry.0 == rate).map_or(-1, |entry| entry.2)
}

#[unsafe(no_mangle)]
extern "C" fn ginnel_mbps_to_ibv_rate(mbps: c_int) -> ibv_rate {
    RATES.iter().find(|entry| entry.2 == mbps).map_or(IBV_RATE_MAX, |entry| entry.0)
}
