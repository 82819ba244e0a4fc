//! Records a step on the device once and replays it, instead of launching the same kernels again
//! and again.
//!
//! The recording spans everything from zeroing the gradients to the sums of losses and of squared
//! gradients. What changes from step to step lies in memory at fixed addresses: tokens and labels,
//! which are uploaded beforehand, and [`crate::device::StepNumbers`]. After a replay the host reads
//! both sums, as after a launched step, and launches the update, whose arguments depend on them.

use crate::comm::{CommError, Traffic, since};
use crate::device::{Device, DeviceError, Space};
use crate::error::Error;
use crate::groups::Groups;
use crate::state::params::ByDivision;
use crate::step::executor::Outcome;
use crate::step::reduce::ReductionSpan;
use serde::Serialize;

/// Steps launched before one is recorded. By then kernels are compiled, matrix-product algorithms
/// chosen, memory allocated and ranks connected.
const WARM_UP: u64 = 2;

/// How many steps were replayed, or why none was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Replays {
    /// Number of steps replayed.
    pub replayed_steps: u64,
    /// Why every step was launched kernel by kernel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why_not: Option<String>,
}

/// What the passes of a step leave: their outcome on the host, their sums on the device.
pub(crate) struct LaunchedStep<D: Space> {
    pub outcome: Outcome,
    /// Sum of this rank's losses.
    pub loss: D::Total,
    /// Sums of squares of the gradients that this rank counts towards the norm.
    pub squares: Squares<D>,
    pub reductions: Vec<ReductionSpan>,
}

/// Sums of squares on the device.
pub(crate) type Squares<D> = ByDivision<<D as Space>::Total>;

/// One rank's recorded step, if there is one.
pub(crate) struct GraphReplay<D: Space> {
    // Field order matters: the recording is dropped before the memory that it writes.
    recording: Option<D::Recording>,
    done: Option<LaunchedStep<D>>,
    /// Traffic of one replayed step.
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

    /// Replays later steps, unless `why_not` gives a reason against it.
    pub fn set(&mut self, why_not: Option<&'static str>) {
        self.why_not = why_not;
    }

    pub fn replays(&self) -> Replays {
        let few = "steps are replayed from the third on";
        let none = self.why_not.or((self.replayed == 0).then_some(few));
        Replays { replayed_steps: self.replayed, why_not: none.map(str::to_owned) }
    }

    /// Launches a step, whatever was recorded, and forgets the recording.
    pub fn launch(
        &mut self,
        launch: impl FnOnce() -> Result<LaunchedStep<D>, Error>,
    ) -> Result<&LaunchedStep<D>, Error> {
        self.recording = None;
        self.launched += 1;
        Ok(self.done.insert(launch()?))
    }

    /// Runs a step that `launch` would launch: launches, records or replays it.
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
            // For the first replay, recording has already counted the traffic.
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
        // Recording must end even if launching failed.
        let recording = device.finish_recording().map_err(failed);
        self.done = Some(done?);
        self.recording = Some(recording?);
        self.sent = since(&before, &groups.world.stats().traffic());
        Ok(())
    }
}
