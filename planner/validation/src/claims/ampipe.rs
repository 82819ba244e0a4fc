//! AMPipe (submitted to ICLR 2024): table 2, attention overlapped with the experts' all-to-alls.
//!
//! The table states neither batch nor capacity factor; the shipped models have the code's factor of
//! 2 and one sequence a GPU, the smaller of the two batches that section 4.1 uses.

use super::{Claim, Degrees, Gpt, Reason, Trial, Verdict, claim, percent};
use models::decisions::MoeOverlap;
use models::model;

/// A column of table 2.
#[derive(Clone, Copy)]
struct Measured {
    id: &'static str,
    model: &'static str,
    seq_len: u64,
    /// Printed milliseconds without overlap and at degrees 2 and 4.
    printed: [f64; 3],
}

const TABLE_2: [Measured; 4] = [
    measured("ampipe-m24", "ampipe_medium", 24 << 10, [2230.3, 2090.7, 1959.5]),
    measured("ampipe-m32", "ampipe_medium", 32 << 10, [3207.7, 3048.5, 2767.8]),
    measured("ampipe-l24", "ampipe_large", 24 << 10, [2893.4, 2730.3, 2511.1]),
    measured("ampipe-l32", "ampipe_large", 32 << 10, [4082.4, 3972.8, 3650.2]),
];

/// Degrees of overlap that the search tries.
const TRIED: [u64; 3] = [2, 4, 8];

const fn measured(
    id: &'static str,
    model: &'static str,
    seq_len: u64,
    printed: [f64; 3],
) -> Measured {
    Measured { id, model, seq_len, printed }
}

pub(super) fn claims() -> Vec<Claim> {
    let said = "on 8 A800, degree 4 is the fastest, and Tutel stays behind it";
    let of = |column: Measured| claim(column.id, "AMPipe table 2", said, move || ordered(&column));
    TABLE_2.into_iter().map(of).collect()
}

fn ordered(column: &Measured) -> Verdict {
    let ampipe = column.speedups(MoeOverlap::Ampipe)?;
    let tutel = column.speedups(MoeOverlap::Tutel)?;
    let [two, four, eight] = ampipe.map(percent);
    let [at_2, at_4] = column.printed_speedups().map(percent);
    let best = tutel.into_iter().fold(0.0, f64::max);
    let holds = ampipe[1] > ampipe[0].max(ampipe[2]) && ampipe[0] > 1.0 && best < ampipe[1];
    let predicted = format!(
        "{two} at degree 2 (measured {at_2}), {four} at 4 ({at_4}), {eight} at 8; Tutel at most {}",
        percent(best)
    );
    Ok((predicted, holds))
}

impl Measured {
    /// Speedups at degrees 2 and 4.
    fn printed_speedups(&self) -> [f64; 2] {
        [1, 2].map(|i| self.printed[0] / self.printed[i])
    }

    /// Predicted speedups at the degrees that the search tries.
    fn speedups(&self, overlap: MoeOverlap) -> Result<[f64; 3], Reason> {
        let plain_s = self.trial(MoeOverlap::None, 1)?.price()?.iteration_s;
        let mut speedups = [0.0; 3];
        for (speedup, degree) in speedups.iter_mut().zip(TRIED) {
            *speedup = plain_s / self.trial(overlap, degree)?.price()?.iteration_s;
        }
        Ok(speedups)
    }

    fn trial(&self, overlap: MoeOverlap, degree: u64) -> Result<Trial, Reason> {
        let plain = Gpt { layers: 12, hidden: 1024, heads: 16 };
        let degrees = Degrees { tp: 1, pp: 1, dp: 8, batch: 8 };
        let mut trial = Trial::gpt("a800", plain, degrees)?.with(|d| {
            d.ep = 8;
            d.recompute = models::decisions::RecomputePolicy::None;
            d.moe_overlap = overlap;
            d.moe_overlap_degree = degree;
        });
        let shipped = model::shipped(self.model)
            .ok_or_else(|| format!("model {} is not shipped", self.model))?;
        let model = shipped.map_err(|error| error.to_string())?;
        trial.model =
            model.with_run(Some(self.seq_len), Some(8)).map_err(|error| error.to_string())?;
        Ok(trial)
    }
}

#[cfg(test)]
mod tests {
    use super::{Measured, MoeOverlap, TABLE_2};

    /// How far the table's gains are from the predicted ones, in points: six of eight by 1.5 at
    /// most, the others by 3.9. Both bounds say what is reached, to notice when it gets worse;
    /// wanted are 3. Medium at 32K gained most at degree 4, large at 32K least at degree 2, against
    /// the trend of the other rows.
    #[test]
    fn gains_are_no_further_from_the_measured_ones() {
        let misses = |column: &Measured| {
            let found = column.speedups(MoeOverlap::Ampipe).expect("priced");
            let printed = column.printed_speedups();
            [0, 1].map(|i| 100.0 * (found[i] - printed[i]))
        };
        let misses = TABLE_2.each_ref().map(misses);
        let mut sizes: Vec<f64> = misses.as_flattened().iter().map(|miss| miss.abs()).collect();
        sizes.sort_by(f64::total_cmp);
        assert!(sizes[5] <= 1.5 && sizes[7] <= 3.9, "{misses:.2?}");
    }
}
