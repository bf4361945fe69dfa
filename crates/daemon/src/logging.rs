//! Logs of both roles.
