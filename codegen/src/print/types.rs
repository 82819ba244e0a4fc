//! Types of values and fields in Rust.

use crate::lower::{FieldKind, Lowered, Named, Placement, Rows, Type, Width};

/// A value's type in Rust: one of the names in the generated `plan.rs`, or the library's.
pub fn type_name(lowered: &Lowered, value: &Named) -> String {
    let split = lowered.sizes.sequence_parallel;
    let name = match value.of {
        Type::Tensor(placement, rows, width) | Type::InFlight(placement, rows, width) => {
            match (width, placement, rows) {
                (Width::Hidden, Placement::Partial, _) => "Part<D>",
                (Width::Hidden, Placement::Whole, Rows::Tokens) if split => "Full<D>",
                (Width::Hidden, ..) => "Rows<D>",
                (Width::Query, ..) => "Query<D>",
                (Width::KeyValue, ..) => "KeyValue<D>",
                (Width::QueryBehind, ..) => "QueryBehind<D>",
                (Width::KeyValueBehind, ..) => "KeyValueBehind<D>",
                (Width::Value, ..) => "ValueHeads<D>",
                (Width::ValueBehind, ..) => "ValueHeadsBehind<D>",
                (Width::QueryLatent, ..) => "QueryLatent<D>",
                (Width::KeyValueLatent, ..) => "KeyValueLatent<D>",
                (Width::Rotary, ..) => "SharedKey<D>",
                (Width::UpProjected, ..) => "UpProjected<D>",
                (Width::Ffn, ..) => "Inner<D>",
                (Width::Vocab, ..) => "Logits<D>",
                (Width::Experts, ..) => "Scores<D>",
                (Width::ExpertFfn, ..) => "ExpertInner<D>",
                (Width::SharedFfn, ..) => "SharedInner<D>",
            }
        }
        Type::Route => "Route<D>",
        Type::Copies(_) => "Copies<D, HIDDEN>",
        Type::Received(Width::ExpertFfn) => "Received<D, EXPERT_INNER>",
        Type::Received(_) => "Received<D, HIDDEN>",
        Type::CopyNumbers => "CopyNumbers<D>",
        Type::Stream => "Residual<D>",
        Type::Statistics | Type::HeadStatistics(_) | Type::TokenStatistics => "Statistics<D>",
        Type::LogSumExp => "LogSumExp<D>",
        Type::TokenNumbers => "Numbers<D, Whole, TOKENS>",
        Type::CopiesInFlight(_) => "CopiesInFlight<D, HIDDEN>",
        Type::AttentionSums => "AttentionSums<D>",
    };
    match (value.of, value.chunked) {
        (Type::Tensor(..), true) => name.replace("<D>", "Chunk<D>"),
        _ => name.to_owned(),
    }
}

/// A field's type in Rust, and what its shape means.
pub fn field_type(lowered: &Lowered, kind: &FieldKind) -> (String, String) {
    let sizes = &lowered.sizes;
    let tp = sizes.tp > 1;
    let stream = if sizes.sequence_parallel { "Split<Tp>" } else { "Whole" };
    let gradients = if tp { "Partial<Tp>" } else { "Whole" };
    let columns = |width| match width {
        Width::Hidden => "HIDDEN",
        Width::Query => "QUERY",
        Width::KeyValue => "KEY_VALUE",
        Width::QueryBehind => "QUERY_BEHIND",
        Width::KeyValueBehind => "KEY_VALUE_BEHIND",
        Width::Value => "VALUE",
        Width::ValueBehind => "VALUE_BEHIND",
        Width::QueryLatent => "QUERY_RANK",
        Width::KeyValueLatent => "KEY_VALUE_RANK",
        Width::Rotary => "ROTARY_DIM",
        Width::UpProjected => "UP",
        Width::Ffn => "INNER",
        Width::Vocab => "VOCAB_ROWS",
        Width::Experts => "EXPERTS",
        Width::ExpertFfn => "EXPERT_INNER",
        Width::SharedFfn => "SHARED_INNER",
    };
    let share = |width: Width| {
        let (whole, _) = sizes.whole(width);
        format!("{} of {whole}", sizes.columns(width))
    };
    let note = |what: &str, width| match tp {
        true => format!("{} {what}", share(width)),
        false => String::new(),
    };
    match kind {
        FieldKind::Norm { .. } => {
            let name = match sizes.norm.kind {
                models::model::NormKind::RmsNorm => "RmsNorm",
                models::model::NormKind::LayerNorm => "LayerNorm",
            };
            (format!("{name}<{stream}, HIDDEN>"), String::new())
        }
        FieldKind::Column { outputs, .. } | FieldKind::Up { outputs, .. } => {
            let from = match kind {
                FieldKind::Up { inputs, .. } => columns(*inputs),
                _ => "HIDDEN",
            };
            let to = columns(*outputs);
            let name = if tp {
                format!("ColumnLinear<Tp, {from}, {to}>")
            } else {
                format!("Linear<{from}, {to}>")
            };
            (name, note("rows", *outputs))
        }
        FieldKind::Down { outputs, .. } => {
            (format!("DownLinear<{gradients}, HIDDEN, {}>", columns(*outputs)), String::new())
        }
        FieldKind::LatentNorm { width, .. } => {
            (format!("LatentNorm<{gradients}, {}>", columns(*width)), String::new())
        }
        FieldKind::Row { inputs, .. } => {
            let from = columns(*inputs);
            let name = if tp {
                format!("RowLinear<Tp, {from}, HIDDEN>")
            } else {
                format!("Linear<{from}, HIDDEN>")
            };
            (name, note("columns", *inputs))
        }
        FieldKind::RowBias { .. } => (format!("RowBias<{stream}, HIDDEN>"), String::new()),
        FieldKind::HeadNorm { .. } => {
            let placement = if tp { "Columns<Tp>" } else { "Whole" };
            (format!("HeadNorm<{placement}, HEAD_DIM>"), String::new())
        }
        FieldKind::Attention { .. } | FieldKind::LatentAttention => {
            let placement = if tp { "Columns<Tp>" } else { "Whole" };
            let [all, own] = sizes.heads;
            let heads = if tp { format!("{own} of {all} heads") } else { String::new() };
            let name = match (kind, sizes.ulysses) {
                (FieldKind::Attention { .. }, 1) => "Attention<PLACEMENT, QUERY, KEY_VALUE",
                (FieldKind::Attention { .. }, _) => {
                    "Attention<PLACEMENT, QUERY_BEHIND, KEY_VALUE_BEHIND"
                }
                (_, 1) => "LatentAttention<PLACEMENT, QUERY, VALUE",
                (_, _) => "LatentAttention<PLACEMENT, QUERY_BEHIND, VALUE_BEHIND",
            };
            let tokens = match sizes.ring {
                1 => String::new(),
                ranks => format!(", Split<Cp<{ranks}>>"),
            };
            (name.replace("PLACEMENT", placement) + &tokens + ">", heads)
        }
        FieldKind::Router { .. } => (format!("Router<{stream}, HIDDEN, EXPERTS>"), String::new()),
        FieldKind::Experts { outputs, inputs, .. } => {
            let name = format!("Experts<{}, {}>", columns(*inputs), columns(*outputs));
            let [all, own] = sizes.experts;
            let note = if own < all { format!("{own} of {all} experts") } else { String::new() };
            (name, note)
        }
        FieldKind::Tokens => {
            let placement = if tp { "Partial<Tp>" } else { "Whole" };
            let name = format!("TokenEmbedding<{placement}, VOCAB_ROWS, HIDDEN>");
            (name, note("rows", Width::Vocab))
        }
        FieldKind::Positions(_) => {
            (format!("Positions<{stream}, POSITIONS, HIDDEN>"), String::new())
        }
        FieldKind::Output => {
            let name = if tp {
                "ColumnLinear<Tp, HIDDEN, VOCAB_ROWS>"
            } else {
                "Linear<HIDDEN, VOCAB_ROWS>"
            };
            (name.to_owned(), note("rows", Width::Vocab))
        }
        FieldKind::Loss => {
            let placement = if tp { "Columns<Tp>" } else { "Whole" };
            (format!("CrossEntropy<{placement}, VOCAB_ROWS>"), String::new())
        }
        FieldKind::FusedLoss(rows) => {
            let placement = if tp { "Columns<Tp>" } else { "Whole" };
            let name = format!("FusedLoss<{placement}, HIDDEN, VOCAB_ROWS>");
            (name, format!("logits of {rows} tokens at a time"))
        }
    }
}
