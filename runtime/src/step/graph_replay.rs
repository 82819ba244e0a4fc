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
use std::time::Instant;

/// When steps are replayed as a CUDA graph.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum CudaGraphs {
    /// Where the host takes long to launch a step
    #[default]
    Auto,
    /// Wherever a step can be recorded
    Always,
    /// Nowhere
    Never,
}

/// Share of a step's time that the host may take to launch it. Below, a replay saves nothing: the
/// host is far ahead of the GPU, which runs the same kernels either way.
const LAUNCH_SHARE: f64 = 0.5;

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
    /// Whether it still has to be seen if the host takes long.
    undecided: bool,
    /// Seconds that the host took to launch the last step.
    launch_s: f64,
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
            undecided: false,
            launch_s: 0.0,
            launched: 0,
            replayed: 0,
        }
    }

    /// Replays later steps, unless `why_not` gives a reason against it.
    pub fn set(&mut self, when: CudaGraphs, why_not: Option<&'static str>) {
        let never = (when == CudaGraphs::Never).then_some("--cuda-graphs never");
        self.why_not = never.or(why_not);
        self.undecided = self.why_not.is_none() && when == CudaGraphs::Auto;
    }

    /// Share of a step of `step_s` that the host took to launch it, once, after the last step
    /// before one would be recorded: for all ranks to agree on the largest.
    pub fn launch_share(&self, step_s: f64) -> Option<f64> {
        (self.undecided && self.launched == WARM_UP).then_some(self.launch_s / step_s)
    }

    /// Decides by the largest share of all ranks.
    pub fn decide(&mut self, launch_share: f64) {
        self.undecided = false;
        if launch_share < LAUNCH_SHARE {
            self.why_not = Some("the host launches a step in less than half its time");
        }
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
        let begin = Instant::now();
        let done = launch()?;
        self.launch_s = begin.elapsed().as_secs_f64();
        Ok(self.done.insert(done))
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
            let valid = "without this, steps run one by one: --cuda-graphs never";
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Host;
    use crate::step::executor::Outcome;
    use std::time::Duration;

    fn launched(host_s: f64) -> GraphReplay<Host<f32>> {
        let mut replay = GraphReplay::new();
        replay.set(CudaGraphs::Auto, None);
        for _ in 0..WARM_UP {
            assert_eq!(replay.launch_share(1.0), None, "not before the last step");
            let step = || {
                std::thread::sleep(Duration::from_secs_f64(host_s));
                let squares = ByDivision::each(|_| 0.0);
                Ok(LaunchedStep {
                    outcome: Outcome::default(),
                    loss: 0.0,
                    squares,
                    reductions: vec![],
                })
            };
            replay.launch(step).unwrap();
        }
        replay
    }

    #[test]
    fn steps_are_replayed_where_the_host_is_slow() {
        let mut slow = launched(0.02);
        let share = slow.launch_share(0.021).unwrap();
        slow.decide(share);
        assert_eq!(slow.why_not, None);
        assert_eq!(slow.launch_share(0.021), None, "decided once");
        let mut fast = launched(0.0);
        let share = fast.launch_share(0.5).unwrap();
        fast.decide(share);
        assert_eq!(fast.why_not, Some("the host launches a step in less than half its time"));
        let mut never = GraphReplay::<Host<f32>>::new();
        never.set(CudaGraphs::Never, None);
        assert_eq!(never.replays().why_not.unwrap(), "--cuda-graphs never");
    }
}
