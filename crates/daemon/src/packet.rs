//! Seqpacket sockets with file descriptors.
