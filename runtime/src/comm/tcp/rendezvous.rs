//! How ranks connect. Each greets rank 0, which sends all of them the addresses of all; then each
//! connects to the ranks below it. The connection with rank 0 is kept.

use super::handshake::{Deadline, Hello, Key, PATIENCE, introduce};
use super::listener::{JoinedRank, RankListener};
use super::{Connection, Joining, Rendezvous, RendezvousError, frame, io_error};
use crate::comm::host_name;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, ToSocketAddrs, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Pause between two attempts.
const AGAIN: Duration = Duration::from_millis(50);

/// The longest line of rank 0's list, in bytes: longer than an IPv6 address with scope and port.
const ADDRESS_BYTES: usize = 80;

/// Most bytes read from a rendezvous file.
const RENDEZVOUS_BYTES: u64 = 4096;

/// Connections with all other ranks, by rank.
pub(super) type Connections = Vec<Option<Arc<Connection>>>;

/// Takes over a connection with a rank.
pub(super) type Connect<'a> =
    &'a (dyn Fn(usize, TcpStream) -> Result<Arc<Connection>, RendezvousError> + Sync);

/// Rank 0: waits for the others, and sends everybody the addresses of all.
pub(super) fn gather(
    rendezvous: &Rendezvous,
    joining: &Joining<'_>,
    deadline: &Deadline<'_>,
    connect: Connect<'_>,
) -> Result<Connections, RendezvousError> {
    let (mut listener, _published) = open(rendezvous, joining)?;
    let joined_ranks = admit(&mut listener, 1..joining.size, deadline)?;
    if let Some(ranks) = missing(&joined_ranks, 1..joining.size) {
        let noticed = noticed(&listener)?;
        let (rendezvous, limit_s) = (rendezvous.clone(), deadline.limit.as_secs());
        return Err(RendezvousError::Missing { ranks, rendezvous, limit_s, noticed });
    }
    let listed: Vec<String> =
        joined_ranks.iter().flatten().map(|joined| joined.address.to_string()).collect();
    let listed = listed.join("\n");
    let greet = |joined: Option<JoinedRank>| {
        let Some(JoinedRank { rank, stream, .. }) = joined else { return Ok(None) };
        frame(&stream, listed.as_bytes()).map_err(io_error(format!("rank {rank} has ended")))?;
        connect(rank, stream).map(Some)
    };
    joined_ranks.into_iter().map(greet).collect()
}

/// Admits ranks until all of `expected` have come or the time is over; returns them by rank.
fn admit(
    listener: &mut RankListener,
    expected: std::ops::Range<usize>,
    deadline: &Deadline<'_>,
) -> Result<Vec<Option<JoinedRank>>, RendezvousError> {
    let mut joined_ranks: Vec<Option<JoinedRank>> = (0..expected.end).map(|_| None).collect();
    while missing(&joined_ranks, expected.clone()).is_some() && !deadline.is_over() {
        for joined in listener.next(deadline)? {
            let rank = joined.rank;
            let before = joined_ranks[rank].replace(joined);
            // A rank whose connection broke may come again.
            if !expected.contains(&rank) || before.is_some_and(|before| is_there(&before.stream)) {
                let problem = format!("two processes say that they are rank {rank}");
                return Err(RendezvousError::Stranger(problem));
            }
        }
    }
    Ok(joined_ranks)
}

fn missing(
    joined_ranks: &[Option<JoinedRank>],
    expected: std::ops::Range<usize>,
) -> Option<Vec<usize>> {
    let missing: Vec<usize> = expected.filter(|&rank| joined_ranks[rank].is_none()).collect();
    (!missing.is_empty()).then_some(missing)
}

/// Whether the other side is still connected.
fn is_there(stream: &TcpStream) -> bool {
    let looked = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut [0]));
    matches!(looked, Ok(1)) || looked.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
}

/// What may explain missing ranks.
fn noticed(listener: &RankListener) -> Result<String, RendezvousError> {
    let (address, mut text) = (listener.address()?, String::new());
    if address.ip().is_loopback() {
        text += &format!("; rank 0 listens at {address}, which only this machine reaches");
    }
    if let Some((last, count)) = listener.refused {
        text += &format!(
            "; {count} connections were turned away, the last from {last}: ranks need the same {} everywhere",
            Key::VARIABLE
        );
    }
    Ok(text)
}

/// Opens rank 0's listener at the rendezvous, or anywhere if its address goes into a file.
fn open(
    rendezvous: &Rendezvous,
    joining: &Joining<'_>,
) -> Result<(RankListener, Option<Published>), RendezvousError> {
    let at = |addresses: Vec<SocketAddr>, key: &Key| {
        let mut last = RendezvousError::Stranger(format!("{rendezvous} is no address"));
        for address in addresses {
            match RankListener::open(address, joining.rank, joining.size, key.clone()) {
                Ok(listener) => return Ok(listener),
                Err(error) => last = error,
            }
        }
        Err(last)
    };
    match rendezvous {
        Rendezvous::Address(text) => {
            let addresses: Vec<SocketAddr> = text
                .to_socket_addrs()
                .map_err(io_error(format!("rank 0 does not find the address {text}")))?
                .collect();
            if addresses.iter().any(|address| address.port() == 0) {
                let problem = format!("rank 0 cannot be found at {text}; valid: a port from 1 up");
                return Err(RendezvousError::Stranger(problem));
            }
            let elsewhere = |error| match error {
                RendezvousError::Io { what, source }
                    if source.kind() == io::ErrorKind::AddrNotAvailable =>
                {
                    let what = format!(
                        "{what}; valid: an address of rank 0's machine, or for rank 0 alone 0.0.0.0, which is all of them"
                    );
                    RendezvousError::Io { what, source }
                }
                error => error,
            };
            Ok((at(addresses, &joining.key).map_err(elsewhere)?, None))
        }
        Rendezvous::File(path) => {
            let written = io_error(format!("cannot write {}", path.display()));
            let (key, token) = match joining.key.is_empty() {
                false => (joining.key.clone(), String::new()),
                true => {
                    let token = Key::random_token().map_err(io_error("no random numbers"))?;
                    (Key::new(&token).map_err(RendezvousError::Stranger)?, token)
                }
            };
            let listener = at(own_addresses(joining.on_one_machine), &key)?;
            let text = format!("{} {token}\n", listener.address()?);
            Ok((listener, Some(Published::new(path, &text).map_err(written)?)))
        }
    }
}

/// Addresses at which other ranks may reach this host, likeliest first: loopback if all are on it,
/// else those of its name, else that of its outgoing route.
fn own_addresses(on_one_machine: bool) -> Vec<SocketAddr> {
    let loopback = IpAddr::from(Ipv4Addr::LOCALHOST);
    let mut all: Vec<IpAddr> = Vec::new();
    if !on_one_machine {
        let named = (host_name().as_str(), 0).to_socket_addrs().into_iter().flatten();
        all.extend(named.map(|address| address.ip()).filter(|ip| !ip.is_loopback()));
        all.extend(way_out().ok().filter(|ip| !ip.is_unspecified()));
    }
    all.push(loopback);
    all.into_iter().map(|ip| SocketAddr::new(ip, 0)).collect()
}

/// This host's address on its route to others. Nothing is sent: the system only looks up the route
/// to an address reserved for documentation (RFC 5737).
fn way_out() -> io::Result<IpAddr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9))?;
    Ok(socket.local_addr()?.ip())
}

/// The rendezvous file. It is removed when dropped, so that a later run does not find it.
struct Published(PathBuf);

impl Published {
    /// Writes the file atomically, readable for this user alone.
    fn new(path: &Path, text: &str) -> io::Result<Self> {
        let name = path.file_name().ok_or(io::ErrorKind::InvalidFilename)?.to_string_lossy();
        let part = path.with_file_name(format!("{name}.{}.part", std::process::id()));
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let written = options.open(&part).and_then(|mut file| file.write_all(text.as_bytes()));
        written.and_then(|()| std::fs::rename(&part, path)).inspect_err(|_| {
            let _never_made = std::fs::remove_file(&part);
        })?;
        Ok(Self(path.to_owned()))
    }
}

impl Drop for Published {
    fn drop(&mut self) {
        let _gone = std::fs::remove_file(&self.0);
    }
}

/// Other ranks: report to rank 0, receive the addresses of all, and connect with them.
pub(super) fn report(
    rendezvous: &Rendezvous,
    joining: &Joining<'_>,
    deadline: &Deadline<'_>,
    connect: Connect<'_>,
) -> Result<Connections, RendezvousError> {
    let mut why: Option<String> = None;
    loop {
        let met = greet(rendezvous, joining, deadline)
            .map_err(Unmet::Again)
            .and_then(|greeted| greeted.join(joining, deadline, connect));
        let error = match met {
            Ok(connections) => return Ok(connections),
            Err(Unmet::Never(error)) => return Err(error),
            Err(Unmet::Again(error)) => error,
        };
        // An answer tells more than a timeout or a refused connection: the error reports the last
        // answer.
        let says_little = deadline.is_over() || error.kind() == io::ErrorKind::ConnectionRefused;
        if why.is_none() || !says_little {
            why = Some(error.to_string());
        }
        if deadline.is_over() {
            let (rank, rendezvous, why) =
                (joining.rank, rendezvous.clone(), why.unwrap_or_default());
            let limit_s = deadline.limit.as_secs();
            return Err(RendezvousError::Unreachable { rank, rendezvous, limit_s, why });
        }
        std::thread::sleep(AGAIN.min(deadline.left()));
    }
}

/// Why an attempt failed.
enum Unmet {
    /// Rank 0 may come yet.
    Again(io::Error),
    /// Another attempt is of no use.
    Never(RendezvousError),
}

/// A rank that has greeted rank 0.
struct Greeted {
    first: TcpStream,
    listener: Option<RankListener>,
    key: Key,
}

/// Reports to rank 0 where this rank listens, if rank 0 is there yet.
fn greet(
    rendezvous: &Rendezvous,
    joining: &Joining<'_>,
    deadline: &Deadline<'_>,
) -> io::Result<Greeted> {
    let (addresses, key) = place(rendezvous, &joining.key)?;
    let first = connect(&addresses, deadline)?;
    // Whoever reaches rank 0 by the same interface reaches this rank here.
    let own = SocketAddr::new(first.local_addr()?.ip(), 0);
    let listener = RankListener::open(own, joining.rank, joining.size, key.clone())
        .map_err(io::Error::other)?;
    let port = listener.address().map_err(io::Error::other)?.port();
    let hello = hello(joining, 0, port);
    introduce(&first, hello, &key, deadline)?;
    Ok(Greeted { first, listener: Some(listener), key })
}

fn hello(joining: &Joining<'_>, to: usize, port: u16) -> Hello {
    let [size, from, to] = [joining.size, joining.rank, to].map(|n| n as u64);
    Hello { size, from, to, port: u64::from(port) }
}

/// Rank 0's addresses, and the run's key.
fn place(rendezvous: &Rendezvous, key: &Key) -> io::Result<(Vec<SocketAddr>, Key)> {
    let (address, key) = match rendezvous {
        Rendezvous::Address(address) => (address.clone(), key.clone()),
        Rendezvous::File(path) => {
            // Reading a pipe would never end.
            if !std::fs::metadata(path)?.is_file() {
                return Err(io::Error::other(format!("{} is no file", path.display())));
            }
            let mut text = String::new();
            File::open(path)?.take(RENDEZVOUS_BYTES).read_to_string(&mut text)?;
            let mut words = text.split_whitespace();
            let address = words.next().unwrap_or_default().to_owned();
            let told = words.next().filter(|_| key.is_empty()).map(Key::new).transpose();
            (address, told.map_err(io::Error::other)?.unwrap_or_else(|| key.clone()))
        }
    };
    Ok((address.to_socket_addrs()?.collect(), key))
}

/// Connects to one of the addresses.
fn connect(addresses: &[SocketAddr], deadline: &Deadline<'_>) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "its name has no address");
    for address in addresses {
        let patience = PATIENCE.min(deadline.left()).max(Duration::from_millis(1));
        match TcpStream::connect_timeout(address, patience) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

impl Greeted {
    /// Receives rank 0's list: where each other rank listens.
    fn receive_list(&self, size: usize, deadline: &Deadline<'_>) -> Result<Vec<SocketAddr>, Unmet> {
        let wrong = |what: String| Unmet::Never(RendezvousError::Stranger(what));
        let late = |error: io::Error| match error.kind() {
            io::ErrorKind::TimedOut => Unmet::Again(io::Error::other("it waits for other ranks")),
            _ => Unmet::Again(io::Error::other("it has ended before all ranks were there")),
        };
        let mut length = [0; 8];
        deadline.read(&self.first, &mut length, deadline.limit).map_err(late)?;
        let (length, most) = (u64::from_le_bytes(length), size * ADDRESS_BYTES);
        if length > most as u64 {
            let problem = format!("rank 0 names a list of {length} bytes; valid: up to {most}");
            return Err(wrong(problem));
        }
        let mut bytes = vec![0; length as usize];
        deadline.read(&self.first, &mut bytes, deadline.limit).map_err(late)?;
        let list = String::from_utf8_lossy(&bytes);
        let (found, expected) = (list.lines().count(), size - 1);
        if found != expected {
            return Err(wrong(format!("rank 0 names {found} other ranks; valid: {expected}")));
        }
        let parsed: Result<Vec<SocketAddr>, _> = list.lines().map(str::parse).collect();
        parsed.map_err(|_| wrong("rank 0 tells addresses that are none".to_owned()))
    }

    /// Receives the list, connects to the ranks between rank 0 and this one, and admits those
    /// above. Its listener is polled all the while, so that strangers do not block it.
    fn join(
        mut self,
        joining: &Joining<'_>,
        deadline: &Deadline<'_>,
        take: Connect<'_>,
    ) -> Result<Connections, Unmet> {
        let (rank, size) = (joining.rank, joining.size);
        let mut listener = self.listener.take();
        let (failed, first) = (AtomicBool::new(false), OnceLock::<Arc<Connection>>::new());
        // If rank 0 gives up, the others end too.
        let first_ended = || first.get().is_some_and(|first| first.ended.load(Ordering::Acquire));
        let over = || (deadline.interrupted)() || failed.load(Ordering::Acquire) || first_ended();
        let watched = Deadline { interrupted: &over, ..*deadline };
        let (above, below) = std::thread::scope(|scope| {
            let above = scope.spawn(|| match &mut listener {
                Some(listener) => admit(listener, rank + 1..size, &watched),
                None => Ok(Vec::new()),
            });
            let below = self.receive_list(size, deadline).and_then(|others| {
                let stream = self.first.try_clone().map_err(Unmet::Again)?;
                let known = take(0, stream).map_err(Unmet::Never)?;
                first.get_or_init(|| known);
                self.below(&others, joining, &watched).map_err(Unmet::Never)
            });
            failed.store(below.is_err(), Ordering::Release);
            (above.join(), below)
        });
        let above = above.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked));
        if first_ended() {
            let problem = format!("rank 0 has ended before rank {rank} had met all others");
            return Err(Unmet::Never(RendezvousError::Stranger(problem)));
        }
        let (below, above) = (below?, above.map_err(Unmet::Never)?);
        let apart =
            |absent| apart(rank, format!("ranks {absent:?}"), "they do not connect", deadline);
        missing(&above, rank + 1..size)
            .map_or(Ok(()), |absent| Err(Unmet::Never(apart(absent))))?;
        let below = below.into_iter().enumerate().map(|(n, stream)| take(n + 1, stream));
        let above = above.into_iter().flatten().map(|joined| take(joined.rank, joined.stream));
        let others: Result<Vec<Arc<Connection>>, RendezvousError> = below.chain(above).collect();
        let others = others.map_err(Unmet::Never)?;
        let mut connections: Connections =
            first.into_inner().into_iter().chain(others).map(Some).collect();
        connections.insert(rank, None);
        Ok(connections)
    }

    /// Connects to the ranks between rank 0 and this one.
    fn below(
        &self,
        others: &[SocketAddr],
        joining: &Joining<'_>,
        deadline: &Deadline<'_>,
    ) -> Result<Vec<TcpStream>, RendezvousError> {
        let one = |to: usize| {
            let (hello, address) = (hello(joining, to, 0), others[to - 1]);
            let named = format!("rank {to} at {address}");
            let why = |error: io::Error| apart(joining.rank, named, &error.to_string(), deadline);
            reach(address, hello, &self.key, deadline).map_err(why)
        };
        (1..joining.rank).map(one).collect()
    }
}

fn apart(rank: usize, others: String, why: &str, deadline: &Deadline<'_>) -> RendezvousError {
    RendezvousError::Apart { rank, others, limit_s: deadline.limit.as_secs(), why: why.to_owned() }
}

/// Connects to another rank, which listens already. A rank that refuses has ended.
fn reach(
    address: SocketAddr,
    hello: Hello,
    key: &Key,
    deadline: &Deadline<'_>,
) -> io::Result<TcpStream> {
    loop {
        let reached = connect(&[address], deadline)
            .and_then(|stream| introduce(&stream, hello, key, deadline).map(|()| stream));
        match reached {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => return Err(error),
            Err(error) if deadline.is_over() => return Err(error),
            Err(_) => std::thread::sleep(AGAIN.min(deadline.left())),
            reached => return reached,
        }
    }
}
