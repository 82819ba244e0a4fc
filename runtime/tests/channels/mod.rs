//! The backends for processes, run within one process.

#![allow(dead_code)] // each test is a program of its own and uses a part of this

use runtime::comm::tcp::{Joining, Rendezvous, TcpWire};
use runtime::comm::wire::{Wire, WireComm};
use runtime::comm::{Communicator, Options};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// A wire made of channels.
struct Channels {
    rank: usize,
    to: Vec<Sender<(usize, Vec<u8>)>>,
    from: Mutex<Receiver<(usize, Vec<u8>)>>,
}

impl Wire for Channels {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.to.len()
    }

    fn send(&self, to: usize, message: &[u8]) -> Result<(), String> {
        // Sending to a process that has ended is no error.
        let _ended = self.to[to].send((self.rank, message.to_vec()));
        Ok(())
    }

    fn receive(&self, patience: Duration) -> Result<Option<(usize, Vec<u8>)>, String> {
        match self.from.lock().unwrap().recv_timeout(patience) {
            Ok(message) => Ok(Some(message)),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Ok(None),
        }
    }
}

/// Runs `program` on `size` ranks connected by channels.
pub fn run_wired<R: Send>(
    size: usize,
    options: Options,
    program: impl Fn(Box<dyn Communicator>) -> R + Sync,
) -> Vec<R> {
    let (to, from): (Vec<_>, Vec<_>) = (0..size).map(|_| channel()).unzip();
    let program = &program;
    std::thread::scope(|scope| {
        let run = |(rank, from)| {
            let wire = Channels { rank, to: to.clone(), from: Mutex::new(from) };
            scope.spawn(move || program(Box::new(WireComm::new(wire, options))))
        };
        let threads: Vec<_> = from.into_iter().enumerate().map(run).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The same over TCP, with ranks that meet in a file.
pub fn run_over_tcp<R: Send>(
    size: usize,
    options: Options,
    program: impl Fn(Box<dyn Communicator>) -> R + Sync,
) -> Vec<R> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("rendezvous-{}-{number}", std::process::id());
    let rendezvous = Rendezvous::File(Path::new(env!("CARGO_TARGET_TMPDIR")).join(name));
    let (program, rendezvous) = (&program, &rendezvous);
    std::thread::scope(|scope| {
        let run = |rank| {
            scope.spawn(move || {
                // The time limit of meeting is the test's own.
                let wire =
                    TcpWire::meet(rendezvous, &Joining::openly(rank, size), Options::default());
                let wire = wire.unwrap();
                program(Box::new(WireComm::new(wire, options)))
            })
        };
        let threads: Vec<_> = (0..size).map(run).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
