//! Collectives that are missing or wrong.

use super::edit::{Edit, SPLIT, WHOLE, edit};

pub const EDITS: &[Edit] = &[
    // Collectives that are missing.
    edit(
        "gather_before_q_is_missing",
        SPLIT,
        &[("layer.rs", "self.q.forward(ctx, &full_1)", "self.q.forward(ctx, &h_1)")],
        &["expected `&Tensor<D, Whole, _, 64>`, found `&Tensor<D, Split<Tp<2>>, 16, 64>`"],
    ),
    edit(
        "gather_before_output_matrix_is_missing",
        SPLIT,
        &[("last.rs", "self.output.forward(ctx, &full)", "self.output.forward(ctx, &h)")],
        &["expected `&Tensor<D, Whole, _, 64>`, found `&Tensor<D, Split<Tp<2>>, 16, 64>`"],
    ),
    edit(
        "gather_before_token_gradient_is_missing",
        SPLIT,
        &[("first.rs", "self.tokens.weights(ctx, &dfull)", "self.tokens.weights(ctx, &dx)")],
        &["expected `&Tensor<D, Whole, _, 64>`, found `&Tensor<D, Split<Tp<2>>, 16, 64>`"],
    ),
    edit(
        "reduce_scatter_is_missing",
        SPLIT,
        &[("layer.rs", "Stream::sum(&x_1, sum_1)", "Stream::sum(&x_1, part_1)")],
        &["expected `Tensor<D, Split<Tp<2>>, 16, 64>`, found `Tensor<D, Partial<Tp<2>>, 32, 64>`"],
    ),
    edit(
        "all_reduce_is_missing",
        WHOLE,
        &[("layer.rs", "Stream::sum(&x_1, sum_1)", "Stream::sum(&x_1, part_1)")],
        &["expected `Tensor<D, Whole, 32, 64>`, found `Tensor<D, Partial<Tp<2>>, 32, 64>`"],
    ),
    edit(
        "all_reduce_in_backward_is_missing",
        WHOLE,
        &[
            ("layer.rs", "let dh_1: Rows<D> = leaving.wait()?;", "let dh_1 = dpart;"),
            (
                "layer.rs",
                "let dpart = self.v.add_backward(ctx, &dv, dpart);\n        \
                 let leaving = tp.start_all_reduce(dpart)?; // tp: 8.2 kB",
                "let dpart = self.v.add_backward(ctx, &dv, dpart);",
            ),
        ],
        &["expected `&Tensor<D, Whole, 32, 64>`, found `&Tensor<D, Partial<Tp<2>>, 32, 64>`"],
    ),
    edit(
        "reduction_of_looked_up_rows_is_missing",
        WHOLE,
        &[
            ("first.rs", "        let x: Rows<D> = tp.all_reduce(part)?; // tp: 8.2 kB\n", ""),
            ("first.rs", "Stream::begin(x)", "Stream::begin(part)"),
        ],
        &["a norm takes whole rows of the residual stream, not `Partial<Tp<2>>`"],
    ),
    edit(
        "norm_of_a_part",
        SPLIT,
        &[("layer.rs", "Stream::sum(&x_1, sum_1)", "Stream::begin(part_1)")],
        &["a norm takes whole rows of the residual stream, not `Partial<Tp<2>>`"],
    ),
    edit(
        "activation_of_partial_sums",
        SPLIT,
        &[(
            "layer.rs",
            "let part_2 = self.down.forward(ctx, &inner);",
            "let part_2 = activate(ctx, ACTIVATION, &self.down.forward(ctx, &inner));",
        )],
        &["an activation takes final values, not `Partial<Tp<2>>`"],
    ),
    edit(
        "sum_of_exponentials_is_not_reduced",
        SPLIT,
        &[("last.rs", "        let sum_exp = tp.sum(sum_exp)?; // tp: 128 B\n", "")],
        &["expected `&Numbers<D, Whole, 32>`, found `&Numbers<D, Partial<Tp<2>>, 32>`"],
    ),
    // Collectives that are wrong.
    edit(
        "reduced_twice",
        WHOLE,
        &[(
            "layer.rs",
            "let stream = Stream::sum(&x_1, sum_1);",
            "let sum_1: Rows<D> = tp.all_reduce(part_1)?;\n        \
             let stream = Stream::sum(&x_1, sum_1);",
        )],
        &["use of moved value: `part_1`"],
    ),
    edit(
        "reduced_again",
        WHOLE,
        &[("layer.rs", "Stream::sum(&x_1, sum_1)", "Stream::sum(&x_1, tp.all_reduce(sum_1)?)")],
        &["expected `Tensor<D, Partial<Tp<2>>, _, _>`, found `Tensor<D, Whole, 32, 64>`"],
    ),
    edit(
        "all_reduce_instead_of_reduce_scatter",
        SPLIT,
        &[(
            "layer.rs",
            "let sum_1: Rows<D> = tp.reduce_scatter(part_1)?;",
            "let sum_1: Rows<D> = tp.all_reduce(part_1)?;",
        )],
        &["expected `Tensor<D, Split<Tp<2>>, 16, 64>`, found `Tensor<D, Whole, 32, 64>`"],
    ),
    edit(
        "maximum_is_summed",
        SPLIT,
        &[("last.rs", "tp.max(own_max.share())?", "tp.sum(own_max.share())?")],
        &["expected `Numbers<D, Partial<Tp<2>>, _>`, found `Numbers<D, PartialMax<Tp<2>>, 32>`"],
    ),
    edit(
        "group_of_another_size",
        SPLIT,
        &[("plan.rs", "Group<'a, D, Tp> {", "Group<'a, D, runtime::layers::Tp<4>> {")],
        &["expected `4`, found `2`", "Partial<Tp<4>>", "Partial<Tp<2>>"],
    ),
    edit(
        "axis_of_another_size",
        SPLIT,
        &[(
            "plan.rs",
            "pub type Tp = runtime::layers::Tp<TP>;",
            "pub type Tp = runtime::layers::Tp<4>;",
        )],
        &["all ranks' rows must be those of the summands", "--> src/first.rs:"],
    ),
    edit(
        "group_of_another_axis",
        SPLIT,
        &[(
            "layer.rs",
            "        let (x_1, h_1, s_1) = self.norm_1.forward(ctx, stream);",
            "        let tp: Group<'_, D, Cp<TP>> = tp;\n        \
             let (x_1, h_1, s_1) = self.norm_1.forward(ctx, stream);",
        )],
        &["expected `Group<'_, D, Cp<2>>`, found `Group<'_, D, Tp<2>>`"],
    ),
    edit(
        "sum_over_another_axis",
        SPLIT,
        &[(
            "layer.rs",
            "    down: RowLinear<Tp, INNER, HIDDEN>,",
            "    down: RowLinear<Cp<TP>, INNER, HIDDEN>,",
        )],
        &[
            "expected `&Tensor<D, Columns<Cp<2>>, _, 88>`, found `&Tensor<D, Columns<Tp<2>>, 32, 88>`",
        ],
    ),
    edit(
        "gathered_rows_where_rows_are_split",
        SPLIT,
        &[("layer.rs", "Stream::sum(&x_1, sum_1)", "Stream::sum(&x_1, full_1)")],
        &["expected `Tensor<D, Split<Tp<2>>, 16, 64>`, found `Tensor<D, Whole, 32, 64>`"],
    ),
    edit(
        "rows_are_not_divided",
        SPLIT,
        &[("plan.rs", "pub const ROWS: usize = TOKENS / TP;", "pub const ROWS: usize = TOKENS;")],
        &["all ranks' rows must be those of the summands", "--> src/first.rs:"],
    ),
    edit(
        "rows_and_tokens_are_swapped",
        SPLIT,
        &[
            (
                "plan.rs",
                "pub type Rows<D> = Tensor<D, Split<Tp>, ROWS, HIDDEN>;",
                "pub type Rows<D> = Tensor<D, Split<Tp>, TOKENS, HIDDEN>;",
            ),
            (
                "plan.rs",
                "pub type Residual<D> = Stream<D, Split<Tp>, ROWS, HIDDEN>;",
                "pub type Residual<D> = Stream<D, Split<Tp>, TOKENS, HIDDEN>;",
            ),
            (
                "plan.rs",
                "pub type Full<D> = Tensor<D, Whole, TOKENS, HIDDEN>;",
                "pub type Full<D> = Tensor<D, Whole, ROWS, HIDDEN>;",
            ),
        ],
        &["expected `32`, found `16`"],
    ),
    edit(
        "wait_is_missing",
        SPLIT,
        &[("layer.rs", "let dh_1: Rows<D> = leaving.wait()?;", "let dh_1: Rows<D> = leaving;")],
        &["expected `Tensor<D, Split<Tp<2>>, 16, 64>`, found `InFlight"],
    ),
    edit(
        "used_before_wait",
        SPLIT,
        &[("layer.rs", "self.q.weights(&full_1, &dq)", "self.q.weights(&again, &dq)")],
        &["expected `&Tensor<D, Whole, 32, 64>`, found `&InFlight<"],
    ),
    edit(
        "waited_twice",
        SPLIT,
        &[(
            "layer.rs",
            "let dh_1: Rows<D> = leaving.wait()?;",
            "let dh_1: Rows<D> = leaving.wait()?;\n        let dh_1: Rows<D> = leaving.wait()?;",
        )],
        &["use of moved value: `leaving`"],
    ),
];
