//! Turns flags as typed into a finished [`Request`].

use super::restrictions::{Choice, Restrictions, decision_of};
use super::task::EVERY_CUT_WORK;
use super::{DEFAULT_HEADROOM, Request, conflicts};
use models::cluster::{self, ClusterSpec};
use models::decisions::Offload;
use models::input::{InputError, Source, nearest};
use models::model::{self, MAX_IMBALANCE, ModelSpec};
use models::plan::{ClusterFigures, Inputs, MOST_HEADROOM, Objective, Plan};
use models::program::unsupported_model;
use models::text::figure;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

/// The default cluster.
pub const DEFAULT_CLUSTER: &str = "dgx_h100";

/// Largest number of GPUs that a plan is made for.
pub const MOST_GPUS: u64 = 1 << 20;

/// Flags as typed.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    /// Path, shipped name, `config.json`, or `-`.
    pub model: String,
    /// Path or shipped name.
    pub cluster: Option<String>,
    /// GPUs.
    pub gpus: u64,
    /// Sequences an iteration.
    pub global_batch: Option<u64>,
    /// Tokens a sequence.
    pub seq_len: Option<u64>,
    /// Percent of each device's memory to leave free.
    pub headroom: Option<f64>,
    /// Tokens to train on, such as `15T`.
    pub tokens: Option<String>,
    /// Every `--set`.
    pub settings: Vec<String>,
    /// Tokens of the fullest expert-parallel rank over the mean.
    pub expert_imbalance: Option<f64>,
    /// Only what our own trainer can run.
    pub runnable: bool,
}

impl Request {
    /// Finishes flags.
    ///
    /// # Errors
    /// What cannot be read, does not exist, or does not go together; with what would.
    pub fn new(flags: &Flags) -> Result<Self, InputError> {
        let (model, file) = read_model(&flags.model)?;
        let gpus = gpu_count(flags.gpus)?;
        let cluster = read_cluster(flags.cluster.as_deref().unwrap_or(DEFAULT_CLUSTER))?;
        let headroom = headroom(flags.headroom)?;
        let cluster = cluster.shared_by(gpus).with_headroom(headroom);
        let model = model.with_run(flags.seq_len, flags.global_batch)?;
        let restrictions = restrictions(&flags.settings, flags.runnable, &cluster, &model)?;
        let request = Self {
            stop: Arc::default(),
            deadline: None,
            every_cut_work: EVERY_CUT_WORK,
            processors: Arc::default(),
            objective: Objective::Time,
            model: with_imbalance(
                with_capacity(model, restrictions.capacity_factor)?,
                flags.expert_imbalance,
            )?,
            file,
            cluster,
            gpus,
            headroom,
            tokens: flags.tokens.as_deref().map(token_count).transpose()?,
            settings: flags.settings.clone(),
            runnable: flags.runnable,
            restrictions,
        };
        conflicts::check(&request)?;
        Ok(request)
    }
}

/// What a CPU's search leaves out unless the user asks: no price covers what the collectives of
/// vocabulary passes cost there.
const PRICED_ON_CPUS: &str = "vocab=first_last,redistribute,tensor";

/// The user's settings as restrictions. Defaults are added where the user says nothing: no
/// offloading without host memory, and on clusters that only our own trainer runs on, what it can
/// run.
///
/// # Errors
/// A setting with a value that its decision does not take.
pub fn restrictions(
    settings: &[String],
    runnable: bool,
    cluster: &ClusterSpec,
    model: &ModelSpec,
) -> Result<Restrictions, InputError> {
    let asked = settings.iter().any(|setting| decision_of(setting) == "vocab");
    let added = (cluster.any_gpu_count && !asked).then_some(PRICED_ON_CPUS);
    let all: Vec<&str> = settings.iter().map(String::as_str).chain(added).collect();
    let mut found = Restrictions::typed(&all)?;
    if found.offload.is_restricted()
        && found.offload.allows(Offload::Activations)
        && found.offload.pinned().is_none()
    {
        let message = "--set offload=activations cannot be one of several values";
        return Err(InputError::new(message).help("set offload=activations alone, or leave it out"));
    }
    let ours = cluster.any_gpu_count && unsupported_model(model).is_empty();
    found.runnable = runnable || ours;
    if cluster.host.memory_bytes <= 0.0 && !found.offload.is_restricted() {
        found.offload = Choice::of(&[Offload::None]);
    }
    Ok(found)
}

/// The request that a plan answers, on the named cluster or the shipped one of the plan's name.
///
/// # Errors
/// There is no such cluster, or the plan was made for another one of that name.
pub fn request_of(plan: &Plan, cluster: Option<&str>) -> Result<Request, InputError> {
    let name = &plan.inputs.cluster.name;
    let help = "give the plan's own with --cluster FILE, or plan again";
    let Some(request) = request_on(plan, cluster)? else {
        return Err(InputError::new(format!("no cluster `{name}` is shipped")).help(help));
    };
    if request.cluster.name != *name {
        let message = format!(
            "the plan was made for `{name}`, and --cluster names `{}`",
            request.cluster.name
        );
        return Err(InputError::new(message).help(help));
    }
    if ClusterFigures::new(&request.cluster, &plan.decisions) != plan.inputs.cluster {
        let message = format!("the plan was made for another `{name}` than this one");
        return Err(InputError::new(message).help(help));
    }
    Ok(request)
}

/// The request that a plan answers, whether or not the cluster's figures are those of the plan;
/// `None` where no cluster is named and none of the plan's name is shipped. A plan's text is never
/// a path.
///
/// # Errors
/// The cluster named cannot be read, or the plan's settings cannot be.
pub fn request_on(plan: &Plan, cluster: Option<&str>) -> Result<Option<Request>, InputError> {
    let inputs = &plan.inputs;
    let found = match cluster {
        Some(named) => Some(read_cluster(named)?),
        None => cluster::shipped(&inputs.cluster.name).transpose()?,
    };
    let Some(cluster) = found else { return Ok(None) };
    let cluster = cluster.shared_by(inputs.gpus);
    let restrictions = restrictions(&inputs.settings, inputs.runnable, &cluster, &inputs.model)?;
    let model = with_capacity(inputs.model.clone(), restrictions.capacity_factor)?;
    Ok(Some(Request {
        stop: Arc::default(),
        deadline: None,
        every_cut_work: EVERY_CUT_WORK,
        processors: Arc::default(),
        objective: inputs.objective,
        model,
        file: None,
        cluster: cluster.with_headroom(inputs.headroom),
        gpus: inputs.gpus,
        headroom: inputs.headroom,
        tokens: inputs.tokens,
        settings: inputs.settings.clone(),
        runnable: inputs.runnable,
        restrictions,
    }))
}

/// The request that a plan answers, for another number of GPUs and with more settings. These take
/// the place of the plan's own settings of the same decisions. Whether that number can be split
/// over the model is not checked.
///
/// # Errors
/// The cluster named cannot be read or is not shipped, a setting cannot be, or no such number of
/// GPUs.
pub fn request_from(
    plan: &Plan,
    cluster: Option<&str>,
    gpus: Option<u64>,
    settings: &[String],
) -> Result<Request, InputError> {
    let gpus = gpu_count(gpus.unwrap_or(plan.inputs.gpus))?;
    let anew = |own: &&String| settings.iter().any(|new| decision_of(new) == decision_of(own));
    let kept = plan.inputs.settings.iter().filter(|own| !anew(own));
    let settings = kept.chain(settings).cloned().collect();
    let inputs = Inputs { gpus, settings, ..plan.inputs.clone() };
    let changed = Plan { inputs, ..plan.clone() };
    let request = request_on(&changed, cluster)?.ok_or_else(|| {
        let name = &plan.inputs.cluster.name;
        InputError::new(format!("no cluster `{name}` is shipped"))
            .help("give the plan's own with --cluster FILE")
    })?;
    conflicts::unknown_format(&request)?;
    Ok(request)
}

/// A percentage as a fraction.
fn headroom(percent: Option<f64>) -> Result<f64, InputError> {
    let Some(percent) = percent else { return Ok(DEFAULT_HEADROOM) };
    let most = 100.0 * MOST_HEADROOM;
    let refused = || InputError::new(format!("--headroom cannot be {}", figure(percent)));
    let valid = (0.0..=most).contains(&percent);
    let help = format!("valid: 0 to {most}, percent of a device's memory");
    valid.then_some(percent / 100.0).ok_or_else(|| refused().help(help))
}

/// Writes a pinned capacity factor into the model: it changes what the experts compute.
fn with_capacity(mut model: ModelSpec, pinned: Option<f64>) -> Result<ModelSpec, InputError> {
    let Some(factor) = pinned else { return Ok(model) };
    let Some(moe) = &mut model.moe else {
        return Err(InputError::new(format!(
            "--set capacity_factor={factor}: {} has no experts",
            model.name
        ))
        .help("leave it out: only mixture-of-experts models have a capacity"));
    };
    let most = moe.experts as f64 / moe.top_k as f64;
    if factor > most {
        return Err(InputError::new(format!(
            "--set capacity_factor={}: every expert holds all tokens at {most}",
            figure(factor)
        ))
        .help(format!("valid: above 0, to {most} (experts / top_k of {})", model.name)));
    }
    moe.capacity_factor = Some(factor);
    Ok(model)
}

/// Writes the load of the fullest rank into the model.
fn with_imbalance(mut model: ModelSpec, imbalance: Option<f64>) -> Result<ModelSpec, InputError> {
    let Some(imbalance) = imbalance else { return Ok(model) };
    let given = figure(imbalance);
    let refused = |why: &str| InputError::new(format!("--expert-imbalance {given}: {why}"));
    let Some(moe) = &mut model.moe else {
        return Err(refused(&format!("{} has no experts", model.name)).help("leave it out"));
    };
    if !(1.0..=MAX_IMBALANCE).contains(&imbalance) {
        let help = format!("valid: 1 to {MAX_IMBALANCE}, the fullest rank's tokens over the mean");
        return Err(refused("no such load").help(help));
    }
    if let Some(factor) = moe.capacity_factor {
        return Err(refused(&format!("tokens are padded to a capacity of {factor}"))
            .help("leave one of the two out"));
    }
    moe.imbalance = imbalance;
    Ok(model)
}

fn gpu_count(gpus: u64) -> Result<u64, InputError> {
    let refused = || InputError::new(format!("--gpus cannot be {gpus}"));
    let valid = (1..=MOST_GPUS).contains(&gpus);
    valid.then_some(gpus).ok_or_else(|| refused().help(format!("valid: 1 to {MOST_GPUS}")))
}

/// Reads `15T`, `300B`, `1.5e12` or `4096`.
///
/// # Errors
/// Anything else.
pub fn token_count(text: &str) -> Result<u64, InputError> {
    let (digits, unit) = match text.char_indices().last() {
        Some((at, 'K' | 'k')) => (&text[..at], 1e3),
        Some((at, 'M')) => (&text[..at], 1e6),
        Some((at, 'B' | 'G')) => (&text[..at], 1e9),
        Some((at, 'T')) => (&text[..at], 1e12),
        _ => (text, 1.0),
    };
    let tokens = digits.trim().parse::<f64>().ok().map(|number| number * unit);
    let refused = || InputError::new(format!("--tokens cannot be `{text}`"));
    let valid = tokens.filter(|tokens| (1.0..=1e18).contains(tokens));
    valid
        .map(|tokens| tokens.round() as u64)
        .ok_or_else(|| refused().help("valid: a number of tokens, such as 15T, 300B or 1.5e12"))
}

/// A model by path, shipped name, or `-` for standard input; with its file unless shipped.
///
/// # Errors
/// It cannot be read, or no model has this name.
pub fn read_model(name: &str) -> Result<(ModelSpec, Option<Source>), InputError> {
    if name == "-" {
        let source = standard_input()?;
        return Ok((model::read(&source)?, Some(source)));
    }
    if !Path::new(name).exists() {
        if let Some(shipped) = model::shipped(name) {
            return Ok((shipped?, None));
        }
        let names: Vec<&str> = model::shipped_names().collect();
        return Err(unknown("model", name, &names));
    }
    let source = Source::open(name)?;
    Ok((model::read(&source)?, Some(source)))
}

/// A cluster by path or shipped name.
///
/// # Errors
/// It cannot be read, or no cluster has this name.
pub fn read_cluster(name: &str) -> Result<ClusterSpec, InputError> {
    if !Path::new(name).exists() {
        let names: Vec<&str> = cluster::shipped_names().collect();
        return cluster::shipped(name).unwrap_or_else(|| Err(unknown("cluster", name, &names)));
    }
    cluster::read(&Source::open(name)?)
}

/// Warnings about a cluster's own file, one sentence each: figures that no machine has. Shipped
/// ones have none.
pub fn cluster_warnings(name: Option<&str>) -> Vec<String> {
    let own = name.filter(|name| Path::new(name).exists());
    let source = own.and_then(|name| Source::open(name).ok());
    source.map_or_else(Vec::new, |source| cluster::warnings(&source))
}

fn standard_input() -> Result<Source, InputError> {
    let mut bytes = vec![];
    let most = models::input::MAX_SOURCE_BYTES as u64 + 1;
    std::io::stdin()
        .lock()
        .take(most)
        .read_to_end(&mut bytes)
        .map_err(|error| InputError::new(format!("cannot read standard input: {error}")))?;
    Source::from_bytes("standard input", bytes)
}

/// The error for a name that is neither a file nor shipped.
fn unknown(what: &str, name: &str, names: &[&str]) -> InputError {
    let stem = name.strip_suffix(".yaml").unwrap_or(name);
    let hint =
        nearest(stem, names).map_or_else(String::new, |near| format!("did you mean `{near}`? "));
    InputError::new(format!("there is no {what} `{name}`: no such file, no shipped {what}"))
        .help(format!("{hint}`plan {what}s` lists the shipped ones"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_have_units() {
        for (text, tokens) in [("15T", 15_000_000_000_000), ("1.5e12", 1_500_000_000_000), ("7", 7)]
        {
            assert_eq!(token_count(text), Ok(tokens), "{text}");
        }
        for text in ["", "T", "-1", "15 T T", "inf", "0"] {
            assert!(token_count(text).is_err(), "{text}");
        }
    }

    #[test]
    fn unknown_names_suggest_the_nearest() {
        let error = read_model("lama70b").expect_err("no such model").to_string();
        assert!(error.contains("did you mean `llama70b`"), "{error}");
    }
}
