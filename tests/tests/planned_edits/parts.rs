//! Experts, blocks of sequences, gradients and stages.

use super::edit::{BLOCKS, EXPERTS, Edit, SPLIT, edit};

pub const EDITS: &[Edit] = &[
    // Experts.
    edit(
        "dispatch_is_missing",
        EXPERTS,
        &[("layer.rs", "let received = route.dispatch(ctx, copies)?;", "let received = copies;")],
        &["expected `&Received<D, 64>`, found `&Copies<D, 64>`"],
    ),
    edit(
        "combine_is_missing",
        EXPERTS,
        &[("layer.rs", "let results = route.combine(ctx, made)?;", "let results = made;")],
        &["expected `&Copies<D, 64>`, found `&Received<D, 64>`"],
    ),
    edit(
        "dispatched_twice",
        EXPERTS,
        &[(
            "layer.rs",
            "let received = route.dispatch(ctx, copies)?;",
            "let received = route.dispatch(ctx, copies)?;\n        \
             let received = route.dispatch(ctx, copies)?;",
        )],
        &["use of moved value: `copies`"],
    ),
    edit(
        "experts_have_another_direction",
        EXPERTS,
        &[(
            "layer.rs",
            "    expert_down: Experts<EXPERT_INNER, HIDDEN>,",
            "    expert_down: Experts<HIDDEN, EXPERT_INNER>,",
        )],
        &["expected `64`, found `56`"],
    ),
    edit(
        "router_of_gathered_rows",
        EXPERTS,
        &[("layer.rs", "self.router.route(ctx, &h_2)", "self.router.route(ctx, &full_1)")],
        &["expected `&Tensor<D, Split<Tp<2>>, _, 64>`, found `&Tensor<D, Whole, 32, 64>`"],
    ),
    edit(
        "results_are_not_weighted",
        EXPERTS,
        &[("layer.rs", "Stream::sum(&x_2, sum_2)", "Stream::sum(&x_2, results)")],
        &["found `Copies<D, 64>`"],
    ),
    // Blocks of sequences.
    edit(
        "attention_of_own_keys_alone",
        BLOCKS,
        &[(
            "layer.rs",
            "let (a, lse) = self.attention.forward_around(ctx, &q, &k, &v)?;",
            "let (a, lse) = self.attention.forward(ctx, &q, &k, &v);",
        )],
        &["no method named `forward` found", "Split<Cp<2>>"],
    ),
    edit(
        "attention_of_whole_sequences",
        BLOCKS,
        &[(
            "layer.rs",
            "    attention: Attention<Columns<Tp>, QUERY, KEY_VALUE, Split<Cp<2>>>,",
            "    attention: Attention<Columns<Tp>, QUERY, KEY_VALUE>,",
        )],
        &["no method named `forward_around` found"],
    ),
    edit(
        "blocks_over_another_axis",
        BLOCKS,
        &[("layer.rs", "KEY_VALUE, Split<Cp<2>>>,", "KEY_VALUE, Split<Tp>>,")],
        &["attention has all tokens (`Whole`) or blocks of them (`Split<Cp<N>>`)"],
    ),
    // Gradients and what is kept.
    edit(
        "gradient_of_another_width",
        SPLIT,
        &[("layer.rs", "self.q.weights(&full_1, &dq)", "self.q.weights(&full_1, &dk)")],
        &["expected `32`, found `16`"],
    ),
    edit(
        "weights_of_split_rows",
        SPLIT,
        &[("layer.rs", "self.q.weights(&full_1, &dq)", "self.q.weights(&h_1, &dq)")],
        &["expected `&Tensor<D, Whole, 32, 64>`, found `&Tensor<D, Split<Tp<2>>, 16, 64>`"],
    ),
    edit(
        "keys_kept_as_queries",
        SPLIT,
        &[("layer.rs", "        k: KeyValue<D>,", "        k: Query<D>,")],
        &["expected `32`, found `16`"],
    ),
    // Stages.
    edit(
        "stages_are_swapped",
        SPLIT,
        &[(
            "plan.rs",
            "    StageShape { input: true, first_layer: 0, layers: 2, output: false },\n    \
             StageShape { input: false, first_layer: 2, layers: 2, output: true },\n",
            "    StageShape { input: false, first_layer: 2, layers: 2, output: true },\n    \
             StageShape { input: true, first_layer: 0, layers: 2, output: false },\n",
        )],
        &["the first stage, and no other, has the input layer"],
    ),
    edit(
        "layer_between_stages_is_missing",
        SPLIT,
        &[("plan.rs", "first_layer: 2, layers: 2", "first_layer: 3, layers: 1")],
        &["must begin with the layer behind"],
    ),
    edit(
        "last_layer_is_missing",
        SPLIT,
        &[("plan.rs", "first_layer: 2, layers: 2", "first_layer: 2, layers: 1")],
        &["the stages must hold all layers"],
    ),
    edit(
        "first_stage_has_no_input",
        SPLIT,
        &[("plan.rs", "{ input: true,", "{ input: false,")],
        &["the first stage, and no other, has the input layer"],
    ),
    edit(
        "ranks_do_not_divide_heads",
        SPLIT,
        &[("plan.rs", "pub const TP: usize = 2;", "pub const TP: usize = 3;")],
        &["tp must divide the query heads"],
    ),
    edit(
        "passes_of_a_rank_are_missing",
        SPLIT,
        &[("passes.rs", "    \"4x(F BW)\",\n", "")],
        &["expected an array with a size of 2, found one with a size of 1"],
    ),
];
