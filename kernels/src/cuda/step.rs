//! Numbers that change from step to step, in device memory: a launch's arguments would be frozen in
//! a recorded step.

use super::launch::NULL;
use super::{Argument, Gpu, GpuError, Memory};
use std::sync::Arc;

/// What launches read beside their arguments; the same layout as in `prelude.cu`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepNumbers {
    /// Added to the step of every [`crate::random::Stream`] that dropout draws from.
    pub step: u32,
    /// Scale of the loss gradient where the argument is [`OF_STEP`].
    pub loss_scale: f32,
}

/// As the scale of a loss gradient: use the scale in the step numbers. A NaN, so that it cannot be
/// mistaken for a scale.
pub const OF_STEP: f64 = f64::NAN;

impl StepNumbers {
    fn words(self) -> [u32; 2] {
        [self.step, self.loss_scale.to_bits()]
    }
}

impl Gpu {
    /// The same queue with step numbers of its own, initially 0 and 1. Queues forked from it share
    /// them. Without step numbers, kernels use their arguments alone.
    ///
    /// # Errors
    /// If the device fails.
    pub fn with_step_numbers(&self) -> Result<Self, GpuError> {
        let none = StepNumbers { step: 0, loss_scale: 1.0 };
        let memory: Memory<u32> = self.upload(&none.words())?;
        Ok(Self { queue: self.queue.clone(), step: Some(Arc::new(memory)) })
    }

    /// Sets the step numbers, in this queue's order.
    ///
    /// # Errors
    /// If the device fails, or this queue has none.
    pub fn set_step_numbers(&self, numbers: StepNumbers) -> Result<(), GpuError> {
        let Some(memory) = &self.step else {
            let what = "the queue has no step numbers".to_owned();
            return Err(GpuError::Call { call: "set_step_numbers", what });
        };
        let words = numbers.words();
        self.queue.driver()?.copy_in(bytemuck::cast_slice(&words), memory.view().address())
    }

    /// A loss-gradient scale as kernels take it: a factor, and the address of the step numbers or
    /// null.
    #[allow(clippy::cast_possible_truncation)] // a factor
    pub(crate) fn loss_factor(&self, scale: f64) -> [Argument; 2] {
        match scale.is_nan() && self.step.is_some() {
            true => [Argument::F32(1.0), self.step_numbers()],
            false => [Argument::F32(scale as f32), NULL],
        }
    }

    /// The address of the step numbers, as an argument.
    pub(crate) fn step_numbers(&self) -> Argument {
        self.step.as_ref().map_or(NULL, |memory| memory.view().argument())
    }
}
