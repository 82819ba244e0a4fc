//! Settings that contradict each other or the model, found before any search.

use super::Request;
use super::restrictions::{Restrictions, decision_of};
use super::rules::{self, Waived};
use crate::request::pipeline_choices::PipelineChoices;
use crate::request::space::{ParallelLayout, Space, divisors};
use models::cluster::Dtype;
use models::decisions::{Decision, Decisions};
use models::input::{InputError, Place, Source};
use models::program::unsupported_model;
use std::collections::BTreeSet;

/// Refuses a request whose space is empty; names the setting to blame and its valid values.
///
/// # Errors
/// No combination satisfies every rule.
pub fn check(request: &Request) -> Result<(), InputError> {
    not_ours(request)?;
    unknown_format(request)?;
    let degrees = Degrees::new(&request.restrictions);
    let known = [split_heads, split_layers, split_gpus, split_batch, split_micro_batch];
    for conflict in known {
        if let Some(error) = conflict(request, &degrees) {
            return Err(error);
        }
    }
    if space(request, &request.restrictions).is_empty() {
        return Err(blame(request));
    }
    Ok(())
}

/// Refuses a model that our trainer cannot run, if it has to.
fn not_ours(request: &Request) -> Result<(), InputError> {
    let reasons = unsupported_model(&request.model);
    if !request.runnable || reasons.is_empty() {
        return Ok(());
    }
    let name = &request.model.name;
    let reasons: Vec<String> = reasons.iter().map(|reason| format!("\n  {reason}")).collect();
    let message = format!("the trainer cannot run {name} yet:{}", reasons.concat());
    Err(InputError::new(message).help("without --runnable it can be planned, and not generated"))
}

/// Refuses 8-bit and 4-bit formats that the device has no units for. Wider ones are emulated by
/// other units at their rate.
///
/// # Errors
/// The user set such a format.
pub fn unknown_format(request: &Request) -> Result<(), InputError> {
    let (device, asked) = (&request.cluster.device, &request.restrictions.dtype);
    let lacks = |dtype: &Dtype| dtype.bytes() < 2.0 && !device.peak_flops.contains_key(dtype);
    let lacking = Dtype::ALL.into_iter().filter(|dtype| asked.allows(*dtype)).find(lacks);
    let Some(dtype) = lacking.filter(|_| asked.is_restricted()) else { return Ok(()) };
    let has: Vec<String> = Dtype::ALL.iter().filter(|d| !lacks(d)).map(Dtype::to_string).collect();
    let message = format!("--set dtype={dtype}: {} does not compute in {dtype}", device.name);
    Err(InputError::new(message).help(format!(
        "here dtype can be {}; `peak_flops` in the cluster's file lists what its device has",
        has.join(", ")
    )))
}

/// The degrees that the user pinned.
struct Degrees {
    tp: Option<u64>,
    pp: Option<u64>,
    cp: Option<u64>,
    dp: Option<u64>,
    micro_batch: Option<u64>,
}

impl Degrees {
    fn new(r: &Restrictions) -> Self {
        Self {
            tp: r.tp.pinned(),
            pp: r.pp.pinned(),
            cp: r.cp.pinned(),
            dp: r.dp.pinned(),
            micro_batch: r.micro_batch.pinned(),
        }
    }

    /// The data parallel degree, pinned or left over by the others.
    fn replicas(&self, gpus: u64) -> Option<u64> {
        self.dp.or_else(|| Some(gpus / (self.tp? * self.pp? * self.cp?)).filter(|&dp| dp > 0))
    }
}

fn space<'a>(request: &'a Request, restrictions: &'a Restrictions) -> Space<'a> {
    let Request { model, cluster, gpus, .. } = request;
    Space { model, cluster, gpus: *gpus, restrictions, waived: Waived::default() }
}

fn split_heads(request: &Request, degrees: &Degrees) -> Option<InputError> {
    let (tp, model, row) = (degrees.tp?, &request.model, Decision::named("tp"));
    let (size, width) = row.undivided(model, tp)?;
    let divides = |&tp: &u64| row.undivided(model, tp).is_none();
    let valid: Vec<u64> = divisors(model.attention.heads).into_iter().filter(divides).collect();
    let name = size.key();
    let error = InputError::new(format!("{name} ({width}) cannot be split over tp = {tp}"))
        .help(format!("tp must divide this; --set tp= takes {}", list(&valid)));
    Some(pointing(request, error, &keys_of(name)))
}

fn split_layers(request: &Request, degrees: &Degrees) -> Option<InputError> {
    let (pp, layers) = (degrees.pp?, request.model.layers as u64);
    let fitting =
        || divisors(request.gpus).into_iter().filter(|&pp| pp <= layers).collect::<Vec<_>>();
    let error = InputError::new(format!("layers ({layers}) cannot be split over pp = {pp}"));
    let error =
        error.help(format!("each stage holds one at least; --set pp= takes {}", list(&fitting())));
    (pp > layers).then(|| pointing(request, error, &["layers", "num_hidden_layers", "n_layer"]))
}

fn split_gpus(request: &Request, degrees: &Degrees) -> Option<InputError> {
    let named = [("tp", degrees.tp), ("pp", degrees.pp), ("cp", degrees.cp), ("dp", degrees.dp)];
    let pinned: Vec<(&str, u64)> =
        named.into_iter().filter_map(|(name, degree)| Some((name, degree?))).collect();
    let product = pinned.iter().try_fold(1u64, |product, (_, degree)| product.checked_mul(*degree));
    let product = product.unwrap_or(u64::MAX);
    let left_over = pinned.len() == 4 && product != request.gpus;
    if request.gpus.is_multiple_of(product) && !left_over {
        return None;
    }
    let words: Vec<String> =
        pinned.iter().map(|(name, degree)| format!("{name} = {degree}")).collect();
    let gpus = request.gpus;
    let help = match gpus.is_multiple_of(product) {
        true => format!("tp·pp·cp·dp = gpus, and these make {product}"),
        false if pinned.len() == 1 => format!("it must divide {gpus}: {}", list(&divisors(gpus))),
        false => {
            format!("tp·pp·cp·dp = gpus, and these make {product}, which does not divide {gpus}")
        }
    };
    let message = format!("{gpus} GPUs cannot be split over {}", words.join(" · "));
    Some(InputError::new(message).help(help))
}

fn split_batch(request: &Request, degrees: &Degrees) -> Option<InputError> {
    let (dp, batch) = (degrees.replicas(request.gpus)?, request.model.global_batch);
    if batch.is_multiple_of(dp) {
        return None;
    }
    let near = [batch / dp * dp, (batch / dp + 1) * dp];
    let near: Vec<u64> = near.into_iter().filter(|&batch| batch > 0).collect();
    let words = format!("dp must divide this; --global-batch takes {}, ...", list(&near));
    let error = InputError::new(format!("global_batch ({batch}) cannot be split over dp = {dp}"));
    Some(pointing(request, error.help(words), &["global_batch"]))
}

fn split_micro_batch(request: &Request, degrees: &Degrees) -> Option<InputError> {
    let (dp, batch) = (degrees.replicas(request.gpus)?, request.model.global_batch);
    let (own, micro_batch) = (batch / dp, degrees.micro_batch?);
    let error = InputError::new(format!(
        "a replica's batch ({batch} / dp {dp} = {own}) cannot be split into micro_batch = {micro_batch}"
    ));
    let error = error.help(format!("--set micro_batch= takes {}", list(&divisors(own))));
    (!own.is_multiple_of(micro_batch)).then_some(error)
}

/// Keys of a field in our model files and in Hugging Face's config.json.
fn keys_of(name: &str) -> Vec<&str> {
    match name {
        "heads" => vec!["heads", "num_attention_heads", "n_head"],
        "ffn" => vec!["ffn", "intermediate_size", "n_inner"],
        name => vec![name],
    }
}

/// Adds the place in the model's file of the first of these keys that it has.
fn pointing(request: &Request, error: InputError, keys: &[&str]) -> InputError {
    let place = request.file.as_ref().and_then(|file| keys.iter().find_map(|key| find(file, key)));
    match place {
        Some(place) => error.at(place),
        None => error,
    }
}

/// The value of the first line that gives `key`.
fn find(file: &Source, key: &str) -> Option<Place> {
    file.text().lines().enumerate().find_map(|(index, line)| {
        let start = line.len() - line.trim_start().len();
        let rest = line.trim_start().trim_start_matches('"').strip_prefix(key)?;
        let value = rest.trim_start_matches('"').trim_start().strip_prefix(':')?;
        let value = value.split([',', '#']).next().unwrap_or_default().trim();
        let column = start + line[start..].find(value)? + 1;
        (!value.is_empty()).then(|| file.place(index + 1, column, value.chars().count()))
    })
}

/// Names the settings that exclude each other, the rules that say so, and what would be valid.
fn blame(request: &Request) -> InputError {
    let guilty = conflicting(request);
    if guilty.is_empty() {
        return no_split(request);
    }
    let Ok(restrictions) = request.narrowed_by(&guilty) else { return no_split(request) };
    let why = rules::causes(request, &restrictions);
    let why = why.unwrap_or_else(|| none_at_all(request, &guilty));
    let named: Vec<String> = guilty.iter().map(|setting| format!("--set {setting}")).collect();
    let message = match named.as_slice() {
        [alone] => format!("{alone} leaves nothing to choose from: {why}"),
        _ => format!("{} exclude each other: {why}", and(&named)),
    };
    let help: Vec<String> =
        (0..guilty.len()).filter_map(|index| without(request, &guilty, index)).collect();
    InputError::new(message).help(help.join("\n        "))
}

/// The settings without any of which something would be left, found by leaving out one at a time.
fn conflicting(request: &Request) -> Vec<String> {
    let mut guilty = request.settings.clone();
    for setting in &request.settings {
        let others: Vec<String> =
            guilty.iter().filter(|other| *other != setting).cloned().collect();
        let Ok(restrictions) = request.narrowed_by(&others) else { continue };
        if space(request, &restrictions).is_empty() {
            guilty = others;
        }
    }
    guilty
}

/// Why no rule is to blame: no number is in all of the bounds, or degrees do not multiply.
fn none_at_all(request: &Request, guilty: &[String]) -> String {
    let first = guilty.first().map_or("", |setting| decision_of(setting));
    match guilty.iter().all(|setting| decision_of(setting) == first) {
        true if guilty.len() > 1 => format!("no {first} is allowed by all of them"),
        _ => format!("tp · pp · cp · dp must be the number of GPUs ({})", request.gpus),
    }
}

/// What one of the settings could be with the others.
fn without(request: &Request, guilty: &[String], index: usize) -> Option<String> {
    let name = decision_of(&guilty[index]);
    let mut others = guilty.to_vec();
    others.remove(index);
    let restrictions = request.narrowed_by(&others).ok()?;
    let valid = values(&space(request, &restrictions), name);
    let named: Vec<String> = others.iter().map(|setting| format!("--set {setting}")).collect();
    let context = match named.is_empty() {
        true => "this model, batch and number of GPUs".to_owned(),
        false => and(&named),
    };
    Some(format!("with {context}, {name} can be {}", shortened(&valid)))
}

/// A list in words.
fn and(items: &[String]) -> String {
    match items {
        [first @ .., last] if !first.is_empty() => format!("{} and {last}", first.join(", ")),
        _ => items.concat(),
    }
}

fn no_split(request: &Request) -> InputError {
    let Request { gpus, model, .. } = request;
    let works = |&gpus: &u64| {
        !space(&Request { gpus, ..request.clone() }, &request.restrictions).is_empty()
    };
    let fewer = (1..*gpus).rev().take(64).find(works).map(|gpus| gpus.to_string());
    let more = (gpus + 1..).take(64).find(works).map(|gpus| gpus.to_string());
    let near: Vec<String> = fewer.into_iter().chain(more).collect();
    let hint = match near.is_empty() {
        true => String::new(),
        false => format!(
            "; --gpus {} can. `plan --from PLAN` finds how many of them to use",
            near.join(" or ")
        ),
    };
    InputError::new(format!("{gpus} GPUs cannot be split over this model"))
        .help(format!(
            "tp divides heads ({}) and ffn ({}), pp is at most layers ({}), dp divides the batch ({}){hint}",
            model.attention.heads, model.mlp.ffn, model.layers, model.global_batch
        ))
}

/// The values that a decision takes in a space.
fn values(space: &Space<'_>, name: &str) -> Vec<String> {
    let mut numbers = BTreeSet::new();
    let mut words = vec![];
    // What pipelines there are depends on the overlap of the experts' all-to-all.
    let layouts = match space.model.moe {
        Some(_) => space.expert_layouts(),
        None => space.contexts(),
    };
    for parallel in layouts {
        let choices = space.choices(&parallel);
        if choices.count() == 0 {
            continue;
        }
        for value in values_of(&parallel, &choices, name) {
            match value.parse::<u64>() {
                Ok(number) => drop(numbers.insert(number)),
                Err(_) if !words.contains(&value) => words.push(value),
                Err(_) => {}
            }
        }
    }
    numbers.into_iter().map(|number| number.to_string()).chain(words).collect()
}

fn values_of(parallel: &ParallelLayout, choices: &PipelineChoices, name: &str) -> Vec<String> {
    let pipelines = &choices.schedules;
    let vocabs = || pipelines.iter().flat_map(|(.., all)| all);
    match name {
        "schedule" => pipelines.iter().map(|(schedule, ..)| schedule.to_string()).collect(),
        "vpp" => pipelines.iter().map(|(_, vpp, _)| vpp.to_string()).collect(),
        "vocab" => vocabs().map(|(vocab, _)| vocab.to_string()).collect(),
        "fused_loss" => vocabs().map(|(_, fused_loss)| fused_loss.to_string()).collect(),
        "recompute" => choices.recompute.iter().map(ToString::to_string).collect(),
        "zero_stage" => choices.shards.iter().map(|(stage, _)| stage.to_string()).collect(),
        "dp_shard" => choices.shards.iter().map(|(_, size)| size.to_string()).collect(),
        "offload" => choices.offload.iter().map(ToString::to_string).collect(),
        "rank_order" => choices.rank_order.iter().map(ToString::to_string).collect(),
        _ => of_decisions(&parallel.decisions, name).into_iter().collect(),
    }
}

/// A decision of a layout, as plan.yaml writes it.
fn of_decisions(d: &Decisions, name: &str) -> Option<String> {
    debug_assert!(Decision::names().any(|known| known == name), "{name}");
    let value = serde_json::to_value(d).ok()?;
    let value = value.get(name)?;
    Some(value.as_str().map_or_else(|| value.to_string(), str::to_owned))
}

fn list(values: &[u64]) -> String {
    shortened(&values.iter().map(ToString::to_string).collect::<Vec<_>>())
}

/// At most sixteen values.
fn shortened(values: &[String]) -> String {
    let more = if values.len() > 16 { ", ..." } else { "" };
    let shown: Vec<&str> = values.iter().take(16).map(String::as_str).collect();
    format!("{}{more}", shown.join(", "))
}
