//! The listener of a rank while ranks meet. It serves all connections side by side, so that a
//! silent one does not hold up others, and admits only ranks with the run's key.

use super::handshake::{Deadline, HELLO_BYTES, Hello, Key, PATIENCE, challenge, nonce, prove};
use super::{RendezvousError, io_error};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// How often the listener is polled.
const LOOK_EVERY: Duration = Duration::from_millis(3);

/// Most connections that may be pending; the oldest makes room.
const MOST_PENDING: usize = 256;

/// A connection that has not yet introduced itself.
struct PendingConnection {
    stream: TcpStream,
    nonce: [u8; 32],
    bytes: [u8; HELLO_BYTES],
    filled: usize,
    since: Instant,
}

/// A rank that was admitted.
pub(super) struct JoinedRank {
    pub rank: usize,
    /// Where it listens; port 0 if it does not.
    pub address: SocketAddr,
    pub stream: TcpStream,
}

/// A listener that admits only ranks of this run.
pub(super) struct RankListener {
    listener: TcpListener,
    rank: usize,
    size: usize,
    key: Key,
    pending: Vec<PendingConnection>,
    /// Address of the connection refused last, and how many were.
    pub refused: Option<(SocketAddr, usize)>,
}

impl RankListener {
    pub fn open(
        address: SocketAddr,
        rank: usize,
        size: usize,
        key: Key,
    ) -> Result<Self, RendezvousError> {
        let wrong = || io_error(format!("cannot listen at {address}"));
        let listener = TcpListener::bind(address).map_err(wrong())?;
        listener.set_nonblocking(true).map_err(wrong())?;
        Ok(Self { listener, rank, size, key, pending: Vec::new(), refused: None })
    }

    /// Its address.
    pub fn address(&self) -> Result<SocketAddr, RendezvousError> {
        self.listener.local_addr().map_err(io_error("cannot listen"))
    }

    /// Polls once; returns the ranks that were admitted.
    pub fn next(&mut self, deadline: &Deadline<'_>) -> Result<Vec<JoinedRank>, RendezvousError> {
        std::thread::sleep(LOOK_EVERY.min(deadline.left()));
        self.accept();
        let mut joined_ranks = Vec::new();
        for mut pending in std::mem::take(&mut self.pending) {
            match pending.read() {
                Ok(true) => joined_ranks.extend(self.admit(&pending)?),
                Ok(false) if pending.since.elapsed() < PATIENCE => self.pending.push(pending),
                Ok(false) | Err(_) => self.turn_away(&pending.stream),
            }
        }
        Ok(joined_ranks)
    }

    /// Accepts new connections. A failure to accept one is not an error of the run; the next poll
    /// tries again.
    fn accept(&mut self) {
        for _ in 0..MOST_PENDING {
            let Ok((stream, _)) = self.listener.accept() else { return };
            let Ok(pending) = PendingConnection::new(stream) else { continue };
            if self.pending.len() >= MOST_PENDING {
                let longest = self.pending.remove(0);
                self.turn_away(&longest.stream);
            }
            self.pending.push(pending);
        }
    }

    /// Admits a connection that has introduced itself and proved its key.
    fn admit(
        &mut self,
        pending: &PendingConnection,
    ) -> Result<Option<JoinedRank>, RendezvousError> {
        let hello = Hello::checked(&pending.bytes, &self.key, &pending.nonce);
        let Some(hello) = hello.filter(|hello| hello.to == self.rank as u64) else {
            self.turn_away(&pending.stream);
            return Ok(None);
        };
        if hello.size != self.size as u64 || hello.from >= hello.size {
            let (rank, theirs, ours) = (hello.from, hello.size, self.size);
            let problem =
                format!("a process says that it is rank {rank} of {theirs}; this world has {ours}");
            return Err(RendezvousError::Stranger(problem));
        }
        // If this fails, the rank has left and will try again.
        Ok(pending.welcome(&self.key, hello).ok())
    }

    fn turn_away(&mut self, stream: &TcpStream) {
        if let Ok(address) = stream.peer_addr() {
            self.refused = Some((address, self.refused.map_or(0, |(_, count)| count) + 1));
        }
    }
}

impl PendingConnection {
    fn new(stream: TcpStream) -> io::Result<Self> {
        let nonce = nonce()?;
        stream.set_nonblocking(true)?;
        // A new connection's buffer has room for this.
        (&stream).write_all(&challenge(&nonce))?;
        Ok(Self { stream, nonce, bytes: [0; HELLO_BYTES], filled: 0, since: Instant::now() })
    }

    /// Reads what has arrived; returns whether the hello is complete.
    fn read(&mut self) -> io::Result<bool> {
        while self.filled < HELLO_BYTES {
            match self.stream.read(&mut self.bytes[self.filled..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.filled += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    fn welcome(&self, key: &Key, hello: Hello) -> io::Result<JoinedRank> {
        let stream = self.stream.try_clone()?;
        stream.set_nonblocking(false)?;
        stream.set_write_timeout(Some(PATIENCE))?;
        prove(&stream, key, &self.nonce, &self.bytes)?;
        let port = u16::try_from(hello.port).map_err(io::Error::other)?;
        let address = SocketAddr::new(stream.peer_addr()?.ip(), port);
        Ok(JoinedRank { rank: hello.from as usize, address, stream })
    }
}
