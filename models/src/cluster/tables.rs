//! Measured efficiency of kernels and collectives, shipped as small tables.
//!
//! `tools/compact_tables.py` writes the files; their headers name the sources.
//! `plan calibrate --gpu` writes the same lines into a cluster's own file ([`super::table_text`]).
//! Values become seconds on one device and are made monotone once, so that a lookup is one
//! interpolation.

use std::collections::BTreeMap;

use super::limits::{MOST_OF_PEAK, TABLE};
use super::products::{Products, Waves};
use super::{Device, Dtype, Grid, roofline};
use crate::formulas::attention::{causal_pairs, core_flops};
use crate::formulas::flops::product_flops;
use crate::input::InputError;

macro_rules! tables {
    ($($name:literal)*) => {
        &[$(($name, include_str!(concat!("../../shipped/efficiency/", $name, ".csv")))),*]
    };
}

const SHIPPED: &[(&str, &str)] = tables!["a100" "h100" "h200" "b200" "gb200" "gb300"];

/// Name of the tables that hold nothing.
const NONE: &str = "none";

/// Files write fractions in this unit.
pub(super) const FRACTION: f64 = 1e-4;

/// The part of the peak that a cell states; NaN where it exceeds the peak.
fn of_peak(cell: f64) -> f64 {
    let share = cell * FRACTION;
    if share <= MOST_OF_PEAK { share } else { f64::NAN }
}

/// Names that `efficiency:` takes in a cluster file.
pub fn table_names() -> impl Iterator<Item = &'static str> {
    std::iter::once(NONE).chain(SHIPPED.iter().map(|(name, _)| *name))
}

/// Measurements in seconds on one device. Where a part is missing, formulas apply.
#[derive(Clone, Debug, Default)]
pub struct EfficiencyTables {
    /// Name in `efficiency:` of a cluster file.
    pub name: String,
    /// Matrix products, by the format they run in: seconds over `m`, `n`, `k`.
    pub gemm: BTreeMap<Dtype, Products>,
    /// The attention core, causal and fused.
    pub attention: Option<AttentionTable>,
    /// Elementwise kernels: seconds over bytes.
    pub stream: Option<Scaled<1>>,
    /// Collectives inside one domain of the innermost level.
    pub links: Option<LinkTable>,
    /// The lines of `links`, to be written out with other measurements.
    pub link_lines: String,
}

/// Seconds of fused causal attention.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionTable {
    /// Forward pass.
    pub forward: AttentionPass,
    /// Backward pass.
    pub backward: AttentionPass,
}

/// Seconds of one pass of it.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionPass {
    /// Over head width, sequence, and sequences times heads.
    squares: Scaled<3>,
    /// Over head width, the least for a token of a sequence, whose rows of scores take so long
    /// however few there are.
    least: Scaled<1>,
}

impl AttentionPass {
    /// Seconds for `heads` (times sequences) of a `width` with sequences of this length. Fewer than
    /// were measured take as much less, until their rows leave multiprocessors idle.
    pub fn at(&self, [width, sequence, heads]: [f64; 3]) -> f64 {
        let fewest = self.squares.first[2];
        if heads >= fewest {
            return self.squares.at([width, sequence, heads]);
        }
        let measured = self.squares.at([width, sequence, fewest]);
        let least = sequence * self.least.at([width]);
        measured.min((measured * heads / fewest).max(least))
    }

    /// The longest sequence measured.
    pub fn longest(&self) -> f64 {
        self.squares.last[1]
    }
}

/// Seconds of collectives over ranks and bytes of the whole tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct LinkTable {
    /// Bandwidth that large messages reached on the machines measured, per GPU and direction,
    /// bytes/s. A link of half that takes as long as this one for twice the bytes.
    pub bytes_per_s: f64,
    /// All-reduce.
    pub all_reduce: Scaled<2>,
    /// All-gather.
    pub all_gather: Scaled<2>,
    /// Reduce-scatter.
    pub reduce_scatter: Scaled<2>,
    /// All-to-all, where there is one.
    pub all_to_all: Option<Scaled<2>>,
}

/// A monotone grid, continued beyond both ends of each axis by a power of that axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Scaled<const N: usize> {
    grid: Grid<N>,
    first: [f64; N],
    last: [f64; N],
    below: [f64; N],
    above: [f64; N],
}

impl<const N: usize> Scaled<N> {
    /// `None` where a value is missing, or not positive.
    pub(super) fn new(
        axes: [Vec<f64>; N],
        [below, above]: [[f64; N]; 2],
        value: impl FnMut([f64; N]) -> f64,
    ) -> Option<Self> {
        let first = std::array::from_fn(|i| axes[i].first().copied().unwrap_or(1.0));
        let last = std::array::from_fn(|i| axes[i].last().copied().unwrap_or(1.0));
        let grid = Grid::new(axes, value);
        let whole = grid.is_whole();
        whole.then(|| Self { grid: grid.monotone(), first, last, below, above })
    }

    /// Seconds at `point`.
    pub fn at(&self, point: [f64; N]) -> f64 {
        let mut scale = 1.0;
        for (i, x) in point.iter().enumerate() {
            if *x > self.last[i] {
                scale *= (x / self.last[i]).powf(self.above[i]);
            } else if *x < self.first[i] && self.below[i] != 0.0 {
                scale *= (x / self.first[i]).powf(self.below[i]);
            }
        }
        scale * self.grid.at(point)
    }
}

impl EfficiencyTables {
    /// The shipped tables `name` on `device`; `None` where there are none of that name.
    ///
    /// # Errors
    /// A shipped table that cannot be read, which the tests exclude.
    pub fn shipped(name: &str, device: &Device) -> Result<Option<Self>, InputError> {
        if name == NONE {
            return Ok(Some(Self { name: name.to_owned(), ..Self::default() }));
        }
        let Some((_, text)) = SHIPPED.iter().find(|(shipped, _)| *shipped == name) else {
            return Ok(None);
        };
        let bug = |_| InputError::new(format!("the shipped efficiency table {name} is damaged"));
        Self::parsed(text, device)
            .map(|tables| Some(Self { name: name.to_owned(), ..tables }))
            .map_err(bug)
    }

    /// Reads tables from the text of a shipped file; parts that the text lacks have no table.
    ///
    /// # Errors
    /// What is wrong with which line, or with which part.
    pub fn read(text: &str, device: &Device) -> Result<Self, InputError> {
        let damaged = |damage| {
            match damage {
            Damage::Line(number) => InputError::new(format!(
                "line {number} of the efficiency tables is no name of theirs followed by numbers from 1e-6 to 1e18"
            ))
            .help("valid: lines such as `stream,1048576,4200`; see models/shipped/efficiency"),
            Damage::Part(part) => InputError::new(format!(
                "the efficiency tables have no whole grid of valid figures for `{part}`"
            ))
            .help("each combination of the sizes that its lines name is needed once; parts of the peak are at most 11000"),
        }
        };
        let tables = Self::parsed(text, device).map_err(damaged)?;
        Ok(Self { name: "measured".to_owned(), ..tables })
    }

    fn parsed(text: &str, device: &Device) -> Result<Self, Damage> {
        let lines = Lines::parse(text)?;
        let base = match lines.like {
            Some(like) => {
                let shipped = Self::shipped(like, device).ok().flatten();
                shipped.ok_or(Damage::Part("like"))?
            }
            None => kernels(&lines, device)?,
        };
        let attention = match part(&lines, "attention_backward", |lines| attention(lines, device))?
        {
            None => part(&lines, "attention", |lines| attention(lines, device))?,
            both => both,
        };
        let (links, link_lines) = match links(&lines)? {
            None if lines.like.is_some() => (base.links, base.link_lines),
            links => (links, link_lines(text)),
        };
        Ok(Self { attention: attention.or(base.attention), links, link_lines, ..base })
    }
}

/// The lines that describe links.
fn link_lines(text: &str) -> String {
    let of_links = |line: &&str| line.starts_with("collective") || line.starts_with("link,");
    text.lines().filter(of_links).flat_map(|line| [line, "\n"]).collect()
}

/// What is wrong with a table.
enum Damage {
    /// A line, counted from 1.
    Line(usize),
    /// A part: lines are missing, or have the wrong length.
    Part(&'static str),
}

/// First words of lines, and whether a colon and a format or a collective follow.
const KEYS: [(&str, bool); 8] = [
    ("gemm_k", true),
    ("gemm", true),
    ("attention", false),
    ("attention_backward", false),
    ("stream", false),
    ("collective_bytes", false),
    ("collective", true),
    ("link", false),
];

/// The lines of a file: numbers under the key in their first column.
struct Lines<'a> {
    like: Option<&'a str>,
    /// Formats whose products run in waves.
    waves: Vec<&'a str>,
    numbers: BTreeMap<&'a str, Vec<Vec<f64>>>,
}

impl<'a> Lines<'a> {
    fn parse(text: &'a str) -> Result<Self, Damage> {
        let mut lines = Self { like: None, waves: vec![], numbers: BTreeMap::new() };
        for (number, line) in text.lines().enumerate() {
            if line.starts_with('#') || line.trim().is_empty() {
                continue;
            }
            let damaged = || Damage::Line(number + 1);
            let (key, rest) = line.trim().split_once(',').ok_or_else(damaged)?;
            match key {
                "like" => lines.like = Some(rest),
                "waves" => lines.waves.push(rest),
                _ => lines.add(key, rest).ok_or_else(damaged)?,
            }
        }
        Ok(lines)
    }

    /// Adds the numbers under a key.
    fn add(&mut self, key: &'a str, numbers: &str) -> Option<()> {
        let (name, of) = key.split_once(':').map_or((key, None), |(name, of)| (name, Some(of)));
        if !KEYS.contains(&(name, of.is_some())) {
            return None;
        }
        let valid = |cell: &f64| (TABLE.0..=TABLE.1).contains(cell);
        let row = numbers.split(',').map(|cell| cell.parse().ok().filter(valid));
        self.numbers.entry(key).or_default().push(row.collect::<Option<_>>()?);
        Some(())
    }

    fn rows(&self, key: &str) -> &[Vec<f64>] {
        self.numbers.get(key).map_or(&[], Vec::as_slice)
    }
}

/// Everything but attention and the links.
fn kernels(lines: &Lines<'_>, device: &Device) -> Result<EfficiencyTables, Damage> {
    let measured = Dtype::ALL.into_iter().filter(|dtype| !gemm_rows(lines, *dtype).is_empty());
    let gemm = measured.map(|dtype| Some((dtype, gemm(lines, dtype, device)?)));
    Ok(EfficiencyTables {
        gemm: gemm.collect::<Option<_>>().ok_or(Damage::Part("gemm"))?,
        stream: part(lines, "stream", |lines| stream(lines, device))?,
        ..EfficiencyTables::default()
    })
}

/// A part, where there are lines of it.
fn part<T>(
    lines: &Lines<'_>,
    name: &'static str,
    of: impl FnOnce(&Lines<'_>) -> Option<T>,
) -> Result<Option<T>, Damage> {
    if lines.rows(name).is_empty() {
        return Ok(None);
    }
    of(lines).map(Some).ok_or(Damage::Part(name))
}

fn gemm_rows<'a>(lines: &'a Lines<'_>, dtype: Dtype) -> &'a [Vec<f64>] {
    lines.rows(&format!("gemm:{}", dtype.name()))
}

/// Sizes below the smallest measured ones, where the formula continues the table.
const SMALL: [f64; 4] = [16.0, 64.0, 128.0, 256.0];

/// Seconds of products. Below the smallest measured size the time at the nearest measured one is
/// scaled by the roofline's ratio; above, the efficiency stays.
fn gemm(lines: &Lines<'_>, dtype: Dtype, device: &Device) -> Option<Products> {
    let depths = lines.rows(&format!("gemm_k:{}", dtype.name())).first()?;
    let mut fraction = BTreeMap::new();
    for row in gemm_rows(lines, dtype) {
        let (shape, cells) = row.split_at_checked(2)?;
        for (k, cell) in depths.iter().zip(cells) {
            fraction.insert([shape[0], shape[1], *k].map(f64::to_bits), of_peak(*cell));
        }
    }
    let axes = [0, 1, 2].map(|i| axis(fraction.keys().map(|key| f64::from_bits(key[i]))));
    let first = [0, 1, 2].map(|i| axes[i].first().copied().unwrap_or(1.0));
    let extended = axes.map(|axis| with_smaller(&SMALL, &axis));
    let seconds = |point: [f64; 3]| {
        let near = [0, 1, 2].map(|i| point[i].max(first[i]));
        let share = fraction.get(&near.map(f64::to_bits)).copied().unwrap_or(f64::NAN);
        let [m, n, k] = near;
        let measured_s = product_flops(m, n, k) / (device.peak_flops(dtype) * share);
        measured_s * roofline::gemm_s(device, dtype, point) / roofline::gemm_s(device, dtype, near)
    };
    let waves = lines.waves.contains(&dtype.name()).then(|| Waves::of(device));
    Products::new(extended, waves, seconds)
}

/// An axis, with those sizes in front that are smaller than its own.
fn with_smaller(sizes: &[f64], axis: &[f64]) -> Vec<f64> {
    let first = axis.first().copied().unwrap_or(0.0);
    let smaller = sizes.iter().copied().filter(|&size| size < first);
    smaller.chain(axis.iter().copied()).collect()
}

/// The distinct values, rising.
fn axis(values: impl Iterator<Item = f64>) -> Vec<f64> {
    axis_of(values.collect())
}

fn axis_of(mut values: Vec<f64>) -> Vec<f64> {
    values.sort_by(f64::total_cmp);
    values.dedup();
    values
}

/// Tokens at which the forward efficiency halves on short sequences, below the measured ones.
const HALF_TOKENS: f64 = 1000.0;
/// Sequences below the measured ones.
const SHORT: [f64; 4] = [16.0, 128.0, 256.0, 512.0];
/// Time below the narrowest and above the widest measured head grows with these powers of the
/// width: narrow heads are bound by the softmax, not by the products.
const HEAD_POWERS: [f64; 2] = [0.7, 1.0];
/// FLOPs of a backward pass over those of a forward pass: five products instead of two.
pub(super) const BACKWARD_FLOPS: f64 = 2.5;

fn attention(lines: &Lines<'_>, device: &Device) -> Option<AttentionTable> {
    let (rows, own) = (lines.rows("attention"), lines.rows("attention_backward"));
    if rows.iter().chain(own).any(|row| row.len() != 4) {
        return None;
    }
    let column = |i: usize| axis(rows.iter().filter_map(|row| row.get(i).copied()));
    let (widths, sequences, heads) = (column(0), column(1), column(2));
    let first = *sequences.first()?;
    let peak = device.peak_flops(Dtype::Bf16);
    let seconds = |rows: &[Vec<f64>], [width, sequence, heads]: [f64; 3]| {
        let flops = attention_flops(width, sequence, heads);
        let short = |tokens: f64| tokens / (tokens + HALF_TOKENS);
        let measured = sequence.max(first);
        let share = of_peak(nearest_heads(rows, [width, measured, heads]).unwrap_or(f64::NAN));
        flops / (peak * share * short(sequence) / short(measured))
    };
    let fewest = *heads.first()?;
    let axes = [widths.clone(), with_smaller(&SHORT, &sequences), heads];
    let powers = [[HEAD_POWERS[0], 0.0, 0.0], [HEAD_POWERS[1], 2.0, 1.0]];
    let pass = |rows: &[Vec<f64>], times: f64| {
        let of = |point: [f64; 3]| times * seconds(rows, point);
        let each = |width: f64, sequence: f64| of([width, sequence, fewest]) / sequence;
        let least = |[width]: [f64; 1]| {
            sequences.iter().map(|&sequence| each(width, sequence)).fold(f64::INFINITY, f64::min)
        };
        let powers_of_width = HEAD_POWERS.map(|power| [power]);
        Some(AttentionPass {
            squares: Scaled::new(axes.clone(), powers, of)?,
            least: Scaled::new([widths.clone()], powers_of_width, least)?,
        })
    };
    Some(AttentionTable { forward: pass(rows, 1.0)?, backward: pass(own, BACKWARD_FLOPS)? })
}

/// Forward FLOPs of causal attention with heads of one `width`.
pub(super) fn attention_flops(width: f64, sequence: f64, heads: f64) -> f64 {
    core_flops(causal_pairs(sequence, sequence, sequence) * heads, 2.0 * width)
}

/// Fraction of peak measured at a head width and sequence for the nearest number of heads.
fn nearest_heads(rows: &[Vec<f64>], [width, sequence, heads]: [f64; 3]) -> Option<f64> {
    let same = rows.iter().filter(|row| row[0] == width && row[1] == sequence);
    let distance = |row: &&Vec<f64>| (row[2] / heads).ln().abs();
    same.min_by(|a, b| distance(a).total_cmp(&distance(b)))?.get(3).copied()
}

fn stream(lines: &Lines<'_>, device: &Device) -> Option<Scaled<1>> {
    let mut shares = BTreeMap::new();
    for row in lines.rows("stream") {
        let &[bytes, cell] = row.as_slice() else { return None };
        shares.insert(bytes.to_bits(), of_peak(cell));
    }
    let bytes = axis(shares.keys().map(|&bits| f64::from_bits(bits)));
    let share = |bytes: f64| shares.get(&bytes.to_bits()).copied().unwrap_or(f64::NAN);
    let seconds = |[bytes]: [f64; 1]| bytes / (device.hbm_bytes_per_s * share(bytes));
    Scaled::new([bytes], [[0.0], [1.0]], seconds)
}

fn links(lines: &Lines<'_>) -> Result<Option<LinkTable>, Damage> {
    part(lines, "collective_bytes", link_table)
}

fn link_table(lines: &Lines<'_>) -> Option<LinkTable> {
    let sizes = lines.rows("collective_bytes").first()?;
    let collective = |name: &str| {
        let mut micros = BTreeMap::new();
        for row in lines.rows(&format!("collective:{name}")) {
            let (ranks, cells) = row.split_first()?;
            if cells.len() != sizes.len() {
                return None;
            }
            for (bytes, cell) in sizes.iter().zip(cells) {
                micros.insert([*ranks, *bytes].map(f64::to_bits), *cell);
            }
        }
        let ranks = axis(micros.keys().map(|key| f64::from_bits(key[0])));
        let cell = |point: [f64; 2]| micros.get(&point.map(f64::to_bits)).copied();
        let seconds = |point| cell(point).unwrap_or(f64::NAN) * 1e-6;
        Scaled::new([ranks, axis_of(sizes.clone())], [[0.0; 2], [0.0, 1.0]], seconds)
    };
    Some(LinkTable {
        bytes_per_s: *lines.rows("link").first()?.first()?,
        all_reduce: collective("all_reduce")?,
        all_gather: collective("all_gather")?,
        reduce_scatter: collective("reduce_scatter")?,
        all_to_all: match lines.rows("collective:all_to_all") {
            [] => None,
            _ => Some(collective("all_to_all")?),
        },
    })
}
