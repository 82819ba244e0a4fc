//! A feed-forward block that tensor-parallel ranks divide: that of a dense layer, and the experts
//! that every token goes to.

use super::builder::Builder;
use super::op::{FieldIndex, Op, Value};
use super::{FieldKind, Matrix, TensorNames, Width};
use models::model::ModelSpec;

/// Fields of a feed-forward block.
pub(super) struct Mlp {
    gate: Option<FieldIndex>,
    up: FieldIndex,
    down: FieldIndex,
    width: Width,
}

/// What its backward pass reads.
pub(super) struct Inner {
    gate: Option<Value>,
    up: Value,
    /// What the activation makes.
    pub product: Value,
}

/// A matrix's gradient: its input, `None` if that is the half's, and the gradient of its output.
pub(super) struct LaterWeights {
    pub field: FieldIndex,
    pub x: Option<Value>,
    pub dy: Value,
}

impl Mlp {
    /// That of a dense layer.
    pub(super) fn fields(b: &mut Builder<'_>, model: &ModelSpec, names: TensorNames) -> Self {
        let [gate, up, down] = names.mlp();
        let bias = model.mlp.bias;
        let column = |tensor| FieldKind::Column {
            matrix: Matrix { blocks: vec![Width::Ffn], ..Matrix::plain(tensor, names, bias) },
            block: 0,
            outputs: Width::Ffn,
        };
        let gate = model.mlp.activation.is_gated().then(|| b.field("gate", column(gate)));
        let up = b.field("up", column(up));
        let with_bias = bias && b.sizes.tp == 1;
        let of = Matrix { adds_to_stream: true, ..Matrix::plain(down, names, with_bias) };
        let down = b.field("down", FieldKind::Row { matrix: of, inputs: Width::Ffn });
        Self { gate, up, down, width: Width::Ffn }
    }

    /// The experts of every token, as one block, if the model has any.
    pub(super) fn shared(b: &mut Builder<'_>, model: &ModelSpec) -> Option<Self> {
        model.moe.as_ref().filter(|moe| moe.shared_ffn > 0)?;
        let (names, width) = (TensorNames::Llama, Width::SharedFfn);
        let [gate, up, down] = TensorNames::shared_expert();
        let column = |tensor| FieldKind::Column {
            matrix: Matrix { blocks: vec![width], ..Matrix::plain(tensor, names, false) },
            block: 0,
            outputs: width,
        };
        let gate = model.mlp.activation.is_gated().then(|| b.field("shared_gate", column(gate)));
        let up = b.field("shared_up", column(up));
        let of = Matrix { adds_to_stream: true, ..Matrix::plain(down, names, false) };
        let down = b.field("shared_down", FieldKind::Row { matrix: of, inputs: width });
        Some(Self { gate, up, down, width })
    }

    /// A value's name: those of shared experts lie beside values of the routed ones.
    fn name(&self, before: &str, name: &str) -> String {
        match self.width {
            Width::SharedFfn => format!("{before}shared_{name}"),
            _ => format!("{before}{name}"),
        }
    }

    /// Partial sums of the output.
    pub(super) fn forward(&self, b: &mut Builder<'_>, x: Value) -> (Value, Inner) {
        let of = b.sizes.split(self.width);
        let linear = |field| move |to| Op::Linear { field, x, to };
        let gate = self.gate.map(|field| b.op(self.name("", "gate"), of, linear(field)));
        let up = b.op(self.name("", "up"), of, linear(self.up));
        let inner = self.name("", "inner");
        let product = match gate {
            Some(gate) => b.op(inner, of, |to| Op::Gate { gate, up, to }),
            None => b.op(inner, of, |to| Op::Activate { x: up, to }),
        };
        let (field, part) = (self.down, b.sizes.part());
        let part = b.op(self.name("", "part_2"), part, |to| Op::Linear { field, x: product, to });
        (part, Inner { gate, up, product })
    }

    /// The gradient of the input, partial sums, and the work on weights.
    pub(super) fn backward(
        &self,
        b: &mut Builder<'_>,
        inner: &Inner,
        dy: Value,
    ) -> (Value, Vec<LaterWeights>) {
        let (of, part) = (b.sizes.split(self.width), b.sizes.part());
        let field = self.down;
        let dinner = self.name("d", "inner");
        let dinner = b.op(dinner, of, |to| Op::BackwardInput { field, dy, to });
        let down = LaterWeights { field, x: Some(inner.product), dy };
        let later = |field, dy| LaterWeights { field, x: None, dy };
        let dpart = self.name("d", "part");
        let [dgate, dup] = ["gate", "up"].map(|name| self.name("d", name));
        let (Some(field), Some(gate)) = (self.gate, inner.gate) else {
            let x = inner.up;
            let dup = b.op(dup, of, |to| Op::ActivateBackward { x, dy: dinner, to });
            let dh = b.op(dpart, part, |to| Op::BackwardInput { field: self.up, dy: dup, to });
            return (dh, vec![down, later(self.up, dup)]);
        };
        let [dgate, dup] = [b.value(dgate, of), b.value(dup, of)];
        b.push(Op::GateBackward { gate, up: inner.up, dy: dinner, to: [dgate, dup] });
        let x = b.op(dpart.clone(), part, |to| Op::BackwardInput { field, dy: dgate, to });
        let add = |to| Op::AddBackwardInput { field: self.up, dy: dup, x, to };
        let dh = b.op(dpart, part, add);
        (dh, vec![down, later(self.up, dup), later(field, dgate)])
    }
}
