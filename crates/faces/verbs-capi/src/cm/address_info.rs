//! `rdma_getaddrinfo`: translates names of machines and services to addresses.
#![allow(unsafe_code)] // C structures and functions.

use super::{Register, is_here};
use crate::real;
use ginnel_verbs_abi::rdmacm::*;
use ginnel_verbs_abi::*;
use libc::{addrinfo, sockaddr, socklen_t};
use std::ffi::{c_char, c_int};
use std::{mem, ptr};

/// Results of this library that programs hold.
pub static RESULTS: Register = Register::new();

/// Copies an address to memory from malloc. Returns `None` if there is none left.
unsafe fn copy(address: *const sockaddr, len: socklen_t) -> Option<*mut sockaddr> {
    // SAFETY: the caller's address has this length.
    unsafe {
        let to = libc::malloc(len as usize);
        if to.is_null() {
            return None;
        }
        ptr::copy_nonoverlapping(address.cast::<u8>(), to.cast(), len as usize);
        Some(to.cast())
    }
}

/// Converts the hints of librdmacm to those of getaddrinfo.
fn question(hints: &rdma_addrinfo) -> addrinfo {
    // SAFETY: all-zero hints are valid, and request nothing.
    let mut question: addrinfo = unsafe { mem::zeroed() };
    let flags = hints.ai_flags.cast_unsigned();
    let add = |to: &mut c_int, has: bool, flag: c_int| *to |= if has { flag } else { 0 };
    add(&mut question.ai_flags, flags & RAI_PASSIVE != 0, libc::AI_PASSIVE);
    add(&mut question.ai_flags, flags & RAI_NUMERICHOST != 0, libc::AI_NUMERICHOST);
    question.ai_family = hints.ai_family;
    question.ai_socktype = match hints.ai_qp_type.cast_unsigned() {
        IBV_QPT_UD => libc::SOCK_DGRAM,
        0 => 0,
        _ => libc::SOCK_STREAM,
    };
    match hints.ai_port_space.cast_unsigned() {
        RDMA_PS_TCP => question.ai_protocol = libc::IPPROTO_TCP,
        RDMA_PS_UDP | RDMA_PS_IPOIB => question.ai_protocol = libc::IPPROTO_UDP,
        _ => {}
    }
    question
}

/// Fills a result from the first one of getaddrinfo.
unsafe fn fill(result: &mut rdma_addrinfo, hints: &rdma_addrinfo, found: &addrinfo) -> Option<()> {
    let is_datagram = found.ai_socktype == libc::SOCK_DGRAM;
    let or = |wanted: c_int, usual: u32| if wanted == 0 { usual.cast_signed() } else { wanted };
    result.ai_family = found.ai_family;
    result.ai_qp_type = or(hints.ai_qp_type, if is_datagram { IBV_QPT_UD } else { IBV_QPT_RC });
    result.ai_port_space = or(hints.ai_port_space, if is_datagram { RDMA_PS_UDP } else { RDMA_PS_TCP });
    // SAFETY: getaddrinfo reports the length of its address, and its name is a C string.
    unsafe {
        let address = copy(found.ai_addr, found.ai_addrlen)?;
        let name =
            if found.ai_canonname.is_null() { ptr::null_mut() } else { libc::strdup(found.ai_canonname) };
        if hints.ai_flags.cast_unsigned() & RAI_PASSIVE != 0 {
            (result.ai_src_addr, result.ai_src_len, result.ai_src_canonname) =
                (address, found.ai_addrlen, name);
        } else {
            (result.ai_dst_addr, result.ai_dst_len, result.ai_dst_canonname) =
                (address, found.ai_addrlen, name);
        }
    }
    Some(())
}

unsafe fn get(
    node: *const c_char,
    service: *const c_char,
    hints: &rdma_addrinfo,
    result: &mut rdma_addrinfo,
) -> Result<(), c_int> {
    result.ai_flags = hints.ai_flags;
    // SAFETY: the caller's strings and addresses.
    unsafe {
        if node.is_null() && service.is_null() {
            (result.ai_family, result.ai_qp_type) = (hints.ai_family, hints.ai_qp_type);
            result.ai_port_space = hints.ai_port_space;
            if !hints.ai_dst_addr.is_null() {
                let copied = copy(hints.ai_dst_addr, hints.ai_dst_len).ok_or(libc::EAI_MEMORY)?;
                (result.ai_dst_addr, result.ai_dst_len) = (copied, hints.ai_dst_len);
            }
        } else {
            let question = question(hints);
            let mut found = ptr::null_mut();
            let error = libc::getaddrinfo(node, service, &raw const question, &raw mut found);
            if error != 0 {
                return Err(error);
            }
            let filled = fill(result, hints, &*found);
            libc::freeaddrinfo(found);
            filled.ok_or(libc::EAI_MEMORY)?;
        }
        if result.ai_src_addr.is_null() && !hints.ai_src_addr.is_null() {
            let copied = copy(hints.ai_src_addr, hints.ai_src_len).ok_or(libc::EAI_MEMORY)?;
            (result.ai_src_addr, result.ai_src_len) = (copied, hints.ai_src_len);
        }
    }
    Ok(())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_getaddrinfo(
    node: *const c_char,
    service: *const c_char,
    hints: *const rdma_addrinfo,
    result: *mut *mut rdma_addrinfo,
) -> c_int {
    // SAFETY: the caller's strings, structure and pointer.
    unsafe {
        if !is_here() {
            return real::rdma_getaddrinfo(node, service, hints, result);
        }
        if node.is_null() && service.is_null() && hints.is_null() {
            return super::failed(libc::EINVAL);
        }
        let hints = hints.as_ref().copied().unwrap_or(rdma_addrinfo::ZEROED);
        let made = Box::into_raw(Box::new(rdma_addrinfo::ZEROED));
        RESULTS.add(made);
        match get(node, service, &hints, &mut *made) {
            Ok(()) => {
                result.write(made);
                0
            }
            Err(error) => {
                ginnel_rdma_freeaddrinfo(made);
                error
            }
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ginnel_rdma_freeaddrinfo(result: *mut rdma_addrinfo) {
    // SAFETY: the caller's result, which the caller gives up. Its pointers come from malloc, or are null.
    unsafe {
        if !RESULTS.remove(result) {
            return real::rdma_freeaddrinfo(result);
        }
        let result = Box::from_raw(result);
        libc::free(result.ai_src_addr.cast());
        libc::free(result.ai_dst_addr.cast());
        libc::free(result.ai_src_canonname.cast());
        libc::free(result.ai_dst_canonname.cast());
    }
}
