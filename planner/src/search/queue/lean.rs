//! A plan where memory is short: dives follow what is fast, and may find nothing that fits.

use super::{Corners, Run, WORK_SHARE};
use crate::request::Task;
use crate::request::restrictions::{Choice, Numbers, Restrictions};
use models::decisions::RecomputePolicy;
use models::schedule::ScheduleName;

/// Share of the time left for each corner of the space that needs little memory. In the one that
/// needs least, four mixtures of experts on few GPUs took 0.04 to 0.2 s, with a proof (2026-11-28,
/// two cores).
const SHARE: f64 = 0.4;

impl Run<'_> {
    /// Searches corners of the space that need little memory, where there is no incumbent.
    pub(super) fn search_lean_corners(&mut self) {
        if self.best_s.is_finite() {
            return;
        }
        let asked = self.task.restrictions;
        let mut corners: Vec<Restrictions> = vec![];
        for corner in [leanest(asked), with_1f1b(asked), full_recomputation(asked)] {
            if corner != *asked && !corners.contains(&corner) {
                corners.push(corner);
            }
        }
        for restrictions in &corners {
            if self.task.is_stopped() || self.is_enough() {
                return;
            }
            let corner = Task {
                restrictions,
                until: self.task.until.share(SHARE),
                cutoff_s: self.best_s,
                solver_work: self.work_left() / WORK_SHARE,
                every_cut_work: 0,
                ..self.task.clone()
            };
            let found = super::run_within(&corner, &mut |_| {}, Corners::No);
            self.offer(found.best.map(Into::into));
        }
    }
}

/// The settings that need least memory, of those allowed.
fn leanest(r: &Restrictions) -> Restrictions {
    let mut lean = with_1f1b(r);
    if r.zero_stage.allows(3) {
        lean.zero_stage = Numbers::only(3);
    }
    if r.fused_loss.allows(true) {
        lean.fused_loss = Choice::of(&[true]);
    }
    lean
}

/// The settings with which layers hold least, of those with which anything exists: full
/// recomputation, one sequence a micro-batch, and 1F1B, where they are allowed.
pub fn least_activations(task: &Task<'_>) -> Restrictions {
    let asked = task.restrictions;
    let exists = |r: &Restrictions| !Task { restrictions: r, ..task.clone() }.space().is_empty();
    let corners = [with_1f1b(asked), full_recomputation(asked)];
    corners.into_iter().find(exists).unwrap_or_else(|| asked.clone())
}

/// [`full_recomputation`], and 1F1B, which holds the fewest micro-batches.
fn with_1f1b(r: &Restrictions) -> Restrictions {
    let mut lean = full_recomputation(r);
    if r.schedule.allows(ScheduleName::OneFOneB) && r.vpp.allows(1) {
        lean.schedule = Choice::of(&[ScheduleName::OneFOneB]);
    }
    lean
}

/// Full recomputation and one sequence a micro-batch, where they are allowed.
fn full_recomputation(r: &Restrictions) -> Restrictions {
    let mut lean = r.clone();
    if r.recompute.allows(RecomputePolicy::Full) {
        lean.recompute = Choice::of(&[RecomputePolicy::Full]);
    }
    // `naive` has a single micro-batch, however large.
    let several = r.schedule.among(&ScheduleName::ALL).iter().any(|s| *s != ScheduleName::Naive);
    if r.micro_batch.allows(1) && several {
        lean.micro_batch = Numbers::only(1);
    }
    lean
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn run_of(gpus: u64, restrictions: &Restrictions, then: impl FnOnce(&mut Run<'_>)) {
        let model = models::model::shipped("deepseek_v3").and_then(Result::ok).expect("it reads");
        let cluster = models::cluster::shipped("dgx_h200").and_then(Result::ok).expect("it reads");
        let task = Task::new(&model, &cluster, gpus, restrictions);
        then(&mut Run::new(&task, Arc::default(), 1));
    }

    #[test]
    fn a_plan_is_found_where_memory_is_short() {
        run_of(64, &Restrictions::default(), |run| {
            run.search_lean_corners();
            assert!(run.best.is_some());
        });
    }

    /// With a single micro-batch a sequence each would be too few.
    #[test]
    fn corners_keep_to_what_is_asked() {
        let r = Restrictions::parse(&["schedule=naive", "zero_stage=1", "recompute=none"]);
        let r = r.expect("they are valid");
        let lean = leanest(&r);
        assert_eq!((&lean.schedule, &lean.zero_stage), (&r.schedule, &r.zero_stage));
        assert_eq!((&lean.recompute, &lean.micro_batch), (&r.recompute, &r.micro_batch));
    }
}
