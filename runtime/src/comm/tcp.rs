//! TCP as a wire: processes that any launcher starts, with nothing installed. They find each other where rank 0 says: at
//! an address that all are told, or in a file that all can read.
//!
//! Everybody connects to everybody it sends to, which suits hundreds of processes, not thousands.

use super::wire::{Wire, WireComm, gone};
use super::{Communicator, Options};
use std::collections::HashMap;
use std::fmt::{self, Display};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use thiserror::Error;

/// Where processes find each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Meeting {
    /// At `host:port`, where rank 0 listens.
    Address(String),
    /// In a file that all can read, into which rank 0 writes where it listens.
    File(PathBuf),
}

impl Meeting {
    /// `host:port`, or the path of a file.
    pub fn parse(text: &str) -> Self {
        let address = text.rsplit_once(':').filter(|(host, _)| !host.contains('/'));
        match address.and_then(|(_, port)| port.parse::<u16>().ok()) {
            Some(_) => Self::Address(text.to_owned()),
            None => Self::File(PathBuf::from(text)),
        }
    }
}

impl Display for Meeting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => f.write_str(address),
            Self::File(path) => write!(f, "the address in {}", path.display()),
        }
    }
}

/// Why processes did not find each other.
#[derive(Debug, Error)]
pub enum MeetingError {
    /// Some did not come.
    #[error(
        "ranks {ranks:?} did not come to {meeting} within {limit_s} s: start them, or let them reach it"
    )]
    Missing {
        /// Those.
        ranks: Vec<usize>,
        /// Where.
        meeting: Meeting,
        /// The limit, s.
        limit_s: u64,
    },
    /// Rank 0 is not there.
    #[error(
        "rank {rank} cannot reach rank 0 at {meeting} within {limit_s} s ({why}): start it, or name an address or a file \
         that all processes can reach"
    )]
    Unreachable {
        /// Who looked.
        rank: usize,
        /// Where.
        meeting: Meeting,
        /// The limit, s.
        limit_s: u64,
        /// What the system says.
        why: String,
    },
    /// Another process has said it is this rank, or means another world.
    #[error("{0}")]
    Stranger(String),
    /// The system.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// What it says.
        source: io::Error,
    },
}

/// Begins every connection.
const HELLO: u64 = 0x6d65_7368_7772_0001;

/// How long until one looks again for who is not there yet.
const AGAIN: Duration = Duration::from_millis(50);

/// How long a hello may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// A process's connections.
pub struct TcpWire {
    rank: usize,
    /// Where each process listens.
    peers: Vec<SocketAddr>,
    to: Mutex<HashMap<usize, TcpStream>>,
    arrived: Mutex<Receiver<Vec<u8>>>,
}

impl TcpWire {
    /// Finds the other processes: this one is `rank` of `size`.
    ///
    /// # Errors
    /// Those that are not there in time, or that are of another run.
    pub fn meet(
        meeting: &Meeting,
        rank: usize,
        size: usize,
        options: Options,
    ) -> Result<Self, MeetingError> {
        let begun = Instant::now();
        let (listener, peers) = match rank {
            0 => gather(meeting, size, options, begun)?,
            _ => report(meeting, rank, size, options, begun)?,
        };
        let (told, arrived) = channel();
        std::thread::spawn(move || listen(&listener, size, &told));
        Ok(Self { rank, peers, to: Mutex::default(), arrived: Mutex::new(arrived) })
    }

    /// The world, once all are there.
    ///
    /// # Errors
    /// As [`TcpWire::meet`].
    pub fn world(
        meeting: &Meeting,
        rank: usize,
        size: usize,
        options: Options,
    ) -> Result<Box<dyn Communicator>, MeetingError> {
        Ok(Box::new(WireComm::new(Self::meet(meeting, rank, size, options)?, options)))
    }
}

fn io_error(what: impl Into<String>) -> impl FnOnce(io::Error) -> MeetingError {
    let what = what.into();
    move |source| MeetingError::Io { what, source }
}

/// Rank 0: waits for the others, and tells everybody where all are.
fn gather(
    meeting: &Meeting,
    size: usize,
    options: Options,
    begun: Instant,
) -> Result<(TcpListener, Vec<SocketAddr>), MeetingError> {
    let port = match meeting {
        Meeting::Address(address) => {
            address.rsplit_once(':').and_then(|(_, port)| port.parse().ok())
        }
        Meeting::File(_) => None,
    };
    let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, port.unwrap_or(0)));
    let listener = TcpListener::bind(any).map_err(io_error(format!("cannot listen at {any}")))?;
    let own = listener.local_addr().map_err(io_error("cannot listen"))?;
    if let Meeting::File(path) = meeting {
        publish(path, own.port())?;
    }
    listener.set_nonblocking(true).map_err(io_error("cannot listen"))?;
    let mut there: Vec<Option<(SocketAddr, TcpStream)>> = (0..size).map(|_| None).collect();
    let missing = |there: &[Option<_>]| -> Vec<usize> {
        (1..size).filter(|&rank| there[rank].is_none()).collect()
    };
    while !missing(&there).is_empty() {
        match listener.accept() {
            Ok((stream, from)) => {
                // Whoever does not speak as we do is no process of ours.
                let Ok(Some((rank, port))) = hello(&stream, size)? else { continue };
                if rank == 0 || there[rank].is_some() {
                    let problem = format!("two processes say that they are rank {rank}");
                    return Err(MeetingError::Stranger(problem));
                }
                there[rank] = Some((SocketAddr::new(from.ip(), port), stream));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::sleep(AGAIN),
            Err(error) => return Err(io_error("cannot listen")(error)),
        }
        if begun.elapsed() > options.time_limit && !missing(&there).is_empty() {
            let (ranks, limit_s) = (missing(&there), options.time_limit.as_secs());
            return Err(MeetingError::Missing { ranks, meeting: meeting.clone(), limit_s });
        }
    }
    if let Meeting::File(path) = meeting {
        // Whoever starts anew must not find it.
        let _gone = std::fs::remove_file(path);
    }
    listener.set_nonblocking(false).map_err(io_error("cannot listen"))?;
    // Rank 0 is where each has reached it.
    let first = SocketAddr::from((Ipv4Addr::UNSPECIFIED, own.port()));
    let peers: Vec<SocketAddr> = std::iter::once(first)
        .chain(there.iter().skip(1).flatten().map(|(address, _)| *address))
        .collect();
    let list = peers.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
    for (_, mut stream) in there.into_iter().flatten() {
        frame(&mut stream, list.as_bytes()).map_err(io_error("a process has ended"))?;
    }
    Ok((listener, peers))
}

/// Other ranks: tell rank 0 where they are, and hear where all are.
fn report(
    meeting: &Meeting,
    rank: usize,
    size: usize,
    options: Options,
    begun: Instant,
) -> Result<(TcpListener, Vec<SocketAddr>), MeetingError> {
    let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
    let listener = TcpListener::bind(any).map_err(io_error("cannot listen"))?;
    let port = listener.local_addr().map_err(io_error("cannot listen"))?.port();
    loop {
        let why = match reach(meeting).and_then(|mut stream| {
            greet(&mut stream, rank, size, port)?;
            let list = String::from_utf8(read_frame(&mut stream)?).map_err(io::Error::other)?;
            Ok((stream.peer_addr()?.ip(), list))
        }) {
            Ok((first, list)) => return Ok((listener, addresses(first, &list)?)),
            Err(error) => error.to_string(),
        };
        if begun.elapsed() > options.time_limit {
            let (meeting, limit_s) = (meeting.clone(), options.time_limit.as_secs());
            return Err(MeetingError::Unreachable { rank, meeting, limit_s, why });
        }
        std::thread::sleep(AGAIN);
    }
}

/// Rank 0's connection, if it is there by now.
fn reach(meeting: &Meeting) -> io::Result<TcpStream> {
    let address = match meeting {
        Meeting::Address(address) => address.clone(),
        Meeting::File(path) => std::fs::read_to_string(path)?.trim().to_owned(),
    };
    let mut last = io::Error::new(io::ErrorKind::NotFound, format!("no host {address}"));
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, PATIENCE) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Everybody's addresses, from rank 0's list.
fn addresses(first: IpAddr, list: &str) -> Result<Vec<SocketAddr>, MeetingError> {
    let parsed: Result<Vec<SocketAddr>, _> = list.lines().map(str::parse).collect();
    let wrong = |_| MeetingError::Stranger("rank 0 tells addresses that are none".to_owned());
    let mut peers = parsed.map_err(wrong)?;
    // Rank 0 does not know its own, and those beside it may have come by a loop: they are where it is.
    let here =
        |address: &&mut SocketAddr| address.ip().is_unspecified() || address.ip().is_loopback();
    peers.iter_mut().filter(here).for_each(|address| address.set_ip(first));
    Ok(peers)
}

/// Writes where rank 0 listens, all at once.
fn publish(path: &Path, port: u16) -> Result<(), MeetingError> {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = match host.trim() {
        "" => "127.0.0.1",
        // Where the machine does not know its own name, nobody else does.
        name if (name, port).to_socket_addrs().is_err() => "127.0.0.1",
        name => name,
    };
    let part = path.with_extension("part");
    let write = || std::fs::write(&part, format!("{host}:{port}\n"));
    write()
        .and_then(|()| std::fs::rename(&part, path))
        .map_err(io_error(format!("cannot write {}", path.display())))
}

fn greet(stream: &mut TcpStream, rank: usize, size: usize, port: u16) -> io::Result<()> {
    let numbers = [HELLO, size as u64, rank as u64, u64::from(port)].map(u64::to_le_bytes);
    stream.write_all(numbers.as_flattened())
}

/// Who greets: a rank, and the port where it listens; an inner error for who is no process of ours.
#[allow(clippy::type_complexity)]
fn hello(
    mut stream: &TcpStream,
    size: usize,
) -> Result<io::Result<Option<(usize, u16)>>, MeetingError> {
    let mut bytes = [0; 32];
    let read = stream
        .set_nonblocking(false)
        .and_then(|()| stream.set_read_timeout(Some(PATIENCE)))
        .and_then(|()| stream.read_exact(&mut bytes))
        .and_then(|()| stream.set_read_timeout(None));
    if let Err(error) = read {
        return Ok(Err(error));
    }
    let numbers = bytes.as_chunks::<8>().0.iter().map(|chunk| u64::from_le_bytes(*chunk));
    let [greeting, theirs, rank, port] = numbers.collect::<Vec<_>>()[..] else {
        return Ok(Ok(None));
    };
    if greeting != HELLO {
        return Ok(Ok(None));
    }
    if theirs != size as u64 || rank >= theirs {
        let problem =
            format!("a process says that it is rank {rank} of {theirs}; this world has {size}");
        return Err(MeetingError::Stranger(problem));
    }
    Ok(Ok(u16::try_from(port).ok().map(|port| (rank as usize, port))))
}

/// Takes connections, and what comes over them.
fn listen(listener: &TcpListener, size: usize, told: &Sender<Vec<u8>>) {
    for stream in listener.incoming() {
        let Ok(mut stream) = stream else { continue };
        let Ok(Ok(Some((rank, port)))) = hello(&stream, size) else { continue };
        if port == LAST {
            return;
        }
        let told = told.clone();
        std::thread::spawn(move || {
            // A connection ends when its process does, however that ends.
            while let Ok(message) = read_frame(&mut stream) {
                if told.send(message).is_err() {
                    return;
                }
            }
            let _ended = told.send(gone(rank));
        });
    }
}

/// A port in a hello that means: no more connections are taken.
const LAST: u16 = 0;

fn frame(stream: &mut TcpStream, bytes: &[u8]) -> io::Result<()> {
    stream.write_all(&(bytes.len() as u64).to_le_bytes())?;
    stream.write_all(bytes)
}

fn read_frame(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut length = [0; 8];
    stream.read_exact(&mut length)?;
    let mut bytes = Vec::new();
    let length = u64::from_le_bytes(length);
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
        self.peers.len()
    }

    fn send(&self, to: usize, message: &[u8]) -> Result<(), String> {
        let mut streams = self.to.lock().unwrap_or_else(PoisonError::into_inner);
        let connect = || -> io::Result<TcpStream> {
            let mut stream = TcpStream::connect_timeout(&self.peers[to], PATIENCE)?;
            stream.set_nodelay(true)?;
            greet(&mut stream, self.rank, self.size(), u16::MAX)?;
            Ok(stream)
        };
        // Who has ended says so over its own connection, and whoever waits for it learns it there.
        let stream = match streams.entry(to) {
            std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::hash_map::Entry::Vacant(place) => match connect() {
                Ok(stream) => place.insert(stream),
                Err(_) => return Ok(()),
            },
        };
        let _ended = frame(stream, message);
        Ok(())
    }

    fn receive(&self, patience: Duration) -> Result<Option<Vec<u8>>, String> {
        let arrived = self.arrived.lock().unwrap_or_else(PoisonError::into_inner);
        match arrived.recv_timeout(patience) {
            Ok(message) => Ok(Some(message)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err("nobody listens any more".to_owned()),
        }
    }
}

impl Drop for TcpWire {
    fn drop(&mut self) {
        // The thread that listens is told to end, over a connection of its own.
        let own = SocketAddr::from((Ipv4Addr::LOCALHOST, self.peers[self.rank].port()));
        if let Ok(mut stream) = TcpStream::connect_timeout(&own, PATIENCE) {
            let _told = greet(&mut stream, self.rank, self.size(), LAST);
        }
    }
}
