//! GPU memory in transit between ranks: with an event, and reduced in the order of ranks.

use super::memory::{Memory, Queue, ViewMut};
use crate::comm::{DeviceBuffer, Dtype, Element, NcclBuffer, Op};
use crate::device::DeviceError;
use crate::scalar::Number;
use kernels::cuda::{self, Event, GpuError};
use kernels::elementwise;
use std::any::Any;
use std::fmt::{self, Debug};
use std::ops::Range;

/// GPU memory in transit between ranks.
pub(super) struct GpuBuffer<E: Element> {
    pub memory: Memory<E>,
    pub ready: Option<Event>,
    pub giver: Queue,
}

impl<E: Element> Debug for GpuBuffer<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {} of a GPU", self.memory.len, E::DTYPE.name())
    }
}

impl<E: Element> GpuBuffer<E> {
    fn of(buffer: &dyn DeviceBuffer) -> Result<&Self, DeviceError> {
        let wrong = || DeviceError("ranks gave memory of different devices".to_owned());
        buffer.as_any().downcast_ref().ok_or_else(wrong)
    }

    /// Prepares a read of `part` on this buffer's stream.
    fn read(&self, part: &Self) {
        self.giver.wait_for(part.ready.as_ref());
        part.memory.used_on(&self.giver);
    }

    fn made(&self, memory: Memory<E>) -> Box<dyn DeviceBuffer> {
        Box::new(Self { memory, ready: self.giver.mark(), giver: self.giver.clone() })
    }
}

impl<E: Element> DeviceBuffer for GpuBuffer<E> {
    fn dtype(&self) -> Dtype {
        E::DTYPE
    }

    fn len(&self) -> usize {
        self.memory.len
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn nccl_buffer(&mut self) -> Option<&mut dyn NcclBuffer> {
        Some(self)
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }

    fn reduced(
        &self,
        everybodys: &[&dyn DeviceBuffer],
        range: Range<usize>,
        op: Op,
    ) -> Result<Box<dyn DeviceBuffer>, DeviceError> {
        let given: Vec<&Self> =
            everybodys.iter().map(|of| Self::of(*of)).collect::<Result<_, _>>()?;
        given.iter().for_each(|part| self.read(part));
        let me: &dyn Any = self;
        if let Some(me) = me.downcast_ref::<GpuBuffer<f32>>() {
            return me.combined(everybodys, range, op);
        }
        if let Some(me) = me.downcast_ref::<GpuBuffer<cuda::bf16>>() {
            return me.combined(everybodys, range, op);
        }
        Err(DeviceError(format!("a GPU reduces no {} over ranks", E::DTYPE.name())))
    }

    fn joined(
        &self,
        parts: &[(&dyn DeviceBuffer, Range<usize>)],
    ) -> Result<Box<dyn DeviceBuffer>, DeviceError> {
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

impl<S: Number + cuda::Stored> GpuBuffer<S> {
    fn combined(
        &self,
        given: &[&dyn DeviceBuffer],
        range: Range<usize>,
        op: Op,
    ) -> Result<Box<dyn DeviceBuffer>, DeviceError> {
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

/// The elementwise maximum, in the order of ranks.
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
