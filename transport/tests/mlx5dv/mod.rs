//! Against rdma-core's public header: a C program (`answer.c`) writes the same entries with the
//! header's own structures and helpers, and reads our completions with them.
//!
//! Without `libibverbs-dev` there is nothing to hold ours against and the tests say so; with
//! `KVLANE_MLX5DV=must` in the environment that is a failure.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use super::rdma_core::compiled;
use super::*;
use kvlane_transport::mlx5::ENTRY_BYTES;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

const CASES: usize = 5000;

/// The program, made once; `None` if this machine lacks the header.
fn program() -> Option<&'static Path> {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    let make = || compiled("infiniband/mlx5dv.h", "mlx5dv-answer", include_str!("answer.c"));
    PROGRAM.get_or_init(make).as_deref()
}

/// One answer a line for each question.
fn ask(questions: &str) -> Option<Vec<String>> {
    let mut child =
        Command::new(program()?).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut to = child.stdin.take().unwrap();
    let output = std::thread::scope(|scope| {
        // It answers while it is asked: both pipes are bounded.
        scope.spawn(move || to.write_all(questions.as_bytes()).unwrap());
        child.wait_with_output().unwrap()
    });
    assert!(output.status.success(), "{:?}", output.status);
    Some(String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect())
}

fn some<T: std::fmt::Debug>(strategy: impl Strategy<Value = T>) -> Vec<T> {
    let mut runner = TestRunner::deterministic();
    (0..CASES).map(|_| strategy.new_tree(&mut runner).unwrap().current()).collect()
}

fn question(index: u16, pair: u32, what: &Decoded) -> String {
    let none = Remote { address: 0, key: 0 };
    let (name, to, data, immediate) = match what.operation {
        Operation::Nop => ("nop", none, None, 0),
        Operation::Write { to, data } => ("write", to, Some(data), 0),
        Operation::WriteImmediate { to, data, immediate } => ("imm", to, Some(data), immediate),
    };
    let (signalled, fence) = (u8::from(what.signalled), u8::from(what.fence));
    let Remote { address, key } = to;
    let mut line = format!(
        "entry {name} {index:x} {pair:x} {signalled} {fence} {immediate:x} {address:x} {key:x} "
    );
    let segment = |Segment { address, key, bytes }| format!(" {bytes:x} {key:x} {address:x}");
    match data {
        None => line += "none",
        Some(Data::One(from)) => line += &format!("one{}", segment(from)),
        Some(Data::Two(a, b)) => line += &format!("two{}{}", segment(a), segment(b)),
        Some(Data::Inline { len, bytes }) => {
            write!(line, "inline {len:x}").unwrap();
            bytes[..usize::from(len)].iter().for_each(|b| write!(line, " {b:02x}").unwrap());
        }
    }
    line
}

#[test]
fn entries_equal_those_of_the_public_helpers() {
    let cases = some((decoded(), any::<u16>(), 0..1_u32 << 24));
    let asked: Vec<_> =
        cases.iter().map(|(what, index, pair)| question(*index, *pair, what)).collect();
    let Some(answers) = ask(&asked.join("\n")) else { return };
    assert_eq!(answers.len(), CASES);
    for ((what, index, pair), answer) in cases.iter().zip(&answers) {
        let theirs = hex(answer);
        assert_eq!(entry::decode(&words(&theirs), *index, *pair), Ok(*what), "{answer}");
        let (mut ours, mut masked) = (bytes(&entry::encode(*index, *pair, what)), theirs);
        for at in ignored(&what.operation).into_iter().flatten() {
            (ours[at], masked[at]) = (0, 0);
        }
        assert_eq!(ours, masked, "{what:?}");
    }
}

#[test]
fn records_equal_those_of_the_public_header() {
    let cases = some(any::<(u16, u16)>());
    let asked: Vec<_> = cases.iter().map(|(r, s)| format!("record {r:x} {s:x}")).collect();
    let Some(answers) = ask(&asked.join("\n")) else { return };
    assert_eq!(answers.len(), CASES);
    for ((receives, sends), answer) in cases.into_iter().zip(answers) {
        let halves = [entry::record(receives), entry::record(sends)];
        assert_eq!(halves.map(u32::to_ne_bytes).concat(), hex(&answer));
    }
}

#[test]
fn completions_are_read_alike_by_the_public_helpers() {
    let cases = some((completion(), any::<bool>()));
    let mut asked = String::new();
    for (completion, owner) in &cases {
        asked += "completion";
        for byte in bytes(&completion::encode(completion, *owner)) {
            write!(asked, " {byte:02x}").unwrap();
        }
        asked += "\n";
    }
    let Some(answers) = ask(&asked) else { return };
    assert_eq!(answers.len(), CASES);
    for ((completion, owner), answer) in cases.into_iter().zip(answers) {
        let numbers: Vec<_> =
            answer.split(' ').map(|n| u32::from_str_radix(n, 16).unwrap()).collect();
        let [opcode, their_owner, queue_pair, index, immediate, bytes, syndrome, vendor] =
            numbers[..]
        else {
            panic!("{answer}")
        };
        let fault = Fault { syndrome: Syndrome(syndrome as u8), vendor: vendor as u8 };
        let what = match opcode {
            0 => What::Sent,
            1 => What::Arrived { immediate, bytes },
            13 => What::SendFailed(fault),
            14 => What::ReceiveFailed(fault),
            _ => panic!("{answer}"),
        };
        assert_eq!(Completion { queue_pair, index: index as u16, what }, completion);
        assert_eq!(their_owner == 1, owner);
    }
}

#[test]
fn places_and_numbers_are_those_of_the_public_header() {
    let Some(answers) = ask("facts") else { return };
    let block = ENTRY_BYTES as u8;
    let ours = [
        ("sizeof(struct mlx5_cqe64)", block),
        ("sizeof(struct mlx5_err_cqe)", block),
        ("MLX5_SEND_WQE_BB", block),
        ("offsetof(struct mlx5_wqe_ctrl_seg, fm_ce_se)", 0x0b),
        ("offsetof(struct mlx5_wqe_ctrl_seg, imm)", 0x0c),
        ("offsetof(struct mlx5_cqe64, imm_inval_pkey)", 36),
        ("offsetof(struct mlx5_cqe64, byte_cnt)", 44),
        ("offsetof(struct mlx5_cqe64, sop_drop_qpn)", 56),
        ("offsetof(struct mlx5_cqe64, wqe_counter)", 60),
        ("offsetof(struct mlx5_cqe64, op_own)", 63),
        ("offsetof(struct mlx5_err_cqe, vendor_err_synd)", 54),
        ("offsetof(struct mlx5_err_cqe, syndrome)", 55),
        ("offsetof(struct mlx5_err_cqe, s_wqe_opcode_qpn)", 56),
        ("offsetof(struct mlx5_err_cqe, wqe_counter)", 60),
        ("offsetof(struct mlx5_err_cqe, op_own)", 63),
        ("MLX5_CQE_REQ", 0),
        ("MLX5_CQE_RESP_WR_IMM", 1),
        ("MLX5_CQE_REQ_ERR", 13),
        ("MLX5_CQE_RESP_ERR", 14),
        ("MLX5_CQE_INVALID", 15),
        ("MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR", Syndrome::LOCAL_LENGTH.0),
        ("MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR", Syndrome::LOCAL_QP_OPERATION.0),
        ("MLX5_CQE_SYNDROME_LOCAL_PROT_ERR", Syndrome::LOCAL_PROTECTION.0),
        ("MLX5_CQE_SYNDROME_WR_FLUSH_ERR", Syndrome::FLUSHED.0),
        ("MLX5_CQE_SYNDROME_MW_BIND_ERR", Syndrome::MEMORY_WINDOW_BIND.0),
        ("MLX5_CQE_SYNDROME_BAD_RESP_ERR", Syndrome::BAD_RESPONSE.0),
        ("MLX5_CQE_SYNDROME_LOCAL_ACCESS_ERR", Syndrome::LOCAL_ACCESS.0),
        ("MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR", Syndrome::REMOTE_INVALID_REQUEST.0),
        ("MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR", Syndrome::REMOTE_ACCESS.0),
        ("MLX5_CQE_SYNDROME_REMOTE_OP_ERR", Syndrome::REMOTE_OPERATION.0),
        ("MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR", Syndrome::TRANSPORT_RETRIES.0),
        ("MLX5_CQE_SYNDROME_RNR_RETRY_EXC_ERR", Syndrome::RNR_RETRIES.0),
        ("MLX5_CQE_SYNDROME_REMOTE_ABORTED_ERR", Syndrome::REMOTE_ABORTED.0),
    ];
    let ours: Vec<_> = ours.iter().map(|(name, value)| format!("{name} {value:x}")).collect();
    assert_eq!(ours, answers);
}
