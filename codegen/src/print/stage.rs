//! The kinds of stage as values for their template.

use super::Printer;
use super::layer::{fields, held, norm};
use super::statement::Statements;
use super::text::{indented, listed, size};
use super::types::type_name;
use crate::lower::{Field, FieldKind, Segment};
use models::decisions::Offload;
use serde_json::{Value as Json, json};

/// Indent of a function's body.
const BODY: usize = 8;

/// A kind of stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// With the input layer.
    First,
    /// Layers alone.
    Middle,
    /// With the output layer.
    Last,
    /// With both.
    Only,
}

impl Kind {
    /// The kind of stage `index` of `stages`.
    pub fn of(index: usize, stages: usize) -> Self {
        match (index == 0, index + 1 == stages) {
            (true, true) => Self::Only,
            (true, false) => Self::First,
            (false, true) => Self::Last,
            (false, false) => Self::Middle,
        }
    }

    /// Its module.
    pub fn module(self) -> &'static str {
        match self {
            Self::First => "first",
            Self::Middle => "middle",
            Self::Last => "last",
            Self::Only => "only",
        }
    }

    /// Its type.
    pub fn name(self) -> &'static str {
        match self {
            Self::First => "First",
            Self::Middle => "Middle",
            Self::Last => "Last",
            Self::Only => "Only",
        }
    }

    fn input(self) -> bool {
        matches!(self, Self::First | Self::Only)
    }

    fn output(self) -> bool {
        matches!(self, Self::Last | Self::Only)
    }

    /// Whether it gathers the input layer's weights.
    fn gathers_input(self, printer: &Printer<'_>) -> bool {
        let any = !printer.lowered.first.fields.is_empty();
        self.input() && any && printer.lowered.program.zero_stage == 3
    }

    /// Whether it may get the token table of an earlier stage.
    pub fn takes_table(self, printer: &Printer<'_>) -> bool {
        self == Self::Last && printer.has_loss() && printer.lowered.program.model.tied_embeddings
    }
}

/// The values of `stage.rs.tera`.
pub fn stage(printer: &Printer<'_>, kind: Kind) -> Json {
    let lowered = printer.lowered;
    let (first, last) = (&lowered.first, &lowered.last);
    let of_last = Statements::new(lowered, last, printer.element_bytes);
    let kept: &[usize] = if kind.output() { &last.read } else { &[] };
    let tied = lowered.program.model.tied_embeddings;
    let has_loss = printer.has_loss();
    let input_fields = if kind.input() { fields(printer, first) } else { vec![] };
    let output_fields = if kind.output() { fields(printer, last) } else { vec![] };
    let mut all = input_fields;
    if kind.gathers_input(printer) {
        all.push("/// Those of the input layer.".to_owned());
        all.push("input_parameters: Range<usize>,".to_owned());
    }
    all.push("layers: Vec<Layer>,".to_owned());
    if kind.output() {
        all.push("/// Those of the output layer.".to_owned());
        all.push("output_parameters: Range<usize>,".to_owned());
    }
    all.extend(output_fields);
    json!({
        "title": title(kind, has_loss),
        "name": kind.name(),
        "fields": all,
        "kept": of_last.held_fields(kept),
        "kept_layers": match lowered.program.recompute_group {
            1 => "layer::Kept<D>",
            _ => "Residual<D>",
        },
        "kept_size": if kept.is_empty() { String::new() } else { size(of_last.held_bytes(kept)) },
        "table": kind.takes_table(printer),
        "declare": declare(printer, kind, tied),
        "construct": construct(printer, kind),
        "gathers_input": kind.gathers_input(printer),
        "has_tokens": kind.input() && has_loss,
        "reads_x": !(kind.input() && has_loss),
        "reads_dy": !(kind.output() && has_loss),
        "forward": forward(printer, kind),
        "backward": backward(printer, kind),
        "has_logits": kind.output() && has_loss && !lowered.program.fused_loss,
    })
}

fn title(kind: Kind, has_loss: bool) -> &'static str {
    match (kind, has_loss) {
        (Kind::First, true) => "The first stage: token embedding and layers.",
        (Kind::First, false) => "The first stage: layers behind the shared input layer.",
        (Kind::Middle, _) => "A stage in the middle: layers.",
        (Kind::Last, true) => "The last stage: layers, output matrix and loss.",
        (Kind::Last, false) => {
            "The last stage: layers and the norm before the shared output layer."
        }
        (Kind::Only, true) => "The only stage: token embedding, layers, output matrix and loss.",
        (Kind::Only, false) => "The only stage: layers between the shared vocabulary layers.",
    }
}

fn declare(printer: &Printer<'_>, kind: Kind, tied: bool) -> Vec<String> {
    let lowered = printer.lowered;
    let mut lines = Vec::new();
    if kind.input() {
        lines.extend(lowered.first.fields.iter().flat_map(|field| input(printer, field)));
    }
    if kind.gathers_input(printer) {
        lines.push("let input_parameters = begin..inventory.elements();".to_owned());
    }
    lines.push("let layers = layer::declare(index, inventory);".to_owned());
    if kind.output() {
        lines.push("let output_begin = inventory.begin_unit();".to_owned());
        for field in &lowered.last.fields {
            lines.extend(output(printer, field, kind, tied));
        }
        lines.push("let output_parameters = output_begin..inventory.elements();".to_owned());
    }
    lines
}

/// The statement that describes a table of the vocabulary.
fn table(name: &str, tied_copy: bool) -> Vec<String> {
    let items = [format!("\"{name}\""), "VOCAB".into(), "HIDDEN".into(), "DEVIATION".into()];
    let tail = if tied_copy { ").tied_copy();" } else { ");" };
    listed(BODY, "let whole = VocabTable::new(", &items, tail)
}

fn input(printer: &Printer<'_>, field: &Field) -> Vec<String> {
    let names = printer.lowered.names;
    match field.kind {
        FieldKind::Tokens => {
            let mut lines = table(names.embedding(), false);
            let scale = float(printer.lowered.program.model.numerics.embedding_scale);
            lines.push(format!("let tokens = TokenEmbedding::declare(whole, {scale}, inventory);"));
            lines
        }
        FieldKind::Positions(_) => vec![format!(
            "let positions = Positions::declare(\"{}\", DEVIATION, inventory);",
            names.positions()
        )],
        _ => Vec::new(),
    }
}

fn output(printer: &Printer<'_>, field: &Field, kind: Kind, tied: bool) -> Vec<String> {
    let (names, model) = (printer.lowered.names, &printer.lowered.program.model);
    let linear = if printer.lowered.sizes.tp > 1 { "ColumnLinear" } else { "Linear" };
    let cap = model
        .final_soft_cap
        .map_or_else(|| "None".to_owned(), |cap| format!("Some({})", float(cap)));
    match field.kind {
        FieldKind::Norm { .. } => {
            let (head, items) = norm(printer, format!("\"{}\"", names.final_norm()));
            listed(BODY, &format!("let norm = {head}"), &items, ");")
        }
        FieldKind::Output if tied && kind == Kind::Only => {
            vec![format!("let output = {linear}::from_table(tokens.table());")]
        }
        FieldKind::Output if tied => {
            let mut lines = table(names.embedding(), true);
            lines.push("// The rank may hold the table already, in its first stage.".to_owned());
            lines.push(
                "let table = table.unwrap_or_else(|| whole.declare(VOCAB_ROWS, inventory));"
                    .to_owned(),
            );
            lines.push(format!("let output = {linear}::from_table(table);"));
            lines
        }
        FieldKind::Output => {
            let mut lines = table(names.output(), false);
            lines.push(format!(
                "let output = {linear}::from_table(whole.declare(VOCAB_ROWS, inventory));"
            ));
            lines
        }
        FieldKind::Loss => vec![format!("let loss = CrossEntropy::new(VOCAB, {cap});")],
        FieldKind::FusedLoss(rows) => {
            vec![format!("let loss = FusedLoss::new(&output, VOCAB, {cap}, {rows});")]
        }
        _ => Vec::new(),
    }
}

/// A float in Rust syntax.
pub fn float(value: f64) -> String {
    format!("{value:?}")
}

fn construct(printer: &Printer<'_>, kind: Kind) -> Vec<String> {
    let names = |segment: &Segment| -> Vec<String> {
        held(printer, segment).map(|field| field.name.to_owned()).collect()
    };
    let mut items = vec!["parameters: begin..inventory.elements()".to_owned()];
    if kind.input() {
        items.extend(names(&printer.lowered.first));
    }
    if kind.gathers_input(printer) {
        items.push("input_parameters".to_owned());
    }
    items.push("layers".to_owned());
    if kind.output() {
        items.push("output_parameters".to_owned());
        items.extend(names(&printer.lowered.last));
    }
    listed(BODY, "Self {", &items, "}")
}

fn forward(printer: &Printer<'_>, kind: Kind) -> Vec<String> {
    let lowered = printer.lowered;
    let (first, last) = (&lowered.first, &lowered.last);
    let of_first = Statements::new(lowered, first, printer.element_bytes);
    let of_last = Statements::new(lowered, last, printer.element_bytes);
    let mut lines = Vec::new();
    let in_first = kind.input() && Statements::uses_tp(&first.forward.steps);
    let in_last = kind.output() && Statements::uses_tp(&last.forward.steps);
    if in_first || in_last {
        lines.push("let tp = tp(ctx);".to_owned());
    }
    if kind.input() {
        if !printer.has_loss() {
            lines.push("let x: Rows<D> = Tensor::received(x);".to_owned());
        }
        if kind.gathers_input(printer) {
            // A block, so that the weights are freed behind it.
            lines.push("let stream = {".to_owned());
            let mut inner = of_first.gathers("input_parameters", BODY + 4);
            inner.extend(of_first.of(&first.forward.steps, BODY + 4));
            inner.push("stream".to_owned());
            lines.extend(indented(4, inner));
            lines.push("};".to_owned());
        } else {
            lines.extend(of_first.of(&first.forward.steps, BODY));
        }
    } else {
        lines.push("let stream = Stream::begin(Rows::received(x));".to_owned());
    }
    lines.push(match lowered.program.recompute_group {
        1 if lowered.sizes.paired => {
            "let (stream, layers) = pair::forward_all(&self.layers, ctx, stream).await?;".to_owned()
        }
        1 if lowered.program.offload == Offload::Activations => {
            "let (stream, layers) = stages::forward_offloading(&self.layers, ctx, stream)?;"
                .to_owned()
        }
        1 => "let (stream, layers) = stages::forward_all(&self.layers, ctx, stream)?;".to_owned(),
        _ => "let (stream, layers) = stages::forward_in_groups(&self.layers, GROUP, ctx, stream)?;"
            .to_owned(),
    });
    let mut kept = vec!["layers".to_owned()];
    if kind.output() {
        lines.extend(gathers_output(printer, &of_last, BODY));
        lines.extend(of_last.of(&last.forward.steps, BODY));
        kept.extend(last.read.iter().map(|&value| of_last.name(value).to_owned()));
    }
    let passed = match (kind.output(), printer.has_loss()) {
        (true, true) => "StageOutput::Losses(losses.into_losses(ctx))",
        (true, false) => "StageOutput::Stream(h.into_buffer(ctx))",
        (false, _) => "StageOutput::Stream(stream.whole(ctx).into_buffer(ctx))",
    };
    lines.extend(listed(BODY, "let kept = Kept {", &kept, "};"));
    lines.push(format!("Ok(({passed}, Box::new(kept)))"));
    lines
}

/// Gathers the output layer's weights, if replicas share them. A tied table is a part of the input
/// layer's.
fn gathers_output(printer: &Printer<'_>, print: &Statements<'_>, indent: usize) -> Vec<String> {
    let mut lines = print.gathers("output_parameters", indent);
    let tied = printer.lowered.program.model.tied_embeddings;
    if !lines.is_empty() && tied && printer.has_loss() {
        lines.push("let ctx = &ctx.gather(&self.output.parameters())?;".to_owned());
    }
    lines
}

fn backward(printer: &Printer<'_>, kind: Kind) -> Vec<String> {
    let lowered = printer.lowered;
    let (first, last) = (&lowered.first, &lowered.last);
    let of_first = Statements::new(lowered, first, printer.element_bytes);
    let of_last = Statements::new(lowered, last, printer.element_bytes);
    let mut kept = vec!["layers".to_owned()];
    let mut lines = Vec::new();
    if kind.output() {
        kept.extend(last.read.iter().map(|&value| of_last.name(value).to_owned()));
    }
    lines.extend(listed(BODY, "let Kept {", &kept, "} = stages::own::<D, Kept<D>>(kept);"));
    let (into, out) = (&first.backward[0], &last.backward[0]);
    let in_first = kind.input() && Statements::uses_tp(&into.steps);
    let in_last = kind.output() && Statements::uses_tp(&out.steps);
    if in_first || in_last {
        lines.push("let tp = tp(ctx);".to_owned());
    }
    let mut passed = "Rows::received(dy)".to_owned();
    if kind.output() {
        if let Some(input) = out.input {
            let of = type_name(lowered, &last.values[input]);
            lines.push(format!("let {}: {of} = Tensor::received(dy);", of_last.name(input)));
        }
        passed = out.output.map_or(passed, |value| of_last.name(value).to_owned());
        if lowered.program.zero_stage == 3 {
            // A block, so that the weights are freed behind it.
            lines.push(format!("let {passed} = {{"));
            let mut inner = gathers_output(printer, &of_last, BODY + 4);
            inner.extend(of_last.of(&out.steps, BODY + 4));
            inner.push(passed.clone());
            lines.extend(indented(4, inner));
            lines.push("};".to_owned());
        } else {
            lines.extend(of_last.of(&out.steps, BODY));
        }
        lines.extend(of_last.completes("output_parameters", BODY));
    }
    let (how, layers) = match lowered.program.recompute_group {
        1 if lowered.sizes.paired => ("pair::backward_all", vec!["&self.layers"]),
        1 if lowered.program.offload == Offload::Activations => {
            ("stages::backward_reloading", vec!["&self.layers"])
        }
        1 => ("stages::backward_all", vec!["&self.layers"]),
        _ => ("stages::backward_in_groups", vec!["&self.layers", "GROUP"]),
    };
    let end = if lowered.sizes.paired { ").await?;" } else { ")?;" };
    let items = layers.into_iter().chain(["ctx", "layers", &passed, "gradients"]);
    let items: Vec<String> = items.map(str::to_owned).collect();
    lines.extend(listed(BODY, &format!("let dx = {how}("), &items, end));
    if kind.input() {
        lines.extend(of_first.of(&into.steps, BODY));
        lines.extend(of_first.completes("parameters", BODY));
    }
    let left = match kind.input() && printer.has_loss() {
        true => "Ok(Buffer::empty())",
        false => "Ok(dx.into_buffer(ctx))",
    };
    lines.push(left.to_owned());
    lines
}
