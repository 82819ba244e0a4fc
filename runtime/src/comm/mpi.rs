//! MPI as a wire: processes and machines, launched by `mpirun`, Slurm or the like.

use super::wire::{Wire, WireComm};
use super::{Communicator, Options};
use mpi::Threading;
use mpi::environment::Universe;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator as _, Destination, MatchedReceiveVec, Source};
use std::time::{Duration, Instant};

/// MPI, from its start to its end.
pub struct Mpi {
    _universe: Universe,
}

impl Mpi {
    /// Starts MPI with threads; `None` where it has been started before or cannot have them.
    pub fn start() -> Option<Self> {
        let (universe, granted) = mpi::initialize_with_threading(Threading::Multiple)?;
        (granted == Threading::Multiple).then_some(Self { _universe: universe })
    }

    /// Processes.
    pub fn size(&self) -> usize {
        SimpleCommunicator::world().size() as usize
    }

    /// The world. It must end before MPI does, hence the borrow in `program`.
    pub fn run<R>(&self, options: Options, program: impl FnOnce(Box<dyn Communicator>) -> R) -> R {
        program(Box::new(WireComm::new(MpiWire, options)))
    }
}

/// Every process's world communicator.
struct MpiWire;

impl Wire for MpiWire {
    fn rank(&self) -> usize {
        SimpleCommunicator::world().rank() as usize
    }

    fn size(&self) -> usize {
        SimpleCommunicator::world().size() as usize
    }

    fn send(&self, to: usize, message: &[u8]) -> Result<(), String> {
        if i32::try_from(message.len()).is_err() {
            return Err(format!("a message of {} bytes; MPI takes up to 2 GiB", message.len()));
        }
        SimpleCommunicator::world().process_at_rank(to as i32).send(message);
        Ok(())
    }

    fn receive(&self, patience: Duration) -> Result<Option<(usize, Vec<u8>)>, String> {
        let begun = Instant::now();
        let world = SimpleCommunicator::world();
        loop {
            if let Some(found) = world.any_process().immediate_matched_probe() {
                let (message, status) = found.matched_receive_vec();
                return Ok(Some((status.source_rank() as usize, message)));
            }
            if begun.elapsed() > patience {
                return Ok(None);
            }
            // Blocking in MPI would keep a core busy that a rank computes on.
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}
