//! The binary interface of libibverbs and librdmacm, as far as a replacement of these libraries needs it: structures, with the size and
//! the offset of every field asserted at compile time, and constants. Written by hand from the public headers of rdma-core 44;
//! `tests/headers.rs` compares all of it with the installed headers.
//!
//! The names are those of C, and the manual pages define their meaning (`ibv_post_send(3)`), so only structures have a comment. C
//! enumerations are integers here, because a value that this crate does not know must still be representable. Integers that C calls
//! `__be16` to `__be64` are in network byte order.
//!
//! A structure that newer headers extend is marked as such. A program that was compiled with such a header still works: a mask, a size
//! or `verbs_context.sz` says how many fields the program expects or may use.
#![no_std]
#![allow(non_camel_case_types, non_snake_case)] // C's names are kept.
#![allow(missing_docs)] // The manual pages of the libraries document the items: see above.

#[cfg(not(target_pointer_width = "64"))]
compile_error!("sizes and offsets are those of machines with 64 bits");

/// How newer headers may extend a structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Growth {
    /// The size is fixed.
    None,
    /// New fields are appended.
    Behind,
    /// New fields are added in front, so the distance of a field from the end stays the same.
    InFront,
}

/// A description of a structure, for comparison with the C compiler's layout.
#[derive(Clone, Copy, Debug)]
pub struct Structure {
    /// The name that follows `struct` in C.
    pub name: &'static str,
    /// Size in bytes.
    pub size: usize,
    /// How newer headers may extend the structure.
    pub growth: Growth,
    /// The fields by their C names, with their offsets in bytes.
    pub fields: &'static [(&'static str, usize)],
}

macro_rules! growth {
    () => {
        $crate::Growth::None
    };
    (grows) => {
        $crate::Growth::Behind
    };
    (up) => {
        $crate::Growth::InFront
    };
}

macro_rules! name_in_c {
    ($field:ident) => {
        stringify!($field)
    };
    ($field:ident $name:literal) => {
        $name
    };
}

/// Declares structures. Each field is preceded by its offset, and followed by its C name if that differs. The pthread types have other
/// sizes on other architectures, so the numbers are asserted on x86-64 only.
macro_rules! structures {
    ($table:ident; $(
        $(#[$doc:meta])*
        struct $name:ident, $size:literal $($growth:ident)? { $($at:literal $field:ident $(= $c:literal)?: $type:ty),* $(,)? }
    )*) => {
        $(
            $(#[$doc])*
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub struct $name { $(pub $field: $type,)* }

            impl $name {
                /// The structure with all bytes zero.
                // SAFETY: every field is an integer, a raw pointer, an optional function, or a structure, a union or an
                // array of such; zero is a value of each.
                pub const ZEROED: Self = unsafe { core::mem::zeroed() };
            }

            #[cfg(target_arch = "x86_64")]
            const _: () = {
                assert!(size_of::<$name>() == $size);
                $(assert!(core::mem::offset_of!($name, $field) == $at);)*
            };
        )*

        /// The structures of this module.
        pub const $table: &[$crate::Structure] = &[$(
            $crate::Structure {
                name: stringify!($name),
                size: $size,
                growth: growth!($($growth)?),
                fields: &[$((name_in_c!($field $($c)?), $at)),*],
            },
        )*];
    };
}

/// Declares the constants of C enumerations.
macro_rules! constants {
    ($table:ident; $(
        $(#[$doc:meta])*
        enum $name:ident: $base:ident { $($constant:ident = $value:literal),* $(,)? }
    )*) => {
        $(
            $(#[$doc])*
            pub type $name = $base;
            $(pub const $constant: $name = $value;)*
        )*

        /// The constants of this module, by name.
        pub const $table: &[(&str, i64)] = &[$($((stringify!($constant), $value)),*),*];
    };
}

mod constants;
pub mod rdmacm;
#[allow(unsafe_code)] // `ZEROED` is implemented here, so that callers need no unsafe code.
mod verbs;

pub use constants::*;
pub use verbs::*;
