//! Ranks as processes that a launcher started: how they find each other, and what connects them.
//!
//! On processors they talk over TCP, or MPI where the trainer is built with it. On GPUs, one for each process, NCCL carries
//! what lies on them, and the same TCP or MPI the rest.

use super::{Job, Trained, open_gpu, options, threads};
use crate::comm::tcp::{Meeting, TcpWire};
use crate::comm::{Communicator, NcclComm};
use crate::device::DeviceError;
use crate::error::Error;
use crate::launched::{self, Place};
use kernels::cuda;

/// Trains as one of several processes.
pub(super) fn train<T: Trained>(job: Job<'_>, place: &Place) -> Result<(), Error> {
    check_world(job, place)?;
    match meeting(job, place)? {
        Some(meeting) => {
            let options = options(job.flags);
            let world = TcpWire::world(&meeting, place.rank, place.world, options);
            let world = world.map_err(|error| Error::World { problem: error.to_string() })?;
            run::<T>(job, place, world)
        }
        #[cfg(feature = "mpi")]
        None => over_mpi::<T>(job, place),
        // Without MPI there is a meeting, or it was an error.
        #[cfg(not(feature = "mpi"))]
        None => Ok(()),
    }
}

/// As many processes as ranks.
fn check_world(job: Job<'_>, place: &Place) -> Result<(), Error> {
    let (found, planned, who) = (place.world, job.program.world_size(), place.launcher.name());
    if found == planned {
        return Ok(());
    }
    Err(Error::World {
        problem: format!(
            "{who} started {found} processes; the plan is for {planned} ranks: valid: {planned} processes, or \
             one with all ranks as its threads"
        ),
    })
}

/// Where processes find each other; nothing where MPI connects them.
fn meeting(job: Job<'_>, place: &Place) -> Result<Option<Meeting>, Error> {
    if let Some(said) = &job.flags.rendezvous {
        return Ok(Some(Meeting::parse(said)));
    }
    if cfg!(feature = "mpi") {
        return Ok(None);
    }
    let told = launched::meeting(place.launcher, |name| std::env::var(name).ok())?;
    let Some(told) = told else {
        let (who, found) = (place.launcher.name(), place.world);
        return Err(Error::World {
            problem: format!(
                "{who} started {found} processes and does not say where they find each other, and this trainer was \
                 built without MPI; valid: --rendezvous HOST:PORT, where rank 0 listens, --rendezvous FILE in a \
                 folder that all can read, or for MPI plan launch DIR --mpi -n {found}"
            ),
        });
    };
    Ok(Some(Meeting::parse(&told)))
}

fn run<T: Trained>(
    job: Job<'_>,
    place: &Place,
    control: Box<dyn Communicator>,
) -> Result<(), Error> {
    let told = |error: Error| {
        // Else the others would wait for this one.
        control.abort(&error.to_string());
        error
    };
    let gpu = open_gpu::<T>(job.program, job.flags, Some(place), 1).map_err(told)?;
    let gpu = gpu.as_ref();
    let share = threads(job.flags) / place.local_size.unwrap_or(place.world);
    let world = match gpu {
        Some(gpu) => on_gpus(job, gpu, control)?,
        None => control,
    };
    T::train(job, gpu, world, share.max(1))
}

/// NCCL beside what connects the hosts.
fn on_gpus(
    job: Job<'_>,
    gpu: &cuda::Gpu,
    control: Box<dyn Communicator>,
) -> Result<Box<dyn Communicator>, Error> {
    let library = cuda::open_nccl().map_err(|error| {
        control.abort(&error.to_string());
        Error::Flag { flag: "gpu", problem: error.to_string() }
    })?;
    if control.rank() == 0 {
        let (ranks, version) = (control.size(), library.version());
        eprintln!("{ranks} ranks on GPUs of their own ({}), {version}", gpu.properties().name);
    }
    let queue =
        gpu.fork().map_err(|error| crate::comm::CommError::Device(DeviceError::from(error)))?;
    Ok(Box::new(NcclComm::new(control, library, &queue, options(job.flags))?))
}

#[cfg(feature = "mpi")]
fn over_mpi<T: Trained>(job: Job<'_>, place: &Place) -> Result<(), Error> {
    let wrong = |problem: String| Error::World { problem };
    let mpi = crate::comm::mpi::Mpi::start()
        .ok_or_else(|| wrong("MPI does not start with several threads a process".to_owned()))?;
    if mpi.size() != place.world {
        let (who, found, said) = (place.launcher.name(), mpi.size(), place.world);
        return Err(wrong(format!(
            "{who} started {said} processes, of which MPI sees {found}; valid: a launcher that speaks MPI, \
             such as mpirun or srun --mpi=pmix, or --rendezvous HOST:PORT|FILE"
        )));
    }
    mpi.run(options(job.flags), |control| run::<T>(job, place, control))
}
