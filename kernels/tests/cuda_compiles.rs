//! Compiles every CUDA kernel for its target GPUs, at the shapes of real models and with the block
//! sizes of its launches, and fails if registers spill. Needs NVRTC but no GPU: `make cuda`.

use kernels::Output;
use kernels::activation::{self, Activation};
use kernels::adamw;
use kernels::attention::{self, Attention, ProbabilityDropout};
use kernels::cross_entropy::{self, Logits};
use kernels::cuda::{Floor, Module, SOURCES, Source, Storage, nvrtc};
use kernels::dropout::{self, Dropout};
use kernels::elementwise;
use kernels::embedding::{self, Embedding};
use kernels::latent_heads::{self, LatentHeads};
use kernels::layer_norm::{self, LayerNorm};
use kernels::random::{self, Stream};
use kernels::rms_norm::{self, RmsNorm};
use kernels::rope::{self, Pairing, Rope};
use kernels::sinks::{self, Sinks};
use kernels::transpose;
use kernels::weighted_rows;
use std::path::Path;

/// Ampere and Hopper.
const ARCHITECTURES: [&str; 2] = ["sm_80", "sm_90a"];

/// Kernels whose work is negligible beside their operation's other kernels: last steps of sums,
/// single numbers per row, a table for all layers.
const WITHOUT_FLOOR: [&str; 8] = [
    "cross_entropy_loss",
    "cross_entropy_rescale",
    "elementwise_column_sum",
    "elementwise_total",
    "embedding_join",
    "layer_norm_column_sum",
    "rms_norm_column_sum",
    "rope_table",
];

/// Tokens of a micro-batch, for the floors.
const TOKENS: usize = 8192;

/// A source with the constants of a shape.
#[derive(Clone)]
struct Shape {
    what: String,
    module: Module,
    /// The lower bounds on the work of some of its kernels.
    floors: Vec<(&'static str, Floor)>,
}

fn shape(what: String, module: Module, floors: Vec<(&'static str, Floor)>) -> Shape {
    Shape { what, module, floors }
}

/// Shapes of real models, and shapes that need the most registers.
fn shapes(source: Source) -> Vec<Shape> {
    let storages = [Storage::F32, Storage::Bf16];
    match source.operation {
        "activation" => each(storages, Activation::ALL, activations),
        "adamw" => each(storages, [()], |storage, ()| {
            let floor = adamw::cuda::floor(1 << 20, Some(storage));
            shape(
                "2^20 elements".to_owned(),
                adamw::cuda::module(storage),
                vec![("adamw_update", floor)],
            )
        }),
        "attention" => each([Storage::Bf16], tensor_core_heads(), attention_of),
        "attention_f32" => {
            let small = |a: Attention| Attention { q_len: 1024, kv_len: 1024, ..a };
            each([Storage::F32], tensor_core_heads().map(small), attention_of)
        }
        "attention_rows" => each(storages, [heads(32, 8, 128, 128)], |storage, a| {
            let module = attention::cuda::row_module(storage, &a);
            let floors = vec![
                ("attention_delta", attention::cuda::delta_floor(&a, storage)),
                ("attention_merge", attention::cuda::merge_floor(&a, storage)),
            ];
            shape(format!("{} heads of {}", a.q_heads, a.v_dim), module, floors)
        }),
        "cross_entropy" => {
            let cap = |cap| (cap, if cap > 0.0 { 256_000 } else { 128_256 });
            each(storages, [cap(0.0), cap(30.0)], logits)
        }
        "dropout" => each(storages, [8], |storage, pack| {
            let (elements, pack) = (TOKENS * 4096, pack.min(16 / storage.bytes()));
            let floors = vec![("dropout_apply", dropout::cuda::floor(elements, storage))];
            shape(format!("{TOKENS} x 4096"), dropout::cuda::module(storage, pack), floors)
        }),
        "elementwise" => each(storages, [4096, 33], sums),
        "embedding" => each(storages, [4096, 12_288], |storage, columns| {
            let embedding =
                Embedding { tokens: TOKENS, columns, rows: 128_256, first_row: 0, scale: 1.0 };
            let module = embedding::cuda::module(storage, &embedding, storage.pack(columns));
            let forward = embedding::cuda::forward_floor(&embedding, storage);
            let backward = embedding::cuda::backward_floor(&embedding, storage, TOKENS);
            let floors = vec![("embedding_forward", forward), ("embedding_backward", backward)];
            shape(format!("{TOKENS} x {columns}"), module, floors)
        }),
        "latent_heads" => each(storages, [()], |storage, ()| {
            let (content, rotary, value) = (128, 64, 128);
            let of = LatentHeads { tokens: TOKENS, heads: 16, content, rotary, value };
            let module = latent_heads::cuda::module(storage, &of, storage.pack(rotary));
            let floors = vec![
                ("latent_heads_join", latent_heads::cuda::join_floor(&of, storage)),
                ("latent_heads_split", latent_heads::cuda::copies_floor(&of, storage)),
                ("latent_heads_sum", latent_heads::cuda::sums_floor(&of, storage)),
            ];
            shape(format!("{} heads of {content} + {rotary}, {value}", of.heads), module, floors)
        }),
        "layer_norm" => [
            each(storages, [768, 1600, 12_288], |storage, columns| {
                layer_norms(storage, columns, layer_norm::cuda::module)
            }),
            each(storages, [1600], |storage, columns| {
                layer_norms(storage, columns, layer_norm::cuda::module_of_weights)
            }),
        ]
        .concat(),
        "random" => each([Storage::F32], [1 << 20], |_, elements| {
            let floors = vec![("random_normal", random::cuda::floor(elements))];
            shape(format!("{elements} elements"), random::cuda::module(), floors)
        }),
        "rms_norm" => [
            each(storages, [(128, false), (4096, false), (16_384, true)], |storage, of| {
                rms_norms(storage, of, rms_norm::cuda::module)
            }),
            each(storages, [(4096, false)], |storage, of| {
                rms_norms(storage, of, rms_norm::cuda::module_of_weights)
            }),
        ]
        .concat(),
        "rope" => {
            let half = Rope::half(TOKENS, 32, 128);
            let latent = Rope {
                head_dim: 192,
                rotary_start: 128,
                rotary_dim: 64,
                pairing: Pairing::Interleaved,
                ..half
            };
            let quarter = Rope { rotary_dim: 32, ..half };
            each(storages, [half, latent, quarter], |storage, rope| {
                let stride = rope.heads * rope.head_dim;
                let module = rope::cuda::module(storage, &rope, stride, storage.pack(16));
                let floors = vec![("rope_rotate", rope::cuda::floor(&rope, storage))];
                shape(
                    format!("{:?}, {} of {}", rope.pairing, rope.rotary_dim, rope.head_dim),
                    module,
                    floors,
                )
            })
        }
        "sinks" => each(storages, [()], |storage, ()| {
            let of = Sinks { batch: 2, heads: 64, queries: TOKENS / 2, width: 64 };
            let module = sinks::cuda::module(storage, &of, storage.pack(of.width));
            let floors = vec![
                ("sinks_apply", sinks::cuda::apply_floor(&of, storage)),
                ("sinks_gradient", sinks::cuda::gradient_floor(&of)),
            ];
            shape(format!("{} heads of {}", of.heads, of.width), module, floors)
        }),
        "transpose" => each(storages, [1, 4], |storage, pack| {
            let floor = transpose::cuda::floor(TOKENS * 4096, storage);
            let floors = vec![("transpose_rows", floor), ("transpose_matrix", floor)];
            let module = transpose::cuda::module(storage, pack);
            shape(format!("{TOKENS} x 4096, packs of {pack}"), module, floors)
        }),
        "weighted_rows" => each(storages, [4096, 33], |storage, columns| {
            let module = weighted_rows::cuda::module(storage, columns, storage.pack(columns));
            let floor = weighted_rows::cuda::floor(TOKENS, columns, storage);
            let floors = vec![("weighted_rows_scale", floor), ("weighted_rows_dot", floor)];
            shape(format!("{TOKENS} x {columns}"), module, floors)
        }),
        other => panic!("{other} has no shapes: say for which it is compiled"),
    }
}

fn each<T: Clone>(
    storages: impl IntoIterator<Item = Storage>,
    of: impl IntoIterator<Item = T>,
    shape: impl Fn(Storage, T) -> Shape,
) -> Vec<Shape> {
    let of: Vec<T> = of.into_iter().collect();
    let with = |storage| of.iter().cloned().map(move |of| (storage, of)).collect::<Vec<_>>();
    storages.into_iter().flat_map(with).map(|(storage, of)| shape(storage, of)).collect()
}

fn sums(storage: Storage, columns: usize) -> Shape {
    use Storage::F32;
    let floor = |tensors: &[Storage]| elementwise::cuda::floor(TOKENS * columns, tensors);
    let floors = vec![
        ("elementwise_add", floor(&[storage; 3])),
        ("elementwise_axpy", floor(&[storage; 3])),
        ("elementwise_maximum", floor(&[storage; 3])),
        ("elementwise_divide", floor(&[storage; 3])),
        ("elementwise_scale", floor(&[storage; 2])),
        ("elementwise_add_bias", floor(&[storage; 2])),
        ("elementwise_accumulate", floor(&[storage, F32, F32])),
        ("elementwise_narrow", floor(&[storage, F32])),
        ("elementwise_widen", floor(&[storage, F32])),
        ("elementwise_column_partials", floor(&[storage])),
        ("elementwise_squares", floor(&[storage])),
        ("elementwise_sum", floor(&[storage])),
    ];
    let module = elementwise::cuda::module(storage, columns, storage.pack(columns));
    shape(format!("{TOKENS} x {columns}"), module, floors)
}

fn activations(storage: Storage, activation: Activation) -> Shape {
    let elements = TOKENS * 14_336;
    let backward = activation::cuda::backward_floor(elements, storage);
    let floors = vec![
        ("activation_forward", activation::cuda::forward_floor(elements, storage)),
        ("activation_backward", backward),
        ("activation_gated_forward", backward),
        ("activation_gated_backward", activation::cuda::gated_backward_floor(elements, storage)),
    ];
    let module = activation::cuda::module(storage, activation, storage.pack(elements));
    shape(format!("{activation:?}, {TOKENS} x 14336"), module, floors)
}

fn heads(q_heads: usize, kv_heads: usize, qk_dim: usize, v_dim: usize) -> Attention {
    Attention { v_dim, ..Attention::causal(1, TOKENS, q_heads, kv_heads, qk_dim) }
}

fn tensor_core_heads() -> [Attention; 8] {
    let llama = heads(32, 8, 128, 128);
    let stream = Stream { seed: 1, tensor: 2, step: 3 };
    let dropout = Some(ProbabilityDropout {
        dropout: Dropout { p: 0.1, stream },
        batch_offset: 0,
        head_offset: 0,
        total_heads: 32,
        total_len: 8192,
    });
    [
        llama,
        Attention { window: Some(4096), soft_cap: Some(50.0), ..llama },
        Attention { dropout, ..llama },
        Attention { dropout, ..heads(12, 12, 64, 64) },
        heads(25, 25, 64, 64),
        heads(128, 128, 192, 128),
        heads(16, 8, 256, 256),
        Attention { window: Some(4096), soft_cap: Some(50.0), dropout, ..heads(16, 8, 256, 256) },
    ]
}

fn attention_of(storage: Storage, a: Attention) -> Shape {
    let forward = attention::cuda::forward_floor(&a, storage);
    let backward = attention::cuda::backward_floor(&a, storage);
    let [forward_name, backward_name, key_value] = match storage {
        Storage::F32 => [
            "attention_f32_forward",
            "attention_f32_backward_query",
            "attention_f32_backward_key_value",
        ],
        Storage::Bf16 => {
            ["attention_forward", "attention_backward_query", "attention_backward_key_value"]
        }
    };
    // The floor of the whole backward pass, which two kernels share.
    let floors = vec![(forward_name, forward), (backward_name, backward), (key_value, backward)];
    let more = [
        ("window", a.window.is_some()),
        ("cap", a.soft_cap.is_some()),
        ("dropout", a.dropout.is_some()),
    ];
    let more: Vec<&str> = more.into_iter().filter(|more| more.1).map(|more| more.0).collect();
    let (heads, groups) = (a.q_heads, a.kv_heads);
    let what = format!("{heads}/{groups} heads of {}/{} {}", a.qk_dim, a.v_dim, more.join(" "));
    shape(what, attention::cuda::module(storage, &a), floors)
}

fn logits(storage: Storage, (cap, columns): (f64, usize)) -> Shape {
    let soft_cap = (cap > 0.0).then_some(cap);
    let logits = Logits { soft_cap, ..Logits::whole(TOKENS, columns) };
    let module = cross_entropy::cuda::module(storage, &logits, storage.pack(columns));
    let floors = vec![
        ("cross_entropy_statistics", cross_entropy::cuda::read_floor(&logits, storage)),
        ("cross_entropy_max", cross_entropy::cuda::read_floor(&logits, storage)),
        ("cross_entropy_sum_exp", cross_entropy::cuda::read_floor(&logits, storage)),
        ("cross_entropy_gradient", cross_entropy::cuda::gradient_floor(&logits, storage)),
        (
            "cross_entropy_softmax_to_gradient",
            cross_entropy::cuda::softmax_to_gradient_floor(&logits, storage),
        ),
        (
            "cross_entropy_scale_by_slope",
            cross_entropy::cuda::scale_by_slope_floor(TOKENS, columns, storage),
        ),
        (
            "cross_entropy_join_gradient",
            cross_entropy::cuda::join_gradient_floor(TOKENS, columns, storage),
        ),
    ];
    shape(format!("{TOKENS} x {columns} cap {cap}"), module, floors)
}

fn rms_norms(
    storage: Storage,
    (columns, unit_offset): (usize, bool),
    module: fn(Storage, &RmsNorm, usize) -> Module,
) -> Shape {
    let norm = RmsNorm { rows: TOKENS, columns, eps: 1e-5, unit_offset };
    let input = rms_norm::cuda::backward_input_floor(&norm, storage, Output::Overwrite);
    let floors = vec![
        ("rms_norm_forward", rms_norm::cuda::forward_floor(&norm, storage)),
        ("rms_norm_backward_input", input),
        ("rms_norm_backward_weight", rms_norm::cuda::backward_weight_floor(&norm, storage)),
    ];
    let module = module(storage, &norm, storage.pack(columns));
    shape(format!("{TOKENS} x {columns}"), module, floors)
}

fn layer_norms(
    storage: Storage,
    columns: usize,
    module: fn(Storage, &LayerNorm, usize) -> Module,
) -> Shape {
    let norm = LayerNorm { rows: TOKENS, columns, eps: 1e-5 };
    let input = layer_norm::cuda::backward_input_floor(&norm, storage, Output::Overwrite);
    let floors = vec![
        ("layer_norm_forward", layer_norm::cuda::forward_floor(&norm, storage)),
        ("layer_norm_backward_input", input),
        ("layer_norm_backward_weight", layer_norm::cuda::backward_weight_floor(&norm, storage)),
    ];
    let module = module(storage, &norm, storage.pack(columns));
    shape(format!("{TOKENS} x {columns}"), module, floors)
}

#[test]
fn every_kernel_compiles_and_none_spills() {
    println!(
        "| kernel | storage | shape | floor, MB | floor, GFLOP | architecture | threads | registers | shared bytes |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    let mut spilling = Vec::new();
    for &source in SOURCES {
        for shape in shapes(source) {
            assert_eq!(shape.module.source(), source);
            for architecture in ARCHITECTURES {
                spilling.extend(check(&shape, architecture));
            }
        }
    }
    assert!(spilling.is_empty(), "registers are spilled:\n{}", spilling.join("\n"));
}

/// Prints the resources of each kernel, and returns those that spill.
fn check(shape: &Shape, architecture: &str) -> Vec<String> {
    let (source, constants) = (shape.module.source(), shape.module.constants());
    let compiled =
        nvrtc::compile(source, constants, architecture).unwrap_or_else(|error| panic!("{error}"));
    if let Some(folder) = std::env::var_os("CUBIN_DIR") {
        let storage = format!("{:?}", constants.storage).to_lowercase();
        let shape: String =
            shape.what.chars().map(|c| if c.is_alphanumeric() { c } else { '_' }).collect();
        let name = format!("{}-{storage}-{shape}-{architecture}.cubin", source.operation);
        std::fs::write(Path::new(&folder).join(name), &compiled.cubin).expect("CUBIN_DIR");
    }
    // The magic number of ELF.
    assert_eq!(compiled.cubin[..4], *b"\x7fELF");
    let mut named: Vec<&str> =
        compiled.kernels.iter().map(|kernel| kernel.kernel.as_str()).collect();
    let mut declared: Vec<&str> = source.kernels().collect();
    named.sort_unstable();
    declared.sort_unstable();
    assert_eq!(named, declared, "{}", source.operation);
    let floors = shape.floors.iter().map(|&(kernel, _)| kernel);
    let mut with: Vec<&str> = floors
        .chain(WITHOUT_FLOOR.into_iter().filter(|kernel| declared.contains(kernel)))
        .collect();
    with.sort_unstable();
    assert_eq!(with, declared, "a kernel without a floor, or a floor without its kernel");
    let mut spilling = Vec::new();
    for kernel in &compiled.kernels {
        let floor = shape.floors.iter().find(|(name, _)| kernel.kernel == *name);
        #[allow(clippy::cast_precision_loss)]
        let (megabytes, gigaflop) = floor.map_or((String::new(), String::new()), |(_, floor)| {
            (format!("{:.1}", floor.bytes as f64 / 1e6), format!("{:.1}", floor.flops as f64 / 1e9))
        });
        println!(
            "| {} | {:?} | {} | {megabytes} | {gigaflop} | {architecture} | {} | {} | {} |",
            kernel.kernel,
            constants.storage,
            shape.what,
            constants.threads,
            kernel.registers,
            kernel.shared_bytes
        );
        assert!(kernel.registers > 0, "{kernel:?}");
        if (kernel.spill_bytes, kernel.stack_bytes) != (0, 0) {
            spilling
                .push(format!("{kernel:?} {} {:?} {architecture}", shape.what, constants.storage));
        }
        // A block must fit a multiprocessor's 64 Ki registers; static shared memory is limited to
        // 48 KiB.
        assert!(kernel.registers as usize * constants.threads <= 65_536, "{kernel:?}");
        assert!(kernel.shared_bytes <= 48 << 10, "{kernel:?}");
    }
    spilling
}

#[test]
fn a_wrong_source_is_reported() {
    let source = Source::of("rms_norm").expect("it has a twin");
    let norm = RmsNorm { rows: 1, columns: 64, eps: 1e-5, unit_offset: false };
    let module = rms_norm::cuda::module(Storage::F32, &norm, 4);
    let constants =
        kernels::cuda::CompileConstants { defines: vec![], ..module.constants().clone() };
    let error =
        nvrtc::compile(source, &constants, "sm_80").expect_err("COLUMNS is missing").to_string();
    assert!(error.contains("rms_norm.cu does not compile for sm_80"), "{error}");
    assert!(error.contains("COLUMNS"), "{error}");
}
