//! Every CUDA kernel compiles for the GPUs it is meant for, at the shapes of real models, without spilling registers.
//! Needs NVRTC and no GPU: `make cuda`.

use kernels::cuda::{Baked, SOURCES, Source, Storage, nvrtc};

/// Ampere and Hopper.
const ARCHITECTURES: [&str; 2] = ["sm_80", "sm_90a"];

/// Constants of an operation: those of Llama 3 8B, and those that make the most of its registers.
fn shapes(operation: &str) -> Vec<(usize, Vec<(&'static str, f64)>)> {
    let columns = |n: usize, more: &[(&'static str, f64)]| {
        #[allow(clippy::cast_precision_loss)]
        let mut constants = vec![("COLUMNS", n as f64)];
        constants.extend_from_slice(more);
        (n, constants)
    };
    let rope = |head_dim: f64, rotary: f64, interleaved: f64| {
        let heads = [("HEADS", 32.0), ("HEAD_DIM", head_dim), ("ROTARY_START", head_dim - rotary)];
        let pairs = [
            ("ROTARY_DIM", rotary),
            ("INTERLEAVED", interleaved),
            ("TOKEN_STRIDE", 32.0 * head_dim),
        ];
        (64, heads.into_iter().chain(pairs).collect())
    };
    let attention = |[heads, kv_heads, qk, v]: [f64; 4], window: f64, soft_cap: f64| {
        let sizes = [("Q_HEADS", heads), ("KV_HEADS", kv_heads), ("QK_DIM", qk), ("V_DIM", v)];
        let rules = [("SCALE", 0.1), ("CAUSAL", 1.0), ("WINDOW", window), ("SOFT_CAP", soft_cap)];
        (8, sizes.into_iter().chain(rules).collect())
    };
    match operation {
        "attention" => vec![
            attention([32.0, 8.0, 128.0, 128.0], 0.0, 0.0),
            attention([32.0, 8.0, 128.0, 128.0], 4096.0, 50.0),
            attention([12.0, 12.0, 64.0, 64.0], 0.0, 0.0),
            attention([25.0, 25.0, 64.0, 64.0], 0.0, 0.0),
            attention([128.0, 128.0, 192.0, 128.0], 0.0, 0.0),
        ],
        "rms_norm" => [768, 4096, 16384]
            .into_iter()
            .flat_map(|n| [0.0, 1.0].map(|offset| columns(n, &[("EPS", 1e-5), ("OFFSET", offset)])))
            .collect(),
        "layer_norm" => [768, 1600, 12288].map(|n| columns(n, &[("EPS", 1e-5)])).into(),
        "activation" => (0..5).map(|kind| (4096, vec![("KIND", f64::from(kind))])).collect(),
        "rope" => vec![rope(128.0, 128.0, 0.0), rope(192.0, 64.0, 1.0)],
        "elementwise" => vec![columns(4096, &[])],
        "embedding" => vec![columns(4096, &[("SCALE", 1.0)])],
        "cross_entropy" => {
            vec![columns(128_256, &[("SOFT_CAP", 0.0)]), columns(256_000, &[("SOFT_CAP", 30.0)])]
        }
        "adamw" | "dropout" => vec![(4096, vec![])],
        other => panic!("{other} has no shapes: say for which it is compiled"),
    }
}

#[test]
fn every_kernel_compiles_and_none_spills() {
    println!(
        "| operation | kernel | storage | constants | architecture | registers | shared bytes |"
    );
    println!("|---|---|---|---|---|---|---|");
    for &source in SOURCES {
        for (row, constants) in shapes(source.operation) {
            for &storage in storages(source.operation) {
                for architecture in ARCHITECTURES {
                    check(source, row, &constants, storage, architecture);
                }
            }
        }
    }
}

/// Tensor cores have no f32.
fn storages(operation: &str) -> &'static [Storage] {
    if operation == "attention" { &[Storage::Bf16] } else { &[Storage::F32, Storage::Bf16] }
}

/// Of a block: as many as the longest rows need to stay in registers, or as tiles of an attention head leave room for.
fn threads(operation: &str, row: usize, constants: &[(&'static str, f64)]) -> usize {
    let wide = constants.iter().any(|&(name, value)| name == "QK_DIM" && value > 128.0);
    match operation {
        "attention" if wide => 64,
        "attention" => 128,
        _ if row > 8192 => 512,
        _ => 256,
    }
}

fn check(
    source: Source,
    row: usize,
    constants: &[(&'static str, f64)],
    storage: Storage,
    architecture: &str,
) {
    let threads = threads(source.operation, row, constants);
    let baked = Baked { storage, pack: storage.pack(row), threads, constants: constants.to_vec() };
    let compiled =
        nvrtc::compile(source, &baked, architecture).unwrap_or_else(|error| panic!("{error}"));
    // ELF.
    assert_eq!(compiled.cubin[..4], *b"\x7fELF");
    let mut named: Vec<&str> =
        compiled.kernels.iter().map(|kernel| kernel.kernel.as_str()).collect();
    let mut declared: Vec<&str> = source.kernels().collect();
    named.sort_unstable();
    declared.sort_unstable();
    assert_eq!(named, declared, "{}", source.operation);
    let words: Vec<String> =
        constants.iter().map(|(name, value)| format!("{name} {value}")).collect();
    for kernel in &compiled.kernels {
        println!(
            "| {} | {} | {storage:?} | {} | {architecture} | {} | {} |",
            source.operation,
            kernel.kernel,
            words.join(", "),
            kernel.registers,
            kernel.shared_bytes
        );
        assert!(kernel.registers > 0, "{kernel:?}");
        let memory = (kernel.spill_bytes, kernel.stack_bytes);
        assert_eq!(memory, (0, 0), "{kernel:?} {constants:?} {storage:?} {architecture}");
        // A block of so many threads must fit a multiprocessor's 64 Ki registers.
        assert!(kernel.registers as usize * threads <= 65_536, "{kernel:?}");
    }
}

#[test]
fn a_wrong_source_is_reported() {
    let source = Source::of("rms_norm").expect("it has a twin");
    let baked = Baked { storage: Storage::F32, pack: 4, threads: 256, constants: vec![] };
    let error =
        nvrtc::compile(source, &baked, "sm_80").expect_err("COLUMNS is missing").to_string();
    assert!(error.contains("rms_norm.cu does not compile for sm_80"), "{error}");
    assert!(error.contains("COLUMNS"), "{error}");
}
