//! Ranks as processes that a launcher started: how they meet, and which communicators they use.
//!
//! On CPUs they communicate over TCP, or over MPI if the trainer is built with it. On GPUs, one for
//! each process, NCCL carries device memory, and TCP or MPI everything else.

use super::agreement::agree;
use super::{Job, TrainedDtype, open_gpu, options, threads};
use crate::comm::tcp::{Joining, Key, Rendezvous, RendezvousError, TcpWire};
use crate::comm::{Communicator, NcclComm};
use crate::device::DeviceError;
use crate::error::Error;
use crate::launch::interrupt::say;
use crate::launch::launcher::{self, ProcessPlace};
use kernels::cuda;
use std::net::ToSocketAddrs;

/// The driver's variable for the number of hardware queues of a process; 32 is the most.
const CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

/// Trains as one of several processes.
pub(super) fn train<T: TrainedDtype<S>, S: Sync>(
    job: Job<'_, S>,
    place: &ProcessPlace,
) -> Result<(), Error> {
    check_world(job, place)?;
    match rendezvous(job, place)? {
        Some(rendezvous) => {
            let world = over_tcp(job, place, &rendezvous)?;
            run::<T, S>(job, place, world)
        }
        #[cfg(feature = "mpi")]
        None => over_mpi::<T, S>(job, place),
        // Without MPI there is a rendezvous, or its absence was an error.
        #[cfg(not(feature = "mpi"))]
        None => Ok(()),
    }
}

/// Connects all processes over TCP, once all have proved that they have the same token.
fn over_tcp<S>(
    job: Job<'_, S>,
    place: &ProcessPlace,
    rendezvous: &Rendezvous,
) -> Result<Box<dyn Communicator>, Error> {
    let token = std::env::var(Key::VARIABLE).ok();
    let key = token.as_deref().map_or(Ok(Key::default()), Key::new);
    let key = key.map_err(|problem| Error::World { problem })?;
    let on_one_machine = place.local_size == Some(place.world);
    if place.rank == 0 && key.is_empty() && is_open(rendezvous) {
        say(&format!(
            "warning: {} is not set: until all ranks have met, whoever reaches {rendezvous} can take a rank's place; set it to \
             the same secret for all ranks, or meet in a file",
            Key::VARIABLE
        ));
    }
    let (rank, size) = (place.rank, place.world);
    let interrupted = || job.interrupt.is_asked();
    let joining = Joining { rank, size, key, on_one_machine, interrupted: &interrupted };
    TcpWire::world(rendezvous, &joining, options(job.flags)).map_err(|error| match error {
        RendezvousError::Interrupted => Error::NotStarted,
        error => Error::World { problem: error.to_string() },
    })
}

/// Whether processes on other hosts can reach the rendezvous. A file also holds a random key.
fn is_open(rendezvous: &Rendezvous) -> bool {
    let Rendezvous::Address(address) = rendezvous else { return false };
    let mut addresses = address.to_socket_addrs().into_iter().flatten();
    addresses.any(|address| !address.ip().is_loopback())
}

/// Checks that there are as many processes as planned ranks.
fn check_world<S>(job: Job<'_, S>, place: &ProcessPlace) -> Result<(), Error> {
    let (found, planned, who) = (place.world, job.spec.world_size(), place.launcher.name());
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

/// Where the processes meet; `None` if MPI connects them.
fn rendezvous<S>(job: Job<'_, S>, place: &ProcessPlace) -> Result<Option<Rendezvous>, Error> {
    if let Some(said) = &job.flags.rendezvous {
        return Ok(Some(Rendezvous::parse(said)));
    }
    if cfg!(feature = "mpi") {
        return Ok(None);
    }
    let told = launcher::rendezvous(place.launcher, |name| std::env::var(name).ok())?;
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
    Ok(Some(Rendezvous::parse(&told)))
}

fn run<T: TrainedDtype<S>, S: Sync>(
    job: Job<'_, S>,
    place: &ProcessPlace,
    control: Box<dyn Communicator>,
) -> Result<(), Error> {
    let told = |error: Error| {
        // Otherwise the others would wait for this rank.
        control.abort(&error.to_string());
        error
    };
    agree(job, &*control).map_err(told)?;
    let gpu = open_gpu(job.spec, job.flags, T::ON_GPU, Some(place), 1).map_err(told)?;
    let gpu = gpu.as_ref();
    let share = threads(job.flags) / place.local_size.unwrap_or(place.world);
    let world = match gpu {
        Some(gpu) => on_gpus(job, gpu, control)?,
        None => control,
    };
    T::train(job, gpu, world, share.max(1))
}

/// NCCL, with `control` for everything that lies on the host.
fn on_gpus<S>(
    job: Job<'_, S>,
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
        if std::env::var_os(CONNECTIONS).is_none() {
            say(&format!(
                "warning: {CONNECTIONS} is not set: the driver puts all streams of a rank into 8 hardware queues, where \
                 one that waits for another rank holds up others; set it to 32 for all ranks, as plan launch does"
            ));
        }
    }
    let queue =
        gpu.fork().map_err(|error| crate::comm::CommError::Device(DeviceError::from(error)))?;
    Ok(Box::new(NcclComm::new(control, library, &queue, options(job.flags))?))
}

#[cfg(feature = "mpi")]
const NO_THREADS: &str = "MPI does not let several threads of a process call it; valid: an MPI with \
                          MPI_THREAD_MULTIPLE, or --rendezvous HOST:PORT|FILE";

#[cfg(feature = "mpi")]
fn over_mpi<T: TrainedDtype<S>, S: Sync>(
    job: Job<'_, S>,
    place: &ProcessPlace,
) -> Result<(), Error> {
    let wrong = |problem: String| Error::World { problem };
    let mpi = crate::comm::mpi::Mpi::start().ok_or_else(|| wrong(NO_THREADS.to_owned()))?;
    if mpi.size() != place.world {
        let (who, found, said) = (place.launcher.name(), mpi.size(), place.world);
        return Err(wrong(format!(
            "{who} started {said} processes, of which MPI sees {found}; valid: a launcher that speaks MPI, \
             such as mpirun or srun --mpi=pmix, or --rendezvous HOST:PORT|FILE"
        )));
    }
    mpi.run(options(job.flags), |control| run::<T, S>(job, place, control))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_other_machines_reach_are_open() {
        let open = |text: &str| is_open(&Rendezvous::parse(text));
        assert!(open("0.0.0.0:29500") && open("[::]:29500") && open("192.0.2.1:29500"));
        assert!(!open("127.0.0.1:29500") && !open("[::1]:29500") && !open("shared/meeting"));
    }
}
