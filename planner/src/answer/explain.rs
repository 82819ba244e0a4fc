//! Why a plan is what it is: the search is repeated with one thing changed at a time.

use crate::answer::report::Alternative;
use crate::pricing::cost_cache::CostCache;
use crate::pricing::priced::Placed;
use crate::request::restrictions::{Choice, Numbers, Restrictions};
use crate::request::task::SOLVER_WORK;
use crate::request::{Request, Task};
use crate::search::{Candidate, Found, Outcome, Progress, search};
use crate::until::Until;
use models::cluster::ClusterSpec;
use models::decisions::{Decisions, Offload, RecomputePolicy, Vocab};
use models::plan::Proof;
use models::schedule::ScheduleName;
use serde::Serialize;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// One alternative that was searched.
#[derive(Clone, Debug, Serialize)]
pub struct Tried {
    /// The change: a pinned decision or other hardware, such as `tp 4` or `1 GB more memory`.
    pub what: String,
    /// The fastest configuration with this change, if one is worth pricing.
    pub best: Option<Alternative>,
    /// Why there is none.
    pub why_not: Option<WhyNot>,
}

impl Tried {
    /// By what fraction of the plan's time it is slower; infinite where there is none.
    pub fn slower(&self) -> f64 {
        self.best.as_ref().map_or(f64::INFINITY, |best| best.slower)
    }
}

/// Why a change has no configuration worth pricing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WhyNot {
    /// The user's settings exclude it.
    Excluded,
    /// No combination of decisions satisfies the divisibility rules.
    DoesNotExist,
    /// Every configuration takes more than [`FAR`] times the plan's time, even with unlimited
    /// memory.
    TooSlow,
    /// Some configurations take at most [`FAR`] times the plan's time, but none of them fits.
    DoesNotFit,
    /// The time was up, or the work allowed for integer programs.
    Undecided,
}

/// Where in an explanation an alternative belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Other values of single decisions.
    Considered,
    /// Slightly better hardware.
    Bought,
    /// Other values of single decisions of which a later search found something faster.
    Later,
    /// The plain plan.
    Plain,
}

/// Told each alternative as soon as it was searched.
pub type Listener<'a> = &'a mut dyn FnMut(Part, &Tried);

/// Everything that `plan explain` finds by searching.
#[derive(Clone, Debug, Serialize)]
pub struct Explanation {
    /// Other values of single decisions, with the rest free.
    pub considered: Vec<Tried>,
    /// Slightly better hardware. What is found is slower or faster than the fastest that is known
    /// on the request's own.
    pub bought: Vec<Tried>,
    /// 1F1B with the vocabulary on the first and last stage and an even partition.
    pub plain: Tried,
}

/// Alternatives are searched up to these multiples of the plan's time in turn, until there are
/// enough. A tight cut-off lets bounds prune most of the space.
const CLOSE: [f64; 3] = [1.02, 1.08, 1.25];

/// Alternatives beyond this multiple of the plan's time are not searched: too slow is reason
/// enough.
pub const FAR: f64 = 3.0;

/// Work of integer programs for one question. An alternative need not be proven optimal.
pub(super) const QUESTION_WORK: u64 = SOLVER_WORK / 40;

/// Difference of two times, as a share, that is rounding.
const ROUNDED: f64 = 1e-6;

/// Additional memory that `plan` tries, bytes.
const MORE_BYTES: f64 = 4e9;

/// A request with the time of its plan, to be searched again with changes.
pub struct Asker<'a> {
    request: &'a Request,
    own_s: f64,
    least_s: f64,
    each: Option<Duration>,
    progress: Progress<'a>,
    /// What all searches so far priced on their way: one alternative's search may find a better one
    /// of another.
    known: Vec<Candidate>,
}

impl<'a> Asker<'a> {
    /// Prepares questions about `request`, whose plan takes `own_s`; nothing takes less than
    /// `least_s`. Each search takes `each` at most, where there is a limit. `known` is what the
    /// plan's own search priced on its way.
    pub fn new(
        request: &'a Request,
        (own_s, least_s): (f64, f64),
        each: Option<Duration>,
        progress: Progress<'a>,
        known: Vec<Candidate>,
    ) -> Self {
        Self { request, own_s, least_s, each, progress, known }
    }

    /// The fastest configuration on the request's cluster under `r`, known in at most `cutoff_s` or
    /// found below that; and what is proven of it.
    fn ask(&mut self, r: &Restrictions, cutoff_s: f64) -> (Option<Alternative>, Proof) {
        let known = self.fastest_known(r).filter(|known| known.iteration_s <= cutoff_s);
        let cutoff_s = known.as_ref().map_or(cutoff_s, |known| known.iteration_s);
        let Outcome { best, proof, passed, .. } =
            self.search(&self.request.cluster, r, cutoff_s, false);
        self.known.extend(passed);
        self.known.extend(best.clone().map(Candidate::from));
        let best =
            best.or_else(|| known.and_then(|known| self.priced(known.decisions, known.placed)));
        (best.map(|found| Alternative::new(found, self.own_s, proof.searched_gap)), proof)
    }

    fn fastest_known(&self, r: &Restrictions) -> Option<Candidate> {
        let allowed = self.known.iter().filter(|known| r.permit(&known.decisions));
        allowed.min_by(|a, b| a.iteration_s.total_cmp(&b.iteration_s)).cloned()
    }

    /// A configuration as the request's cluster runs it.
    fn priced(&self, decisions: Decisions, placed: Placed) -> Option<Found> {
        let Request { model, cluster, gpus, .. } = self.request;
        Found::new(&CostCache::new(model, cluster, *gpus), decisions, placed)
    }

    fn search(
        &mut self,
        cluster: &ClusterSpec,
        r: &Restrictions,
        cutoff_s: f64,
        ignore_memory: bool,
    ) -> Outcome {
        let asked = self.request.task();
        let own = self.each.map(|each| Instant::now() + each);
        let deadline = [own, asked.until.deadline].into_iter().flatten().min();
        let task = Task {
            cluster,
            restrictions: r,
            until: Until { deadline, ..asked.until },
            cutoff_s,
            solver_work: QUESTION_WORK,
            every_cut_work: 0,
            ignore_memory,
            // Without memory it only matters whether there is anything.
            any: ignore_memory,
            ..asked
        };
        search(&task, self.progress)
    }

    fn with(&mut self, what: String, r: &Restrictions) -> Tried {
        let (best, proof) = self.ask(r, FAR * self.own_s);
        let why_not = best.is_none().then(|| self.why_not(&proof, r));
        Tried { what, best, why_not }
    }

    /// Finds out why a search within [`FAR`] times the plan's time found nothing, by repeating it
    /// without a memory limit.
    fn why_not(&mut self, proof: &Proof, r: &Restrictions) -> WhyNot {
        if proof.candidates == 0 {
            return WhyNot::DoesNotExist;
        }
        if proof.searched_gap > 0.0 {
            return WhyNot::Undecided;
        }
        let unlimited = self.search(&self.request.cluster, r, FAR * self.own_s, true);
        match (unlimited.best, unlimited.proof.searched_gap == 0.0) {
            (Some(_), _) => WhyNot::DoesNotFit,
            (None, true) => WhyNot::TooSlow,
            (None, false) => WhyNot::Undecided,
        }
    }

    /// The `most` fastest alternatives, and whether there are proven to be no others: the best of
    /// every other pair of tp and pp, and of every other schedule at the plan's own pair. None
    /// takes more than 1.25 times the plan's time.
    pub fn alternatives(&mut self, own: &Decisions, most: usize) -> (Vec<Alternative>, bool) {
        if most == 0 {
            return (vec![], true);
        }
        let shapes = self.other_shapes(own);
        let mut kept = self.known_alternatives(&shapes, most);
        let mut complete = true;
        for within_s in CLOSE.map(|multiple| multiple * self.own_s) {
            complete = true;
            for (index, r) in shapes.iter().enumerate() {
                if self.request.task().is_stopped() {
                    complete = false;
                    break;
                }
                let worst_s = kept.get(most - 1).map_or(within_s, |(_, last)| last.iteration_s);
                let (found, proof) = self.ask(r, worst_s.min(within_s));
                complete &= proof.searched_gap == 0.0;
                if let Some(found) = found {
                    kept.retain(|(of, _)| *of != index);
                    kept.push((index, found));
                    keep_fastest(&mut kept, most);
                }
            }
            if kept.get(most - 1).is_some_and(|(_, last)| last.iteration_s <= within_s) {
                break;
            }
        }
        (kept.into_iter().map(|(_, other)| other).collect(), complete)
    }

    /// The fastest known configurations of these shapes, each with the shape's index. Nothing is
    /// known of others of their kind but what bounds all.
    fn known_alternatives(
        &self,
        shapes: &[Restrictions],
        most: usize,
    ) -> Vec<(usize, Alternative)> {
        let within_s = CLOSE[CLOSE.len() - 1] * self.own_s;
        let known = |(index, r)| {
            let known = self.fastest_known(r).filter(|known| known.iteration_s < within_s)?;
            let gap = (1.0 - self.least_s / known.iteration_s).max(0.0);
            let found = self.priced(known.decisions, known.placed)?;
            Some((index, Alternative::new(found, self.own_s, gap)))
        };
        let mut kept = shapes.iter().enumerate().filter_map(known).collect();
        keep_fastest(&mut kept, most);
        kept
    }

    /// Restrictions to try, those nearest to the plan's degrees first: good alternatives found
    /// early make the bounds prune more.
    fn other_shapes(&self, own: &Decisions) -> Vec<Restrictions> {
        let r = &self.request.restrictions;
        let layouts = self.request.task().space().contexts();
        let pairs: BTreeSet<(u64, u64)> =
            layouts.iter().map(|layout| (layout.decisions.tp, layout.decisions.pp)).collect();
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

    /// What more memory would allow, if anything: the additional bytes and the faster alternative.
    pub fn more_memory(&mut self) -> Option<(f64, Alternative)> {
        let cluster = with_memory(&self.request.cluster, MORE_BYTES);
        let (found, _) = self.gained(&cluster);
        found.filter(|found| found.slower < -1e-3).map(|found| (MORE_BYTES, found))
    }

    /// What is faster on another cluster than all that is known on the request's own. What is found
    /// may be as fast on its own: then the search, and not the cluster, is what gained.
    fn gained(&mut self, cluster: &ClusterSpec) -> (Option<Alternative>, Proof) {
        let r = &self.request.restrictions;
        let known_s = |asker: &Self| {
            let known = asker.fastest_known(r).map_or(f64::INFINITY, |known| known.iteration_s);
            known.min(asker.own_s)
        };
        let Outcome { best, proof, .. } = self.search(cluster, r, known_s(self), false);
        let Some(found) = best else { return (None, proof) };
        let here = self.priced(found.decisions.clone(), found.placed.clone());
        self.known.extend(here.filter(|here| here.priced.fits).map(Candidate::from));
        let other = Alternative::new(found, known_s(self), proof.searched_gap);
        (Some(other).filter(|other| other.slower < 0.0), proof)
    }

    /// Runs all searches of the explanation, in the order of [`Part`].
    pub fn explain(&mut self, own: &Decisions, listener: Listener<'_>) -> Explanation {
        let (others, mut considered) = self.considered(own, listener);
        let bought = self.bought(listener);
        let plain = self.plain();
        for ((_, r), tried) in others.iter().zip(&mut considered) {
            let Some(known) = self.fastest_known(r) else { continue };
            let slower = known.iteration_s / self.own_s - 1.0;
            if slower < tried.slower() - ROUNDED
                && let Some(found) = self.priced(known.decisions, known.placed)
            {
                // What its own search proved bounds this one, too.
                let proven_s =
                    tried.best.as_ref().map_or(0.0, |best| best.iteration_s * (1.0 - best.gap));
                let gap = (1.0 - proven_s.max(self.least_s) / known.iteration_s).max(0.0);
                tried.best = Some(Alternative::new(found, self.own_s, gap));
                tried.why_not = None;
                listener(Part::Later, tried);
            }
        }
        listener(Part::Plain, &plain);
        Explanation { considered, bought, plain }
    }

    /// Other values with their restrictions, and what was found of each.
    fn considered(
        &mut self,
        own: &Decisions,
        listener: Listener<'_>,
    ) -> (Vec<(String, Restrictions)>, Vec<Tried>) {
        let others = self.other_values(own);
        let tried = others.iter().map(|(what, r)| {
            let tried = self.with(what.clone(), r);
            listener(Part::Considered, &tried);
            tried
        });
        let tried = tried.collect();
        (others, tried)
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
        for recompute in [RecomputePolicy::None, RecomputePolicy::Selective, RecomputePolicy::Full]
        {
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
        let layouts = self.request.task().space().contexts();
        let values = |of: fn(&Decisions) -> u64| -> Vec<u64> {
            let all: BTreeSet<u64> = layouts.iter().map(|layout| of(&layout.decisions)).collect();
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

    /// Hardware with a little more memory, or a little more bandwidth on one link level.
    fn bought(&mut self, listener: Listener<'_>) -> Vec<Tried> {
        let cluster = &self.request.cluster;
        let mut better: Vec<(String, ClusterSpec)> = vec![];
        better.push(("1 GB more memory".to_owned(), with_memory(cluster, 1e9)));
        for (index, level) in cluster.levels.iter().enumerate() {
            let mut faster = cluster.clone();
            faster.levels[index].bytes_per_s *= 1.1;
            better.push((format!("10 % more {} bandwidth", level.name), faster));
        }
        let mut tried = vec![];
        for (what, cluster) in better {
            let (best, proof) = self.gained(&cluster);
            let open = best.is_none() && proof.searched_gap > 0.0;
            let found = Tried { what, best, why_not: open.then_some(WhyNot::Undecided) };
            listener(Part::Bought, &found);
            tried.push(found);
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

/// Number of doublings and halvings between degrees.
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

/// Sorts alternatives by time and keeps the first.
fn keep_fastest(kept: &mut Vec<(usize, Alternative)>, most: usize) {
    kept.sort_by(|(_, a), (_, b)| a.iteration_s.total_cmp(&b.iteration_s));
    kept.truncate(most);
}
