//! Turns `--set key=value` into restrictions on decisions.

use models::decisions::{
    AuxScope, CpStyle, Decision, Decisions, DpReduction, Dtype, MOST, MoeOverlap, Offload,
    RankOrder, RecomputePolicy, USUAL_BUCKET_MIB, Values, Vocab,
};
use models::input::{InputError, nearest};
use models::schedule::ScheduleName;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// The allowed whole numbers: a list, bounds, or both. All by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Numbers {
    list: Option<Vec<u64>>,
    least: Option<u64>,
    most: Option<u64>,
}

impl Numbers {
    /// Whether a value is allowed.
    pub fn allows(&self, value: u64) -> bool {
        self.list.as_ref().is_none_or(|list| list.contains(&value))
            && self.least.is_none_or(|least| value >= least)
            && self.most.is_none_or(|most| value <= most)
    }

    /// Whether the user restricted it.
    pub fn is_restricted(&self) -> bool {
        *self != Self::default()
    }

    /// The only value allowed, if there is just one.
    pub fn pinned(&self) -> Option<u64> {
        match self.list.as_deref() {
            Some([only]) => Some(*only),
            _ => None,
        }
    }

    /// The numbers that the user wrote, bounds among them.
    pub fn given(&self) -> impl Iterator<Item = u64> + '_ {
        let bounds = [self.least, self.most].into_iter().flatten();
        self.list.iter().flatten().copied().chain(bounds)
    }

    /// Allows `value` alone.
    pub fn only(value: u64) -> Self {
        Self { list: Some(vec![value]), ..Self::default() }
    }

    /// `usual` if it is allowed, else the nearest value that is.
    pub fn nearest(&self, usual: u64) -> u64 {
        let allowed =
            std::iter::once(usual).chain(self.given()).filter(|&value| self.allows(value));
        allowed.min_by_key(|value| value.abs_diff(usual)).unwrap_or(usual)
    }

    fn narrow(&mut self, relation: Relation, values: Vec<u64>) {
        match (relation, values.as_slice()) {
            (Relation::AtMost, [bound]) => self.most = Some(*bound),
            (Relation::AtLeast, [bound]) => self.least = Some(*bound),
            _ => self.list = Some(values),
        }
    }
}

/// The allowed values of a closed set. All by default.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice<T>(Option<Vec<T>>);

impl<T> Default for Choice<T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<T: PartialEq + Copy> Choice<T> {
    /// Whether a value is allowed.
    pub fn allows(&self, value: T) -> bool {
        self.0.as_ref().is_none_or(|list| list.contains(&value))
    }

    /// Allows `values` alone.
    pub fn of(values: &[T]) -> Self {
        Self(Some(values.to_vec()))
    }

    /// Whether the user restricted it.
    pub fn is_restricted(&self) -> bool {
        self.0.is_some()
    }

    /// The only value allowed, if there is just one.
    pub fn pinned(&self) -> Option<T> {
        match self.0.as_deref() {
            Some([only]) => Some(*only),
            _ => None,
        }
    }

    /// The allowed values among `all`, in their order.
    pub fn among(&self, all: &[T]) -> Vec<T> {
        all.iter().copied().filter(|&value| self.allows(value)).collect()
    }
}

/// The restriction that a kind of decision takes.
macro_rules! restriction {
    (number, $type:ty) => { Numbers };
    (choice, $type:ty) => { Choice<$type> };
    (switch, $type:ty) => { Choice<$type> };
    (factor, $type:ty) => { $type };
}

/// Reads a setting into the restriction of its decision.
macro_rules! read {
    (number, $set:ident, $into:expr) => {
        $set.numbers(&mut $into)
    };
    (choice, $set:ident, $into:expr) => {
        $set.choice(&mut $into)
    };
    (switch, $set:ident, $into:expr) => {
        $set.switch(&mut $into)
    };
    (factor, $set:ident, $into:expr) => {
        $set.factor(&mut $into)
    };
}

/// Whether the restriction of a decision allows a value. A factor is a figure of the model.
macro_rules! permits {
    (number, $own:expr, $value:expr) => {
        $own.allows(u64::from($value))
    };
    (choice, $own:expr, $value:expr) => {
        $own.allows($value)
    };
    (switch, $own:expr, $value:expr) => {
        $own.allows($value)
    };
    (factor, $own:expr, $value:expr) => {
        true
    };
}

/// A field for each decision that users set, from [`models::with_decisions`]. Rows are taken one
/// at a time, so that derived decisions can be left out.
macro_rules! declare {
    (@[$($out:tt)*]) => { declare! { #$($out)* } };
    (@[$($out:tt)*] $(#[$a:meta])* $name:ident: $type:ty = derived $range:tt, $sizes:tt, $help:literal; $($rest:tt)*) => {
        declare! { @[$($out)*] $($rest)* }
    };
    (@[$($out:tt)*] $(#[$a:meta])* $name:ident: $type:ty = $kind:ident $range:tt, $sizes:tt, $help:literal; $($rest:tt)*) => {
        declare! { @[$($out)* $name: $type = $kind, $help;] $($rest)* }
    };
    (#$($name:ident: $type:ty = $kind:ident, $help:literal;)+) => {
        /// What each decision may be.
        #[derive(Clone, Debug, Default, PartialEq)]
        pub struct Restrictions {
            $(#[doc = $help] pub $name: restriction!($kind, $type),)+
            /// Whether our own trainer has to be able to run it.
            pub runnable: bool,
        }

        impl Restrictions {
            /// Whether these decisions are allowed. What our trainer can run is not looked at.
            pub fn permit(&self, d: &Decisions) -> bool {
                $(permits!($kind, self.$name, d.$name))&&+
            }

            fn apply(&mut self, set: &Setting<'_>) -> Result<(), InputError> {
                match set.key {
                    $(stringify!($name) => read!($kind, set, self.$name),)+
                    _ => Err(set.unknown()),
                }
            }
        }
    };
    ($($rows:tt)+) => { declare! { @[] $($rows)+ } };
}

models::with_decisions!(declare);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Relation {
    OneOf,
    AtMost,
    AtLeast,
}

/// One `--set`, split into its parts.
struct Setting<'a> {
    text: &'a str,
    key: &'a str,
    relation: Relation,
    values: Vec<&'a str>,
}

/// Decisions that no search makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unsearched {
    /// Layers that full recomputation keeps one input of.
    pub recompute_group: u64,
    /// When replicas sum gradients.
    pub dp_reduction: DpReduction,
    /// Size of a bucket, MiB.
    pub dp_bucket_mib: u64,
    /// What host memory holds, as far as no search decides it: activations, or nothing.
    pub offload: Offload,
}

impl Restrictions {
    /// What these decisions are: their usual values, or the nearest allowed. The order of
    /// [`DpReduction::ALL`] is that of their prices.
    pub fn unsearched(&self) -> Unsearched {
        let modes = self.dp_reduction.among(DpReduction::ALL);
        Unsearched {
            recompute_group: self.recompute_group.nearest(1),
            dp_reduction: modes.first().copied().unwrap_or(DpReduction::Bucketed),
            dp_bucket_mib: self.dp_bucket_mib.nearest(USUAL_BUCKET_MIB),
            offload: self.offload.pinned().map_or(Offload::None, Offload::of_layers),
        }
    }

    /// Whether optimizer post-validation is asked for.
    pub fn wants_post_validation(&self) -> bool {
        self.post_validation.pinned() == Some(true)
    }

    /// Reads all `--set key=value`, `key=a,b`, `key<=n` and `key>=n`.
    ///
    /// # Errors
    /// An unknown name, or a value that the name does not take.
    pub fn parse<S: AsRef<str>>(settings: &[S]) -> Result<Self, InputError> {
        let mut restrictions = Self::default();
        for text in settings {
            restrictions.apply(&Setting::parse(text.as_ref())?)?;
        }
        Ok(restrictions)
    }

    /// The same for settings a user typed, where giving a decision's values twice is an error.
    ///
    /// # Errors
    /// Those of [`Self::parse`], or a name whose values are given twice.
    pub fn typed<S: AsRef<str>>(settings: &[S]) -> Result<Self, InputError> {
        let mut given: Vec<Setting<'_>> = vec![];
        for text in settings {
            let set = Setting::parse(text.as_ref())?;
            if set.relation == Relation::OneOf {
                if let Some(before) = given.iter().find(|other| other.key == set.key) {
                    return Err(set.repeats(before));
                }
                given.push(set);
            }
        }
        Self::parse(settings)
    }
}

impl<'a> Setting<'a> {
    fn parse(text: &'a str) -> Result<Self, InputError> {
        let split = [("<=", Relation::AtMost), (">=", Relation::AtLeast), ("=", Relation::OneOf)]
            .into_iter()
            .find_map(|(sign, relation)| {
                text.split_once(sign).map(|(key, value)| (key, relation, value))
            });
        let Some((key, relation, value)) = split else {
            return Err(Self::without_value(text));
        };
        if let Some(key) = key.strip_suffix('!') {
            let key = key.trim();
            return Err(InputError::new(format!("--set {text}: there is no `!=`"))
                .help(format!("name what is allowed, as --set {key}=A,B, or a limit")));
        }
        let values = value.split(',').map(str::trim).collect();
        Ok(Self { text, key: key.trim(), relation, values })
    }

    fn without_value(text: &str) -> InputError {
        let closed = |(sign, step): (char, i64)| {
            let (key, value) = text.split_once(sign)?;
            let last = value.trim().parse::<i64>().ok()?.checked_add(step)?;
            Some(format!("{}{sign}={last}", key.trim()))
        };
        match [('<', -1), ('>', 1)].into_iter().find_map(closed) {
            Some(closed) => InputError::new(format!("--set {text}: a limit includes its number"))
                .help(format!("write --set '{closed}'")),
            None => InputError::new(format!("--set {text} has no value"))
                .help("write --set tp=8, --set schedule=1f1b,gpipe or --set 'tp<=8'"),
        }
    }

    fn unknown(&self) -> InputError {
        if let Some(row) = Decision::ALL.iter().find(|row| row.name == self.key) {
            return self.derived(row);
        }
        let names: Vec<&str> = Decision::names().collect();
        let flag = format!("--{}", self.key.replace('_', "-"));
        let hint = match FLAGS.contains(&flag.as_str()) {
            true => format!("{flag} is a flag of its own; "),
            false => did_you_mean(self.key, &names),
        };
        InputError::new(format!("--set {}: there is no decision `{}`", self.text, self.key))
            .help(format!("{hint}decisions are {}", names.join(" ")))
    }

    /// A decision that plans have and users do not set.
    fn derived(&self, row: &Decision) -> InputError {
        let instead = match row.name {
            "micro_batches" => {
                "set micro_batch or dp: micro_batches is global_batch / (dp · micro_batch)"
            }
            "pass_times" => "set schedule and vocab: the times are those of the plan's passes",
            _ => "set the decisions that it follows from",
        };
        let message = format!("--set {}: {} follows from other decisions", self.text, row.name);
        InputError::new(message).help(instead)
    }

    fn repeats(&self, before: &Self) -> InputError {
        let (key, text) = (self.key, self.text);
        let message =
            format!("--set {text}: values of `{key}` are given already by {}", before.text);
        let all = [before.values.as_slice(), &self.values].concat().join(",");
        InputError::new(message)
            .help(format!("give them once: --set {key}={all} allows all of them"))
    }

    fn wrong(&self, value: &str, valid: &str, hint: &str) -> InputError {
        InputError::new(format!("--set {}: {} cannot be `{value}`", self.text, self.key))
            .help(format!("{hint}{} takes {valid}", self.key))
    }

    fn decision(&self) -> &'static Decision {
        Decision::named(self.key)
    }

    fn numbers(&self, into: &mut Numbers) -> Result<(), InputError> {
        let valid = self.decision().values;
        let mut values = vec![];
        for value in &self.values {
            let number = value.parse().ok().filter(|&number: &u64| valid.contains(number));
            values.push(number.ok_or_else(|| self.wrong(value, &self.valid_numbers(value), ""))?);
        }
        into.narrow(self.relation, values);
        Ok(())
    }

    /// What is valid instead of `value`: the most only where it is more.
    fn valid_numbers(&self, value: &str) -> String {
        let is_number = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
        match self.decision().values {
            Values::Number { least, most: MOST } if is_number && value != "0" => {
                format!("whole numbers from {least} to {MOST}")
            }
            _ => self.numbers_in_words(),
        }
    }

    fn numbers_in_words(&self) -> String {
        let words = self.decision().values.in_words();
        if words.starts_with("whole") {
            format!("{words}: {0}=8, {0}=2,4 or {0}<=8", self.key)
        } else {
            words
        }
    }

    fn choice<T: Copy + DeserializeOwned>(&self, into: &mut Choice<T>) -> Result<(), InputError> {
        let valid = || self.decision().values.in_words();
        if self.relation != Relation::OneOf {
            return Err(InputError::new(format!("--set {}: {} has no order", self.text, self.key))
                .help(format!(
                    "name what is allowed: --set {}={}",
                    self.key,
                    self.values.join(",")
                )));
        }
        let mut values = vec![];
        for value in &self.values {
            let known = named(value);
            let wrong = || {
                let valid = valid();
                let hint = did_you_mean(value, &valid.split(", ").collect::<Vec<_>>());
                self.wrong(value, &valid, &hint)
            };
            values.push(known.ok_or_else(wrong)?);
        }
        into.0 = Some(values);
        Ok(())
    }

    fn factor(&self, into: &mut Option<f64>) -> Result<(), InputError> {
        let number = self.values.first().and_then(|value| value.parse().ok());
        let valid = number.filter(|n: &f64| n.is_finite() && *n > 0.0);
        let valid = valid.filter(|_| self.values.len() == 1 && self.relation == Relation::OneOf);
        let wrong = || self.wrong(&self.values.join(","), &self.decision().values.in_words(), "");
        *into = Some(valid.ok_or_else(wrong)?);
        Ok(())
    }

    /// True or false, not both: the search does not choose between them.
    fn switch(&self, into: &mut Choice<bool>) -> Result<(), InputError> {
        match self.values.as_slice() {
            [_] => self.choice(into),
            _ => Err(self.wrong(&self.values.join(","), "true or false", "")),
        }
    }
}

/// Flags that are taken for decisions.
const FLAGS: [&str; 7] =
    ["--cluster", "--global-batch", "--gpus", "--headroom", "--model", "--seq-len", "--tokens"];

/// The name that a word resembles, as the start of a sentence.
fn did_you_mean(given: &str, names: &[&str]) -> String {
    nearest(given, names).map_or_else(String::new, |name| format!("did you mean `{name}`? "))
}

/// The decision that a setting is about.
pub fn decision_of(setting: &str) -> &str {
    setting.split(['=', '<', '>']).next().unwrap_or_default().trim()
}

/// The value of a closed set by the name that plans have.
fn named<T: DeserializeOwned>(name: &str) -> Option<T> {
    let word = match name.parse() {
        Ok(switch) => Value::Bool(switch),
        Err(_) => Value::String(name.to_owned()),
    };
    serde_json::from_value(word).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_given_once_and_bounds_narrow_them() {
        let parsed = |settings: &[&str]| Restrictions::typed(settings).map(|set| set.tp);
        let error = parsed(&["tp=8", "pp=2", "tp=4"]).expect_err("which of them?").to_string();
        assert!(error.contains("given already by tp=8") && error.contains("tp=8,4"), "{error}");
        let narrowed = parsed(&["tp=2,8", "tp<=4", "tp>=2"]).expect("they go together");
        assert!(narrowed.allows(2) && !narrowed.allows(8) && !narrowed.allows(4));
    }

    #[test]
    fn settings_pin_list_and_bound() -> Result<(), InputError> {
        let set = Restrictions::parse(&["tp=8", "schedule=1f1b,gpipe", "pp<=16", "pp>=4"])?;
        assert!(set.tp.allows(8) && !set.tp.allows(4));
        assert!(set.schedule.allows(ScheduleName::GPipe));
        assert!(!set.schedule.allows(ScheduleName::LoopedBfs));
        assert!(set.pp.allows(4) && set.pp.allows(16) && !set.pp.allows(2) && !set.pp.allows(32));
        Ok(())
    }

    #[test]
    fn bad_settings_say_what_is_valid() {
        for (setting, part) in [
            ("tq=8", "did you mean `tp`"),
            ("tp", "has no value"),
            ("tp=zero", "whole numbers"),
            ("tp=0", "whole numbers"),
            ("TP=8", "did you mean `tp`"),
            ("gpus=8", "--gpus is a flag"),
            ("schedule=2f2b", "1f1b"),
            ("schedule=1F1B", "did you mean `1f1b`"),
            ("schedule=zbv", "did you mean `zb_v`"),
            ("zero_stage=4", "0, 1, 2 or 3"),
            ("vocab<=tensor", "vocab has no order"),
            ("post_validation=true,false", "true or false"),
            ("post_validation=maybe", "false, true"),
            ("capacity_factor=-1", "positive"),
        ] {
            let error = Restrictions::parse(&[setting]).expect_err(setting).to_string();
            assert!(error.contains(part), "{setting}: {error}");
        }
    }
}
