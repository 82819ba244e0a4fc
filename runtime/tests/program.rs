//! From decisions to a program: what it contains, and which decisions are refused by name.

mod common;

use common::{Split, model};
use direct::Direct;
use models::decisions::{
    AuxScope, CpStyle, Decisions, DpReduction, Dtype, MoeOverlap, Offload, RankOrder,
    RecomputePolicy, USUAL_BUCKET_MIB, Vocab,
};
use models::model::ModelSpec;
use models::placement::{RecomputeCounts, Stage, StageMemory, VocabShare};
use models::program::{Program, Recompute, unsupported_model};
use models::schedule::{PassTimes, ScheduleName, VocabPasses};
use runtime::comm::{Options, run_ranks};
use runtime::{Host, Rank, Reduction};
use std::collections::BTreeMap;

fn decisions() -> Decisions {
    Decisions {
        tp: 2,
        pp: 2,
        vpp: 1,
        cp: 1,
        cp_style: CpStyle::Ring,
        cp_ulysses: 1,
        dp: 1,
        dp_shard: 1,
        ep: 1,
        etp: 1,
        zero_stage: 0,
        sequence_parallel: true,
        fused_loss: false,
        micro_batch: 2,
        micro_batches: 4,
        schedule: ScheduleName::OneFOneB,
        recompute: RecomputePolicy::PerLayer,
        vocab: Vocab::Tensor,
        moe_overlap: MoeOverlap::None,
        moe_overlap_degree: 1,
        capacity_factor: None,
        aux_scope: AuxScope::MicroBatch,
        dtype: Dtype::F32,
        offload: Offload::None,
        dp_reduction: DpReduction::Bucketed,
        dp_bucket_mib: USUAL_BUCKET_MIB,
        recompute_group: 1,
        rank_order: RankOrder::DpInner,
        post_validation: false,
        pass_times: None,
    }
}

fn stage(stage: usize, first_layer: usize, layers: usize, counts: [usize; 3]) -> Stage {
    let [none, selective, full] = counts;
    let recompute = [("dense".to_owned(), RecomputeCounts { none, selective, full })];
    Stage {
        stage,
        device: stage,
        chunk: 0,
        first_layer,
        layers,
        vocab_share: VocabShare { input: 0.0, output: 0.0 },
        recompute: BTreeMap::from(recompute),
        memory: StageMemory { parameters: 10 + stage as u64, ..StageMemory::default() }.summed(),
        copy: None,
    }
}

fn stages() -> [Stage; 2] {
    [stage(0, 0, 3, [1, 1, 1]), stage(1, 3, 1, [1, 0, 0])]
}

#[test]
fn a_program_holds_what_was_planned() {
    let program = Program::new(&model("llama_gqa"), &decisions(), &stages()).unwrap();
    assert_eq!((program.world_size(), program.global_batch(), program.seq_len()), (4, 8, 32));
    assert_eq!(program.stages[0].layers(), 0..3);
    let kept = [Recompute::Full, Recompute::Selective, Recompute::None];
    assert_eq!(program.stages[0].recompute, kept);
    assert_eq!(program.stages[1].layers(), 3..4);
    assert_eq!(program.planned_memory_bytes, 11);
    let schedule = ScheduleName::OneFOneB.build(2, 4, 1).unwrap();
    assert_eq!(program.passes, schedule.by_rank());
}

#[test]
fn a_vocabulary_over_the_pipeline_has_passes() {
    for (vocab, passes) in [
        (Vocab::ParallelNaive, VocabPasses::Naive),
        (Vocab::Parallel1, VocabPasses::One),
        (Vocab::Parallel2, VocabPasses::Two),
        (Vocab::Interlaced, VocabPasses::Interlaced),
    ] {
        let d = Decisions { vocab, ..decisions() };
        let program = Program::new(&model("llama_tied"), &d, &stages()).unwrap();
        let schedule = ScheduleName::OneFOneB;
        let schedule = schedule.build_with_vocab(2, 4, 1, passes, None).unwrap();
        let schedule = schedule.with_input_passes(PassTimes::default()).unwrap();
        assert_eq!((program.vocab, program.passes), (Some(passes), schedule.by_rank()), "{vocab}");
    }
}

#[test]
fn naive_runs_the_batch_as_one() {
    let naive = Decisions { schedule: ScheduleName::Naive, ..decisions() };
    let program = Program::new(&model("llama_gqa"), &naive, &stages()).unwrap();
    assert_eq!((program.micro_batch, program.micro_batches, program.global_batch()), (8, 1, 8));
}

#[test]
fn what_cannot_be_run_is_refused_by_name() {
    let refused = |d: Decisions, parts: [&str; 3]| {
        let text = Program::new(&model("llama_gqa"), &d, &stages()).unwrap_err().to_string();
        parts.iter().for_each(|part| assert!(text.contains(part), "{text:?} lacks {part:?}"));
    };
    refused(
        Decisions { cp: 3, ..decisions() },
        ["cp cannot be 3", "yet", "32 tokens into equal parts"],
    );
    refused(Decisions { ep: 2, ..decisions() }, ["ep cannot be 2", "yet", "valid: 1"]);
    // Every reason at once.
    let both = Decisions { ep: 2, dtype: Dtype::Fp8, ..decisions() };
    refused(both, ["ep cannot be 2", "dtype cannot be fp8", "\n"]);
    let dtype = Decisions { dtype: Dtype::Fp8, ..decisions() };
    refused(dtype, ["dtype cannot be fp8", "yet", "f32, f64, bf16"]);
    let offload = Decisions { offload: Offload::Optimizer, post_validation: true, ..decisions() };
    refused(offload, ["post_validation cannot be true", "yet", "offload=none"]);
    refused(Decisions { tp: 3, ..decisions() }, ["tp cannot be 3", "yet", "divisor"]);
    // 33 tokens a sequence in one micro-batch of one cannot be halved.
    let mut odd = model("llama_gqa");
    odd.seq_len = 33;
    let one = Decisions { micro_batch: 1, ..decisions() };
    let text = Program::new(&odd, &one, &stages()).unwrap_err().to_string();
    assert!(text.contains("sequence_parallel cannot be true"), "{text}");
    let mut scaled = model("llama_gqa");
    scaled.numerics.unknown = vec!["rope_scaling".to_owned()];
    let text = Program::new(&scaled, &decisions(), &stages()).unwrap_err().to_string();
    assert!(text.contains("rope_scaling"), "{text}");
    let names = |model: &ModelSpec| -> Vec<String> {
        unsupported_model(model).iter().map(|what| what.decision.to_string()).collect()
    };
    let mut latent = model("deepseek_v3");
    assert_eq!(names(&latent), [""; 0]);
    latent.attention.qk_norm = true;
    assert_eq!(names(&latent), ["model.qk_norm"]);
}

/// An edited program may say what no plan says: every rank refuses it before it talks to others.
#[test]
fn divisions_that_cannot_be_are_errors_at_the_start() {
    let split = Split { dp: 4, zero: 1, micro_batch: 2, ..Split::default() };
    let whole = split.program(&model("llama_gqa"));
    let thirds = Program { dp_shard: 3, ..whole.clone() };
    let stage_4 = Program { zero_stage: 4, ..whole };
    let halves = Split { cp: 2, ..Split::default() }.program(&model("llama_gqa"));
    let mut odd = halves.clone();
    odd.model.seq_len = 30;
    let groups = Program { cp_ulysses: 3, ..halves };
    for (program, said) in [
        (thirds, "ZeRO stage 1 over 3 replicas; valid: stages 0 to 3, over a divisor of the 4"),
        (stage_4, "ZeRO stage 4"),
        (odd, "30 tokens a sequence; valid: a multiple of the 4 parts"),
        (groups, "Ulysses groups of 3; valid: the mesh's 2 ranks, and a divisor of them"),
    ] {
        let stages = Direct::new(&program);
        let errors = run_ranks(program.world_size(), Options::default(), |world| {
            let rank = Rank::new(&stages, world, Host::<f32>::serial(), Reduction::default(), 1);
            rank.err().expect("it is refused").to_string()
        });
        assert!(errors.iter().all(|error| error.contains(said)), "{errors:?}");
    }
}
