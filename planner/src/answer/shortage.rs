//! Why nothing fits and what would, and the least memory in which anything fits.

use super::explain::QUESTION_WORK;
use crate::request::restrictions::{Choice, Numbers, Restrictions};
use crate::request::{Request, Task};
use crate::search::{Empty, Found, Outcome, Progress, least_activations, search};
use models::cluster::{AttentionKernel, ClusterSpec};
use models::decisions::{Offload, Recompute, RecomputePolicy};
use models::formulas::activation::least_memory_group;
use models::layer::{self, Split};
use models::schedule::ScheduleName;
use std::collections::BTreeSet;

/// Share of the time left for finding the least memory.
const NARROWING: f64 = 0.6;

/// Why nothing fits, and what would.
#[derive(Clone, Debug)]
pub struct Shortage {
    /// A configuration that needs little memory. `None` where none exists.
    pub leanest: Option<Found>,
    /// In less than this share of that memory nothing is known to fit: 0.99, or less where the time
    /// was up.
    pub leanest_to: f64,
    /// Changes that make it fit: the text of each and the configuration that then fits.
    pub remedies: Vec<(String, Found)>,
    /// Whether all changes were tried before the time was up.
    pub complete: bool,
}

/// Finds by how much memory falls short, and the smallest changes that would suffice.
///
/// Only [`least_activations`] are searched.
pub fn shortage(request: &Request, progress: Progress<'_>) -> Shortage {
    let corner = Request { restrictions: least_activations(&request.task()), ..request.clone() };
    let (leanest, leanest_to) = match leanest(&corner.with_share(NARROWING), progress) {
        Some((found, to)) => (Some(found), to),
        None => (None, 0.0),
    };
    let mut remedies: Vec<(String, Found)> = vec![];
    remedies.extend(without_headroom(&corner, progress));
    remedies.extend(activations_on_host(&corner, progress));
    remedies.extend(leanest.as_ref().and_then(|found| in_groups(&corner, found, progress)));
    remedies.extend(without_a_setting(&corner, progress));
    remedies.extend(more_gpus(&corner, progress));
    let complete = !request.task().is_stopped();
    Shortage { leanest, leanest_to, remedies, complete }
}

/// Doubles device memory until something fits, then narrows it down. With it the share of that
/// memory in which nothing fits.
fn leanest(request: &Request, progress: Progress<'_>) -> Option<(Found, f64)> {
    let (mut low, mut factor) = (1.0, 2.0);
    while factor < 1e6 && !request.task().is_stopped() {
        match any_with_factor(request, factor, progress) {
            Ok(found) => {
                let (low, high, found) = close_in(request, low, (factor, found), progress);
                return Some((found, low / high));
            }
            Err(Empty::Proven) => low = factor,
            Err(Empty::Undecided) => {}
        }
        factor *= 2.0;
    }
    None
}

/// The fastest configuration in the least device memory that anything fits into, to 1 % or as far
/// as the time reached; and the bytes below which nothing fits.
///
/// # Errors
/// Nothing fits into the actual memory, or the time did not show.
pub fn least_memory(request: &Request, progress: Progress<'_>) -> Result<(Outcome, f64), Empty> {
    let cluster = &request.cluster;
    let found = any_with_factor(request, 1.0, progress)?;
    let low = (cluster.reserved_bytes() / cluster.device.hbm_bytes).max(1e-3);
    let narrowing = request.with_share(NARROWING);
    let (low, factor, found) = close_in(&narrowing, low, (1.0, found), progress);
    let cluster = with_factor(request, factor);
    let least_bytes = with_factor(request, low).usable_bytes() + cluster.reserved_bytes();
    let outcome = search(&Task { cluster: &cluster, ..request.task() }, progress);
    // Where the time is up, nothing is proven of the configuration that was found on the way.
    Ok((Outcome { best: outcome.best.or(Some(found)), ..outcome }, least_bytes))
}

/// Bisects between a factor of device memory that is too little and one that is enough, to 1 % or
/// until the time is up: the largest factor that is proven to be too little, and the least that is
/// enough with what fits.
fn close_in(
    request: &Request,
    mut low: f64,
    enough: (f64, Found),
    progress: Progress<'_>,
) -> (f64, f64, Found) {
    let (mut high, mut found) = enough;
    let mut tried = low;
    while high > 1.01 * tried {
        let middle = (tried * high).sqrt();
        match any_with_factor(request, middle, progress) {
            Ok(leaner) => (high, found) = (middle, leaner),
            Err(Empty::Proven) => (low, tried) = (middle, middle),
            Err(Empty::Undecided) => tried = middle,
        }
        if request.task().is_stopped() {
            break;
        }
    }
    (low, high, found)
}

fn with_factor(request: &Request, factor: f64) -> ClusterSpec {
    let mut cluster = request.cluster.clone();
    cluster.device.hbm_bytes *= factor;
    cluster
}

/// Anything that fits into the device memory times a factor.
fn any_with_factor(request: &Request, factor: f64, progress: Progress<'_>) -> Result<Found, Empty> {
    let cluster = with_factor(request, factor);
    let task = Task {
        cluster: &cluster,
        any: true,
        solver_work: QUESTION_WORK,
        every_cut_work: 0,
        ..request.task()
    };
    search(&task, progress).found()?.best.ok_or(Empty::Proven)
}

fn without_headroom(request: &Request, progress: Progress<'_>) -> Option<(String, Found)> {
    if request.headroom == 0.0 {
        return None;
    }
    let whole = request.without_headroom();
    let found = search(&whole.task(), progress).best?;
    Some(("--headroom 0".to_owned(), found))
}

/// Activations on the host, which are not searched unless set.
fn activations_on_host(request: &Request, progress: Progress<'_>) -> Option<(String, Found)> {
    if request.restrictions.offload.is_restricted() {
        return None;
    }
    let offload = Choice::of(&[Offload::Activations]);
    let restrictions = Restrictions { offload, ..request.restrictions.clone() };
    let found = search(&question(request, &restrictions), progress).best?;
    Some(("--set offload=activations".to_owned(), found))
}

/// The search for what fits under other restrictions.
fn question<'a>(request: &'a Request, restrictions: &'a Restrictions) -> Task<'a> {
    Task { restrictions, solver_work: QUESTION_WORK, every_cut_work: 0, ..request.task() }
}

/// Full recomputation of several layers from one input: of as many as needs least memory.
fn in_groups(
    request: &Request,
    leanest: &Found,
    progress: Progress<'_>,
) -> Option<(String, Found)> {
    let (model, d) = (&request.model, &leanest.decisions);
    let groups = &request.restrictions.recompute_group;
    if d.recompute != RecomputePolicy::Full || groups.is_restricted() {
        return None;
    }
    // Dense layers, if there are any beside mixtures, come first and are few.
    let (kind, split) = (model.layer_kind(model.layers - 1), Split::of(d));
    let fused = request.cluster.software.attention == AttentionKernel::Flash;
    let bytes = |option| layer::saved_bytes(model, kind, &split, d.dtype, fused, option);
    let layers = model.layers as f64 / d.pp as f64;
    let in_flight = match d.schedule {
        ScheduleName::GPipe | ScheduleName::LoopedBfs => d.micro_batches,
        _ => d.pp.min(d.micro_batches),
    } as f64;
    let (input, values) = (bytes(Recompute::Full), bytes(Recompute::None));
    let least = least_memory_group(layers, in_flight, input, values);
    let sizes = BTreeSet::from([least.floor(), least.ceil()].map(|size| size as u64));
    sizes.into_iter().filter(|&size| size > 1).find_map(|size| {
        let recompute_group = Numbers::only(size);
        let restrictions = Restrictions { recompute_group, ..request.restrictions.clone() };
        let found = search(&question(request, &restrictions), progress).best?;
        Some((format!("--set recompute_group={size}"), found))
    })
}

fn without_a_setting(request: &Request, progress: Progress<'_>) -> Option<(String, Found)> {
    let mut all = (0..request.settings.len()).take_while(|_| !request.task().is_stopped());
    all.find_map(|index| {
        let mut settings = request.settings.clone();
        let dropped = settings.remove(index);
        let narrowed = request.narrowed_by(&settings).ok()?;
        let restrictions = least_activations(&Task { restrictions: &narrowed, ..request.task() });
        let found = search(&question(request, &restrictions), progress).best?;
        Some((format!("without --set {dropped}"), found))
    })
}

/// Two to eight times as many GPUs, then powers of two.
fn larger_numbers(request: &Request) -> impl Iterator<Item = u64> {
    let all = [2, 3, 4, 6, 8, 16, 32, 64, 128, 256, 512, 1024].into_iter();
    let gpus = request.gpus;
    all.filter_map(move |times| gpus.checked_mul(times)).filter(|&gpus| gpus <= 1 << 17)
}

/// The most GPUs that are tried where nothing fits.
pub fn most_gpus(request: &Request) -> u64 {
    larger_numbers(request).last().unwrap_or(request.gpus)
}

fn more_gpus(request: &Request, progress: Progress<'_>) -> Option<(String, Found)> {
    let all = larger_numbers(request);
    all.take_while(|_| !request.task().is_stopped()).find_map(|gpus| {
        let task = Task { gpus, solver_work: QUESTION_WORK, every_cut_work: 0, ..request.task() };
        let found = search(&task, progress).best?;
        Some((format!("--gpus {gpus} (fewer may do)"), found))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::flags::Flags;

    fn shortage_of(model: &str, gpus: u64, settings: &[&str]) -> Shortage {
        let settings = settings.iter().map(ToString::to_string).collect();
        let flags = Flags { model: model.to_owned(), gpus, settings, ..Flags::default() };
        shortage(&Request::new(&flags).expect("it is shipped"), &mut |_| {})
    }

    fn changes(found: &Shortage) -> Vec<&str> {
        found.remedies.iter().map(|(change, _)| change.as_str()).collect()
    }

    /// 1F1B needs least memory, and does not exist with post-validation.
    #[test]
    fn what_is_asked_for_stays_possible() {
        let found = shortage_of("llama70b", 4, &["post_validation=true"]);
        assert!(found.leanest.as_ref().is_some_and(|lean| lean.decisions.post_validation));
        assert!(changes(&found).iter().any(|change| change.starts_with("--gpus 8")), "{found:?}");
    }

    #[test]
    fn activations_on_the_host_are_a_way_out() {
        let found = shortage_of("llama8b", 8, &["schedule=gpipe"]);
        assert!(changes(&found).contains(&"--set offload=activations"), "{found:?}");
    }
}
