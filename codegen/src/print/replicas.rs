//! How replicas share a segment's parameters: the type of its `Parameters`, and the lines that ask
//! for weights and hand over gradients.

use super::statement::commented;
use crate::lower::{FieldKind, Lowered, Segment};
use models::program::Program;

/// The replicas of a segment's parameters.
#[derive(Clone, Copy)]
pub struct Replicas {
    /// ZeRO stage.
    stage: u8,
    /// Replicas that share a copy, or that have one each.
    dense: u64,
    /// Likewise of experts, if the segment has any.
    experts: Option<u64>,
    /// The axes of the mesh along which they lie.
    axes: &'static str,
    /// Groups of replicas, each with the whole state.
    groups: u64,
    /// Copies of each stage, on different pipeline ranks.
    copies: usize,
}

impl Replicas {
    /// Those of `segment`.
    pub fn of(lowered: &Lowered, segment: &Segment) -> Self {
        let Program { mesh, experts, zero_stage: stage, dp_shard, layout, .. } = &lowered.program;
        let has_experts =
            segment.fields.iter().any(|field| matches!(field.kind, FieldKind::Experts { .. }));
        let group = |replicas: u64| match stage {
            0 => replicas,
            _ => replicas.min(*dp_shard as u64),
        };
        let of_experts =
            |split: &models::mesh::ExpertSplit| group(mesh.folded_ranks() / (split.ep * split.etp));
        let experts = experts.as_ref().filter(|_| has_experts).map(of_experts);
        let axes = if mesh.cp > 1 { "dp and cp" } else { "dp" };
        let (all, copies) = (mesh.dp * mesh.cp, layout.copies());
        Self { stage: *stage, dense: group(all), experts, axes, groups: all / group(all), copies }
    }

    /// The type of their `Parameters`.
    pub fn parameters(self) -> String {
        let name = match self.stage {
            0 if self.only_one() => return "Parameters<Whole>".to_owned(),
            0 => "Replicated",
            _ => "Sharded",
        };
        let dense = self.dense;
        match self.experts {
            Some(experts) if experts != dense => format!("Parameters<{name}<{dense}, {experts}>>"),
            _ => format!("Parameters<{name}<{dense}>>"),
        }
    }

    fn only_one(self) -> bool {
        self.dense == 1 && self.experts.is_none_or(|experts| experts == 1)
    }

    /// The line that gives a pass the weights of the parameters in field `of`.
    pub fn weights(self, of: &str, indent: usize) -> Vec<String> {
        let gathers =
            |note: &str| commented(format!("let ctx = &self.{of}.gather(ctx)?;"), note, indent);
        match self.stage {
            0 => vec![format!("let ctx = &self.{of}.weights(ctx)?;")],
            3 => gathers(&format!("{}: all-gather of weights", self.sharing())),
            _ => gathers(&format!("{}: updates, gathered once a step", self.sharing())),
        }
    }

    /// The replicas that share a copy.
    fn sharing(self) -> String {
        match self.groups {
            1 => self.axes.to_owned(),
            _ => format!("{} in groups of {}", self.axes, self.dense),
        }
    }

    /// The line that hands over the gradients of the parameters in field `of`, and of those behind.
    /// `to` is what its result is assigned to.
    pub fn reduces(self, to: &str, of: &str, indent: usize) -> Vec<String> {
        let (call, note) = match self.stage {
            0 if self.only_one() => ("complete", ""),
            0 => ("all_reduce", "all-reduce, once a step"),
            1 => ("reduce_scatter", "reduce-scatter, once a step"),
            _ => ("reduce_scatter", "reduce-scatter"),
        };
        let code = format!("{to}self.{of}.{call}(gradients)?;");
        let mut notes = vec![];
        if !note.is_empty() {
            notes.push(format!("{}: {note}", self.sharing()));
        }
        if self.groups > 1 && self.stage > 0 {
            notes.push("all-reduce between groups, once a step".to_owned());
        }
        if self.copies > 1 {
            notes.push("pp: sum of both copies, once a step".to_owned());
        }
        match notes.as_slice() {
            [] => vec![code],
            notes => commented(code, &notes.join("; "), indent),
        }
    }
}
