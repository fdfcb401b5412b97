//! The structures and numbers of libibverbs: each as in `<infiniband/verbs.h>`, by a C program that
//! prints what the header says.
//!
//! Without `libibverbs-dev` there is nothing to hold ours against and the test says so; with
//! `KVLANE_MLX5DV=must` in the environment that is a failure. `tests/verbs-layout` compares with
//! rdma-sys.

#![allow(clippy::unwrap_used, clippy::panic)] // Tests fail by panicking.

#[path = "verbs_abi/list.rs"]
mod list;
#[path = "common/rdma_core.rs"]
mod rdma_core;

use std::fmt::Write as _;
use std::mem::{align_of, offset_of, size_of};
use std::process::Command;

use kvlane_transport::sys::verbs::abi;

/// The expression in C, and what it is here.
type Fact = (String, i128);

macro_rules! c_name {
    ($field:ident) => {
        stringify!($field)
    };
    ($field:ident $name:literal) => {
        $name
    };
}

macro_rules! facts {
    ($($kind:ident $name:ident {
        $($field:ident $(($header:literal, $crate_name:ident))?)*
    })*) => {
        fn structures() -> Vec<Fact> {
            let mut facts = Vec::new();
            $({
                // Does not compile if one of our fields is not in the list.
                let _ = |abi::$name { $($field: _),* }: abi::$name| {};
                let kind = concat!(stringify!($kind), " ", stringify!($name));
                facts.push((format!("sizeof({kind})"), size_of::<abi::$name>() as i128));
                facts.push((format!("_Alignof({kind})"), align_of::<abi::$name>() as i128));
                $(
                    let field = c_name!($field $($header)?);
                    let at = offset_of!(abi::$name, $field) as i128;
                    facts.push((format!("offsetof({kind}, {field})"), at));
                )*
            })*
            facts
        }
    };
}
list::every_structure!(facts);

macro_rules! constants {
    ($($name:ident)*) => {
        fn constants() -> Vec<Fact> {
            vec![$((stringify!($name).into(), abi::$name as i128)),*]
        }
    };
}
constants! {
    IBV_SYSFS_NAME_MAX IBV_SYSFS_PATH_MAX IBV_NODE_CA IBV_NODE_RNIC IBV_TRANSPORT_IB
    IBV_TRANSPORT_IWARP IBV_GID_TYPE_IB IBV_GID_TYPE_ROCE_V1 IBV_GID_TYPE_ROCE_V2
    IBV_MTU_256 IBV_MTU_512 IBV_MTU_1024 IBV_MTU_2048 IBV_MTU_4096 IBV_PORT_DOWN
    IBV_PORT_INIT IBV_PORT_ARMED IBV_PORT_ACTIVE IBV_LINK_LAYER_INFINIBAND
    IBV_LINK_LAYER_ETHERNET IBV_EVENT_CQ_ERR IBV_EVENT_QP_FATAL IBV_EVENT_QP_REQ_ERR
    IBV_EVENT_QP_ACCESS_ERR IBV_EVENT_COMM_EST IBV_EVENT_SQ_DRAINED IBV_EVENT_PATH_MIG
    IBV_EVENT_PATH_MIG_ERR IBV_EVENT_DEVICE_FATAL IBV_EVENT_PORT_ACTIVE IBV_EVENT_PORT_ERR
    IBV_EVENT_LID_CHANGE IBV_EVENT_PKEY_CHANGE IBV_EVENT_SM_CHANGE
    IBV_EVENT_QP_LAST_WQE_REACHED IBV_EVENT_CLIENT_REREGISTER IBV_EVENT_GID_CHANGE
    IBV_WC_SUCCESS IBV_WC_LOC_LEN_ERR IBV_WC_LOC_QP_OP_ERR IBV_WC_LOC_PROT_ERR
    IBV_WC_WR_FLUSH_ERR IBV_WC_MW_BIND_ERR IBV_WC_BAD_RESP_ERR IBV_WC_LOC_ACCESS_ERR
    IBV_WC_REM_INV_REQ_ERR IBV_WC_REM_ACCESS_ERR IBV_WC_REM_OP_ERR IBV_WC_RETRY_EXC_ERR
    IBV_WC_RNR_RETRY_EXC_ERR IBV_WC_REM_ABORT_ERR IBV_WC_FATAL_ERR IBV_WC_RESP_TIMEOUT_ERR
    IBV_WC_GENERAL_ERR IBV_WC_RDMA_WRITE IBV_WC_RECV IBV_WC_RECV_RDMA_WITH_IMM
    IBV_WC_WITH_IMM IBV_ACCESS_LOCAL_WRITE IBV_ACCESS_REMOTE_WRITE
    IBV_ACCESS_RELAXED_ORDERING IBV_QPT_RC IBV_QPS_RESET IBV_QPS_INIT IBV_QPS_RTR
    IBV_QPS_RTS IBV_QPS_SQD IBV_QPS_SQE IBV_QPS_ERR IBV_QP_STATE IBV_QP_ACCESS_FLAGS
    IBV_QP_PKEY_INDEX IBV_QP_PORT IBV_QP_AV IBV_QP_PATH_MTU IBV_QP_TIMEOUT
    IBV_QP_RETRY_CNT IBV_QP_RNR_RETRY IBV_QP_RQ_PSN IBV_QP_MAX_QP_RD_ATOMIC
    IBV_QP_MIN_RNR_TIMER IBV_QP_SQ_PSN IBV_QP_MAX_DEST_RD_ATOMIC IBV_QP_DEST_QPN
    IBV_WR_RDMA_WRITE IBV_WR_RDMA_WRITE_WITH_IMM IBV_SEND_SIGNALED IBV_SEND_INLINE
}

#[test]
fn every_structure_and_number_is_that_of_the_header() {
    let mut ours = structures();
    ours.push((
        "offsetof(struct ibv_send_wr, wr.rdma.remote_addr)".into(),
        offset_of!(abi::ibv_send_wr, rdma.remote_addr) as i128,
    ));
    ours.push((
        "offsetof(struct ibv_send_wr, wr.rdma.rkey)".into(),
        offset_of!(abi::ibv_send_wr, rdma.rkey) as i128,
    ));
    ours.extend(constants());

    let mut program =
        String::from("#include <infiniband/verbs.h>\n#include <stddef.h>\n#include <stdio.h>\n");
    program += "int main(void)\n{\n";
    for (expression, _) in &ours {
        writeln!(program, "\tprintf(\"%lld\\n\", (long long)({expression}));").unwrap();
    }
    program += "\treturn 0;\n}\n";
    let Some(program) = rdma_core::compiled("infiniband/verbs.h", "verbs-abi", &program) else {
        return;
    };
    let output = Command::new(program).output().unwrap();
    assert!(output.status.success(), "{:?}", output.status);
    let theirs = String::from_utf8(output.stdout).unwrap();
    let theirs: Vec<i128> = theirs.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(ours.len(), theirs.len());
    let differ: Vec<_> =
        ours.iter().zip(theirs).filter(|(ours, theirs)| ours.1 != *theirs).collect();
    assert!(differ.is_empty(), "ours, and the header's: {differ:?}");
}

#[test]
fn no_number_and_no_structure_is_left_out() {
    let source = include_str!("../src/sys/verbs/abi.rs");
    let declared: Vec<_> = source
        .lines()
        .filter_map(|line| line.strip_prefix("pub const "))
        .map(|rest| rest.split(':').next().unwrap().to_owned())
        .collect();
    let compared: Vec<_> = constants().into_iter().map(|(name, _)| name).collect();
    assert_eq!(declared, compared);

    let begun = source.lines().filter_map(|line| line.strip_prefix("    ibv_"));
    let declared: Vec<_> = begun
        .filter_map(|rest| rest.split_once(" {"))
        .map(|(name, _)| format!("ibv_{name}"))
        // Compared inside of `ibv_send_wr`.
        .filter(|name| name != "ibv_send_wr_rdma")
        .collect();
    assert!(declared.len() > 20);
    let compared = structures();
    for name in declared {
        assert!(compared.iter().any(|(c, _)| c.contains(&format!(" {name})"))), "{name}");
    }
}
