//! Choice between our own attention kernels and a library's, measured once for each shape and pass,
//! then remembered.

use super::Attention;
use crate::cuda::fused::{Fuser, Pass, Preference, Role, Sdpa};
use crate::cuda::{Gpu, GpuError};
use std::fmt;

/// Timed runs of each, after a warm-up; the minimum counts.
const TIMED_RUNS: usize = 5;

/// Maximum workspace of a plan, in bytes: a training plan's memory estimate does not include it.
const MAX_WORKSPACE: usize = 1 << 30;

/// The pass of an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Forward,
    Backward,
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
        })
    }
}

/// Widest head, in elements, that cuDNN's kernels take on every GPU.
const MAX_HEAD_DIM: usize = 256;

impl Attention {
    /// The fused graph's description of this attention. `None` if graphs cannot express it:
    /// windows, soft caps, our own dropout, queries that see no key.
    #[must_use]
    #[allow(clippy::cast_possible_truncation)] // a factor
    pub fn sdpa(&self) -> Option<Sdpa> {
        let a = self;
        if a.window.is_some() || a.soft_cap.is_some() || a.dropout.is_some() {
            return None;
        }
        let fits = |dim: usize| dim.is_multiple_of(8) && dim <= MAX_HEAD_DIM;
        // cuDNN's kernels do not support a single query (cudnn-frontend,
        // `CompositeSDPABackwardNode::pre_validate_node`).
        if a.batch == 0 || a.q_len < 2 || a.kv_len < 2 || !fits(a.qk_dim) || !fits(a.v_dim) {
            return None;
        }
        let shift = match a.causal {
            false => None,
            true => {
                let shift = a.q_offset.checked_sub(a.kv_offset)?;
                let hides = shift + 1 < a.kv_len;
                hides.then_some(i32::try_from(shift).ok()?)
            }
        };
        let &Self { batch, q_len, kv_len, q_heads, kv_heads, qk_dim, v_dim, .. } = a;
        let scale = a.scale as f32;
        Some(Sdpa { batch, q_len, kv_len, q_heads, kv_heads, qk_dim, v_dim, scale, shift })
    }
}

/// The passes whose plans may run.
fn passes(preference: Preference, direction: Direction) -> &'static [Pass] {
    const BACKWARD: [Pass; 2] =
        [Pass::Backward { repeatable: true }, Pass::Backward { repeatable: false }];
    match (preference, direction) {
        (Preference::Own, _) => &[],
        (_, Direction::Forward) => &[Pass::Forward],
        (Preference::Repeatable, Direction::Backward) => &BACKWARD[..1],
        (Preference::Fastest, Direction::Backward) => &BACKWARD,
    }
}

/// A kernel that can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// Our own kernel.
    Own,
    /// The library's plan for a pass, by index.
    Plan(Pass, usize),
}

impl Kernel {
    /// All kernels for an attention with their names, our own first, whether or not the user allows
    /// them.
    ///
    /// # Errors
    /// If the library takes no graph of it; its message.
    pub(super) fn all(
        gpu: &Gpu,
        sdpa: Option<&Sdpa>,
        direction: Direction,
    ) -> Result<Vec<(Self, String)>, GpuError> {
        let mut all = vec![(Self::Own, "own".to_owned())];
        let (Some(fuser), Some(sdpa)) = (gpu.fuser(), sdpa) else { return Ok(all) };
        for &pass in passes(Preference::Fastest, direction) {
            for (number, plan) in fuser.plans(sdpa, pass)?.into_iter().enumerate() {
                let kernel = Self::Plan(pass, number);
                all.push((kernel, format!("{kernel} ({})", plan.name)));
            }
        }
        Ok(all)
    }
}

const PASSES: [(&str, Pass); 3] = [
    ("forward", Pass::Forward),
    ("repeatable", Pass::Backward { repeatable: true }),
    ("fastest", Pass::Backward { repeatable: false }),
];

impl Kernel {
    /// Parses the first line of a recorded choice: `own`, or a pass and a number.
    fn read(settled: &str) -> Option<Self> {
        let line = settled.lines().next()?;
        if line == "own" {
            return Some(Self::Own);
        }
        let (word, number) = line.split_once(' ')?;
        let (_, pass) = PASSES.iter().find(|(known, _)| *known == word)?;
        Some(Self::Plan(*pass, number.parse().ok()?))
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Own => f.write_str("own"),
            Self::Plan(pass, number) => {
                let word =
                    PASSES.iter().find(|(_, known)| known == pass).map_or("", |(word, _)| word);
                write!(f, "{word} {number}")
            }
        }
    }
}

/// One pass of one attention.
struct Call<'a> {
    gpu: &'a Gpu,
    fuser: &'a dyn Fuser,
    sdpa: &'a Sdpa,
    direction: Direction,
    tensors: &'a [(Role, u64)],
    own: &'a dyn Fn() -> Result<(), GpuError>,
}

/// Runs `kernel` or, without one, the fastest for this shape: `own` or one of the library's. Always
/// `own` if there is no library or it cannot take the request.
///
/// The first call for a shape runs all of them, each with the results in the same memory, and waits
/// on the host; so it must not be captured.
pub(super) fn run_fastest(
    gpu: &Gpu,
    sdpa: Option<&Sdpa>,
    direction: Direction,
    kernel: Option<Kernel>,
    own_version: u64,
    tensors: &[(Role, u64)],
    own: &dyn Fn() -> Result<(), GpuError>,
) -> Result<(), GpuError> {
    let (Some(fuser), Some(sdpa)) = (gpu.fuser(), sdpa) else { return own() };
    if tensors.iter().any(|(_, address)| !address.is_multiple_of(16)) {
        return own();
    }
    let call = Call { gpu, fuser, sdpa, direction, tensors, own };
    match kernel {
        Some(Kernel::Own) => return own(),
        Some(Kernel::Plan(pass, number)) => return call.run(pass, number),
        None => {}
    }
    let (name, preference) = (fuser.name(), fuser.preference());
    let what =
        format!("attention {direction} {sdpa:?}, {preference:?}, {name}, own {own_version:x}");
    let settled = match fuser.recall(&what).filter(|settled| Kernel::read(settled).is_some()) {
        Some(settled) => settled,
        None => fuser.settle(&what, &call.measure_all()?),
    };
    match Kernel::read(&settled) {
        Some(Kernel::Plan(pass, number)) => call.run(pass, number),
        Some(Kernel::Own) | None => own(),
    }
}

impl Call<'_> {
    /// Runs one of the library's plans, with a workspace of this queue.
    fn run(&self, pass: Pass, number: usize) -> Result<(), GpuError> {
        let plans = self.fuser.plans(self.sdpa, pass)?;
        let bytes = plans.get(number).map_or(0, |plan| plan.workspace_bytes);
        let workspace = self.gpu.memory::<u8>(bytes)?;
        let workspace = workspace.view().address();
        self.fuser.run((self.sdpa, pass, number), self.tensors, workspace)
    }

    /// The fastest kernel, then a line for each with its time or why it did not run.
    fn measure_all(&self) -> Result<String, GpuError> {
        let own_s = self.seconds(self.own)?;
        let (mut best, mut best_s) = (Kernel::Own, own_s);
        let mut lines = vec![format!("own: {own_s:e} s")];
        for &pass in passes(self.fuser.preference(), self.direction) {
            let plans = match self.fuser.plans(self.sdpa, pass) {
                Ok(plans) => plans,
                Err(error) => {
                    lines.push(format!("{pass:?}: {}", one_line(&error)));
                    continue;
                }
            };
            for (number, plan) in plans.iter().enumerate() {
                let pick = Kernel::Plan(pass, number);
                match self.time_plan(pass, number, plan.workspace_bytes) {
                    Ok(seconds) => {
                        lines.push(format!("{pick} ({}): {seconds:e} s", plan.name));
                        if seconds < best_s {
                            (best, best_s) = (pick, seconds);
                        }
                    }
                    Err(error) => {
                        lines.push(format!("{pick} ({}): {}", plan.name, one_line(&error)));
                    }
                }
            }
        }
        Ok(format!("{best}\n{}", lines.join("\n")))
    }

    /// Seconds of one of the library's plans, with a workspace that is freed at once.
    fn time_plan(&self, pass: Pass, number: usize, bytes: usize) -> Result<f64, GpuError> {
        if bytes > MAX_WORKSPACE {
            let what = format!("it needs {bytes} bytes of memory; valid: {MAX_WORKSPACE}");
            return Err(GpuError::Call { call: "attention", what });
        }
        let workspace = self.gpu.apart(bytes)?;
        let plan = (self.sdpa, pass, number);
        self.seconds(&|| self.fuser.run(plan, self.tensors, workspace.address()))
    }

    fn seconds(&self, run: &dyn Fn() -> Result<(), GpuError>) -> Result<f64, GpuError> {
        run()?;
        let mut least = f64::INFINITY;
        for _ in 0..TIMED_RUNS {
            let start = self.gpu.record()?;
            run()?;
            let end = self.gpu.record()?;
            self.gpu.synchronize()?;
            least = least.min(start.seconds_until(&end)?);
        }
        Ok(least)
    }
}

fn one_line(error: &GpuError) -> String {
    error.to_string().replace('\n', "; ")
}

#[cfg(test)]
mod tests {
    use super::{Kernel, PASSES};

    #[test]
    fn picks_are_read_as_they_are_written() {
        let plans = PASSES.map(|(_, pass)| Kernel::Plan(pass, 3));
        for pick in [Kernel::Own].into_iter().chain(plans) {
            assert_eq!(Kernel::read(&format!("{pick}\nown: 1 s")), Some(pick));
        }
        for unknown in ["", "owned", "forward", "forward x", "sideways 1"] {
            assert_eq!(Kernel::read(unknown), None, "{unknown}");
        }
    }
}
