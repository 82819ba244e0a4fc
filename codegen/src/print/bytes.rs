//! Bytes of values, and what statements send.

use super::statement::Statements;
use super::text::size;
use crate::lower::{Op, Type, Value};
use models::decisions::AuxScope;
use models::model::Moe;
use models::program::Program;

/// Bytes of a copy's row number, expert and place.
const ROUTE_BYTES: u64 = 20;
/// Bytes of a received row's number in the order of arrival, and sorted by expert.
const SORTED_BYTES: u64 = 16;

impl Statements<'_> {
    /// What a statement sends.
    pub(super) fn note(&self, op: &Op) -> Option<String> {
        let ring = self.lowered.sizes.ring;
        let sent = |value| self.elements(value).map_or(0, |elements| elements * self.element_bytes);
        match *op {
            Op::Attention { k, v, .. } if ring > 1 => {
                Some(format!("cp: {} times {}", ring - 1, size(sent(k) + sent(v))))
            }
            Op::AttentionBackward { saved: [_, k, v, ..], .. } if ring > 1 => {
                let bytes = size(sent(k) + sent(v));
                Some(format!("cp: {} times {bytes}, and gradients", ring - 1))
            }
            Op::ToHeads { x, .. } | Op::ToTokens { x, .. } => {
                Some(format!("cp: all-to-all of {}", size(sent(x))))
            }
            Op::Route { .. } => self.among_experts("all-to-all of how many copies come"),
            Op::NoteLoad { .. } => self.of_micro_batch("all-reduce of each expert's load"),
            Op::Dispatch { x, .. } | Op::StartDispatch { x, .. } => {
                let bytes = size(self.copies_bytes(x));
                self.among_experts(&format!("all-to-all of {bytes}"))
            }
            Op::Combine { to, .. } | Op::StartCombine { to, .. } => {
                let bytes = size(self.copies_bytes(to));
                self.among_experts(&format!("all-to-all of {bytes}"))
            }
            _ => self.bytes(op).map(|bytes| format!("tp: {}", size(bytes))),
        }
    }

    /// What ranks exchange that have rows of the same micro-batch, if there are several.
    fn of_micro_batch(&self, what: &str) -> Option<String> {
        let Program { mesh, aux_scope, model, .. } = &self.lowered.program;
        let has_losses = model.moe.as_ref().is_some_and(Moe::has_losses);
        let at_once = has_losses && *aux_scope == AuxScope::MicroBatch;
        match (at_once, mesh.tp > 1, mesh.cp > 1) {
            (false, ..) | (true, false, false) => None,
            (true, true, false) => Some(format!("tp: {what}")),
            (true, false, true) => Some(format!("cp: {what}")),
            (true, true, true) => Some(format!("tp and cp: {what}")),
        }
    }

    /// What the experts' ranks exchange, if there are several.
    fn among_experts(&self, what: &str) -> Option<String> {
        let split = self.lowered.program.experts?;
        match (split.ep > 1, split.etp > 1) {
            (false, false) => None,
            (true, false) => Some(format!("ep: {what}")),
            (false, true) => Some(format!("etp: {what}")),
            (true, true) => Some(format!("ep and etp: {what}")),
        }
    }

    /// Bytes of a value of copies.
    fn copies_bytes(&self, value: Value) -> u64 {
        match self.segment.values[value].of {
            Type::Copies(width) | Type::CopiesInFlight(width) => {
                let sizes = &self.lowered.sizes;
                self.cut(value, sizes.copies() * sizes.columns(width) * self.element_bytes)
            }
            _ => 0,
        }
    }

    /// Of a number that grows with rows, the part of a value: a chunk's if it has a chunk's rows.
    fn cut(&self, value: Value, of_all_rows: u64) -> u64 {
        let chunked = self.segment.values[value].chunked;
        if chunked { of_all_rows / self.lowered.sizes.chunks } else { of_all_rows }
    }

    fn bytes(&self, op: &Op) -> Option<u64> {
        let of = match *op {
            Op::AllGather { to, .. } | Op::StartAllGather { to, .. } => to,
            Op::ReduceScatter { x, .. } | Op::StartReduceScatter { x, .. } => x,
            Op::AllReduce { x, .. } | Op::StartAllReduce { x, .. } => x,
            Op::AllReduceNumbers { .. } => {
                return Some(self.element_bytes.max(4) * self.lowered.sizes.tokens);
            }
            _ => return None,
        };
        self.elements(of).map(|elements| elements * self.element_bytes)
    }

    fn elements(&self, value: Value) -> Option<u64> {
        match self.segment.values[value].of {
            Type::Tensor(_, rows, width) | Type::InFlight(_, rows, width) => {
                Some(self.cut(value, self.lowered.sizes.elements(rows, width)))
            }
            _ => None,
        }
    }

    /// Bytes of some values.
    pub fn held_bytes(&self, values: &[Value]) -> u64 {
        let sizes = &self.lowered.sizes;
        let wide = self.element_bytes.max(4);
        let of = |&value: &Value| match self.segment.values[value].of {
            Type::Tensor(_, rows, width) => sizes.elements(rows, width) * self.element_bytes,
            Type::Statistics => {
                let layer_norm = sizes.norm.kind == models::model::NormKind::LayerNorm;
                sizes.rows * wide * if layer_norm { 2 } else { 1 }
            }
            Type::HeadStatistics(width) => {
                sizes.tokens * sizes.columns(width) / sizes.head_dim * wide
            }
            Type::TokenStatistics => sizes.tokens * wide,
            Type::LogSumExp => sizes.tokens * sizes.heads[1] * wide,
            Type::TokenNumbers => sizes.tokens * wide,
            Type::Copies(width) => sizes.copies() * sizes.columns(width) * self.element_bytes,
            // If every expert gets as many.
            Type::Received(width) => {
                let [ways, _] = sizes.expert_ffn.map(|ffn| ffn / sizes.expert_ffn[1].max(1));
                ways * sizes.copies() * sizes.columns(width) * self.element_bytes
            }
            Type::Route => {
                let scores = sizes.rows * (sizes.experts[0] + 1) * wide;
                let [ways, _] = sizes.expert_ffn.map(|ffn| ffn / sizes.expert_ffn[1].max(1));
                let several = sizes.experts[1] < sizes.experts[0] || ways > 1;
                let sorted = several && sizes.experts[1] > 1;
                let received = if sorted { ways * sizes.copies() * SORTED_BYTES } else { 0 };
                scores + sizes.copies() * (wide + ROUTE_BYTES) + received
            }
            Type::CopyNumbers => sizes.copies() * wide,
            Type::Stream | Type::InFlight(..) | Type::CopiesInFlight(_) | Type::AttentionSums => 0,
        };
        values.iter().map(|value| self.cut(*value, of(value))).sum()
    }
}
