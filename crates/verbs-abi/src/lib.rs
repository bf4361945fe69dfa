//! The binary interface of libibverbs and librdmacm, as far as a library that takes their place touches it: structures with
//! the size and the offset of every field asserted at compile time, and constants. Written by hand from the public headers of
//! rdma-core 44; `tests/headers.rs` compares all of it with the headers that are installed.
//!
//! Names are those of C, and what they mean is in the manual pages (`ibv_post_send(3)`), so only structures have a comment.
//! Enumerations of C are integers here: a value that nobody knows is data. Integers that C calls `__be16` to `__be64` are in
//! network order.
//!
//! Structures that newer headers make longer say so. A program that was compiled with such a header still works: it says in a
//! mask, a size or `verbs_context.sz` how much it expects, or is told.
#![no_std]
#![allow(non_camel_case_types, non_snake_case)] // The names of C.
#![allow(missing_docs)] // See above: the manual pages of the libraries.

#[cfg(not(target_pointer_width = "64"))]
compile_error!("sizes and offsets are those of machines with 64 bits");

/// How the structures of newer headers relate to those of this crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Growth {
    /// Not at all: the size is fixed.
    None,
    /// New fields come behind the last one.
    Behind,
    /// New fields come in front of the first one, so distances from the end stay.
    InFront,
}

/// A structure, for comparison with what a C compiler says.
#[derive(Clone, Copy, Debug)]
pub struct Structure {
    /// Its name behind `struct`.
    pub name: &'static str,
    /// Its size in bytes.
    pub size: usize,
    /// What newer headers may do to it.
    pub growth: Growth,
    /// Its fields as C names them, with their offsets.
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

/// Declares structures. In front of each field is its offset, behind it the name in C if that is another one. The pthread types
/// have other sizes elsewhere, so the numbers are asserted on x86-64 alone.
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
                /// All bytes zero.
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

/// Declares the constants of C's enumerations.
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
#[allow(unsafe_code)] // Structures of zeros, for callers that have no unsafe code.
mod verbs;

pub use constants::*;
pub use verbs::*;
