//! The first search nodes: parallel layouts whose split of the experts is open.

use super::super::expand::Context;
use crate::pricing::listed_cuts::is_family;
use crate::request::Task;
use crate::request::pipeline_choices::{PipelineChoices, PipelineChoicesKey};
use crate::request::space::{ExpertSplit, ParallelLayout};
use models::decisions::Decisions;
use rustc_hash::{FxHashMap as HashMap, FxHashSet as HashSet};
use std::sync::Arc;

/// All contexts with combinations, those that share layer costs next to each other; and whether
/// some pipeline tries only a family of partitions.
pub(super) fn all(task: &Task<'_>, threads: usize) -> (Vec<Context>, bool) {
    let degrees = task.space().open_degrees();
    let each = degrees.len().div_ceil(threads).max(1);
    let parts: Vec<(Vec<Context>, bool)> = std::thread::scope(|scope| {
        let parts = degrees.chunks(each).map(|some| scope.spawn(|| of_degrees(task, some)));
        let joined = parts.collect::<Vec<_>>().into_iter().map(|part| match part.join() {
            Ok(part) => part,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        joined.collect()
    });
    let family = parts.iter().any(|(_, family)| *family);
    let mut contexts: Vec<Context> = parts.into_iter().flat_map(|(contexts, _)| contexts).collect();
    // Each part is sorted already.
    contexts.sort_by_key(Context::priced_by);
    (contexts, family)
}

/// The contexts with given degrees.
fn of_degrees(task: &Task<'_>, degrees: &[Decisions]) -> (Vec<Context>, bool) {
    let space = task.space();
    let mut known: HashMap<_, [Arc<[ExpertSplit]>; 2]> = HashMap::default();
    let mut counter = space.counter();
    let (mut seen, mut family) = (HashSet::default(), false);
    let mut contexts = vec![];
    for template in degrees.iter().flat_map(|degrees| space.context_styles(degrees)) {
        let (all, shared) = (space.micro_batches(&template), Arc::new(template));
        let mut d = Decisions::clone(&shared);
        let Some(&first) = all.first() else { continue };
        (d.micro_batch, d.micro_batches) = first;
        let key = (d.tp, d.cp, d.dp, d.sequence_parallel);
        let kinds = known.entry(key).or_insert_with(|| by_pairs(space.expert_splits(&d)));
        for (micro_batch, micro_batches) in all {
            (d.micro_batch, d.micro_batches) = (micro_batch, micro_batches);
            for splits in kinds.iter().filter(|splits| !splits.is_empty()) {
                d.moe_overlap = splits[0].overlap;
                if !family && seen.insert(PipelineChoicesKey::new(&d)) {
                    let choices = space.choices(&ParallelLayout { decisions: d.clone() });
                    family = has_family(&choices, &d, task.model.layers);
                }
                let (template, splits) = (Arc::clone(&shared), Arc::clone(splits));
                let each = counter.count(&d);
                if each > 0 {
                    contexts.push(Context { template, micro_batch, micro_batches, splits, each });
                }
            }
        }
    }
    // Keys are made once for each context.
    contexts.sort_by_cached_key(Context::priced_by);
    (contexts, family)
}

/// Expert splits without pairs of passes, and those with pairs, which fewer pipelines have.
fn by_pairs(splits: Vec<ExpertSplit>) -> [Arc<[ExpertSplit]>; 2] {
    let (paired, alone): (Vec<_>, Vec<_>) = splits.into_iter().partition(ExpertSplit::is_paired);
    [Arc::from(alone), Arc::from(paired)]
}

/// Whether only a family of partitions is tried of some pipeline.
fn has_family(choices: &PipelineChoices, d: &Decisions, layers: usize) -> bool {
    choices.pipelines(d).any(|d| is_family(&d, layers))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::restrictions::Restrictions;

    #[test]
    fn contexts_hold_the_whole_space() {
        let selene = models::cluster::shipped("selene").and_then(Result::ok).expect("it reads");
        for (model, gpus, runnable, settings) in [
            ("gpt_1.7b", 48, false, &[][..]),
            ("mixtral_8x7b", 64, false, &["tp=2"]),
            ("mixtral_8x7b", 64, true, &["pp=2"]),
            ("mixtral_8x7b", 64, true, &["micro_batch=2", "pp=4"]),
            // Eight heads of keys and values allow no Ulysses degree of 12, but one of 4.
            ("grok1", 24, true, &["cp=12", "tp=1", "pp=2", "cp_style=ulysses,hybrid"]),
        ] {
            let mut model = models::model::shipped(model).and_then(Result::ok).expect("it reads");
            if model.name == "grok1" {
                model.seq_len = 6144;
            }
            let restrictions = Restrictions::parse(settings).expect("they are valid");
            let restrictions = Restrictions { runnable, ..restrictions };
            let task = Task::new(&model, &selene, gpus, &restrictions);
            let counted: u64 = all(&task, 2).0.iter().map(Context::count).sum();
            assert_eq!(counted, task.space().count(), "{settings:?}");
            assert!(counted > 0, "{} {runnable} {settings:?}", model.name);
        }
    }
}
