//! AMPipe (submitted to ICLR 2024): table 2, attention overlapped with the experts' all-to-alls.

use super::{Claim, Degrees, Gpt, Reason, Trial, Verdict, claim};
use models::decisions::MoeOverlap;
use models::model;

/// Id, model, sequence length, and the printed milliseconds at overlap degrees 1, 2 and 4.
const TABLE_2: [(&str, &str, u64, [f64; 3]); 4] = [
    ("ampipe-m24", "ampipe_medium", 24 << 10, [2230.3, 2090.7, 1959.5]),
    ("ampipe-m32", "ampipe_medium", 32 << 10, [3207.7, 3048.5, 2767.8]),
    ("ampipe-l24", "ampipe_large", 24 << 10, [2893.4, 2730.3, 2511.1]),
    ("ampipe-l32", "ampipe_large", 32 << 10, [4082.4, 3972.8, 3650.2]),
];

pub(super) fn claims() -> Vec<Claim> {
    let of = |(id, name, seq_len, printed): (&'static str, &'static str, u64, [f64; 3])| {
        let said = "on 8 A800, degree 4 is faster than 2, and 2 than 1";
        claim(id, "AMPipe table 2", said, move || ordered(name, seq_len, printed))
    };
    TABLE_2.into_iter().map(of).collect()
}

fn ordered(name: &str, seq_len: u64, printed: [f64; 3]) -> Verdict {
    let mut times = vec![];
    for degree in [1, 2, 4] {
        times.push(trial(name, seq_len, degree)?.price()?.iteration_s);
    }
    let ratios: Vec<String> = [1, 2]
        .map(|i| format!("{:.2} (measured {:.2})", times[0] / times[i], printed[0] / printed[i]))
        .to_vec();
    let holds = times.windows(2).all(|pair| pair[1] < pair[0]);
    Ok((format!("speedup {}", ratios.join(", ")), holds))
}

fn trial(name: &str, seq_len: u64, degree: u64) -> Result<Trial, Reason> {
    let plain = Gpt { layers: 12, hidden: 1024, heads: 16 };
    let degrees = Degrees { tp: 1, pp: 1, dp: 8, batch: 8 };
    let mut trial = Trial::gpt("a800", plain, degrees)?.with(|d| {
        d.ep = 8;
        d.recompute = models::decisions::RecomputePolicy::None;
        d.moe_overlap = if degree > 1 { MoeOverlap::Ampipe } else { MoeOverlap::None };
        d.moe_overlap_degree = degree;
    });
    let shipped = model::shipped(name).ok_or_else(|| format!("model {name} is not shipped"))?;
    let model = shipped.map_err(|error| error.to_string())?;
    trial.model = model.with_run(Some(seq_len), Some(8)).map_err(|error| error.to_string())?;
    Ok(trial)
}
