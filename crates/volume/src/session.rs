//! One front end: its messages, and what they make of the device.

pub mod message;
