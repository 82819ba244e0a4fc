//! Shipped clusters read, and what wrong cluster files are told.

use models::cluster::{Dtype, Software, read, shipped, shipped_names, shipped_source, software};
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
        ("reserved_bytes: 2.5e9", "reserved_bytes: 90e9", &["`reserved_bytes` cannot be 90"]),
        ("bf16: 989.4e12, fp16", "bf61: 989.4e12, fp16", &["bf61", "bf16"]),
        ("sms: 132", "smz: 132", &["unknown key `smz`", "my.yaml:10:3"]),
        (
            "hbm_bytes_per_s: 3.35e12",
            "hbm_bytes_per_s: -1",
            &["`hbm_bytes_per_s` cannot be -1", "more than 0"],
        ),
        ("efficiency: 0.80", "efficiency: 1.2", &["`efficiency` cannot be 1.2", "at most 1"]),
        ("gpus: 8", "gpus: 0", &["`gpus` cannot be 0", "1 or more"]),
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
