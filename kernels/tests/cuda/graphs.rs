//! Attention's graphs, interpreted in f64, against the reference kernels.

use super::interpreter::{Memory, run};
use kernels::attention::{Attention, Gradients, ProbabilityDropout, Saved, reference};
use kernels::cuda::fused::{Pass, Place, Role};
use kernels::dropout::Dropout;
use kernels::random::Stream;
use kernels::{Cpu, Output};

/// Shapes: single heads and groups of 4 and 8; odd lengths; with and without a mask; with an
/// offset, also one so large that the mask hides nothing.
fn shapes() -> Vec<Attention> {
    let of = |q_len, kv_len, [q_heads, kv_heads]: [usize; 2], qk_dim, v_dim| Attention {
        kv_len,
        v_dim,
        // Exact in f32.
        scale: 0.375,
        ..Attention::causal(2, q_len, q_heads, kv_heads, qk_dim)
    };
    vec![
        of(5, 5, [3, 3], 8, 8),
        of(7, 7, [8, 2], 16, 8),
        of(6, 9, [8, 1], 8, 24),
        Attention { causal: false, ..of(5, 11, [4, 2], 8, 16) },
        Attention { q_offset: 9, kv_offset: 2, ..of(5, 12, [4, 1], 8, 8) },
        Attention { q_offset: 40, ..of(3, 7, [2, 2], 8, 8) },
    ]
}

fn numbers(len: usize, seed: usize) -> Vec<f64> {
    (0..len).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f64 / 1001.5 - 1.0).collect()
}

fn close(what: &str, found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!((found - expected).abs() < 1e-12, "{what} [{at}]: {found}, not {expected}");
    }
}

#[test]
fn graphs_are_the_reference_kernels() {
    let cpu = Cpu::serial();
    for a in shapes() {
        let sdpa = a.sdpa().expect("a graph");
        let [q, k, v, dout] = [a.q_elements(), a.k_elements(), a.v_elements(), a.out_elements()]
            .map(|len| numbers(len, len % 97));
        let [mut out, mut lse] = [vec![0.0; dout.len()], vec![0.0; a.lse_elements()]];
        reference::forward(&cpu, &a, &q, &k, &v, &mut out, &mut lse);
        let [mut dq, mut dk, mut dv] = [&q, &k, &v].map(|tensor| vec![0.0; tensor.len()]);
        let saved = Saved { q: &q, k: &k, v: &v, out: &out, lse: &lse };
        let mut gradients = Gradients { dq: &mut dq, dk: &mut dk, dv: &mut dv };
        reference::backward(&cpu, &a, &saved, &dout, &mut gradients, Output::Overwrite);

        let read = [(Role::Q, &q), (Role::K, &k), (Role::V, &v)];
        let mut memory: Memory = read.map(|(role, tensor)| (role, tensor.clone())).into();
        run(&sdpa.graph(Pass::Forward), &mut memory);
        close(&format!("out of {a:?}"), &memory[&Role::Out], &out);
        close(&format!("lse of {a:?}"), &memory[&Role::Lse], &lse);
        memory.insert(Role::Dout, dout);
        for repeatable in [true, false] {
            let mut memory = memory.clone();
            run(&sdpa.graph(Pass::Backward { repeatable }), &mut memory);
            for (role, expected) in [(Role::Dq, &dq), (Role::Dk, &dk), (Role::Dv, &dv)] {
                let what = format!("{role:?} of {a:?}, repeatable {repeatable}");
                close(&what, &memory[&role], expected);
            }
        }
    }
}

/// Attentions that a graph cannot express have none.
#[test]
fn what_graphs_cannot_say_they_do_not() {
    let a = Attention::causal(2, 8, 4, 2, 16);
    assert!(a.sdpa().is_some());
    let dropout = Dropout { p: 0.25, stream: Stream { seed: 1, tensor: 2, step: 3 } };
    let dropout = ProbabilityDropout {
        dropout,
        batch_offset: 0,
        head_offset: 0,
        total_heads: 4,
        total_len: 8,
    };
    for other in [
        Attention { window: Some(3), ..a },
        Attention { soft_cap: Some(1.0), ..a },
        Attention { dropout: Some(dropout), ..a },
        Attention { kv_offset: 1, ..a },
        Attention { q_len: 1, ..a },
        Attention { qk_dim: 20, ..a },
        Attention { v_dim: 264, ..a },
        Attention { batch: 0, ..a },
    ] {
        assert_eq!(other.sdpa(), None, "{other:?}");
    }
}

/// Masks have no more operations than needed, and depend on offsets only by their difference.
#[test]
fn masks_are_by_position() {
    let a = Attention::causal(2, 8, 4, 2, 16);
    let shift = |q_offset, kv_offset, kv_len| {
        let a = Attention { q_offset, kv_offset, kv_len, ..a };
        a.sdpa().map(|sdpa| (sdpa.shift, sdpa.graph(Pass::Forward).operations.len()))
    };
    assert_eq!(shift(0, 0, 8), Some((Some(0), 14)));
    assert_eq!(shift(12, 5, 20), Some((Some(7), 15)));
    assert_eq!(shift(18, 0, 20), Some((Some(18), 15)));
    assert_eq!(shift(19, 0, 20), Some((None, 10)));
    let open = Attention { causal: false, kv_offset: 3, ..a };
    assert_eq!(open.sdpa().map(|sdpa| sdpa.shift), Some(None));
}

/// Scratch memory has the size of its tensors.
#[test]
fn scratch_is_what_the_graph_needs() {
    let a = Attention::causal(3, 8, 4, 2, 16);
    let sdpa = a.sdpa().expect("a graph");
    let scratch = |pass| sdpa.graph(pass).scratch().collect::<Vec<_>>();
    assert_eq!(scratch(Pass::Forward), []);
    let delta = (Role::Delta, 4 * a.lse_elements());
    assert_eq!(scratch(Pass::Backward { repeatable: true }), [delta]);
    let sums = (Role::DqSums, 4 * a.q_elements());
    assert_eq!(scratch(Pass::Backward { repeatable: false }), [delta, sums]);
}

/// Roles have distinct numbers.
#[test]
fn tensors_in_memory_have_one_number_each() {
    let sdpa = Attention::causal(3, 8, 4, 2, 16).sdpa().expect("a graph");
    let graph = sdpa.graph(Pass::Backward { repeatable: false });
    let mut numbers: Vec<i64> = graph
        .tensors
        .iter()
        .filter_map(|tensor| match tensor.place {
            Place::Memory(role) => Some(role.number()),
            _ => None,
        })
        .collect();
    let all = numbers.len();
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!((numbers.len(), all, numbers[0]), (11, 11, 1));
}
