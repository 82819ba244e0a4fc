//! An NVIDIA GPU: the CUDA twins of the kernels, on queues of one device. Tensors are stored in `S`, bf16 or f32, and
//! summed in f32; exact weights are apart, in f32.
//!
//! Several ranks may share one GPU, each with a queue of its own, and one for what it takes of others (loopback). What one
//! hands to another goes with an event, and memory goes back to the queue that it came from behind all who used it.

mod freight;

use super::{
    Device, DeviceError, Gradients, Ids, MemoryUse, Parameter, Proposal, RowSums, Saved, Space,
    Stored, StoredMut, Target, Wide, WideMut,
};
use crate::comm::{Cargo, CommError, Communicator, Dtype, Element, Freight, Op, Payload};
use crate::scalar::Number;
use kernels::activation::{self, Activation};
use kernels::adamw::{self, AdamW};
use kernels::attention::{self, Attention};
use kernels::cross_entropy::{self, Logits};
use kernels::cuda::{self, Event, GpuError};
use kernels::dropout::{self, Dropout};
use kernels::embedding::{self, Embedding};
use kernels::gemm::{self, Shape};
use kernels::layer_norm::{self, LayerNorm};
use kernels::random::{self, Stream, View as Numbered};
use kernels::rms_norm::{self, RmsNorm};
use kernels::rope::{self, Rope};
use kernels::{Cpu, Output, elementwise};
use std::any::Any;
use std::collections::BTreeMap;
use std::fmt::{self, Debug};
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// One rank's queue of a GPU.
pub struct Gpu<S> {
    queue: Queue,
    /// Where other ranks' memory is combined, once there is any: beside what the rank computes.
    transfers: OnceLock<Queue>,
    host: Cpu,
    stored: PhantomData<fn() -> S>,
}

impl<S> Gpu<S> {
    /// A queue of that device, for a rank or for one of its lanes.
    pub fn new(gpu: cuda::Gpu) -> Self {
        let queue = Queue { gpu, failure: Arc::default() };
        Self::on(queue, OnceLock::new())
    }

    fn on(queue: Queue, transfers: OnceLock<Queue>) -> Self {
        Self { queue, transfers, host: Cpu::serial(), stored: PhantomData }
    }

    fn transfers(&self) -> &Queue {
        self.transfers.get_or_init(|| self.queue.fork())
    }
}

/// A queue, and what went wrong first on the rank that has it.
#[derive(Clone)]
struct Queue {
    gpu: cuda::Gpu,
    failure: Arc<OnceLock<DeviceError>>,
}

impl From<GpuError> for DeviceError {
    fn from(error: GpuError) -> Self {
        Self(error.to_string())
    }
}

impl Queue {
    /// Another queue of the rank; this one, where there cannot be another.
    fn fork(&self) -> Self {
        let gpu = self.kept(self.gpu.fork()).unwrap_or_else(|| self.gpu.clone());
        Self { gpu, failure: self.failure.clone() }
    }

    /// Keeps a failure.
    fn kept<R>(&self, result: Result<R, GpuError>) -> Option<R> {
        match result {
            Ok(result) => Some(result),
            Err(error) => {
                self.failure.get_or_init(|| error.into());
                None
            }
        }
    }

    fn health(&self) -> Result<(), DeviceError> {
        self.failure.get().map_or(Ok(()), |failure| Err(failure.clone()))
    }

    fn mark(&self) -> Option<Event> {
        self.kept(self.gpu.record())
    }

    fn wait_for(&self, mark: Option<&Event>) {
        if let Some(event) = mark {
            self.kept(self.gpu.wait(event));
        }
    }

    /// Memory of `len` elements, filled by `fill`.
    fn memory<E: Element>(
        &self,
        len: usize,
        fill: impl FnOnce(&cuda::Gpu) -> Result<cuda::Memory<E>, GpuError>,
    ) -> Memory<E> {
        let memory = if len == 0 { None } else { self.kept(fill(&self.gpu)) };
        let held = memory.map(|memory| Held { memory: Some(memory), users: Mutex::default() });
        Memory { held, len }
    }
}

/// Memory of the GPU. Where the device had none left there is none behind it, and whatever is asked of it is not done:
/// the device has kept why.
pub struct Memory<E: Element> {
    held: Option<Held<E>>,
    len: usize,
}

struct Held<E: Element> {
    memory: Option<cuda::Memory<E>>,
    /// Other queues that may use it.
    users: Mutex<Vec<Queue>>,
}

impl<E: Element> Memory<E> {
    fn view(&self, range: Range<usize>) -> View<'_, E> {
        View(self.held.as_ref().and_then(|held| held.memory.as_ref()).map(|of| of.slice(range)))
    }

    fn all(&self) -> View<'_, E> {
        self.view(0..self.len)
    }

    fn view_mut(&mut self, range: Range<usize>) -> ViewMut<'_, E> {
        let memory = self.held.as_mut().and_then(|held| held.memory.as_mut());
        ViewMut(memory.map(|of| of.slice_mut(range)))
    }

    fn all_mut(&mut self) -> ViewMut<'_, E> {
        self.view_mut(0..self.len)
    }

    /// It is in use until then.
    fn busy_until(&self, event: Event) {
        if let Some(memory) = self.held.as_ref().and_then(|held| held.memory.as_ref()) {
            memory.busy_until(event);
        }
    }

    /// It will be used on that queue, too.
    fn used_on(&self, queue: &Queue) {
        if let Some(held) = &self.held {
            held.users.lock().unwrap_or_else(PoisonError::into_inner).push(queue.clone());
        }
    }
}

impl<E: Element> Drop for Held<E> {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        // Its own queue hands the memory out again: behind what others have been asked to do with it.
        let users = self.users.get_mut().unwrap_or_else(PoisonError::into_inner);
        users.drain(..).filter_map(|user| user.mark()).for_each(|mark| memory.busy_until(mark));
    }
}

/// Elements to read.
#[derive(Clone, Copy)]
pub struct View<'a, E: Element>(Option<cuda::View<'a, E>>);

/// Elements to write.
pub struct ViewMut<'a, E: Element>(Option<cuda::ViewMut<'a, E>>);

/// Calls a kernel where there is memory behind all views, and keeps its failure.
macro_rules! call {
    ($self:ident, [$($view:ident),*], |$gpu:ident| $work:expr) => {
        if let ($(Some($view),)*) = ($($view.0,)*) {
            let $gpu = &$self.queue.gpu;
            $self.queue.kept($work);
        }
    };
}

impl<S: Number + cuda::Stored> Space for Gpu<S> {
    type Stored = S;
    type Wide = f32;
    const MASTERS: bool = true;
    type Memory<E: Element> = Memory<E>;
    type View<'a, E: Element> = View<'a, E>;
    type ViewMut<'a, E: Element> = ViewMut<'a, E>;
    type Total = Memory<f64>;
    type Mark = Option<Event>;

    fn empty<E: Element>() -> Memory<E> {
        Memory { held: None, len: 0 }
    }

    fn len<E: Element>(memory: &Memory<E>) -> usize {
        memory.len
    }

    fn view<E: Element>(memory: &Memory<E>, range: Range<usize>) -> View<'_, E> {
        memory.view(range)
    }

    fn view_mut<E: Element>(memory: &mut Memory<E>, range: Range<usize>) -> ViewMut<'_, E> {
        memory.view_mut(range)
    }

    fn split<'a, E: Element>(
        view: Self::ViewMut<'a, E>,
        at: usize,
    ) -> (Self::ViewMut<'a, E>, Self::ViewMut<'a, E>) {
        match view.0.map(|view| view.split_at(at)) {
            Some((first, behind)) => (ViewMut(Some(first)), ViewMut(Some(behind))),
            None => (ViewMut(None), ViewMut(None)),
        }
    }

    fn lane(&self) -> Self {
        let queue = self.queue.fork();
        queue.wait_for(self.queue.mark().as_ref());
        // A lane is beside the computation as it is.
        Self::on(queue.clone(), OnceLock::from(queue))
    }

    fn host(&self) -> &Cpu {
        &self.host
    }

    fn adopt<E: Element>(&self, memory: &Memory<E>) {
        memory.used_on(&self.queue);
    }

    fn zeros<E: Element>(&self, len: usize) -> Memory<E> {
        self.queue.memory(len, |gpu| gpu.zeros(len))
    }

    fn taken<E: Element>(&self, values: Vec<E>) -> Memory<E> {
        self.queue.memory(values.len(), |gpu| gpu.upload(&values))
    }

    fn copied<E: Element>(&self, from: View<'_, E>) -> Memory<E> {
        let Some(from) = from.0 else { return Self::empty() };
        self.queue.memory(from.len(), |gpu| {
            let mut memory = gpu.memory(from.len())?;
            gpu.copy(from, memory.view_mut())?;
            Ok(memory)
        })
    }

    fn copy<E: Element>(&self, from: View<'_, E>, to: ViewMut<'_, E>) {
        call!(self, [from, to], |gpu| gpu.copy(from, to));
    }

    fn fill<E: Element>(&self, to: ViewMut<'_, E>, value: E) {
        let zero = value == E::default();
        call!(self, [to], |gpu| match zero {
            true => gpu.zero(to),
            false => gpu.copy_in(&vec![value; to.len()], to),
        });
    }

    fn upload<E: Element>(&self, from: &[E], to: ViewMut<'_, E>) {
        call!(self, [to], |gpu| gpu.copy_in(from, to));
    }

    fn download<E: Element>(&self, from: View<'_, E>) -> Result<Vec<E>, DeviceError> {
        self.queue.health()?;
        from.0.map_or_else(|| Ok(Vec::new()), |from| Ok(self.queue.gpu.download(from)?))
    }

    fn round(&self, from: Wide<'_, Self>, to: StoredMut<'_, Self>) {
        call!(self, [from, to], |gpu| elementwise::cuda::narrow(gpu, from, to));
    }

    fn total(&self) -> Memory<f64> {
        self.zeros(1)
    }

    fn read(&self, total: &Memory<f64>) -> Result<f64, DeviceError> {
        Ok(self.download(total.all())?.first().copied().unwrap_or(f64::NAN))
    }

    fn mark(&self) -> Option<Event> {
        self.queue.mark()
    }

    fn wait_for(&self, mark: &Option<Event>) {
        self.queue.wait_for(mark.as_ref());
    }

    fn wrap<E: Element>(
        &self,
        memory: Memory<E>,
        comm: &dyn Communicator,
    ) -> Result<Payload, CommError> {
        if !comm.carries_devices() {
            return Ok(E::wrap(self.download(memory.all())?));
        }
        let ready = self.queue.mark();
        Ok(Payload::Device(Box::new(Parcel { memory, ready, giver: self.transfers().clone() })))
    }

    fn unwrap<E: Element>(&self, payload: Payload) -> Option<Memory<E>> {
        let Payload::Device(cargo) = payload else {
            return E::unwrap(payload).map(|values| self.taken(values));
        };
        let parcel: Box<Parcel<E>> = cargo.into_any().downcast().ok()?;
        self.queue.wait_for(parcel.ready.as_ref());
        parcel.memory.used_on(&self.queue);
        Some(parcel.memory)
    }

    fn health(&self) -> Result<(), DeviceError> {
        self.queue.health()
    }

    fn memory_use(&self) -> Option<MemoryUse> {
        let gpu = &self.queue.gpu;
        Some(MemoryUse {
            reserved_bytes: gpu.bytes_reserved() as u64,
            used_bytes: gpu.bytes_of_arena() as u64,
            beyond_bytes: gpu.bytes_beyond_arena() as u64,
        })
    }

    fn chosen_kernels(&self) -> BTreeMap<String, Vec<String>> {
        let choices = self.queue.gpu.attention_choices().into_iter();
        choices.map(|(what, found)| (what, found.lines().map(str::to_owned).collect())).collect()
    }
}

/// Memory between ranks that share the GPU.
struct Parcel<E: Element> {
    memory: Memory<E>,
    ready: Option<Event>,
    giver: Queue,
}

impl<E: Element> Debug for Parcel<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {} of a GPU", self.memory.len, E::DTYPE.name())
    }
}

impl<E: Element> Parcel<E> {
    fn of(cargo: &dyn Cargo) -> Result<&Self, DeviceError> {
        let wrong = || DeviceError("ranks gave memory of different devices".to_owned());
        cargo.as_any().downcast_ref().ok_or_else(wrong)
    }

    /// To be read on this parcel's queue.
    fn read(&self, part: &Self) {
        self.giver.wait_for(part.ready.as_ref());
        part.memory.used_on(&self.giver);
    }

    fn made(&self, memory: Memory<E>) -> Box<dyn Cargo> {
        Box::new(Self { memory, ready: self.giver.mark(), giver: self.giver.clone() })
    }
}

impl<E: Element> Cargo for Parcel<E> {
    fn dtype(&self) -> Dtype {
        E::DTYPE
    }

    fn len(&self) -> usize {
        self.memory.len
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn freight(&mut self) -> Option<&mut dyn Freight> {
        Some(self)
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }

    fn reduced(
        &self,
        everybodys: &[&dyn Cargo],
        range: Range<usize>,
        op: Op,
    ) -> Result<Box<dyn Cargo>, DeviceError> {
        let given: Vec<&Self> =
            everybodys.iter().map(|of| Self::of(*of)).collect::<Result<_, _>>()?;
        given.iter().for_each(|part| self.read(part));
        let me: &dyn Any = self;
        if let Some(me) = me.downcast_ref::<Parcel<f32>>() {
            return me.combined(everybodys, range, op);
        }
        if let Some(me) = me.downcast_ref::<Parcel<cuda::bf16>>() {
            return me.combined(everybodys, range, op);
        }
        Err(DeviceError(format!("a GPU reduces no {} over ranks", E::DTYPE.name())))
    }

    fn joined(&self, parts: &[(&dyn Cargo, Range<usize>)]) -> Result<Box<dyn Cargo>, DeviceError> {
        let len = parts.iter().map(|(_, range)| range.len()).sum();
        let mut memory = self.giver.memory(len, |gpu| gpu.memory(len));
        let mut rest = memory.all_mut();
        for (part, range) in parts {
            let part = Self::of(*part)?;
            self.read(part);
            let Some((to, behind)) = rest.0.map(|rest| rest.split_at(range.len())) else { break };
            if let Some(from) = part.memory.view(range.clone()).0 {
                self.giver.kept(self.giver.gpu.copy(from, to));
            }
            rest = ViewMut(Some(behind));
        }
        Ok(self.made(memory))
    }
}

impl<S: Number + cuda::Stored> Parcel<S> {
    fn combined(
        &self,
        given: &[&dyn Cargo],
        range: Range<usize>,
        op: Op,
    ) -> Result<Box<dyn Cargo>, DeviceError> {
        let given: Vec<&Self> = given.iter().map(|of| Self::of(*of)).collect::<Result<_, _>>()?;
        let parts: Vec<_> = given.iter().filter_map(|of| of.memory.view(range.clone()).0).collect();
        let memory = self.giver.memory(range.len(), |gpu| match op {
            Op::Sum => summed(gpu, &parts, range.len()),
            Op::Max => largest(gpu, &parts, range.len()),
        });
        Ok(self.made(memory))
    }
}

/// The sum in the order of ranks, in f32, rounded once.
fn summed<S: cuda::Stored>(
    gpu: &cuda::Gpu,
    parts: &[cuda::View<'_, S>],
    len: usize,
) -> Result<cuda::Memory<S>, GpuError> {
    let (mut sum, mut rounded) = (gpu.memory::<f32>(len)?, gpu.memory(len)?);
    for (n, &part) in parts.iter().enumerate() {
        match n {
            0 => elementwise::cuda::widen(gpu, part, sum.view_mut())?,
            _ => elementwise::cuda::accumulate(gpu, part, sum.view_mut())?,
        }
    }
    elementwise::cuda::narrow(gpu, sum.view(), rounded.view_mut())?;
    Ok(rounded)
}

/// The largest of each, in the order of ranks.
fn largest<S: cuda::Stored>(
    gpu: &cuda::Gpu,
    parts: &[cuda::View<'_, S>],
    len: usize,
) -> Result<cuda::Memory<S>, GpuError> {
    let mut most = gpu.memory(len)?;
    for (n, &part) in parts.iter().enumerate() {
        match n {
            0 => gpu.copy(part, most.view_mut())?,
            _ => elementwise::cuda::maximum(gpu, part, most.view_mut())?,
        }
    }
    Ok(most)
}

impl<S: Number + cuda::Stored> Device for Gpu<S> {
    fn gemm(
        &self,
        shape: &Shape,
        a: Stored<'_, Self>,
        b: Stored<'_, Self>,
        c: StoredMut<'_, Self>,
        output: Output,
    ) {
        let beta = if output == Output::Accumulate { 1.0 } else { 0.0 };
        call!(self, [a, b, c], |gpu| gemm::cuda::gemm(gpu, shape, 1.0, a, b, beta, c));
    }

    fn gemm_add(
        &self,
        shape: &Shape,
        a: Stored<'_, Self>,
        b: Stored<'_, Self>,
        c: WideMut<'_, Self>,
    ) {
        call!(self, [a, b, c], |gpu| gemm::cuda::gemm(gpu, shape, 1.0, a, b, 1.0, c));
    }

    fn add_bias(&self, bias: Stored<'_, Self>, x: StoredMut<'_, Self>) {
        call!(self, [bias, x], |gpu| elementwise::cuda::add_bias(gpu, bias, x));
    }

    fn bias_gradient(&self, dy: Stored<'_, Self>, dbias: WideMut<'_, Self>) {
        call!(self, [dy, dbias], |gpu| elementwise::cuda::bias_gradient(gpu, dy, dbias));
    }

    fn add(&self, x: Stored<'_, Self>, y: StoredMut<'_, Self>) {
        call!(self, [x, y], |gpu| elementwise::cuda::axpy(gpu, 1.0, x, y));
    }

    fn add_wide(&self, x: Wide<'_, Self>, y: WideMut<'_, Self>) {
        call!(self, [x, y], |gpu| elementwise::cuda::axpy(gpu, 1.0, x, y));
    }

    fn dropout(
        &self,
        dropout: &Dropout,
        view: &Numbered,
        x: Stored<'_, Self>,
        y: StoredMut<'_, Self>,
    ) {
        call!(self, [x, y], |gpu| dropout::cuda::apply(gpu, dropout, view, x, y));
    }

    fn rms_norm(
        &self,
        norm: &RmsNorm,
        x: Stored<'_, Self>,
        w: Stored<'_, Self>,
        y: StoredMut<'_, Self>,
        inverse_rms: WideMut<'_, Self>,
    ) {
        call!(self, [x, w, y, inverse_rms], |gpu| rms_norm::cuda::forward(
            gpu,
            norm,
            x,
            w,
            y,
            inverse_rms
        ));
    }

    fn rms_norm_backward_input(
        &self,
        norm: &RmsNorm,
        x: Stored<'_, Self>,
        w: Stored<'_, Self>,
        inverse_rms: Wide<'_, Self>,
        dy: Stored<'_, Self>,
        dx: StoredMut<'_, Self>,
        output: Output,
    ) {
        call!(self, [x, w, inverse_rms, dy, dx], |gpu| rms_norm::cuda::backward_input(
            gpu,
            norm,
            x,
            w,
            inverse_rms,
            dy,
            dx,
            output
        ));
    }

    fn rms_norm_backward_weight(
        &self,
        norm: &RmsNorm,
        x: Stored<'_, Self>,
        inverse_rms: Wide<'_, Self>,
        dy: Stored<'_, Self>,
        dw: WideMut<'_, Self>,
    ) {
        call!(self, [x, inverse_rms, dy, dw], |gpu| rms_norm::cuda::backward_weight(
            gpu,
            norm,
            x,
            inverse_rms,
            dy,
            dw
        ));
    }

    fn layer_norm(
        &self,
        norm: &LayerNorm,
        x: Stored<'_, Self>,
        w: Stored<'_, Self>,
        bias: Stored<'_, Self>,
        y: StoredMut<'_, Self>,
        mean: WideMut<'_, Self>,
        inverse_std: WideMut<'_, Self>,
    ) {
        call!(self, [x, w, bias, y, mean, inverse_std], |gpu| layer_norm::cuda::forward(
            gpu,
            norm,
            x,
            w,
            bias,
            y,
            mean,
            inverse_std
        ));
    }

    fn layer_norm_backward_input(
        &self,
        norm: &LayerNorm,
        x: Stored<'_, Self>,
        w: Stored<'_, Self>,
        mean: Wide<'_, Self>,
        inverse_std: Wide<'_, Self>,
        dy: Stored<'_, Self>,
        dx: StoredMut<'_, Self>,
        output: Output,
    ) {
        call!(self, [x, w, mean, inverse_std, dy, dx], |gpu| layer_norm::cuda::backward_input(
            gpu,
            norm,
            x,
            w,
            mean,
            inverse_std,
            dy,
            dx,
            output
        ));
    }

    fn layer_norm_backward_weight(
        &self,
        norm: &LayerNorm,
        x: Stored<'_, Self>,
        mean: Wide<'_, Self>,
        inverse_std: Wide<'_, Self>,
        dy: Stored<'_, Self>,
        dw: WideMut<'_, Self>,
        dbias: WideMut<'_, Self>,
    ) {
        call!(
            self,
            [x, mean, inverse_std, dy, dw, dbias],
            |gpu| layer_norm::cuda::backward_weight(gpu, norm, x, mean, inverse_std, dy, dw, dbias)
        );
    }

    fn rope(&self, rope: &Rope, table: Wide<'_, Self>, x: StoredMut<'_, Self>) {
        call!(self, [table, x], |gpu| rope::cuda::forward(gpu, rope, table, x));
    }

    fn rope_backward(&self, rope: &Rope, table: Wide<'_, Self>, dx: StoredMut<'_, Self>) {
        call!(self, [table, dx], |gpu| rope::cuda::backward(gpu, rope, table, dx));
    }

    fn attention(
        &self,
        attention: &Attention,
        q: Stored<'_, Self>,
        k: Stored<'_, Self>,
        v: Stored<'_, Self>,
        out: StoredMut<'_, Self>,
        lse: WideMut<'_, Self>,
    ) {
        call!(self, [q, k, v, out, lse], |gpu| attention::cuda::forward(
            gpu, attention, q, k, v, out, lse
        ));
    }

    fn activation(&self, activation: Activation, x: Stored<'_, Self>, y: StoredMut<'_, Self>) {
        call!(self, [x, y], |gpu| activation::cuda::forward(gpu, activation, x, y));
    }

    fn activation_backward(
        &self,
        activation: Activation,
        x: Stored<'_, Self>,
        dy: Stored<'_, Self>,
        dx: StoredMut<'_, Self>,
    ) {
        call!(self, [x, dy, dx], |gpu| activation::cuda::backward(gpu, activation, x, dy, dx));
    }

    fn gated(
        &self,
        activation: Activation,
        gate: Stored<'_, Self>,
        up: Stored<'_, Self>,
        y: StoredMut<'_, Self>,
    ) {
        call!(self, [gate, up, y], |gpu| activation::cuda::gated_forward(
            gpu, activation, gate, up, y
        ));
    }

    fn gated_backward(
        &self,
        activation: Activation,
        gate: Stored<'_, Self>,
        up: Stored<'_, Self>,
        dy: Stored<'_, Self>,
        dgate: StoredMut<'_, Self>,
        dup: StoredMut<'_, Self>,
    ) {
        call!(self, [gate, up, dy, dgate, dup], |gpu| activation::cuda::gated_backward(
            gpu, activation, gate, up, dy, dgate, dup
        ));
    }

    fn embedding(
        &self,
        embedding: &Embedding,
        ids: Ids<'_, Self>,
        table: Stored<'_, Self>,
        out: StoredMut<'_, Self>,
    ) {
        call!(self, [ids, table, out], |gpu| embedding::cuda::forward(
            gpu, embedding, ids, table, out
        ));
    }

    fn embedding_backward(
        &self,
        embedding: &Embedding,
        ids: Ids<'_, Self>,
        dout: Stored<'_, Self>,
        dtable: WideMut<'_, Self>,
    ) {
        call!(self, [ids, dout, dtable], |gpu| embedding::cuda::backward(
            gpu, embedding, ids, dout, dtable
        ));
    }

    fn local_max(&self, shape: &Logits, logits: Stored<'_, Self>, max: WideMut<'_, Self>) {
        call!(self, [logits, max], |gpu| cross_entropy::cuda::local_max(gpu, shape, logits, max));
    }

    fn local_sum_exp(
        &self,
        shape: &Logits,
        logits: Stored<'_, Self>,
        targets: Ids<'_, Self>,
        max: Wide<'_, Self>,
        sum_exp: WideMut<'_, Self>,
        target_logit: WideMut<'_, Self>,
    ) {
        call!(self, [logits, targets, max, sum_exp, target_logit], |gpu| {
            cross_entropy::cuda::local_sum_exp(
                gpu,
                shape,
                logits,
                targets,
                max,
                sum_exp,
                target_logit,
            )
        });
    }

    fn rescale_sum_exp(
        &self,
        local_max: Wide<'_, Self>,
        max: Wide<'_, Self>,
        sum_exp: WideMut<'_, Self>,
    ) {
        call!(self, [local_max, max, sum_exp], |gpu| cross_entropy::cuda::rescale_sum_exp(
            gpu, local_max, max, sum_exp
        ));
    }

    fn attention_backward(
        &self,
        attention: &Attention,
        saved: Saved<'_, Self>,
        dout: Stored<'_, Self>,
        gradients: Gradients<'_, Self>,
    ) {
        let (Saved { q, k, v, out, lse }, Gradients { dq, dk, dv }) = (saved, gradients);
        call!(self, [q, k, v, out, lse, dout, dq, dk, dv], |gpu| {
            let saved = attention::cuda::Saved { q, k, v, out, lse };
            let mut gradients = attention::cuda::Gradients { dq, dk, dv };
            let output = Output::Overwrite;
            attention::cuda::backward(gpu, attention, &saved, dout, &mut gradients, output)
        });
    }

    fn loss(
        &self,
        targets: Ids<'_, Self>,
        sums: RowSums<'_, Self>,
        target_logit: Wide<'_, Self>,
        loss: WideMut<'_, Self>,
    ) {
        let RowSums { max, sum_exp } = sums;
        call!(self, [targets, max, sum_exp, target_logit, loss], |gpu| {
            cross_entropy::cuda::loss(gpu, targets, max, sum_exp, target_logit, loss)
        });
    }

    fn cross_entropy_gradient(
        &self,
        shape: &Logits,
        logits: StoredMut<'_, Self>,
        targets: Ids<'_, Self>,
        sums: RowSums<'_, Self>,
        scale: f64,
    ) {
        let RowSums { max, sum_exp } = sums;
        call!(self, [logits, targets, max, sum_exp], |gpu| {
            cross_entropy::cuda::gradient_in_place(gpu, shape, logits, targets, max, sum_exp, scale)
        });
    }

    fn scale_by_slope(
        &self,
        soft_cap: Option<f64>,
        target_logit: Wide<'_, Self>,
        rows: StoredMut<'_, Self>,
    ) {
        call!(self, [target_logit, rows], |gpu| {
            cross_entropy::cuda::scale_by_slope(gpu, soft_cap, target_logit, rows)
        });
    }

    fn softmax_to_gradient(
        &self,
        shape: &Logits,
        softmax: StoredMut<'_, Self>,
        targets: Ids<'_, Self>,
        factor: Wide<'_, Self>,
        target: Wide<'_, Self>,
        scale: f64,
    ) {
        call!(self, [softmax, targets, factor, target], |gpu| {
            cross_entropy::cuda::softmax_to_gradient(
                gpu, shape, softmax, targets, factor, target, scale,
            )
        });
    }

    fn join_gradient(
        &self,
        weighted: StoredMut<'_, Self>,
        hits: Stored<'_, Self>,
        factor: Wide<'_, Self>,
        scale: f64,
    ) {
        call!(self, [weighted, hits, factor], |gpu| {
            cross_entropy::cuda::join_gradient(gpu, weighted, hits, factor, scale)
        });
    }

    fn divide(&self, by: Wide<'_, Self>, x: WideMut<'_, Self>) {
        call!(self, [by, x], |gpu| elementwise::cuda::divide(gpu, by, x));
    }

    fn fill_normal(&self, to: WideMut<'_, Self>, view: &Numbered, stream: Stream, std: f64) {
        call!(self, [to], |gpu| random::cuda::fill_normal(gpu, to, view, stream, std));
    }

    fn add_sum(&self, x: Wide<'_, Self>, total: &mut Memory<f64>) {
        let total = total.all_mut();
        call!(self, [x, total], |gpu| {
            elementwise::cuda::sum_into(gpu, x, total, Output::Accumulate)
        });
    }

    fn add_squares(&self, x: Wide<'_, Self>, total: &mut Memory<f64>) {
        let total = total.all_mut();
        call!(self, [x, total], |gpu| {
            elementwise::cuda::sum_of_squares_into(gpu, x, total, Output::Accumulate)
        });
    }

    fn adamw(&self, adamw: &AdamW, parameters: Vec<Parameter<'_, Self>>) {
        let mut updates = Vec::with_capacity(parameters.len());
        for Parameter { w, g, m, v, decay } in parameters {
            let (w, copy) = match w {
                Target::Exact(w) => (w, None),
                Target::Both(w, copy) => (w, copy.0),
                Target::Read(_) => {
                    let reason = "a GPU's exact weights are apart: our bug".to_owned();
                    self.queue.failure.get_or_init(|| DeviceError(reason));
                    return;
                }
            };
            let (Some(w), Some(g), Some(m), Some(v)) = (w.0, g.0, m.0, v.0) else { return };
            updates.push(adamw::cuda::Parameter { w, g, m, v, copy, decay });
        }
        self.queue.kept(adamw::cuda::update(&self.queue.gpu, adamw, &mut updates));
    }

    fn adamw_proposal(&self, adamw: &AdamW, parameters: Vec<Proposal<'_, Self>>) {
        let lengths = parameters.iter().map(|of| of.w.0.map_or(0, |w| w.len()));
        // In f32, on the way to what is read.
        let mut wide: Vec<Memory<f32>> =
            lengths.map(|len| self.queue.memory(len, |gpu| gpu.memory(len))).collect();
        let mut proposals = Vec::with_capacity(parameters.len());
        for (Proposal { to: copy, w, g, m, v, decay }, to) in parameters.into_iter().zip(&mut wide)
        {
            let views = (to.all_mut().0, w.0, g.0, m.0, v.0);
            let (Some(to), Some(w), Some(g), Some(m), Some(v)) = views else { return };
            proposals.push(adamw::cuda::Proposal { to, w, g, m, v, copy: copy.0, decay });
        }
        self.queue.kept(adamw::cuda::proposal(&self.queue.gpu, adamw, &mut proposals));
    }
}
