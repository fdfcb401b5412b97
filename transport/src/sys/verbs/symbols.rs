//! The functions of libibverbs, found at run time.

use std::ffi::{c_char, c_int, c_uint, c_void};

use kvlane_proto::{Error, ErrorKind, Result};

use super::abi::{
    ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_device_attr,
    ibv_gid_entry, ibv_mr, ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_attr, ibv_qp_init_attr,
};

macro_rules! symbols {
    (
        needed { $($needed:ident $needed_name:literal ($($from:ty),*) $(-> $to:ty)?;)* }
        newer { $($newer:ident $newer_name:literal ($($newer_from:ty),*) $(-> $newer_to:ty)?;)* }
    ) => {
        /// What is called of libibverbs, under its names less `ibv_`. What the header has inline
        /// goes through the table in `ibv_context`.
        #[allow(missing_docs)] // Described in the manual pages, section 3.
        #[derive(Clone, Copy, Debug)]
        pub struct Symbols {
            $(pub $needed: unsafe extern "C" fn($($from),*) $(-> $to)?,)*
            // Absent in older releases, which can be used without.
            $(pub $newer: Option<unsafe extern "C" fn($($newer_from),*) $(-> $newer_to)?>,)*
        }

        impl Symbols {
            /// # Safety
            /// The library is libibverbs, and is never unloaded.
            unsafe fn of(library: &libloading::Library, path: &str) -> Result<Self> {
                // SAFETY: the types are those of the manual pages, and held against the header by
                // the tests; the functions stay, by the caller's promise.
                unsafe {
                    Ok(Self {
                        $($needed: *library
                            .get(concat!($needed_name, "\0").as_bytes())
                            .map_err(|e| lacks(path, $needed_name, &e))?,)*
                        $($newer: library
                            .get(concat!($newer_name, "\0").as_bytes())
                            .ok()
                            .map(|symbol| *symbol),)*
                    })
                }
            }
        }
    };
}

symbols! {
    needed {
        get_device_list "ibv_get_device_list" (*mut c_int) -> *mut *mut ibv_device;
        free_device_list "ibv_free_device_list" (*mut *mut ibv_device);
        get_device_name "ibv_get_device_name" (*mut ibv_device) -> *const c_char;
        get_device_guid "ibv_get_device_guid" (*mut ibv_device) -> u64;
        open_device "ibv_open_device" (*mut ibv_device) -> *mut ibv_context;
        close_device "ibv_close_device" (*mut ibv_context) -> c_int;
        get_async_event "ibv_get_async_event" (*mut ibv_context, *mut ibv_async_event) -> c_int;
        ack_async_event "ibv_ack_async_event" (*mut ibv_async_event);
        query_device "ibv_query_device" (*mut ibv_context, *mut ibv_device_attr) -> c_int;
        query_port "ibv_query_port" (*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
        query_gid_table "_ibv_query_gid_table"
            (*mut ibv_context, *mut ibv_gid_entry, usize, u32, usize) -> isize;
        alloc_pd "ibv_alloc_pd" (*mut ibv_context) -> *mut ibv_pd;
        dealloc_pd "ibv_dealloc_pd" (*mut ibv_pd) -> c_int;
        reg_mr "ibv_reg_mr" (*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
        dereg_mr "ibv_dereg_mr" (*mut ibv_mr) -> c_int;
        create_comp_channel "ibv_create_comp_channel" (*mut ibv_context) -> *mut ibv_comp_channel;
        destroy_comp_channel "ibv_destroy_comp_channel" (*mut ibv_comp_channel) -> c_int;
        create_cq "ibv_create_cq"
            (*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
        destroy_cq "ibv_destroy_cq" (*mut ibv_cq) -> c_int;
        get_cq_event "ibv_get_cq_event"
            (*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
        ack_cq_events "ibv_ack_cq_events" (*mut ibv_cq, c_uint);
        create_qp "ibv_create_qp" (*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
        modify_qp "ibv_modify_qp" (*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
        query_qp "ibv_query_qp"
            (*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr) -> c_int;
        destroy_qp "ibv_destroy_qp" (*mut ibv_qp) -> c_int;
    }
    newer {
        reg_mr_iova2 "ibv_reg_mr_iova2"
            (*mut ibv_pd, *mut c_void, usize, u64, c_uint) -> *mut ibv_mr;
        reg_dmabuf_mr "ibv_reg_dmabuf_mr"
            (*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr;
    }
}

const INSTALL: &str = "apt-get install libibverbs1 ibverbs-providers";

fn lacks(path: &str, symbol: &str, e: &libloading::Error) -> Error {
    Error::new(ErrorKind::Config, format!("{path} has no {symbol}"))
        .with("said", e)
        .hint(format!("rdma-core 32 or newer is needed: {INSTALL}"))
}

impl Symbols {
    /// Those of a library that the system's loader finds under this name.
    pub(super) fn load(path: &str) -> Result<Self> {
        // SAFETY: the code that runs when libibverbs is loaded is as trusted as that which drives
        // the NIC afterwards; it reads its configuration and starts nothing.
        let library = unsafe { libloading::Library::new(path) }.map_err(|e| {
            Error::new(ErrorKind::Config, "libibverbs cannot be loaded: no RDMA verbs here")
                .with("tried", path)
                .with("said", e)
                .hint(INSTALL)
        })?;
        // SAFETY: it is libibverbs by its name, and forgotten below or useless.
        let symbols = unsafe { Self::of(&library, path) };
        if symbols.is_ok() {
            // Providers register with it when they are loaded, so it stays to the end.
            std::mem::forget(library);
        }
        symbols
    }
}
