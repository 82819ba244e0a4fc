//! The forwards that each pipeline rank runs before it must know that the previous step was right.
//!
//! With optimizer post-validation (Zero Bubble, arXiv 2401.10241, section 4) a step begins with
//! proposed weights, while the norm of the previous step's gradients is still being summed.
//! Meanwhile a pipeline rank runs the forwards of its warm-up. If the proposal was wrong, all
//! pipeline ranks discard these forwards and begin the step again.

use crate::spec::TrainerSpec;
use models::schedule::{Pass, PassKind, PassOrder};

/// For each pipeline rank, the number of passes it runs before it waits. These are forwards only,
/// and only those whose inputs come from such forwards too, so that every rank reaches the point
/// where it waits.
pub fn passes_ahead(spec: &TrainerSpec) -> Vec<usize> {
    let is_forward = |pass: &Pass| pass.kind == PassKind::F;
    let warm_up = |PassOrder { passes, pairs }: &PassOrder| {
        let alone = pairs.first().map_or(passes.len(), |&place| place as usize);
        passes[..alone].iter().take_while(|pass| is_forward(pass)).count()
    };
    let mut ahead: Vec<usize> = spec.passes.iter().map(warm_up).collect();
    loop {
        let fits = |pipeline_rank: usize, &pass: &Pass| match input(spec, pipeline_rank, pass) {
            Some((other, needs)) => spec.passes[other].passes[..ahead[other]].contains(&needs),
            None => true,
        };
        let count = |pipeline_rank: usize| {
            let passes = spec.passes[pipeline_rank].passes[..ahead[pipeline_rank]].iter();
            passes.take_while(|pass| fits(pipeline_rank, pass)).count()
        };
        let next: Vec<usize> = (0..ahead.len()).map(count).collect();
        if next == ahead {
            return ahead;
        }
        ahead = next;
    }
}

/// The forward whose output a forward reads, and the pipeline rank that runs it; `None` for the
/// first stage.
pub fn input(spec: &TrainerSpec, pipeline_rank: usize, pass: Pass) -> Option<(usize, Pass)> {
    let (layout, pipeline_ranks) = (spec.layout, spec.mesh.pp as usize);
    let stage = layout.stage_of(pipeline_ranks, pipeline_rank, usize::from(pass.chunk));
    let (other, chunk) = layout.holder(pipeline_ranks, stage.checked_sub(1)?, pass.chunk);
    Some((other, Pass { chunk, ..pass }))
}

/// The forwards of this pipeline rank whose input another rank has sent ahead, but which this rank
/// has not run.
pub fn left_over(spec: &TrainerSpec, ahead: &[usize], pipeline_rank: usize) -> Vec<Pass> {
    let of = |pipeline_rank: usize| &spec.passes[pipeline_rank].passes[..ahead[pipeline_rank]];
    let forwards = spec.passes[pipeline_rank].passes.iter().filter(|pass| pass.kind == PassKind::F);
    let arrived = |pass: &&Pass| match input(spec, pipeline_rank, **pass) {
        Some((other, needs)) => other != pipeline_rank && of(other).contains(&needs),
        None => false,
    };
    forwards.filter(arrived).filter(|pass| !of(pipeline_rank).contains(pass)).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::context_parallel::ContextParallel;
    use crate::spec::HostMemory;
    use crate::state::shards::Zero;
    use models::mesh::Mesh;
    use models::mesh::RankOrder;
    use models::schedule::{Schedule, ScheduleName};

    fn spec(schedule: &Schedule) -> TrainerSpec {
        let (tp, cp, dp, pp) = (1, 1, 1, schedule.ranks as u64);
        TrainerSpec {
            mesh: Mesh { tp, cp, dp, pp, order: RankOrder::DpInner },
            experts: None,
            router_losses: None,
            sequence_parallel: false,
            context: ContextParallel::NONE,
            micro_batch: 1,
            micro_batches: schedule.micro_batches,
            stages: schedule.stages(),
            layout: schedule.layout,
            vocab: None,
            zero: Zero::NONE,
            reduction: crate::spec::Reduction::default(),
            host_memory: HostMemory::Nothing,
            post_validation: true,
            passes: schedule.by_rank().into(),
            seq_len: 8,
            hidden: 8,
            vocab_size: 8,
            head_dim: 4,
            value_dim: 4,
            rotary_dim: 4,
            rope_theta: None,
            yarn: None,
            dropout: 0.0,
            tied_table: None,
            training_flops: 0.0,
            prediction: None,
            identity: String::new(),
        }
    }

    #[test]
    fn warm_ups_of_one_chunk_run_whole() {
        let ahead = |name: ScheduleName| passes_ahead(&spec(&name.build(4, 8, 1).unwrap()));
        assert_eq!(ahead(ScheduleName::ZbH1), [4, 3, 2, 1]);
        assert_eq!(ahead(ScheduleName::ZbH2), [7, 5, 3, 1]);
        assert_eq!(ahead(ScheduleName::GPipe), [8, 8, 8, 8]);
    }

    /// Every forward that runs ahead reads from a forward that runs ahead.
    #[test]
    fn inputs_of_what_runs_ahead_run_ahead() {
        for name in ScheduleName::ALL {
            let chunks = name.chunk_rule().nearest(2);
            for (p, m) in [(2, 4), (4, 8), (4, 13)] {
                let Ok(schedule) = name.build(p, m, chunks) else { continue };
                let spec = spec(&schedule);
                let ahead = passes_ahead(&spec);
                assert!(ahead[0] > 0, "{name}");
                for pipeline_rank in 0..p {
                    for &pass in &spec.passes[pipeline_rank].passes[..ahead[pipeline_rank]] {
                        let there = |(other, needs): (usize, Pass)| {
                            spec.passes[other].passes[..ahead[other]].contains(&needs)
                        };
                        assert!(
                            input(&spec, pipeline_rank, pass).is_none_or(there),
                            "{name} {pass}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn what_arrives_and_is_not_taken_is_left_over() {
        let schedule = ScheduleName::ZbH1.build(2, 4, 1).unwrap();
        let spec = spec(&schedule);
        let ahead = passes_ahead(&spec);
        assert_eq!(ahead, [2, 1]);
        let left: Vec<u32> =
            left_over(&spec, &ahead, 1).iter().map(|pass| pass.micro_batch).collect();
        assert_eq!(left, [1]);
        assert_eq!(left_over(&spec, &ahead, 0), []);
    }
}
