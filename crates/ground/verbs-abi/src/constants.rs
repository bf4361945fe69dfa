//! The constants of `<infiniband/verbs.h>`.

constants! {
    CONSTANTS;

    /// `enum ibv_gid_type`.
    enum ibv_gid_type: u32 {
        IBV_GID_TYPE_IB = 0,
        IBV_GID_TYPE_ROCE_V1 = 1,
        IBV_GID_TYPE_ROCE_V2 = 2,
    }

    /// `enum ibv_node_type`.
    enum ibv_node_type: i32 {
        IBV_NODE_UNKNOWN = -1,
        IBV_NODE_CA = 1,
        IBV_NODE_SWITCH = 2,
        IBV_NODE_ROUTER = 3,
        IBV_NODE_RNIC = 4,
        IBV_NODE_USNIC = 5,
        IBV_NODE_USNIC_UDP = 6,
        IBV_NODE_UNSPECIFIED = 7,
    }

    /// `enum ibv_transport_type`.
    enum ibv_transport_type: i32 {
        IBV_TRANSPORT_UNKNOWN = -1,
        IBV_TRANSPORT_IB = 0,
        IBV_TRANSPORT_IWARP = 1,
        IBV_TRANSPORT_USNIC = 2,
        IBV_TRANSPORT_USNIC_UDP = 3,
        IBV_TRANSPORT_UNSPECIFIED = 4,
    }

    /// `enum ibv_device_cap_flags`.
    enum ibv_device_cap_flags: u32 {
        IBV_DEVICE_RESIZE_MAX_WR = 0x1,
        IBV_DEVICE_BAD_PKEY_CNTR = 0x2,
        IBV_DEVICE_BAD_QKEY_CNTR = 0x4,
        IBV_DEVICE_RAW_MULTI = 0x8,
        IBV_DEVICE_AUTO_PATH_MIG = 0x10,
        IBV_DEVICE_CHANGE_PHY_PORT = 0x20,
        IBV_DEVICE_UD_AV_PORT_ENFORCE = 0x40,
        IBV_DEVICE_CURR_QP_STATE_MOD = 0x80,
        IBV_DEVICE_SHUTDOWN_PORT = 0x100,
        IBV_DEVICE_INIT_TYPE = 0x200,
        IBV_DEVICE_PORT_ACTIVE_EVENT = 0x400,
        IBV_DEVICE_SYS_IMAGE_GUID = 0x800,
        IBV_DEVICE_RC_RNR_NAK_GEN = 0x1000,
        IBV_DEVICE_SRQ_RESIZE = 0x2000,
        IBV_DEVICE_N_NOTIFY_CQ = 0x4000,
        IBV_DEVICE_MEM_WINDOW = 0x20000,
        IBV_DEVICE_UD_IP_CSUM = 0x40000,
        IBV_DEVICE_XRC = 0x100000,
        IBV_DEVICE_MEM_MGT_EXTENSIONS = 0x200000,
        IBV_DEVICE_MEM_WINDOW_TYPE_2A = 0x800000,
        IBV_DEVICE_MEM_WINDOW_TYPE_2B = 0x1000000,
        IBV_DEVICE_RC_IP_CSUM = 0x2000000,
        IBV_DEVICE_RAW_IP_CSUM = 0x4000000,
        IBV_DEVICE_MANAGED_FLOW_STEERING = 0x20000000,
    }

    /// `enum ibv_fork_status`.
    enum ibv_fork_status: u32 {
        IBV_FORK_DISABLED = 0,
        IBV_FORK_ENABLED = 1,
        IBV_FORK_UNNEEDED = 2,
    }

    /// `enum ibv_atomic_cap`.
    enum ibv_atomic_cap: u32 {
        IBV_ATOMIC_NONE = 0,
        IBV_ATOMIC_HCA = 1,
        IBV_ATOMIC_GLOB = 2,
    }

    /// `enum ibv_pci_atomic_op_size`.
    enum ibv_pci_atomic_op_size: u32 {
        IBV_PCI_ATOMIC_OPERATION_4_BYTE_SIZE_SUP = 0x1,
        IBV_PCI_ATOMIC_OPERATION_8_BYTE_SIZE_SUP = 0x2,
        IBV_PCI_ATOMIC_OPERATION_16_BYTE_SIZE_SUP = 0x4,
    }

    /// `enum ibv_mtu`.
    enum ibv_mtu: u32 {
        IBV_MTU_256 = 1,
        IBV_MTU_512 = 2,
        IBV_MTU_1024 = 3,
        IBV_MTU_2048 = 4,
        IBV_MTU_4096 = 5,
    }

    /// `enum ibv_port_state`.
    enum ibv_port_state: u32 {
        IBV_PORT_NOP = 0,
        IBV_PORT_DOWN = 1,
        IBV_PORT_INIT = 2,
        IBV_PORT_ARMED = 3,
        IBV_PORT_ACTIVE = 4,
        IBV_PORT_ACTIVE_DEFER = 5,
    }

    /// Has no enumeration name in C.
    enum ibv_link_layer: u8 {
        IBV_LINK_LAYER_UNSPECIFIED = 0,
        IBV_LINK_LAYER_INFINIBAND = 1,
        IBV_LINK_LAYER_ETHERNET = 2,
    }

    /// `enum ibv_port_cap_flags`.
    enum ibv_port_cap_flags: u32 {
        IBV_PORT_SM = 0x2,
        IBV_PORT_NOTICE_SUP = 0x4,
        IBV_PORT_TRAP_SUP = 0x8,
        IBV_PORT_OPT_IPD_SUP = 0x10,
        IBV_PORT_AUTO_MIGR_SUP = 0x20,
        IBV_PORT_SL_MAP_SUP = 0x40,
        IBV_PORT_MKEY_NVRAM = 0x80,
        IBV_PORT_PKEY_NVRAM = 0x100,
        IBV_PORT_LED_INFO_SUP = 0x200,
        IBV_PORT_SYS_IMAGE_GUID_SUP = 0x800,
        IBV_PORT_PKEY_SW_EXT_PORT_TRAP_SUP = 0x1000,
        IBV_PORT_EXTENDED_SPEEDS_SUP = 0x4000,
        IBV_PORT_CAP_MASK2_SUP = 0x8000,
        IBV_PORT_CM_SUP = 0x10000,
        IBV_PORT_SNMP_TUNNEL_SUP = 0x20000,
        IBV_PORT_REINIT_SUP = 0x40000,
        IBV_PORT_DEVICE_MGMT_SUP = 0x80000,
        IBV_PORT_VENDOR_CLASS_SUP = 0x100000,
        IBV_PORT_DR_NOTICE_SUP = 0x200000,
        IBV_PORT_CAP_MASK_NOTICE_SUP = 0x400000,
        IBV_PORT_BOOT_MGMT_SUP = 0x800000,
        IBV_PORT_LINK_LATENCY_SUP = 0x1000000,
        IBV_PORT_CLIENT_REG_SUP = 0x2000000,
        IBV_PORT_IP_BASED_GIDS = 0x4000000,
    }

    /// `enum ibv_port_cap_flags2`.
    enum ibv_port_cap_flags2: u32 {
        IBV_PORT_SET_NODE_DESC_SUP = 0x1,
        IBV_PORT_INFO_EXT_SUP = 0x2,
        IBV_PORT_VIRT_SUP = 0x4,
        IBV_PORT_SWITCH_PORT_STATE_TABLE_SUP = 0x8,
        IBV_PORT_LINK_WIDTH_2X_SUP = 0x10,
        IBV_PORT_LINK_SPEED_HDR_SUP = 0x20,
        IBV_PORT_LINK_SPEED_NDR_SUP = 0x400,
    }

    /// `enum ibv_event_type`.
    enum ibv_event_type: u32 {
        IBV_EVENT_CQ_ERR = 0,
        IBV_EVENT_QP_FATAL = 1,
        IBV_EVENT_QP_REQ_ERR = 2,
        IBV_EVENT_QP_ACCESS_ERR = 3,
        IBV_EVENT_COMM_EST = 4,
        IBV_EVENT_SQ_DRAINED = 5,
        IBV_EVENT_PATH_MIG = 6,
        IBV_EVENT_PATH_MIG_ERR = 7,
        IBV_EVENT_DEVICE_FATAL = 8,
        IBV_EVENT_PORT_ACTIVE = 9,
        IBV_EVENT_PORT_ERR = 10,
        IBV_EVENT_LID_CHANGE = 11,
        IBV_EVENT_PKEY_CHANGE = 12,
        IBV_EVENT_SM_CHANGE = 13,
        IBV_EVENT_SRQ_ERR = 14,
        IBV_EVENT_SRQ_LIMIT_REACHED = 15,
        IBV_EVENT_QP_LAST_WQE_REACHED = 16,
        IBV_EVENT_CLIENT_REREGISTER = 17,
        IBV_EVENT_GID_CHANGE = 18,
        IBV_EVENT_WQ_FATAL = 19,
    }

    /// `enum ibv_wc_status`.
    enum ibv_wc_status: u32 {
        IBV_WC_SUCCESS = 0,
        IBV_WC_LOC_LEN_ERR = 1,
        IBV_WC_LOC_QP_OP_ERR = 2,
        IBV_WC_LOC_EEC_OP_ERR = 3,
        IBV_WC_LOC_PROT_ERR = 4,
        IBV_WC_WR_FLUSH_ERR = 5,
        IBV_WC_MW_BIND_ERR = 6,
        IBV_WC_BAD_RESP_ERR = 7,
        IBV_WC_LOC_ACCESS_ERR = 8,
        IBV_WC_REM_INV_REQ_ERR = 9,
        IBV_WC_REM_ACCESS_ERR = 10,
        IBV_WC_REM_OP_ERR = 11,
        IBV_WC_RETRY_EXC_ERR = 12,
        IBV_WC_RNR_RETRY_EXC_ERR = 13,
        IBV_WC_LOC_RDD_VIOL_ERR = 14,
        IBV_WC_REM_INV_RD_REQ_ERR = 15,
        IBV_WC_REM_ABORT_ERR = 16,
        IBV_WC_INV_EECN_ERR = 17,
        IBV_WC_INV_EEC_STATE_ERR = 18,
        IBV_WC_FATAL_ERR = 19,
        IBV_WC_RESP_TIMEOUT_ERR = 20,
        IBV_WC_GENERAL_ERR = 21,
        IBV_WC_TM_ERR = 22,
        IBV_WC_TM_RNDV_INCOMPLETE = 23,
    }

    /// `enum ibv_wc_opcode`.
    enum ibv_wc_opcode: u32 {
        IBV_WC_SEND = 0,
        IBV_WC_RDMA_WRITE = 1,
        IBV_WC_RDMA_READ = 2,
        IBV_WC_COMP_SWAP = 3,
        IBV_WC_FETCH_ADD = 4,
        IBV_WC_BIND_MW = 5,
        IBV_WC_LOCAL_INV = 6,
        IBV_WC_TSO = 7,
        IBV_WC_ATOMIC_WRITE = 9,
        IBV_WC_RECV = 128,
        IBV_WC_RECV_RDMA_WITH_IMM = 129,
        IBV_WC_TM_ADD = 130,
        IBV_WC_TM_DEL = 131,
        IBV_WC_TM_SYNC = 132,
        IBV_WC_TM_RECV = 133,
        IBV_WC_TM_NO_TAG = 134,
        IBV_WC_DRIVER1 = 135,
        IBV_WC_DRIVER2 = 136,
        IBV_WC_DRIVER3 = 137,
    }

    /// Has no enumeration name in C.
    enum ibv_wc_shift: u32 {
        IBV_WC_IP_CSUM_OK_SHIFT = 2,
    }

    /// `enum ibv_create_cq_wc_flags`.
    enum ibv_create_cq_wc_flags: u32 {
        IBV_WC_EX_WITH_BYTE_LEN = 0x1,
        IBV_WC_EX_WITH_IMM = 0x2,
        IBV_WC_EX_WITH_QP_NUM = 0x4,
        IBV_WC_EX_WITH_SRC_QP = 0x8,
        IBV_WC_EX_WITH_SLID = 0x10,
        IBV_WC_EX_WITH_SL = 0x20,
        IBV_WC_EX_WITH_DLID_PATH_BITS = 0x40,
        IBV_WC_EX_WITH_COMPLETION_TIMESTAMP = 0x80,
        IBV_WC_EX_WITH_CVLAN = 0x100,
        IBV_WC_EX_WITH_FLOW_TAG = 0x200,
        IBV_WC_EX_WITH_TM_INFO = 0x400,
        IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK = 0x800,
    }

    /// Has no enumeration name in C.
    enum ibv_wc_standard: u32 {
        IBV_WC_STANDARD_FLAGS = 127,
    }

    /// Has no enumeration name in C.
    enum ibv_wc_supported: u32 {
        IBV_CREATE_CQ_SUP_WC_FLAGS = 0xfff,
    }

    /// `enum ibv_wc_flags`.
    enum ibv_wc_flags: u32 {
        IBV_WC_GRH = 0x1,
        IBV_WC_WITH_IMM = 0x2,
        IBV_WC_IP_CSUM_OK = 0x4,
        IBV_WC_WITH_INV = 0x8,
        IBV_WC_TM_SYNC_REQ = 0x10,
        IBV_WC_TM_MATCH = 0x20,
        IBV_WC_TM_DATA_VALID = 0x40,
    }

    /// `enum ibv_access_flags`.
    enum ibv_access_flags: u32 {
        IBV_ACCESS_LOCAL_WRITE = 0x1,
        IBV_ACCESS_REMOTE_WRITE = 0x2,
        IBV_ACCESS_REMOTE_READ = 0x4,
        IBV_ACCESS_REMOTE_ATOMIC = 0x8,
        IBV_ACCESS_MW_BIND = 0x10,
        IBV_ACCESS_ZERO_BASED = 0x20,
        IBV_ACCESS_ON_DEMAND = 0x40,
        IBV_ACCESS_HUGETLB = 0x80,
        IBV_ACCESS_RELAXED_ORDERING = 0x100000,
    }

    /// `enum ibv_rereg_mr_flags`.
    enum ibv_rereg_mr_flags: u32 {
        IBV_REREG_MR_CHANGE_TRANSLATION = 0x1,
        IBV_REREG_MR_CHANGE_PD = 0x2,
        IBV_REREG_MR_CHANGE_ACCESS = 0x4,
        IBV_REREG_MR_FLAGS_SUPPORTED = 0x7,
    }

    /// `enum ibv_mw_type`.
    enum ibv_mw_type: u32 {
        IBV_MW_TYPE_1 = 1,
        IBV_MW_TYPE_2 = 2,
    }

    /// `enum ibv_rate`.
    enum ibv_rate: u32 {
        IBV_RATE_MAX = 0,
        IBV_RATE_2_5_GBPS = 2,
        IBV_RATE_5_GBPS = 5,
        IBV_RATE_10_GBPS = 3,
        IBV_RATE_20_GBPS = 6,
        IBV_RATE_30_GBPS = 4,
        IBV_RATE_40_GBPS = 7,
        IBV_RATE_60_GBPS = 8,
        IBV_RATE_80_GBPS = 9,
        IBV_RATE_120_GBPS = 10,
        IBV_RATE_14_GBPS = 11,
        IBV_RATE_56_GBPS = 12,
        IBV_RATE_112_GBPS = 13,
        IBV_RATE_168_GBPS = 14,
        IBV_RATE_25_GBPS = 15,
        IBV_RATE_100_GBPS = 16,
        IBV_RATE_200_GBPS = 17,
        IBV_RATE_300_GBPS = 18,
        IBV_RATE_28_GBPS = 19,
        IBV_RATE_50_GBPS = 20,
        IBV_RATE_400_GBPS = 21,
        IBV_RATE_600_GBPS = 22,
        IBV_RATE_800_GBPS = 23,
        IBV_RATE_1200_GBPS = 24,
    }

    /// `enum ibv_srq_attr_mask`.
    enum ibv_srq_attr_mask: u32 {
        IBV_SRQ_MAX_WR = 0x1,
        IBV_SRQ_LIMIT = 0x2,
    }

    /// `enum ibv_srq_type`.
    enum ibv_srq_type: u32 {
        IBV_SRQT_BASIC = 0,
        IBV_SRQT_XRC = 1,
        IBV_SRQT_TM = 2,
    }

    /// `enum ibv_srq_init_attr_mask`.
    enum ibv_srq_init_attr_mask: u32 {
        IBV_SRQ_INIT_ATTR_TYPE = 0x1,
        IBV_SRQ_INIT_ATTR_PD = 0x2,
        IBV_SRQ_INIT_ATTR_XRCD = 0x4,
        IBV_SRQ_INIT_ATTR_CQ = 0x8,
        IBV_SRQ_INIT_ATTR_TM = 0x10,
        IBV_SRQ_INIT_ATTR_RESERVED = 0x20,
    }

    /// `enum ibv_qp_type`.
    enum ibv_qp_type: u32 {
        IBV_QPT_RC = 2,
        IBV_QPT_UC = 3,
        IBV_QPT_UD = 4,
        IBV_QPT_RAW_PACKET = 8,
        IBV_QPT_XRC_SEND = 9,
        IBV_QPT_XRC_RECV = 10,
        IBV_QPT_DRIVER = 255,
    }

    /// `enum ibv_qp_init_attr_mask`.
    enum ibv_qp_init_attr_mask: u32 {
        IBV_QP_INIT_ATTR_PD = 0x1,
        IBV_QP_INIT_ATTR_XRCD = 0x2,
        IBV_QP_INIT_ATTR_CREATE_FLAGS = 0x4,
        IBV_QP_INIT_ATTR_MAX_TSO_HEADER = 0x8,
        IBV_QP_INIT_ATTR_IND_TABLE = 0x10,
        IBV_QP_INIT_ATTR_RX_HASH = 0x20,
        IBV_QP_INIT_ATTR_SEND_OPS_FLAGS = 0x40,
    }

    /// `enum ibv_qp_create_flags`.
    enum ibv_qp_create_flags: u32 {
        IBV_QP_CREATE_BLOCK_SELF_MCAST_LB = 0x2,
        IBV_QP_CREATE_SCATTER_FCS = 0x100,
        IBV_QP_CREATE_CVLAN_STRIPPING = 0x200,
        IBV_QP_CREATE_SOURCE_QPN = 0x400,
        IBV_QP_CREATE_PCI_WRITE_END_PADDING = 0x800,
    }

    /// `enum ibv_qp_attr_mask`.
    enum ibv_qp_attr_mask: u32 {
        IBV_QP_STATE = 0x1,
        IBV_QP_CUR_STATE = 0x2,
        IBV_QP_EN_SQD_ASYNC_NOTIFY = 0x4,
        IBV_QP_ACCESS_FLAGS = 0x8,
        IBV_QP_PKEY_INDEX = 0x10,
        IBV_QP_PORT = 0x20,
        IBV_QP_QKEY = 0x40,
        IBV_QP_AV = 0x80,
        IBV_QP_PATH_MTU = 0x100,
        IBV_QP_TIMEOUT = 0x200,
        IBV_QP_RETRY_CNT = 0x400,
        IBV_QP_RNR_RETRY = 0x800,
        IBV_QP_RQ_PSN = 0x1000,
        IBV_QP_MAX_QP_RD_ATOMIC = 0x2000,
        IBV_QP_ALT_PATH = 0x4000,
        IBV_QP_MIN_RNR_TIMER = 0x8000,
        IBV_QP_SQ_PSN = 0x10000,
        IBV_QP_MAX_DEST_RD_ATOMIC = 0x20000,
        IBV_QP_PATH_MIG_STATE = 0x40000,
        IBV_QP_CAP = 0x80000,
        IBV_QP_DEST_QPN = 0x100000,
        IBV_QP_RATE_LIMIT = 0x2000000,
    }

    /// `enum ibv_qp_state`.
    enum ibv_qp_state: u32 {
        IBV_QPS_RESET = 0,
        IBV_QPS_INIT = 1,
        IBV_QPS_RTR = 2,
        IBV_QPS_RTS = 3,
        IBV_QPS_SQD = 4,
        IBV_QPS_SQE = 5,
        IBV_QPS_ERR = 6,
        IBV_QPS_UNKNOWN = 7,
    }

    /// `enum ibv_mig_state`.
    enum ibv_mig_state: u32 {
        IBV_MIG_MIGRATED = 0,
        IBV_MIG_REARM = 1,
        IBV_MIG_ARMED = 2,
    }

    /// `enum ibv_wr_opcode`.
    enum ibv_wr_opcode: u32 {
        IBV_WR_RDMA_WRITE = 0,
        IBV_WR_RDMA_WRITE_WITH_IMM = 1,
        IBV_WR_SEND = 2,
        IBV_WR_SEND_WITH_IMM = 3,
        IBV_WR_RDMA_READ = 4,
        IBV_WR_ATOMIC_CMP_AND_SWP = 5,
        IBV_WR_ATOMIC_FETCH_AND_ADD = 6,
        IBV_WR_LOCAL_INV = 7,
        IBV_WR_BIND_MW = 8,
        IBV_WR_SEND_WITH_INV = 9,
        IBV_WR_TSO = 10,
        IBV_WR_DRIVER1 = 11,
        IBV_WR_ATOMIC_WRITE = 15,
    }

    /// `enum ibv_send_flags`.
    enum ibv_send_flags: u32 {
        IBV_SEND_FENCE = 0x1,
        IBV_SEND_SIGNALED = 0x2,
        IBV_SEND_SOLICITED = 0x4,
        IBV_SEND_INLINE = 0x8,
        IBV_SEND_IP_CSUM = 0x10,
    }

    /// `enum ibv_cq_attr_mask`.
    enum ibv_cq_attr_mask: u32 {
        IBV_CQ_ATTR_MODERATE = 0x1,
        IBV_CQ_ATTR_RESERVED = 0x2,
    }

    /// Has no enumeration name in C.
    enum ibv_sysfs_max: usize {
        IBV_SYSFS_NAME_MAX = 64,
        IBV_SYSFS_PATH_MAX = 0x100,
    }

    /// `enum ibv_cq_init_attr_mask`.
    enum ibv_cq_init_attr_mask: u32 {
        IBV_CQ_INIT_ATTR_MASK_FLAGS = 0x1,
        IBV_CQ_INIT_ATTR_MASK_PD = 0x2,
    }

    /// `enum ibv_create_cq_attr_flags`.
    enum ibv_create_cq_attr_flags: u32 {
        IBV_CREATE_CQ_ATTR_SINGLE_THREADED = 0x1,
        IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN = 0x2,
    }

    /// Has no enumeration name in C.
    enum ibv_various: u32 {
        IBV_ADVISE_MR_FLAG_FLUSH = 1,
        IBV_QPF_GRH_REQUIRED = 1,
        IBV_ACCESS_OPTIONAL_RANGE = 0x3ff00000,
        IBV_ACCESS_OPTIONAL_FIRST = 0x100000,
    }

    /// `enum ibv_qp_create_send_ops_flags`.
    enum ibv_qp_create_send_ops_flags: u32 {
        IBV_QP_EX_WITH_RDMA_WRITE = 0x1,
        IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM = 0x2,
        IBV_QP_EX_WITH_SEND = 0x4,
        IBV_QP_EX_WITH_SEND_WITH_IMM = 0x8,
        IBV_QP_EX_WITH_RDMA_READ = 0x10,
        IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP = 0x20,
        IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD = 0x40,
        IBV_QP_EX_WITH_LOCAL_INV = 0x80,
        IBV_QP_EX_WITH_BIND_MW = 0x100,
        IBV_QP_EX_WITH_SEND_WITH_INV = 0x200,
        IBV_QP_EX_WITH_TSO = 0x400,
        IBV_QP_EX_WITH_ATOMIC_WRITE = 0x1000,
    }
}
