//! Who started this process, and as which of how many: what launchers tell in environment variables.

use crate::error::Error;

/// Who starts processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// `mpirun` of Open MPI (its documentation, "Environment variables set for MPI applications").
    OpenMpi,
    /// `mpirun` of MPICH and its kin, or anything that speaks PMI.
    Pmi,
    /// PyTorch's `torchrun`.
    Torchrun,
    /// Slurm's `srun`. A batch script outside `srun` also has `SLURM_PROCID`, but not the step's size.
    Slurm,
    /// A Kubernetes JobSet (or indexed Job): Kubernetes gives the index, the manifest the size.
    JobSet,
}

/// Which variables a launcher sets.
struct Variables {
    launcher: Launcher,
    rank: &'static str,
    world: &'static str,
    local_size: &'static str,
}

/// Launchers, those that others run inside of first: `mpirun` within Slurm is `mpirun`'s.
const KNOWN: [Variables; 5] = [
    Variables {
        launcher: Launcher::OpenMpi,
        rank: "OMPI_COMM_WORLD_RANK",
        world: "OMPI_COMM_WORLD_SIZE",
        local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    Variables {
        launcher: Launcher::Pmi,
        rank: "PMI_RANK",
        world: "PMI_SIZE",
        local_size: "MPI_LOCALNRANKS",
    },
    Variables {
        launcher: Launcher::Torchrun,
        rank: "RANK",
        world: "WORLD_SIZE",
        local_size: "LOCAL_WORLD_SIZE",
    },
    Variables {
        launcher: Launcher::Slurm,
        rank: "SLURM_PROCID",
        world: "SLURM_STEP_NUM_TASKS",
        local_size: "SLURM_NTASKS_PER_NODE",
    },
    Variables {
        launcher: Launcher::JobSet,
        rank: "JOB_COMPLETION_INDEX",
        world: "WORLD_SIZE",
        local_size: "LOCAL_WORLD_SIZE",
    },
];

/// A process's place among those that were started together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Who started them.
    pub launcher: Launcher,
    /// Which this is, 0-based.
    pub rank: usize,
    /// How many there are.
    pub world: usize,
    /// How many of them are on this machine, where the launcher says so.
    pub local_size: Option<usize>,
}

/// The place that environment variables tell; nothing where nobody launched several processes' kind of
/// program. `variable` looks one up.
///
/// # Errors
/// Variables of a launcher that make no sense.
pub fn discover(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Place>, Error> {
    let number = |name: &'static str| -> Result<Option<usize>, Error> {
        let Some(text) = variable(name) else { return Ok(None) };
        text.trim().parse().map(Some).map_err(|_| wrong(name, &text, "a whole number"))
    };
    for known in &KNOWN {
        let (Some(rank), Some(world)) = (number(known.rank)?, number(known.world)?) else {
            continue;
        };
        if rank >= world {
            let valid = format!("0 to {}, since {} is {world}", world.max(1) - 1, known.world);
            return Err(wrong(known.rank, &rank.to_string(), &valid));
        }
        let local_size = number(known.local_size).unwrap_or_default();
        return Ok(Some(Place { launcher: known.launcher, rank, world, local_size }));
    }
    Ok(None)
}

fn wrong(name: &str, found: &str, valid: &str) -> Error {
    Error::World { problem: format!("{name} is `{found}`; valid: {valid}") }
}

impl Launcher {
    /// Its name for messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::OpenMpi => "mpirun",
            Self::Pmi => "a PMI launcher",
            Self::Torchrun => "torchrun",
            Self::Slurm => "srun",
            Self::JobSet => "a JobSet",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Result<Option<Place>, String> {
        let look = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        discover(look).map_err(|error| error.to_string())
    }

    fn place(launcher: Launcher, rank: usize, world: usize, local_size: Option<usize>) -> Place {
        Place { launcher, rank, world, local_size }
    }

    #[test]
    fn each_launcher_is_known_by_its_variables() {
        let open_mpi = [
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "8"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
        ];
        assert_eq!(of(&open_mpi), Ok(Some(place(Launcher::OpenMpi, 3, 8, Some(4)))));
        let mpich = [("PMI_RANK", "1"), ("PMI_SIZE", "2")];
        assert_eq!(of(&mpich), Ok(Some(place(Launcher::Pmi, 1, 2, None))));
        let torchrun = [
            ("RANK", "15"),
            ("WORLD_SIZE", "16"),
            ("LOCAL_RANK", "7"),
            ("LOCAL_WORLD_SIZE", "8"),
            ("MASTER_ADDR", "node0"),
        ];
        assert_eq!(of(&torchrun), Ok(Some(place(Launcher::Torchrun, 15, 16, Some(8)))));
        let slurm =
            [("SLURM_PROCID", "5"), ("SLURM_STEP_NUM_TASKS", "8"), ("SLURM_NTASKS_PER_NODE", "4")];
        assert_eq!(of(&slurm), Ok(Some(place(Launcher::Slurm, 5, 8, Some(4)))));
        let job_set = [("JOB_COMPLETION_INDEX", "2"), ("WORLD_SIZE", "4")];
        assert_eq!(of(&job_set), Ok(Some(place(Launcher::JobSet, 2, 4, None))));
    }

    #[test]
    fn nobody_launched_anything() {
        assert_eq!(of(&[]), Ok(None));
        // A batch script of Slurm, and a shell in a pod of a Job that says no size.
        assert_eq!(of(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")]), Ok(None));
        assert_eq!(of(&[("JOB_COMPLETION_INDEX", "0")]), Ok(None));
        assert_eq!(of(&[("WORLD_SIZE", "8")]), Ok(None));
    }

    #[test]
    fn mpirun_within_slurm_is_mpiruns() {
        let both = [
            ("SLURM_PROCID", "0"),
            ("SLURM_STEP_NUM_TASKS", "1"),
            ("OMPI_COMM_WORLD_RANK", "6"),
            ("OMPI_COMM_WORLD_SIZE", "8"),
        ];
        assert_eq!(of(&both), Ok(Some(place(Launcher::OpenMpi, 6, 8, None))));
    }

    #[test]
    fn variables_that_make_no_sense_are_refused_by_name() {
        let text = of(&[("RANK", "first"), ("WORLD_SIZE", "8")]).unwrap_err();
        assert!(text.contains("RANK is `first`") && text.contains("a whole number"), "{text}");
        let text = of(&[("RANK", "8"), ("WORLD_SIZE", "8")]).unwrap_err();
        assert!(text.contains("RANK is `8`") && text.contains("valid: 0 to 7"), "{text}");
    }
}
