//! A transformer layer as values for its template.

use super::Printer;
use super::statement::{Statements, broken};
use super::text::{filled, indented, listed, size};
use super::types::field_type;
use crate::lower::{Block, Field, FieldKind, Matrix, Segment, Step, TensorNames, Value, Width};
use models::model::NormKind;
use models::program::Recompute;
use models::shapes;
use serde_json::{Value as Json, json};

/// Indent of a function's body.
const BODY: usize = 8;
/// Indent of the fields of the struct that `declare` returns.
const FIELDS: usize = 12;

/// The values of `layer.rs.tera`.
pub fn layer(printer: &Printer<'_>, block: Block) -> Json {
    let (lowered, index) = (printer.lowered, printer.first_of(block));
    let (segment, is_only) = (lowered.layer(index), lowered.layers.len() == 1);
    let print = Statements::new(lowered, segment, printer.element_bytes);
    let ways: Vec<Recompute> = segment.restores.keys().copied().collect();
    let restores = ways != [Recompute::None];
    json!({
        "elements": shapes::elements(&shapes::layer(&lowered.program, index)),
        "is_only": is_only,
        "defines_recompute": is_only || block == Block::Dense,
        "parameters": print.replicas().parameters(),
        "fields": fields(printer, segment),
        "ways": ways.len(),
        "kept": ways.iter().map(|&way| kept(&print, segment, way)).collect::<Vec<_>>(),
        "values": print.held_fields(&segment.read),
        "values_size": format!("{} a micro-batch", size(print.held_bytes(&segment.read))),
        "prefix": lowered.names.layers(),
        "before_declare": before_declare(printer, segment),
        "declare": declare(printer, segment),
        "forward": forward(&print, segment, &ways),
        "restores": restores,
        "restore_uses_ctx": segment.restores.values().any(|restore| !restore.steps.is_empty()),
        "restore": restore(&print, segment, &ways),
        "backward": backward(&print, segment, restores),
        "has_values": ways.contains(&Recompute::None),
        "shapes": shapes(printer, segment),
    })
}

/// Declarations of fields.
pub fn fields(printer: &Printer<'_>, segment: &Segment) -> Vec<String> {
    let line = |field: &Field| {
        let (of, _) = field_type(printer.lowered, &field.kind);
        format!("{}: {of},", field.name)
    };
    held(printer, segment).map(line).collect()
}

/// The fields that passes use. A loss that is fused with the output matrix holds it itself.
pub fn held<'a>(
    printer: &Printer<'_>,
    segment: &'a Segment,
) -> impl Iterator<Item = &'a Field> + use<'a> {
    let unread = printer.lowered.program.fused_loss;
    segment.fields.iter().filter(move |field| !(unread && matches!(field.kind, FieldKind::Output)))
}

/// What this rank holds of split fields, in lines of a comment.
fn shapes(printer: &Printer<'_>, segment: &Segment) -> Vec<String> {
    let note = |field: &Field| {
        let (_, note) = field_type(printer.lowered, &field.kind);
        (!note.is_empty()).then(|| format!("{} {note}", field.name))
    };
    let notes: Vec<String> = segment.fields.iter().filter_map(note).collect();
    if notes.is_empty() {
        Vec::new()
    } else {
        filled(&format!("It has of {}.", notes.join(", ")), 96)
    }
}

fn name_of(way: Recompute) -> &'static str {
    match way {
        Recompute::None => "Nothing",
        Recompute::Selective => "Selective",
        Recompute::Full => "Everything",
    }
}

/// The struct of what is kept.
fn struct_of(segment: &Segment, way: Recompute) -> &'static str {
    match (segment.restores.len(), way) {
        (1, _) => "Kept",
        (_, Recompute::None) => "Values",
        (_, Recompute::Selective) => "KeptBySelective",
        (_, Recompute::Full) => "KeptByFull",
    }
}

fn kept(print: &Statements<'_>, segment: &Segment, way: Recompute) -> Json {
    let values = segment.kept(way);
    let doc = match way {
        Recompute::None => "Nothing is computed again.",
        Recompute::Selective => "Norms and the activation are computed again.",
        Recompute::Full => "Everything is computed again, from the layer's input.",
    };
    json!({
        "name": name_of(way),
        "struct": struct_of(segment, way),
        "doc": doc,
        "size": format!("{} a micro-batch", size(print.held_bytes(values))),
        "fields": print.held_fields(values),
    })
}

fn names(print: &Statements<'_>, values: &[Value]) -> Vec<String> {
    values.iter().map(|&value| print.name(value).to_owned()).collect()
}

/// Names of norms and matrices that several fields use.
fn before_declare(printer: &Printer<'_>, segment: &Segment) -> Vec<String> {
    let fused = segment.fields.iter().any(|field| {
        matches!(
            &field.kind,
            FieldKind::Column { matrix, .. } | FieldKind::Down { matrix, .. }
                if matrix.blocks.len() > 1
        )
    });
    let mut lines = vec![
        "let matrix = |tensor: &str| Matrix::named(name(tensor), DEVIATION);".to_owned(),
        "let to_stream = |tensor: &str| Matrix::named(name(tensor), STREAM_DEVIATION);".to_owned(),
    ];
    if fused {
        lines.push("let mut fused;".to_owned());
    }
    let has_experts =
        segment.fields.iter().any(|field| matches!(field.kind, FieldKind::Experts { .. }));
    if let Some(moe) = printer.lowered.program.model.moe.as_ref().filter(|_| has_experts) {
        let experts = TensorNames::experts(moe.tensors);
        let closure = "|n: usize, tensor: &str|";
        let code = format!("let expert = {closure} name(&format!(\"{experts}{{n}}.{{tensor}}\"));");
        lines.extend(broken(code, BODY));
    }
    lines
}

fn matrix(matrix: &Matrix) -> String {
    let of = if matrix.adds_to_stream { "to_stream" } else { "matrix" };
    let mut text = format!("{of}(\"{}\")", matrix.tensor);
    if matrix.transposed {
        text += ".transposed()";
    }
    if matrix.bias {
        text += ".with_bias()";
    }
    text
}

/// Values of fields, in the order of their declaration.
fn declare(printer: &Printer<'_>, segment: &Segment) -> Vec<String> {
    segment.fields.iter().flat_map(|field| declared(printer, field)).collect()
}

fn declared(printer: &Printer<'_>, field: &Field) -> Vec<String> {
    let sizes = &printer.lowered.sizes;
    let name = field.name;
    let parallel = sizes.tp > 1;
    let one = |value: String| vec![format!("{name}: {value},")];
    match &field.kind {
        FieldKind::Norm { tensor } => {
            let (head, items) = norm(printer, format!("&name(\"{tensor}\")"));
            listed(FIELDS, &format!("{name}: {head}"), &items, "),")
        }
        FieldKind::Column { matrix: of, block: 0, .. }
        | FieldKind::Down { matrix: of, block: 0, .. }
            if of.blocks.len() > 1 =>
        {
            let block = |&width: &Width| {
                let (rows, ways) = sizes.whole(width);
                format!("({rows}, {ways})")
            };
            let blocks: Vec<String> = of.blocks.iter().map(block).collect();
            let items = [
                matrix(of),
                format!("&[{}]", blocks.join(", ")),
                "HIDDEN".to_owned(),
                "inventory".to_owned(),
            ];
            let mut lines = listed(FIELDS + 4, "fused = FusedRows::declare(", &items, ");");
            lines = indented(4, lines);
            let mut all = vec![format!("{name}: {{")];
            all.extend(lines);
            all.push("    fused.part()".to_owned());
            all.push("},".to_owned());
            all
        }
        FieldKind::Column { matrix: of, .. } | FieldKind::Down { matrix: of, .. }
            if of.blocks.len() > 1 =>
        {
            one("fused.part()".to_owned())
        }
        FieldKind::Column { matrix: of, outputs, .. } => {
            let (rows, ways) = sizes.whole(*outputs);
            if parallel && ways < sizes.tp {
                let items = [matrix(of), rows.to_string(), "inventory".to_owned()];
                return listed(
                    FIELDS,
                    &format!("{name}: ColumnLinear::declare_copies("),
                    &items,
                    "),",
                );
            }
            let of = matrix(of);
            one(match parallel {
                true => format!("ColumnLinear::declare({of}, inventory)"),
                false => format!("Linear::declare({of}, inventory)"),
            })
        }
        FieldKind::Down { matrix: of, .. } => {
            one(format!("DownLinear::declare({}, inventory)", matrix(of)))
        }
        FieldKind::Up { matrix: of, .. } => {
            let layer = if parallel { "ColumnLinear" } else { "Linear" };
            one(format!("{layer}::declare({}, inventory)", matrix(of)))
        }
        FieldKind::LatentNorm { tensor, .. } => {
            let items = [format!("&name(\"{tensor}\")"), "LATENT_EPS".to_owned()];
            let items: Vec<String> = items.into_iter().chain(["inventory".to_owned()]).collect();
            listed(FIELDS, &format!("{name}: LatentNorm::declare("), &items, "),")
        }
        FieldKind::Row { matrix: of, .. } => {
            let of = matrix(of);
            one(match parallel {
                true => format!("RowLinear::declare({of}, inventory)"),
                false => format!("Linear::declare({of}, inventory)"),
            })
        }
        FieldKind::RowBias { tensor } => {
            one(format!("RowBias::declare(&name(\"{tensor}\"), inventory)"))
        }
        FieldKind::HeadNorm { tensor } => {
            let items = [format!("&name(\"{tensor}\")"), "NORM_EPS".to_owned()];
            let items: Vec<String> = items.into_iter().chain(["inventory".to_owned()]).collect();
            listed(FIELDS, &format!("{name}: HeadNorm::declare("), &items, "),")
        }
        FieldKind::Attention { .. } | FieldKind::LatentAttention => {
            let latent = if field.kind == FieldKind::LatentAttention { "Latent" } else { "" };
            let (call, ulysses) = match sizes.ulysses {
                1 => ("new", ""),
                _ => ("behind", ", ULYSSES"),
            };
            let mut lines = vec![format!(
                "{name}: {latent}Attention::{call}(Self::attention(number){ulysses}),"
            )];
            if let FieldKind::Attention { sinks: Some(tensor) } = field.kind {
                let core = "    Self::attention(number).with_sinks";
                lines = vec![
                    format!("{name}: Attention::{call}("),
                    format!("{core}(&name(\"{tensor}\"), inventory){ulysses},"),
                    "),".to_owned(),
                ];
            }
            lines
        }
        FieldKind::Router { tensor, bias, by_load } => {
            let name_of = format!("&name(\"{tensor}\")");
            let items =
                [&name_of, "number", "ROUTING", "CAPACITY_FACTOR", "DEVIATION", "inventory"];
            let items = items.map(str::to_owned);
            let head = format!("{name}: Router::declare(");
            let bias = bias.then(|| format!(".with_bias({name_of}, inventory)"));
            let updates = ".with_bias_updates(BIAS_UPDATE_RATE, inventory)";
            let calls: Vec<String> =
                bias.into_iter().chain(by_load.then(|| updates.to_owned())).collect();
            let Some((last, others)) = calls.split_last() else {
                return listed(FIELDS, &head, &items, "),");
            };
            let mut lines = listed(FIELDS, &head, &items, ")");
            lines.extend_from_slice(others);
            lines.push(format!("{last},"));
            lines
        }
        FieldKind::Experts { tensor, bias, outputs, .. } => {
            let (how, deviation) = match outputs {
                Width::Hidden => ("columns", "STREAM_DEVIATION"),
                _ => ("rows", "DEVIATION"),
            };
            let bias = if *bias { ".with_bias()" } else { "" };
            let matrix = format!("|n| Matrix::named(expert(n, \"{tensor}\"), {deviation}){bias}");
            let items = ["EXPERTS", &matrix, "inventory"].map(str::to_owned);
            listed(FIELDS, &format!("{name}: Experts::declare_{how}("), &items, "),")
        }
        FieldKind::Tokens
        | FieldKind::Positions(_)
        | FieldKind::Output
        | FieldKind::Loss
        | FieldKind::FusedLoss(_) => Vec::new(),
    }
}

/// A norm's declaration: the call, and its arguments.
pub fn norm(printer: &Printer<'_>, name: String) -> (&'static str, Vec<String>) {
    let of = &printer.lowered.sizes.norm;
    let mut items = vec![name, "NORM_EPS".to_owned()];
    let call = match of.kind {
        NormKind::RmsNorm => {
            items.push(of.unit_offset.to_string());
            "RmsNorm::declare("
        }
        NormKind::LayerNorm => "LayerNorm::declare(",
    };
    items.push("inventory".to_owned());
    (call, items)
}

fn tp_line(steps: &[Step]) -> Option<String> {
    Statements::uses_tp(steps).then(|| "let tp = tp(ctx);".to_owned())
}

fn forward(print: &Statements<'_>, segment: &Segment, ways: &[Recompute]) -> Vec<String> {
    let function = &segment.forward;
    let mut lines = print.replicas().weights("parameters", BODY);
    lines.extend(tp_line(&function.steps));
    lines.extend(print.of(&function.steps, BODY));
    let stream = function.output.map_or("stream", |value| print.name(value));
    let construct = |indent, way: Recompute, head: &str, tail: &str| {
        listed(indent, head, &names(print, segment.kept(way)), tail)
    };
    if let [way] = ways {
        lines.extend(construct(BODY, *way, "let kept = Kept {", "};"));
    } else {
        lines.push("let kept = match self.recompute {".to_owned());
        for &way in ways {
            let (name, of) = (name_of(way), struct_of(segment, way));
            lines.push(format!("    Recompute::{name} => {{"));
            let head = format!("let kept = {of} {{");
            let made = listed(BODY + 8, &head, &names(print, segment.kept(way)), "};");
            lines.extend(indented(8, made));
            lines.push(format!("        Kept::{name}(kept)"));
            lines.push("    }".to_owned());
        }
        lines.push("};".to_owned());
    }
    lines.push(format!("Ok(({stream}, kept))"));
    lines
}

fn restore(print: &Statements<'_>, segment: &Segment, ways: &[Recompute]) -> Vec<String> {
    let all = names(print, &segment.read);
    let body = |way: Recompute, indent: usize| {
        let steps = &segment.restores[&way].steps;
        let mut lines: Vec<String> = tp_line(steps).into_iter().collect();
        lines.extend(print.of(steps, indent));
        lines.extend(listed(indent, "Ok(Values {", &all, "})"));
        lines
    };
    if let [way] = ways {
        let kept = names(print, segment.kept(*way));
        let mut lines = listed(BODY, "let Kept {", &kept, "} = kept;");
        lines.extend(body(*way, BODY));
        return lines;
    }
    let mut lines = vec!["match kept {".to_owned()];
    for &way in ways {
        if way == Recompute::None {
            lines.push("    Kept::Nothing(values) => Ok(values),".to_owned());
            continue;
        }
        let kept = names(print, segment.kept(way));
        lines.push(format!("    Kept::{}(kept) => {{", name_of(way)));
        let head = format!("let {} {{", struct_of(segment, way));
        lines.extend(indented(8, listed(BODY + 8, &head, &kept, "} = kept;")));
        lines.extend(indented(8, body(way, BODY + 8)));
        lines.push("    }".to_owned());
    }
    lines.push("}".to_owned());
    lines
}

fn backward(print: &Statements<'_>, segment: &Segment, restores: bool) -> Vec<String> {
    let all = names(print, &segment.read);
    let mut lines = print.replicas().weights("parameters", BODY);
    if restores {
        let wait = if print.paired() { ".await" } else { "" };
        lines.push(format!("let values = self.restore(ctx, kept){wait}?;"));
        lines.extend(listed(BODY, "let Values {", &all, "} = values;"));
    } else {
        lines.extend(listed(BODY, "let Kept {", &all, "} = kept;"));
    }
    let steps = segment.backward.iter().flat_map(|function| &function.steps);
    lines.extend(tp_line(&steps.cloned().collect::<Vec<_>>()));
    let last = segment.backward.len() - 1;
    for (n, function) in segment.backward.iter().enumerate() {
        let output = function.output.map_or("", |value| print.name(value)).to_owned();
        let title = capitalised(function.title);
        lines.push(String::new());
        lines.push(format!("// {title}."));
        if n == last {
            lines.extend(print.of(&function.steps, BODY));
            lines.extend(print.replicas().reduces("let reduced = ", "parameters", BODY));
            lines.push(format!("Ok(({output}, reduced))"));
        } else {
            // A block, so that its gradients are freed before the next part.
            lines.push("let dy = {".to_owned());
            let mut inner = print.of(&function.steps, BODY + 4);
            inner.push(output);
            lines.extend(indented(4, inner));
            lines.push("};".to_owned());
        }
    }
    lines
}

fn capitalised(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| {
        first.to_uppercase().collect::<String>() + letters.as_str()
    })
}
