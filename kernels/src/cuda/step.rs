//! Numbers that change from step to step, in device memory, where kernels read them: an argument would be the same each
//! time that a recorded step is replayed.

use super::launch::NULL;
use super::{Argument, Gpu, GpuError, Memory};
use std::sync::Arc;

/// What launches of a step have beside their arguments; as `prelude.cu` has it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepNumbers {
    /// Added to the step of every [`crate::random::Stream`] that dropout draws from.
    pub step: u32,
    /// The scale of the loss's gradient where that is [`OF_STEP`].
    pub loss_scale: f32,
}

/// Given as the scale of a loss's gradient: that of the step's numbers, wherever they are. No number, so that nobody takes it
/// for one.
pub const OF_STEP: f64 = f64::NAN;

impl StepNumbers {
    fn words(self) -> [u32; 2] {
        [self.step, self.loss_scale.to_bits()]
    }
}

impl Gpu {
    /// The same queue with such numbers of its own, 0 and 1 so far, which queues forked from it share. Without them
    /// arguments are all there is.
    ///
    /// # Errors
    /// Where the device fails.
    pub fn with_step_numbers(&self) -> Result<Self, GpuError> {
        let none = StepNumbers { step: 0, loss_scale: 1.0 };
        let memory: Memory<u32> = self.upload(&none.words())?;
        Ok(Self { queue: self.queue.clone(), step: Some(Arc::new(memory)) })
    }

    /// Sets them, in this queue's order.
    ///
    /// # Errors
    /// Where the device fails, or this queue has none.
    pub fn set_step_numbers(&self, numbers: StepNumbers) -> Result<(), GpuError> {
        let Some(memory) = &self.step else {
            let what = "the queue has no step numbers".to_owned();
            return Err(GpuError::Call { call: "set_step_numbers", what });
        };
        let words = numbers.words();
        self.queue.driver()?.copy_in(bytemuck::cast_slice(&words), memory.view().address())
    }

    /// A scale of the loss's gradient as kernels take it: a factor, and where to find the step's or nothing.
    #[allow(clippy::cast_possible_truncation)] // a factor
    pub(crate) fn loss_factor(&self, scale: f64) -> [Argument; 2] {
        match scale.is_nan() && self.step.is_some() {
            true => [Argument::F32(1.0), self.step_numbers()],
            false => [Argument::F32(scale as f32), NULL],
        }
    }

    /// Where kernels find them.
    pub(crate) fn step_numbers(&self) -> Argument {
        self.step.as_ref().map_or(NULL, |memory| memory.view().argument())
    }
}
