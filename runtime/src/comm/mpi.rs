//! MPI as a wire, for processes launched by `mpirun`, Slurm or the like.

use super::wire::{Wire, WireComm};
use super::{Communicator, Options};
use mpi::Threading;
use mpi::environment::Universe;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator as _, Destination, MatchedReceiveVec, Source};
use std::time::{Duration, Instant};

/// MPI, from its initialisation to its finalisation.
pub struct Mpi {
    _universe: Universe,
}

impl Mpi {
    /// Initialises MPI with thread support; `None` if it was initialised before or has none.
    pub fn start() -> Option<Self> {
        let (universe, granted) = mpi::initialize_with_threading(Threading::Multiple)?;
        (granted == Threading::Multiple).then_some(Self { _universe: universe })
    }

    /// Number of processes.
    pub fn size(&self) -> usize {
        SimpleCommunicator::world().size() as usize
    }

    /// Runs `program` with the world. The world must end before MPI does, hence the borrow.
    pub fn run<R>(&self, options: Options, program: impl FnOnce(Box<dyn Communicator>) -> R) -> R {
        program(Box::new(WireComm::new(MpiWire, options)))
    }
}

/// The world communicator of MPI.
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
            return Err(format!(
                "a message of {} bytes; MPI takes up to 2 GiB: split tensors over more ranks (tp), \
                 or use TCP (--rendezvous)",
                message.len()
            ));
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
            // A blocking probe would keep a core busy that a rank computes on.
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}
