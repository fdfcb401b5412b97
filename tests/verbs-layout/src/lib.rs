//! Our structures of libibverbs against those of rdma-sys, which bindgen makes from the header of
//! this machine: sizes, alignments and the place of every field.
//!
//! Not part of the workspace: rdma-sys needs libclang and links the library. To run it:
//! `apt-get install libibverbs-dev librdmacm-dev pkg-config libclang-14-dev`, then
//! `LIBCLANG_PATH=/usr/lib/llvm-14/lib cargo test --manifest-path tests/verbs-layout/Cargo.toml`.

#![cfg(test)]

#[path = "../../../transport/tests/verbs_abi/list.rs"]
mod list;

use std::mem::{align_of, offset_of, size_of};

use kvlane_transport::sys::verbs::abi as ours;
use rdma_sys as theirs;

macro_rules! their_name {
    ($name:ident, $field:ident) => {
        offset_of!(theirs::$name, $field)
    };
    ($name:ident, $field:ident $theirs:ident) => {
        offset_of!(theirs::$name, $theirs)
    };
}

macro_rules! compare {
    ($($kind:ident $name:ident {
        $($field:ident $(($header:literal, $theirs:ident))?)*
    })*) => {
        #[test]
        fn every_structure_is_that_of_rdma_sys() {
            $(
                let name = stringify!($name);
                assert_eq!(size_of::<ours::$name>(), size_of::<theirs::$name>(), "{name}");
                assert_eq!(align_of::<ours::$name>(), align_of::<theirs::$name>(), "{name}");
                $(
                    let here = offset_of!(ours::$name, $field);
                    let there = their_name!($name, $field $($theirs)?);
                    assert_eq!(here, there, "{name}.{}", stringify!($field));
                )*
            )*
        }
    };
}
list::every_structure!(compare);

#[test]
fn so_is_the_side_of_a_union_that_we_use() {
    assert_eq!(
        offset_of!(ours::ibv_send_wr_rdma, remote_addr),
        offset_of!(theirs::rdma_t, remote_addr)
    );
    assert_eq!(offset_of!(ours::ibv_send_wr_rdma, rkey), offset_of!(theirs::rdma_t, rkey));
    assert_eq!(size_of::<ours::ibv_send_wr_rdma>(), size_of::<theirs::wr_t>());
}
