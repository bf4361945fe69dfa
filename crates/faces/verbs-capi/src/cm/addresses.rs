//! Conversion of C addresses, and the addresses of this machine and its network namespace.
#![allow(unsafe_code)] // C structures and functions.

use libc::{sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage, socklen_t};
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, UdpSocket};
use std::os::unix::fs::MetadataExt;
use std::{fs, io, ptr};

/// Converts an address from C. Returns `None` if it is null, or neither IPv4 nor IPv6.
///
/// # Safety
///
/// The pointer is null, or points to an address of the length that its family requires.
pub unsafe fn read(address: *const sockaddr) -> Option<SocketAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: the caller's address, which may be unaligned.
    unsafe {
        match libc::c_int::from((*address).sa_family) {
            libc::AF_INET => {
                let address = address.cast::<sockaddr_in>().read_unaligned();
                let ip = Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr));
                Some(SocketAddrV4::new(ip, u16::from_be(address.sin_port)).into())
            }
            libc::AF_INET6 => {
                let address = address.cast::<sockaddr_in6>().read_unaligned();
                let ip = Ipv6Addr::from(address.sin6_addr.s6_addr);
                let port = u16::from_be(address.sin6_port);
                Some(SocketAddrV6::new(ip, port, 0, address.sin6_scope_id).into())
            }
            _ => None,
        }
    }
}

/// Converts an address to C. Returns it with its length in bytes.
pub fn storage(address: SocketAddr) -> (sockaddr_storage, socklen_t) {
    // SAFETY: all-zero bytes are an address without a family.
    let mut storage: sockaddr_storage = unsafe { std::mem::zeroed() };
    let to = &raw mut storage;
    // SAFETY: the storage is large enough, and aligned, for an address of any family.
    let len = unsafe {
        match address {
            SocketAddr::V4(address) => {
                let to = &mut *to.cast::<sockaddr_in>();
                to.sin_family = libc::AF_INET as libc::sa_family_t;
                to.sin_port = address.port().to_be();
                to.sin_addr.s_addr = u32::from(*address.ip()).to_be();
                size_of::<sockaddr_in>()
            }
            SocketAddr::V6(address) => {
                let to = &mut *to.cast::<sockaddr_in6>();
                to.sin6_family = libc::AF_INET6 as libc::sa_family_t;
                to.sin6_port = address.port().to_be();
                to.sin6_addr.s6_addr = address.ip().octets();
                to.sin6_scope_id = address.scope_id();
                size_of::<sockaddr_in6>()
            }
        }
    };
    (storage, len as socklen_t)
}

/// Returns the addresses of this machine's interfaces, without loopback addresses and link-local addresses. The latter have a meaning on
/// their link only.
pub fn local() -> Vec<IpAddr> {
    let mut found = Vec::new();
    let mut list = ptr::null_mut();
    // SAFETY: the list is read up to its end, then freed.
    unsafe {
        if libc::getifaddrs(&raw mut list) != 0 {
            return found;
        }
        let mut next = list;
        while let Some(interface) = next.as_ref() {
            found.extend(read(interface.ifa_addr).map(|address| address.ip().to_canonical()));
            next = interface.ifa_next;
        }
        libc::freeifaddrs(list);
    }
    let is_of_link = |ip: &IpAddr| match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    found.retain(|ip| !ip.is_loopback() && !is_of_link(ip));
    found.sort_unstable();
    found.dedup();
    found
}

/// Returns whether an address belongs to this machine.
pub fn is_local(ip: IpAddr) -> bool {
    let ip = ip.to_canonical();
    ip.is_loopback() || local().contains(&ip)
}

/// Returns the address from which the kernel would send to this address. Sends nothing.
pub fn source(to: SocketAddr) -> io::Result<IpAddr> {
    let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    // The call requires a port, but sends nothing to it.
    socket.connect(SocketAddr::new(to.ip(), to.port().max(1)))?;
    Ok(socket.local_addr()?.ip())
}

/// Returns a random port of the kernel's range of ephemeral ports, which is probably free.
pub fn any_port() -> u16 {
    32768 + (RandomState::new().hash_one(0) % 28232) as u16
}

/// Returns the addresses that a listener uses. The first one must be free.
pub fn listened(bound: SocketAddr) -> Vec<SocketAddr> {
    let with_port = |ip| SocketAddr::new(ip, bound.port());
    if !bound.ip().is_unspecified() {
        return vec![bound];
    }
    let loopback = with_port(Ipv4Addr::LOCALHOST.into());
    let others = local().into_iter().filter(|ip| bound.is_ipv6() || ip.is_ipv4());
    std::iter::once(loopback).chain(others.map(with_port)).collect()
}

/// Returns the destination of a connection. As with connect(2), an unspecified address means this machine.
pub fn target(to: SocketAddr) -> SocketAddr {
    let ip = match to.ip() {
        ip if !ip.is_unspecified() => ip,
        IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    };
    SocketAddr::new(ip, to.port())
}

/// Returns the source address of a connection: the bound one, with the missing parts as the kernel would choose them.
pub fn origin(bound: Option<SocketAddr>, to: SocketAddr) -> io::Result<SocketAddr> {
    let ip = match bound.map(|bound| bound.ip()).filter(|ip| !ip.is_unspecified()) {
        Some(ip) => ip,
        None => source(to)?,
    };
    Ok(SocketAddr::new(ip, bound.map_or_else(any_port, |bound| bound.port())))
}

/// Returns the number of this process's network namespace, or 0 if it cannot be determined.
pub fn namespace() -> u64 {
    fs::metadata("/proc/self/ns/net").map_or(0, |metadata| metadata.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c_addresses_are_read_and_written() {
        for text in ["10.1.2.3:4", "[fd00::1%5]:65535", "[::ffff:10.0.0.1]:0"] {
            let address: SocketAddr = text.parse().unwrap();
            let (storage, len) = storage(address);
            assert!(len as usize <= size_of_val(&storage));
            // SAFETY: the address was written just now.
            assert_eq!(unsafe { read((&raw const storage).cast()) }, Some(address), "{text}");
        }
        // SAFETY: a null pointer, and an address without a family.
        unsafe {
            assert_eq!(read(ptr::null()), None);
            let nothing: sockaddr_storage = std::mem::zeroed();
            assert_eq!(read((&raw const nothing).cast()), None);
        }
    }

    #[test]
    fn this_machine_knows_its_addresses() {
        assert!(is_local("127.0.0.1".parse().unwrap()) && is_local("::ffff:127.3.0.1".parse().unwrap()));
        assert!(!is_local("192.0.2.1".parse().unwrap()));
        assert!(source("127.0.0.1:0".parse().unwrap()).unwrap().is_loopback());
        assert_ne!(namespace(), 0);
    }
}
