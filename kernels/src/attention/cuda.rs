//! Attention on a GPU: tensors in the storage type, `lse` in f32. bf16 runs on tensor cores, for
//! heads of multiples of 16 up to 256; f32 runs on the other units, for any head, and slowly.
//!
//! Gradients of ranges of keys (ring attention, chunks) are accumulated in bf16, range by range,
//! which loses digits that the CPU's accumulation keeps.

use super::fused::{Direction, Kernel, run_fastest};
use super::{Attention, ProbabilityDropout};
use crate::Output;
use crate::cuda::fused::{Role, Sdpa};
use crate::cuda::launch::{NULL, blocks, constant, int};
use crate::cuda::{Argument, Floor, Gpu, GpuError, Module, Storage, Stored, View, ViewMut};

/// Hash of the kernels' source: measurements of other versions are not reused.
const VERSION: u64 = hash(
    include_str!("attention_rows.cu"),
    hash(include_str!("attention_common.cu"), hash(include_str!("attention.cu"), OFFSET)),
);

/// FNV-1a's initial value.
const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;

/// FNV-1a (Fowler, Noll, Vo), continuing from a hash.
const fn hash(text: &str, mut hash: u64) -> u64 {
    let text = text.as_bytes();
    let mut at = 0;
    while at < text.len() {
        hash = (hash ^ text[at] as u64).wrapping_mul(0x0100_0000_01b3);
        at += 1;
    }
    hash
}

/// Widest head of the tensor-core kernels.
const WIDEST: usize = 256;

/// Inputs of the backward pass.
#[derive(Clone, Copy, Debug)]
pub struct Saved<'a, S> {
    /// Queries.
    pub q: View<'a, S>,
    /// Keys.
    pub k: View<'a, S>,
    /// Values.
    pub v: View<'a, S>,
    /// Output over all keys, including those of other ranges.
    pub out: View<'a, S>,
    /// Log-sum-exp over all keys.
    pub lse: View<'a, f32>,
}

/// Outputs of the backward pass.
#[derive(Debug)]
pub struct Gradients<'a, S> {
    /// Gradient with respect to the queries.
    pub dq: ViewMut<'a, S>,
    /// Gradient with respect to the keys, summed over the query heads that share them.
    pub dk: ViewMut<'a, S>,
    /// Gradient with respect to the values, summed likewise.
    pub dv: ViewMut<'a, S>,
}

/// The kernels of one storage type, and the rows of their blocks.
struct Kernels {
    module: Module,
    rows: usize,
    /// Whether dk and dv are computed by separate blocks.
    split: bool,
    forward: &'static str,
    backward_query: &'static str,
    backward_key_value: &'static str,
}

/// Whether dk and dv of one head exceed a thread's registers; the same condition as in
/// attention.cu.
const fn is_wide(a: &Attention) -> bool {
    a.qk_dim > 192 || a.v_dim > 192 || a.qk_dim + a.v_dim > 320
}

/// The modules of an attention in this storage type: the tiled kernels, and those that work row by
/// row ([`row_module`]).
///
/// # Panics
/// In bf16, if heads are not multiples of 16 or are wider than 256.
#[track_caller]
#[must_use]
pub fn module(storage: Storage, a: &Attention) -> Module {
    let constants = vec![
        ("Q_HEADS", constant(a.q_heads)),
        ("KV_HEADS", constant(a.kv_heads)),
        ("QK_DIM", constant(a.qk_dim)),
        ("V_DIM", constant(a.v_dim)),
        ("SCALE", a.scale),
        ("CAUSAL", f64::from(u8::from(a.causal))),
        ("WINDOW", constant(a.window.unwrap_or(0))),
        ("SOFT_CAP", a.soft_cap.unwrap_or(0.0)),
        ("DROPOUT", f64::from(u8::from(a.dropout.is_some()))),
    ];
    match storage {
        Storage::F32 => Module::new("attention_f32", storage, 1, 128, constants),
        Storage::Bf16 => {
            let fits = |dim: usize| dim.is_multiple_of(16) && dim <= WIDEST;
            assert!(
                fits(a.qk_dim) && fits(a.v_dim),
                "heads of {} and {} in bf16: multiples of 16 up to {WIDEST}",
                a.qk_dim,
                a.v_dim
            );
            // As many rows as fit in 48 KiB of shared memory and the registers.
            let threads = match a.qk_dim.max(a.v_dim) {
                _ if is_wide(a) => 32,
                129.. => 64,
                _ => 128,
            };
            Module::new("attention", storage, 8, threads, constants)
        }
    }
}

/// The module of the correction and the merge.
#[must_use]
pub fn row_module(storage: Storage, a: &Attention) -> Module {
    let constants = vec![("Q_HEADS", constant(a.q_heads)), ("V_DIM", constant(a.v_dim))];
    Module::new("attention_rows", storage, 1, 128, constants)
}

impl Kernels {
    #[track_caller]
    fn of(storage: Storage, a: &Attention) -> Self {
        let module = module(storage, a);
        let warps = module.threads() / 32;
        match storage {
            Storage::F32 => Self {
                module,
                // The same number as in attention_f32.cu.
                rows: warps * if a.qk_dim + a.v_dim > 256 { 1 } else { 2 },
                split: false,
                forward: "attention_f32_forward",
                backward_query: "attention_f32_backward_query",
                backward_key_value: "attention_f32_backward_key_value",
            },
            Storage::Bf16 => Self {
                module,
                rows: 16 * warps,
                split: is_wide(a),
                forward: "attention_forward",
                backward_query: "attention_backward_query",
                backward_key_value: "attention_backward_key_value",
            },
        }
    }

    fn by_query(&self, a: &Attention) -> [usize; 2] {
        [blocks(a.q_len, self.rows), a.batch * a.q_heads]
    }

    fn by_key(&self, a: &Attention) -> [usize; 2] {
        let heads = a.batch * a.kv_heads;
        [blocks(a.kv_len, self.rows), if self.split { 2 * heads } else { heads }]
    }
}

/// Panics if tiles for tensor cores would not be aligned to 16 bytes.
#[track_caller]
fn check_alignment(storage: Storage, tensors: &[u64]) {
    let aligned = tensors.iter().all(|address| address.is_multiple_of(16));
    assert!(
        storage == Storage::F32 || aligned,
        "a tensor of attention begins at no multiple of 16 bytes"
    );
}

/// Lengths, offsets and dropout: the last arguments of every kernel.
#[allow(clippy::cast_possible_truncation)] // a factor
fn last_arguments(gpu: &Gpu, a: &Attention) -> Vec<Argument> {
    let none = Argument::U64(0);
    let mut arguments = vec![int(a.q_len), int(a.kv_len), int(a.q_offset), int(a.kv_offset)];
    match &a.dropout {
        None => {
            arguments.extend([Argument::U32(0), Argument::F32(1.0), none]);
            arguments.extend([Argument::U32(0), Argument::U32(0), NULL, none, none, none, none]);
        }
        Some(ProbabilityDropout { dropout, batch_offset, head_offset, total_heads, total_len }) => {
            let stream = dropout.stream;
            arguments.extend([
                Argument::U32(dropout.threshold()),
                Argument::F32(dropout.scale() as f32),
                Argument::U64(stream.seed),
                Argument::U32(stream.tensor),
                Argument::U32(stream.step),
                gpu.step_numbers(),
            ]);
            let places = [batch_offset, head_offset, total_heads, total_len];
            arguments.extend(places.map(|&place| Argument::U64(place)));
        }
    }
    arguments
}

/// Number of blocks of kernels that use a warp for each row of a head.
fn row_blocks(a: &Attention, module: &Module) -> usize {
    blocks(a.batch * a.q_len * a.q_heads, module.threads() / 32)
}

/// Computes `out` and `lse`. Shapes: [`super`].
///
/// bf16 uses the fastest kernel there is ([`super::fused`]). The first call for a shape measures
/// which that is, and must not be captured.
///
/// # Errors
/// If the device fails.
///
/// # Panics
/// If a view has the wrong length; or in bf16 heads are not multiples of 16, are wider than 256, or
/// a tensor is not aligned to 16 bytes. The same holds for the functions below.
#[track_caller]
pub fn forward<S: Stored>(
    gpu: &Gpu,
    attention: &Attention,
    q: View<'_, S>,
    k: View<'_, S>,
    v: View<'_, S>,
    out: ViewMut<'_, S>,
    lse: ViewMut<'_, f32>,
) -> Result<(), GpuError> {
    forward_by(gpu, None, attention, q, k, v, out, lse)
}

/// [`forward`] by a kernel of [`forward_kernels`], or by the fastest.
///
/// # Errors
/// As [`forward`].
#[track_caller]
#[allow(clippy::too_many_arguments)] // the tensors
pub fn forward_by<S: Stored>(
    gpu: &Gpu,
    kernel: Option<Kernel>,
    attention: &Attention,
    q: View<'_, S>,
    k: View<'_, S>,
    v: View<'_, S>,
    out: ViewMut<'_, S>,
    lse: ViewMut<'_, f32>,
) -> Result<(), GpuError> {
    attention.check(q.len(), k.len(), v.len(), out.len(), lse.len());
    check_alignment(S::STORAGE, &[q.address(), k.address(), v.address(), out.address()]);
    let kernels = Kernels::of(S::STORAGE, attention);
    let (out, lse) = (out.into_address(), lse.into_address());
    let written = [out, lse].map(Argument::Address);
    let mut arguments = vec![q.argument(), k.argument(), v.argument(), written[0], written[1]];
    arguments.extend(last_arguments(gpu, attention));
    let grid = kernels.by_query(attention);
    let launch = kernels.module.launch(kernels.forward, grid, arguments);
    let own = || gpu.launch(&launch);
    let tensors = [
        (Role::Q, q.address()),
        (Role::K, k.address()),
        (Role::V, v.address()),
        (Role::Out, out),
        (Role::Lse, lse),
    ];
    let sdpa = sdpa_of(S::STORAGE, attention);
    run_fastest(gpu, sdpa.as_ref(), Direction::Forward, kernel, VERSION, &tensors, &own)
}

/// The kernels that can run [`forward`] in bf16, with names: our own first, then a library's, if
/// there is one.
///
/// # Errors
/// If the library takes no graph of it; its message.
pub fn forward_kernels(gpu: &Gpu, a: &Attention) -> Result<Vec<(Kernel, String)>, GpuError> {
    Kernel::all(gpu, a.sdpa().as_ref(), Direction::Forward)
}

/// The kernels that can run [`backward`] in bf16, with names.
///
/// # Errors
/// As [`forward_kernels`].
pub fn backward_kernels(gpu: &Gpu, a: &Attention) -> Result<Vec<(Kernel, String)>, GpuError> {
    Kernel::all(gpu, a.sdpa().as_ref(), Direction::Backward)
}

/// The request to a library, if the storage type and the attention allow one.
fn sdpa_of(storage: Storage, attention: &Attention) -> Option<Sdpa> {
    (storage == Storage::Bf16).then(|| attention.sdpa()).flatten()
}

/// Computes `dq`, `dk` and `dv`. Shapes: [`super`].
///
/// The bits are always the same only if `MESHWRIGHT_ATTENTION` is `own` or `repeatable`. Gradients
/// that are overwritten are computed by the fastest kernel there is, as in [`forward`].
///
/// # Errors
/// As [`forward`].
#[track_caller]
pub fn backward<S: Stored>(
    gpu: &Gpu,
    attention: &Attention,
    saved: &Saved<'_, S>,
    dout: View<'_, S>,
    gradients: &mut Gradients<'_, S>,
    output: Output,
) -> Result<(), GpuError> {
    backward_by(gpu, None, attention, saved, dout, gradients, output)
}

/// [`backward`] by a kernel of [`backward_kernels`], or by the fastest. Accumulated gradients are
/// always computed by our own kernels.
///
/// # Errors
/// As [`forward`].
#[track_caller]
pub fn backward_by<S: Stored>(
    gpu: &Gpu,
    kernel: Option<Kernel>,
    attention: &Attention,
    saved: &Saved<'_, S>,
    dout: View<'_, S>,
    gradients: &mut Gradients<'_, S>,
    output: Output,
) -> Result<(), GpuError> {
    let a = attention;
    let Saved { q, k, v, out, lse } = saved;
    let Gradients { dq, dk, dv } = gradients;
    a.check(q.len(), k.len(), v.len(), out.len(), lse.len());
    a.check(dq.len(), dk.len(), dv.len(), dout.len(), lse.len());
    check_alignment(S::STORAGE, &[q.address(), k.address(), v.address(), dout.address()]);
    check_alignment(S::STORAGE, &[dq.address(), dk.address(), dv.address()]);
    let [dq, dk, dv] = [dq.view_mut(), dk.view_mut(), dv.view_mut()];
    let written = [dq, dk, dv].map(ViewMut::into_address);
    let own = || own_backward(gpu, a, saved, dout, written, output);
    let sdpa = match output {
        Output::Overwrite => sdpa_of(S::STORAGE, a),
        // The library's graphs can only overwrite.
        Output::Accumulate => None,
    };
    let [dq, dk, dv] = written;
    let tensors = [
        (Role::Q, q.address()),
        (Role::K, k.address()),
        (Role::V, v.address()),
        (Role::Out, out.address()),
        (Role::Lse, lse.address()),
        (Role::Dout, dout.address()),
        (Role::Dq, dq),
        (Role::Dk, dk),
        (Role::Dv, dv),
    ];
    run_fastest(gpu, sdpa.as_ref(), Direction::Backward, kernel, VERSION, &tensors, &own)
}

/// [`backward`] by our own kernels, with the addresses of the gradients.
fn own_backward<S: Stored>(
    gpu: &Gpu,
    a: &Attention,
    saved: &Saved<'_, S>,
    dout: View<'_, S>,
    written: [u64; 3],
    output: Output,
) -> Result<(), GpuError> {
    let Saved { q, k, v, out, lse } = saved;
    let [dq, dk, dv] = written.map(Argument::Address);
    let delta = gpu.memory::<f32>(a.lse_elements())?;
    let delta = delta.view();
    let rows = row_module(S::STORAGE, a);
    let arguments =
        vec![out.argument(), dout.argument(), delta.argument(), int(a.batch), int(a.q_len)];
    gpu.launch(&rows.launch("attention_delta", [row_blocks(a, &rows), 1], arguments))?;

    let kernels = Kernels::of(S::STORAGE, a);
    let read = [q.argument(), k.argument(), v.argument(), dout.argument(), lse.argument()];
    let read = [&read[..], &[delta.argument()]].concat();
    let last = [vec![output.into()], last_arguments(gpu, a)].concat();
    let arguments = [&read[..], &[dq], &last].concat();
    let launch = kernels.module.launch(kernels.backward_query, kernels.by_query(a), arguments);
    gpu.launch(&launch)?;
    let arguments = [&read[..], &[dk, dv], &last].concat();
    let launch = kernels.module.launch(kernels.backward_key_value, kernels.by_key(a), arguments);
    gpu.launch(&launch)
}

/// Merges the result over another range of keys into `out`, which is f32, and `lse`, in place:
/// `lse <- ln(e^lse + e^lse')`, `out <- e^(lse_old - lse) out + e^(lse' - lse) out'`.
///
/// # Errors
/// As [`forward`].
pub fn merge<S: Stored>(
    gpu: &Gpu,
    attention: &Attention,
    out: ViewMut<'_, f32>,
    lse: ViewMut<'_, f32>,
    part_out: View<'_, S>,
    part_lse: View<'_, f32>,
) -> Result<(), GpuError> {
    crate::check::length("out", out.len(), attention.out_elements());
    crate::check::length("lse", lse.len(), attention.lse_elements());
    crate::check::length("part_out", part_out.len(), out.len());
    crate::check::length("part_lse", part_lse.len(), lse.len());
    let rows = row_module(S::STORAGE, attention);
    let arguments = vec![
        out.argument(),
        lse.argument(),
        part_out.argument(),
        part_lse.argument(),
        int(attention.batch),
        int(attention.q_len),
    ];
    gpu.launch(&rows.launch("attention_merge", [row_blocks(attention, &rows), 1], arguments))
}

/// Number of visible pairs of a query and a key, over all sequences and query heads.
#[must_use]
pub fn visible_pairs(a: &Attention) -> usize {
    a.batch * a.q_heads * (0..a.q_len).map(|query| a.visible(query).len()).sum::<usize>()
}

/// Lower bound on the work of [`merge`].
#[must_use]
pub fn merge_floor(a: &Attention, storage: Storage) -> Floor {
    Floor::bytes(a.out_elements() * (8 + storage.bytes()) + 12 * a.lse_elements())
}

/// Lower bound on the work of [`backward`]'s first kernel, the sums over rows of `out dout`;
/// [`backward_floor`] does not include it.
#[must_use]
pub fn delta_floor(a: &Attention, storage: Storage) -> Floor {
    Floor::bytes(2 * a.out_elements() * storage.bytes() + 4 * a.lse_elements())
}

/// Lower bound on the work of [`forward`]: two products over visible pairs.
#[must_use]
pub fn forward_floor(a: &Attention, storage: Storage) -> Floor {
    let elements = a.q_elements() + a.k_elements() + a.v_elements() + a.out_elements();
    let flops = 2 * visible_pairs(a) * (a.qk_dim + a.v_dim);
    Floor { bytes: elements * storage.bytes() + 4 * a.lse_elements(), flops }
}

/// Lower bound on the work of [`backward`]: five products over visible pairs (scores, their
/// gradient, dq, dk, dv). Our kernels do two of them twice.
#[must_use]
pub fn backward_floor(a: &Attention, storage: Storage) -> Floor {
    let read = a.q_elements() + a.k_elements() + a.v_elements() + 2 * a.out_elements();
    let written = a.q_elements() + a.k_elements() + a.v_elements();
    let flops = 2 * visible_pairs(a) * (3 * a.qk_dim + 2 * a.v_dim);
    Floor { bytes: (read + written) * storage.bytes() + 4 * a.lse_elements(), flops }
}
