//! A plan's run: the program, and every rank's report.

use super::plans::PLANS;
use clap::Parser;
use direct::Direct;
use meshwright_tests::golden::{folder, has_weights, planned};
use models::formulas::communication::{all_gather_volume, all_reduce_volume};
use models::placement::StageMemory;
use models::plan::Plan;
use models::program::Program;
use models::schedule::Schedule;
use models::shapes;
use runtime::Interrupt;
use runtime::trainer::{Flags, train};
use serde_json::Value;
use std::path::PathBuf;
use std::sync::LazyLock;

pub const STEPS: f64 = 2.0;
/// Bytes of an element: golden cases train in f32.
pub const F32: f64 = 4.0;

/// Every plan's run.
pub static RUNS: LazyLock<Vec<Ran>> = LazyLock::new(|| {
    let run = |&(case, gpus, settings): &(&str, u64, &str)| {
        let settings: Vec<&str> = settings.split(' ').collect();
        Ran::of(&planned(case, gpus, &settings), case, &settings)
    };
    PLANS.iter().map(run).collect()
});

pub struct Ran {
    pub what: String,
    /// Predicted bytes of each pipeline rank.
    pub planned_memory: Vec<StageMemory>,
    pub program: Program,
    pub schedule: Schedule,
    pub ranks: Vec<Value>,
}

impl Ran {
    pub fn of(plan: &Plan, case: &str, settings: &[&str]) -> Self {
        let gpus = plan.inputs.gpus;
        let program = Program::new(&plan.inputs.model, &plan.decisions, &plan.stages);
        let program = program.expect("it can be trained");
        let what = format!("{case} {}", settings.join(" "));
        let ranks = report(case, &program, &format!("{gpus} {what}"));
        assert_eq!(ranks.len() as u64, gpus, "{what}");
        // The schedule as the planner simulates it.
        let schedule = plan.decisions.build_schedule().expect("it was planned");
        Self { what, planned_memory: plan.device_memory(), schedule, program, ranks }
    }

    pub fn pp_rank(&self, rank: &Value) -> usize {
        number(&rank["at"]["pp"]) as usize
    }

    /// Elements of a micro-batch's hidden states on a rank, b·s·h / c.
    pub fn activation(&self) -> f64 {
        self.tokens() * self.program.model.hidden as f64
    }

    pub fn tokens(&self) -> f64 {
        (self.program.micro_batch * self.program.seq_len()) as f64 / self.program.mesh.cp as f64
    }

    /// Bytes of a rank's part of a micro-batch's logits, with three statistics of each token.
    pub fn logits_bytes(&self) -> f64 {
        let columns = shapes::vocabulary_rows(self.program.model.vocab, self.program.mesh.tp) + 3;
        self.tokens() * columns as f64 * F32
    }

    /// Micro-batches of all steps that one copy of a stage runs.
    pub fn micro_batches(&self) -> f64 {
        STEPS * self.program.micro_batches as f64 / self.copies()
    }

    /// Number of copies of each stage.
    pub fn copies(&self) -> f64 {
        self.program.layout.copies() as f64
    }

    /// Replicas, which hold the same weights.
    pub fn replicas(&self) -> u64 {
        self.program.mesh.cp * self.program.mesh.dp
    }

    /// Of these, the ones that divide what they reduce: those that share a copy of the state, or
    /// all.
    pub fn sharing(&self) -> u64 {
        if self.program.zero_stage > 0 { self.program.dp_shard as u64 } else { self.replicas() }
    }

    /// Bytes that a rank sends to the other copy of its stages: their gradients, or its pieces of
    /// them.
    pub fn copied_bytes(&self, pp_rank: usize) -> f64 {
        if self.copies() == 1.0 {
            return 0.0;
        }
        let pieces = if self.program.zero_stage > 0 { self.program.dp_shard } else { 1 };
        STEPS * shapes::rank_elements(&self.program)[pp_rank] as f64 * F32 / pieces as f64
    }
}

fn report(case: &str, program: &Program, what: &str) -> Vec<Value> {
    let file = format!("ranks-{}.jsonl", what.replace([' ', '='], "-"));
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(file);
    let data = folder(case).join("tokens.safetensors");
    let mut words = vec!["trainer".into(), "--steps".into(), "2".into()];
    if has_weights(case) {
        words.extend(["--init-from".into(), folder(case).into_os_string()]);
    }
    words.extend(["--data".into(), data.into(), "--rank-report".into(), path.clone().into()]);
    let stages = Direct::new(program);
    train::<f32, _>(&stages, &Flags::parse_from(words), &Interrupt::default()).expect("it trains");
    let text = std::fs::read_to_string(path).expect("the run wrote it");
    text.lines().map(|line| serde_json::from_str(line).expect("a JSON line")).collect()
}

pub fn number(value: &Value) -> u64 {
    value.as_u64().expect("a whole number")
}

pub fn sizes(value: &Value) -> Vec<u64> {
    value.as_array().expect("a list").iter().map(number).collect()
}

/// Bytes that a rank passed to a kind of call of a group.
pub fn handed(rank: &Value, group: &str, call: &str) -> f64 {
    rank["traffic"][group][call]["bytes"].as_f64().unwrap_or(0.0)
}

/// How often it did so.
pub fn calls(rank: &Value, group: &str, call: &str) -> u64 {
    rank["traffic"][group][call]["calls"].as_u64().unwrap_or(0)
}

/// Bytes that it sent in a group's ring collectives, as the formulas count them.
pub fn sent_in_rings(rank: &Value, group: &str, ways: f64) -> f64 {
    all_reduce_volume(handed(rank, group, "all_reduce"), ways)
        + all_gather_volume(handed(rank, group, "all_gather") * ways, ways)
        + all_gather_volume(handed(rank, group, "reduce_scatter"), ways)
}
