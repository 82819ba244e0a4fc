//! The kernel model against measured rows that were left out of its tables.

use std::collections::BTreeMap;

use models::cluster::{ClusterSpec, Dtype, shipped};
use models::mesh::GroupShape;
use planner::cost::attention::{AttentionShape, forward_s};
use planner::cost::collective::{Collective, time_s};
use planner::cost::gemm::gemm_s;

const ROWS: &str = include_str!("data/kernels_held_out.csv");

/// The cluster of a measured device, with kernels as they run alone.
fn cluster(device: &str) -> ClusterSpec {
    let name = match device {
        "a100" => "a100_roce",
        "h100" => "dgx_h100",
        "h200" => "dgx_h200",
        "b200" => "dgx_b200",
        _ => "gb200_nvl72",
    };
    let mut cluster = shipped(name).unwrap().unwrap();
    cluster.software.gemm_slowdown = 1.0;
    cluster.software.attention_slowdown = 1.0;
    cluster
}

fn whole(cell: &str) -> u64 {
    cell.parse().unwrap()
}

fn predicted_s(cluster: &ClusterSpec, cells: &[&str]) -> f64 {
    match cells[0] {
        "gemm" => {
            let dtype = if cells[2] == "fp8" { Dtype::Fp8 } else { Dtype::Bf16 };
            gemm_s(cluster, dtype, whole(cells[3]), whole(cells[4]), whole(cells[5]))
        }
        "attention" => {
            let (heads, kv_heads) = cells[5].split_once('/').unwrap();
            let (width, sequence) = (whole(cells[2]), whole(cells[3]));
            let shape = AttentionShape {
                batch: whole(cells[4]),
                heads: whole(heads),
                kv_heads: whole(kv_heads),
                query_len: sequence,
                key_len: sequence,
                head_dim_qk: width,
                head_dim_v: width,
                causal: true,
                window: None,
            };
            forward_s(cluster, &shape, Dtype::Bf16)
        }
        _ => {
            let op = match cells[2] {
                "all_reduce" => Collective::AllReduce,
                "all_gather" => Collective::AllGather,
                "reduce_scatter" => Collective::ReduceScatter,
                _ => Collective::AllToAll,
            };
            let ranks = whole(cells[3]);
            time_s(cluster, op, whole(cells[4]) as f64, &GroupShape { within: vec![ranks, ranks] })
        }
    }
}

/// Mean of |predicted/measured - 1| by kind and device.
fn errors() -> BTreeMap<String, (f64, usize)> {
    let mut clusters: BTreeMap<String, ClusterSpec> = BTreeMap::new();
    let mut errors: BTreeMap<String, (f64, usize)> = BTreeMap::new();
    for line in ROWS.lines().skip(1) {
        let cells: Vec<&str> = line.split(',').collect();
        let on = clusters.entry(cells[1].to_owned()).or_insert_with(|| cluster(cells[1]));
        let measured_s: f64 = cells[6].parse().unwrap();
        let error = (predicted_s(on, &cells) / measured_s - 1.0).abs();
        if std::env::var_os("SHOW_ROWS").is_some() && error > 0.15 {
            println!("{:.0} % {line}", 100.0 * error);
        }
        let dtype = if cells[0] == "gemm" { cells[2] } else { "" };
        for key in [cells[0].to_owned(), format!("{} {} {dtype}", cells[0], cells[1])] {
            let (sum, count) = errors.entry(key).or_default();
            *sum += error;
            *count += 1;
        }
    }
    errors
}

#[test]
fn rows_left_out_of_the_tables_are_met() {
    let mean = |(sum, count): (f64, usize)| 100.0 * sum / count as f64;
    let errors = errors();
    for (key, entry) in &errors {
        println!("{key:24} {:5.1} % of {}", mean(*entry), entry.1);
    }
    for (kind, limit) in [("gemm", 6.0), ("attention", 10.0), ("collective", 12.0)] {
        assert!(mean(errors[kind]) <= limit, "{kind}: {:.1} %", mean(errors[kind]));
    }
}
