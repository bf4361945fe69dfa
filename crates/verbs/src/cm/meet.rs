//! Listening at addresses, and reaching whoever listens at one, with channels of any kind.

use std::net::SocketAddr;
use std::sync::Arc;

use ginnel::{Channel, ChannelOptions, Error, ErrorCode, Listener};

use crate::cm::names::{Network, Space, name};
use crate::device::Device;

/// A listener, and the device through which others reach it.
pub type Door<C> = (Listener<C>, Arc<Device>);

/// Listens at addresses, none of which is an unspecified one, of each of the devices. The first address must be free on all of them;
/// others that somebody else has are left out.
pub fn listen<C: Channel>(
    devices: &[Arc<Device>],
    space: Space,
    addresses: &[SocketAddr],
    namespace: u64,
    options: &ChannelOptions,
) -> Result<Vec<Door<C>>, Error> {
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

/// Opens a channel to whoever listens at an address of a device; `None` if nobody does, or only with channels of another kind. Asks the
/// daemon.
pub fn reach<C: Channel>(
    device: &Device,
    space: Space,
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
