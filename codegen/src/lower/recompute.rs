//! Recomputation: from the values that survive to those that the backward pass reads.

use super::builder::steps;
use super::op::{Op, Step, Value};

/// What is kept instead of everything that the backward pass reads, and how the rest is computed
/// again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restore {
    /// What is kept.
    pub kept: Vec<Value>,
    /// Operations of the forward pass, run once more.
    pub steps: Vec<Step>,
}

/// How to get `read` from those values that `survives`. The operations are those of the forward
/// pass on which the missing values depend.
pub(super) fn restore(forward: &[Op], read: &[Value], survives: &dyn Fn(Value) -> bool) -> Restore {
    let mut wanted: Vec<Value> = read.iter().copied().filter(|&value| !survives(value)).collect();
    let mut kept: Vec<Value> = read.iter().copied().filter(|&value| survives(value)).collect();
    let mut ops = Vec::new();
    for op in forward.iter().rev() {
        if !op.makes().iter().any(|value| wanted.contains(value)) {
            continue;
        }
        let op = again(op, &wanted, survives);
        for value in op.reads() {
            let list = if survives(value) { &mut kept } else { &mut wanted };
            if !list.contains(&value) {
                list.push(value);
            }
        }
        ops.push(op);
    }
    ops.reverse();
    kept.sort_unstable();
    Restore { kept, steps: steps(ops, |value| read.contains(&value)) }
}

/// An operation as it runs once more: a norm whose input survives starts from that, not from the
/// stream, and what survives is not made again.
fn again(op: &Op, wanted: &[Value], survives: &dyn Fn(Value) -> bool) -> Op {
    match *op {
        Op::Norm { field, x, to, statistics, .. } if survives(x) => {
            let statistics = Some(statistics).filter(|of| wanted.contains(of));
            Op::NormOf { field, x, to, statistics }
        }
        Op::NormOf { field, x, to, statistics } => {
            Op::NormOf { field, x, to, statistics: statistics.filter(|of| wanted.contains(of)) }
        }
        _ => op.clone(),
    }
}
