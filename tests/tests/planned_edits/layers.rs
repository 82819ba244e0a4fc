//! Layers that are split in another way.

use super::edit::{Edit, SPLIT, edit};

pub const EDITS: &[Edit] = &[
    edit(
        "down_is_not_split",
        SPLIT,
        &[
            (
                "layer.rs",
                "    down: RowLinear<Tp, INNER, HIDDEN>,",
                "    down: Linear<{ INNER * TP }, HIDDEN>,",
            ),
            ("layer.rs", "down: RowLinear::declare", "down: Linear::declare"),
        ],
        &["expected `&Tensor<D, Whole, _, 176>`, found `&Tensor<D, Columns<Tp<2>>, 32, 88>`"],
    ),
    edit(
        "q_is_not_split",
        SPLIT,
        &[
            (
                "layer.rs",
                "    q: ColumnLinear<Tp, HIDDEN, QUERY>,",
                "    q: Linear<HIDDEN, { QUERY * TP }>,",
            ),
            ("layer.rs", "q: ColumnLinear::declare", "q: Linear::declare"),
        ],
        &["expected `Tensor<D, Columns<Tp<2>>, _, _>`, found `Tensor<D, Whole, 32, 64>`"],
    ),
    edit(
        "down_has_another_width",
        SPLIT,
        &[(
            "layer.rs",
            "    down: RowLinear<Tp, INNER, HIDDEN>,",
            "    down: RowLinear<Tp, INNER, { HIDDEN / 2 }>,",
        )],
        &["expected `64`, found `32`", "Tensor<_, _, 16, 64>"],
    ),
    edit(
        "down_is_column_parallel",
        SPLIT,
        &[
            (
                "layer.rs",
                "    down: RowLinear<Tp, INNER, HIDDEN>,",
                "    down: ColumnLinear<Tp, INNER, HIDDEN>,",
            ),
            ("layer.rs", "down: RowLinear::declare", "down: ColumnLinear::declare"),
        ],
        &["expected `&Tensor<D, Whole, _, 88>`, found `&Tensor<D, Columns<Tp<2>>, 32, 88>`"],
    ),
    edit(
        "output_matrix_is_not_split",
        SPLIT,
        &[(
            "last.rs",
            "    output: ColumnLinear<Tp, HIDDEN, VOCAB_ROWS>,",
            "    output: ColumnLinear<Tp, HIDDEN, VOCAB>,",
        )],
        &["264", "515"],
    ),
    edit(
        "token_table_is_not_split",
        SPLIT,
        &[(
            "first.rs",
            "    tokens: TokenEmbedding<Partial<Tp>, VOCAB_ROWS, HIDDEN>,",
            "    tokens: TokenEmbedding<Whole, VOCAB, HIDDEN>,",
        )],
        &["expected `Tensor<D, Partial<Tp<2>>, 32, 64>`, found `Tensor<D, Whole, _, 64>`"],
    ),
    edit(
        "token_table_of_split_rows",
        SPLIT,
        &[(
            "first.rs",
            "    tokens: TokenEmbedding<Partial<Tp>, VOCAB_ROWS, HIDDEN>,",
            "    tokens: TokenEmbedding<Split<Tp>, VOCAB_ROWS, HIDDEN>,",
        )],
        &["a lookup in the token table gives `Whole` rows or a `Partial` sum, not `Split<Tp<2>>`"],
    ),
    edit(
        "attention_of_split_rows",
        SPLIT,
        &[(
            "layer.rs",
            "    attention: Attention<Columns<Tp>, QUERY, KEY_VALUE>,",
            "    attention: Attention<Split<Tp>, QUERY, KEY_VALUE>,",
        )],
        &["attention takes whole heads of all tokens, not `Split<Tp<2>>`"],
    ),
    edit(
        "loss_of_partial_sums",
        SPLIT,
        &[(
            "last.rs",
            "    loss: CrossEntropy<Columns<Tp>, VOCAB_ROWS>,",
            "    loss: CrossEntropy<Partial<Tp>, VOCAB_ROWS>,",
        )],
        &["the loss takes logits of all tokens, not `Partial<Tp<2>>`"],
    ),
];
