//! The identity of the connection that a socket belongs to.
#![allow(unsafe_code)] // Two ioctls that hand out descriptors of namespaces.

use crate::option;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, ipproto, sockopt};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use thiserror::Error;

/// SO_NETNS_COOKIE (since Linux 5.14).
const NETNS_COOKIE: usize = 71;
/// SIOCGSKNS: the network namespace of a socket.
const SIOCGSKNS: rustix::ioctl::Opcode = 0x894c;
/// NS_GET_USERNS: the user namespace that owns a namespace.
const NS_GET_USERNS: rustix::ioctl::Opcode = 0xb701;
/// PROC_USER_INIT_INO: the inode of the initial user namespace.
const INITIAL: u64 = 0xeffffffd;

/// The established TCP connection of which a socket is an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The address of this end. IPv4 addresses that the program sees mapped into IPv6 are IPv4 here, because the peer
    /// may see them so.
    pub local: SocketAddr,
    /// The address of the other end, in the same form.
    pub remote: SocketAddr,
    /// The kernel's number for this socket, which no other socket gets until the kernel boots again (`SO_COOKIE`).
    pub cookie: u64,
    /// The kernel's number for the network namespace (`SO_NETNS_COOKIE`).
    pub namespace: u64,
}

/// Why a socket is not the end of a TCP connection that can be told from others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NotTcp {
    /// The socket is of another kind.
    #[error("not a TCP socket")]
    Kind,
    /// The socket is not connected yet, or no longer.
    #[error("not an established connection")]
    State,
    /// The kernel is older than Linux 5.14.
    #[error("the kernel does not tell network namespaces apart (Linux 5.14 does)")]
    Kernel,
    /// A call failed.
    #[error(transparent)]
    Errno(#[from] Errno),
}

/// The owner of the network namespace of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// The system's network namespace.
    System,
    /// A network namespace that an ordinary user may have made. That user chooses its addresses freely.
    User,
}

impl Identity {
    /// Reads the identity of this socket. Fails with [`NotTcp`].
    pub fn of(fd: impl AsFd) -> Result<Self, NotTcp> {
        let fd = fd.as_fd();
        let domain = sockopt::socket_domain(fd).map_err(|_| NotTcp::Kind)?;
        let tcp = matches!(domain, AddressFamily::INET | AddressFamily::INET6)
            && sockopt::socket_type(fd)? == SocketType::STREAM
            && sockopt::socket_protocol(fd)? == Some(ipproto::TCP);
        if !tcp {
            return Err(NotTcp::Kind);
        }
        let mut info = [0; 1];
        option::get(fd, option::TCP, TCP_INFO, &mut info)?;
        if info[0] != ESTABLISHED {
            return Err(NotTcp::State);
        }
        let mut namespace = [0; 8];
        match option::get(fd, option::SOCKET, NETNS_COOKIE, &mut namespace) {
            Ok(8) => {}
            Ok(_) | Err(Errno::NOPROTOOPT) => return Err(NotTcp::Kernel),
            Err(error) => return Err(error.into()),
        }
        let (local, remote) = addresses(fd)?;
        Ok(Self {
            local,
            remote,
            cookie: sockopt::socket_cookie(fd)?,
            namespace: u64::from_ne_bytes(namespace),
        })
    }

    /// Returns whether the other identity is that of the other end, by the addresses alone.
    pub fn mirrors(&self, other: &Self) -> bool {
        self.local == other.remote && self.remote == other.local
    }

    /// Returns whether the addresses are valid in this kernel only: loopback and link-local ones.
    pub fn is_within_a_kernel(&self) -> bool {
        [self.local.ip(), self.remote.ip()].iter().any(|address| match address {
            IpAddr::V4(v4) => v4.is_loopback() || v4.is_link_local() || v4.is_unspecified(),
            IpAddr::V6(v6) => v6.is_loopback() || v6.is_unicast_link_local() || v6.is_unspecified(),
        })
    }
}

/// Returns the two addresses of a connection in the form of [`Identity`], this end's first. The kernel knows them
/// until one end has closed the connection in both directions.
pub fn addresses(fd: impl AsFd) -> Result<(SocketAddr, SocketAddr), NotTcp> {
    let remote = rustix::net::getpeername(&fd).ok().flatten().ok_or(NotTcp::State)?;
    Ok((plain(rustix::net::getsockname(&fd)?)?, plain(remote)?))
}

/// TCP_INFO.
pub const TCP_INFO: usize = 11;
/// TCP_ESTABLISHED of `tcpi_state`, the first byte.
const ESTABLISHED: u8 = 1;

fn plain(address: rustix::net::SocketAddrAny) -> Result<SocketAddr, NotTcp> {
    let address = SocketAddr::try_from(address).map_err(|_| NotTcp::Kind)?;
    // The scope and the flow label are left out, because they differ between the two ends.
    Ok(SocketAddr::new(address.ip().to_canonical(), address.port()))
}

impl Owner {
    /// Finds the owner of this socket's network namespace. Needs CAP_NET_ADMIN there.
    pub fn of(socket: impl AsFd) -> rustix::io::Result<Self> {
        let network = namespace(socket.as_fd(), SIOCGSKNS)?;
        let user = namespace(network.as_fd(), NS_GET_USERNS)?;
        Ok(if rustix::fs::fstat(&user)?.st_ino == INITIAL { Self::System } else { Self::User })
    }
}

/// Asks the kernel for a descriptor of a namespace.
fn namespace(of: BorrowedFd<'_>, opcode: rustix::ioctl::Opcode) -> rustix::io::Result<OwnedFd> {
    struct Get(rustix::ioctl::Opcode);
    // SAFETY: both ioctls take no argument and return a new descriptor, which no other code has.
    unsafe impl rustix::ioctl::Ioctl for Get {
        type Output = OwnedFd;
        const IS_MUTATING: bool = false;
        fn opcode(&self) -> rustix::ioctl::Opcode {
            self.0
        }
        fn as_ptr(&mut self) -> *mut std::ffi::c_void {
            std::ptr::null_mut()
        }
        unsafe fn output_from_ptr(
            fd: rustix::ioctl::IoctlOutput,
            _: *mut std::ffi::c_void,
        ) -> rustix::io::Result<OwnedFd> {
            // SAFETY: the ioctl has just made this descriptor, so no other code owns it.
            Ok(unsafe { OwnedFd::from_raw_fd(fd) })
        }
    }
    // SAFETY: the opcode is that of one of the two ioctls, which take no argument.
    unsafe { rustix::ioctl::ioctl(of, Get(opcode)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream, UdpSocket};

    fn pair(address: &str) -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind(address).unwrap();
        let connector = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (connector, listener.accept().unwrap().0)
    }

    #[test]
    fn two_ends_mirror_each_other() {
        let (connector, acceptor) = pair("127.0.0.1:0");
        let (a, b) = (Identity::of(&connector).unwrap(), Identity::of(&acceptor).unwrap());
        assert!(a.mirrors(&b) && b.mirrors(&a) && !a.mirrors(&a));
        assert_eq!(a.namespace, b.namespace);
        assert_ne!(a.cookie, b.cookie);
        assert!(a.is_within_a_kernel());
        let other = pair("127.0.0.1:0");
        assert!(!a.mirrors(&Identity::of(&other.1).unwrap()));
        let copy = connector.try_clone().unwrap();
        assert_eq!(Identity::of(&copy).unwrap(), a, "a duplicate is the same socket");
    }

    #[test]
    fn an_address_mapped_into_ipv6_is_ipv4_for_both() {
        let listener = TcpListener::bind("[::]:0");
        kit::require!(listener.is_ok(), "no IPv6: {listener:?}");
        let listener = listener.unwrap();
        let port = listener.local_addr().unwrap().port();
        let connector = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let acceptor = listener.accept().unwrap().0;
        assert!(acceptor.peer_addr().unwrap().is_ipv6());
        assert!(Identity::of(&connector).unwrap().mirrors(&Identity::of(&acceptor).unwrap()));
    }

    #[test]
    fn nothing_but_an_established_connection_has_an_identity() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        assert_eq!(Identity::of(&listener), Err(NotTcp::State));
        assert_eq!(Identity::of(UdpSocket::bind("127.0.0.1:0").unwrap()), Err(NotTcp::Kind));
        assert_eq!(Identity::of(std::os::unix::net::UnixStream::pair().unwrap().0), Err(NotTcp::Kind));
        assert_eq!(Identity::of(std::fs::File::open("/dev/null").unwrap()), Err(NotTcp::Kind));
        let (connector, acceptor) = pair("127.0.0.1:0");
        let local = connector.local_addr().unwrap();
        acceptor.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(Identity::of(&acceptor), Err(NotTcp::State));
        assert_eq!(addresses(&connector).unwrap().0, local, "they are known for longer");
        drop(connector);
    }

    #[test]
    fn the_owner_of_the_namespace_is_told_to_administrators() {
        let (connector, _acceptor) = pair("127.0.0.1:0");
        match Owner::of(&connector) {
            Ok(_) | Err(Errno::PERM) => {}
            Err(error) => panic!("{error}"),
        }
    }
}
