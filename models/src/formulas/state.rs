//! Bytes of parameters, gradients and optimizer state (ZeRO §3, §5; Overview, ZeRO).

/// Bytes a parameter takes, by what they hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StateBytes {
    /// The parameter itself.
    pub parameter: f64,
    /// Its gradient.
    pub gradient: f64,
    /// A second gradient buffer that micro-batches are summed into.
    pub accumulation: f64,
    /// The fp32 master copy.
    pub master: f64,
    /// Adam's two moments.
    pub moments: f64,
}

impl StateBytes {
    /// 16-bit parameters and gradients, fp32 master and moments: 16 (ZeRO §3.1, `K = 12`; Overview).
    pub const MIXED: Self =
        Self { parameter: 2.0, gradient: 2.0, accumulation: 0.0, master: 4.0, moments: 8.0 };
    /// The same with gradients kept in fp32: 18 (Megatron-LM with bf16).
    pub const MIXED_FP32_GRADIENT: Self = Self { gradient: 4.0, ..Self::MIXED };
    /// 16-bit gradients and an fp32 buffer to sum them: 20 (Overview, ZeRO, optional item 5).
    pub const MIXED_FP32_ACCUMULATION: Self = Self { accumulation: 4.0, ..Self::MIXED };
    /// Everything in fp32, no master copy: 16.
    pub const FP32: Self =
        Self { parameter: 4.0, gradient: 4.0, accumulation: 0.0, master: 0.0, moments: 8.0 };

    /// Both gradient buffers.
    fn gradients(&self) -> f64 {
        self.gradient + self.accumulation
    }

    /// Master copy and moments: ZeRO's `K`.
    fn optimizer(&self) -> f64 {
        self.master + self.moments
    }

    /// Bytes a parameter on one rank that shards nothing.
    pub fn total(&self) -> f64 {
        self.parameter + self.gradients() + self.optimizer()
    }
}

/// What is sharded over the data parallel ranks (ZeRO §5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Zero {
    /// Nothing: plain data parallelism.
    Stage0,
    /// Optimizer state.
    Stage1,
    /// And gradients.
    Stage2,
    /// And parameters.
    Stage3,
}

/// Bytes one of `ranks` holds for `parameters` (ZeRO §5 and Fig. 1; Overview's memory table).
///
/// With [`StateBytes::MIXED`]: `16Ψ`, `4Ψ + 12Ψ/N`, `2Ψ + 14Ψ/N`, `16Ψ/N`. Stage 2 holds to this only
/// if every micro-batch's gradients are reduced at once; stages 2 and 3 need a bucket and gathered
/// units on top.
pub fn zero_bytes(state: &StateBytes, zero: Zero, parameters: f64, ranks: f64) -> f64 {
    let share = |from: Zero, bytes: f64| if zero >= from { bytes / ranks } else { bytes };
    let each = share(Zero::Stage3, state.parameter)
        + share(Zero::Stage2, state.gradients())
        + share(Zero::Stage1, state.optimizer());
    parameters * each
}

/// Bytes on one rank under Megatron-LM's distributed optimizer, `Ψ(6 + 12/N)`: the fp32 gradient
/// buffer stays whole.
pub fn distributed_optimizer_bytes(parameters: f64, ranks: f64) -> f64 {
    zero_bytes(&StateBytes::MIXED_FP32_GRADIENT, Zero::Stage1, parameters, ranks)
}

/// Ranks that share an expert's state, `world/(etp·ep·pp)`: the `N` of expert parameters.
pub fn expert_ranks(world: f64, expert_tensor: f64, expert: f64, stages: f64) -> f64 {
    world / (expert_tensor * expert * stages)
}

/// Bytes of a checkpoint to resume from: everything but gradients.
///
/// Mixed precision takes 14 a parameter, 14.1 TB for SC'21's 1008 B model; SC'21 §5.10 prints 13.8.
pub fn checkpoint_bytes(state: &StateBytes, parameters: f64) -> f64 {
    parameters * (state.parameter + state.optimizer())
}
