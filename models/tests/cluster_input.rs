//! Shipped clusters can be read; errors in cluster files.

use models::cluster::{
    Dtype, Software, read, shipped, shipped_names, shipped_source, software, warnings,
};
use models::input::Source;

fn told(edit: impl Fn(&str) -> String) -> String {
    let good = shipped_source("dgx_h100").unwrap().unwrap();
    let text = edit(good.text());
    assert_ne!(text, good.text(), "the edit changed nothing");
    let source = Source::from_bytes("my.yaml", text.into_bytes()).unwrap();
    read(&source).expect_err("must be refused").to_string()
}

#[test]
fn shipped_clusters_read() {
    for name in shipped_names() {
        let cluster = shipped(name).unwrap().unwrap_or_else(|error| panic!("{name}\n{error}"));
        assert_eq!(cluster.name, name);
        assert!(cluster.usable_bytes() > 0.0);
        assert!(cluster.levels.last().unwrap().gpus.is_none());
    }
}

#[test]
fn sizes_follow_the_gpus() {
    let cluster = shipped("selene").unwrap().unwrap();
    assert_eq!(cluster.level_sizes(3072), [8, 3072]);
    assert_eq!(cluster.level_sizes(4), [4, 4]);
    assert_eq!((cluster.nodes(3072), cluster.nodes(9)), (384, 2));
    assert_eq!((cluster.level_between(0, 7), cluster.level_between(7, 8)), (0, 1));
    assert_eq!(cluster.device.computed_in(Dtype::Fp8), Some(Dtype::Bf16));
}

#[test]
fn wrong_files_are_told_what_and_where() {
    let cases: &[(&str, &str, &[&str])] = &[
        (
            "reserved_bytes: 2.5e9",
            "reserved_bytes: 90e9",
            &["`reserved_bytes` cannot be 9e10", "less than hbm_bytes, 8.55e10"],
        ),
        ("bf16: 989.4e12, fp16", "bf61: 989.4e12, fp16", &["bf61", "bf16"]),
        ("sms: 132", "smz: 132", &["unknown key `smz`", "my.yaml:11:3"]),
        (
            "hbm_bytes_per_s: 3.35e12",
            "hbm_bytes_per_s: -1",
            &["`hbm_bytes_per_s` cannot be -1", "1e6 to 1e16"],
        ),
        (
            "efficiency: 0.80",
            "efficiency: 1.2",
            &["`efficiency` cannot be 1.2", "valid: 0.001 to 1"],
        ),
        ("gpus: 8", "gpus: 0", &["`gpus` cannot be 0", "valid: 1 to 1e9"]),
        ("gpus: 8, ", "", &["level `nvlink` needs `gpus`"]),
        ("{name: infiniband,", "{name: infiniband, gpus: 64,", &["outermost", "leave `gpus` out"]),
        ("efficiency: h100", "efficiency: h1", &["no efficiency tables `h1`", "h100"]),
        (
            "megatron_2024",
            "megatron_2042",
            &["no software generation `megatron_2042`", "fsdp_2023"],
        ),
        ("megatron_2024", "megatron_2024, attention: fast", &["attention", "unfused"]),
        ("megatron_2024", "megatron_2024, dp_overlap: 9", &["`dp_overlap` cannot be 9", "0 to 1"]),
        (
            "base: megatron_2024",
            "attention: flash",
            &["missing required key `gemm_slowdown`", "base"],
        ),
    ];
    for (from, to, expected) in cases {
        let message = told(|text| text.replacen(from, to, 1));
        for part in *expected {
            assert!(message.contains(part), "{from} -> {to}: no `{part}` in\n{message}");
        }
    }
}

#[test]
fn values_stand_over_the_base() {
    let good = shipped_source("dgx_h100").unwrap().unwrap();
    let text =
        good.text().replacen("base: megatron_2024", "base: megatron_2024, tp_exposed: 0.5", 1);
    let cluster = read(&Source::from_bytes("my.yaml", text.into_bytes()).unwrap()).unwrap();
    let base = software("megatron_2024").unwrap().unwrap();
    assert_eq!(cluster.software, Software { tp_exposed: 0.5, ..base });
}

#[test]
fn levels_must_nest() {
    let spine = "  - {name: rail, gpus: 20, bytes_per_s: 50e9, latency_s: 1e-6, efficiency: 0.9}\n  - {name: infiniband";
    let message = told(|text| text.replacen("  - {name: infiniband", spine, 1));
    assert!(message.contains("gpus (20) is no multiple of the 8"), "{message}");
    assert!(message.contains("16, 24, 32"), "{message}");
}

#[test]
fn levels_must_not_be_empty() {
    let message = told(|text| {
        let (start, end) = (text.find("levels:").unwrap(), text.find("host:").unwrap());
        format!("{}levels: []\n{}", &text[..start], &text[end..])
    });
    assert!(message.contains("`levels` is empty"), "{message}");
}

/// Impossible figures: each was once accepted, and gave times of NaN or a utilisation of 71,413 %.
#[test]
fn figures_of_no_machine_are_refused_with_their_range() {
    let good = shipped_source("dgx_h100").unwrap().unwrap();
    let fitted = good.text().split_once("sustained_slowdown: ").unwrap().1;
    let fitted = format!("sustained_slowdown: {}", fitted.split_whitespace().next().unwrap());
    let keys = [
        ("hbm_bytes: 85.5e9", "hbm_bytes", "1000 to 1e15"),
        ("hbm_bytes_per_s: 3.35e12", "hbm_bytes_per_s", "1e6 to 1e16"),
        ("bf16: 989.4e12", "bf16", "1e6 to 1e19"),
        ("kernel_launch_s: 4.0e-6", "kernel_launch_s", "0 to 1"),
        (fitted.as_str(), "sustained_slowdown", "1 to 1000"),
        ("latency_s: 1.5e-6", "latency_s", "0 to 10"),
        ("bytes_per_s: 450e9", "bytes_per_s", "1000 to 1e15"),
        ("efficiency: 0.80", "efficiency", "0.001 to 1"),
        ("link_bytes_per_s: 55e9", "link_bytes_per_s", "1000 to 1e15"),
        ("storage_bytes_per_s: 4e9", "storage_bytes_per_s", "1 to 1e18"),
        ("failures_per_node_day: 3.8e-3", "failures_per_node_day", "0 to 10000"),
        ("base: megatron_2024", "gemm_slowdown", "0.1 to 10000"),
        ("base: megatron_2024", "tp_exposed", "0 to 1000"),
        ("base: megatron_2024", "optimizer_state_bytes", "0.1 to 10000"),
        ("base: megatron_2024", "step_overhead_s", "0 to 10000"),
    ];
    for (from, key, range) in keys {
        assert!(good.text().contains(from), "no {from}");
        for value in ["1e-308", "1e308", "-1"] {
            let to = match from.starts_with("base") {
                true => format!("{from}, {key}: {value}"),
                false => format!("{key}: {value}"),
            };
            let text = good.text().replacen(from, &to, 1);
            let source = Source::from_bytes("my.yaml", text.into_bytes()).unwrap();
            // Where 0 is valid, so is next to nothing.
            if range.starts_with("0 ") && value == "1e-308" {
                assert!(read(&source).is_ok(), "{key}: {value}");
                continue;
            }
            let error = read(&source).expect_err(&to);
            assert_eq!(error.help, Some(format!("valid: {range}")), "{error}");
            assert!(error.message.contains(&format!("`{key}` cannot be {value}")), "{error}");
        }
    }
}

/// Valid figures of no machine: bytes where gigabytes were meant, a thousandfold, s where µs were
/// meant.
#[test]
fn figures_in_another_unit_are_warned_of() {
    for name in shipped_names() {
        assert_eq!(warnings(&shipped_source(name).unwrap().unwrap()), [""; 0], "{name}");
    }
    let good = shipped_source("dgx_h100").unwrap().unwrap();
    let host = good.text().split_once("\n  memory_bytes: ").unwrap().1;
    let host = format!("\n  memory_bytes: {}", host.split_whitespace().next().unwrap());
    let cases = [
        ("bytes_per_s: 450e9", "bytes_per_s: 450e3", "`bytes_per_s` is 450000 bytes/s; machines"),
        ("hbm_bytes_per_s: 3.35e12", "hbm_bytes_per_s: 3.35e15", "have 1e9 to 1e14"),
        ("latency_s: 1.5e-6", "latency_s: 1.5", "`latency_s` is 1.5 s; machines have 1e-9 to"),
        ("bf16: 989.4e12", "bf16: 989.4", "`bf16` cannot be"),
        ("bf16: 989.4e12", "bf16: 989.4e6", "`peak_flops` is 9.894e8 FLOP/s"),
        (host.as_str(), "\n  memory_bytes: 0", "nothing can be offloaded"),
        (host.as_str(), "\n  memory_bytes: 2048", "`memory_bytes` is 2048 bytes"),
    ];
    for (from, to, says) in cases {
        let text = good.text().replacen(from, to, 1);
        assert_ne!(text, good.text(), "no {from}");
        let line = 1 + text[..text.find(to).unwrap() + 1].matches('\n').count();
        let source = Source::from_bytes("my.yaml", text.into_bytes()).unwrap();
        let Ok(_) = read(&source) else {
            assert!(says.contains("cannot be"), "{to} is valid");
            continue;
        };
        let said = warnings(&source);
        assert!(said.len() == 1 && said[0].contains(says), "{to}: {said:?}");
        assert!(said[0].starts_with(&format!("my.yaml:{line}: ")), "{to}: {said:?}");
    }
    let laptop = shipped_source("laptop").unwrap().unwrap();
    assert!(laptop.text().contains("memory_bytes: 0 "), "host and device are one");
}

/// A file of a few MB could name more combinations of sizes than memory holds.
#[test]
fn tables_cannot_explode() {
    let rows: String = (1..100_000).map(|n| format!("    gemm:bf16,{n},{n},5000\n")).collect();
    for (lines, says) in [
        (format!("    gemm_k:bf16,512\n{rows}"), "no whole grid of valid figures for `gemm`"),
        ("    stream,1048576,20000\n".to_owned(), "no whole grid of valid figures for `stream`"),
        ("    stream,inf,4000\n".to_owned(), "line 1 of the efficiency tables"),
        ("    stream,1048576,0\n".to_owned(), "line 1 of the efficiency tables"),
    ] {
        let to = format!("efficiency: |\n{lines}    # end\n");
        let message = told(|text| text.replacen("efficiency: h100", &to, 1));
        assert!(message.contains(says), "{message}");
    }
}

#[test]
fn there_are_few_levels() {
    let level = "  - {name: more, gpus: 1, bytes_per_s: 50e9, latency_s: 1e-6, efficiency: 0.9}\n";
    let all = format!("levels:\n{}", level.repeat(20));
    let message = told(|text| text.replacen("levels:\n", &all, 1));
    assert!(message.contains("`levels` has 22 levels") && message.contains("1 to 16"), "{message}");
}
