//! What the user pins or narrows with `--set`: raw text to finished restrictions.

use models::decisions::{
    AuxScope, CpStyle, Dtype, MoeOverlap, Offload, RankOrder, Recompute, Vocab,
};
use models::input::{InputError, nearest};
use models::schedule::ScheduleName;

/// Allowed whole numbers: a list, bounds, or both; everything by default.
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

    /// Whether the user said anything.
    pub fn is_restricted(&self) -> bool {
        *self != Self::default()
    }

    /// The only value allowed, if the user named one.
    pub fn pinned(&self) -> Option<u64> {
        match self.list.as_deref() {
            Some([only]) => Some(*only),
            _ => None,
        }
    }

    /// Only `value`.
    pub fn only(value: u64) -> Self {
        Self { list: Some(vec![value]), ..Self::default() }
    }

    fn narrow(&mut self, relation: Relation, values: Vec<u64>) {
        match (relation, values.as_slice()) {
            (Relation::AtMost, [bound]) => self.most = Some(*bound),
            (Relation::AtLeast, [bound]) => self.least = Some(*bound),
            _ => self.list = Some(values),
        }
    }
}

/// Allowed values of a closed set; everything by default.
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

    /// Only `values`.
    pub fn of(values: &[T]) -> Self {
        Self(Some(values.to_vec()))
    }

    /// Whether the user said anything.
    pub fn is_restricted(&self) -> bool {
        self.0.is_some()
    }

    /// The only value allowed, if the user named one.
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

/// Every decision's restriction.
#[derive(Clone, Debug, Default, PartialEq)]
#[expect(missing_docs, reason = "the fields are the decisions, documented there")]
pub struct Restrictions {
    pub tp: Numbers,
    pub pp: Numbers,
    pub vpp: Numbers,
    pub cp: Numbers,
    pub cp_style: Choice<CpStyle>,
    pub cp_ulysses: Numbers,
    pub dp: Numbers,
    pub dp_shard: Numbers,
    pub ep: Numbers,
    pub etp: Numbers,
    pub zero_stage: Numbers,
    pub sequence_parallel: Choice<bool>,
    pub micro_batch: Numbers,
    pub schedule: Choice<ScheduleName>,
    pub recompute: Choice<Recompute>,
    pub vocab: Choice<Vocab>,
    pub moe_overlap: Choice<MoeOverlap>,
    pub moe_overlap_degree: Numbers,
    pub capacity_factor: Option<f64>,
    pub aux_scope: Choice<AuxScope>,
    pub dtype: Choice<Dtype>,
    pub offload: Choice<Offload>,
    pub rank_order: Choice<RankOrder>,
    pub post_validation: Choice<bool>,
}

/// Names `--set` knows.
pub const NAMES: [&str; 24] = [
    "tp",
    "pp",
    "vpp",
    "cp",
    "cp_style",
    "cp_ulysses",
    "dp",
    "dp_shard",
    "ep",
    "etp",
    "zero_stage",
    "sequence_parallel",
    "micro_batch",
    "schedule",
    "recompute",
    "vocab",
    "moe_overlap",
    "moe_overlap_degree",
    "capacity_factor",
    "aux_scope",
    "dtype",
    "offload",
    "rank_order",
    "post_validation",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Relation {
    OneOf,
    AtMost,
    AtLeast,
}

/// One `--set`, taken apart.
struct Setting<'a> {
    text: &'a str,
    key: &'a str,
    relation: Relation,
    values: Vec<&'a str>,
}

impl Restrictions {
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

    /// The same of what a user typed, who cannot mean a name's values twice: the last ones would hold.
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

    fn apply(&mut self, set: &Setting<'_>) -> Result<(), InputError> {
        match set.key {
            "tp" => set.numbers(&mut self.tp, 1),
            "pp" => set.numbers(&mut self.pp, 1),
            "vpp" => set.numbers(&mut self.vpp, 1),
            "cp" => set.numbers(&mut self.cp, 1),
            "cp_ulysses" => set.numbers(&mut self.cp_ulysses, 1),
            "dp" => set.numbers(&mut self.dp, 1),
            "dp_shard" => set.numbers(&mut self.dp_shard, 1),
            "ep" => set.numbers(&mut self.ep, 1),
            "etp" => set.numbers(&mut self.etp, 1),
            "micro_batch" => set.numbers(&mut self.micro_batch, 1),
            "moe_overlap_degree" => set.numbers(&mut self.moe_overlap_degree, 1),
            "zero_stage" => set.zero_stage(&mut self.zero_stage),
            "cp_style" => set.choice(&mut self.cp_style, &names(CpStyle::ALL, CpStyle::name)),
            "schedule" => {
                set.choice(&mut self.schedule, &names(&ScheduleName::ALL, ScheduleName::name))
            }
            "recompute" => set.choice(&mut self.recompute, &names(Recompute::ALL, Recompute::name)),
            "vocab" => set.choice(&mut self.vocab, &names(Vocab::ALL, Vocab::name)),
            "moe_overlap" => {
                set.choice(&mut self.moe_overlap, &names(MoeOverlap::ALL, MoeOverlap::name))
            }
            "aux_scope" => set.choice(&mut self.aux_scope, &names(AuxScope::ALL, AuxScope::name)),
            "dtype" => set.choice(&mut self.dtype, &names(&Dtype::ALL, Dtype::name)),
            "offload" => set.choice(&mut self.offload, &names(Offload::ALL, Offload::name)),
            "rank_order" => {
                set.choice(&mut self.rank_order, &names(RankOrder::ALL, RankOrder::name))
            }
            "sequence_parallel" => set.choice(&mut self.sequence_parallel, &BOOLS),
            "capacity_factor" => {
                self.capacity_factor = Some(set.capacity()?);
                Ok(())
            }
            "post_validation" => set.one_of_two(&mut self.post_validation),
            _ => Err(set.unknown()),
        }
    }
}

const BOOLS: [(&str, bool); 2] = [("false", false), ("true", true)];

fn names<T: Copy>(all: &[T], name: fn(T) -> &'static str) -> Vec<(&'static str, T)> {
    all.iter().map(|&value| (name(value), value)).collect()
}

impl<'a> Setting<'a> {
    fn parse(text: &'a str) -> Result<Self, InputError> {
        let split = [("<=", Relation::AtMost), (">=", Relation::AtLeast), ("=", Relation::OneOf)]
            .into_iter()
            .find_map(|(sign, relation)| {
                text.split_once(sign).map(|(key, value)| (key, relation, value))
            });
        let Some((key, relation, value)) = split else {
            return Err(InputError::new(format!("--set {text} has no value"))
                .help("write --set tp=8, --set schedule=1f1b,gpipe or --set 'tp<=8'"));
        };
        let values = value.split(',').map(str::trim).collect();
        Ok(Self { text, key: key.trim(), relation, values })
    }

    fn unknown(&self) -> InputError {
        let hint = nearest(self.key, &NAMES)
            .map_or_else(String::new, |name| format!("did you mean `{name}`? "));
        InputError::new(format!("--set {}: there is no decision `{}`", self.text, self.key))
            .help(format!("{hint}decisions are {}", NAMES.join(" ")))
    }

    fn repeats(&self, before: &Self) -> InputError {
        let (key, text) = (self.key, self.text);
        let message =
            format!("--set {text}: values of `{key}` are given already by {}", before.text);
        let all = [before.values.as_slice(), &self.values].concat().join(",");
        InputError::new(message)
            .help(format!("give them once: --set {key}={all} allows all of them"))
    }

    fn wrong(&self, value: &str, valid: &str) -> InputError {
        InputError::new(format!("--set {}: {} cannot be `{value}`", self.text, self.key))
            .help(format!("{} takes {valid}", self.key))
    }

    fn numbers(&self, into: &mut Numbers, least: u64) -> Result<(), InputError> {
        let valid = format!("whole numbers from {least}: {0}=8, {0}=2,4 or {0}<=8", self.key);
        let mut values = vec![];
        for value in &self.values {
            let number = value.parse().ok().filter(|&number: &u64| number >= least);
            values.push(number.ok_or_else(|| self.wrong(value, &valid))?);
        }
        into.narrow(self.relation, values);
        Ok(())
    }

    fn zero_stage(&self, into: &mut Numbers) -> Result<(), InputError> {
        self.numbers(into, 0)?;
        let beyond = self.values.iter().find(|value| value.parse().is_ok_and(|n: u64| n > 3));
        beyond.map_or(Ok(()), |value| Err(self.wrong(value, "0, 1, 2 or 3")))
    }

    fn choice<T: Copy>(
        &self,
        into: &mut Choice<T>,
        all: &[(&'static str, T)],
    ) -> Result<(), InputError> {
        let valid: Vec<&str> = all.iter().map(|(name, _)| *name).collect();
        let mut values = vec![];
        for value in &self.values {
            let known = all.iter().find(|(name, _)| name == value);
            let known = known.filter(|_| self.relation == Relation::OneOf);
            values.push(known.ok_or_else(|| self.wrong(value, &valid.join(", ")))?.1);
        }
        into.0 = Some(values);
        Ok(())
    }

    fn capacity(&self) -> Result<f64, InputError> {
        let number = self.values.first().and_then(|value| value.parse().ok());
        let valid = number.filter(|n: &f64| n.is_finite() && *n > 0.0);
        valid
            .filter(|_| self.values.len() == 1 && self.relation == Relation::OneOf)
            .ok_or_else(|| self.wrong(&self.values.join(","), "one positive number, such as 1.25"))
    }

    /// True or false, not both: what the search does not choose.
    fn one_of_two(&self, into: &mut Choice<bool>) -> Result<(), InputError> {
        match self.values.as_slice() {
            [_] => self.choice(into, &BOOLS),
            _ => Err(self.wrong(&self.values.join(","), "true or false")),
        }
    }
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
            ("schedule=2f2b", "1f1b"),
            ("zero_stage=4", "0, 1, 2 or 3"),
            ("vocab<=tensor", "first_last"),
            ("post_validation=true,false", "true or false"),
            ("post_validation=maybe", "false, true"),
            ("capacity_factor=-1", "positive"),
        ] {
            let error = Restrictions::parse(&[setting]).expect_err(setting).to_string();
            assert!(error.contains(part), "{setting}: {error}");
        }
    }
}
