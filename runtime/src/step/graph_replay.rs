//! GraphReplay steps: recorded once on the device and replayed, where a step would launch the same work again and again.
//!
//! A recorded step is all from zeroing the gradients to the sums of losses and squares. What is other in the next step lies
//! in memory at the same addresses: tokens and labels, which are uploaded before, and [`crate::device::StepNumbers`]. The
//! host then reads both sums, as it does after a step that was launched, and asks for the update, which knows what they are.

use crate::comm::{CommError, Traffic, since};
use crate::device::{Device, DeviceError, Space};
use crate::error::Error;
use crate::groups::Groups;
use crate::step::executor::Outcome;
use crate::step::reduce::ReductionSpan;
use serde::Serialize;

/// Steps that are launched before one is recorded: kernels are compiled, products' algorithms chosen, memory taken and
/// ranks connected by then.
const WARM_UP: u64 = 2;

/// How many steps were replayed; where none was, why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Replays {
    /// Steps.
    pub replayed_steps: u64,
    /// Why they were all launched kernel by kernel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why_not: Option<String>,
}

/// What passes leave: on the host what they were, on the device what they came to.
pub(crate) struct LaunchedStep<D: Space> {
    pub outcome: Outcome,
    /// Sum of this rank's losses.
    pub loss: D::Total,
    /// Sum of squares of the gradients that this rank counts.
    pub squares: D::Total,
    pub reductions: Vec<ReductionSpan>,
}

/// A rank's steps.
pub(crate) struct GraphReplay<D: Space> {
    // In this order: what is recorded goes before the memory that it writes.
    recording: Option<D::Recording>,
    done: Option<LaunchedStep<D>>,
    /// What a replayed step sends.
    sent: Traffic,
    why_not: Option<&'static str>,
    launched: u64,
    replayed: u64,
}

impl<D: Device> GraphReplay<D> {
    pub fn new() -> Self {
        Self {
            recording: None,
            done: None,
            sent: Traffic::new(),
            why_not: Some("nobody asked for it"),
            launched: 0,
            replayed: 0,
        }
    }

    /// Replays steps from now on where they can be; `why_not` where they cannot.
    pub fn set(&mut self, why_not: Option<&'static str>) {
        self.why_not = why_not;
    }

    pub fn replays(&self) -> Replays {
        let few = "steps are replayed from the third on";
        let none = self.why_not.or((self.replayed == 0).then_some(few));
        Replays { replayed_steps: self.replayed, why_not: none.map(str::to_owned) }
    }

    /// Launches a step whatever was recorded.
    pub fn launch(
        &mut self,
        launch: impl FnOnce() -> Result<LaunchedStep<D>, Error>,
    ) -> Result<&LaunchedStep<D>, Error> {
        self.recording = None;
        self.launched += 1;
        Ok(self.done.insert(launch()?))
    }

    /// A step that `launch` asks the device for: launched, recorded or replayed.
    pub fn step(
        &mut self,
        device: &D,
        groups: &Groups,
        launch: impl FnOnce() -> Result<LaunchedStep<D>, Error>,
    ) -> Result<&LaunchedStep<D>, Error> {
        if self.why_not.is_some() || self.launched < WARM_UP {
            return self.launch(launch);
        }
        match &self.recording {
            None => self.record(device, groups, launch)?,
            // Recording has counted the first.
            Some(_) => groups.world.stats().add(&self.sent),
        }
        if let Some(recording) = &self.recording {
            device.replay(recording, &*groups.world).map_err(CommError::from)?;
            self.replayed += 1;
        }
        let nothing = || DeviceError("a step was recorded that left nothing: our bug".to_owned());
        Ok(self.done.as_ref().ok_or_else(nothing).map_err(CommError::from)?)
    }

    fn record(
        &mut self,
        device: &D,
        groups: &Groups,
        launch: impl FnOnce() -> Result<LaunchedStep<D>, Error>,
    ) -> Result<(), Error> {
        let failed = |DeviceError(what): DeviceError| {
            let valid = "without this, steps run one by one: --no-cuda-graphs";
            CommError::from(DeviceError(format!("a step cannot be recorded: {what}; {valid}")))
        };
        device.start_recording().map_err(failed)?;
        let before = groups.world.stats().traffic();
        let done = launch().and_then(|done| {
            groups.settle()?;
            Ok(done)
        });
        // Ends it, whatever came of it.
        let recording = device.finish_recording().map_err(failed);
        self.done = Some(done?);
        self.recording = Some(recording?);
        self.sent = since(&before, &groups.world.stats().traffic());
        Ok(())
    }
}
