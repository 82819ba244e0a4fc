//! Planted edits of generated programs: none compiles, and the compiler's message names the cause.
//! What types cannot see is refused when the trainer starts.
//!
//! `tests/edits` has the messages.
#![cfg(feature = "thorough")]

use codegen::{RuntimeSource, generate};
use meshwright_tests::crates::{build, first_error, runtime, write_all};
use meshwright_tests::golden::{folder as golden, planned};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Residual stream split over the tensor-parallel ranks.
const SPLIT: &str = "true";
/// Residual stream whole on each of them.
const WHOLE: &str = "false";
/// A mixture of experts over expert-parallel ranks, its residual stream split.
const EXPERTS: &str = "experts";
/// Sequences in blocks over context-parallel ranks, and weights over replicas.
const BLOCKS: &str = "blocks";

/// Path below `src`, a text that occurs once, and what replaces it.
type Replacement = (&'static str, &'static str, &'static str);

struct Edit {
    name: &'static str,
    /// Program that is edited.
    program: &'static str,
    replacements: &'static [Replacement],
    /// What the message must say.
    says: &'static [&'static str],
}

const fn edit(
    name: &'static str,
    program: &'static str,
    replacements: &'static [Replacement],
    says: &'static [&'static str],
) -> Edit {
    Edit { name, program, replacements, says }
}

const EDITS: &[Edit] = &[
    // Layers that are split in another way.
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
    // Parameters that replicas share.
    edit(
        "weights_are_not_gathered",
        BLOCKS,
        &[(
            "layer.rs",
            "        let ctx = &self.parameters.gather(ctx)?; // dp: all-gather of weights\n        \
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
            "self.parameters.gather(ctx)?; // dp: all-gather of weights\n        let tp = \
             tp(ctx);\n        let (x_1",
            "self.parameters.weights(ctx)?;\n        let tp = tp(ctx);\n        let (x_1",
        )],
        &["replicas share these weights: `Sharded<2>`"],
    ),
    edit(
        "gradients_are_not_reduced",
        BLOCKS,
        &[
            (
                "layer.rs",
                "        let reduced = self.parameters.reduce_scatter(gradients)?; \
                 // dp: reduce-scatter\n",
                "",
            ),
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

/// The programs' folders and trainers, which one test at a time uses.
static FOLDERS: Mutex<()> = Mutex::new(());

/// A generated program in a folder of its own.
struct Program {
    folder: PathBuf,
    files: BTreeMap<&'static str, String>,
}

impl Program {
    fn generated(program: &str) -> Self {
        let split = match program {
            EXPERTS | BLOCKS => "sequence_parallel=true".to_owned(),
            whole_or_split => format!("sequence_parallel={whole_or_split}"),
        };
        let degrees = match program {
            BLOCKS => vec!["pp=1", "cp=2", "cp_style=ring", "zero_stage=3"],
            _ => vec!["pp=2", "zero_stage=0"],
        };
        let mut settings =
            vec!["tp=2", "dp=2", "schedule=1f1b", "micro_batch=1", "recompute=none", &split];
        let mut case = "llama_gqa";
        if program == EXPERTS {
            case = "mixtral";
            settings.extend(["ep=2", "etp=1", "moe_overlap=none"]);
        }
        settings.extend(degrees);
        let plan = planned(case, 8, &settings);
        let text = plan.to_yaml().expect("plans can be written");
        let files = generate(&plan, &text, &RuntimeSource::Path(runtime()));
        let files = files.expect("it can be trained");
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("edits-{program}"));
        Self { folder, files }
    }

    /// The build of the program with these replacements.
    fn built(&self, name: &str, replacements: &[Replacement]) -> Output {
        let mut files = self.files.clone();
        for (path, from, to) in replacements {
            let path = format!("src/{path}");
            let text = files.get_mut(path.as_str()).unwrap_or_else(|| panic!("{name}: no {path}"));
            let found = text.matches(from).count();
            assert_eq!(found, 1, "{name}: {path} has {found} of\n{from}");
            *text = text.replace(from, to);
        }
        write_all(&self.folder, files.iter().map(|(path, text)| (*path, text.as_str())));
        build(&self.folder, &target())
    }
}

fn target() -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("unoptimized")
}

/// The first error, the same on every machine.
fn message(build: &Output) -> Option<String> {
    Some(first_error(build)?.iter().map(|part| plain(part)).collect())
}

/// The message without what differs between machines: paths of the machine, and line numbers of
/// the library and the compiler.
fn plain(rendered: &str) -> String {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("there is one");
    let text = rendered.replace(&format!("{}/", workspace.display()), "");
    // `/rustc/COMMIT/library/..`
    let text = match text.split_once("/rustc/").and_then(|(_, rest)| rest.split_once('/')) {
        Some((commit, _)) => text.replace(&format!("/rustc/{commit}/"), ""),
        None => text,
    };
    let (mut own, mut lines) = (true, Vec::new());
    // Where the compiler leaves the full names of types.
    let leaves =
        |line: &&str| line.contains("full name for the type") || line.contains("--verbose");
    for line in text.lines().filter(|line| !leaves(line)) {
        let Some((left, right)) = gutter(line) else {
            lines.push(line.to_owned());
            continue;
        };
        let (number, mark) = (left.trim(), right.split(' ').next().unwrap_or_default());
        if matches!(mark, "-->" | ":::") {
            own = right[mark.len()..].trim_start().starts_with("src/");
        }
        let place = matches!(mark, "-->" | ":::") && !own;
        let right = if place { right.split(".rs:").next().unwrap_or(right) } else { right };
        let end = if place { ".rs" } else { "" };
        let number = if own { number } else { "" };
        lines.push(format!("{number:>4} {right}{end}").trim_end().to_owned());
    }
    lines.join("\n").trim_end().to_owned() + "\n"
}

/// A line number, if any, and what stands right of it.
fn gutter(line: &str) -> Option<(&str, &str)> {
    let right = line.trim_start_matches(|c: char| c == ' ' || c.is_ascii_digit());
    let left = &line[..line.len() - right.len()];
    let begins = ["|", "-->", ":::", "= "].iter().any(|mark| right.starts_with(mark));
    (begins && !left.is_empty()).then_some((left, right))
}

/// The edit as a difference, then the message.
fn shown(edit: &Edit, message: &str) -> String {
    let (mut text, mut last) = (String::new(), "");
    for (path, from, to) in edit.replacements {
        if *path != last {
            text += &format!("src/{path}\n");
        }
        last = path;
        for (mark, part) in [('-', from), ('+', to)] {
            text.extend(part.lines().map(|line| format!("{mark} {}\n", line.trim())));
        }
    }
    text + "\n" + message
}

/// The compiler whose messages are kept.
fn compiler() -> String {
    let output = Command::new("rustc").arg("--version").output().expect("rustc runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.split(' ').take(2).collect::<Vec<_>>().join(" ") + "\n"
}

/// What is kept of an edit's message.
struct Messages {
    folder: PathBuf,
    update: bool,
    /// Whether this compiler's words are kept. Of others only what a message must say is checked.
    comparable: bool,
}

impl Messages {
    fn open() -> Self {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("edits");
        let update = std::env::var_os("UPDATE_SNAPSHOTS").is_some();
        let version = folder.join("compiler.txt");
        if update {
            std::fs::create_dir_all(&folder).expect("folders can be made");
            std::fs::write(&version, compiler()).expect("snapshots can be written");
        }
        let comparable = std::fs::read_to_string(version).is_ok_and(|known| known == compiler());
        Self { folder, update, comparable }
    }

    /// What is wrong with the build of an edit.
    fn problems(&self, edit: &Edit, build: &Output) -> Vec<String> {
        let name = edit.name;
        let Some(found) = message(build).filter(|_| !build.status.success()) else {
            return vec![format!("{name} compiles")];
        };
        let short = found.replace("runtime::layers::", "");
        let missing = edit.says.iter().filter(|phrase| !short.contains(**phrase));
        let mut problems: Vec<String> =
            missing.map(|phrase| format!("{name} does not say `{phrase}`:\n{found}")).collect();
        let (path, text) = (self.folder.join(format!("{name}.txt")), shown(edit, &found));
        if self.update {
            std::fs::write(&path, &text).expect("snapshots can be written");
        }
        if self.comparable && std::fs::read_to_string(&path).unwrap_or_default() != text {
            problems.push(format!(
                "the message of {name} changed:\n{text}\nAccept it with\n  UPDATE_SNAPSHOTS=1 \
                 cargo test -p meshwright-tests --features slow --test planned_edits"
            ));
        }
        problems
    }
}

#[test]
fn planted_edits_do_not_compile() {
    let _alone = FOLDERS.lock().unwrap_or_else(PoisonError::into_inner);
    let (messages, mut problems) = (Messages::open(), Vec::new());
    for of in [SPLIT, WHOLE, EXPERTS, BLOCKS] {
        let program = Program::generated(of);
        let unedited = program.built("no edit", &[]);
        let found = message(&unedited);
        assert!(unedited.status.success() && found.is_none(), "{}", found.unwrap_or_default());
        for edit in EDITS.iter().filter(|edit| edit.program == of) {
            let build = program.built(edit.name, edit.replacements);
            problems.extend(messages.problems(edit, &build));
        }
    }
    assert!(problems.is_empty(), "{} problems\n{}", problems.len(), problems.join("\n"));
}

#[test]
fn every_kept_message_is_an_edits() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("edits");
    let files = std::fs::read_dir(folder).expect("messages are kept");
    let kept: BTreeSet<String> = files
        .map(|file| file.expect("it is there").file_name().to_string_lossy().into_owned())
        .filter(|name| name != "compiler.txt")
        .collect();
    let edits: BTreeSet<String> = EDITS.iter().map(|edit| format!("{}.txt", edit.name)).collect();
    assert_eq!(kept, edits);
    assert_eq!(edits.len(), EDITS.len(), "two edits have one name");
}

/// How long a trainer may take to refuse its passes.
const REFUSED_WITHIN: Duration = Duration::from_secs(20);

/// Passes of the last pipeline rank that cannot run: name, text, and what the trainer says.
const REFUSED: [(&str, &str, &str); 3] = [
    // Its second and fifth pass are swapped. In this order alone no pass lacks another.
    (
        "ranks wait for each other",
        "F F:2 F:1 BW:1 BW:0 BW:2 F:3 BW:3",
        "the pipeline ranks wait for one another: rank 0 at BW of micro-batch 0",
    ),
    ("a backward pass comes first", "4x(BW F)", "pipeline rank 1 runs BW of micro-batch 0"),
    ("an unknown word", "4x(F BX)", "pipeline rank 1: `BX"),
];

/// Edits that compile, and what the trainer says: program, name, replacement, text.
const UNSEEN: [(&str, &str, Replacement, &str); 4] = [
    (
        SPLIT,
        "a gradient is left out",
        ("layer.rs", "gradients.add(self.q.weights(&full_1, &dq));", ""),
        "self_attn.q_proj.weight: the trainer's backward pass must give its work",
    ),
    (
        SPLIT,
        "two norms have one name",
        ("layer.rs", "post_attention_layernorm", "input_layernorm"),
        "input_layernorm.weight is declared twice",
    ),
    (
        BLOCKS,
        "weights of another layer are gathered",
        (
            "only.rs",
            "            let ctx = &self.input_parameters.gather(ctx)?;",
            "            let ctx = &self.output_parameters.gather(ctx)?;",
        ),
        "weights are read that were not asked for",
    ),
    (
        BLOCKS,
        "two replicas are taken for four",
        ("layer.rs", "parameters: Parameters<Sharded<2>>", "parameters: Parameters<Sharded<4>>"),
        "the program is compiled for 4 replicas of these parameters, there are 2",
    ),
];

#[test]
fn trainers_refuse_passes_that_cannot_run() {
    let _alone = FOLDERS.lock().unwrap_or_else(PoisonError::into_inner);
    let program = Program::generated(SPLIT);
    for (name, passes, says) in REFUSED {
        let built = program.built(name, &[("passes.rs", "4x(F BW)", passes)]);
        assert!(built.status.success(), "{name}: {}", message(&built).unwrap_or_default());
        let (code, said) = started(&[]);
        assert_eq!(code, Some(2), "{name}: {said}");
        let text = std::fs::read_to_string(program.folder.join("src/passes.rs"));
        let text = text.expect("it was written");
        let before = text.split_once("PassTable::new").expect("it has a table").0;
        let line = before.matches('\n').count() + 1;
        let place = format!("error: src/passes.rs:{line}: the passes cannot run: ");
        assert!(said.starts_with(&place) && said.contains(says), "{name}: {said}");
    }
    for (of, name, edit, says) in UNSEEN {
        let program = Program::generated(of);
        let built = program.built(name, &[edit]);
        assert!(built.status.success(), "{name}: {}", message(&built).unwrap_or_default());
        let (code, said) = started(&[]);
        assert!(code != Some(0) && said.contains(says), "{name}: {said}");
    }
    let built = program.built("no edit", &[]);
    assert!(built.status.success());
    let launched = [("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "4")];
    let (code, said) = started(&launched);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("the plan is for 8 ranks"), "{said}");
}

/// Starts the trainer; returns its exit code and what it says.
fn started(variables: &[(&str, &str)]) -> (Option<i32>, String) {
    let mut trainer = Command::new(target().join("debug/trainer-llama-gqa"))
        .args(["--steps", "1", "--data"])
        .arg(golden("llama_gqa").join("tokens.safetensors"))
        .envs(variables.iter().copied())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it was built");
    let begin = Instant::now();
    while trainer.try_wait().expect("it was started").is_none() {
        if begin.elapsed() > REFUSED_WITHIN {
            trainer.kill().expect("it runs");
            panic!("the trainer did not end within {REFUSED_WITHIN:?}");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let output = trainer.wait_with_output().expect("it ended");
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}
