//! `kvlane plan` as users run it, on the examples and on what does not fit.

#![allow(clippy::unwrap_used, missing_docs)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/plans")
}

fn plan(from: &Path, to: &Path, more: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvlane"));
    command.arg("plan").arg("--from").arg(from).arg("--to").arg(to).args(more).output().unwrap()
}

fn example(from: &str, to: &str, more: &[&str]) -> Output {
    plan(&examples().join(from), &examples().join(to), more)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn json_line(out: &Output) -> Value {
    assert!(out.status.success(), "{}", text(&out.stderr));
    serde_json::from_str(text(&out.stdout).lines().last().unwrap()).unwrap()
}

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

/// Two instances, from texts.
struct Files(PathBuf);

impl Files {
    fn new(name: &str, from: &str, to: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("kvlane-plan-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("from.toml"), from).unwrap();
        std::fs::write(dir.join("to.toml"), to).unwrap();
        Self(dir)
    }
    fn plan(&self, more: &[&str]) -> Output {
        plan(&self.0.join("from.toml"), &self.0.join("to.toml"), more)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const TINY: &str = "model = 'tiny'\n";
/// Two pools, the second of rows.
const POOLS: &str = "model = 'mine'\n[[pools]]\nlayers = 2\nkv_heads = 4\nhead_dim = 8\n\
                     [[pools]]\nlayers = 1\nkv_heads = 1\nhead_dim = 8\nrows = 2\n";

#[test]
fn pairs_have_their_writes_and_bytes() {
    // Llama-3.1-70B: 80 layers, K and V, one head of 128 in bf16 for each receiver.
    let room = 80 * 2 * 1024 * 128 * 2;
    let out = example("llama-tp4.toml", "llama-tp8.toml", &["--tokens", "1024", "--json"]);
    assert_eq!(text(&out.stdout).lines().count(), 1);
    let all = json_line(&out);
    assert_eq!(keys(&all), ["bytes", "merged_from", "pairs", "parts", "refused", "writes"]);
    assert_eq!((&all["refused"], &all["bytes"]), (&Value::Null, &json!(8 * room)));
    let pairs = all["pairs"].as_array().unwrap();
    let ranks: Vec<_> = pairs
        .iter()
        .map(|p| (p["from"]["rank"].as_u64().unwrap(), p["to"]["rank"].as_u64().unwrap()))
        .collect();
    assert_eq!(ranks, [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4), (2, 5), (3, 6), (3, 7)]);
    for p in pairs {
        assert_eq!(
            keys(p),
            ["bytes", "from", "merged_from", "offer_bytes", "parts", "to", "writes"]
        );
        assert_eq!(keys(&p["from"]), ["cp", "pp", "rank", "tp"]);
        assert_eq!(p["bytes"], room);
        // Token by token, since the heads of the sender's pages lie side by side.
        assert_eq!(
            (&p["writes"], &p["merged_from"]),
            (&json!(80 * 2 * 1024), &json!(80 * 2 * 1024))
        );
        // 16 random blocks.
        let offer = p["offer_bytes"].as_u64().unwrap();
        assert!((64..=64 + 256).contains(&offer), "{offer}");
    }
    let total = |key: &str| pairs.iter().map(|p| p[key].as_u64().unwrap()).sum::<u64>();
    assert_eq!(
        ["writes", "merged_from", "parts"].map(total),
        ["writes", "merged_from", "parts"].map(|k| all[k].as_u64().unwrap())
    );
    // The same as a table.
    let out = example("llama-tp4.toml", "llama-tp8.toml", &["--tokens", "1024"]);
    let table = text(&out.stdout);
    assert!(out.status.success() && table.lines().count() == 10, "{table}");
    assert!(table.lines().last().unwrap().contains(&(8 * room).to_string()), "{table}");
    // One receiver.
    let one = ["--tokens", "1024", "--json", "--rank-of-to", "5"];
    let one = json_line(&example("llama-tp4.toml", "llama-tp8.toml", &one));
    assert_eq!(one["pairs"], json!([pairs[5]]));
    assert_eq!(one["bytes"], room);
}

#[test]
fn stages_latents_windows_and_rows() {
    let out = example("deepseek-pp2.toml", "deepseek-tp4.toml", &["--tokens", "640", "--json"]);
    let all = json_line(&out);
    assert_eq!(all["bytes"], 4 * 61 * 640 * 576 * 2);
    assert_eq!(all["pairs"].as_array().unwrap().len(), 2 * 4);
    // Ten pages in a row are one write for each layer.
    assert_eq!((&all["writes"], &all["merged_from"]), (&json!(4 * 61), &json!(4 * 61 * 10)));
    // 12 layers of the whole prompt without its prefix, 36 of its last 1,024 tokens, both in whole
    // pages of 16; four states and two rows besides.
    let args = ["--tokens", "4096", "--prefix", "2048", "--json"];
    let all = json_line(&example("hybrid-tp2.toml", "hybrid-tp4.toml", &args));
    let kv = (12 * 2048 + 36 * 1024) * 2 * 8 * 128 * 2;
    let rows = 4 * 16 * 4096 * 4 + 4 * 2 * 5120 * 2;
    assert_eq!(all["bytes"], kv + rows);
    // All of the prompt there: only rows are left.
    let args = ["--tokens", "4096", "--prefix", "4096", "--json"];
    let all = json_line(&example("hybrid-tp2.toml", "hybrid-tp4.toml", &args));
    assert_eq!(all["bytes"], rows);
}

#[test]
fn what_does_not_fit_is_named_with_both_values() {
    let latent = "model = 'mine'\n[[pools]]\nlayers = 2\nkv_heads = 4\nhead_dim = 8\nkv = 'mla'\n";
    let one_pool = &POOLS[..POOLS.rfind("[[").unwrap()];
    for (name, from, to, field, a, b) in [
        ("model", TINY.into(), "model = 'llama-3.1-8b'".into(), "model", "tiny", "llama-3.1-8b"),
        ("dtype", TINY.into(), format!("{TINY}dtype = 'fp16'"), "dtype", "bf16", "fp16"),
        ("page", TINY.into(), format!("{TINY}page_tokens = 24"), "page_tokens", "16", "24"),
        ("cp", TINY.into(), format!("{TINY}cp = 2"), "cp", "1", "2"),
        ("pools", POOLS.into(), one_pool.into(), "pools", "2", "1"),
        ("kind", one_pool.into(), latent.into(), "kind", "k and v", "mla"),
        ("heads", POOLS.into(), POOLS.replace("= 4", "= 2"), "kv_heads_total", "4", "2"),
        ("dim", POOLS.into(), POOLS.replacen("dim = 8", "dim = 9", 1), "head_dim", "8", "9"),
        ("rows", POOLS.into(), POOLS.replace("rows = 2", "rows = 3"), "pool 1 rows", "2", "3"),
        (
            "window",
            POOLS.replace("rows = 2", "window_tokens = 7"),
            POOLS.replace("rows = 2", "window_tokens = 5"),
            "pool 1 window_tokens",
            "7",
            "5",
        ),
    ] {
        let (from, to): (String, String) = (from, to);
        let files = Files::new(name, &from, &to);
        let out = files.plan(&["--tokens", "100"]);
        let said = text(&out.stderr);
        assert!(!out.status.success() && out.stdout.is_empty(), "{said}");
        assert!(said.contains(&format!("{field}: from {a} / to {b}")), "{said}");
        let all = json_line(&files.plan(&["--tokens", "100", "--json"]));
        let refused = all["refused"].as_array().unwrap();
        assert!(refused.contains(&json!({"field": field, "from": a, "to": b})), "{all}");
        assert_eq!((&all["writes"], &all["bytes"]), (&json!(0), &json!(0)));
        assert_eq!((&all["merged_from"], &all["pairs"]), (&json!(0), &json!([])));
    }
    // All fields at once.
    let out = example("llama-tp4.toml", "llama-tp8-fp8.toml", &["--tokens", "100", "--json"]);
    let all = json_line(&out);
    let fields: Vec<&str> =
        all["refused"].as_array().unwrap().iter().map(|r| r["field"].as_str().unwrap()).collect();
    assert_eq!(fields, ["dtype", "page_tokens"]);
}

#[test]
fn what_cannot_be_planned_is_an_error_in_either_form() {
    let refused = |out: Output, words: &[&str]| {
        let said = text(&out.stderr);
        assert!(!out.status.success() && out.stdout.is_empty(), "{said}");
        assert!(words.iter().all(|w| said.contains(w)), "{said}");
    };
    for form in [&[][..], &["--json"]] {
        let of =
            |more: &[&str]| example("llama-tp4.toml", "llama-tp8.toml", &[more, form].concat());
        refused(of(&["--tokens", "100", "--prefix", "16"]), &["inside a block", "page_tokens=64"]);
        refused(of(&["--tokens", "100", "--prefix", "128"]), &["longer than the prompt"]);
        refused(of(&["--tokens", "4294967295"]), &["too many blocks", "limit=524288"]);
        refused(of(&["--tokens", "1", "--rank-of-to", "8"]), &["no such rank", "ranks=8"]);
        let none = Path::new("/nonexistent/plan.toml");
        refused(
            plan(none, none, &[&["--tokens", "1"], form].concat()),
            &["/nonexistent/plan.toml"],
        );
        let files = Files::new("keys", &format!("{TINY}tpp = 2"), TINY);
        let out = files.plan(&[&["--tokens", "1"], form].concat());
        refused(out, &["tpp", "`tp`", "`page_tokens`", "`pools`", "line=2", "from.toml"]);
    }
}
