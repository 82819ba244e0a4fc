//! A device that is none: its memory is out of the host's reach, and what is asked of it is done later, by a worker for
//! each stream, in the stream's order, with random delays. Whoever reads what nobody waited for reads what was there
//! before. Tensors are stored in `S` and computed in `W`, with the kernels of the host.

#![allow(dead_code)] // each test is a program of its own and uses a part of this

use runtime::comm::{Cargo, CommError, Communicator, Dtype, Element, Op, Payload};
use runtime::device::{
    Device, DeviceError, Gradients, Ids, Parameter, Proposal, RowSums, Saved, Space, Stored,
    StoredMut, Target, Wide, WideMut,
};
use runtime::kernels::activation::Activation;
use runtime::kernels::adamw::AdamW;
use runtime::kernels::attention::Attention;
use runtime::kernels::cross_entropy::Logits;
use runtime::kernels::dropout::Dropout;
use runtime::kernels::embedding::Embedding;
use runtime::kernels::gemm::Shape;
use runtime::kernels::layer_norm::LayerNorm;
use runtime::kernels::random::{Stream as Draws, View as Numbered};
use runtime::kernels::rms_norm::RmsNorm;
use runtime::kernels::rope::Rope;
use runtime::kernels::{Cpu, Output};
use runtime::{Host, Number, Scalar};
use std::any::Any;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::Duration;

/// The device that all ranks share: what it counts, and what went wrong.
#[derive(Debug, Default)]
pub struct Machine {
    /// Copies from the host.
    pub uploads: AtomicUsize,
    /// Copies to the host.
    pub downloads: AtomicUsize,
    /// Totals read.
    pub reads: AtomicUsize,
    /// Streams made.
    pub streams: AtomicUsize,
    /// Jobs that ran.
    pub jobs: AtomicUsize,
    failure: OnceLock<DeviceError>,
}

impl Machine {
    /// From now on the device has failed.
    pub fn fail(&self, why: &str) {
        let _first = self.failure.set(DeviceError(why.to_owned()));
    }

    fn health(&self) -> Result<(), DeviceError> {
        self.failure.get().map_or(Ok(()), |failure| Err(failure.clone()))
    }
}

type Job<W> = Box<dyn FnOnce(&Host<W>) + Send>;

/// One stream: what it is told is done in order, later.
#[derive(Clone)]
struct Stream<W> {
    jobs: Sender<Job<W>>,
    machine: Arc<Machine>,
}

impl<W: Scalar> Stream<W> {
    fn new(machine: &Arc<Machine>) -> Self {
        let (jobs, given) = channel::<Job<W>>();
        let number = machine.streams.fetch_add(1, Ordering::Relaxed) as u64;
        let counted = machine.clone();
        std::thread::spawn(move || {
            let host = Host::<W>::serial();
            for (n, job) in given.into_iter().enumerate() {
                // Some streams lag far behind, at times.
                let draw =
                    (n as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ (number << 17)) >> 40;
                if draw.is_multiple_of(64) {
                    std::thread::sleep(Duration::from_micros(draw % 211));
                }
                job(&host);
                counted.jobs.fetch_add(1, Ordering::Relaxed);
            }
        });
        Self { jobs, machine: machine.clone() }
    }

    fn run(&self, job: impl FnOnce(&Host<W>) + Send + 'static) {
        self.jobs.send(Box::new(job)).expect("a stream outlives its handles");
    }

    fn mark(&self) -> Mark {
        let mark = Mark::default();
        let reached = mark.clone();
        self.run(move |_| reached.set());
        mark
    }

    fn wait_for(&self, mark: &Mark) {
        let mark = mark.clone();
        self.run(move |_| mark.wait());
    }
}

/// A point in a stream's order.
#[derive(Clone, Debug, Default)]
pub struct Mark(Arc<(Mutex<bool>, Condvar)>);

impl Mark {
    fn set(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    fn wait(&self) {
        let reached = self.0.0.lock().unwrap();
        drop(self.0.1.wait_while(reached, |reached| !*reached).unwrap());
    }
}

/// Memory of the device. Only jobs look inside.
#[derive(Debug)]
pub struct Memory<E> {
    block: Arc<Mutex<Vec<E>>>,
    len: usize,
}

impl<E> Memory<E> {
    fn new(values: Vec<E>) -> Self {
        Self { len: values.len(), block: Arc::new(Mutex::new(values)) }
    }

    fn all(&self) -> Part<E> {
        Part { block: self.block.clone(), range: 0..self.len }
    }
}

/// A part of it to read.
pub struct View<'a, E> {
    memory: &'a Memory<E>,
    begin: usize,
    len: usize,
}

impl<E> Clone for View<'_, E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E> Copy for View<'_, E> {}

/// A part of it to write.
pub struct ViewMut<'a, E> {
    block: Arc<Mutex<Vec<E>>>,
    begin: usize,
    len: usize,
    exclusive: PhantomData<&'a mut E>,
}

/// A part of it for a job.
struct Part<E> {
    block: Arc<Mutex<Vec<E>>>,
    range: Range<usize>,
}

impl<E: Copy> Part<E> {
    fn values(&self) -> Vec<E> {
        self.block.lock().unwrap()[self.range.clone()].to_vec()
    }

    fn set(&self, values: &[E]) {
        self.block.lock().unwrap()[self.range.clone()].copy_from_slice(values);
    }
}

impl<E: Number> Part<E> {
    /// As kernels compute.
    fn get<W: Number>(&self) -> Vec<W> {
        self.values().into_iter().map(|value| W::nearest(value.value())).collect()
    }

    /// As it is stored.
    fn put<W: Number>(&self, values: &[W]) {
        let rounded: Vec<E> = values.iter().map(|value| E::nearest(value.value())).collect();
        self.set(&rounded);
    }
}

fn of<E>(view: View<'_, E>) -> Part<E> {
    Part { block: view.memory.block.clone(), range: view.begin..view.begin + view.len }
}

fn into<E>(view: ViewMut<'_, E>) -> Part<E> {
    Part { block: view.block, range: view.begin..view.begin + view.len }
}

/// A rank's handle. With `MASTERS` its exact weights are apart.
pub struct Opaque<S, W, const MASTERS: bool = false> {
    stream: Stream<W>,
    /// For what it takes of other ranks.
    transfers: OnceLock<Stream<W>>,
    host: Cpu,
    stored: PhantomData<fn() -> S>,
}

impl<S, W: Scalar, const MASTERS: bool> Opaque<S, W, MASTERS> {
    pub fn on(machine: &Arc<Machine>) -> Self {
        let (stream, transfers) = (Stream::new(machine), OnceLock::new());
        Self { stream, transfers, host: Cpu::serial(), stored: PhantomData }
    }

    fn run(&self, job: impl FnOnce(&Host<W>) + Send + 'static) {
        self.stream.run(job);
    }
}

/// Memory between ranks: where it is, when it is ready, and the stream of who gave it.
struct Parcel<E, W> {
    memory: Memory<E>,
    ready: Mark,
    stream: Mutex<Stream<W>>,
}

impl<E, W> std::fmt::Debug for Parcel<E, W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Parcel of {}", self.memory.len)
    }
}

impl<E: Element, W: Scalar> Parcel<E, W> {
    fn of(cargo: &dyn Cargo) -> Result<&Self, DeviceError> {
        let wrong = || DeviceError("memory of another device".to_owned());
        cargo.as_any().downcast_ref().ok_or_else(wrong)
    }

    /// New memory, filled behind what it is made of.
    fn made(
        &self,
        parts: Vec<&Self>,
        len: usize,
        make: impl FnOnce() -> Vec<E> + Send + 'static,
    ) -> Box<dyn Cargo> {
        let stream = self.stream.lock().unwrap().clone();
        parts.into_iter().for_each(|part| stream.wait_for(&part.ready));
        let memory = Memory::new(vec![E::default(); len]);
        let to = memory.all();
        stream.run(move |_| to.set(&make()));
        Box::new(Self { memory, ready: stream.mark(), stream: Mutex::new(stream) })
    }
}

impl<E: Element, W: Scalar> Cargo for Parcel<E, W> {
    fn dtype(&self) -> Dtype {
        E::DTYPE
    }

    fn len(&self) -> usize {
        self.memory.len
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }

    fn reduced(
        &self,
        given: &[&dyn Cargo],
        range: Range<usize>,
        op: Op,
    ) -> Result<Box<dyn Cargo>, DeviceError> {
        let given: Vec<&Self> = given.iter().map(|of| Self::of(*of)).collect::<Result<_, _>>()?;
        let parts: Vec<Part<E>> = given.iter().map(|of| of.memory.all()).collect();
        let len = range.len();
        let make = move || {
            let mut parts = parts.into_iter().map(|part| part.values());
            let mut sum = parts.next().unwrap_or_default()[range.clone()].to_vec();
            for part in parts {
                for (sum, &next) in sum.iter_mut().zip(&part[range.clone()]) {
                    *sum = match op {
                        Op::Sum => sum.plus(next),
                        Op::Max if next > *sum => next,
                        Op::Max => *sum,
                    };
                }
            }
            sum
        };
        Ok(self.made(given, len, make))
    }

    fn joined(&self, parts: &[(&dyn Cargo, Range<usize>)]) -> Result<Box<dyn Cargo>, DeviceError> {
        let given: Vec<&Self> = parts.iter().map(|of| Self::of(of.0)).collect::<Result<_, _>>()?;
        let pieces = given.iter().zip(parts);
        let pieces: Vec<Part<E>> = pieces
            .map(|(of, (_, range))| Part { block: of.memory.block.clone(), range: range.clone() })
            .collect();
        let len = pieces.iter().map(|piece| piece.range.len()).sum();
        Ok(self.made(given, len, move || pieces.iter().flat_map(Part::values).collect()))
    }
}

impl<S: Number, W: Scalar, const M: bool> Space for Opaque<S, W, M> {
    type Stored = S;
    type Wide = W;
    const MASTERS: bool = M;
    type Memory<E: Element> = Memory<E>;
    type View<'a, E: Element> = View<'a, E>;
    type ViewMut<'a, E: Element> = ViewMut<'a, E>;
    type Total = Arc<Mutex<f64>>;
    type Mark = Mark;
    type Recording = ();

    fn empty<E: Element>() -> Memory<E> {
        Memory::new(Vec::new())
    }

    fn len<E: Element>(memory: &Memory<E>) -> usize {
        memory.len
    }

    fn view<E: Element>(memory: &Memory<E>, range: Range<usize>) -> View<'_, E> {
        assert!(range.start <= range.end && range.end <= memory.len, "{range:?}");
        View { memory, begin: range.start, len: range.len() }
    }

    fn view_mut<E: Element>(memory: &mut Memory<E>, range: Range<usize>) -> ViewMut<'_, E> {
        assert!(range.start <= range.end && range.end <= memory.len, "{range:?}");
        let block = memory.block.clone();
        ViewMut { block, begin: range.start, len: range.len(), exclusive: PhantomData }
    }

    fn split<'a, E: Element>(
        view: Self::ViewMut<'a, E>,
        at: usize,
    ) -> (Self::ViewMut<'a, E>, Self::ViewMut<'a, E>) {
        let ViewMut { block, begin, len, exclusive } = view;
        assert!(at <= len, "{at} of {len}");
        let first = ViewMut { block: block.clone(), begin, len: at, exclusive };
        (first, ViewMut { block, begin: begin + at, len: len - at, exclusive })
    }

    fn lane(&self) -> Self {
        let lane = Self::on(&self.stream.machine);
        lane.wait_for(&self.mark());
        lane
    }

    fn host(&self) -> &Cpu {
        &self.host
    }

    fn zeros<E: Element>(&self, len: usize) -> Memory<E> {
        Memory::new(vec![E::default(); len])
    }

    fn taken<E: Element>(&self, values: Vec<E>) -> Memory<E> {
        self.stream.machine.uploads.fetch_add(1, Ordering::Relaxed);
        let memory = Memory::new(vec![E::default(); values.len()]);
        let to = memory.all();
        self.run(move |_| to.set(&values));
        memory
    }

    fn copied<E: Element>(&self, from: View<'_, E>) -> Memory<E> {
        let (from, memory) = (of(from), Memory::new(vec![E::default(); from.len]));
        let to = memory.all();
        self.run(move |_| to.set(&from.values()));
        memory
    }

    fn copy<E: Element>(&self, from: View<'_, E>, to: ViewMut<'_, E>) {
        let (from, to) = (of(from), into(to));
        self.run(move |_| to.set(&from.values()));
    }

    fn fill<E: Element>(&self, to: ViewMut<'_, E>, value: E) {
        let to = into(to);
        self.run(move |_| to.set(&vec![value; to.range.len()]));
    }

    fn upload<E: Element>(&self, from: &[E], to: ViewMut<'_, E>) {
        self.stream.machine.uploads.fetch_add(1, Ordering::Relaxed);
        let (from, to) = (from.to_vec(), into(to));
        self.run(move |_| to.set(&from));
    }

    fn download<E: Element>(&self, from: View<'_, E>) -> Result<Vec<E>, DeviceError> {
        self.stream.machine.downloads.fetch_add(1, Ordering::Relaxed);
        let (from, (told, values)) = (of(from), channel());
        self.run(move |_| told.send(from.values()).unwrap());
        let values = values.recv().map_err(|_| DeviceError("a stream has ended".to_owned()))?;
        self.health().map(|()| values)
    }

    fn round(&self, from: Wide<'_, Self>, to: StoredMut<'_, Self>) {
        let (from, to) = (of(from), into(to));
        self.run(move |_| to.put(&from.values()));
    }

    fn total(&self) -> Arc<Mutex<f64>> {
        Arc::default()
    }

    fn read(&self, total: &Arc<Mutex<f64>>) -> Result<f64, DeviceError> {
        self.stream.machine.reads.fetch_add(1, Ordering::Relaxed);
        self.mark().wait();
        self.health().map(|()| *total.lock().unwrap())
    }

    fn mark(&self) -> Mark {
        self.stream.mark()
    }

    fn wait_for(&self, mark: &Mark) {
        self.stream.wait_for(mark);
    }

    fn wrap<E: Element>(
        &self,
        memory: Memory<E>,
        comm: &dyn Communicator,
    ) -> Result<Payload, CommError> {
        if !comm.carries_devices() {
            return Ok(E::wrap(self.download(Self::view(&memory, 0..memory.len))?));
        }
        let transfers = self.transfers.get_or_init(|| Stream::new(&self.stream.machine));
        let stream = Mutex::new(transfers.clone());
        Ok(Payload::Device(Box::new(Parcel { memory, ready: self.mark(), stream })))
    }

    fn unwrap<E: Element>(&self, payload: Payload) -> Option<Memory<E>> {
        let Payload::Device(cargo) = payload else {
            let values = E::unwrap(payload)?;
            return Some(if values.is_empty() { Self::empty() } else { self.taken(values) });
        };
        let parcel: Box<Parcel<E, W>> = cargo.into_any().downcast().ok()?;
        self.wait_for(&parcel.ready);
        Some(parcel.memory)
    }

    fn health(&self) -> Result<(), DeviceError> {
        self.stream.machine.health()
    }
}

impl<S: Number, W: Scalar, const M: bool> Device for Opaque<S, W, M> {
    fn gemm(
        &self,
        shape: &Shape,
        a: Stored<'_, Self>,
        b: Stored<'_, Self>,
        c: StoredMut<'_, Self>,
        output: Output,
    ) {
        let shape = *shape;
        let (a, b, c) = (of(a), of(b), into(c));
        self.run(move |host| {
            let mut to_c: Vec<W> = c.get();
            host.gemm(&shape, &a.get::<W>(), &b.get::<W>(), &mut to_c, output);
            c.put(&to_c);
        });
    }

    fn gemm_add(
        &self,
        shape: &Shape,
        a: Stored<'_, Self>,
        b: Stored<'_, Self>,
        c: WideMut<'_, Self>,
    ) {
        let shape = *shape;
        let (a, b, c) = (of(a), of(b), into(c));
        self.run(move |host| {
            let mut to_c: Vec<W> = c.get();
            host.gemm_add(&shape, &a.get::<W>(), &b.get::<W>(), &mut to_c);
            c.put(&to_c);
        });
    }

    fn add_bias(&self, bias: Stored<'_, Self>, x: StoredMut<'_, Self>) {
        let (bias, x) = (of(bias), into(x));
        self.run(move |host| {
            let mut to_x: Vec<W> = x.get();
            host.add_bias(&bias.get::<W>(), &mut to_x);
            x.put(&to_x);
        });
    }

    fn bias_gradient(&self, dy: Stored<'_, Self>, dbias: WideMut<'_, Self>) {
        let (dy, dbias) = (of(dy), into(dbias));
        self.run(move |host| {
            let mut to_dbias: Vec<W> = dbias.get();
            host.bias_gradient(&dy.get::<W>(), &mut to_dbias);
            dbias.put(&to_dbias);
        });
    }

    fn add(&self, x: Stored<'_, Self>, y: StoredMut<'_, Self>) {
        let (x, y) = (of(x), into(y));
        self.run(move |host| {
            let mut to_y: Vec<W> = y.get();
            host.add(&x.get::<W>(), &mut to_y);
            y.put(&to_y);
        });
    }

    fn add_wide(&self, x: Wide<'_, Self>, y: WideMut<'_, Self>) {
        let (x, y) = (of(x), into(y));
        self.run(move |host| {
            let mut to_y: Vec<W> = y.get();
            host.add_wide(&x.get::<W>(), &mut to_y);
            y.put(&to_y);
        });
    }

    fn dropout(
        &self,
        dropout: &Dropout,
        view: &Numbered,
        x: Stored<'_, Self>,
        y: StoredMut<'_, Self>,
    ) {
        let dropout = *dropout;
        let view = *view;
        let (x, y) = (of(x), into(y));
        self.run(move |host| {
            let mut to_y: Vec<W> = y.get();
            host.dropout(&dropout, &view, &x.get::<W>(), &mut to_y);
            y.put(&to_y);
        });
    }

    fn rms_norm(
        &self,
        norm: &RmsNorm,
        x: Stored<'_, Self>,
        w: Stored<'_, Self>,
        y: StoredMut<'_, Self>,
        inverse_rms: WideMut<'_, Self>,
    ) {
        let norm = *norm;
        let (x, w, y, inverse_rms) = (of(x), of(w), into(y), into(inverse_rms));
        self.run(move |host| {
            let mut to_y: Vec<W> = y.get();
            let mut to_inverse_rms: Vec<W> = inverse_rms.get();
            host.rms_norm(&norm, &x.get::<W>(), &w.get::<W>(), &mut to_y, &mut to_inverse_rms);
            y.put(&to_y);
            inverse_rms.put(&to_inverse_rms);
        });
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
        let norm = *norm;
        let (x, w, inverse_rms, dy, dx) = (of(x), of(w), of(inverse_rms), of(dy), into(dx));
        self.run(move |host| {
            let mut to_dx: Vec<W> = dx.get();
            host.rms_norm_backward_input(
                &norm,
                &x.get::<W>(),
                &w.get::<W>(),
                &inverse_rms.get::<W>(),
                &dy.get::<W>(),
                &mut to_dx,
                output,
            );
            dx.put(&to_dx);
        });
    }

    fn rms_norm_backward_weight(
        &self,
        norm: &RmsNorm,
        x: Stored<'_, Self>,
        inverse_rms: Wide<'_, Self>,
        dy: Stored<'_, Self>,
        dw: WideMut<'_, Self>,
    ) {
        let norm = *norm;
        let (x, inverse_rms, dy, dw) = (of(x), of(inverse_rms), of(dy), into(dw));
        self.run(move |host| {
            let mut to_dw: Vec<W> = dw.get();
            host.rms_norm_backward_weight(
                &norm,
                &x.get::<W>(),
                &inverse_rms.get::<W>(),
                &dy.get::<W>(),
                &mut to_dw,
            );
            dw.put(&to_dw);
        });
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
        let norm = *norm;
        let (x, w, bias, y, mean, inverse_std) =
            (of(x), of(w), of(bias), into(y), into(mean), into(inverse_std));
        self.run(move |host| {
            let mut to_y: Vec<W> = y.get();
            let mut to_mean: Vec<W> = mean.get();
            let mut to_inverse_std: Vec<W> = inverse_std.get();
            host.layer_norm(
                &norm,
                &x.get::<W>(),
                &w.get::<W>(),
                &bias.get::<W>(),
                &mut to_y,
                &mut to_mean,
                &mut to_inverse_std,
            );
            y.put(&to_y);
            mean.put(&to_mean);
            inverse_std.put(&to_inverse_std);
        });
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
        let norm = *norm;
        let (x, w, mean, inverse_std, dy, dx) =
            (of(x), of(w), of(mean), of(inverse_std), of(dy), into(dx));
        self.run(move |host| {
            let mut to_dx: Vec<W> = dx.get();
            host.layer_norm_backward_input(
                &norm,
                &x.get::<W>(),
                &w.get::<W>(),
                &mean.get::<W>(),
                &inverse_std.get::<W>(),
                &dy.get::<W>(),
                &mut to_dx,
                output,
            );
            dx.put(&to_dx);
        });
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
        let norm = *norm;
        let (x, mean, inverse_std, dy, dw, dbias) =
            (of(x), of(mean), of(inverse_std), of(dy), into(dw), into(dbias));
        self.run(move |host| {
            let mut to_dw: Vec<W> = dw.get();
            let mut to_dbias: Vec<W> = dbias.get();
            host.layer_norm_backward_weight(
                &norm,
                &x.get::<W>(),
                &mean.get::<W>(),
                &inverse_std.get::<W>(),
                &dy.get::<W>(),
                &mut to_dw,
                &mut to_dbias,
            );
            dw.put(&to_dw);
            dbias.put(&to_dbias);
        });
    }

    fn rope(&self, rope: &Rope, table: Wide<'_, Self>, x: StoredMut<'_, Self>) {
        let rope = *rope;
        let (table, x) = (of(table), into(x));
        self.run(move |host| {
            let mut to_x: Vec<W> = x.get();
            host.rope(&rope, &table.get::<W>(), &mut to_x);
            x.put(&to_x);
        });
    }

    fn rope_backward(&self, rope: &Rope, table: Wide<'_, Self>, dx: StoredMut<'_, Self>) {
        let rope = *rope;
        let (table, dx) = (of(table), into(dx));
        self.run(move |host| {
            let mut to_dx: Vec<W> = dx.get();
            host.rope_backward(&rope, &table.get::<W>(), &mut to_dx);
            dx.put(&to_dx);
        });
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
        let attention = *attention;
        let (q, k, v, out, lse) = (of(q), of(k), of(v), into(out), into(lse));
        self.run(move |host| {
            let mut to_out: Vec<W> = out.get();
            let mut to_lse: Vec<W> = lse.get();
            host.attention(
                &attention,
                &q.get::<W>(),
                &k.get::<W>(),
                &v.get::<W>(),
                &mut to_out,
                &mut to_lse,
            );
            out.put(&to_out);
            lse.put(&to_lse);
        });
    }

    fn activation(&self, activation: Activation, x: Stored<'_, Self>, y: StoredMut<'_, Self>) {
        let (x, y) = (of(x), into(y));
        self.run(move |host| {
            let mut to_y: Vec<W> = y.get();
            host.activation(activation, &x.get::<W>(), &mut to_y);
            y.put(&to_y);
        });
    }

    fn activation_backward(
        &self,
        activation: Activation,
        x: Stored<'_, Self>,
        dy: Stored<'_, Self>,
        dx: StoredMut<'_, Self>,
    ) {
        let (x, dy, dx) = (of(x), of(dy), into(dx));
        self.run(move |host| {
            let mut to_dx: Vec<W> = dx.get();
            host.activation_backward(activation, &x.get::<W>(), &dy.get::<W>(), &mut to_dx);
            dx.put(&to_dx);
        });
    }

    fn gated(
        &self,
        activation: Activation,
        gate: Stored<'_, Self>,
        up: Stored<'_, Self>,
        y: StoredMut<'_, Self>,
    ) {
        let (gate, up, y) = (of(gate), of(up), into(y));
        self.run(move |host| {
            let mut to_y: Vec<W> = y.get();
            host.gated(activation, &gate.get::<W>(), &up.get::<W>(), &mut to_y);
            y.put(&to_y);
        });
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
        let (gate, up, dy, dgate, dup) = (of(gate), of(up), of(dy), into(dgate), into(dup));
        self.run(move |host| {
            let mut to_dgate: Vec<W> = dgate.get();
            let mut to_dup: Vec<W> = dup.get();
            host.gated_backward(
                activation,
                &gate.get::<W>(),
                &up.get::<W>(),
                &dy.get::<W>(),
                &mut to_dgate,
                &mut to_dup,
            );
            dgate.put(&to_dgate);
            dup.put(&to_dup);
        });
    }

    fn embedding(
        &self,
        embedding: &Embedding,
        ids: Ids<'_, Self>,
        table: Stored<'_, Self>,
        out: StoredMut<'_, Self>,
    ) {
        let embedding = *embedding;
        let (ids, table, out) = (of(ids), of(table), into(out));
        self.run(move |host| {
            let mut to_out: Vec<W> = out.get();
            host.embedding(&embedding, &ids.values(), &table.get::<W>(), &mut to_out);
            out.put(&to_out);
        });
    }

    fn embedding_backward(
        &self,
        embedding: &Embedding,
        ids: Ids<'_, Self>,
        dout: Stored<'_, Self>,
        dtable: WideMut<'_, Self>,
    ) {
        let embedding = *embedding;
        let (ids, dout, dtable) = (of(ids), of(dout), into(dtable));
        self.run(move |host| {
            let mut to_dtable: Vec<W> = dtable.get();
            host.embedding_backward(&embedding, &ids.values(), &dout.get::<W>(), &mut to_dtable);
            dtable.put(&to_dtable);
        });
    }

    fn local_max(&self, shape: &Logits, logits: Stored<'_, Self>, max: WideMut<'_, Self>) {
        let shape = *shape;
        let (logits, max) = (of(logits), into(max));
        self.run(move |host| {
            let mut to_max: Vec<W> = max.get();
            host.local_max(&shape, &logits.get::<W>(), &mut to_max);
            max.put(&to_max);
        });
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
        let shape = *shape;
        let (logits, targets, max, sum_exp, target_logit) =
            (of(logits), of(targets), of(max), into(sum_exp), into(target_logit));
        self.run(move |host| {
            let mut to_sum_exp: Vec<W> = sum_exp.get();
            let mut to_target_logit: Vec<W> = target_logit.get();
            host.local_sum_exp(
                &shape,
                &logits.get::<W>(),
                &targets.values(),
                &max.get::<W>(),
                &mut to_sum_exp,
                &mut to_target_logit,
            );
            sum_exp.put(&to_sum_exp);
            target_logit.put(&to_target_logit);
        });
    }

    fn rescale_sum_exp(
        &self,
        local_max: Wide<'_, Self>,
        max: Wide<'_, Self>,
        sum_exp: WideMut<'_, Self>,
    ) {
        let (local_max, max, sum_exp) = (of(local_max), of(max), into(sum_exp));
        self.run(move |host| {
            let mut to_sum_exp: Vec<W> = sum_exp.get();
            host.rescale_sum_exp(&local_max.get::<W>(), &max.get::<W>(), &mut to_sum_exp);
            sum_exp.put(&to_sum_exp);
        });
    }

    fn fill_normal(&self, to: WideMut<'_, Self>, view: &Numbered, stream: Draws, std: f64) {
        let (to, view) = (into(to), *view);
        self.run(move |host| {
            let mut values: Vec<W> = to.get();
            host.fill_normal(&mut values, &view, stream, std);
            to.put(&values);
        });
    }

    fn divide(&self, by: Wide<'_, Self>, x: WideMut<'_, Self>) {
        let (by, x) = (of(by), into(x));
        self.run(move |host| {
            let mut to_x: Vec<W> = x.get();
            host.divide(&by.get::<W>(), &mut to_x);
            x.put(&to_x);
        });
    }

    fn attention_backward(
        &self,
        attention: &Attention,
        saved: Saved<'_, Self>,
        dout: Stored<'_, Self>,
        gradients: Gradients<'_, Self>,
    ) {
        let attention = *attention;
        let (q, k, v, out) = (of(saved.q), of(saved.k), of(saved.v), of(saved.out));
        let (lse, dout) = (of(saved.lse), of(dout));
        let (dq, dk, dv) = (into(gradients.dq), into(gradients.dk), into(gradients.dv));
        self.run(move |host| {
            let [q, k, v, out]: [Vec<W>; 4] = [q.get(), k.get(), v.get(), out.get()];
            let [mut to_q, mut to_k, mut to_v]: [Vec<W>; 3] = [dq.get(), dk.get(), dv.get()];
            let lse: Vec<W> = lse.get();
            let saved = Saved { q: &q[..], k: &k[..], v: &v[..], out: &out[..], lse: &lse[..] };
            let gradients = Gradients { dq: &mut to_q[..], dk: &mut to_k[..], dv: &mut to_v[..] };
            host.attention_backward(&attention, saved, &dout.get::<W>(), gradients);
            dq.put(&to_q);
            dk.put(&to_k);
            dv.put(&to_v);
        });
    }

    fn loss(
        &self,
        targets: Ids<'_, Self>,
        sums: RowSums<'_, Self>,
        target_logit: Wide<'_, Self>,
        loss: WideMut<'_, Self>,
    ) {
        let (targets, max, sum_exp) = (of(targets), of(sums.max), of(sums.sum_exp));
        let (target_logit, loss) = (of(target_logit), into(loss));
        self.run(move |host| {
            let (max, sum_exp): (Vec<W>, Vec<W>) = (max.get(), sum_exp.get());
            let mut to: Vec<W> = loss.get();
            let sums = RowSums { max: &max[..], sum_exp: &sum_exp[..] };
            host.loss(&targets.values(), sums, &target_logit.get::<W>(), &mut to);
            loss.put(&to);
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
        let (shape, logits, targets) = (*shape, into(logits), of(targets));
        let (max, sum_exp) = (of(sums.max), of(sums.sum_exp));
        self.run(move |host| {
            let (max, sum_exp): (Vec<W>, Vec<W>) = (max.get(), sum_exp.get());
            let mut to: Vec<W> = logits.get();
            let sums = RowSums { max: &max[..], sum_exp: &sum_exp[..] };
            host.cross_entropy_gradient(&shape, &mut to, &targets.values(), sums, scale);
            logits.put(&to);
        });
    }

    fn scale_by_slope(
        &self,
        soft_cap: Option<f64>,
        target_logit: Wide<'_, Self>,
        rows: StoredMut<'_, Self>,
    ) {
        let (target_logit, rows) = (of(target_logit), into(rows));
        self.run(move |host| {
            let mut to: Vec<W> = rows.get();
            host.scale_by_slope(soft_cap, &target_logit.get::<W>(), &mut to);
            rows.put(&to);
        });
    }

    fn softmax_to_gradient(
        &self,
        shape: &Logits,
        softmax: StoredMut<'_, Self>,
        targets: Ids<'_, Self>,
        factor: Wide<'_, Self>,
        target_logit: Wide<'_, Self>,
        scale: f64,
    ) {
        let (shape, softmax, targets) = (*shape, into(softmax), of(targets));
        let (factor, target_logit) = (of(factor), of(target_logit));
        self.run(move |host| {
            let mut to: Vec<W> = softmax.get();
            let (factor, target): (Vec<W>, Vec<W>) = (factor.get(), target_logit.get());
            host.softmax_to_gradient(&shape, &mut to, &targets.values(), &factor, &target, scale);
            softmax.put(&to);
        });
    }

    fn join_gradient(
        &self,
        weighted: StoredMut<'_, Self>,
        hits: Stored<'_, Self>,
        factor: Wide<'_, Self>,
        scale: f64,
    ) {
        let (weighted, hits, factor) = (into(weighted), of(hits), of(factor));
        self.run(move |host| {
            let mut to: Vec<W> = weighted.get();
            host.join_gradient(&mut to, &hits.get::<W>(), &factor.get::<W>(), scale);
            weighted.put(&to);
        });
    }

    fn add_sum(&self, x: Wide<'_, Self>, total: &mut Arc<Mutex<f64>>) {
        let (x, total) = (of(x), total.clone());
        self.run(move |host| host.add_sum(&x.get::<W>(), &mut total.lock().unwrap()));
    }

    fn add_squares(&self, x: Wide<'_, Self>, total: &mut Arc<Mutex<f64>>) {
        let (x, total) = (of(x), total.clone());
        self.run(move |host| host.add_squares(&x.get::<W>(), &mut total.lock().unwrap()));
    }

    fn adamw(&self, adamw: &AdamW, parameters: Vec<Parameter<'_, Self>>) {
        for Parameter { w, g, m, v, decay } in parameters {
            let (adamw, g, m, v) = (*adamw, of(g), into(m), into(v));
            let (exact, read) = match w {
                Target::Read(read) => (None, Some(into(read))),
                Target::Exact(exact) => (Some(into(exact)), None),
                Target::Both(exact, read) => (Some(into(exact)), Some(into(read))),
            };
            self.run(move |host| {
                let mut to: Vec<W> = match (&exact, &read) {
                    (Some(exact), _) => exact.get(),
                    (None, Some(read)) => read.get(),
                    (None, None) => Vec::new(),
                };
                let [g, mut to_m, mut to_v]: [Vec<W>; 3] = [g.get(), m.get(), v.get()];
                let w = Target::Read(&mut to[..]);
                let parameter =
                    Parameter { w, g: &g[..], m: &mut to_m[..], v: &mut to_v[..], decay };
                host.adamw(&adamw, vec![parameter]);
                m.put(&to_m);
                v.put(&to_v);
                exact.iter().for_each(|exact| exact.put(&to));
                read.iter().for_each(|read| read.put(&to));
            });
        }
    }

    fn adamw_proposal(&self, adamw: &AdamW, parameters: Vec<Proposal<'_, Self>>) {
        for Proposal { to, w, g, m, v, decay } in parameters {
            let (adamw, read) = (*adamw, into(to));
            let (w, g, m, v) = (of(w), of(g), of(m), of(v));
            self.run(move |host| {
                let mut to: Vec<W> = read.get();
                let [w, g, m, v]: [Vec<W>; 4] = [w.get(), g.get(), m.get(), v.get()];
                let proposal =
                    Proposal { to: &mut to[..], w: &w[..], g: &g[..], m: &m[..], v: &v[..], decay };
                host.adamw_proposal(&adamw, vec![proposal]);
                read.put(&to);
            });
        }
    }
}
