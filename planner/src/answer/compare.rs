//! Comparison of two schedules: where each pipeline rank's time goes.

use crate::answer::recheck::placed_of;
use crate::answer::text::{bytes, seconds, wrapped};
use crate::partition::Scratch;
use crate::pricing::Configuration;
use crate::pricing::cost_cache::CostCache;
use crate::pricing::priced::{Placed, Priced};
use crate::request::restrictions::{Choice, Numbers, Restrictions};
use crate::request::{Request, Task};
use crate::search::{Found, search};
use crate::simulate::{LEGEND, Span, Timeline};
use models::decisions::{Decisions, MoeOverlap};
use models::plan::Plan;
use models::schedule::{PassKind, ScheduleName};
use serde::Serialize;
use std::fmt::Write;

/// Pipeline ranks that are drawn and listed.
const SHOWN: usize = 16;

/// How a pipeline rank spends the makespan: work and waits add up to it. Units are the timeline's.
/// For a plan they are seconds, and activations are bytes. In `plan schedule` they are units of a
/// pass, and activations are micro-batches of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Share {
    /// Time in passes.
    pub work: f64,
    /// Idle time before its first backward.
    pub warm_up_wait: f64,
    /// Idle time between its first backward and its last forward.
    pub steady_wait: f64,
    /// Idle time after its last forward.
    pub cooldown_wait: f64,
    /// Most activations held at once.
    pub peak_held: f64,
}

impl Share {
    /// Parts of the makespan, with the words of the sentence for each.
    fn parts(&self) -> [(&'static str, f64); 4] {
        [
            ("works", self.work),
            ("waits in warm-up", self.warm_up_wait),
            ("waits in between", self.steady_wait),
            ("waits in the cooldown", self.cooldown_wait),
        ]
    }
}

/// One of the two schedules compared.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Side {
    /// Its name.
    pub schedule: ScheduleName,
    /// End of its last pass.
    pub makespan: f64,
    /// By pipeline rank.
    #[serde(rename = "devices")]
    pub ranks: Vec<Share>,
    #[serde(skip)]
    timeline: Timeline,
}

/// One schedule compared with another.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// The schedule asked about.
    pub of: Side,
    /// The schedule it is compared with.
    pub against: Side,
}

/// Formats of times and activations.
#[derive(Clone, Copy)]
pub struct Units {
    /// Format of a time.
    pub time: fn(f64) -> String,
    /// Format of activations.
    pub held: fn(f64) -> String,
}

/// Seconds and bytes.
pub const SECONDS_AND_BYTES: Units = Units { time: seconds, held: |held| bytes(held as u64) };

impl Side {
    /// A run of a schedule in which rank `i` holds at most `held[i]`.
    pub fn new(schedule: ScheduleName, timeline: &Timeline, held: &[f64]) -> Self {
        let makespan = timeline.makespan_s;
        let ranks = timeline.spans.iter().zip(held);
        let ranks = ranks.map(|(spans, &held)| share(spans, makespan, held)).collect();
        Self { schedule, makespan, ranks, timeline: timeline.clone() }
    }

    fn mean(&self, part: usize) -> f64 {
        let sum: f64 = self.ranks.iter().map(|share| share.parts()[part].1).sum();
        sum / self.ranks.len().max(1) as f64
    }

    fn most_held(&self) -> f64 {
        self.ranks.iter().map(|share| share.peak_held).fold(0.0, f64::max)
    }
}

fn share(spans: &[Span], makespan: f64, peak_held: f64) -> Share {
    let backwards = spans.iter().filter(|s| matches!(s.pass.kind, PassKind::B | PassKind::BW));
    let warm = backwards.map(|span| span.start_s).fold(makespan, f64::min);
    let forwards = spans.iter().filter(|span| span.pass.kind == PassKind::F);
    let cooldown = forwards.map(|span| span.end_s).fold(warm, f64::max);
    let mut share = Share { peak_held, ..Share::default() };
    let mut idle = |from: f64, to: f64| {
        let within = |least: f64, most: f64| (to.min(most) - from.max(least)).max(0.0);
        // Gaps within rounding errors are no waits.
        if to - from > 1e-12 * makespan {
            share.warm_up_wait += within(0.0, warm);
            share.steady_wait += within(warm, cooldown);
            share.cooldown_wait += within(cooldown, makespan);
        }
    };
    let mut done = 0.0_f64;
    for span in spans {
        idle(done, span.start_s);
        done = done.max(span.end_s);
    }
    idle(done, makespan);
    share.work = makespan - share.warm_up_wait - share.steady_wait - share.cooldown_wait;
    share
}

impl Comparison {
    /// Both timelines, the table and the sentence, in so many columns.
    pub fn text(&self, units: Units, columns: usize) -> String {
        let mut text = String::new();
        let sides = [&self.of, &self.against];
        // Both alike, to be compared.
        let whole = sides.iter().all(|side| side.timeline.fits(columns));
        let parts = if whole { "" } else { ", its start // its end" };
        for side in sides {
            let drawn = side.timeline.drawing(columns, SHOWN, whole);
            text += &format!("{}{parts}\n{drawn}\n", side.schedule);
        }
        text += &format!("{}\n", wrapped(LEGEND, columns));
        text + &self.table(units) + "\n" + &wrapped(&self.sentence(units), columns)
    }

    /// One row for each rank and schedule.
    fn table(&self, units: Units) -> String {
        let heads = ["rank", "schedule", "work", "warm-up", "steady", "cooldown", "held"];
        let mut rows: Vec<[String; 7]> = vec![heads.map(str::to_owned)];
        let ranks = self.of.ranks.iter().zip(&self.against.ranks).take(SHOWN);
        for (rank, (of, against)) in ranks.enumerate() {
            for (side, share) in [(&self.of, of), (&self.against, against)] {
                let [work, warm, steady, cooldown] =
                    share.parts().map(|(_, part)| (units.time)(part));
                let held = (units.held)(share.peak_held);
                let name = side.schedule.to_string();
                rows.push([rank.to_string(), name, work, warm, steady, cooldown, held]);
            }
        }
        let width =
            |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: [usize; 7] = std::array::from_fn(width);
        let mut text =
            String::from("where each rank's time goes (warm-up, steady, cooldown: waiting)\n");
        for row in &rows {
            let cells = row.iter().zip(widths);
            let line = cells.fold(String::new(), |mut line, (cell, width)| {
                // Writing to a string cannot fail.
                let _ = write!(line, "  {cell:>width$}");
                line
            });
            text += &(line.trim_end().to_owned() + "\n");
        }
        text
    }

    /// Where the faster schedule gains, as means over the ranks. The gains add up to the
    /// difference.
    pub fn sentence(&self, units: Units) -> String {
        let (fast, slow) = if self.of.makespan <= self.against.makespan {
            (&self.of, &self.against)
        } else {
            (&self.against, &self.of)
        };
        let saved = slow.makespan - fast.makespan;
        let noise = 1e-9 * slow.makespan;
        let held = format!(
            "it holds {} at most, {} {}",
            (units.held)(fast.most_held()),
            slow.schedule,
            (units.held)(slow.most_held())
        );
        if saved <= noise {
            return format!("{} is as long as {}; {held}.", fast.schedule, slow.schedule);
        }
        let names = Share::default().parts().map(|(name, _)| name);
        let mut gains: Vec<(&str, f64)> =
            (0..4).map(|part| (names[part], slow.mean(part) - fast.mean(part))).collect();
        gains.retain(|(_, gain)| gain.abs() > noise);
        gains.sort_by(|a, b| b.1.total_cmp(&a.1));
        let word = |(name, gain): &(&str, f64)| {
            let (verb, place) = name.split_once(' ').unwrap_or((name, ""));
            let amount = (units.time)(gain.abs());
            let which = if *gain > 0.0 { "less" } else { "more" };
            format!("{verb} {amount} {which} {place}").trim_end().to_owned()
        };
        let words: Vec<String> = gains.iter().map(word).collect();
        format!(
            "{} is {} ({:.1} %) shorter than {}: on average a rank {}; {held}.",
            fast.schedule,
            (units.time)(saved),
            100.0 * saved / slow.makespan,
            slow.schedule,
            words.join(", ")
        )
    }
}

/// Compares a plan's schedule with 1F1B at the same degrees, micro-batch and state, with the best
/// partition for it. `None` where there is no pipeline, or the plan already has 1F1B, or 1F1B does
/// not fit.
pub fn against_one_f_one_b(request: &Request, plan: &Plan) -> Option<Comparison> {
    let d = &plan.decisions;
    if d.pp == 1 || d.schedule == ScheduleName::OneFOneB {
        return None;
    }
    let cache = CostCache::new(&request.model, &request.cluster, request.gpus);
    let of = side(&cache, d, &placed_of(&cache, &plan.stages), plan)?;
    let restrictions = same_but_schedule(&request.restrictions, d);
    let task = Task { restrictions: &restrictions, every_cut_work: 0, ..request.task() };
    let Found { decisions, placed, .. } = search(&task, &mut |_| {}).best?;
    let against = side(&cache, &decisions, &placed, plan)?;
    Some(Comparison { of, against })
}

fn side(cache: &CostCache<'_>, d: &Decisions, placed: &Placed, plan: &Plan) -> Option<Side> {
    let configuration = Configuration::new(cache, d.clone()).ok()?;
    let own = plan.own_order().ok().flatten().filter(|_| *d == plan.decisions);
    let configuration = match &own {
        Some(order) => configuration.in_order(order.clone()),
        None => configuration,
    };
    let timeline = configuration.timeline(placed, own)?;
    let held =
        activations(&configuration.price(placed, &mut Scratch::default()), configuration.ranks());
    Some(Side::new(d.schedule, &timeline, &held))
}

/// Activations at each rank's fullest moment, bytes.
fn activations(priced: &Priced, ranks: usize) -> Vec<f64> {
    let mut held = vec![0.0; ranks];
    for stage in priced.stages.iter().chain(&priced.copies) {
        held[stage.rank] += stage.memory.activations;
    }
    held
}

/// Restrictions that pin all decisions of a plan but the schedule and what follows from it.
fn same_but_schedule(r: &Restrictions, d: &Decisions) -> Restrictions {
    Restrictions {
        tp: Numbers::only(d.tp),
        pp: Numbers::only(d.pp),
        vpp: Numbers::only(1),
        cp: Numbers::only(d.cp),
        cp_style: Choice::of(&[d.cp_style]),
        cp_ulysses: Numbers::only(d.cp_ulysses),
        dp: Numbers::only(d.dp),
        dp_shard: Numbers::only(d.dp_shard),
        ep: Numbers::only(d.ep),
        etp: Numbers::only(d.etp),
        zero_stage: Numbers::only(u64::from(d.zero_stage)),
        sequence_parallel: Choice::of(&[d.sequence_parallel]),
        fused_loss: Choice::of(&[d.fused_loss]),
        micro_batch: Numbers::only(d.micro_batch),
        schedule: Choice::of(&[ScheduleName::OneFOneB]),
        // 1F1B has no pairs.
        moe_overlap: Choice::of(&[match d.moe_overlap {
            MoeOverlap::Pair => MoeOverlap::None,
            other => other,
        }]),
        moe_overlap_degree: Numbers::only(d.moe_overlap_degree),
        dtype: Choice::of(&[d.dtype]),
        offload: Choice::of(&[d.offload]),
        dp_reduction: Choice::of(&[d.dp_reduction]),
        dp_bucket_mib: Numbers::only(d.dp_bucket_mib),
        recompute_group: Numbers::only(d.recompute_group),
        rank_order: Choice::of(&[d.rank_order]),
        post_validation: Choice::default(),
        ..r.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::{PairTime, Request as Run};

    const PLAIN: Units = Units { time: |time| format!("{time}"), held: |held| format!("{held}") };

    fn side(schedule: ScheduleName, stages: usize, micro_batches: usize) -> Side {
        let request = Run {
            schedule,
            stages,
            micro_batches,
            chunks: schedule.chunk_rule().nearest(1),
            forward: 1.0,
            backward: 1.0,
            weight: 1.0,
            latency: 0.0,
            vocab: None,
            pair: PairTime::Sum,
            memory: Default::default(),
        };
        let (_, timeline) = request.run().unwrap();
        Side::new(schedule, &timeline, &timeline.peak_activations_until_w)
    }

    #[test]
    fn shares_add_up_to_the_makespan() {
        for schedule in ScheduleName::ALL {
            let side = side(schedule, 4, 8);
            for share in &side.ranks {
                let sum: f64 = share.parts().iter().map(|(_, part)| part).sum();
                assert!((sum - side.makespan).abs() < 1e-9, "{schedule}: {share:?}");
                assert!(share.work > 0.0 && share.parts().iter().all(|(_, part)| *part > -1e-9));
            }
        }
    }

    /// Computed by hand: four ranks and eight micro-batches of three units each.
    #[test]
    fn waits_of_1f1b_are_those_computed_by_hand() {
        let one = side(ScheduleName::OneFOneB, 4, 8);
        assert_eq!(one.makespan, 33.0);
        // The last rank receives its first micro-batch after three forwards. When it ends, six
        // units of backwards are left on the others.
        let last = one.ranks[3];
        assert_eq!((last.work, last.warm_up_wait, last.cooldown_wait), (24.0, 3.0, 6.0));
        // The first rank has done four forwards when its first backward may start, at 4 + 3 · 2. It
        // spends the rest of its nine idle units after its last forward.
        let first = one.ranks[0];
        assert_eq!((first.work, first.warm_up_wait, first.steady_wait), (24.0, 6.0, 0.0));
        assert_eq!((first.cooldown_wait, first.peak_held), (3.0, 4.0));
    }

    #[test]
    fn the_sentence_says_where_the_faster_one_gains() {
        let comparison = Comparison {
            of: side(ScheduleName::OneFOneB, 4, 8),
            against: side(ScheduleName::ZbH1, 4, 8),
        };
        let sentence = comparison.sentence(PLAIN);
        assert!(sentence.starts_with("zb_h1 is 6 (18.2 %) shorter than 1f1b"), "{sentence}");
        assert!(sentence.contains("less in the cooldown"), "{sentence}");
        assert!(sentence.contains("it holds 4 at most, 1f1b 4"), "{sentence}");
        let same = Comparison { of: comparison.of.clone(), against: comparison.of };
        assert!(same.sentence(PLAIN).contains("as long as"));
    }
}
