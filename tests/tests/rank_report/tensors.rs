//! What each rank holds of which tensor.

use super::run::{RUNS, number, sizes};
use meshwright_tests::golden::{folder, has_weights};
use models::shapes::{self, Held};
use runtime::state::checkpoint::TensorFile;
use serde_json::Value;
use std::collections::BTreeMap;

#[test]
fn local_shapes_are_those_of_the_program() {
    for run in &*RUNS {
        let (model, tp) = (&run.program.model, run.program.mesh.tp);
        for rank in &run.ranks {
            let mut planned = Vec::new();
            for index in run.program.stages_of(run.pp_rank(rank)) {
                let layers = run.program.stages[index].layers();
                let [before, behind] = shapes::ends(&run.program, index);
                let layers = layers.flat_map(|layer| shapes::layer(&run.program, layer));
                planned.extend(before.into_iter().chain(layers).chain(behind).map(of_plan));
            }
            if run.program.vocab.is_some() {
                let shard = shapes::vocabulary_shard(model, tp * run.program.mesh.pp);
                planned.extend(shard.into_iter().map(of_plan));
            }
            let mut held: Vec<Vec<u64>> =
                rank["tensors"].as_array().expect("a list").iter().map(of_report).collect();
            planned.sort();
            held.sort();
            assert_eq!(held, planned, "{} rank {}", run.what, rank["rank"]);
        }
    }
}

/// Sizes as plans list them, without padding rows, in either orientation of the checkpoint.
fn of_plan(held: Held) -> Vec<u64> {
    let mut shape = held.shape;
    shape.sort_unstable();
    shape
}

/// The same of a piece. Padding is rows of the vocabulary, a tensor's first dimension.
fn of_report(piece: &Value) -> Vec<u64> {
    let mut shape = sizes(&piece["local_shape"]);
    shape[0] += number(&piece["padding_rows"]);
    shape.sort_unstable();
    shape
}

#[test]
fn pieces_cover_every_tensor_of_the_checkpoint_once() {
    for run in &*RUNS {
        let (cp, replicas) = (run.program.mesh.cp, run.replicas());
        let mut covered: BTreeMap<(u64, String), Vec<u8>> = BTreeMap::new();
        for rank in &run.ranks {
            for piece in rank["tensors"].as_array().expect("a list") {
                if piece["copy"] == false {
                    let [cp_index, dp_index] = ["cp", "dp"].map(|axis| number(&rank["at"][axis]));
                    cover(&mut covered, dp_index * cp + cp_index, piece);
                }
            }
        }
        for (key, counts) in &covered {
            assert!(counts.iter().all(|&count| count == 1), "{} {key:?}", run.what);
        }
        let case = run.what.split(' ').next().unwrap_or_default();
        if !has_weights(case) {
            continue;
        }
        let file = TensorFile::open(&folder(case).join("model.safetensors"));
        let mut names = file.expect("the case has it").names();
        names.sort();
        let of = |replica| names.iter().map(move |name| (replica, name.clone()));
        let expected: Vec<(u64, String)> = (0..replicas).flat_map(of).collect();
        assert!(covered.keys().eq(expected.iter()), "{}", run.what);
    }
}

/// Adds one to every element of a piece.
fn cover(covered: &mut BTreeMap<(u64, String), Vec<u8>>, replica: u64, piece: &Value) {
    let [whole, offset, local] =
        ["global_shape", "global_offset", "local_shape"].map(|key| sizes(&piece[key]));
    let name = piece["name"].as_str().expect("a name").to_owned();
    let all = whole.iter().product::<u64>() as usize;
    let counts = covered.entry((replica, name)).or_insert_with(|| vec![0; all]);
    let width = whole.get(1).copied().unwrap_or(1);
    let (first, columns) = if whole.len() == 1 { (0, 1) } else { (offset[1], local[1]) };
    for row in offset[0]..offset[0] + local[0] {
        for column in first..first + columns {
            counts[(row * width + column) as usize] += 1;
        }
    }
}
