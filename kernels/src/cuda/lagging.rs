//! The machine with queues that run later, as a GPU's do: each has a thread of its own ([`super::lane`]), which lags
//! behind the host at random. Who reads what nobody waited for reads what was there before; so events between queues, and
//! when memory may be used again, are tested with no GPU. What is recorded is kept in a [`super::tape`].

use super::Launch;
use super::driver::{Driver, Event, GpuError, Inner, Job, Point, Properties, Recording};
use super::lane::{Lane, Mark, Shared};
use super::machine::Machine;
use super::replayed::Place;
use super::tape::lock;
use crate::gemm::cuda::Product;
use std::any::Any;
use std::fmt::{self, Debug};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// One of its queues.
pub struct Lagging {
    lane: Lane,
    /// Where it records.
    place: Mutex<Option<Place>>,
}

impl Debug for Lagging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a queue of {:?} that lags", self.lane.shared.machine)
    }
}

impl Lagging {
    /// A queue of the machine that lags up to so much, now and then.
    #[must_use]
    pub fn new(machine: Machine, longest: Duration) -> Self {
        Self::on(Lane::first(machine, longest))
    }

    fn on(lane: Lane) -> Self {
        Self { lane, place: Mutex::default() }
    }

    fn shared(&self) -> &Shared {
        &self.lane.shared
    }

    /// Where it records; nothing where it does what it is asked.
    fn place(&self) -> MutexGuard<'_, Option<Place>> {
        let mut place = lock(&self.place);
        if place.as_ref().is_some_and(|place| place.tape().has_ended()) {
            *place = None;
        }
        place
    }

    /// Does it later, or records it.
    fn ask(
        &self,
        work: impl Fn(&Machine) -> Result<(), GpuError> + Send + Sync + 'static,
    ) -> Result<(), GpuError> {
        match self.place().as_mut() {
            Some(place) => place.add(Arc::new(work)),
            None => self.lane.later(work),
        }
        self.lane.health()
    }
}

impl Driver for Lagging {
    fn properties(&self) -> &Properties {
        self.shared().machine.properties()
    }

    fn allocate(&self, bytes: usize) -> Result<u64, GpuError> {
        self.shared().machine.allocate(bytes)
    }

    fn free(&self, address: u64) {
        self.shared().note(self.shared().not_while_recording("free"));
        // As `cuMemFree`, behind all queues.
        self.shared().open.wait_for_none();
        self.shared().machine.free(address);
    }

    fn copy_in(&self, from: &[u8], to: u64) -> Result<(), GpuError> {
        self.shared().not_while_recording("copy_in")?;
        let from = from.to_vec();
        self.ask(move |machine| machine.copy_in(&from, to))
    }

    fn copy_out(&self, from: u64, to: &mut [u8]) -> Result<(), GpuError> {
        self.shared().not_while_recording("copy_out")?;
        self.synchronize()?;
        self.shared().machine.copy_out(from, to)
    }

    fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), GpuError> {
        self.ask(move |machine| machine.copy(from, to, bytes))
    }

    fn fill(&self, to: u64, byte: u8, bytes: usize) -> Result<(), GpuError> {
        self.ask(move |machine| machine.fill(to, byte, bytes))
    }

    fn launch(&self, launch: &Launch) -> Result<(), GpuError> {
        let launch = launch.clone();
        self.ask(move |machine| machine.launch(&launch))
    }

    fn product(&self, product: &Product) -> Result<(), GpuError> {
        let product = *product;
        self.ask(move |machine| machine.product(&product))
    }

    fn run(&self, job: Job) -> Result<(), GpuError> {
        self.ask(move |_| {
            job();
            Ok(())
        })
    }

    fn synchronize(&self) -> Result<(), GpuError> {
        self.shared().not_while_recording("synchronize")?;
        self.lane.mark().wait()?;
        self.lane.health()
    }

    fn quiesce(&self) -> Result<(), GpuError> {
        self.shared().not_while_recording("quiesce")?;
        self.shared().open.wait_for_none();
        self.lane.health()
    }

    fn record(&self) -> Result<Event, GpuError> {
        let mark = self.place().as_ref().map(Place::mark);
        Ok(Event::new(Inner::Later(Arc::new(mark.unwrap_or_else(|| self.lane.mark())))))
    }

    fn wait(&self, event: &Event) -> Result<(), GpuError> {
        let Inner::Later(point) = &event.inner else { return Ok(()) };
        let point: &dyn Any = &**point;
        let Some(mark) = point.downcast_ref::<Mark>() else { return Ok(()) };
        let mut place = self.place();
        match (mark, place.as_mut()) {
            (Mark::Live(_), None) => {
                let mark = mark.clone();
                self.lane.later(move |_| mark.wait());
            }
            (Mark::Taped(tape, after), None) if !tape.has_ended() => {
                *place = Some(Place::new(tape.clone(), after.clone()));
            }
            (Mark::Taped(tape, after), Some(place)) if Arc::ptr_eq(tape, place.tape()) => {
                place.wait(after);
            }
            (_, Some(place)) => {
                return Err(place.tape().refuse("wait for an event from before"));
            }
            (Mark::Taped(..), None) => {
                let what = "the event is of a recording that has ended".to_owned();
                return Err(GpuError::Call { call: "wait", what });
            }
        }
        self.lane.health()
    }

    fn records(&self) -> bool {
        true
    }

    fn start_recording(&self) -> Result<(), GpuError> {
        let mut tape = lock(&self.shared().tape);
        if let Some(tape) = &*tape {
            return Err(tape.refuse("start_recording"));
        }
        let new = tape.insert(Arc::default());
        *lock(&self.place) = Some(Place::new(new.clone(), Vec::new()));
        Ok(())
    }

    fn finish_recording(&self) -> Result<Box<dyn Recording>, GpuError> {
        *lock(&self.shared().tape) = None;
        let none =
            || GpuError::Call { call: "record", what: "nothing is recorded here".to_owned() };
        let place = self.place().take().ok_or_else(none)?;
        Ok(Box::new(place.end(self.lane.clone())?))
    }

    fn fork(&self) -> Result<Arc<dyn Driver>, GpuError> {
        Ok(Arc::new(Self::on(self.lane.fork())))
    }
}
