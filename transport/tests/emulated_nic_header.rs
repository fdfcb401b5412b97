//! The emulated NIC's C header is all that a writer in another language needs: a C program that has
//! nothing else posts, and finds its bytes and completions.
#![allow(clippy::unwrap_used, clippy::panic)] // Tests fail by panicking.

use std::path::Path;
use std::process::Command;

use kvlane_transport::emulated::serve::spawn_thread;
use kvlane_transport::emulated::{Config, control, layout};
use kvlane_transport::mlx5;

#[test]
fn a_c_program_drives_the_nic_with_the_header_alone() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("foreign_poster");
    let compiled = Command::new("cc")
        .args(["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(here.join("../docs"))
        .arg(here.join("tests/foreign_poster.c"))
        .arg("-o")
        .arg(&program)
        .output();
    let compiled = match compiled {
        Ok(compiled) => compiled,
        Err(e) => {
            eprintln!("skipped: no C compiler: {e}");
            return;
        }
    };
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let nic = spawn_thread(Config::new("emulated0")).unwrap();
    let out = Command::new(&program).arg(nic.socket().to_string()).output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && out.stdout == b"ok\n", "{said}");
}

#[test]
fn the_header_has_the_numbers_of_the_code() {
    let header = include_str!("../../docs/emulated-nic.h");
    let define = |name: &str| {
        let line = header.lines().find(|line| line.starts_with(&format!("#define {name} ")));
        line.unwrap().split_whitespace().nth(2).unwrap().parse::<u64>().unwrap()
    };
    assert_eq!(define("KNIC_VERSION"), control::VERSION);
    assert_eq!(define("KNIC_RECORD_AT"), layout::RECORD_AT as u64);
    assert_eq!(define("KNIC_CONSUMED_AT"), layout::CONSUMED_AT as u64);
    assert_eq!(define("KNIC_DOORBELL_AT"), layout::DOORBELL_AT as u64);
    assert_eq!(define("KNIC_SENDS_AT"), layout::SENDS_AT as u64);
    let (places, _) = layout::queue_pair(64, 8);
    assert!(header.contains("#define KNIC_COMPLETIONS_AT(sends) (KNIC_SENDS_AT + 8 * (sends)) "));
    assert_eq!(places.completions_at as u64, define("KNIC_SENDS_AT") + 8 * 64);
    assert!(header.contains(&format!("at most 2^{} */", mlx5::SENDS_MAX.ilog2())));
    assert!(header.contains(&format!("at most 2^{}. No ring", mlx5::RECEIVES_MAX.ilog2())));
    assert!(header.contains(&format!("At most {} bytes in all", control::ANSWER_BYTES_MAX)));
}
