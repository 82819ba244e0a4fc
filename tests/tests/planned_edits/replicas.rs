//! Parameters that replicas share.

use super::edit::{BLOCKS, Edit, edit};

pub const EDITS: &[Edit] = &[
    edit(
        "weights_are_not_gathered",
        BLOCKS,
        &[(
            "layer.rs",
            "        let ctx = &self.parameters.gather(ctx)?; // dp and cp in groups of 2: all-gather \
             of weights\n        \
             let tp = tp(ctx);\n        let (x_1",
            "        let tp = tp(ctx);\n        let (x_1",
        )],
        &["expected `&Context<'_, D>`, found `&PassContext<'_, D>`"],
    ),
    edit(
        "pieces_are_taken_for_whole_weights",
        BLOCKS,
        &[(
            "layer.rs",
            "self.parameters.gather(ctx)?; // dp and cp in groups of 2: all-gather of \
             weights\n        let tp = tp(ctx);\n        let (x_1",
            "self.parameters.weights(ctx)?;\n        let tp = tp(ctx);\n        let (x_1",
        )],
        &["replicas share these weights: `Sharded<2>`"],
    ),
    edit(
        "gradients_are_not_reduced",
        BLOCKS,
        &[
            ("layer.rs", "        let reduced = self.parameters.reduce_scatter(gradients)?;\n", ""),
            ("layer.rs", "Ok((dx, reduced))", "Ok(dx)"),
        ],
        &["expected tuple `(Tensor<D, Split<Tp<2>>, 8, 64>, Reduced)`"],
    ),
    edit(
        "gradients_of_pieces_are_all_reduced",
        BLOCKS,
        &[(
            "layer.rs",
            "self.parameters.reduce_scatter(gradients)",
            "self.parameters.all_reduce(gradients)",
        )],
        &["no method named `all_reduce` found for struct `Parameters<Sharded<2>>`"],
    ),
];
