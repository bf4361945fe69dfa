//! The structures of `<infiniband/verbs.h>`.

use crate::constants::*;
use core::ffi::{c_char, c_int, c_uint, c_void};
use libc::{pthread_cond_t, pthread_mutex_t};

/// A function pointer whose arguments do not matter here, because this library does not offer the feature.
pub type Call = unsafe extern "C" fn();

/// Size in bytes of `struct ibv_port_attr` in headers before rdma-core 19. A program that was compiled with such headers calls the
/// library's `ibv_query_port`, as does a program whose context has no `query_port`, so that function must not write more.
pub const COMPAT_PORT_ATTR_SIZE: usize = 48;

/// The value of [`ibv_context::abi_compat`] if the context is the last part of a [`verbs_context`]: all bits set.
pub const ABI_COMPAT_EXTENDED: usize = usize::MAX;

/// Number of bytes behind an [`ibv_device`] that the providers' own libraries (`mlx5dv`, `efadv`) read to see whether the device is
/// theirs: a pointer to their operations. NULL matches none of them.
pub const DEVICE_PADDING: usize = 64;

/// An address of a port.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ibv_gid {
    pub raw: [u8; 16],
}

/// The object that an [`ibv_async_event`] concerns; the event type says which member is valid.
#[repr(C)]
#[derive(Clone, Copy)]
pub union ibv_async_event_element {
    pub cq: *mut ibv_cq,
    pub qp: *mut ibv_qp,
    pub srq: *mut ibv_srq,
    pub wq: *mut c_void,
    pub port_num: c_int,
}

/// The remote memory of an RDMA READ or WRITE.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_send_wr_rdma {
    pub remote_addr: u64,
    pub rkey: u32,
}

/// The remote memory of an atomic operation, and its operands.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_send_wr_atomic {
    pub remote_addr: u64,
    pub compare_add: u64,
    pub swap: u64,
    pub rkey: u32,
}

/// The destination of a datagram.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_send_wr_ud {
    pub ah: *mut ibv_ah,
    pub remote_qpn: u32,
    pub remote_qkey: u32,
}

/// The part of a work request that depends on the opcode or on the type of the queue pair.
#[repr(C)]
#[derive(Clone, Copy)]
pub union ibv_send_wr_wr {
    pub rdma: ibv_send_wr_rdma,
    pub atomic: ibv_send_wr_atomic,
    pub ud: ibv_send_wr_ud,
}

/// The parameters of a memory window's binding.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_send_wr_bind_mw {
    pub mw: *mut ibv_mw,
    pub rkey: u32,
    pub bind_info: ibv_mw_bind_info,
}

/// The parameters of segmentation offload.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_send_wr_tso {
    pub hdr: *mut c_void,
    pub hdr_sz: u16,
    pub mss: u16,
}

/// The last part of an [`ibv_send_wr`], which programs with older headers do not have.
#[repr(C)]
#[derive(Clone, Copy)]
pub union ibv_send_wr_tail {
    pub bind_mw: ibv_send_wr_bind_mw,
    pub tso: ibv_send_wr_tso,
}

#[cfg(target_arch = "x86_64")]
const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<ibv_gid>() == 16 && align_of::<ibv_gid>() == 8);
    assert!(offset_of!(ibv_send_wr_rdma, rkey) == 8);
    assert!(offset_of!(ibv_send_wr_atomic, compare_add) == 8);
    assert!(offset_of!(ibv_send_wr_atomic, swap) == 16);
    assert!(offset_of!(ibv_send_wr_atomic, rkey) == 24);
    assert!(offset_of!(ibv_send_wr_ud, remote_qpn) == 8);
    assert!(offset_of!(ibv_send_wr_ud, remote_qkey) == 12);
    assert!(offset_of!(ibv_send_wr_bind_mw, rkey) == 8);
    assert!(offset_of!(ibv_send_wr_bind_mw, bind_info) == 16);
    assert!(offset_of!(ibv_send_wr_tso, hdr_sz) == 8);
    assert!(offset_of!(ibv_send_wr_tso, mss) == 10);
    assert!(size_of::<ibv_send_wr_wr>() == 32 && size_of::<ibv_send_wr_tail>() == 48);
};

/// The members of the unions of [`ibv_send_wr`], with their offsets in the structure.
pub const SEND_WR_PARTS: &[(&str, usize)] = &[
    ("wr.rdma.remote_addr", 40),
    ("wr.rdma.rkey", 48),
    ("wr.atomic.compare_add", 48),
    ("wr.atomic.swap", 56),
    ("wr.atomic.rkey", 64),
    ("wr.ud.ah", 40),
    ("wr.ud.remote_qpn", 48),
    ("wr.ud.remote_qkey", 52),
    ("invalidate_rkey", 36),
    ("bind_mw.rkey", 88),
    ("bind_mw.bind_info", 96),
    ("tso.hdr", 80),
    ("tso.hdr_sz", 88),
    ("tso.mss", 90),
];

structures! {
    STRUCTURES;

    /// An entry of a port's GID table.
    struct ibv_gid_entry, 32 {
        0 gid: ibv_gid,
        16 gid_index: u32,
        20 port_num: u32,
        24 gid_type: u32,
        28 ndev_ifindex: u32,
    }

    /// The properties of a device.
    struct ibv_device_attr, 232 {
        0 fw_ver: [c_char; 64],
        64 node_guid: u64,
        72 sys_image_guid: u64,
        80 max_mr_size: u64,
        88 page_size_cap: u64,
        96 vendor_id: u32,
        100 vendor_part_id: u32,
        104 hw_ver: u32,
        108 max_qp: c_int,
        112 max_qp_wr: c_int,
        116 device_cap_flags: c_uint,
        120 max_sge: c_int,
        124 max_sge_rd: c_int,
        128 max_cq: c_int,
        132 max_cqe: c_int,
        136 max_mr: c_int,
        140 max_pd: c_int,
        144 max_qp_rd_atom: c_int,
        148 max_ee_rd_atom: c_int,
        152 max_res_rd_atom: c_int,
        156 max_qp_init_rd_atom: c_int,
        160 max_ee_init_rd_atom: c_int,
        164 atomic_cap: ibv_atomic_cap,
        168 max_ee: c_int,
        172 max_rdd: c_int,
        176 max_mw: c_int,
        180 max_raw_ipv6_qp: c_int,
        184 max_raw_ethy_qp: c_int,
        188 max_mcast_grp: c_int,
        192 max_mcast_qp_attach: c_int,
        196 max_total_mcast_qp_attach: c_int,
        200 max_ah: c_int,
        204 max_fmr: c_int,
        208 max_map_per_fmr: c_int,
        212 max_srq: c_int,
        216 max_srq_wr: c_int,
        220 max_srq_sge: c_int,
        224 max_pkeys: u16,
        226 local_ca_ack_delay: u8,
        227 phys_port_cnt: u8,
    }

    /// The on-demand paging capabilities, by transport (`rc`, `uc`, `ud`).
    struct ibv_odp_caps, 24 {
        0 general_caps: u64,
        8 rc_odp_caps = "per_transport_caps.rc_odp_caps": u32,
        12 uc_odp_caps = "per_transport_caps.uc_odp_caps": u32,
        16 ud_odp_caps = "per_transport_caps.ud_odp_caps": u32,
    }

    /// The segmentation offload capabilities.
    struct ibv_tso_caps, 8 {
        0 max_tso: u32,
        4 supported_qpts: u32,
    }

    /// The receive-side scaling capabilities.
    struct ibv_rss_caps, 32 {
        0 supported_qpts: u32,
        4 max_rwq_indirection_tables: u32,
        8 max_rwq_indirection_table_size: u32,
        16 rx_hash_fields_mask: u64,
        24 rx_hash_function: u8,
    }

    /// The packet pacing capabilities.
    struct ibv_packet_pacing_caps, 12 {
        0 qp_rate_limit_min: u32,
        4 qp_rate_limit_max: u32,
        8 supported_qpts: u32,
    }

    /// The tag matching capabilities.
    struct ibv_tm_caps, 20 {
        0 max_rndv_hdr_size: u32,
        4 max_num_tags: u32,
        8 flags: u32,
        12 max_ops: u32,
        16 max_sge: u32,
    }

    /// The limits of the moderation of completion events.
    struct ibv_cq_moderation_caps, 4 {
        0 max_cq_count: u16,
        2 max_cq_period: u16,
    }

    /// The supported sizes of PCI atomic operations.
    struct ibv_pci_atomic_caps, 6 {
        0 fetch_add: u16,
        2 swap: u16,
        4 compare_swap: u16,
    }

    /// The extended properties of a device. Newer headers append fields.
    struct ibv_device_attr_ex, 400 grows {
        0 orig_attr: ibv_device_attr,
        232 comp_mask: u32,
        240 odp_caps: ibv_odp_caps,
        264 completion_timestamp_mask: u64,
        272 hca_core_clock: u64,
        280 device_cap_flags_ex: u64,
        288 tso_caps: ibv_tso_caps,
        296 rss_caps: ibv_rss_caps,
        328 max_wq_type_rq: u32,
        332 packet_pacing_caps: ibv_packet_pacing_caps,
        344 raw_packet_caps: u32,
        348 tm_caps: ibv_tm_caps,
        368 cq_mod_caps: ibv_cq_moderation_caps,
        376 max_dm_size: u64,
        384 pci_atomic_caps: ibv_pci_atomic_caps,
        392 xrc_odp_caps: u32,
        396 phys_port_cnt_ex: u32,
    }

    /// The input of `query_device_ex`.
    struct ibv_query_device_ex_input, 4 {
        0 comp_mask: u32,
    }

    /// The state and properties of a port. Newer headers append fields (`active_speed_ex`), so the called function writes only as many
    /// bytes as its caller has.
    struct ibv_port_attr, 52 grows {
        0 state: ibv_port_state,
        4 max_mtu: ibv_mtu,
        8 active_mtu: ibv_mtu,
        12 gid_tbl_len: c_int,
        16 port_cap_flags: u32,
        20 max_msg_sz: u32,
        24 bad_pkey_cntr: u32,
        28 qkey_viol_cntr: u32,
        32 pkey_tbl_len: u16,
        34 lid: u16,
        36 sm_lid: u16,
        38 lmc: u8,
        39 max_vl_num: u8,
        40 sm_sl: u8,
        41 subnet_timeout: u8,
        42 init_type_reply: u8,
        43 active_width: u8,
        44 active_speed: u8,
        45 phys_state: u8,
        46 link_layer: u8,
        47 flags: u8,
        48 port_cap_flags2: u16,
    }

    /// An asynchronous event.
    struct ibv_async_event, 16 {
        0 element: ibv_async_event_element,
        8 event_type: ibv_event_type,
    }

    /// A work completion.
    struct ibv_wc, 48 {
        0 wr_id: u64,
        8 status: ibv_wc_status,
        12 opcode: ibv_wc_opcode,
        16 vendor_err: u32,
        20 byte_len: u32,
        24 imm_data: u32,
        28 qp_num: u32,
        32 src_qp: u32,
        36 wc_flags: c_uint,
        40 pkey_index: u16,
        42 slid: u16,
        44 sl: u8,
        45 dlid_path_bits: u8,
    }

    /// The global routing header (GRH) that precedes a datagram's payload.
    struct ibv_grh, 40 {
        0 version_tclass_flow: u32,
        4 paylen: u16,
        6 next_hdr: u8,
        7 hop_limit: u8,
        8 sgid: ibv_gid,
        24 dgid: ibv_gid,
    }

    /// A protection domain.
    struct ibv_pd, 16 {
        0 context: *mut ibv_context,
        8 handle: u32,
    }

    /// A memory region.
    struct ibv_mr, 48 {
        0 context: *mut ibv_context,
        8 pd: *mut ibv_pd,
        16 addr: *mut c_void,
        24 length: usize,
        32 handle: u32,
        36 lkey: u32,
        40 rkey: u32,
    }

    /// A memory window.
    struct ibv_mw, 32 {
        0 context: *mut ibv_context,
        8 pd: *mut ibv_pd,
        16 rkey: u32,
        20 handle: u32,
        24 r#type: ibv_mw_type,
    }

    /// The memory that a memory window is bound to.
    struct ibv_mw_bind_info, 32 {
        0 mr: *mut ibv_mr,
        8 addr: u64,
        16 length: u64,
        24 mw_access_flags: c_uint,
    }

    /// The destination of a packet, by GID.
    struct ibv_global_route, 24 {
        0 dgid: ibv_gid,
        16 flow_label: u32,
        20 sgid_index: u8,
        21 hop_limit: u8,
        22 traffic_class: u8,
    }

    /// The destination of a packet: an address vector.
    struct ibv_ah_attr, 32 {
        0 grh: ibv_global_route,
        24 dlid: u16,
        26 sl: u8,
        27 src_path_bits: u8,
        28 static_rate: u8,
        29 is_global: u8,
        30 port_num: u8,
    }

    /// The sizes and the limit of a shared receive queue.
    struct ibv_srq_attr, 12 {
        0 max_wr: u32,
        4 max_sge: u32,
        8 srq_limit: u32,
    }

    /// The parameters of `ibv_create_srq`.
    struct ibv_srq_init_attr, 24 {
        0 srq_context: *mut c_void,
        8 attr: ibv_srq_attr,
    }

    /// The tag matching parameters of a shared receive queue.
    struct ibv_tm_cap, 8 {
        0 max_num_tags: u32,
        4 max_ops: u32,
    }

    /// The parameters of `create_srq_ex`.
    struct ibv_srq_init_attr_ex, 64 {
        0 srq_context: *mut c_void,
        8 attr: ibv_srq_attr,
        20 comp_mask: u32,
        24 srq_type: ibv_srq_type,
        32 pd: *mut ibv_pd,
        40 xrcd: *mut c_void,
        48 cq: *mut ibv_cq,
        56 tm_cap: ibv_tm_cap,
    }

    /// The sizes of a queue pair.
    struct ibv_qp_cap, 20 {
        0 max_send_wr: u32,
        4 max_recv_wr: u32,
        8 max_send_sge: u32,
        12 max_recv_sge: u32,
        16 max_inline_data: u32,
    }

    /// The parameters of `ibv_create_qp`.
    struct ibv_qp_init_attr, 64 {
        0 qp_context: *mut c_void,
        8 send_cq: *mut ibv_cq,
        16 recv_cq: *mut ibv_cq,
        24 srq: *mut ibv_srq,
        32 cap: ibv_qp_cap,
        52 qp_type: ibv_qp_type,
        56 sq_sig_all: c_int,
    }

    /// The parameters of receive hashing.
    struct ibv_rx_hash_conf, 24 {
        0 rx_hash_function: u8,
        1 rx_hash_key_len: u8,
        8 rx_hash_key: *mut u8,
        16 rx_hash_fields_mask: u64,
    }

    /// The parameters of `create_qp_ex`. Newer headers append fields.
    struct ibv_qp_init_attr_ex, 136 grows {
        0 qp_context: *mut c_void,
        8 send_cq: *mut ibv_cq,
        16 recv_cq: *mut ibv_cq,
        24 srq: *mut ibv_srq,
        32 cap: ibv_qp_cap,
        52 qp_type: ibv_qp_type,
        56 sq_sig_all: c_int,
        60 comp_mask: u32,
        64 pd: *mut ibv_pd,
        72 xrcd: *mut c_void,
        80 create_flags: u32,
        84 max_tso_header: u16,
        88 rwq_ind_tbl: *mut c_void,
        96 rx_hash_conf: ibv_rx_hash_conf,
        120 source_qpn: u32,
        128 send_ops_flags: u64,
    }

    /// The attributes that `ibv_modify_qp` sets and `ibv_query_qp` gets.
    struct ibv_qp_attr, 144 {
        0 qp_state: ibv_qp_state,
        4 cur_qp_state: ibv_qp_state,
        8 path_mtu: ibv_mtu,
        12 path_mig_state: ibv_mig_state,
        16 qkey: u32,
        20 rq_psn: u32,
        24 sq_psn: u32,
        28 dest_qp_num: u32,
        32 qp_access_flags: c_uint,
        36 cap: ibv_qp_cap,
        56 ah_attr: ibv_ah_attr,
        88 alt_ah_attr: ibv_ah_attr,
        120 pkey_index: u16,
        122 alt_pkey_index: u16,
        124 en_sqd_async_notify: u8,
        125 sq_draining: u8,
        126 max_rd_atomic: u8,
        127 max_dest_rd_atomic: u8,
        128 min_rnr_timer: u8,
        129 port_num: u8,
        130 timeout: u8,
        131 retry_cnt: u8,
        132 rnr_retry: u8,
        133 alt_port_num: u8,
        134 alt_timeout: u8,
        136 rate_limit: u32,
    }

    /// The rate limit of a queue pair.
    struct ibv_qp_rate_limit_attr, 16 {
        0 rate_limit: u32,
        4 max_burst_sz: u32,
        8 typical_pkt_sz: u16,
        12 comp_mask: u32,
    }

    /// A scatter/gather element: a range of registered memory.
    struct ibv_sge, 16 {
        0 addr: u64,
        8 length: u32,
        12 lkey: u32,
    }

    /// A send request.
    struct ibv_send_wr, 128 {
        0 wr_id: u64,
        8 next: *mut ibv_send_wr,
        16 sg_list: *mut ibv_sge,
        24 num_sge: c_int,
        28 opcode: ibv_wr_opcode,
        32 send_flags: c_uint,
        36 imm_data: u32,
        40 wr: ibv_send_wr_wr,
        72 remote_srqn = "qp_type.xrc.remote_srqn": u32,
        80 tail = "bind_mw": ibv_send_wr_tail,
    }

    /// A receive request.
    struct ibv_recv_wr, 32 {
        0 wr_id: u64,
        8 next: *mut ibv_recv_wr,
        16 sg_list: *mut ibv_sge,
        24 num_sge: c_int,
    }

    /// A range of memory without a key, for inline data.
    struct ibv_data_buf, 16 {
        0 addr: *mut c_void,
        8 length: usize,
    }

    /// A shared receive queue.
    struct ibv_srq, 128 {
        0 context: *mut ibv_context,
        8 srq_context: *mut c_void,
        16 pd: *mut ibv_pd,
        24 handle: u32,
        32 mutex: pthread_mutex_t,
        72 cond: pthread_cond_t,
        120 events_completed: u32,
    }

    /// A queue pair.
    struct ibv_qp, 160 {
        0 context: *mut ibv_context,
        8 qp_context: *mut c_void,
        16 pd: *mut ibv_pd,
        24 send_cq: *mut ibv_cq,
        32 recv_cq: *mut ibv_cq,
        40 srq: *mut ibv_srq,
        48 handle: u32,
        52 qp_num: u32,
        56 state: ibv_qp_state,
        60 qp_type: ibv_qp_type,
        64 mutex: pthread_mutex_t,
        104 cond: pthread_cond_t,
        152 events_completed: u32,
    }

    /// A queue pair with the functions of the `ibv_wr_*` family. Newer headers append fields.
    struct ibv_qp_ex, 352 grows {
        0 qp_base: ibv_qp,
        160 comp_mask: u64,
        168 wr_id: u64,
        176 wr_flags: c_uint,
        184 wr_atomic_cmp_swp: Option<unsafe extern "C" fn(
            qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64, compare: u64, swap: u64,
        )>,
        192 wr_atomic_fetch_add: Option<unsafe extern "C" fn(
            qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64, add: u64,
        )>,
        200 wr_bind_mw: Option<unsafe extern "C" fn(
            qp: *mut ibv_qp_ex, mw: *mut ibv_mw, rkey: u32, bind_info: *const ibv_mw_bind_info,
        )>,
        208 wr_local_inv: Option<unsafe extern "C" fn(qp: *mut ibv_qp_ex, invalidate_rkey: u32)>,
        216 wr_rdma_read: Option<unsafe extern "C" fn(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64)>,
        224 wr_rdma_write: Option<unsafe extern "C" fn(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64)>,
        232 wr_rdma_write_imm: Option<unsafe extern "C" fn(
            qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64, imm_data: u32,
        )>,
        240 wr_send: Option<unsafe extern "C" fn(qp: *mut ibv_qp_ex)>,
        248 wr_send_imm: Option<unsafe extern "C" fn(qp: *mut ibv_qp_ex, imm_data: u32)>,
        256 wr_send_inv: Option<unsafe extern "C" fn(qp: *mut ibv_qp_ex, invalidate_rkey: u32)>,
        264 wr_send_tso: Option<unsafe extern "C" fn(
            qp: *mut ibv_qp_ex, hdr: *mut c_void, hdr_sz: u16, mss: u16,
        )>,
        272 wr_set_ud_addr: Option<unsafe extern "C" fn(
            qp: *mut ibv_qp_ex, ah: *mut ibv_ah, remote_qpn: u32, remote_qkey: u32,
        )>,
        280 wr_set_xrc_srqn: Option<unsafe extern "C" fn(qp: *mut ibv_qp_ex, remote_srqn: u32)>,
        288 wr_set_inline_data: Option<unsafe extern "C" fn(
            qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize,
        )>,
        296 wr_set_inline_data_list: Option<unsafe extern "C" fn(
            qp: *mut ibv_qp_ex, num_buf: usize, buf_list: *const ibv_data_buf,
        )>,
        304 wr_set_sge: Option<unsafe extern "C" fn(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32)>,
        312 wr_set_sge_list: Option<unsafe extern "C" fn(
            qp: *mut ibv_qp_ex, num_sge: usize, sg_list: *const ibv_sge,
        )>,
        320 wr_start: Option<unsafe extern "C" fn(qp: *mut ibv_qp_ex)>,
        328 wr_complete: Option<unsafe extern "C" fn(qp: *mut ibv_qp_ex) -> c_int>,
        336 wr_abort: Option<unsafe extern "C" fn(qp: *mut ibv_qp_ex)>,
        344 wr_atomic_write: Option<unsafe extern "C" fn(
            qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64, atomic_wr: *const c_void,
        )>,
    }

    /// Vendor-specific options of a connection (ECE).
    struct ibv_ece, 12 {
        0 vendor_id: u32,
        4 options: u32,
        8 comp_mask: u32,
    }

    /// A completion channel.
    struct ibv_comp_channel, 16 {
        0 context: *mut ibv_context,
        8 fd: c_int,
        12 refcnt: c_int,
    }

    /// A completion queue.
    struct ibv_cq, 128 {
        0 context: *mut ibv_context,
        8 channel: *mut ibv_comp_channel,
        16 cq_context: *mut c_void,
        24 handle: u32,
        28 cqe: c_int,
        32 mutex: pthread_mutex_t,
        72 cond: pthread_cond_t,
        120 comp_events_completed: u32,
        124 async_events_completed: u32,
    }

    /// The parameters of `start_poll`.
    struct ibv_poll_cq_attr, 4 {
        0 comp_mask: u32,
    }

    /// The tag of a completion, for tag matching.
    struct ibv_wc_tm_info, 16 {
        0 tag: u64,
        8 r#priv: u32,
    }

    /// A completion queue with the functions of the `ibv_start_poll` family. It begins like [`ibv_cq`]. Newer headers append fields.
    struct ibv_cq_ex, 288 grows {
        0 context: *mut ibv_context,
        8 channel: *mut ibv_comp_channel,
        16 cq_context: *mut c_void,
        24 handle: u32,
        28 cqe: c_int,
        32 mutex: pthread_mutex_t,
        72 cond: pthread_cond_t,
        120 comp_events_completed: u32,
        124 async_events_completed: u32,
        128 comp_mask: u32,
        132 status: ibv_wc_status,
        136 wr_id: u64,
        144 start_poll: Option<unsafe extern "C" fn(
            current: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr,
        ) -> c_int>,
        152 next_poll: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> c_int>,
        160 end_poll: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex)>,
        168 read_opcode: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> ibv_wc_opcode>,
        176 read_vendor_err: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> u32>,
        184 read_byte_len: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> u32>,
        192 read_imm_data: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> u32>,
        200 read_qp_num: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> u32>,
        208 read_src_qp: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> u32>,
        216 read_wc_flags: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> c_uint>,
        224 read_slid: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> u32>,
        232 read_sl: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> u8>,
        240 read_dlid_path_bits: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> u8>,
        248 read_completion_ts: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> u64>,
        256 read_cvlan: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> u16>,
        264 read_flow_tag: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> u32>,
        272 read_tm_info: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex, tm_info: *mut ibv_wc_tm_info)>,
        280 read_completion_wallclock_ns: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> u64>,
    }

    /// The parameters of the moderation of completion events.
    struct ibv_moderate_cq, 4 {
        0 cq_count: u16,
        2 cq_period: u16,
    }

    /// The attributes that `modify_cq` sets.
    struct ibv_modify_cq_attr, 8 {
        0 attr_mask: u32,
        4 moderate: ibv_moderate_cq,
    }

    /// The parameters of `create_cq_ex`. Newer headers append fields.
    struct ibv_cq_init_attr_ex, 56 grows {
        0 cqe: u32,
        8 cq_context: *mut c_void,
        16 channel: *mut ibv_comp_channel,
        24 comp_vector: u32,
        32 wc_flags: u64,
        40 comp_mask: u32,
        44 flags: u32,
        48 parent_domain: *mut ibv_pd,
    }

    /// An address handle.
    struct ibv_ah, 24 {
        0 context: *mut ibv_context,
        8 pd: *mut ibv_pd,
        16 handle: u32,
    }

    /// Two function pointers that programs of the first releases called.
    struct _ibv_device_ops, 16 {
        0 _dummy1: Option<Call>,
        8 _dummy2: Option<Call>,
    }

    /// A device, as `ibv_get_device_list` returns it.
    struct ibv_device, 664 {
        0 _ops: _ibv_device_ops,
        16 node_type: ibv_node_type,
        20 transport_type: ibv_transport_type,
        24 name: [c_char; IBV_SYSFS_NAME_MAX],
        88 dev_name: [c_char; IBV_SYSFS_NAME_MAX],
        152 dev_path: [c_char; IBV_SYSFS_PATH_MAX],
        408 ibdev_path: [c_char; IBV_SYSFS_PATH_MAX],
    }

    /// The functions of the data path, which programs call through this table. Those named `_compat_` are for programs of the first
    /// releases.
    struct ibv_context_ops, 256 {
        0 _compat_query_device: Option<Call>,
        8 _compat_query_port: Option<Call>,
        16 _compat_alloc_pd: Option<Call>,
        24 _compat_dealloc_pd: Option<Call>,
        32 _compat_reg_mr: Option<Call>,
        40 _compat_rereg_mr: Option<Call>,
        48 _compat_dereg_mr: Option<Call>,
        56 alloc_mw: Option<unsafe extern "C" fn(pd: *mut ibv_pd, kind: ibv_mw_type) -> *mut ibv_mw>,
        64 bind_mw: Option<Call>,
        72 dealloc_mw: Option<unsafe extern "C" fn(mw: *mut ibv_mw) -> c_int>,
        80 _compat_create_cq: Option<Call>,
        88 poll_cq: Option<unsafe extern "C" fn(
            cq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc,
        ) -> c_int>,
        96 req_notify_cq: Option<unsafe extern "C" fn(cq: *mut ibv_cq, solicited_only: c_int) -> c_int>,
        104 _compat_cq_event: Option<Call>,
        112 _compat_resize_cq: Option<Call>,
        120 _compat_destroy_cq: Option<Call>,
        128 _compat_create_srq: Option<Call>,
        136 _compat_modify_srq: Option<Call>,
        144 _compat_query_srq: Option<Call>,
        152 _compat_destroy_srq: Option<Call>,
        160 post_srq_recv: Option<unsafe extern "C" fn(
            srq: *mut ibv_srq, recv_wr: *mut ibv_recv_wr, bad_recv_wr: *mut *mut ibv_recv_wr,
        ) -> c_int>,
        168 _compat_create_qp: Option<Call>,
        176 _compat_query_qp: Option<Call>,
        184 _compat_modify_qp: Option<Call>,
        192 _compat_destroy_qp: Option<Call>,
        200 post_send: Option<unsafe extern "C" fn(
            qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad_wr: *mut *mut ibv_send_wr,
        ) -> c_int>,
        208 post_recv: Option<unsafe extern "C" fn(
            qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad_wr: *mut *mut ibv_recv_wr,
        ) -> c_int>,
        216 _compat_create_ah: Option<Call>,
        224 _compat_destroy_ah: Option<Call>,
        232 _compat_attach_mcast: Option<Call>,
        240 _compat_detach_mcast: Option<Call>,
        248 _compat_async_event: Option<Call>,
    }

    /// An open device. It is always the last part of a [`verbs_context`].
    struct ibv_context, 328 {
        0 device: *mut ibv_device,
        8 ops: ibv_context_ops,
        264 cmd_fd: c_int,
        268 async_fd: c_int,
        272 num_comp_vectors: c_int,
        280 mutex: pthread_mutex_t,
        320 abi_compat: *mut c_void,
    }

    /// An open device with its extended functions. New ones are added in front, so a function is found by its distance from the end, if
    /// `sz` says that the structure extends that far.
    struct verbs_context, 648 up {
        0 query_port: Option<unsafe extern "C" fn(
            context: *mut ibv_context, port_num: u8, port_attr: *mut ibv_port_attr, port_attr_len: usize,
        ) -> c_int>,
        8 advise_mr: Option<Call>,
        16 alloc_null_mr: Option<unsafe extern "C" fn(pd: *mut ibv_pd) -> *mut ibv_mr>,
        24 read_counters: Option<Call>,
        32 attach_counters_point_flow: Option<Call>,
        40 create_counters: Option<Call>,
        48 destroy_counters: Option<Call>,
        56 reg_dm_mr: Option<Call>,
        64 alloc_dm: Option<Call>,
        72 free_dm: Option<Call>,
        80 modify_flow_action_esp: Option<Call>,
        88 destroy_flow_action: Option<Call>,
        96 create_flow_action_esp: Option<Call>,
        104 modify_qp_rate_limit: Option<unsafe extern "C" fn(
            qp: *mut ibv_qp, attr: *mut ibv_qp_rate_limit_attr,
        ) -> c_int>,
        112 alloc_parent_domain: Option<Call>,
        120 dealloc_td: Option<Call>,
        128 alloc_td: Option<Call>,
        136 modify_cq: Option<unsafe extern "C" fn(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> c_int>,
        144 post_srq_ops: Option<Call>,
        152 destroy_rwq_ind_table: Option<Call>,
        160 create_rwq_ind_table: Option<Call>,
        168 destroy_wq: Option<Call>,
        176 modify_wq: Option<Call>,
        184 create_wq: Option<Call>,
        192 query_rt_values: Option<Call>,
        200 create_cq_ex: Option<unsafe extern "C" fn(
            context: *mut ibv_context, init_attr: *mut ibv_cq_init_attr_ex,
        ) -> *mut ibv_cq_ex>,
        208 r#priv: *mut c_void,
        216 query_device_ex: Option<unsafe extern "C" fn(
            context: *mut ibv_context, input: *const ibv_query_device_ex_input,
            attr: *mut ibv_device_attr_ex, attr_size: usize,
        ) -> c_int>,
        224 ibv_destroy_flow: Option<Call>,
        232 ABI_placeholder2: Option<Call>,
        240 ibv_create_flow: Option<Call>,
        248 ABI_placeholder1: Option<Call>,
        256 open_qp: Option<Call>,
        264 create_qp_ex: Option<unsafe extern "C" fn(
            context: *mut ibv_context, qp_init_attr_ex: *mut ibv_qp_init_attr_ex,
        ) -> *mut ibv_qp>,
        272 get_srq_num: Option<unsafe extern "C" fn(srq: *mut ibv_srq, srq_num: *mut u32) -> c_int>,
        280 create_srq_ex: Option<unsafe extern "C" fn(
            context: *mut ibv_context, srq_init_attr_ex: *mut ibv_srq_init_attr_ex,
        ) -> *mut ibv_srq>,
        288 open_xrcd: Option<Call>,
        296 close_xrcd: Option<Call>,
        304 _ABI_placeholder3: u64,
        312 sz: usize,
        320 context: ibv_context,
    }
}
