//! Listening at addresses, and connecting to them, with channels of any kind.

use crate::cm::names::{Network, PortSpace, name};
use crate::device::Device;
use ginnel::{Channel, ChannelOptions, Error, ErrorCode, Listener};
use std::net::SocketAddr;
use std::sync::Arc;

/// A listener, and the device through which peers reach it.
pub type BoundListener<C> = (Listener<C>, Arc<Device>);

/// Listens at each of the addresses on each of the devices. None of them may be an unspecified address. The first address must be free
/// on all devices; any other that is in use is left out.
pub fn listen<C: Channel>(
    devices: &[Arc<Device>],
    space: PortSpace,
    addresses: &[SocketAddr],
    namespace: u64,
    options: &ChannelOptions,
) -> Result<Vec<BoundListener<C>>, Error> {
    let mut found = Vec::new();
    for device in devices {
        let network = Network { member: device.member(), namespace };
        for (i, address) in addresses.iter().enumerate() {
            match device.endpoint().listen_with(&name(space, *address, network), options) {
                Ok(listener) => found.push((listener, device.clone())),
                Err(error) if i == 0 || error.code() != Some(ErrorCode::IN_USE) => return Err(error),
                Err(_) => {}
            }
        }
    }
    Ok(found)
}

/// Opens a channel to the listener of an address on a device. Returns `None` if nobody listens there, or only with channels of another
/// kind. Asks the daemon.
pub fn connect<C: Channel>(
    device: &Device,
    space: PortSpace,
    address: SocketAddr,
    namespace: u64,
    options: &ChannelOptions,
) -> Result<Option<C>, Error> {
    let network = Network { member: device.member(), namespace };
    match device.endpoint().connect_with(&name(space, address, network), options) {
        Ok(channel) => Ok(Some(channel)),
        Err(error) => match error.code() {
            Some(ErrorCode::REFUSED | ErrorCode::NOT_FOUND | ErrorCode::KIND) => Ok(None),
            _ => Err(error),
        },
    }
}
