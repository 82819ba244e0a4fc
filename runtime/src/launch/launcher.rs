//! Which launcher started this process, and its rank and world size, from environment variables.

use crate::error::Error;

/// A program that starts the processes of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// `mpirun` of Open MPI (its documentation, "Environment variables set for MPI applications").
    OpenMpi,
    /// `mpirun` of MPICH and its derivatives, or anything that speaks PMI.
    Pmi,
    /// PyTorch's `torchrun`.
    Torchrun,
    /// Slurm's `srun`. A batch script outside `srun` has `SLURM_PROCID` too, but not the step's
    /// size.
    Slurm,
    /// A Kubernetes JobSet (or indexed Job): Kubernetes sets the index, the manifest the size.
    JobSet,
}

/// The variables that a launcher sets.
struct Variables {
    launcher: Launcher,
    rank: &'static str,
    world: &'static str,
    local_size: &'static str,
    local_rank: &'static str,
}

/// Launchers in the order of lookup: one that may run inside another comes first, so that `mpirun`
/// within Slurm counts as `mpirun`. One that started several processes comes before one that
/// started one, and `torchrun` itself ([`BY_TORCHRUN`]) before all.
const KNOWN: [Variables; 5] = [
    Variables {
        launcher: Launcher::OpenMpi,
        rank: "OMPI_COMM_WORLD_RANK",
        world: "OMPI_COMM_WORLD_SIZE",
        local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    },
    Variables {
        launcher: Launcher::Pmi,
        rank: "PMI_RANK",
        world: "PMI_SIZE",
        local_size: "MPI_LOCALNRANKS",
        local_rank: "MPI_LOCALRANKID",
    },
    Variables {
        launcher: Launcher::Torchrun,
        rank: "RANK",
        world: "WORLD_SIZE",
        local_size: "LOCAL_WORLD_SIZE",
        local_rank: "LOCAL_RANK",
    },
    Variables {
        launcher: Launcher::Slurm,
        rank: "SLURM_PROCID",
        world: "SLURM_STEP_NUM_TASKS",
        local_size: "SLURM_NTASKS_PER_NODE",
        local_rank: "SLURM_LOCALID",
    },
    Variables {
        launcher: Launcher::JobSet,
        rank: "JOB_COMPLETION_INDEX",
        world: "WORLD_SIZE",
        local_size: "LOCAL_WORLD_SIZE",
        local_rank: "LOCAL_RANK",
    },
];

/// Set by `torchrun` itself. `RANK` and `WORLD_SIZE` alone others set, too.
const BY_TORCHRUN: &str = "TORCHELASTIC_RUN_ID";

/// A process's place among those that were started together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessPlace {
    /// The launcher.
    pub launcher: Launcher,
    /// This process's rank, 0-based.
    pub rank: usize,
    /// Number of processes.
    pub world: usize,
    /// Number of them on this host, if the launcher says so.
    pub local_size: Option<usize>,
    /// This process's rank on this host, if the launcher says so.
    pub local_rank: Option<usize>,
}

/// The place that environment variables give, or `None` if no launcher started this process.
/// `variable` looks a variable up.
///
/// # Errors
/// Variables of a launcher that make no sense.
pub fn discover(variable: impl Fn(&str) -> Option<String>) -> Result<Option<ProcessPlace>, Error> {
    let number = |name: &'static str| -> Result<Option<usize>, Error> {
        let Some(text) = variable(name) else { return Ok(None) };
        text.trim().parse().map(Some).map_err(|_| wrong(name, &text, "a whole number"))
    };
    let by_torchrun = variable(BY_TORCHRUN).is_some();
    let torchrun = |known: &&Variables| by_torchrun && known.launcher == Launcher::Torchrun;
    let mut of_one: Option<ProcessPlace> = None;
    for known in KNOWN.iter().filter(torchrun).chain(&KNOWN) {
        // It has its number of processes from another's variable.
        if known.launcher == Launcher::JobSet && of_one.is_some() {
            continue;
        }
        let (Some(rank), Some(world)) = (number(known.rank)?, number(known.world)?) else {
            continue;
        };
        if world == 0 {
            return Err(wrong(known.world, "0", "1 or more"));
        }
        if rank >= world {
            let valid = format!("0 to {}, since {} is {world}", world - 1, known.world);
            return Err(wrong(known.rank, &rank.to_string(), &valid));
        }
        // Slurm also writes lists here, such as `4(x2),3`, which say nothing about this host.
        let local_size = number(known.local_size).unwrap_or_default();
        if local_size == Some(0) {
            return Err(wrong(known.local_size, "0", "1 or more"));
        }
        let local_rank = number(known.local_rank)?;
        let launcher = known.launcher;
        let place = ProcessPlace { launcher, rank, world, local_size, local_rank };
        if world > 1 {
            return Ok(Some(place));
        }
        of_one.get_or_insert(place);
    }
    if of_one.is_some() {
        return Ok(of_one);
    }
    match number("WORLD_SIZE")? {
        Some(2..) => Err(Error::World {
            problem: "WORLD_SIZE is set, and nothing says which rank this is; valid: RANK, or for \
                      a JobSet JOB_COMPLETION_INDEX; or neither, for all ranks as threads of one \
                      process"
                .to_owned(),
        }),
        _ => Ok(None),
    }
}

/// Where launched processes meet, from `MASTER_ADDR` and `MASTER_PORT`. torchrun keeps a store of
/// its own at that port, so its processes meet at the next port.
///
/// # Errors
/// A port that is not a number.
pub fn rendezvous(
    launcher: Launcher,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Option<String>, Error> {
    let (Some(host), Some(text)) = (variable("MASTER_ADDR"), variable("MASTER_PORT")) else {
        return Ok(None);
    };
    let port: u16 = text.trim().parse().map_err(|_| wrong("MASTER_PORT", &text, "0 to 65535"))?;
    let port = if launcher == Launcher::Torchrun { port.saturating_add(1) } else { port };
    Ok(Some(format!("{}:{port}", host.trim())))
}

/// Set by a launcher that holds the other end of its processes' standard input, which closes
/// however the launcher ends.
const ENDS_WITH_INPUT: &str = "MESHWRIGHT_ENDS_WITH_STDIN";

/// Whether this process must end when its standard input does. Under MPI only rank 0 has the
/// launcher's standard input.
pub fn ends_with_input(
    place: Option<&ProcessPlace>,
    variable: impl Fn(&str) -> Option<String>,
) -> bool {
    let of_mpi =
        |place: &&ProcessPlace| matches!(place.launcher, Launcher::OpenMpi | Launcher::Pmi);
    let has_it = place.filter(of_mpi).is_none_or(|place| place.rank == 0);
    has_it && variable(ENDS_WITH_INPUT).is_some_and(|value| value == "1")
}

/// The GPU of a process: the number that is asked for, else the only visible GPU, else the
/// process's rank on its host.
///
/// # Errors
/// A launcher that does not say the rank on the host.
pub fn gpu_of(
    asked: Option<usize>,
    place: Option<&ProcessPlace>,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<usize, Error> {
    let sees_one = || {
        let visible = variable("CUDA_VISIBLE_DEVICES")?;
        (!visible.trim().is_empty() && !visible.contains(',')).then_some(0)
    };
    let (None, Some(place)) = (asked, place) else { return Ok(asked.unwrap_or(0)) };
    let of = sees_one().or(place.local_rank);
    of.ok_or_else(|| Error::Flag {
        flag: "gpu",
        problem: format!(
            "{} does not say which of this machine's processes this is; valid: --gpu NUMBER, or LOCAL_RANK in its \
             environment",
            place.launcher.name()
        ),
    })
}

fn wrong(name: &str, found: &str, valid: &str) -> Error {
    Error::World { problem: format!("{name} is `{found}`; valid: {valid}") }
}

impl Launcher {
    /// Name in messages.
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

    fn of(variables: &[(&str, &str)]) -> Result<Option<ProcessPlace>, String> {
        let look = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        discover(look).map_err(|error| error.to_string())
    }

    fn place(
        launcher: Launcher,
        rank: usize,
        world: usize,
        local_size: Option<usize>,
    ) -> ProcessPlace {
        ProcessPlace { launcher, rank, world, local_size, local_rank: None }
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
        let seventh =
            ProcessPlace { local_rank: Some(7), ..place(Launcher::Torchrun, 15, 16, Some(8)) };
        assert_eq!(of(&torchrun), Ok(Some(seventh)));
        let slurm =
            [("SLURM_PROCID", "5"), ("SLURM_STEP_NUM_TASKS", "8"), ("SLURM_NTASKS_PER_NODE", "4")];
        assert_eq!(of(&slurm), Ok(Some(place(Launcher::Slurm, 5, 8, Some(4)))));
        let job_set = [("JOB_COMPLETION_INDEX", "2"), ("WORLD_SIZE", "4")];
        assert_eq!(of(&job_set), Ok(Some(place(Launcher::JobSet, 2, 4, None))));
    }

    #[test]
    fn processes_meet_where_they_are_told() {
        let told = |launcher, variables: &[(&str, &str)]| {
            let look = |name: &str| {
                let known = variables.iter().find(|(known, _)| *known == name);
                known.map(|(_, value)| (*value).to_owned())
            };
            rendezvous(launcher, look).map_err(|error| error.to_string())
        };
        let both = [("MASTER_ADDR", "node0"), ("MASTER_PORT", "29500")];
        assert_eq!(told(Launcher::Torchrun, &both), Ok(Some("node0:29501".to_owned())));
        assert_eq!(told(Launcher::Slurm, &both), Ok(Some("node0:29500".to_owned())));
        assert_eq!(told(Launcher::Slurm, &both[..1]), Ok(None));
        let wrong = [("MASTER_ADDR", "node0"), ("MASTER_PORT", "http")];
        assert!(told(Launcher::Slurm, &wrong).unwrap_err().contains("MASTER_PORT is `http`"));
    }

    #[test]
    fn each_process_has_its_gpu() {
        let of = |asked, place: Option<ProcessPlace>, visible: Option<&str>| {
            gpu_of(asked, place.as_ref(), |_| visible.map(str::to_owned))
                .map_err(|error| error.to_string())
        };
        let third =
            ProcessPlace { local_rank: Some(3), ..place(Launcher::Torchrun, 11, 16, Some(8)) };
        assert_eq!(of(None, None, None), Ok(0));
        assert_eq!(of(Some(5), None, None), Ok(5));
        assert_eq!(of(None, Some(third), None), Ok(3));
        assert_eq!(of(None, Some(third), Some("0,1,2,3")), Ok(3));
        // srun --gpus-per-task=1
        assert_eq!(of(None, Some(third), Some("3")), Ok(0));
        assert_eq!(of(Some(1), Some(third), None), Ok(1));
        let text = of(None, Some(place(Launcher::JobSet, 0, 2, None)), None).unwrap_err();
        assert!(text.contains("a JobSet") && text.contains("LOCAL_RANK"), "{text}");
    }

    #[test]
    fn processes_end_with_the_input_that_is_the_launchers() {
        let told = |value: Option<&str>, place: Option<ProcessPlace>| {
            ends_with_input(place.as_ref(), |_| value.map(str::to_owned))
        };
        let of = |launcher, rank| Some(place(launcher, rank, 4, None));
        assert!(told(Some("1"), None) && told(Some("1"), of(Launcher::Torchrun, 3)));
        assert!(told(Some("1"), of(Launcher::OpenMpi, 0)));
        assert!(!told(Some("1"), of(Launcher::OpenMpi, 3)));
        assert!(!told(None, None) && !told(Some("0"), None));
    }

    #[test]
    fn nobody_launched_anything() {
        assert_eq!(of(&[]), Ok(None));
        // A batch script of Slurm, and a shell in a pod of a Job without a size.
        assert_eq!(of(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")]), Ok(None));
        assert_eq!(of(&[("JOB_COMPLETION_INDEX", "0")]), Ok(None));
        assert_eq!(of(&[("WORLD_SIZE", "1")]), Ok(None));
    }

    #[test]
    fn a_world_without_a_rank_is_refused() {
        let text = of(&[("WORLD_SIZE", "8")]).unwrap_err();
        assert!(text.contains("WORLD_SIZE is set") && text.contains("valid: RANK"), "{text}");
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
        let fewer = [both[2], both[3], ("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "16")];
        assert_eq!(of(&fewer), Ok(Some(place(Launcher::OpenMpi, 6, 8, None))));
    }

    #[test]
    fn torchrun_within_tasks_of_pmi_is_torchruns() {
        let rank = [("RANK", "9"), ("WORLD_SIZE", "16")];
        let ninth = Ok(Some(place(Launcher::Torchrun, 9, 16, None)));
        assert_eq!(of(&[&rank[..], &[("PMI_RANK", "0"), ("PMI_SIZE", "1")]].concat()), ninth);
        let tasks = [("PMI_RANK", "0"), ("PMI_SIZE", "4"), ("TORCHELASTIC_RUN_ID", "none")];
        assert_eq!(of(&[&rank[..], &tasks].concat()), ninth);
        let alone = [("RANK", "0"), ("WORLD_SIZE", "1"), ("JOB_COMPLETION_INDEX", "5")];
        assert_eq!(of(&alone), Ok(Some(place(Launcher::Torchrun, 0, 1, None))));
    }

    #[test]
    fn variables_that_make_no_sense_are_refused_by_name() {
        let text = of(&[("RANK", "first"), ("WORLD_SIZE", "8")]).unwrap_err();
        assert!(text.contains("RANK is `first`") && text.contains("a whole number"), "{text}");
        let text = of(&[("RANK", "0"), ("WORLD_SIZE", "0")]).unwrap_err();
        assert!(text.contains("WORLD_SIZE is `0`; valid: 1 or more"), "{text}");
        for [rank, world, local] in [
            ["RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"],
            ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"],
            ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS_PER_NODE"],
        ] {
            let text = of(&[(rank, "0"), (world, "2"), (local, "0")]).unwrap_err();
            assert!(text.contains(&format!("{local} is `0`; valid: 1 or more")), "{text}");
        }
        let text = of(&[("RANK", "8"), ("WORLD_SIZE", "8")]).unwrap_err();
        assert!(text.contains("RANK is `8`") && text.contains("valid: 0 to 7"), "{text}");
    }
}
