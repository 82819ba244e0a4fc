//! Operations: each is one call of the library.

/// A value, by its index in [`super::Segment::values`].
pub type Value = usize;
/// A field, by its index in [`super::Segment::fields`].
pub type FieldIndex = usize;

/// How numbers of each token are combined over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// Added.
    Sum,
    /// The largest.
    Max,
}

/// What an exchange of tokens for heads moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heads {
    /// Queries, or what is as wide.
    Queries,
    /// Keys or values, where several queries may share one.
    Keys,
    /// Values of latent attention, or what is as wide.
    Values,
}

/// One operation. Fields named `to` and those after it are new values; the others are read.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Op {
    /// The norm of the stream, and the stream as one tensor, `x`.
    Norm {
        field: FieldIndex,
        stream: Value,
        x: Value,
        to: Value,
        statistics: Value,
    },
    /// The norm of a tensor; statistics unless they are known.
    NormOf {
        field: FieldIndex,
        x: Value,
        to: Value,
        statistics: Option<Value>,
    },
    /// Collectives of the tensor-parallel ranks.
    AllGather {
        x: Value,
        to: Value,
    },
    ReduceScatter {
        x: Value,
        to: Value,
    },
    AllReduce {
        x: Value,
        to: Value,
    },
    /// The same, started; what follows runs meanwhile.
    StartAllGather {
        x: Value,
        to: Value,
    },
    StartReduceScatter {
        x: Value,
        to: Value,
    },
    StartAllReduce {
        x: Value,
        to: Value,
    },
    Wait {
        x: Value,
        to: Value,
    },
    /// Combines a number of each token.
    AllReduceNumbers {
        x: Value,
        reduction: Reduction,
        to: Value,
    },
    /// `x W^T`, and the bias if it is split like W.
    Linear {
        field: FieldIndex,
        x: Value,
        to: Value,
    },
    /// `x + y`, in the place of `x`.
    Add {
        x: Value,
        y: Value,
        to: Value,
    },
    /// Adds a bias in place.
    AddBias {
        field: FieldIndex,
        x: Value,
        to: Value,
    },
    /// Rotary positions, in place.
    Rotate {
        field: FieldIndex,
        x: Value,
        to: Value,
    },
    RotateBack {
        field: FieldIndex,
        x: Value,
        to: Value,
    },
    Attention {
        field: FieldIndex,
        q: Value,
        k: Value,
        v: Value,
        /// Whose queries are attended to; `None` for all.
        chunk: Option<u64>,
        to: Value,
        lse: Value,
    },
    /// An exchange of tokens for heads over the Ulysses group.
    ToHeads {
        field: FieldIndex,
        x: Value,
        to: Value,
        heads: Heads,
    },
    /// Its backward pass.
    ToTokens {
        field: FieldIndex,
        x: Value,
        to: Value,
        heads: Heads,
    },
    /// Keys and values of latent attention, from what was projected up and the part of keys that
    /// all heads share.
    JoinHeads {
        field: FieldIndex,
        up: Value,
        rotary: Value,
        to: [Value; 2],
    },
    /// Its backward pass: gradients of both.
    SplitHeads {
        field: FieldIndex,
        dk: Value,
        dv: Value,
        to: [Value; 2],
    },
    /// The activation between the feed-forward block's matrices.
    Activate {
        x: Value,
        to: Value,
    },
    Gate {
        gate: Value,
        up: Value,
        to: Value,
    },
    /// A chunk's rows.
    Chunk {
        x: Value,
        chunk: u64,
        to: Value,
    },
    /// The rows of all chunks, one after the other.
    Join {
        parts: Vec<Value>,
        to: Value,
    },
    /// Sums of the gradients of the queries, keys and values `saved`, 0 so far.
    BeginSums {
        field: FieldIndex,
        saved: [Value; 3],
        to: Value,
    },
    /// Adds the part of a chunk's queries to them.
    AddToSums {
        field: FieldIndex,
        chunk: u64,
        saved: [Value; 5],
        dy: Value,
        sums: Value,
        to: Value,
    },
    FinishSums {
        field: FieldIndex,
        sums: Value,
        to: [Value; 3],
    },
    /// Chooses experts for the rows of `x`, and tells their ranks what comes.
    Route {
        field: FieldIndex,
        x: Value,
        /// Which chunk of this rank's rows these are; `None` if they are all.
        chunk: Option<u64>,
        to: Value,
    },
    /// Notes how rows load experts, for losses of routers and updates of selection biases.
    NoteLoad {
        field: FieldIndex,
        route: Value,
    },
    /// Each row as often as it has experts.
    Copies {
        route: Value,
        x: Value,
        to: Value,
    },
    /// Its backward pass: the sum of each row's copies.
    SumCopies {
        route: Value,
        x: Value,
        to: Value,
    },
    /// Brings copies to the ranks of their experts.
    Dispatch {
        route: Value,
        x: Value,
        to: Value,
    },
    /// [`Self::Dispatch`] and [`Self::Combine`], started; what follows runs meanwhile.
    StartDispatch {
        route: Value,
        x: Value,
        to: Value,
    },
    FinishDispatch {
        route: Value,
        x: Value,
        to: Value,
    },
    StartCombine {
        route: Value,
        x: Value,
        to: Value,
    },
    FinishCombine {
        route: Value,
        x: Value,
        to: Value,
    },
    /// Brings what experts made of copies back.
    Combine {
        route: Value,
        x: Value,
        to: Value,
    },
    /// `x W^T` of each expert.
    ExpertLinear {
        field: FieldIndex,
        x: Value,
        to: Value,
    },
    /// The sum of each row's copies by their weights.
    WeightedSum {
        route: Value,
        x: Value,
        to: Value,
    },
    /// Gradients of the copies `x`, and of their weights.
    WeightedSumBackward {
        route: Value,
        x: Value,
        dy: Value,
        to: Value,
        weights: Value,
    },
    /// `dy W` of each expert.
    ExpertBackward {
        field: FieldIndex,
        dy: Value,
        to: Value,
    },
    /// Adds `dy W` of each expert to `x`, in place.
    AddExpertBackward {
        field: FieldIndex,
        dy: Value,
        x: Value,
        to: Value,
    },
    /// The gradient of the router's logits, from that of the copies' weights.
    RouteBackward {
        field: FieldIndex,
        route: Value,
        weights: Value,
        to: Value,
    },
    /// Gradients of the experts' matrices.
    ExpertWeights {
        field: FieldIndex,
        x: Value,
        dy: Value,
    },
    /// In place; `place` counts a layer's dropouts, `None` is the embedding's.
    Dropout {
        place: Option<u32>,
        x: Value,
        to: Value,
    },
    /// The stream behind half a layer: the sum of both.
    Sum {
        x: Value,
        branch: Value,
        to: Value,
    },
    /// A tensor as the stream.
    Begin {
        x: Value,
        to: Value,
    },
    /// Rows of the tokens.
    Embed {
        field: FieldIndex,
        to: Value,
    },
    /// Adds learned positions in place.
    AddPositions {
        field: FieldIndex,
        x: Value,
        to: Value,
    },
    /// Of the logits `x`, or of those of `x` that exist for a block of tokens at a time: the
    /// maximum of each token's, the sum of exponentials around it, and the target's.
    Sums {
        field: FieldIndex,
        x: Value,
        to: Value,
        sum_exp: Value,
        target: Value,
    },
    /// Each token's loss.
    Loss {
        field: FieldIndex,
        max: Value,
        sum_exp: Value,
        target: Value,
        to: Value,
    },
    /// Sums of exponentials around another maximum.
    Around {
        field: FieldIndex,
        own_sum: Value,
        own: Value,
        max: Value,
        to: Value,
    },
    /// Gradient of the input of such logits; adds the gradient of the output matrix.
    BlockBackward {
        field: FieldIndex,
        x: Value,
        max: Value,
        sum_exp: Value,
        to: Value,
    },
    /// Gradient of the logits, in their place.
    LossGradient {
        field: FieldIndex,
        logits: Value,
        max: Value,
        sum_exp: Value,
        to: Value,
    },
    /// `dy W`
    BackwardInput {
        field: FieldIndex,
        dy: Value,
        to: Value,
    },
    /// Adds `dy W` to `x`, in place.
    AddBackwardInput {
        field: FieldIndex,
        dy: Value,
        x: Value,
        to: Value,
    },
    AttentionBackward {
        field: FieldIndex,
        saved: [Value; 5],
        dy: Value,
        to: [Value; 3],
    },
    /// Gradient of the logits that attention counts beside its keys', from its output, log-sum-exp
    /// and gradient.
    SinkWeights {
        field: FieldIndex,
        chunk: Option<u64>,
        a: Value,
        lse: Value,
        dy: Value,
    },
    ActivateBackward {
        x: Value,
        dy: Value,
        to: Value,
    },
    GateBackward {
        gate: Value,
        up: Value,
        dy: Value,
        to: [Value; 2],
    },
    /// Gradient of a norm's input; added to `sum`, in place, if there is one.
    NormBackward {
        field: FieldIndex,
        x: Value,
        statistics: Value,
        dy: Value,
        sum: Option<Value>,
        to: Value,
    },
    /// Gradients of parameters.
    LinearWeights {
        field: FieldIndex,
        x: Value,
        dy: Value,
    },
    BiasWeights {
        field: FieldIndex,
        dy: Value,
    },
    NormWeights {
        field: FieldIndex,
        x: Value,
        statistics: Value,
        dy: Value,
    },
    TokenWeights {
        field: FieldIndex,
        dy: Value,
    },
    PositionWeights {
        field: FieldIndex,
        dy: Value,
    },
}

/// An operation, and the values that nothing reads after it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The operation.
    pub op: Op,
    /// Values whose last use this is: they are moved into it, where it takes them, and freed.
    pub last_uses: Vec<Value>,
}

impl Step {
    /// Whether this is the value's last use.
    pub fn ends(&self, value: Value) -> bool {
        self.last_uses.contains(&value)
    }
}

impl Op {
    /// Values that it makes.
    pub fn makes(&self) -> Vec<Value> {
        match *self {
            Self::Norm { x, to, statistics, .. } => vec![x, to, statistics],
            Self::NormOf { to, statistics, .. } => std::iter::once(to).chain(statistics).collect(),
            Self::Attention { to, lse, .. } => vec![to, lse],
            Self::Sums { to, sum_exp, target, .. } => vec![to, sum_exp, target],
            Self::AttentionBackward { to, .. } | Self::FinishSums { to, .. } => to.to_vec(),
            Self::GateBackward { to, .. }
            | Self::JoinHeads { to, .. }
            | Self::SplitHeads { to, .. } => to.to_vec(),
            Self::WeightedSumBackward { to, weights, .. } => vec![to, weights],
            Self::AllGather { to, .. }
            | Self::ReduceScatter { to, .. }
            | Self::AllReduce { to, .. }
            | Self::StartAllGather { to, .. }
            | Self::StartReduceScatter { to, .. }
            | Self::StartAllReduce { to, .. }
            | Self::Wait { to, .. }
            | Self::AllReduceNumbers { to, .. }
            | Self::Linear { to, .. }
            | Self::Route { to, .. }
            | Self::Copies { to, .. }
            | Self::SumCopies { to, .. }
            | Self::Dispatch { to, .. }
            | Self::Combine { to, .. }
            | Self::StartDispatch { to, .. }
            | Self::FinishDispatch { to, .. }
            | Self::StartCombine { to, .. }
            | Self::FinishCombine { to, .. }
            | Self::Chunk { to, .. }
            | Self::Join { to, .. }
            | Self::BeginSums { to, .. }
            | Self::AddToSums { to, .. }
            | Self::ExpertLinear { to, .. }
            | Self::WeightedSum { to, .. }
            | Self::ExpertBackward { to, .. }
            | Self::AddExpertBackward { to, .. }
            | Self::RouteBackward { to, .. }
            | Self::Add { to, .. }
            | Self::AddBias { to, .. }
            | Self::Rotate { to, .. }
            | Self::ToHeads { to, .. }
            | Self::ToTokens { to, .. }
            | Self::RotateBack { to, .. }
            | Self::Activate { to, .. }
            | Self::Gate { to, .. }
            | Self::Dropout { to, .. }
            | Self::Sum { to, .. }
            | Self::Begin { to, .. }
            | Self::Embed { to, .. }
            | Self::AddPositions { to, .. }
            | Self::Loss { to, .. }
            | Self::LossGradient { to, .. }
            | Self::Around { to, .. }
            | Self::BlockBackward { to, .. }
            | Self::BackwardInput { to, .. }
            | Self::AddBackwardInput { to, .. }
            | Self::ActivateBackward { to, .. }
            | Self::NormBackward { to, .. } => vec![to],
            Self::NoteLoad { .. }
            | Self::SinkWeights { .. }
            | Self::LinearWeights { .. }
            | Self::ExpertWeights { .. }
            | Self::BiasWeights { .. }
            | Self::NormWeights { .. }
            | Self::TokenWeights { .. }
            | Self::PositionWeights { .. } => vec![],
        }
    }

    /// Values that it reads.
    pub fn reads(&self) -> Vec<Value> {
        match *self {
            Self::Norm { stream, .. } => vec![stream],
            Self::NormOf { x, .. }
            | Self::AllGather { x, .. }
            | Self::ReduceScatter { x, .. }
            | Self::AllReduce { x, .. }
            | Self::StartAllGather { x, .. }
            | Self::StartReduceScatter { x, .. }
            | Self::StartAllReduce { x, .. }
            | Self::Wait { x, .. }
            | Self::AllReduceNumbers { x, .. }
            | Self::Linear { x, .. }
            | Self::Route { x, .. }
            | Self::Chunk { x, .. }
            | Self::ExpertLinear { x, .. }
            | Self::AddBias { x, .. }
            | Self::Rotate { x, .. }
            | Self::ToHeads { x, .. }
            | Self::ToTokens { x, .. }
            | Self::RotateBack { x, .. }
            | Self::Activate { x, .. }
            | Self::Dropout { x, .. }
            | Self::Begin { x, .. }
            | Self::Sums { x, .. }
            | Self::AddPositions { x, .. } => vec![x],
            Self::Copies { route, x, .. }
            | Self::SumCopies { route, x, .. }
            | Self::Dispatch { route, x, .. }
            | Self::Combine { route, x, .. }
            | Self::StartDispatch { route, x, .. }
            | Self::FinishDispatch { route, x, .. }
            | Self::StartCombine { route, x, .. }
            | Self::FinishCombine { route, x, .. }
            | Self::WeightedSum { route, x, .. } => vec![route, x],
            Self::WeightedSumBackward { route, x, dy, .. } => vec![route, x, dy],
            Self::NoteLoad { route, .. } => vec![route],
            Self::RouteBackward { route, weights, .. } => vec![route, weights],
            Self::Add { x, y, .. } => vec![x, y],
            Self::Join { ref parts, .. } => parts.clone(),
            Self::BeginSums { saved, .. } => saved.to_vec(),
            Self::AddToSums { saved, dy, sums, .. } => {
                saved.into_iter().chain([dy, sums]).collect()
            }
            Self::FinishSums { sums, .. } => vec![sums],
            Self::Around { own_sum, own, max, .. } => vec![own_sum, own, max],
            Self::BlockBackward { x, max, sum_exp, .. } => vec![x, max, sum_exp],
            Self::Attention { q, k, v, .. } => vec![q, k, v],
            Self::JoinHeads { up, rotary, .. } => vec![up, rotary],
            Self::SplitHeads { dk, dv, .. } => vec![dk, dv],
            Self::Gate { gate, up, .. } => vec![gate, up],
            Self::Sum { x, branch, .. } => vec![x, branch],
            Self::Embed { .. } => vec![],
            Self::Loss { max, sum_exp, target, .. } => vec![max, sum_exp, target],
            Self::LossGradient { logits, max, sum_exp, .. } => vec![logits, max, sum_exp],
            Self::BackwardInput { dy, .. }
            | Self::ExpertBackward { dy, .. }
            | Self::BiasWeights { dy, .. }
            | Self::TokenWeights { dy, .. }
            | Self::PositionWeights { dy, .. } => vec![dy],
            Self::AddBackwardInput { dy, x, .. } | Self::AddExpertBackward { dy, x, .. } => {
                vec![dy, x]
            }
            Self::AttentionBackward { saved, dy, .. } => saved.into_iter().chain([dy]).collect(),
            Self::SinkWeights { a, lse, dy, .. } => vec![a, lse, dy],
            Self::ActivateBackward { x, dy, .. }
            | Self::LinearWeights { x, dy, .. }
            | Self::ExpertWeights { x, dy, .. } => {
                vec![x, dy]
            }
            Self::GateBackward { gate, up, dy, .. } => vec![gate, up, dy],
            Self::NormBackward { x, statistics, dy, sum, .. } => {
                [x, statistics, dy].into_iter().chain(sum).collect()
            }
            Self::NormWeights { x, statistics, dy, .. } => vec![x, statistics, dy],
        }
    }

    /// The field that it uses.
    pub fn field(&self) -> Option<FieldIndex> {
        match *self {
            Self::Norm { field, .. }
            | Self::NormOf { field, .. }
            | Self::Linear { field, .. }
            | Self::Route { field, .. }
            | Self::BeginSums { field, .. }
            | Self::AddToSums { field, .. }
            | Self::FinishSums { field, .. }
            | Self::NoteLoad { field, .. }
            | Self::ExpertLinear { field, .. }
            | Self::ExpertBackward { field, .. }
            | Self::AddExpertBackward { field, .. }
            | Self::RouteBackward { field, .. }
            | Self::ExpertWeights { field, .. }
            | Self::SinkWeights { field, .. }
            | Self::AddBias { field, .. }
            | Self::Rotate { field, .. }
            | Self::RotateBack { field, .. }
            | Self::Attention { field, .. }
            | Self::JoinHeads { field, .. }
            | Self::SplitHeads { field, .. }
            | Self::Embed { field, .. }
            | Self::AddPositions { field, .. }
            | Self::Sums { field, .. }
            | Self::Loss { field, .. }
            | Self::LossGradient { field, .. }
            | Self::Around { field, .. }
            | Self::BlockBackward { field, .. }
            | Self::BackwardInput { field, .. }
            | Self::AddBackwardInput { field, .. }
            | Self::AttentionBackward { field, .. }
            | Self::NormBackward { field, .. }
            | Self::LinearWeights { field, .. }
            | Self::BiasWeights { field, .. }
            | Self::NormWeights { field, .. }
            | Self::TokenWeights { field, .. }
            | Self::PositionWeights { field, .. } => Some(field),
            _ => None,
        }
    }
}
