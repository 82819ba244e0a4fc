//! TCP as a wire, for processes started by any launcher. They meet at an address that all are
//! given, or through a file that all can read.
//!
//! Each pair of ranks has one connection, which suits hundreds of processes, not thousands. While
//! ranks meet, each listens at the given address or at the one by which it reaches rank 0, and
//! admits connections that prove the run's key. Once all have met, nobody listens any more.

mod handshake;
mod listener;
mod rendezvous;

pub use handshake::Key;

use super::wire::{Wire, WireComm, gone};
use super::{Communicator, Options};
use handshake::{Deadline, is_timeout};
use std::fmt::{self, Display};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use thiserror::Error;

/// Where processes meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rendezvous {
    /// At `host:port`, where rank 0 listens.
    Address(String),
    /// In a file that all can read. Rank 0 writes its address there, and a random key if none is
    /// given.
    File(PathBuf),
}

impl Rendezvous {
    /// Parses `host:port`, or the path of a file.
    pub fn parse(text: &str) -> Self {
        let address = text.rsplit_once(':').filter(|(host, _)| !host.contains('/'));
        match address.and_then(|(_, port)| port.parse::<u16>().ok()) {
            Some(_) => Self::Address(text.to_owned()),
            None => Self::File(PathBuf::from(text)),
        }
    }
}

impl Display for Rendezvous {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => f.write_str(address),
            Self::File(path) => write!(f, "the address in {}", path.display()),
        }
    }
}

/// One process that joins the world.
pub struct Joining<'a> {
    /// Its rank.
    pub rank: usize,
    /// Number of ranks of the world.
    pub size: usize,
    /// The secret of this run.
    pub key: Key,
    /// Whether all ranks are on this host, so that no other host need reach them.
    pub on_one_machine: bool,
    /// Whether somebody has ended the run meanwhile.
    pub interrupted: &'a (dyn Fn() -> bool + Sync),
}

impl Joining<'_> {
    /// Rank `rank` of `size` on one host, without a key, and never interrupted.
    pub fn openly(rank: usize, size: usize) -> Self {
        Self { rank, size, key: Key::default(), on_one_machine: true, interrupted: &|| false }
    }
}

/// Why processes did not meet.
#[derive(Debug, Error)]
pub enum RendezvousError {
    /// Some ranks did not come.
    #[error(
        "ranks {ranks:?} did not come to {rendezvous} within {limit_s} s: start them, or let them reach it{noticed}"
    )]
    Missing {
        /// The missing ranks.
        ranks: Vec<usize>,
        /// Where they should have come.
        rendezvous: Rendezvous,
        /// The limit, s.
        limit_s: u64,
        /// What else rank 0 noticed.
        noticed: String,
    },
    /// Rank 0 cannot be reached.
    #[error(
        "rank {rank} cannot reach rank 0 at {rendezvous} within {limit_s} s ({why}): start it, or name an address or a file \
         that all processes can reach"
    )]
    Unreachable {
        /// The rank that tried.
        rank: usize,
        /// Where it tried.
        rendezvous: Rendezvous,
        /// The limit, s.
        limit_s: u64,
        /// The system's error.
        why: String,
    },
    /// Two ranks that have both reached rank 0 do not reach each other.
    #[error(
        "rank {rank} does not reach {others} within {limit_s} s ({why}): let all processes connect to each other, at any \
         port"
    )]
    Apart {
        /// The rank that tried.
        rank: usize,
        /// The ranks that it does not reach, and their addresses.
        others: String,
        /// The limit, s.
        limit_s: u64,
        /// The system's error.
        why: String,
    },
    /// Somebody ended the run before all were there.
    #[error("interrupted before all ranks had met")]
    Interrupted,
    /// Another process claims this rank or another world, or the rendezvous is invalid.
    #[error("{0}")]
    Stranger(String),
    /// The system.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// The system's error.
        source: io::Error,
    },
}

fn io_error(what: impl Into<String>) -> impl FnOnce(io::Error) -> RendezvousError {
    let what = what.into();
    move |source| RendezvousError::Io { what, source }
}

/// No message is this long (64 GiB): a longer one is rejected as corrupt.
const MOST_FRAME_BYTES: u64 = 1 << 36;

/// The longest time limit of one write; longer ones overflow the system's clocks.
const LONGEST_WRITE: Duration = Duration::from_secs(1 << 20);

/// A connection with another rank.
struct Connection {
    stream: TcpStream,
    /// Whether the other side has ended it.
    ended: AtomicBool,
}

/// A process's connections.
pub struct TcpWire {
    rank: usize,
    /// One to each other rank.
    connections: Vec<Option<Arc<Connection>>>,
    arrived: Mutex<Receiver<(usize, Vec<u8>)>>,
    time_limit: Duration,
}

impl TcpWire {
    /// Finds the other processes and connects with each, within the time limit.
    ///
    /// # Errors
    /// Processes that do not come in time, or that belong to another run.
    pub fn meet(
        rendezvous: &Rendezvous,
        joining: &Joining<'_>,
        options: Options,
    ) -> Result<Self, RendezvousError> {
        let (begun, limit) = (Instant::now(), options.time_limit);
        let deadline = Deadline { begun, limit, interrupted: joining.interrupted };
        let (told, arrived) = channel();
        let listen = |from: usize, stream: TcpStream| connected(from, stream, options, &told);
        let met = match joining.rank {
            0 => rendezvous::gather(rendezvous, joining, &deadline, &listen),
            _ => rendezvous::report(rendezvous, joining, &deadline, &listen),
        };
        let interrupted = (joining.interrupted)();
        let connections = met.map_err(|error| match interrupted {
            true => RendezvousError::Interrupted,
            false => error,
        })?;
        let (rank, arrived) = (joining.rank, Mutex::new(arrived));
        Ok(Self { rank, connections, arrived, time_limit: options.time_limit })
    }

    /// The world, once all are connected.
    ///
    /// # Errors
    /// Those of [`TcpWire::meet`].
    pub fn world(
        rendezvous: &Rendezvous,
        joining: &Joining<'_>,
        options: Options,
    ) -> Result<Box<dyn Communicator>, RendezvousError> {
        Ok(Box::new(WireComm::new(Self::meet(rendezvous, joining, options)?, options)))
    }
}

/// Takes over a connection with a rank, and starts receiving from it.
fn connected(
    from: usize,
    stream: TcpStream,
    options: Options,
    told: &Sender<(usize, Vec<u8>)>,
) -> Result<Arc<Connection>, RendezvousError> {
    let set = stream
        .set_nodelay(true)
        .and_then(|()| stream.set_read_timeout(None))
        .and_then(|()| stream.set_write_timeout(Some(options.time_limit.min(LONGEST_WRITE))));
    set.map_err(io_error(format!("cannot talk to rank {from}")))?;
    let connection = Arc::new(Connection { stream, ended: AtomicBool::new(false) });
    let (reading, told) = (connection.clone(), told.clone());
    std::thread::spawn(move || {
        // A connection ends when its process does, in whatever way.
        while let Ok(message) = read_frame(&reading.stream) {
            if told.send((from, message)).is_err() {
                return;
            }
        }
        reading.ended.store(true, Ordering::Release);
        let _ended = told.send((from, gone()));
    });
    Ok(connection)
}

fn frame(mut stream: &TcpStream, bytes: &[u8]) -> io::Result<()> {
    stream.write_all(&(bytes.len() as u64).to_le_bytes())?;
    stream.write_all(bytes)
}

/// Memory grows with the bytes that arrive, not with the announced length.
fn read_frame(mut stream: &TcpStream) -> io::Result<Vec<u8>> {
    let mut length = [0; 8];
    stream.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    if length > MOST_FRAME_BYTES {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = Vec::new();
    if stream.take(length).read_to_end(&mut bytes)? as u64 == length {
        return Ok(bytes);
    }
    Err(io::ErrorKind::UnexpectedEof.into())
}

impl Wire for TcpWire {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.connections.len()
    }

    fn send(&self, to: usize, message: &[u8]) -> Result<(), String> {
        let Some(connection) = &self.connections[to] else { return Ok(()) };
        match frame(&connection.stream, message) {
            Err(error) if is_timeout(&error) => {
                Err(format!("rank {to} has taken nothing for {} s", self.time_limit.as_secs()))
            }
            // Whoever waits for a rank that has ended learns so from the receiving side.
            Ok(()) | Err(_) => Ok(()),
        }
    }

    fn receive(&self, patience: Duration) -> Result<Option<(usize, Vec<u8>)>, String> {
        let arrived = self.arrived.lock().unwrap_or_else(PoisonError::into_inner);
        match arrived.recv_timeout(patience) {
            Ok(message) => Ok(Some(message)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            // All have ended, and all their messages have been read.
            Err(RecvTimeoutError::Disconnected) => {
                std::thread::sleep(patience);
                Ok(None)
            }
        }
    }
}

impl Drop for TcpWire {
    fn drop(&mut self) {
        for connection in self.connections.iter().flatten() {
            // Data in flight still arrives. A connection that has ended already is no error.
            let _ended = connection.stream.shutdown(Shutdown::Write);
        }
    }
}
