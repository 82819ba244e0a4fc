//! Bytes of parameters, gradients and optimizer state (ZeRO §3, §5).

/// Bytes by what they hold: of one parameter, or of all of a rank's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StateBytes {
    /// Weights used in computation.
    pub weights: f64,
    /// Accumulated gradients.
    pub gradients: f64,
    /// Master weights and Adam's moments: ZeRO's `K`.
    pub optimizer: f64,
}

/// Bytes that one of `ranks` holds for `parameters`, each of which takes `each` before sharding
/// (ZeRO §5 and Fig. 1): stage 1 shards the optimizer, 2 gradients too, 3 weights too.
///
/// With 2, 2 and 12 bytes: `16Ψ`, `4Ψ + 12Ψ/N`, `2Ψ + 14Ψ/N`, `16Ψ/N`. Stage 2 holds to this only
/// if every micro-batch's gradients are reduced at once. Buckets and gathered units come on top.
pub fn zero_bytes(each: &StateBytes, stage: u8, parameters: f64, ranks: f64) -> StateBytes {
    let held = |from_stage: u8, bytes: f64| {
        parameters * bytes / if stage >= from_stage { ranks } else { 1.0 }
    };
    StateBytes {
        weights: held(3, each.weights),
        gradients: held(2, each.gradients),
        optimizer: held(1, each.optimizer),
    }
}
