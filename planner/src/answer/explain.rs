//! Why a plan is what it is: the same search again, with one thing changed at a time.

use crate::answer::report::Alternative;
use crate::request::Request;
use crate::request::Task;
use crate::request::restrictions::{Choice, Numbers, Restrictions};
use crate::request::task::SOLVER_WORK;
use crate::search::{Found, Outcome, Progress, search, search_wide};
use models::cluster::ClusterSpec;
use models::decisions::{Decisions, Offload, Recompute, Vocab};
use models::plan::Proof;
use models::schedule::ScheduleName;
use serde::Serialize;
use std::collections::BTreeSet;

/// One thing that was tried instead.
#[derive(Clone, Debug, Serialize)]
pub struct Tried {
    /// What was pinned or changed, such as `tp 4` or `1 GB more memory`.
    pub what: String,
    /// The best way to do it, if any is worth a price.
    pub best: Option<Alternative>,
    /// Why there is none.
    pub why_not: Option<WhyNot>,
}

/// Why something has no way worth a price.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WhyNot {
    /// The user's settings exclude it.
    Excluded,
    /// No combination of decisions satisfies the rules of divisibility.
    DoesNotExist,
    /// Every way takes more than [`FAR`] times the plan's time, whatever memory there is.
    TooSlow,
    /// Some ways would be fast enough, and none of them fits.
    DoesNotFit,
    /// The time for integer programs ran out.
    Undecided,
}

/// Everything `plan explain` finds out by searching.
#[derive(Clone, Debug, Serialize)]
pub struct Explanation {
    /// Other values of single decisions, the rest free.
    pub considered: Vec<Tried>,
    /// Slightly better hardware.
    pub bought: Vec<Tried>,
    /// 1F1B with the vocabulary on first and last stage and even layers.
    pub plain: Tried,
}

/// Alternatives are looked for up to these multiples of the plan's time, the next only where the one
/// before leaves too few: bounds cut most of what is not close.
const CLOSE: [f64; 3] = [1.02, 1.08, 1.25];

/// What takes more than so many times the plan's time is not looked for: that alone is enough against it.
pub const FAR: f64 = 3.0;

/// What integer programs may take for one question: what it finds need not be proven.
const QUESTION_WORK: u64 = SOLVER_WORK / 40;

/// Bytes that `plan` imagines on top.
const MORE_BYTES: f64 = 4e9;

/// A request with its fastest way, asked again with changes.
pub struct Asker<'a> {
    request: &'a Request,
    own_s: f64,
    progress: Progress<'a>,
}

impl<'a> Asker<'a> {
    /// Asks about `request`, whose plan takes `own_s`.
    pub fn new(request: &'a Request, own_s: f64, progress: Progress<'a>) -> Self {
        Self { request, own_s, progress }
    }

    fn ask(
        &mut self,
        cluster: &ClusterSpec,
        r: &Restrictions,
        cutoff_s: f64,
    ) -> Option<Alternative> {
        let found = self.search(cluster, r, cutoff_s, false).best?;
        Some(alternative(&found, self.own_s))
    }

    fn search(
        &mut self,
        cluster: &ClusterSpec,
        r: &Restrictions,
        cutoff_s: f64,
        ignore_memory: bool,
    ) -> Outcome {
        let task = Task {
            cluster,
            restrictions: r,
            cutoff_s,
            solver_work: QUESTION_WORK,
            ignore_memory,
            ..self.request.task()
        };
        search_wide(&task, self.progress)
    }

    fn with(&mut self, what: String, r: &Restrictions) -> Tried {
        let Outcome { best, proof, .. } =
            self.search(&self.request.cluster, r, FAR * self.own_s, false);
        let best = best.map(|found| alternative(&found, self.own_s));
        let why_not = best.is_none().then(|| self.why_not(&proof, r));
        Tried { what, best, why_not }
    }

    /// Why a search within [`FAR`] times the plan's time found nothing: the same without a limit of
    /// memory tells.
    fn why_not(&mut self, proof: &Proof, r: &Restrictions) -> WhyNot {
        if proof.candidates == 0 {
            return WhyNot::DoesNotExist;
        }
        if proof.searched_gap > 0.0 {
            return WhyNot::Undecided;
        }
        let endless = self.search(&self.request.cluster, r, FAR * self.own_s, true);
        match (endless.best, endless.proof.searched_gap == 0.0) {
            (Some(_), _) => WhyNot::DoesNotFit,
            (None, true) => WhyNot::TooSlow,
            (None, false) => WhyNot::Undecided,
        }
    }

    /// The `most` fastest of: the best of every other pair of tp and pp, and of every other schedule
    /// at the plan's own pair. None is slower than a quarter as long again.
    pub fn alternatives(&mut self, own: &Decisions, most: usize) -> Vec<Alternative> {
        let shapes = self.other_shapes(own);
        let mut kept = vec![];
        for multiple in CLOSE {
            if kept.len() < most {
                kept = self.fastest(&shapes, most, self.own_s * multiple);
            }
        }
        kept
    }

    fn fastest(&mut self, shapes: &[Restrictions], most: usize, within_s: f64) -> Vec<Alternative> {
        let mut kept: Vec<Alternative> = vec![];
        for r in shapes {
            let worst_s = kept.get(most - 1).map_or(within_s, |other| other.iteration_s);
            kept.extend(self.ask(&self.request.cluster, r, worst_s));
            kept.sort_by(|a, b| a.iteration_s.total_cmp(&b.iteration_s));
            kept.truncate(most);
        }
        kept
    }

    /// Nearest to the plan's own degrees first, where good ones make the bounds cut.
    fn other_shapes(&self, own: &Decisions) -> Vec<Restrictions> {
        let r = &self.request.restrictions;
        let nodes = self.request.task().space().contexts();
        let pairs: BTreeSet<(u64, u64)> =
            nodes.iter().map(|node| (node.decisions.tp, node.decisions.pp)).collect();
        let mut others: Vec<(u64, u64)> = pairs.into_iter().collect();
        others.retain(|&pair| pair != (own.tp, own.pp));
        others.sort_by(|&a, &b| distance(own, a).total_cmp(&distance(own, b)));
        let shapes = others.into_iter().map(|(tp, pp)| shaped(r, tp, pp));
        let schedules = r.schedule.among(&ScheduleName::ALL).into_iter();
        let schedules = schedules.filter(|&schedule| schedule != own.schedule).map(|schedule| {
            Restrictions { schedule: Choice::of(&[schedule]), ..shaped(r, own.tp, own.pp) }
        });
        schedules.chain(shapes).collect()
    }

    /// What more memory would allow, if anything: how many bytes more, and the faster way.
    pub fn more_memory(&mut self) -> Option<(f64, Alternative)> {
        let cluster = with_memory(&self.request.cluster, MORE_BYTES);
        let found = self.ask(&cluster, &self.request.restrictions, self.own_s * 0.999);
        found.map(|found| (MORE_BYTES, found))
    }

    /// Everything.
    pub fn explain(&mut self, own: &Decisions) -> Explanation {
        let considered = self.considered(own);
        let bought = self.bought();
        let plain = self.plain();
        Explanation { considered, bought, plain }
    }

    fn considered(&mut self, own: &Decisions) -> Vec<Tried> {
        let others = self.other_values(own);
        others.into_iter().map(|(what, r)| self.with(what, &r)).collect()
    }

    /// Single decisions at other values than the plan's, as far as the user allows.
    fn other_values(&self, own: &Decisions) -> Vec<(String, Restrictions)> {
        let r = &self.request.restrictions;
        let mut found = self.other_degrees(own);
        for schedule in r.schedule.among(&ScheduleName::ALL) {
            let narrowed = Restrictions { schedule: Choice::of(&[schedule]), ..r.clone() };
            if schedule != own.schedule {
                found.push((schedule.to_string(), narrowed));
            }
        }
        for stage in (0..=3u8).filter(|&stage| stage != own.zero_stage) {
            if r.zero_stage.allows(u64::from(stage)) {
                let zero_stage = Numbers::only(u64::from(stage));
                found.push((format!("zero {stage}"), Restrictions { zero_stage, ..r.clone() }));
            }
        }
        for recompute in [Recompute::None, Recompute::Full] {
            let narrowed = Restrictions { recompute: Choice::of(&[recompute]), ..r.clone() };
            if recompute != own.recompute && r.recompute.allows(recompute) {
                found.push((format!("recompute {recompute}"), narrowed));
            }
        }
        if own.offload != Offload::None && r.offload.allows(Offload::None) {
            let offload = Choice::of(&[Offload::None]);
            found.push(("no offloading".to_owned(), Restrictions { offload, ..r.clone() }));
        }
        found
    }

    fn other_degrees(&self, own: &Decisions) -> Vec<(String, Restrictions)> {
        let r = &self.request.restrictions;
        let nodes = self.request.task().space().contexts();
        let values = |of: fn(&Decisions) -> u64| -> Vec<u64> {
            let all: BTreeSet<u64> = nodes.iter().map(|node| of(&node.decisions)).collect();
            all.into_iter().filter(|&value| value != of(own)).collect()
        };
        let mut found = vec![];
        for tp in values(|d| d.tp) {
            found.push((format!("tp {tp}"), Restrictions { tp: Numbers::only(tp), ..r.clone() }));
        }
        for pp in values(|d| d.pp) {
            found.push((format!("pp {pp}"), Restrictions { pp: Numbers::only(pp), ..r.clone() }));
        }
        for cp in values(|d| d.cp) {
            found.push((format!("cp {cp}"), Restrictions { cp: Numbers::only(cp), ..r.clone() }));
        }
        let layouts = self.request.task().space().expert_layouts();
        let eps: BTreeSet<u64> = layouts.iter().map(|layout| layout.decisions.ep).collect();
        for ep in eps.into_iter().filter(|&ep| ep != own.ep) {
            found.push((format!("ep {ep}"), Restrictions { ep: Numbers::only(ep), ..r.clone() }));
        }
        found
    }

    /// A little more memory; a little more bandwidth, level by level.
    fn bought(&mut self) -> Vec<Tried> {
        let cluster = &self.request.cluster;
        let r = &self.request.restrictions;
        let mut better: Vec<(String, ClusterSpec)> = vec![];
        better.push(("1 GB more memory".to_owned(), with_memory(cluster, 1e9)));
        for (index, level) in cluster.levels.iter().enumerate() {
            let mut faster = cluster.clone();
            faster.levels[index].bytes_per_s *= 1.1;
            better.push((format!("10 % more {} bandwidth", level.name), faster));
        }
        let mut tried = vec![];
        for (what, cluster) in better {
            let best = self.ask(&cluster, r, FAR * self.own_s);
            tried.push(Tried { what, best, why_not: None });
        }
        tried
    }

    fn plain(&mut self) -> Tried {
        let r = &self.request.restrictions;
        let what = "1f1b, vocabulary on first and last stage, even layers".to_owned();
        let (schedule, vocab) = (ScheduleName::OneFOneB, Vocab::FirstLast);
        if !r.schedule.allows(schedule) || !r.vocab.allows(vocab) {
            return Tried { what, best: None, why_not: Some(WhyNot::Excluded) };
        }
        let schedule = Choice::of(&[schedule]);
        let vocab = Choice::of(&[vocab]);
        self.with(what, &Restrictions { schedule, vocab, ..r.clone() })
    }
}

/// Doublings and halvings between degrees.
fn distance(own: &Decisions, (tp, pp): (u64, u64)) -> f64 {
    let doublings = |a: u64, b: u64| (a as f64 / b as f64).log2().abs();
    doublings(own.tp, tp) + doublings(own.pp, pp)
}

fn shaped(r: &Restrictions, tp: u64, pp: u64) -> Restrictions {
    Restrictions { tp: Numbers::only(tp), pp: Numbers::only(pp), ..r.clone() }
}

fn with_memory(cluster: &ClusterSpec, more_bytes: f64) -> ClusterSpec {
    let mut larger = cluster.clone();
    larger.device.hbm_bytes += more_bytes;
    larger
}

fn alternative(found: &Found, own_s: f64) -> Alternative {
    let priced = &found.priced;
    Alternative {
        decisions: found.decisions.clone(),
        iteration_s: priced.iteration_s,
        slower: priced.iteration_s / own_s - 1.0,
        peak_memory_bytes: priced.device_bytes.iter().copied().fold(0.0, f64::max) as u64,
        breakdown: priced.breakdown.rounded(),
    }
}

/// Why nothing fits, and what would.
#[derive(Clone, Debug)]
pub struct Shortage {
    /// The leanest configuration, were there memory for it; to 1 % of its bytes.
    pub leanest: Option<Found>,
    /// Changes that make it fit: what to type, and the way that then fits.
    pub remedies: Vec<(String, Found)>,
}

/// Finds out by how much nothing fits, and the smallest changes that would.
///
/// Only the leanest corner of the space is searched: 1F1B, which holds the fewest micro-batches,
/// of one sequence each, with everything recomputed; as far as the user allows.
pub fn shortage(request: &Request, progress: Progress<'_>) -> Shortage {
    let corner = Request { restrictions: lean(&request.restrictions), ..request.clone() };
    let leanest = leanest(&corner, progress);
    let mut remedies: Vec<(String, Found)> = vec![];
    remedies.extend(without_headroom(&corner, progress));
    remedies.extend(without_a_setting(&corner, progress));
    remedies.extend(more_gpus(&corner, progress));
    Shortage { leanest, remedies }
}

fn lean(r: &Restrictions) -> Restrictions {
    let mut lean = r.clone();
    if r.recompute.allows(Recompute::Full) {
        lean.recompute = Choice::of(&[Recompute::Full]);
    }
    if r.micro_batch.allows(1) {
        lean.micro_batch = Numbers::only(1);
    }
    if r.schedule.allows(ScheduleName::OneFOneB) && r.vpp.allows(1) {
        lean.schedule = Choice::of(&[ScheduleName::OneFOneB]);
    }
    lean
}

/// Doubles device memory until something fits, then closes in.
fn leanest(request: &Request, progress: Progress<'_>) -> Option<Found> {
    let mut factor = 2.0;
    while factor < 1e6 && !request.task().is_stopped() {
        if let Some(outcome) = with_factor(request, factor, progress) {
            return close_in(request, factor / 2.0, (factor, outcome), progress).best;
        }
        factor *= 2.0;
    }
    None
}

/// The fastest way in the least device memory that anything fits into, to 1 %; nothing where nothing
/// fits into what there is.
pub fn least_memory(request: &Request, progress: Progress<'_>) -> Option<Outcome> {
    let cluster = &request.cluster;
    let outcome = with_factor(request, 1.0, progress)?;
    let low = (cluster.reserved_bytes() / cluster.device.hbm_bytes).max(1e-3);
    Some(close_in(request, low, (1.0, outcome), progress))
}

/// Halves the interval between a part of device memory that is too little and one that is enough.
fn close_in(
    request: &Request,
    mut low: f64,
    enough: (f64, Outcome),
    progress: Progress<'_>,
) -> Outcome {
    let (mut high, mut outcome) = enough;
    while high > 1.01 * low && !request.task().is_stopped() {
        let middle = (low * high).sqrt();
        match with_factor(request, middle, progress) {
            Some(leaner) => (high, outcome) = (middle, leaner),
            None => low = middle,
        }
    }
    outcome
}

/// The search with so many times the device memory, if anything fits.
fn with_factor(request: &Request, factor: f64, progress: Progress<'_>) -> Option<Outcome> {
    let mut cluster = request.cluster.clone();
    cluster.device.hbm_bytes *= factor;
    let task = Task { cluster: &cluster, solver_work: QUESTION_WORK, ..request.task() };
    let outcome = search(&task, progress);
    outcome.best.is_some().then_some(outcome)
}

fn without_headroom(request: &Request, progress: Progress<'_>) -> Option<(String, Found)> {
    if request.headroom == 0.0 {
        return None;
    }
    let whole = request.without_headroom();
    let found = search(&whole.task(), progress).best?;
    Some(("--headroom 0".to_owned(), found))
}

fn without_a_setting(request: &Request, progress: Progress<'_>) -> Option<(String, Found)> {
    (0..request.settings.len()).find_map(|index| {
        let mut settings = request.settings.clone();
        let dropped = settings.remove(index);
        let restrictions = lean(&Restrictions::parse(&settings).ok()?);
        let task =
            Task { restrictions: &restrictions, solver_work: QUESTION_WORK, ..request.task() };
        let found = search(&task, progress).best?;
        Some((format!("without --set {dropped}"), found))
    })
}

/// Two to eight times as many, then powers of two.
fn more_gpus(request: &Request, progress: Progress<'_>) -> Option<(String, Found)> {
    [2, 3, 4, 6, 8, 16, 32, 64, 128, 256, 512, 1024].into_iter().find_map(|times| {
        let gpus = request.gpus.checked_mul(times).filter(|&gpus| gpus <= 1 << 17)?;
        let task = Task { gpus, solver_work: QUESTION_WORK, ..request.task() };
        let found = search(&task, progress).best?;
        Some((format!("--gpus {gpus}"), found))
    })
}
