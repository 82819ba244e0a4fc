//! Calibration recovers a known machine: from the times that the cost model predicts for it,
//! calibration gives its figures back, and the written file reads as the same cluster.

use models::cluster::{
    self, ClusterSpec, Core, Dtype, Exchange, Measured, Moved, Product, Step, Updated,
};
use models::input::Source;
use models::mesh::GroupShape;
use planner::cost::attention::{self, AttentionShape};
use planner::cost::collective::{Collective, time_s};
use planner::cost::{gemm, memory_bound};
use validation::calibrate::{calibrated, priced_s, yaml};

const TINY: &str = "name: tiny\nlayers: 1\nhidden: 32\nheads: 2\nffn: 64\nvocab: 64\nseq_len: 16\nglobal_batch: 4\n";
const MODEL: &str = "name: probe\nlayers: 3\nhidden: 384\nheads: 6\nkv_heads: 2\nffn: 1024\n\
    vocab: 1000\nseq_len: 128\nglobal_batch: 8\n";

fn laptop() -> ClusterSpec {
    cluster::shipped("laptop").expect("it is shipped").expect("it reads")
}

/// A machine that differs from the shipped one in every measured figure.
fn machine() -> ClusterSpec {
    let mut machine = laptop();
    machine.device.peak_flops = [(Dtype::F32, 2.5e11), (Dtype::F64, 1.1e11)].into();
    machine.device.hbm_bytes_per_s = 3e10;
    machine.device.kernel_launch_s = 0.0;
    machine.device.hbm_bytes = 8e9;
    machine.levels[0].bytes_per_s = 4e9;
    machine.levels[0].latency_s = 3e-6;
    machine.levels[0].efficiency = 1.0;
    machine.software.gemm_slowdown = 1.3;
    machine.software.attention_slowdown = 1.7;
    machine.software.stream_slowdown = 1.2;
    machine.software.tp_exposed = 0.8;
    machine.software.dp_slowdown = 1.4;
    machine.software.step_overhead_s = 3e-4;
    machine.software.optimizer_bytes_per_parameter = 40.0;
    machine.measured_ranks = Some(2);
    machine.software.slowdown_per_doubling = 0.03;
    machine.thread_slowdown = 1.2;
    machine
}

/// What the cost model predicts for the machine. Kernels are measured alone, without the software's
/// slowdown of products.
fn measured(machine: &ClusterSpec) -> Measured {
    let mut alone = machine.clone();
    alone.software.gemm_slowdown = 1.0;
    let product = |dtype, [m, n, k]: [u64; 3]| Product {
        dtype,
        m,
        n,
        k,
        s: gemm::gemm_s(&alone, dtype, m, n, k),
    };
    let core = AttentionShape {
        batch: 4,
        heads: 8,
        kv_heads: 4,
        query_len: 256,
        key_len: 256,
        head_dim_qk: 64,
        head_dim_v: 64,
        causal: true,
        last_queries: false,
        window: None,
        sinks: false,
    };
    let pair = GroupShape { within: vec![2] };
    let exchange =
        |bytes| Exchange { bytes, s: time_s(machine, Collective::AllReduce, bytes, &pair) };
    let step = |model: &str, global_batch, ranks, tp, dp| {
        let step = Step { model: model.to_owned(), global_batch, ranks, tp, dp, s: 0.0 };
        Step { s: priced_s(machine, &step).expect("it can be priced"), ..step }
    };
    Measured {
        ranks: 2,
        cores: 2,
        memory_bytes: Some(16e9),
        products: vec![
            product(Dtype::F32, [1024, 1024, 512]),
            product(Dtype::F32, [512, 1408, 1024]),
            product(Dtype::F64, [1024, 1024, 512]),
        ],
        copy: Moved { bytes: 6.7e7, s: memory_bound::streaming_s(machine, 6.7e7) },
        elementwise: Moved { bytes: 1e8, s: memory_bound::elementwise_s(machine, 1e8) },
        attention: Core {
            batch: 4,
            seq_len: 256,
            heads: 8,
            kv_heads: 4,
            head_dim: 64,
            forward_s: attention::forward_s(machine, &core, Dtype::F32),
            backward_s: attention::backward_s(machine, &core, Dtype::F32),
        },
        adamw: Updated { parameters: 4e6, s: memory_bound::optimizer_s(machine, 4e6) },
        collectives: vec![exchange(4096.0), exchange(4_194_304.0)],
        messages: vec![],
        steps: vec![
            step(TINY, 4, 2, 1, 1),
            step(MODEL, 8, 2, 1, 1),
            step(MODEL, 8, 1, 1, 1),
            step(MODEL, 8, 2, 1, 2),
            step(MODEL, 32, 2, 1, 2),
            step(MODEL, 8, 2, 2, 1),
        ],
    }
}

fn near(what: &str, found: f64, expected: f64) {
    assert!((found / expected - 1.0).abs() < 1e-3, "{what}: {found} is not {expected}");
}

#[test]
fn a_machine_of_known_figures_is_found_again() {
    let (machine, measured) = (machine(), measured(&machine()));
    let found = calibrated(&laptop(), &measured).expect("it explains itself");
    for (dtype, flops) in &machine.device.peak_flops {
        near(dtype.name(), found.device.peak_flops[dtype], *flops);
    }
    near("memory", found.device.hbm_bytes_per_s, machine.device.hbm_bytes_per_s);
    near("bytes", found.device.hbm_bytes, 8e9);
    near("bandwidth", found.levels[0].bytes_per_s, machine.levels[0].bytes_per_s);
    near("latency", found.levels[0].latency_s, machine.levels[0].latency_s);
    let of = |cluster: &ClusterSpec| {
        let s = cluster.software;
        [
            s.gemm_slowdown,
            s.attention_slowdown,
            s.stream_slowdown,
            s.tp_exposed,
            s.dp_slowdown,
            s.step_overhead_s,
            s.optimizer_bytes_per_parameter,
            s.slowdown_per_doubling,
            cluster.thread_slowdown,
        ]
    };
    for (n, (found, expected)) in of(&found).into_iter().zip(of(&machine)).enumerate() {
        near(&format!("software {n}"), found, expected);
    }
    for step in &measured.steps {
        near("a step", priced_s(&found, step).expect("it can be priced"), step.s);
    }
}

#[test]
fn the_file_is_read_as_the_same_cluster() {
    let measured = measured(&machine());
    let found = calibrated(&laptop(), &measured).expect("it explains itself");
    let text = yaml(&found, &measured);
    let source = Source::from_bytes("found.yaml", text.clone().into_bytes()).expect("it is text");
    let read = cluster::read(&source).unwrap_or_else(|error| panic!("{error}\n{text}"));
    assert_eq!((read.measured_ranks, read.any_gpu_count), (Some(2), true));
    near("threads", read.thread_slowdown, 1.2);
    for step in &measured.steps {
        near("a step", priced_s(&read, step).expect("it can be priced"), step.s);
    }
}

#[test]
fn ranks_share_a_machine_that_was_measured_as_shared() {
    let two = machine();
    let eight = two.clone().shared_by(8);
    assert_eq!(eight.device.peak_flops(Dtype::F32) * 4.0, two.device.peak_flops(Dtype::F32));
    assert_eq!(eight.device.hbm_bytes * 4.0, two.device.hbm_bytes);
    assert_eq!(eight.levels[0].latency_s, two.levels[0].latency_s * 4.0);
    let one = two.clone().shared_by(1);
    near(
        "a rank alone, whose threads wait for one another",
        one.device.peak_flops(Dtype::F32),
        two.device.peak_flops(Dtype::F32) * 2.0 / 1.2,
    );
    assert_eq!(one.levels[0].latency_s, two.levels[0].latency_s);
    // A GPU belongs to one rank.
    let gpus = cluster::shipped("dgx_h100").expect("it is shipped").expect("it reads");
    let peak = gpus.device.peak_flops(Dtype::Bf16);
    assert_eq!(gpus.shared_by(64).device.peak_flops(Dtype::Bf16), peak);
}
