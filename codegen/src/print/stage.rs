//! The kinds of stage as values for their template.

use super::Printer;
use super::layer::{fields, held, norm};
use super::replicas::Replicas;
use super::statement::{Statements, broken};
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

    /// Whether its input layer has parameters.
    fn has_input_parameters(self, printer: &Printer<'_>) -> bool {
        self.input() && !printer.lowered.first.fields.is_empty()
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
    let parameters = |segment| Replicas::of(lowered, segment).parameters();
    let kept: &[usize] = if kind.output() { &last.read } else { &[] };
    let tied = lowered.program.model.tied_embeddings;
    let has_loss = printer.has_loss();
    let input_fields = if kind.input() { fields(printer, first) } else { vec![] };
    let output_fields = if kind.output() { fields(printer, last) } else { vec![] };
    let mut all = input_fields;
    if kind.has_input_parameters(printer) {
        all.push("/// Those of the input layer.".to_owned());
        all.push(format!("input_parameters: {},", parameters(first)));
    }
    all.push("layers: Vec<Layer>,".to_owned());
    if kind.output() {
        all.push("/// Those of the output layer.".to_owned());
        all.push(format!("output_parameters: {},", parameters(last)));
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
        "has_input_parameters": kind.has_input_parameters(printer),
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
    if kind.has_input_parameters(printer) {
        lines.push("let input_parameters = Parameters::since(begin, inventory);".to_owned());
    }
    lines.push("let layers = layer::declare(index, inventory);".to_owned());
    if kind.output() {
        lines.push("let output_begin = inventory.begin_unit();".to_owned());
        for field in &lowered.last.fields {
            lines.extend(output(printer, field, kind, tied));
        }
        let own = "let output_parameters = Parameters::since(output_begin, inventory)";
        let table = if tied && printer.has_loss() { ".reading(output.parameters())" } else { "" };
        lines.extend(broken(format!("{own}{table};"), BODY));
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
    if kind.has_input_parameters(printer) {
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
        if kind.has_input_parameters(printer) {
            // A block, so that shared weights are freed behind it.
            lines.push("let stream = {".to_owned());
            let mut inner = of_first.replicas().weights("input_parameters", BODY + 4);
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
        lines.extend(of_last.replicas().weights("output_parameters", BODY));
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
        // A block, so that shared weights are freed behind it.
        lines.push(format!("let {passed} = {{"));
        let mut inner = of_last.replicas().weights("output_parameters", BODY + 4);
        inner.extend(of_last.of(&out.steps, BODY + 4));
        inner.push(passed.clone());
        lines.extend(indented(4, inner));
        lines.push("};".to_owned());
        lines.extend(of_last.replicas().reduces("", "output_parameters", BODY));
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
        if kind.has_input_parameters(printer) {
            lines.extend(of_first.replicas().reduces("", "input_parameters", BODY));
        }
    }
    let left = match kind.input() && printer.has_loss() {
        true => "Ok(Buffer::empty())",
        false => "Ok(dx.into_buffer(ctx))",
    };
    lines.push(left.to_owned());
    lines
}
