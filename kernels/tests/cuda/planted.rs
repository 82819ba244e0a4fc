//! Deliberate bugs of the kind that results on an emulator do not show: races in shared memory,
//! missing barriers, overruns. The emulator that looks at every access must notice each; in the
//! sources as they are it must notice nothing.

use super::folder;
use kernels::Output;
use kernels::attention::{self, Attention};
use kernels::cuda::cpu_emulator::CpuEmulator;
use kernels::cuda::{Gpu, GpuError, Memory, Stored, bf16};
use kernels::elementwise::cuda as sums;
use kernels::embedding::{self, Embedding};
use kernels::layer_norm::{self, LayerNorm};
use kernels::transpose;
use std::sync::Arc;

type Work = fn(&Gpu) -> Result<(), GpuError>;

fn full<S: Stored>(gpu: &Gpu, len: usize) -> Result<Memory<S>, GpuError> {
    let values: Vec<S> = (0..len).map(|i| S::narrowed((i % 17) as f32 / 8.0)).collect();
    gpu.upload(&values)
}

/// Two reductions of a block, then two sums over rows.
fn norms(gpu: &Gpu) -> Result<(), GpuError> {
    let (rows, columns) = (256, 37);
    let norm = LayerNorm { rows, columns, eps: 1e-5 };
    let elements = rows * columns;
    let [x, dy, mut y] = [(); 3].map(|()| full::<f32>(gpu, elements)).map(Result::unwrap);
    let [w, bias] = [(); 2].map(|()| full::<f32>(gpu, columns)).map(Result::unwrap);
    let [mut m, mut r] = [(); 2].map(|()| full::<f32>(gpu, rows)).map(Result::unwrap);
    let (to, mean) = (y.view_mut(), m.view_mut());
    layer_norm::cuda::forward(gpu, &norm, x.view(), w.view(), bias.view(), to, mean, r.view_mut())?;
    let [mut dw, mut dbias] = [(); 2].map(|()| full::<f32>(gpu, columns)).map(Result::unwrap);
    let (m, r, dy) = (m.view(), r.view(), dy.view());
    let (dw, dbias) = (dw.view_mut(), dbias.view_mut());
    layer_norm::cuda::backward_weight(gpu, &norm, x.view(), m, r, dy, dw, dbias)
}

fn sum_of_squares(gpu: &Gpu) -> Result<(), GpuError> {
    let (x, mut total) = (full::<f32>(gpu, 3000)?, gpu.zeros::<f64>(1)?);
    sums::sum_of_squares_into(gpu, x.view(), total.view_mut(), Output::Overwrite)
}

fn addition(gpu: &Gpu) -> Result<(), GpuError> {
    let [a, b, mut y] = [(); 3].map(|()| full::<bf16>(gpu, 1904)).map(Result::unwrap);
    sums::add(gpu, a.view(), b.view(), y.view_mut())
}

fn rows_of_a_table(gpu: &Gpu) -> Result<(), GpuError> {
    // Runs over several blocks.
    let ids: Vec<i64> = (0..2200).map(|i| i * i % 600 * (i % 3)).collect();
    let shape = Embedding { tokens: 2200, columns: 8, rows: 600, first_row: 0, scale: 1.0 };
    let order = gpu.upload(&embedding::by_row(&ids))?;
    let (dout, mut table) = (full::<f32>(gpu, 2200 * 8)?, full::<f32>(gpu, 600 * 8)?);
    let (dout, to) = (dout.view(), table.view_mut());
    embedding::cuda::backward(gpu, &shape, order.view(), dout, to)
}

fn transposed(gpu: &Gpu) -> Result<(), GpuError> {
    let (x, mut y) = (full::<f32>(gpu, 70 * 40)?, full::<f32>(gpu, 70 * 40)?);
    transpose::cuda::swap_leading(gpu, [70, 40, 1], x.view(), y.view_mut())
}

fn attended<S: Stored>(gpu: &Gpu) -> Result<(), GpuError> {
    let a = Attention::causal(1, 150, 2, 1, 16);
    let (q, k, v) = (
        full::<S>(gpu, a.q_elements())?,
        full::<S>(gpu, a.k_elements())?,
        full::<S>(gpu, a.v_elements())?,
    );
    let (mut out, mut lse) =
        (full::<S>(gpu, a.out_elements())?, full::<f32>(gpu, a.lse_elements())?);
    let (to, of_rows) = (out.view_mut(), lse.view_mut());
    attention::cuda::forward(gpu, &a, q.view(), k.view(), v.view(), to, of_rows)?;
    let (mut dq, mut dk, mut dv) = (
        full::<S>(gpu, a.q_elements())?,
        full::<S>(gpu, a.k_elements())?,
        full::<S>(gpu, a.v_elements())?,
    );
    let dout = full::<S>(gpu, a.out_elements())?;
    let (out, lse) = (out.view(), lse.view());
    let saved = attention::cuda::Saved { q: q.view(), k: k.view(), v: v.view(), out, lse };
    let (dq, dk, dv) = (dq.view_mut(), dk.view_mut(), dv.view_mut());
    let mut gradients = attention::cuda::Gradients { dq, dk, dv };
    attention::cuda::backward(gpu, &a, &saved, dout.view(), &mut gradients, Output::Overwrite)
}

const WORK: [Work; 7] = [
    norms,
    sum_of_squares,
    addition,
    rows_of_a_table,
    transposed,
    attended::<f32>,
    attended::<bf16>,
];

const RACE: &str = "another thread may";
const OVERRUN: &str = "beside";
const UNWRITTEN: &str = "nobody wrote";

/// What is replaced in a source, by what, the work that runs it, and what the emulator says.
const PLANTED: [(&str, &str, Work, &str); 23] = [
    ("  __syncthreads();  // an earlier reduction's results may still be read\n", "", norms, RACE),
    (
        "warps[threadIdx.x / 32] = value;\n  __syncthreads();",
        "warps[threadIdx.x / 32] = value;",
        norms,
        "",
    ),
    ("  __syncthreads();  // an earlier strip may still be read\n", "", norms, RACE),
    ("PACK + i] = sum[i];\n  __syncthreads();", "PACK + i] = sum[i];", norms, ""),
    ("  __syncthreads();  // an earlier total may still be read\n", "", norms, RACE),
    ("[threadIdx.x % 32] = sum;\n  __syncthreads();", "[threadIdx.x % 32] = sum;", norms, ""),
    (
        "sums[threadIdx.x] = sum;\n  __syncthreads();",
        "sums[threadIdx.x] = sum;",
        sum_of_squares,
        "",
    ),
    ("away];\n    __syncthreads();", "away];", sum_of_squares, RACE),
    (": OUTSIDE;\n  }\n  __syncthreads();", ": OUTSIDE;\n  }", rows_of_a_table, ""),
    ("  }\n  __syncthreads();\n  for (int row", "  }\n  for (int row", transposed, ""),
    ("__syncthreads();\n    fill(key_tile", "fill(key_tile", attended::<f32>, RACE),
    ("KV_HEADS, V_DIM);\n    __syncthreads();", "KV_HEADS, V_DIM);", attended::<f32>, ""),
    (
        "  __syncwarp();  // an earlier call's factors may still be read\n",
        "",
        attended::<f32>,
        RACE,
    ),
    ("[lane()] = factor;\n  __syncwarp();", "[lane()] = factor;", attended::<f32>, ""),
    (
        "__syncthreads();\n    fill<QK_DIM>(key_tile",
        "fill<QK_DIM>(key_tile",
        attended::<bf16>,
        RACE,
    ),
    (
        "KEYS, keys, KV_HEADS);\n    __syncthreads();",
        "KEYS, keys, KV_HEADS);",
        attended::<bf16>,
        "",
    ),
    // Overruns of shared memory, and of device memory before and behind a tensor.
    ("stored tile[32][33]", "stored tile[31][33]", transposed, OVERRUN),
    ("float sums[WARPS][STRIP]", "float sums[WARPS - 1][STRIP]", norms, OVERRUN),
    ("key_tile[TILE * ODD(QK_DIM)]", "key_tile[TILE * QK_DIM]", attended::<f32>, OVERRUN),
    (
        "column_total(partial + COLUMNS, column, COLUMNS,",
        "column_total(partial + COLUMNS, column, 2 * COLUMNS,",
        norms,
        OVERRUN,
    ),
    ("if (start >= elements) return;\n  float left", "float left", addition, OVERRUN),
    ("load(a + start, left);", "load(a + start - PACK, left);", addition, OVERRUN),
    // Shared memory that is read before it is written.
    ("i < RUN + 1; i += THREADS) {", "i < RUN; i += THREADS) {", rows_of_a_table, UNWRITTEN),
];

fn checking() -> CpuEmulator {
    CpuEmulator::new(&folder()).expect("a folder for compiled sources").checking()
}

#[test]
fn nothing_is_noticed_in_the_sources() {
    for (number, work) in WORK.into_iter().enumerate() {
        let done = work(&Gpu::on(Arc::new(checking())));
        assert!(done.is_ok(), "work {number}: {}", done.unwrap_err());
    }
}

#[test]
fn every_planted_bug_is_noticed() {
    let unnoticed =
        PLANTED.into_iter().enumerate().filter_map(|(number, (from, to, work, says))| {
            let mut sources = kernels::cuda::SOURCES.iter();
            let source = |of: &kernels::cuda::Source| of.text().contains(from);
            assert!(sources.any(source), "planted bug {number} has no place: {from}");
            let done = work(&Gpu::on(Arc::new(checking().with_planted(from, to))));
            let said = done.err().map(|error| error.to_string()).unwrap_or_default();
            let caught = !said.is_empty() && said.contains(says);
            (!caught).then(|| format!("{number}: {from:?}: {said:?}"))
        });
    let unnoticed: Vec<String> = unnoticed.collect();
    assert!(unnoticed.is_empty(), "not noticed:\n{}", unnoticed.join("\n"));
}
